"""What files of every version are made of. Needs NumPy only."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tfmiracle.codec.code import RandomCode
from tfmiracle.codec.layout import WeightLayout
from tfmiracle.codec.prior import Prior, ZeroMean

STORED_DTYPES = (
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
# What a file may claim by default: so many weights, and more for each of its bytes.
FREE_WEIGHTS = 1 << 20
WEIGHTS_PER_BYTE = 512
DEFAULT_MAX_WEIGHTS = 1 << 28  # however large the file is
MAX_GROUPS = 1 << 10
MAX_VARIABLES = 1 << 13
MAX_ENTRIES = (1 << 32) - 1  # of all variables: positions are 32-bit words of Philox
MAX_SCALE = np.float32(1e30)  # times any candidate, it is finite
MAX_LEVEL_SCALE = np.float32(2.0**49)  # the square of 127 times it is finite
MAX_DESCRIPTION_BYTES = 1 << 22
MAX_DIMENSIONS = 32  # of arrays in NumPy 1


class FileFormatError(ValueError):
    """The bytes are no `.miracle` file that this version can read."""


@dataclasses.dataclass(frozen=True)
class CodedGroup:
    """Variables that share blocks, and the random code that gives their weights.

    Attributes:
      layout: where each weight has its place.
      code: the random code of its blocks.
      scales: float32[layout.num_scales], the coding scales rho.
      codes: integers [layout.num_blocks, ...], the code of each block.
      prior: the means of the coding distribution.
    """

    layout: WeightLayout
    code: RandomCode
    scales: np.ndarray
    codes: np.ndarray
    prior: Prior = dataclasses.field(default_factory=ZeroMean)

    @functools.cached_property
    def packed(self) -> bytes:
        """The codes as a file holds them."""
        return self.code.pack(self.codes, self.layout.block_size)

    def __repr__(self):
        return (
            f"CodedGroup({self.layout.num_blocks} blocks of {self.layout.block_size} "
            f"weights, {self.code})"
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the packed codes."""
        return len(self.packed)


@dataclasses.dataclass(frozen=True)
class Levels:
    """A stored variable, rounded: small integers times a scale.

    Attributes:
      levels: int8 array, -127 to 127; of the variable's shape.
      scale: float32, above 0 and at most `MAX_LEVEL_SCALE`.
      squared: whether the values are the squares of that, as those of a variance.
    """

    levels: np.ndarray
    scale: np.float32
    squared: bool

    @classmethod
    def of(cls, values: np.ndarray, bits: int, squared: bool) -> "Levels":
        """The nearest to `values` of `bits` bits; squares have no sign, but as many.

        Raises:
          ValueError: if a value is not finite, too large, or below 0 if `squared`.
        """
        roots = np.asarray(values, np.float32)
        if squared:
            with np.errstate(invalid="ignore"):
                roots = np.sqrt(roots)
        most = 2 ** min(bits - (not squared), 7) - 1
        least = np.max(np.abs(roots), initial=0) / np.float32(most)
        # In two bytes, near enough for the largest value to have the largest level. So
        # values that are rounded already stay as they are.
        scale = np.array(max(least, np.float32(2.0**-60)), np.float32)
        scale = ((scale.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32)
        scale = scale.view(np.float32)[()]
        if not scale <= MAX_LEVEL_SCALE:  # NaN refuses
            raise ValueError("values are not finite, too large, or below 0")
        levels = np.clip(np.rint(roots / scale), -most, most)
        return cls(levels.astype(np.int8), scale, squared)

    def values(self) -> np.ndarray:
        """float32: products of binary32, each rounded, so exact on every platform."""
        values = self.levels.astype(np.float32) * self.scale
        return values * values if self.squared else values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.levels.shape

    @property
    def size(self) -> int:
        return self.levels.size


def stored_values(stored: np.ndarray | Levels) -> np.ndarray:
    """The values of a stored variable."""
    return stored.values() if isinstance(stored, Levels) else stored


def check_claim(shapes: Sequence[Sequence[int]], max_weights: int | None) -> None:
    """Raises a FileFormatError if variables of these shapes have too many weights."""
    total = 0
    for shape in shapes:
        # A length of 0 does not excuse others that no array can have.
        total += math.prod(max(length, 1) for length in shape)
        if total > MAX_ENTRIES:
            raise FileFormatError("The file claims 2^32 weights or more.")
        if max_weights is not None and not total <= max_weights:  # NaN refuses
            raise FileFormatError(
                f"The file claims more than {max_weights:,} weights. If you trust "
                "where it comes from, raise `max_weights`."
            )
