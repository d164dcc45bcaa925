"""A trellis code: one long sequence of bits for all weights. Needs NumPy only."""

import dataclasses
import functools
import numbers
from typing import ClassVar

import numpy as np

from tfmiracle.codec import philox
from tfmiracle.codec.code import CODES, RandomCode
from tfmiracle.codec.codebook import PER_CALL, normal_quantiles, normals
from tfmiracle.codec.philox import Domain

SYMBOL_BITS = 4
MIN_STATE_BITS, MAX_STATE_BITS = 8, 20

# Windows of consecutive weights start a golden ratio of the table apart.
_STRIDE = np.uint32(0x9E3779B1)
_MIN_TABLE_BITS = 16


@CODES.register
@dataclasses.dataclass(frozen=True)
class TrellisCode(RandomCode):
    """All weights are one sequence, addressed by a shift register.

    Symbols of 4 bits enter the register evenly over the sequence. Its last `state_bits`
    bits, the state, and the number of a weight address the weight's candidate. So each
    symbol is part of the candidates of many weights, and to decode a weight takes the
    few symbols before it.

    In memory the code of a block is the state at each of its weights.

    Sources: Marcellin and Fischer, "Trellis coded quantization of memoryless and
    Gauss-Markov sources" (1990); random candidates computed from the state: Tseng, Sun,
    Hou and De Sa, "QTIP: quantization with trellises and incoherence processing"
    (2024).

    Attributes:
      seed: see `RandomCode`.
      num_weights: how many weights there are, which the layout says.
      state_bits: bits of the state, 8 to 20.
      num_bytes: bytes of the whole sequence.

    Raises:
      ValueError: an attribute is out of range, or there are more symbols to a weight
        than its state holds.
    """

    identifier: ClassVar[str] = "trellis"
    seed: int = 0
    num_weights: int = 0
    state_bits: int = 16
    num_bytes: int = 0

    def __post_init__(self):
        philox.split_seed(self.seed)
        check_state_bits(self.state_bits)
        if not 0 <= self.num_bytes <= self.max_bytes:
            raise ValueError(
                f"`num_bytes` must be from 0 to {self.max_bytes:,}: a state of "
                f"{self.state_bits} bits holds {self.state_bits // SYMBOL_BITS} "
                f"symbols of 4 bits for each of {self.num_weights:,} weights. "
                f"Received: num_bytes={self.num_bytes:,}"
            )

    @property
    def max_bytes(self) -> int:
        """Bytes of the longest sequence that the states of all weights can hold."""
        return self.state_bits // SYMBOL_BITS * self.num_weights // 2

    @property
    def num_symbols(self) -> int:
        """Symbols of the sequence, 4 bits each."""
        return 2 * self.num_bytes

    def entered(self, weights: np.ndarray) -> np.ndarray:
        """How many symbols have entered when a weight is decoded, int64.

        Symbol i enters just before weight floor(i * num_weights / num_symbols).
        """
        weights = np.asarray(weights, np.int64)
        if not self.num_symbols:
            return np.zeros_like(weights)
        last = np.minimum(weights + 1, self.num_weights)  # what follows is padding
        return -(-last * self.num_symbols // self.num_weights)

    def entrances(self, symbols: np.ndarray) -> np.ndarray:
        """The weight just before which each symbol enters, int64."""
        return np.asarray(symbols, np.int64) * self.num_weights // self.num_symbols

    def offsets(self, weights: np.ndarray) -> np.ndarray:
        """Where the candidates of a weight begin in the table, int32."""
        scattered = np.asarray(weights).astype(np.uint32) * _STRIDE
        return (scattered >> np.uint32(32 - _table_bits(self.state_bits))).astype(
            np.int32
        )

    def table(self) -> np.ndarray:
        """The normals that all candidates are taken from, float32, read-only.

        State s of weight t has the candidate `(s + offsets(t)) % len(table)`.
        """
        return _table(self.seed, self.state_bits)

    def states(self, symbols: np.ndarray, start: int = 0) -> np.ndarray:
        """The states after each of some symbols, int32; `start` is that before."""
        held = -(-self.state_bits // SYMBOL_BITS)
        before = start >> SYMBOL_BITS * np.arange(held - 1, -1, -1) & 15
        padded = np.concatenate([before, symbols]).astype(np.int32)
        states = np.zeros(len(symbols), np.int32)
        for age in range(held):
            states |= padded[held - age : len(padded) - age] << SYMBOL_BITS * age
        return states & np.int32((1 << self.state_bits) - 1)

    def bits(self, block_size: int) -> float:
        return 8 * self.num_bytes * block_size / self.num_weights

    def shape(self, block_size: int) -> tuple[int, ...]:
        return (block_size,)

    def check(self, codes: np.ndarray) -> None:
        if codes.dtype.kind not in "iu" or np.any(
            (codes < 0) | (codes >> self.state_bits)
        ):
            raise ValueError(
                f"`codes` must be states, integers of {self.state_bits} bits. "
                f"Received: codes={codes}"
            )

    def candidates(
        self, blocks: np.ndarray, codes: np.ndarray, block_size: int
    ) -> np.ndarray:
        first = philox.as_uint32("blocks", blocks).astype(np.int64) * block_size
        offsets = self.offsets(first[:, np.newaxis] + np.arange(block_size))
        size = 1 << _table_bits(self.state_bits)
        entries = (codes + offsets) & np.int32(size - 1)
        few = entries.size < size // PER_CALL  # a file may have many groups of few
        return _entries(self.seed, entries) if few else self.table()[entries]

    def pack(self, codes: np.ndarray, block_size: int) -> bytes:
        # Each symbol from the state of the weight that it enters before.
        flat = np.asarray(codes, np.int32).reshape(-1)
        symbols = np.arange(self.num_symbols, dtype=np.int64)
        weights = self.entrances(symbols) if len(symbols) else symbols
        age = (self.entered(weights) - 1 - symbols).astype(np.int32)
        values = (flat[weights] >> SYMBOL_BITS * age & 15).astype(np.uint8)
        packed = (values[::2] | values[1::2] << 4).tobytes()
        if not np.array_equal(self._unpack(packed), flat[: self.num_weights]):
            raise ValueError("The codes of the blocks are not those of one sequence.")
        return packed

    def unpack(self, packed: bytes, num_blocks: int, block_size: int) -> np.ndarray:
        if len(packed) != self.num_bytes:
            raise ValueError(
                f"The sequence takes {self.num_bytes} bytes; there are {len(packed)}."
            )
        codes = np.zeros(num_blocks * block_size, np.int32)
        codes[: self.num_weights] = self._unpack(packed)
        codes[self.num_weights :] = codes[self.num_weights - 1]
        return codes.reshape(num_blocks, block_size)

    def _unpack(self, packed: bytes) -> np.ndarray:
        """The state of each weight, int32 `[num_weights]`."""
        pairs = np.frombuffer(packed, np.uint8)
        symbols = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
        states = np.concatenate([np.zeros(1, np.int32), self.states(symbols)])
        return states[self.entered(np.arange(self.num_weights))]


def check_state_bits(state_bits: int) -> None:
    """Raises a ValueError unless `state_bits` is the size of a state."""
    integer = isinstance(state_bits, numbers.Integral)
    if not (integer and MIN_STATE_BITS <= state_bits <= MAX_STATE_BITS):
        raise ValueError(
            f"`state_bits` must be an integer from {MIN_STATE_BITS} to "
            f"{MAX_STATE_BITS}: the encoder keeps 2**state_bits paths. "
            f"Received: state_bits={state_bits!r}"
        )


def _table_bits(state_bits: int) -> int:
    return max(_MIN_TABLE_BITS, state_bits)


@functools.lru_cache(4)
def _table(seed: int, state_bits: int) -> np.ndarray:
    size = 1 << _table_bits(state_bits)
    zero = np.zeros(1, np.uint32)
    table = normals(seed, Domain.TRELLIS, zero, zero, size)[0]
    table.flags.writeable = False
    return table


def _entries(seed: int, entries: np.ndarray) -> np.ndarray:
    """Some entries of a table, by a call of Philox for each."""
    counter = np.zeros((*entries.shape, 4), np.uint32)
    counter[..., 1], counter[..., 3] = entries // PER_CALL, Domain.TRELLIS
    words = philox.philox4x32(counter, philox.split_seed(seed))
    halves = words.astype("<u4", copy=False).view("<u2")  # low half first
    place = (entries % PER_CALL)[..., np.newaxis]
    return normal_quantiles()[np.take_along_axis(halves, place, -1)[..., 0]]
