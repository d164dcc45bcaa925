"""Random bits as a pure function of their address: Philox-4x32-10 in NumPy.

Everything random in a file (codebooks, permutations, hashes, signs) is computed from
these words, so it depends on no library's generator or version.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), held to the known-answer vectors of their Random123 library.
"""

from __future__ import annotations

import enum

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_MASK = 0xFFFFFFFF
_CHUNK = 1 << 14  # counters at a time: the temporaries of a round stay in cache


class Domain(enum.IntEnum):
    """What a stream of words is for: the last word of the counter.

    The values are part of the file format.
    """

    CODEBOOK = 0
    SHARED_CODEBOOK = 1
    SHUFFLE = 2  # the order of a block's dimensions in the shared codebook
    FLIP = 3  # the signs of a block's dimensions in the shared codebook
    SELECTION = 4
    PERMUTATION = 5
    HASH = 6
    SIGN = 7
    PRUNING = 8  # of random pruning; serves no file
    TRELLIS = 9  # the candidates of a trellis
    TRELLIS_SELECTION = 10
    ARRIVAL = 11  # when candidates arrive, for coders of `poisson`; serves no file


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Applies the ten rounds of Philox-4x32 to each counter.

    Args:
      counter: unsigned 32-bit integers `[..., 4]`.
      key: two unsigned 32-bit integers.

    Returns:
      Random words, uint32 `[..., 4]`.

    Raises:
      ValueError: the last axis of `counter` is not 4, or `key` is out of range.
    """
    counter = np.asarray(counter, np.uint32)
    if counter.ndim == 0 or counter.shape[-1] != 4:
        raise ValueError(
            f"counter has shape {counter.shape}; pass an array with a last axis of 4."
        )
    key0, key1 = (int(k) for k in key)
    if not (0 <= key0 <= _MASK and 0 <= key1 <= _MASK):
        raise ValueError(f"key = {key}; pass two integers from 0 to 2**32 - 1.")
    # 32-bit words in 64-bit integers, so that a product keeps its high half.
    x0, x1, x2, x3 = (counter[..., j].astype(np.uint64) for j in range(4))
    mask, shift = np.uint64(_MASK), np.uint64(32)
    for _ in range(ROUNDS):
        p0 = x0 * np.uint64(MULTIPLIERS[0])
        p1 = x2 * np.uint64(MULTIPLIERS[1])
        x0 = (p1 >> shift) ^ x1 ^ np.uint64(key0)
        x2 = (p0 >> shift) ^ x3 ^ np.uint64(key1)
        x1 = p1 & mask
        x3 = p0 & mask
        key0 = (key0 + KEY_INCREMENTS[0]) & _MASK
        key1 = (key1 + KEY_INCREMENTS[1]) & _MASK
    result = np.empty(counter.shape, np.uint32)
    for j, x in enumerate((x0, x1, x2, x3)):
        result[..., j] = x
    return result


def split_seed(seed: int) -> tuple[int, int]:
    """Returns the Philox key of a seed: its low and its high 32 bits.

    Raises:
      ValueError: `seed` is not an integer from 0 to 2**64 - 1.
    """
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
        raise ValueError(
            f"`seed` must be an integer from 0 to 2**64 - 1. Received: seed={seed!r}"
        )
    return int(seed) & _MASK, int(seed) >> 32


def words(
    seed: int, domain: Domain | int, stream: int | np.ndarray, count: int
) -> np.ndarray:
    """Returns the first `count` words of each stream.

    Word 4i + j of a stream is word j of Philox at counter (i, 0, stream, domain).

    Args:
      seed: an unsigned 64-bit integer, the key.
      domain: what the words are for.
      stream: an unsigned 32-bit integer, or an integer array of any shape.
      count: words per stream.

    Returns:
      uint32 `[*stream.shape, count]`.

    Raises:
      ValueError: an argument is out of range.
    """
    key = split_seed(seed)
    stream = as_uint32("stream", stream)
    if not 0 <= count <= 1 << 34:
        raise ValueError(f"count = {count}; pass an integer from 0 to 2**34.")
    calls = -(-count // 4)
    result = np.empty((stream.size * calls, 4), np.uint32)
    flat = stream.reshape(-1)
    for start in range(0, len(result), _CHUNK):
        which, i = np.divmod(
            np.arange(start, min(start + _CHUNK, len(result)), dtype=np.int64), calls
        )
        counter = np.zeros((len(i), 4), np.uint32)
        counter[:, 0] = i
        counter[:, 2] = flat[which]
        counter[:, 3] = domain
        result[start : start + len(i)] = philox4x32(counter, key)
    return result.reshape(*stream.shape, 4 * calls)[..., :count]


def permutation(
    seed: int, domain: Domain | int, stream: int | np.ndarray, n: int
) -> np.ndarray:
    """Returns a permutation of 0 ... n - 1 for each stream.

    It is the order that sorts the stream's words, equal words by position.

    Args:
      seed, domain, stream: see `words`.
      n: number of elements, below 2**32.

    Returns:
      int64 `[*stream.shape, n]`.

    Raises:
      ValueError: an argument is out of range.
    """
    if not 0 <= n < 1 << 32:
        raise ValueError(f"n = {n}; pass an integer from 0 to 2**32 - 1.")
    word = words(seed, domain, stream, n)
    if not 1 << 12 <= n <= 1 << 21:
        # The position rides in the low half: no ties, and no (slower) argsort.
        keys = word.astype(np.uint64)
        keys <<= np.uint64(32)
        keys |= np.arange(n, dtype=np.uint32)
        keys.sort(axis=-1)
        keys &= np.uint64(_MASK)
        return keys.view(np.int64)
    # 16 bits at a time NumPy has a radix sort, for rows that fill its tables and fit in
    # caches. Its time varies less between processors: the sort above takes a quarter of
    # it on Zen 5, but two to four times as long on Zen 4.
    low = np.argsort(word.astype(np.uint16), axis=-1, kind="stable")
    high = (word >> np.uint32(16)).astype(np.uint16)
    high = np.take_along_axis(high, low, axis=-1)
    return np.take_along_axis(low, np.argsort(high, axis=-1, kind="stable"), axis=-1)


def signs(
    seed: int, domain: Domain | int, stream: int | np.ndarray, n: int
) -> np.ndarray:
    """Returns n random signs for each stream.

    Sign i is bit i % 32 of word i // 32: +1 where it is 0, -1 where it is 1.

    Args:
      seed, domain, stream: see `words`.
      n: number of signs.

    Returns:
      float32 `[*stream.shape, n]`, each +1 or -1.

    Raises:
      ValueError: an argument is out of range.
    """
    if n < 0:
        raise ValueError(f"n = {n}; pass an integer of at least 0.")
    source = np.ascontiguousarray(words(seed, domain, stream, -(-n // 32)), "<u4")
    bits = np.unpackbits(source.view(np.uint8), axis=-1, count=n, bitorder="little")
    result = np.multiply(bits, -2, dtype=np.float32)
    result += 1
    return result


def as_uint32(name: str, value: int | np.ndarray) -> np.ndarray:
    """Returns integers as a uint32 array.

    Raises:
      ValueError: `value`, called `name`, holds something else than integers from 0 to
        2**32 - 1.
    """
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(np.uint32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; pass integers.")
    low, high = array.min(), array.max()
    if low < 0 or high > _MASK:
        bad = low if low < 0 else high
        raise ValueError(f"{name} holds {bad}; pass integers from 0 to 2**32 - 1.")
    return array.astype(np.uint32)
