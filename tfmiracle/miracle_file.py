"""The `.miracle` file: what it holds, to bytes and back. Needs NumPy only.

`docs/format_v2.md` specifies the bytes that are written, `docs/format.md` those of
version 1, which are read as well.
"""

import dataclasses
import json
import numbers
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from tfmiracle.codec import strict_json, version1, version2
from tfmiracle.codec.parts import (
    DEFAULT_MAX_WEIGHTS,
    FREE_WEIGHTS,
    MAX_DESCRIPTION_BYTES,
    MAX_VARIABLES,
    STORED_DTYPES,
    WEIGHTS_PER_BYTE,
    CodedGroup,
    FileFormatError,
    Levels,
)
from tfmiracle.files import write_atomically

__all__ = [
    "DEFAULT_MAX_WEIGHTS",
    "MAX_DESCRIPTION_BYTES",
    "MAX_METADATA_BYTES",
    "STORED_DTYPES",
    "CodedGroup",
    "FileFormatError",
    "Levels",
    "MiracleFile",
    "check_description",
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

    def __repr__(self):
        return (
            f"MiracleFile({self.num_weights} weights of {len(self.names)} variables, "
            f"{len(self.groups)} groups, {self.payload_bytes} bytes of indices)"
        )

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

    def part_bytes(self) -> dict[str, int]:
        """Bytes of "description", "layout", "stored" and "indices", all of the file."""
        return version2.part_bytes(self)

    def to_bytes(self) -> bytes:
        """Serializes the file, as version 2.

        Raises:
          ValueError: if architecture, names and metadata take more than readers accept.
        """
        return version2.to_bytes(self)

    @classmethod
    def from_bytes(
        cls, data: bytes, max_weights: int | str | None = "auto"
    ) -> "MiracleFile":
        """Parses a file, trusting nothing in it.

        Args:
          data: the whole file.
          max_weights: refuse files that claim more weights than this, before anything
            of that size is allocated. "auto": 2^20 and 512 for each byte of the file,
            2^28 at most, so that a small file cannot cost much. None for a file that
            you trust.

        Raises:
          FileFormatError: if the bytes are damaged, truncated, from another format or
            version, or claim more than `max_weights` weights.
        """
        number = isinstance(max_weights, numbers.Real) and not max_weights < 0
        if not number and max_weights not in ("auto", None):
            raise ValueError(
                "`max_weights` must be a number of weights, 'auto', or None for any. "
                f"Received: max_weights={max_weights!r}"
            )
        if max_weights == "auto":
            by_size = FREE_WEIGHTS + WEIGHTS_PER_BYTE * len(data)
            max_weights = min(by_size, DEFAULT_MAX_WEIGHTS)
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
        cls, path: str | os.PathLike, max_weights: int | str | None = "auto"
    ) -> "MiracleFile":
        """Reads and parses a file, see `from_bytes`; the error names the path."""
        data = pathlib.Path(path).read_bytes()
        try:
            return cls.from_bytes(data, max_weights)
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from None


def check_metadata(metadata: dict | None) -> None:
    """Checks what a user wants a file to say, before hours are spent on it.

    Raises:
      ValueError: if JSON cannot say it, or it is too large.
    """
    try:
        size = len(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`metadata` must be what JSON can say: {error}. "
            f"Received: metadata={metadata!r}"
        ) from error
    if size > MAX_METADATA_BYTES:
        raise ValueError(
            f"`metadata` takes {size:,} bytes as JSON; at most {MAX_METADATA_BYTES:,} "
            "are allowed. Keep what is large elsewhere."
        )


def check_description(architecture: dict, names: Sequence[str]) -> None:
    """Checks what will be written of a network, before hours are spent on its weights.

    Raises:
      FileFormatError: if readers would refuse it.
    """
    if len(names) > MAX_VARIABLES:
        raise FileFormatError(
            f"The network has {len(names):,} variables; a file has room for "
            f"{MAX_VARIABLES:,}."
        )
    if len(set(names)) < len(names) or not all(map(str.isprintable, names)):
        raise FileFormatError("The names of variables are equal, or not printable.")
    content = {"model": architecture, "names": [*names], "metadata": {}}
    strict_json.parse(json.dumps(content).encode())
