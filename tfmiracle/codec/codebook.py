"""Codebooks: the candidate weights of a block as a function of seed, block and index.

A candidate is addressed, never stored: decoding an index computes that one candidate.
Values are exact. A random 16-bit integer selects one of 65536 tabulated quantiles of
the standard normal distribution, so no logarithm or cosine, which round differently
from one library to the next, ever touches a weight.
"""

from __future__ import annotations

import functools

import numpy as np

from tfmiracle.codec.philox import (
    Domain,
    as_uint32,
    permutation,
    philox4x32,
    signs,
    split_seed,
)

CODEBOOKS = ("per_block", "shared")
MAX_BLOCK_BITS = 28  # the work of the encoder grows as 2**block_bits
TABLE_SIZE = 1 << 16
PER_CALL = 8  # normals from one Philox call: two 16-bit table indices in each word

_CHUNK = 1 << 14  # Philox calls at a time, and 8 as many normals


def check_code(block_bits: int, codebook: str) -> None:
    """Checks the two arguments that define a random code.

    Raises:
      ValueError: one of them is out of range or unknown.
    """
    is_integer = isinstance(block_bits, int | np.integer)
    if isinstance(block_bits, bool) or not (
        is_integer and 0 <= block_bits <= MAX_BLOCK_BITS
    ):
        raise ValueError(
            f"`block_bits` must be an integer from 0 to {MAX_BLOCK_BITS}: a codebook "
            "has 2**block_bits candidates, and the encoder tries them all. "
            f"Received: block_bits={block_bits!r}"
        )
    if codebook not in CODEBOOKS:
        raise ValueError(
            f"`codebook` must be one of {CODEBOOKS}. Received: codebook={codebook!r}"
        )


# fmt: off
# Rational approximations by rising powers, numerator and denominator (Wichura 1988).
_CENTRE = (
    (3.3871328727963666080, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)
_TAIL = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550,
     3.64784832476320460504, 1.27045825245236838258, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)
# fmt: on


def _inverse_cdf(p: np.ndarray) -> np.ndarray:
    """Returns the quantiles of N(0, 1) at p, to some 1e-16 of their size.

    Source: M. J. Wichura, "Algorithm AS 241: The percentage points of the normal
    distribution", Applied Statistics 37 (1988), without its part for p < exp(-25).

    Args:
      p: float64, from exp(-25) to 1/2.

    Returns:
      float64, the shape of `p`.
    """
    q = p - 0.5
    r = np.sqrt(-np.log(p)) - 1.6
    centre = q * _ratio(_CENTRE, 0.180625 - q * q)
    return np.where(q >= -0.425, centre, -_ratio(_TAIL, r))


def _ratio(coefficients, x):
    """Returns the quotient of two polynomials, by Horner's rule."""
    above, below = (
        functools.reduce(lambda value, c: value * x + c, reversed(row))
        for row in coefficients
    )
    return above / below


@functools.cache
def normal_quantiles() -> np.ndarray:
    """Returns the quantiles of N(0, 1) at (i + 1/2) / 65536, i = 0 ... 65535.

    They are rounded to multiples of 2**-20, hence exact in float32, and antisymmetric.
    No quantile lies within 1e-12 of a rounding boundary: every routine accurate to
    that yields the same table, bit for bit.

    Returns:
      float32 `[65536]`, increasing, read-only.
    """
    half = _inverse_cdf((np.arange(TABLE_SIZE // 2) + 0.5) / TABLE_SIZE)
    half = np.rint(half * 2.0**20) / 2.0**20
    table = np.concatenate([half, -half[::-1]]).astype(np.float32)
    table.flags.writeable = False
    return table


def normals(
    seed: int,
    domain: Domain | int,
    streams: np.ndarray,
    indices: np.ndarray,
    block_size: int,
) -> np.ndarray:
    """Returns the normals at the addresses (streams[n], indices[n]).

    Philox at counter (index, g, stream, domain) gives dimensions 8g to 8g + 7: each of
    its four words gives two positions in the table, the low half first.

    Args:
      seed: an unsigned 64-bit integer, the Philox key.
      domain: `Domain.CODEBOOK` or `Domain.SHARED_CODEBOOK`.
      streams: uint32 `[N]`.
      indices: uint32 `[N]`.
      block_size: number of dimensions D.

    Returns:
      float32 `[N, D]`.

    Raises:
      ValueError: `seed` is out of range.
    """
    key = split_seed(seed)
    table = normal_quantiles()
    calls = -(-block_size // PER_CALL)
    result = np.empty((len(streams), block_size), np.float32)
    rows = max(1, _CHUNK // calls)
    for start in range(0, len(streams), rows):
        chunk = slice(start, start + rows)
        counter = np.empty((len(streams[chunk]), calls, 4), np.uint32)
        counter[..., 0] = indices[chunk, np.newaxis]
        counter[..., 1] = np.arange(calls)
        counter[..., 2] = streams[chunk, np.newaxis]
        counter[..., 3] = domain
        # Little-endian words, so that the view has the low half first anywhere.
        halves = philox4x32(counter, key).astype("<u4", copy=False).view("<u2")
        halves = halves.reshape(len(counter), calls * PER_CALL)
        result[chunk] = table[halves[:, :block_size]]
    return result


def symmetry(
    seed: int, blocks: int | np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how each block sees the shared codebook y.

    Dimension d of its candidate k is `flip[d] * y[k, shuffle[d]]`. Shuffled and
    flipped standard normals are standard normal, and no two blocks compete for the
    same directions.

    Args:
      seed: an unsigned 64-bit integer.
      blocks: an integer, or an integer array of any shape.
      block_size: number of dimensions D.

    Returns:
      `(shuffle, flip)`: int64 and float32 of +1 and -1, `[*blocks.shape, D]`.

    Raises:
      ValueError: `seed` or `blocks` is out of range.
    """
    return (
        permutation(seed, Domain.SHUFFLE, blocks, block_size),
        signs(seed, Domain.FLIP, blocks, block_size),
    )


def candidates(
    seed: int,
    blocks: np.ndarray,
    indices: np.ndarray,
    block_size: int,
    shared: bool,
) -> np.ndarray:
    """Returns candidate `indices[b]` of block `blocks[b]`, for each b.

    Args:
      seed: an unsigned 64-bit integer.
      blocks: integers `[B]` from 0 to 2**32 - 1.
      indices: integers `[B]` from 0 to 2**32 - 1.
      block_size: number of dimensions D.
      shared: False for a codebook per block, True for one codebook for all blocks,
        which each of them sees shuffled and flipped (see `symmetry`).

    Returns:
      float32 `[B, D]`: the candidates, standard normal. A weight is the mean plus the
      standard deviation of the coding distribution times this.

    Raises:
      ValueError: a shape or a value is out of range.
    """
    blocks = as_uint32("blocks", blocks)
    indices = as_uint32("indices", indices)
    if blocks.ndim != 1 or blocks.shape != indices.shape:
        raise ValueError(
            f"blocks and indices have shapes {blocks.shape} and {indices.shape}; "
            "pass two vectors of the same length."
        )
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}; pass an integer of at least 1.")
    if not shared:
        return normals(seed, Domain.CODEBOOK, blocks, indices, block_size)
    result = np.empty((len(blocks), block_size), np.float32)
    rows = max(1, PER_CALL * _CHUNK // block_size)
    for start in range(0, len(blocks), rows):
        chunk = slice(start, start + rows)
        shuffle, flip = symmetry(seed, blocks[chunk], block_size)
        y = normals(
            seed,
            Domain.SHARED_CODEBOOK,
            np.zeros_like(blocks[chunk]),
            indices[chunk],
            block_size,
        )
        result[chunk] = flip * np.take_along_axis(y, shuffle, axis=1)
    return result
