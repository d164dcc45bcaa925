"""A code whose indices may be of any size. Needs NumPy only."""

import dataclasses
from typing import ClassVar

import numpy as np

from tfmiracle.codec import codebook as codebooks
from tfmiracle.codec import philox
from tfmiracle.codec.code import CODES, RandomCode

RICE_BITS = 2
MAX_EXPONENT = 30  # the code of a block is below 2**31
_MAX_BYTES = 6  # of a block: the most that an exponent and its bits can take


@CODES.register
@dataclasses.dataclass(frozen=True)
class UniversalCode(RandomCode):
    """Codebooks without an end, whose early candidates have short indices.

    The code of a block is the index of a candidate, of those that `MinimalRandomCode`
    has with a codebook per block. With index + 1 = 2**e + r, r < 2**e, a file holds e
    in a Rice code and r in e bits. What the Rice code says is how far e is from
    `block_bits`, in the order 0, -1, 1, -2, 2, ...

    The indices of relative entropy coders spread around 2**KL by a few bits each way.
    Codes that start from 1 have to reach up there first: at a KL of 12 bits a Rice code
    of e itself, a zeta code or the Zipf distribution takes a bit more than this one,
    and Elias' delta code three (`docs/coders_literature.md`).

    Source: Golomb-Rice codes, Rice and Plaunt, "Adaptive variable-length coding for
    efficient compression of spacecraft television data" (1971).

    Attributes:
      seed: see `RandomCode`.
      block_bits: KL divergence of a block in bits, an integer from 0 to 30.

    Raises:
      ValueError: an attribute is out of range.
    """

    identifier: ClassVar[str] = "universal"
    exact_size: ClassVar[bool] = False
    seed: int = 0
    block_bits: int = 12

    def __post_init__(self):
        philox.split_seed(self.seed)
        if not 0 <= self.block_bits <= MAX_EXPONENT:
            raise ValueError(
                f"`block_bits` must be an integer from 0 to {MAX_EXPONENT}. "
                f"Received: block_bits={self.block_bits!r}"
            )

    def kl_bits(self, block_size: int) -> float:
        return self.block_bits

    def bits(self, block_size: int) -> float:
        """About what a block of the KL divergence takes, by experiment.

        It is what an index near 2**block_bits takes. Coders need 2 to 3 bits more than
        the KL divergence on average; a single block may take up to 48.
        """
        return self.block_bits + 1 + RICE_BITS

    def check(self, codes: np.ndarray) -> None:
        last = 2 ** (MAX_EXPONENT + 1) - 2
        if codes.dtype.kind not in "iu" or np.any((codes < 0) | (codes > last)):
            raise ValueError(
                f"`codes` must be integers from 0 to {last}. Received: codes={codes}"
            )

    def candidates(
        self, blocks: np.ndarray, codes: np.ndarray, block_size: int
    ) -> np.ndarray:
        return codebooks.candidates(self.seed, blocks, codes, block_size, shared=False)

    def pack(self, codes: np.ndarray, block_size: int) -> bytes:
        # Three streams of bits: quotients of all blocks, in unary; remainders; r.
        numbers = np.asarray(codes, np.int64) + 1
        exponents = np.frexp(numbers)[1].astype(np.int64) - 1
        apart = exponents - self.block_bits
        apart = np.where(apart < 0, -2 * apart - 1, 2 * apart)
        unary = np.zeros((1 + (apart >> RICE_BITS)).sum(), np.int64)
        unary[np.cumsum(1 + (apart >> RICE_BITS)) - 1] = 1
        remainders = apart[:, np.newaxis] >> np.arange(RICE_BITS)
        low = np.repeat(numbers, exponents) >> _places(exponents)
        bits = np.concatenate([unary, remainders.reshape(-1), low]) & 1
        return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    def unpack(self, packed: bytes, num_blocks: int, block_size: int) -> np.ndarray:
        if len(packed) > _MAX_BYTES * num_blocks:
            raise ValueError(
                f"{num_blocks} indices take at most {_MAX_BYTES * num_blocks} bytes; "
                f"there are {len(packed)}."
            )
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        ends = 1 + np.flatnonzero(bits)[:num_blocks]
        quotients = np.diff(ends, prepend=0) - 1
        at = ends[-1] if len(ends) else 0
        remainders = bits[at : at + RICE_BITS * num_blocks].astype(np.int64)
        if len(remainders) < RICE_BITS * num_blocks or len(ends) < num_blocks:
            raise ValueError(f"There are fewer than {num_blocks} indices.")
        remainders = remainders.reshape(num_blocks, RICE_BITS) << np.arange(RICE_BITS)
        apart = (quotients << RICE_BITS) + remainders.sum(1)
        exponents = self.block_bits + np.where(apart & 1, -(apart >> 1) - 1, apart >> 1)
        if np.any((exponents < 0) | (exponents > MAX_EXPONENT)):
            raise ValueError("An index is too large, or has a negative exponent.")
        at += RICE_BITS * num_blocks
        end = at + exponents.sum()
        if len(packed) != -(-end // 8):
            raise ValueError(
                f"The indices take {-(-end // 8)} bytes; there are {len(packed)}."
            )
        if bits[end:].any():
            raise ValueError("Bits after the last index are not zero.")
        low = bits[at:end].astype(np.int64) << _places(exponents)
        sums = np.append(0, np.cumsum(low))[np.append(0, np.cumsum(exponents))]
        return (1 << exponents) + np.diff(sums) - 1


def _places(exponents):
    """0 to e - 1 for each exponent e, one after the other."""
    first = np.cumsum(exponents) - exponents
    return np.arange(exponents.sum()) - np.repeat(first, exponents)
