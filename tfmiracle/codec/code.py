"""Random codes: which weights the bits of a block stand for. Needs NumPy only.

A code is one frozen object. Posterior, coder, file and decoder hold the same one, so
that what is trained, coded, written and decoded agree by construction.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tfmiracle.codec import codebook as codebooks
from tfmiracle.codec import philox
from tfmiracle.codec.layout import WeightLayout
from tfmiracle.registry import Registry


class RandomCode(abc.ABC):
    """Pseudo-random standard normal vectors, each addressed by the code of a block.

    In memory the code of a block is an array of integers below 2**31, of a fixed
    `shape`; `pack` and `unpack` make bytes of the codes of all blocks. Whoever has a
    code of their own derives a frozen dataclass and registers it with `CODES.register`,
    here and where its files are decoded. Its fields are integers of at least 0: those
    of `LAYOUT_FIELDS`, as far as it wants to know them, and what else a file holds.

    Attributes:
      identifier: name of the kind of code in a file, printable ASCII.
      exact_size: whether `bits` is what every block takes, and not a mean, so that
        the size of a file is known before it is trained.
      seed: unsigned 64-bit integer that everything random depends on.
    """

    identifier: ClassVar[str]
    exact_size: ClassVar[bool] = True
    seed: int

    def shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of the code of one block; by default it is one integer."""
        return ()

    @abc.abstractmethod
    def bits(self, block_size: int) -> float:
        """Bits that a block of `block_size` weights takes in a file, on average."""

    def kl_bits(self, block_size: int) -> float:
        """KL divergence that a block should have, in bits; what it takes by default."""
        return self.bits(block_size)

    @abc.abstractmethod
    def check(self, codes: np.ndarray) -> None:
        """Raises a ValueError unless all of `codes`, `[B, *shape]`, are in range."""

    @abc.abstractmethod
    def candidates(
        self, blocks: np.ndarray, codes: np.ndarray, block_size: int
    ) -> np.ndarray:
        """What codes stand for.

        Args:
          blocks: integers `[B]` from 0 to 2**32 - 1, the numbers of the blocks.
          codes: integers `[B, *shape]`, their codes.
          block_size: number of weights in a block.

        Returns:
          float32 `[B, block_size]`, the same bits on every platform. A weight is the
          mean plus the standard deviation of the coding distribution times this.
        """

    @abc.abstractmethod
    def pack(self, codes: np.ndarray, block_size: int) -> bytes:
        """The codes of blocks 0 to B - 1, `[B, *shape]`, as bytes."""

    @abc.abstractmethod
    def unpack(self, packed: bytes, num_blocks: int, block_size: int) -> np.ndarray:
        """Reverses `pack`, trusting nothing in `packed`.

        Raises:
          ValueError: if no codes of `num_blocks` blocks give these bytes.
        """

    def parameters(self) -> tuple[int, ...]:
        """The fields that a file holds: all that no layout says."""
        return tuple(int(getattr(self, name)) for name in own_fields(self))

    @classmethod
    def from_parameters(
        cls, parameters: Sequence[int], layout: WeightLayout
    ) -> "RandomCode":
        """Reverses `parameters`, with what the layout says.

        Raises:
          ValueError: if there are too many or too few, or one is out of range.
        """
        names = own_fields(cls)
        if len(parameters) != len(names):
            raise ValueError(
                f"A code of kind {cls.identifier!r} has {len(names)} parameters "
                f"({', '.join(names)}). Received: {list(parameters)}"
            )
        own = dict(zip(names, parameters, strict=True))
        return cls(**own, **layout_fields(cls, layout))


# Field of a code or coder -> the property of the layout that it is.
LAYOUT_FIELDS = {
    "seed": "seed",
    "num_weights": "num_effective",  # without padding
    "block_size": "block_size",
}


def layout_fields(cls, layout: WeightLayout) -> dict[str, int]:
    """What a layout says of the fields of a code or coder."""
    names = {field.name for field in dataclasses.fields(cls)}
    found = {name: prop for name, prop in LAYOUT_FIELDS.items() if name in names}
    return {name: getattr(layout, prop) for name, prop in found.items()}


def own_fields(cls) -> list[str]:
    """The fields of a code or coder that no layout says."""
    names = [field.name for field in dataclasses.fields(cls)]
    return [name for name in names if name not in LAYOUT_FIELDS]


CODES = Registry(
    "code",
    RandomCode,
    trellis="tfmiracle.codec.trellis",
    universal="tfmiracle.codec.universal",
)


@CODES.register
@dataclasses.dataclass(frozen=True)
class MinimalRandomCode(RandomCode):
    """Codebooks of 2**block_bits candidates (Havasi et al. 2019).

    The code of a block is the index of one of them.

    Attributes:
      seed: see `RandomCode`.
      block_bits: bits of an index, 0 to 28.
      codebook: "per_block" has a codebook for each block, "shared" one for all, which
        each block sees shuffled and flipped (`tfmiracle.codec.codebook.symmetry`).

    Raises:
      ValueError: an attribute is out of range or an unknown name.
    """

    identifier: ClassVar[str] = "mrc"
    seed: int = 0
    block_bits: int = 20
    codebook: str = "shared"

    def __post_init__(self):
        codebooks.check_code(self.block_bits, self.codebook)
        philox.split_seed(self.seed)

    @property
    def shared(self) -> bool:
        """Whether all blocks have one codebook."""
        return self.codebook == "shared"

    def bits(self, block_size: int) -> float:
        return self.block_bits

    def check(self, codes: np.ndarray) -> None:
        last = 2**self.block_bits - 1
        if codes.dtype.kind not in "iu" or np.any((codes < 0) | (codes > last)):
            raise ValueError(
                f"`codes` must be integers from 0 to {last}, which {self.block_bits} "
                f"bits can say. Received: codes={codes}"
            )

    def candidates(
        self, blocks: np.ndarray, codes: np.ndarray, block_size: int
    ) -> np.ndarray:
        return codebooks.candidates(self.seed, blocks, codes, block_size, self.shared)

    def pack(self, codes: np.ndarray, block_size: int) -> bytes:
        # A stream of bits, each index and each byte low bit first.
        shifts = np.arange(self.block_bits, dtype=np.uint32)
        bits = (np.asarray(codes, np.uint32)[:, None] >> shifts) & 1
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    def unpack(self, packed: bytes, num_blocks: int, block_size: int) -> np.ndarray:
        size = -(-num_blocks * self.block_bits // 8)
        if len(packed) != size:
            raise ValueError(
                f"{num_blocks} indices of {self.block_bits} bits take {size} bytes; "
                f"there are {len(packed)}."
            )
        flat = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        if flat[num_blocks * self.block_bits :].any():
            raise ValueError("Bits after the last index are not zero.")
        table = flat[: num_blocks * self.block_bits].reshape(num_blocks, -1)
        indices = np.zeros(num_blocks, np.int64)
        for bit in range(self.block_bits):
            indices |= table[:, bit].astype(np.int64) << bit
        return indices

    def parameters(self) -> tuple[int, ...]:
        return self.block_bits, codebooks.CODEBOOKS.index(self.codebook)

    @classmethod
    def from_parameters(
        cls, parameters: Sequence[int], layout: WeightLayout
    ) -> "MinimalRandomCode":
        known = range(len(codebooks.CODEBOOKS))
        if len(parameters) != 2 or parameters[1] not in known:
            raise ValueError(
                "Minimal random coding has two parameters, bits of an index and number "
                f"of the codebook, below {len(known)}. Received: {list(parameters)}"
            )
        return cls(layout.seed, parameters[0], codebooks.CODEBOOKS[parameters[1]])
