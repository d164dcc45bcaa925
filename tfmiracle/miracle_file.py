"""The `.miracle` file: what it holds, to bytes and back. Needs NumPy only.

`docs/format_v2.md` specifies the bytes that are written, `docs/format.md` those of
version 1, which are read as well.
"""

import dataclasses
import os
import pathlib
import uuid
from collections.abc import Sequence

import numpy as np

from tfmiracle.codec import version1, version2
from tfmiracle.codec.parts import (
    DEFAULT_MAX_WEIGHTS,
    MAX_DESCRIPTION_BYTES,
    STORED_DTYPES,
    CodedGroup,
    FileFormatError,
    Levels,
)

__all__ = [
    "DEFAULT_MAX_WEIGHTS",
    "MAX_DESCRIPTION_BYTES",
    "MAX_METADATA_BYTES",
    "STORED_DTYPES",
    "CodedGroup",
    "FileFormatError",
    "Levels",
    "MiracleFile",
    "check_output",
    "write_atomically",
]

MAGIC = b"MRCL"
MAX_METADATA_BYTES = 1 << 20  # of the description
_VERSIONS = {version.START: version for version in (version1, version2)}


@dataclasses.dataclass(frozen=True)
class MiracleFile:
    """Everything a `.miracle` file holds.

    Attributes:
      names: of all variables of the network, in its order.
      coded: for each variable, the group that codes it and its position in there, or
        None for a variable that is stored.
      groups: the coded groups.
      stored: the stored variables, in the order of the network: arrays, or `Levels`.
      architecture: serialized Keras model, as Keras' JSON, or None for a file without.
      metadata: whatever else is worth knowing, as JSON.
      fingerprint: of the architecture, where that is None; see
        `tfmiracle.codec.version2.fingerprint`.
    """

    names: Sequence[str]
    coded: Sequence[tuple[int, int] | None]
    groups: Sequence[CodedGroup]
    stored: Sequence[np.ndarray | Levels]
    architecture: dict | None
    metadata: dict = dataclasses.field(default_factory=dict)
    fingerprint: int | None = None

    def __post_init__(self):
        if (self.architecture is None) == (self.fingerprint is None):
            raise ValueError("A file has either an architecture or its fingerprint.")

    @property
    def payload_bytes(self) -> int:
        """Bytes of the indices alone, the size that the paper counts."""
        return sum(g.payload_bytes for g in self.groups)

    @property
    def num_weights(self) -> int:
        """Number of all weights of the network, coded and stored."""
        coded = sum(g.layout.num_weights for g in self.groups)
        return coded + sum(value.size for value in self.stored)

    @property
    def float32_bytes(self) -> int:
        """Size of the network's weights as float32."""
        return 4 * self.num_weights

    def to_bytes(self) -> bytes:
        """Serializes the file, as version 2.

        Raises:
          ValueError: if architecture, names and metadata take more than readers accept.
        """
        return version2.to_bytes(self)

    @classmethod
    def from_bytes(
        cls, data: bytes, max_weights: int | None = DEFAULT_MAX_WEIGHTS
    ) -> "MiracleFile":
        """Parses a file, trusting nothing in it.

        Args:
          data: the whole file.
          max_weights: refuse files that claim more weights than this, before anything
            of that size is allocated; None for a file that you trust.

        Raises:
          FileFormatError: if the bytes are damaged, truncated, from another format or
            version, or claim more than `max_weights` weights.
        """
        if data[: len(MAGIC)] != MAGIC:
            raise FileFormatError(
                "Not a .miracle file: it does not start with the bytes 'MRCL'."
            )
        start = data[: len(MAGIC) + 1]
        if start not in _VERSIONS:
            raise FileFormatError(
                f"Format version {start[-1] if len(start) > 4 else 'missing'} is "
                f"unknown; this package reads versions 1 and 2. Install a newer "
                "tfmiracle."
            )
        return cls(**_VERSIONS[start].from_bytes(data, max_weights))

    def write(self, path: str | os.PathLike, overwrite: bool = False) -> int:
        """Writes the file under its final name only when it is complete.

        Returns:
          The number of bytes.

        Raises:
          FileExistsError: if `path` exists and `overwrite` is false.
        """
        data = self.to_bytes()
        write_atomically(path, data, overwrite)
        return len(data)

    @classmethod
    def read(
        cls, path: str | os.PathLike, max_weights: int | None = DEFAULT_MAX_WEIGHTS
    ) -> "MiracleFile":
        """Reads and parses a file, see `from_bytes`; the error names the path."""
        data = pathlib.Path(path).read_bytes()
        try:
            return cls.from_bytes(data, max_weights)
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from None


def check_output(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Checks that `path` can be written, before hours are spent on its content.

    Raises:
      FileExistsError: if `path` exists and `overwrite` is false.
      FileNotFoundError: if its folder does not exist.
      IsADirectoryError: if it is a folder.
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
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} does not exist; create it.")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"The folder {path.parent} cannot be written to.")


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
