"""Minimal random coding: a block of weights becomes the index of a random candidate.

Encoder and decoder share a codebook of K = 2**block_bits standard normal candidates.
The encoder draws an index with probability proportional to the importance weight
r = dQ/dP of the candidate (Havasi, Peharz and Hernández-Lobato, "Minimal random code
learning", ICLR 2019), or takes the candidate of largest weight.

The K weights are never held together. A compiled pass over the codebook keeps two
numbers for each leaf, some hundred consecutive candidates: the mean of their weights
and the largest. From these NumPy chooses a leaf, and from its candidates, weighed in
float64, one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfmiracle.codec import philox
from tfmiracle.codec.code import MinimalRandomCode
from tfmiracle.codec.codebook import PER_CALL, normal_quantiles, normals, symmetry
from tfmiracle.codec.philox import Domain
from tfmiracle.coding.coder import (
    CODERS,
    LOWEST,
    Coder,
    EncodedBlocks,
    check_posterior,
    check_selection,
)
from tfmiracle.coding.philox_xla import calls
from tfmiracle.coding.workers import on_gpu, pool, workers

_STEP = 64  # Several blocks are padded to this or 2, 4, 8 times it: few are compiled.
_PRODUCT_MIN = 8  # blocks from which a matrix product is faster than one by one
_PRODUCT_MAX = 512  # blocks of a matrix product
_MAX_LEAVES = 1 << 22  # of all blocks of a product together
_DIRECT_CHUNK, _PRODUCT_CHUNK = 1 << 14, 1 << 11  # candidates, on a CPU
_PRODUCT_CONDITION = 1 << 14  # see _condition; keeps log weights to about 1e-3 nats


@CODERS.register
@dataclasses.dataclass(frozen=True)
class MinimalRandomCoder(Coder):
    """Chooses a candidate of a codebook for each block (Havasi et al. 2019).

    Attributes:
      block_bits: bits of an index, 0 to 28: there are K = 2**block_bits candidates.
      seed: unsigned 64-bit integer, which fixes the codebooks and the selection.
      codebook: "per_block" draws the candidates of each block independently, "shared"
        draws them once, and each block sees them shuffled and flipped (`symmetry`).
        Shared, many blocks of one call are encoded an order of magnitude faster on a
        CPU.
      selection: "sample" draws k with probability r_k / sum(r), the rule of Havasi et
        al.; "largest_weight" takes the largest r_k, of equal ones the first.

    Raises:
      ValueError: an attribute is out of range or an unknown name.
    """

    identifier: ClassVar[str] = "mrc"
    block_bits: int = MinimalRandomCode.block_bits
    seed: int = 0
    codebook: str = MinimalRandomCode.codebook
    selection: str = "largest_weight"

    def __post_init__(self) -> None:
        _ = self.code  # checks what it is made of
        check_selection(self.selection)

    @property
    def code(self) -> MinimalRandomCode:
        return MinimalRandomCode(self.seed, self.block_bits, self.codebook)

    def encode(
        self,
        blocks: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
        before: np.ndarray | None = None,
    ) -> EncodedBlocks:
        """Chooses a candidate for each block, see `Coder.encode`.

        The leaf is chosen by float32 weights, whose logarithms are good to about 1e-6
        of the largest term in them, or to about 1e-3 nats where a shared codebook is
        scored by matrix products. Within the leaf everything is float64. But for this
        rounding, a block's index does not depend on the other blocks of the call.
        """
        blocks, loc, log_scale = check_posterior(blocks, loc, log_scale)
        if self.code.shared:
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
            # Some at a time, if their leaves have not too many numbers.
            numbers = leaf_size(self.block_bits) * loc.shape[1]
            some = _STEP if numbers <= 1 << 17 else 1

            def choose(start: int) -> None:
                part = slice(start, start + some)
                chosen = self._choose(
                    *(x[rows[part]] for x in (blocks, loc, log_scale)),
                    *(x[part] for x in (means, maxima)),
                )
                for array, values in zip(result, chosen, strict=True):
                    array[rows[part]] = values

            list(map(choose, range(0, len(rows), some)))

        # XLA runs the loops of a pass on one core. So parts of the codebook are scanned
        # side by side, or blocks that are alone, if there are enough of them.
        count = workers()
        threads = pool(count)
        parts = 1 << count.bit_length() - 1
        if parts < count:
            parts *= 8  # which the cores can share more evenly
        alone = [rows for rows in batches if len(rows) == 1]
        if len(alone) >= count:
            list(threads.map(lambda rows: encode_batch(rows, 1, map), alone))
            batches = [rows for rows in batches if len(rows) > 1]
        for rows in batches:
            encode_batch(rows, parts, threads.map)
        return result

    def _address(self, block: int) -> tuple[tuple[int, int], int, int]:
        """Returns the key, and domain and stream of a block's candidates."""
        shared = self.code.shared
        domain = Domain.SHARED_CODEBOOK if shared else Domain.CODEBOOK
        return philox.split_seed(self.seed), domain, 0 if shared else block

    def _batches(self, loc: np.ndarray, log_scale: np.ndarray) -> list[np.ndarray]:
        """Returns the rows to encode together: one, or some for a matrix product."""
        batches = []
        alone = np.ones(len(loc), bool)
        # A GPU may round products to TensorFloat-32, and does well without them.
        if self.code.shared and not on_gpu():
            rows = np.flatnonzero(_condition(loc, log_scale) <= _PRODUCT_CONDITION)
            leaves = (1 << self.block_bits) // leaf_size(self.block_bits)
            most = min(_PRODUCT_MAX, _MAX_LEAVES // leaves)
            for start in range(0, len(rows), most):
                batch = rows[start : start + most]
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

        The codebook is scanned in up to `parts`, a power of two, by `map`.
        """
        loc, log_scale = (x.astype(np.float64) for x in _padded(loc, log_scale))
        precision = np.exp(-2 * log_scale)
        log_volume = log_scale.sum(1)
        if len(loc) == 1:
            make, chunk = _direct_pass, _DIRECT_CHUNK
            inputs = (loc[0], np.exp(-log_scale[0]), log_volume[0])
        else:
            make, chunk = _product_pass, _PRODUCT_CHUNK
            constant = -0.5 * (loc**2 * precision).sum(1) - log_volume
            inputs = (
                np.hstack([0.5 * (1 - precision), loc * precision, constant[:, None]]),
            )
        parts = min(parts, max(1, (1 << self.block_bits) // chunk))
        size = (1 << self.block_bits) // parts
        scan = make(size, leaf_size(self.block_bits), loc.shape[1])
        address = [tf.constant(x, tf.uint32) for x in self._address(blocks[0])]
        inputs = [tf.constant(x, tf.float32) for x in inputs]

        def scan_part(first):
            return [x.numpy() for x in scan(*address, first, *inputs)]

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
        uniforms, row = _uniforms(self.seed, blocks), np.arange(len(blocks))
        leaf = self._select(means, maxima, uniforms[:, 0])
        weights = self._weigh_leaf(blocks, leaf, loc, log_scale)
        chosen = self._select(weights, weights, uniforms[:, 1])
        top = means.max(1)
        share = np.exp(means - top[:, np.newaxis]).mean(1, dtype=np.float64)
        indices = leaf * weights.shape[1] + chosen
        return indices, weights[row, chosen], top + np.log(share)

    def _weigh_leaf(
        self,
        blocks: np.ndarray,
        leaf: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
    ) -> np.ndarray:
        """Returns the log weights in a leaf for each block, float64 `[B, leaf]`."""
        count, size = len(blocks), leaf_size(self.block_bits)
        loc, log_scale = loc.astype(np.float64), log_scale.astype(np.float64)
        key, domain, stream = self._address(blocks[0])
        if count == 1:  # sooner done than XLA called
            index = (size * leaf + np.arange(size)).astype(np.uint32)
            streams = np.full_like(index, stream)
            z = normals(self.seed, domain, streams, index, loc.shape[1])
            z = z.astype(np.float64)
            t = (z - loc) * np.exp(-log_scale)
            weights = 0.5 * ((z - t) * (z + t)).sum(1) - log_scale.sum()
            return np.maximum(weights, LOWEST)[np.newaxis]
        leaf, loc, log_scale = _padded(leaf, loc, log_scale)
        address = [tf.constant(x, tf.uint32) for x in (key, domain, stream)]
        first = tf.constant(size * leaf, tf.uint32)
        inputs = (loc, np.exp(-log_scale), log_scale.sum(1))
        inputs = [tf.constant(x, tf.float64) for x in inputs]
        return _leaf_pass(size, loc.shape[1])(*address, first, *inputs).numpy()[:count]

    def _select(
        self, means: np.ndarray, maxima: np.ndarray, uniforms: np.ndarray
    ) -> np.ndarray:
        if self.selection == "largest_weight":
            return np.argmax(maxima, axis=1)
        return _inverse_cdf(means, uniforms)


def leaf_size(block_bits: int) -> int:
    """Candidates of a leaf: 256, or as many as leave no more than 2**16 leaves."""
    return 1 << min(block_bits, max(8, block_bits - 16))


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


def _padded(*arrays: np.ndarray) -> list[np.ndarray]:
    """Returns arrays of one row, or with zeros after the last of several rows."""
    count = padded = len(arrays[0])
    if count > 1:
        padded = max(_STEP, 1 << (count - 1).bit_length())
    rows = (0, padded - count)
    return [np.pad(x, [rows] + [(0, 0)] * (x.ndim - 1)) for x in arrays]


def _inverse_cdf(log_weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Returns for each row the first index whose cumulative weight is above its share.

    Args:
      log_weights: float `[B, N]`, in nats, N a power of two.
      uniforms: float64 `[B]`, in [0, 1).
    """
    row = np.arange(len(log_weights))
    weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
    # Groups first, since all cumulative weights would take longer than exp.
    groups = weights.reshape(len(row), -1, min(64, weights.shape[1]))

    def find(weights, share):
        cumulative = np.cumsum(weights, axis=1)
        share = np.clip(share, 0, np.nextafter(cumulative[:, -1], 0))  # if rounded
        index = (cumulative <= share[:, np.newaxis]).sum(1)
        return index, share - (cumulative[row, index] - weights[row, index])

    sums = groups.sum(2, dtype=np.float64)
    group, share = find(sums, uniforms * sums.sum(1))
    within, _ = find(groups[row, group].astype(np.float64), share)
    return group * groups.shape[2] + within


# The compiled passes over a codebook. XLA computes a value anew in each loop that uses
# it, and a loop with a gather may become scalar code altogether. What tf.map_fn and
# tf.foldl return, however, is stored. Below they keep the integer arithmetic, the
# gathers and the reductions apart, which makes the passes several times faster.
# Each block size has functions of its own, or TensorFlow would warn of many shapes.


@functools.cache
def _direct_pass(size: int, leaf: int, block_size: int) -> Callable:
    """Returns the pass over `size` candidates for one block, whatever its Q.

    Its arguments are the key, uint32 `[2]`, domain and stream, uint32 `[]`, the first
    candidate, int32 `[]`, then float32: loc `[D]`, 1 / scale `[D]` and the sum of
    log_scale `[]`.
    It returns log mean and log maximum of the weights in each leaf, `[1, leaves]`.
    """
    # Steps that stay in the cache of a core, or keep a GPU busy.
    chunk, step = (1 << 20, 1 << 18) if on_gpu() else (_DIRECT_CHUNK, 1 << 11)
    chunk, step = min(chunk, size), min(step, size)

    @tf.function(jit_compile=True, autograph=False)
    def run(key, domain, stream, first, *posterior):
        def log_weights(first):
            index = tf.cast(first + tf.range(step), tf.uint32)
            return _log_weights(key, domain, stream, index, *posterior)

        def reduce_chunk(first):
            steps = first + tf.range(0, chunk, step)
            x = tf.map_fn(log_weights, steps, fn_output_signature=tf.float32)
            return _reduce_leaves(tf.reshape(x, [1, chunk]), leaf)

        return _for_each_chunk(reduce_chunk, first, size, chunk)

    return run


@functools.cache
def _leaf_pass(leaf: int, block_size: int) -> Callable:
    """Returns the weighing of a leaf for each of B blocks that share the codebook.

    Its arguments are the key, uint32 `[2]`, domain and stream, uint32 `[]`, the first
    candidates, uint32 `[B]`, then float64: loc `[B, D]`, 1 / scale `[B, D]` and the
    sums of log_scale `[B]`. It returns the log weights, `[B, leaf]`.
    """

    @tf.function(jit_compile=True, autograph=False)
    def run(key, domain, stream, first, *posterior):
        index = first[:, tf.newaxis] + tf.cast(tf.range(leaf), tf.uint32)
        return _log_weights(key, domain, stream, index, *posterior)

    return run


def _log_weights(key, domain, stream, index, loc, inverse_scale, log_volume):
    """Returns the log weights of candidates, `[..., N]`.

    Args:
      key, domain, stream, index: of the candidates, see `calls`.
      loc, inverse_scale: of Q, `[..., D]`, of the type of the result.
      log_volume: sum of log_scale, `[...]`.
    """
    # Dimensions first, eight for each call of Philox.
    whole, rest = divmod(loc.shape[-1], PER_CALL)
    loc, inverse_scale = (
        tf.transpose(x)[..., tf.newaxis] for x in (loc, inverse_scale)
    )
    by_call = [
        tf.reshape(x[: whole * PER_CALL], [whole, PER_CALL, *x.shape[1:]])
        for x in (loc, inverse_scale)
    ]

    def add(total, dims):
        words, loc, inverse_scale = dims
        for z, m, s in zip(
            _table_normals(words), tf.unstack(loc), tf.unstack(inverse_scale)
        ):
            z = tf.cast(z, total.dtype)
            t = (z - m) * s
            total += (z - t) * (z + t)  # without cancellation, 0 for padding
        return total

    words = calls(key, domain, stream, index, whole + bool(rest))
    total = tf.zeros(index.shape, loc.dtype)
    if whole:
        total = tf.foldl(add, (words[:whole], *by_call), total)
    if rest:
        total = add(total, (words[-1], loc[-rest:], inverse_scale[-rest:]))
    return tf.maximum(0.5 * total - log_volume[..., tf.newaxis], LOWEST)


@functools.cache
def _product_pass(size: int, leaf: int, block_size: int) -> Callable:
    """Returns the pass over `size` candidates for B blocks that share them.

    Its arguments are those of `_direct_pass` up to the first candidate, then the
    coefficients of z**2, z and 1 in the log weights, float32 `[B, 2 * D + 1]`. It
    returns log mean and log maximum of the weights in each leaf, `[B, leaves]`.
    """
    chunk = min(max(_PRODUCT_CHUNK, leaf), size)

    @tf.function(jit_compile=True, autograph=False)
    def run(key, domain, stream, first, coefficients):
        def reduce_chunk(first):
            index = tf.cast(first + tf.range(chunk), tf.uint32)
            z = tf.map_fn(
                _table_normals,
                calls(key, domain, stream, index, -(-block_size // PER_CALL)),
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
    # XLA stores what a reduction reads, but adds up a few slices on the way.
    slices = tf.split(tf.reshape(x, [x.shape[0], -1, leaf]), min(8, leaf), axis=-1)
    top = tf.reduce_max(functools.reduce(tf.maximum, slices), -1, keepdims=True)
    mean = tf.reduce_sum(tf.add_n([_exp(part - top) for part in slices]), -1) / leaf
    return top[..., 0] + tf.math.log(mean), top[..., 0]


def _exp(x):
    """Returns exp(x) for x <= 0, in float32.

    Relative errors are below 3e-7 + 1e-7 * |x|. What is below 2**-126 becomes that.
    With XLA's own exponential, a pass by matrix products takes 5 to 10 % longer.
    """
    x = tf.maximum(x * 1.442695040888963, -126.0)
    whole = tf.round(x)
    x -= whole
    power = tf.constant(0.00132647273)  # 2**x by a polynomial, exact at 0
    for c in (0.00967151299, 0.0555073358, 0.240222424, 0.693147004, 1.0):
        power = power * x + c
    # Times 2**whole: added to 1.5 * 2**23, an integer stands in the low bits.
    exponent = tf.bitwise.left_shift(tf.bitcast(whole + 12582912.0, tf.int32), 23)
    return tf.bitcast(tf.bitcast(power, tf.int32) + exponent, tf.float32)


@functools.cache
def _quantile_table() -> tf.Tensor:
    # An argument of what is compiled. As a constant it costs the compiler 30 MiB.
    with tf.init_scope():
        return tf.constant(normal_quantiles())


def _table_normals(words):
    """Returns the eight normals of each result of `philox4x32`, a list of float32."""
    table = _quantile_table()
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
