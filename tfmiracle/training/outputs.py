"""The files of a run: where they are made, and where they will be."""

import os
import pathlib

from tfmiracle import files


class Outputs:
    """A `.miracle` file and what is wanted beside it; with a `workdir` made in there.

    Args:
      path, workdir, keep_posterior, record, overwrite: see `compress`.

    Attributes:
      file, posterior, record: where each is made, None for one that is not wanted.
      replaces: whether what is there may be replaced by what is made.

    Raises:
      OSError: if one of them could not be written, see `files.check_output`.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        workdir: str | os.PathLike | None,
        keep_posterior: bool,
        record: bool,
        overwrite: bool,
    ):
        final = made = _files(path, keep_posterior, record)
        begun = False
        if workdir is not None:
            folder = pathlib.Path(workdir)
            made = _files(folder / "coded.miracle", keep_posterior, record)
            states = ("state.npz", "result.json")
            begun = any((folder / name).exists() for name in states)
        self.file, self.posterior, self.record = (
            made.get(name) for name in ("file", "posterior", "record")
        )
        self.replaces = overwrite or made is not final
        self._overwrite = overwrite
        self._places = [(made[name], final[name]) for name in final]
        for source, output in self._places:
            # What a run has made before it may make again, also in its own folder.
            to_come = made is not final and source == output and not output.exists()
            if not (to_come or (begun and _is_copied(source, output))):
                files.check_output(output, overwrite)

    def publish(self) -> None:
        """Copies what was made elsewhere to where it will be."""
        for source, output in self._places:
            if not _is_copied(source, output):
                files.write_atomically(output, source.read_bytes(), self._overwrite)


def _files(path, keep_posterior, record):
    found = {"file": pathlib.Path(path)}
    if keep_posterior:
        found["posterior"] = files.beside(path, ".posterior.npz")
    if record:
        found["record"] = files.beside(path, ".record.json")
    return found


def _is_copied(source, copy):
    both = source.is_file() and copy.is_file()
    return both and source.read_bytes() == copy.read_bytes()
