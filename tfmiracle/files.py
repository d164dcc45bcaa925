"""Files and folders: checked before hours are spent, written so that no part shows."""

import os
import pathlib
import uuid


def check_output(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Checks that `path` can be written, before hours are spent on its content.

    Raises:
      FileExistsError: if `path` exists and `overwrite` is false.
      FileNotFoundError: if its folder does not exist.
      NotADirectoryError: if what should be its folder is a file.
      IsADirectoryError: if it is a folder, as an empty name is.
      PermissionError: if its folder cannot be written to.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file.")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no regular file; it is not overwritten.")
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(
            f"{path} exists. Choose another name, or allow overwriting (`overwrite`)."
        )
    check_folder(path.parent)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} does not exist; create it.")


def beside(path: str | os.PathLike, suffix: str) -> pathlib.Path:
    """The name of what goes with a `.miracle` file: `suffix` instead of its own.

    A name that ends otherwise is kept whole, since `net-0.1` and `net-0.2` are two.
    """
    path = pathlib.Path(path)
    return path.parent / (path.name.removesuffix(".miracle") + suffix)


def check_folder(path: str | os.PathLike) -> None:
    """Checks that `path` is, or can become, a folder to write to.

    Raises:
      NotADirectoryError: if it, or what it is in, is a file.
      PermissionError: if it cannot be written to or made.
    """
    path = pathlib.Path(path)
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not there.is_dir():
        raise NotADirectoryError(
            f"{there} is no folder: the folder {path} does not exist and cannot be "
            "made. Choose another one."
        )
    if not os.access(there, os.W_OK):
        raise PermissionError(f"The folder {there} cannot be written to.")


def write_atomically(
    path: str | os.PathLike, data: bytes, overwrite: bool = False
) -> None:
    """Writes `data` so that `path` never shows a part of it.

    Raises:
      FileExistsError, FileNotFoundError, ...: see `check_output`.
    """
    check_output(path, overwrite)
    path = pathlib.Path(path)
    temporary = path.with_name(f".miracle-{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
