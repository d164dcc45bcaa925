"""Minimal random coding: a block of weights becomes the index of a random candidate.

Encoder and decoder share a codebook of K = 2**block_bits standard normal candidates.
The encoder draws an index with probability proportional to the importance weight
r = dQ/dP of the candidate (Havasi, Peharz and Hernández-Lobato, "Minimal random code
learning", ICLR 2019), or takes the candidate of largest weight.

The K weights are never held together. A compiled pass over the codebook keeps two
numbers for each leaf, some hundred consecutive candidates: the mean of their weights
and the largest. NumPy chooses a leaf from these, computes its candidates as the decoder
does, weighs them in float64 and chooses one.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmiracle import philox
from tfmiracle.codebook import (
    PER_CALL,
    candidates,
    check_code,
    normal_quantiles,
    normals,
    symmetry,
)
from tfmiracle.philox import Domain

SELECTIONS = ("sample", "largest_weight")
MAX_LOG_SCALE = 80.0  # exp(-log_scale) is then a normal float32

_LOWEST = -3e38  # instead of -inf, for log weights below the range of float32
_PRODUCT_BLOCKS = (64, 128)  # scored by one matrix product, padded to one of these
_PRODUCT_MIN = 8  # blocks from which that is faster than one after the other
_PRODUCT_CONDITION = 1 << 14  # see _condition; keeps log weights to about 1e-3 nats


class EncodedBlocks(NamedTuple):
    """What `MinimalRandomCoder.encode` found for each block.

    Attributes:
      indices: int64 `[B]`, the chosen candidates.
      log_weight: float32 `[B]`, log importance weight of the chosen candidate, in nats.
      log_evidence: float32 `[B]`, log of the mean importance weight of all candidates,
        in nats. Its ideal is 0; far below, the codebook is too small for the block's
        KL divergence.
    """

    indices: np.ndarray
    log_weight: np.ndarray
    log_evidence: np.ndarray


@dataclasses.dataclass(frozen=True)
class MinimalRandomCoder:
    """Encodes blocks of independent Gaussian weights, and decodes them.

    Everything is relative to the coding distribution P = N(nu, rho**2): a weight with
    Q = N(mu, sigma**2) has loc = (mu - nu) / rho and log_scale = log(sigma / rho), and
    a decoded z stands for the weight nu + rho * z.

    Attributes:
      block_bits: bits of an index, 0 to 28: there are K = 2**block_bits candidates.
      seed: unsigned 64-bit integer, which fixes the codebooks and the selection.
      codebook: "per_block" draws the candidates of each block independently, "shared"
        draws them once, and each block sees them shuffled and flipped
        (`tfmiracle.codebook.symmetry`). Shared, many blocks of one call are encoded an
        order of magnitude faster on a CPU.
      selection: "sample" draws k with probability r_k / sum(r), the rule of Havasi et
        al.; "largest_weight" takes the largest r_k, of equal ones the first.

    Raises:
      ValueError: an attribute is out of range or an unknown name.
    """

    block_bits: int
    seed: int
    codebook: str = "per_block"
    selection: str = "sample"

    def __post_init__(self) -> None:
        check_code(self.block_bits, self.codebook)
        philox.split_seed(self.seed)
        if self.selection not in SELECTIONS:
            raise ValueError(
                f"`selection` must be one of {SELECTIONS}. "
                f"Received: selection={self.selection!r}"
            )

    def encode(
        self, blocks: np.ndarray, loc: np.ndarray, log_scale: np.ndarray
    ) -> EncodedBlocks:
        """Chooses a candidate for each block.

        A dimension with loc = log_scale = 0, such as padding, contributes exactly
        nothing to any weight.

        The leaf is chosen by float32 weights, whose logarithms are good to about 1e-6
        of the largest term in them, or to about 1e-3 nats where a shared codebook is
        scored by matrix products. Within the leaf everything is float64. But for this
        rounding, a block's index does not depend on the other blocks of the call.

        Args:
          blocks: integers `[B]` from 0 to 2**32 - 1, the numbers of the blocks.
          loc: float32 `[B, D]`, (mu - nu) / rho.
          log_scale: float32 `[B, D]`, log(sigma / rho), from -80 to 80 nats.

        Returns:
          `EncodedBlocks`.

        Raises:
          ValueError: shapes do not fit, or a block has a value out of range.
        """
        blocks, loc, log_scale = _checked(blocks, loc, log_scale)
        if self.codebook == "shared":
            # Instead of the codebook, shuffle and flip what it is compared with.
            shuffle, flip = symmetry(self.seed, blocks, loc.shape[1])
            inverse = np.argsort(shuffle, axis=1)
            loc = np.take_along_axis(flip * loc, inverse, axis=1)
            log_scale = np.take_along_axis(log_scale, inverse, axis=1)
        batches = self._batches(loc, log_scale)
        result = EncodedBlocks(
            np.empty(len(blocks), np.int64),
            np.empty(len(blocks), np.float32),
            np.empty(len(blocks), np.float32),
        )

        def encode_batch(rows: np.ndarray, parts: int, map: Callable) -> None:
            means, maxima = self._leaves(
                blocks[rows], loc[rows], log_scale[rows], parts, map
            )
            # Some at a time, whose numbers stay in the cache of a core.
            numbers = leaf_size(self.block_bits) * loc.shape[1] + means.shape[1]
            some = max(1, (1 << 18) // numbers)

            def choose(start: int) -> None:
                part = slice(start, start + some)
                chosen = self._choose(
                    *(x[rows[part]] for x in (blocks, loc, log_scale)),
                    *(x[part] for x in (means, maxima)),
                )
                for array, values in zip(result, chosen, strict=True):
                    array[rows[part]] = values

            list(map(choose, range(0, len(rows), some)))

        # XLA runs the loops of a pass on one core. Several batches run side by side;
        # if there are too few of them, each scans parts of the codebook side by side.
        workers = 1 if _on_gpu() else usable_cores()
        pool = _pool(workers)
        if len(batches) < workers:
            parts = 1 << min(workers.bit_length() - 1, max(0, self.block_bits - 14))
            for rows in batches:
                encode_batch(rows, parts, pool.map)
        else:
            list(pool.map(lambda rows: encode_batch(rows, 1, map), batches))
        return result

    def decode(
        self, blocks: np.ndarray, indices: np.ndarray, block_size: int
    ) -> np.ndarray:
        """Returns the candidates at `indices`: float32 `[B, D]`, standard normal.

        The same as `tfmiracle.codebook.candidates`, which needs no TensorFlow.

        Raises:
          ValueError: an argument is out of range, or shapes do not fit.
        """
        indices = philox.as_uint32("indices", indices)
        last = (1 << self.block_bits) - 1
        if indices.size and indices.max() > last:
            raise ValueError(
                f"indices holds {indices.max()}; with block_bits = {self.block_bits}, "
                f"pass integers from 0 to {last}."
            )
        shared = self.codebook == "shared"
        return candidates(self.seed, blocks, indices, block_size, shared)

    def _address(self, blocks: np.ndarray) -> tuple[Domain, np.ndarray]:
        """Returns the domain and the streams of the blocks' candidates."""
        if self.codebook == "shared":
            return Domain.SHARED_CODEBOOK, np.zeros_like(blocks)
        return Domain.CODEBOOK, blocks

    def _batches(self, loc: np.ndarray, log_scale: np.ndarray) -> list[np.ndarray]:
        """Returns the rows to encode together: one, or some for a matrix product."""
        batches = []
        alone = np.ones(len(loc), bool)
        # A GPU may round products to TensorFloat-32, and does well without them.
        if self.codebook == "shared" and not _on_gpu():
            rows = np.flatnonzero(_condition(loc, log_scale) <= _PRODUCT_CONDITION)
            for start in range(0, len(rows), _PRODUCT_BLOCKS[-1]):
                batch = rows[start : start + _PRODUCT_BLOCKS[-1]]
                if len(batch) >= _PRODUCT_MIN:
                    batches.append(batch)
                    alone[batch] = False
        return batches + list(np.flatnonzero(alone)[:, np.newaxis])

    def _leaves(
        self,
        blocks: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
        parts: int = 1,
        map: Callable = map,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns log mean and log maximum of the weights, `[B, leaves]` each.

        The codebook is scanned in `parts`, a power of two, by `map`.
        """
        domain, streams = self._address(blocks)
        # A product takes one of few numbers of blocks: for each, XLA compiles anew.
        count = next(n for n in (1, *_PRODUCT_BLOCKS) if n >= len(blocks))
        loc, log_scale = (
            np.pad(x.astype(np.float64), [(0, count - len(blocks)), (0, 0)])
            for x in (loc, log_scale)
        )
        precision = np.exp(-2 * log_scale)
        log_volume = log_scale.sum(1)
        if len(blocks) == 1:
            make = _direct_pass
            inputs = (loc[0], np.exp(-log_scale[0]), log_volume[0])
        else:
            make = _product_pass
            constant = -0.5 * (loc**2 * precision).sum(1) - log_volume
            inputs = (
                np.hstack([0.5 * (1 - precision), loc * precision, constant[:, None]]),
            )
        size = (1 << self.block_bits) // parts
        scan = make(size, leaf_size(self.block_bits), loc.shape[1])
        key = tf.constant(philox.split_seed(self.seed), tf.uint32)
        stream, domain = (tf.constant(x, tf.uint32) for x in (streams[0], domain))
        inputs = [tf.constant(x, tf.float32) for x in inputs]

        def scan_part(first):
            return [x.numpy() for x in scan(key, stream, domain, first, *inputs)]

        firsts = [tf.constant(size * part) for part in range(parts)]
        means, maxima = zip(*map(scan_part, firsts))
        means, maxima = (np.concatenate(x, axis=1) for x in (means, maxima))
        return means[: len(blocks)], maxima[: len(blocks)]

    def _choose(
        self,
        blocks: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
        means: np.ndarray,
        maxima: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns index, log weight and log evidence of each block, `[B]` each."""
        loc, log_scale, means = (x.astype(np.float64) for x in (loc, log_scale, means))
        uniforms = _uniforms(self.seed, blocks)
        size, row = leaf_size(self.block_bits), np.arange(len(blocks))
        leaf = self._select(means, maxima, uniforms[:, 0])
        indices = (size * leaf[:, np.newaxis] + np.arange(size)).astype(np.uint32)
        domain, streams = self._address(np.repeat(blocks, size))
        z = normals(self.seed, domain, streams, indices.reshape(-1), loc.shape[1])
        z = z.astype(np.float64).reshape(*indices.shape, -1)
        t = (z - loc[:, np.newaxis]) * np.exp(-log_scale)[:, np.newaxis]
        weights = 0.5 * ((z - t) * (z + t)).sum(2) - log_scale.sum(1, keepdims=True)
        weights = np.maximum(weights, _LOWEST)
        chosen = self._select(weights, weights, uniforms[:, 1])
        top = means.max(1)
        log_evidence = top + np.log(np.exp(means - top[:, np.newaxis]).mean(1))
        return indices[row, chosen], weights[row, chosen], log_evidence

    def _select(
        self, means: np.ndarray, maxima: np.ndarray, uniforms: np.ndarray
    ) -> np.ndarray:
        if self.selection == "largest_weight":
            return np.argmax(maxima, axis=1)
        return _inverse_cdf(means, uniforms)


def leaf_size(block_bits: int) -> int:
    """Candidates of a leaf: 256, or as many as leave no more than 2**16 leaves."""
    return 1 << min(block_bits, max(8, block_bits - 16))


def _checked(
    blocks: np.ndarray, loc: np.ndarray, log_scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = philox.as_uint32("blocks", blocks)
    loc, log_scale = np.asarray(loc, np.float32), np.asarray(log_scale, np.float32)
    if blocks.ndim != 1:
        raise ValueError(f"blocks has shape {blocks.shape}; pass a vector.")
    for name, value in (("loc", loc), ("log_scale", log_scale)):
        if value.ndim != 2 or len(value) != len(blocks) or value.shape[1] == 0:
            raise ValueError(
                f"{name} has shape {value.shape}; pass one of ({len(blocks)}, "
                "block size), a row for each of the blocks."
            )
        bad = ~np.isfinite(value).all(1)
        if bad.any():
            raise ValueError(
                f"{name} of block {blocks[bad.argmax()]} is not finite; look for "
                "divergence in training."
            )
    if loc.shape != log_scale.shape:
        raise ValueError(
            f"loc and log_scale have shapes {loc.shape} and {log_scale.shape}; "
            "pass arrays of the same shape."
        )
    bad = np.abs(log_scale).max(1) > MAX_LOG_SCALE
    if bad.any():
        row = bad.argmax()
        value = log_scale[row, np.abs(log_scale[row]).argmax()]
        raise ValueError(
            f"log_scale of block {blocks[row]} holds {value}; pass values from "
            f"{-MAX_LOG_SCALE} to {MAX_LOG_SCALE} nats."
        )
    return blocks, loc, log_scale


def _condition(loc: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
    """Returns how large the terms of the expanded quadratic form are, `[B]`.

    Written as a * z**2 + b * z + c, a log weight near its maximum is a small
    difference of terms of this size: where float32 rounds them by a nat or more, only
    the form ((z - loc) / scale)**2 will do. No candidate is closer to 0 than 2**-16.
    """
    t = (np.abs(loc) + 2.0**-16) * np.exp(-log_scale.astype(np.float64))
    return (t * (t + 1)).sum(1)


def _uniforms(seed: int, blocks: np.ndarray) -> np.ndarray:
    """Returns two random numbers of 53 bits in [0, 1) for each block, `[B, 2]`."""
    words = philox.words(seed, Domain.SELECTION, blocks, 4).astype(np.uint64)
    high, low = words[:, ::2] << np.uint64(32), words[:, 1::2]
    return ((high | low) >> np.uint64(11)) * 2.0**-53


def _inverse_cdf(log_weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Returns for each row the first index whose cumulative weight is above its share.

    Args:
      log_weights: float64 `[B, N]`, in nats.
      uniforms: float64 `[B]`, in [0, 1).
    """
    top = log_weights.max(1, keepdims=True)
    cumulative = np.cumsum(np.exp(log_weights - top), axis=1)
    share = uniforms * cumulative[:, -1]
    return (cumulative <= share[:, np.newaxis]).sum(1)


def _on_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


@functools.cache
def _pool(workers: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads for all calls: to start them takes longer than to encode small blocks."""
    return concurrent.futures.ThreadPoolExecutor(workers)


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def usable_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The compiled passes over a codebook. XLA computes a value anew in each loop that uses
# it, and a loop with a gather may become scalar code altogether. What tf.map_fn and
# tf.foldl return, however, is stored. Below they keep the integer arithmetic, the
# gathers and the reductions apart, which makes the passes several times faster.


@functools.cache
def _direct_pass(size: int, leaf: int, block_size: int) -> Callable:
    """Returns the pass over `size` candidates for one block, whatever its Q.

    Its arguments are the key, uint32 `[2]`, stream and domain, uint32 `[]`, the first
    candidate, int32 `[]`, then float32: loc `[D]`, 1 / scale `[D]` and the sum of
    log_scale `[]`.
    It returns log mean and log maximum of the weights in each leaf, `[1, leaves]`.
    """
    # Steps that stay in the cache of a core, or keep a GPU busy.
    chunk, step = (1 << 20, 1 << 18) if _on_gpu() else (1 << 14, 1 << 11)
    chunk, step = min(chunk, size), min(step, size)

    @tf.function(jit_compile=True, autograph=False)
    def run(key, stream, domain, first, loc, inverse_scale, log_volume):
        whole, rest = divmod(block_size, PER_CALL)
        locs, inverse_scales = (
            tf.reshape(x[: whole * PER_CALL], [whole, PER_CALL])
            for x in (loc, inverse_scale)
        )

        def add(total, dims):
            words, loc, inverse_scale = dims
            for z, m, s in zip(
                _table_normals(words), tf.unstack(loc), tf.unstack(inverse_scale)
            ):
                t = (z - m) * s
                total += (z - t) * (z + t)  # without cancellation, 0 for padding
            return total

        def log_weights(first):
            words = _calls(first, step, block_size, stream, domain, key)
            total = tf.zeros([step])
            if whole:
                total = tf.foldl(add, (words[:whole], locs, inverse_scales), total)
            if rest:
                total = add(total, (words[-1], loc[-rest:], inverse_scale[-rest:]))
            return tf.maximum(0.5 * total - log_volume, _LOWEST)

        def reduce_chunk(first):
            steps = first + tf.range(0, chunk, step)
            x = tf.map_fn(log_weights, steps, fn_output_signature=tf.float32)
            return _reduce_leaves(tf.reshape(x, [1, chunk]), leaf)

        return _for_each_chunk(reduce_chunk, first, size, chunk)

    return run


@functools.cache
def _product_pass(size: int, leaf: int, block_size: int) -> Callable:
    """Returns the pass over `size` candidates for B blocks that share them.

    Its arguments are those of `_direct_pass` up to the first candidate, then the
    coefficients of z**2, z and 1 in the log weights, float32 `[B, 2 * D + 1]`. It
    returns log mean and log maximum of the weights in each leaf, `[B, leaves]`.
    """
    chunk = min(1 << 12, size)

    @tf.function(jit_compile=True, autograph=False)
    def run(key, stream, domain, first, coefficients):
        def reduce_chunk(first):
            z = tf.map_fn(
                _table_normals,
                _calls(first, chunk, block_size, stream, domain, key),
                fn_output_signature=[tf.float32] * PER_CALL,
            )
            z = tf.reshape(tf.stack(z, axis=1), [-1, chunk])[:block_size]
            powers = tf.concat([z * z, z, tf.ones([1, chunk])], axis=0)
            return _reduce_leaves(tf.matmul(coefficients, powers), leaf)

        return _for_each_chunk(reduce_chunk, first, size, chunk)

    return run


def _for_each_chunk(reduce_chunk, first, size, chunk):
    results = tf.map_fn(
        reduce_chunk,
        first + tf.range(0, size, chunk),
        fn_output_signature=(tf.float32, tf.float32),
    )
    # [chunks, B, leaves of a chunk] to [B, leaves]
    return tuple(
        tf.reshape(tf.transpose(x, [1, 0, 2]), [x.shape[1], -1]) for x in results
    )


def _reduce_leaves(x, leaf):
    """Returns log mean and maximum of exp(x) in each leaf of x `[B, candidates]`."""
    x = tf.reshape(x, [x.shape[0], -1, leaf])
    top = tf.reduce_max(x, -1)
    return top + tf.math.log(tf.reduce_mean(tf.exp(x - top[..., tf.newaxis]), -1)), top


def _calls(first, count, block_size, stream, domain, key):
    """Returns Philox of `count` candidates, complex128 `[ceil(D / 8), count]`."""
    index = tf.cast(first + tf.range(count), tf.uint32)
    return tf.map_fn(
        lambda g: _philox((index, tf.cast(g, tf.uint32), stream, domain), key),
        tf.range(-(-block_size // PER_CALL)),
        fn_output_signature=tf.complex128,
    )


def _philox(counter, key):
    """Returns the four words of `philox.philox4x32` in one complex128.

    As four outputs, XLA would compute all rounds four times over. Words 0 and 1 are
    the bits of the real part, low half first, words 2 and 3 those of the imaginary.
    """
    half, mask = (tf.constant(x, tf.uint64) for x in (32, 0xFFFFFFFF))
    multipliers = [tf.constant(x, tf.uint64) for x in philox.MULTIPLIERS]
    increments = [tf.constant(x, tf.uint32) for x in philox.KEY_INCREMENTS]
    x0, x1, x2, x3 = (tf.cast(x, tf.uint64) for x in counter)
    k0, k1 = tf.unstack(key)
    for _ in range(philox.ROUNDS):
        # The masks change nothing, but say that a 32-bit multiplication will do.
        p0, p1 = (x0 & mask) * multipliers[0], (x2 & mask) * multipliers[1]
        x0 = tf.bitwise.right_shift(p1, half) ^ x1 ^ tf.cast(k0, tf.uint64)
        x2 = tf.bitwise.right_shift(p0, half) ^ x3 ^ tf.cast(k1, tf.uint64)
        x1, x3 = p1 & mask, p0 & mask
        k0, k1 = k0 + increments[0], k1 + increments[1]
    pairs = (
        low | tf.bitwise.left_shift(high, half) for low, high in ((x0, x1), (x2, x3))
    )
    return tf.complex(*(tf.bitcast(pair, tf.float64) for pair in pairs))


def _table_normals(words):
    """Returns the eight normals of each result of `_philox`, a list of float32."""
    table = tf.constant(normal_quantiles())
    mask = tf.constant(0xFFFF, tf.uint64)
    result = []
    for part in (tf.math.real(words), tf.math.imag(words)):
        bits = tf.bitcast(part, tf.uint64)
        for shift in range(0, 64, 16):
            position = (
                tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64)) & mask
            )
            result.append(tf.gather(table, tf.cast(position, tf.int32)))
    return result
