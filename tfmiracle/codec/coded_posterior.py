"""The posterior beside a file: Q of every weight as it was coded."""

import dataclasses
import io
import os
import pathlib
import zlib
from collections.abc import Iterable

import numpy as np

from tfmiracle.files import write_atomically
from tfmiracle.miracle_file import (
    MiracleFile,
)


@dataclasses.dataclass(frozen=True)
class CodedPosterior:
    """Mean and standard deviation of Q, for diagnostics and pruning.

    A `.miracle` file does not need it, and it is hundreds of times larger.

    Attributes:
      loc: for each group of the file float32[num_effective], the mean of every
        effective weight in the order of the network (`WeightLayout.to_effective`).
      scale: likewise, the standard deviation.
      codes_crc32: CRC-32 of the codes of the file it belongs to, or None.
    """

    loc: list[np.ndarray]
    scale: list[np.ndarray]
    codes_crc32: int | None = None

    def __repr__(self):
        sizes = [len(loc) for loc in self.loc]
        return f"CodedPosterior({sum(sizes)} weights of {len(sizes)} groups)"

    def write(self, path: str | os.PathLike, overwrite: bool = False) -> None:
        """Writes an `.npz` file, atomically.

        Raises:
          FileExistsError: if `path` exists and `overwrite` is false.
        """
        buffer = io.BytesIO()
        arrays = {f"loc_{g}": loc for g, loc in enumerate(self.loc)}
        arrays.update((f"scale_{g}", scale) for g, scale in enumerate(self.scale))
        if self.codes_crc32 is not None:
            arrays["codes_crc32"] = np.uint32(self.codes_crc32)
        np.savez(buffer, **arrays)
        write_atomically(path, buffer.getvalue(), overwrite)

    @classmethod
    def read(cls, path: str | os.PathLike) -> "CodedPosterior":
        """Reads what `write` wrote.

        Raises:
          ValueError: if the file is damaged or something else.
          OSError: if it cannot be read.
        """
        data = pathlib.Path(path).read_bytes()
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                names = [name for name in archive.files if name != "codes_crc32"]
                crc = None
                if len(names) < len(archive.files):
                    crc = int(archive["codes_crc32"])
                groups = range(len(names) // 2)
                loc = [np.asarray(archive[f"loc_{g}"]) for g in groups]
                scale = [np.asarray(archive[f"scale_{g}"]) for g in groups]
        except Exception as error:  # zipfile and zlib have many of their own
            raise ValueError(f"{path} is no posterior of tfmiracle: {error}") from error
        for name, arrays in (("loc", loc), ("scale", scale)):
            for g, array in enumerate(arrays):
                right = array.dtype == np.float32 and array.ndim == 1
                if not right or not np.all(np.isfinite(array)):
                    raise ValueError(
                        f"{path} is no posterior of tfmiracle: {name}_{g} must be a "
                        "vector of finite float32 numbers."
                    )
        sizes = [len(array) for array in loc], [len(array) for array in scale]
        if not loc or len(names) % 2 or sizes[0] != sizes[1]:
            raise ValueError(
                f"{path} is no posterior of tfmiracle: it needs a loc and a scale of "
                f"the same size for each group, and holds {', '.join(names) or None}."
            )
        if any(np.any(array <= 0) for array in scale):
            raise ValueError(
                f"{path} is no posterior of tfmiracle: it needs scales above 0."
            )
        return cls(loc, scale, crc)

    def check_fits(self, file: MiracleFile) -> None:
        """Raises a ValueError if this is not the posterior of `file`."""
        expected = [group.layout.num_effective for group in file.groups]
        for name, arrays in (("loc", self.loc), ("scale", self.scale)):
            sizes = [len(array) for array in arrays]
            if sizes != expected:
                raise ValueError(
                    f"The posterior is not that of the file: `{name}` has {sizes} "
                    f"weights in its groups, the file {expected}."
                )
        crc = codes_crc32(group.codes for group in file.groups)
        if self.codes_crc32 not in (None, crc):
            raise ValueError(
                "The posterior is not that of the file, but of one with other codes. "
                "Give the one that was written with it."
            )


def codes_crc32(groups: Iterable[np.ndarray]) -> int:
    """CRC-32 of the codes of all groups, by which a posterior knows its file."""
    crc = 0
    for codes in groups:
        crc = zlib.crc32(codes.astype("<i8").tobytes(), crc)
    return crc
