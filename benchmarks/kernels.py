"""Variance, coder and codebook, against the naive way, C and the machine's limits."""

import concurrent.futures
import ctypes
import functools
import itertools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from timing import (
    CORES,
    best,
    best_of_each,
    bytes_per_ms,
    loops,
    milliseconds,
    operations_per_ms,
    peak_mb,
    words_per_ms,
)

from tfmiracle.codec import codebook, philox
from tfmiracle.codec.trellis import TrellisCode
from tfmiracle.coding import minimal_random as coder
from tfmiracle.coding import philox_xla
from tfmiracle.coding.trellis import TrellisCoder
from tfmiracle.posteriors.mean_kl import log_scale_ratio

BITS = 20
SEED = 7


def printed_variance(s):
    """log(sigma / rho) by the formula as the paper prints it (equation 3)."""
    x = -tf.exp(-0.5 * s * s - 1.0)
    return 0.5 * tf.math.log(-tfp.math.lambertw(x))


def variance(jit: bool, least: float) -> dict:
    """Forward and backward, for a million weights with s from `least` to 8.

    TFP's iteration goes on until all of them converge, which small s never do.
    """
    s = tf.constant(np.geomspace(least, 8, 1 << 20), tf.float32)

    def timed(kernel):
        @tf.function(jit_compile=jit)
        def run(s):
            with tf.GradientTape() as tape:
                tape.watch(s)
                y = kernel(s)
            return y, tape.gradient(y, s)

        return lambda: run(s)

    peer = "tfp.math.lambertw"
    times = best_of_each(
        {"ours": timed(log_scale_ratio), peer: timed(printed_variance)}
    )
    return {
        "ours": times["ours"],
        "peers": {peer: times[peer]},
        "limits": {"memory": 3 * s.numpy().nbytes / bytes_per_ms()},  # in, two out
        "targets": {peer: 50 if jit else 100},
    }


def gaussians(blocks: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of the budget, 20 bits: (loc, log_scale) `[blocks, block_size]`."""
    rng = np.random.default_rng(0)
    kl = BITS * np.log(2) * rng.dirichlet(np.ones(block_size), blocks)
    tanh = rng.uniform(-0.9, 0.9, kl.shape)
    s = np.sqrt(4 * kl * (1 - tanh**2)).astype(np.float32)
    return (np.sqrt(2 * kl) * tanh).astype(np.float32), log_scale_ratio(s).numpy()


def naive(loc, scale, seed):
    """Minimal random coding in a few lines of TFP; everything of size K at once."""
    p = tfp.distributions.MultivariateNormalDiag(tf.zeros_like(loc), tf.ones_like(loc))
    q = tfp.distributions.MultivariateNormalDiag(loc, scale)
    z = p.sample(1 << BITS, seed=seed)
    log_weights = q.log_prob(z) - p.log_prob(z)
    return tfp.distributions.Categorical(log_weights).sample(seed=seed)


def naive_call(wrap: Callable, block_size: int) -> Callable:
    """A call of it, with another seed each time."""
    loc, log_scale = gaussians(1, block_size)
    inputs = tf.constant(loc[0]), tf.constant(np.exp(log_scale[0]))
    function, seeds = wrap(naive), itertools.count()
    return lambda: function(*inputs, tf.constant([1, next(seeds)])).numpy()


def encode_one(block_size: int) -> dict:
    """A block with a codebook of its own."""
    loc, log_scale = gaussians(1, block_size)
    ours = coder.MinimalRandomCoder(BITS, SEED, "per_block", "sample")
    numbers = itertools.count()
    arrays = [codebook.normal_quantiles(), loc[0], np.exp(-log_scale[0])]
    leaves = (1 << BITS) // coder.leaf_size(BITS)
    found = [np.empty(leaves, np.float32) for _ in range(2)]
    table, mean, inverse, means, maxima = (
        x.ctypes.data_as(ctypes.c_void_p) for x in (*arrays, *found)
    )
    volume = ctypes.c_float(log_scale.sum())

    def score(number):
        loops().score(
            *(1 << BITS, block_size, number, SEED, 0),
            *(table, mean, inverse, volume, means, maxima),
        )

    score(3)
    expected = ours._leaves(np.array([3], np.uint32), loc, log_scale)  # one core
    for there, here in zip(expected, found):
        np.testing.assert_allclose(here, there[0], atol=2e-3)

    times = best_of_each(
        {
            "ours": lambda: ours.encode([next(numbers)], loc, log_scale),
            "C": lambda: score(next(numbers)),
            "TFP, graph": naive_call(tf.function, block_size),
            "TFP, eager": naive_call(lambda f: f, block_size),
            "TFP, jitted": naive_call(
                lambda f: tf.function(f, jit_compile=True), block_size
            ),
        }
    )
    words = -(-block_size // 8) * 4 << BITS
    times["C"] /= CORES  # as if it, too, gave each core a part of the codebook
    return {
        "ours": times.pop("ours"),
        "peers": times,
        "limits": {"generator": words / words_per_ms() / CORES},
        "targets": {"TFP, graph": 15, "C": 0.8},
    }


def encode_memory(bits: int) -> dict:
    """What it takes above TensorFlow itself."""
    loc, log_scale = gaussians(1, 32)
    before = peak_mb()
    coder.MinimalRandomCoder(bits, SEED).encode([1], loc, log_scale)
    return {
        "unit": "MiB",
        "ours": peak_mb() - before,
        "peers": {"200 MB": 200e6 / 2**20},
        "targets": {"200 MB": 1},
    }


def naive_memory() -> dict:
    """The same of the naive way, at 2**20."""
    call = naive_call(tf.function, 32)
    before = peak_mb()
    call()
    return {"unit": "MiB", "ours": peak_mb() - before}


def naive_many(block_size: int, blocks: int) -> Callable:
    """A codebook, its products with all blocks, and a choice for each of them."""
    loc, log_scale = (tf.constant(x) for x in gaussians(blocks, block_size))
    seeds = itertools.count()

    @tf.function
    def run(seed):
        z = tf.random.stateless_normal([1 << BITS, block_size], seed)
        precision = tf.exp(-2 * log_scale)
        log_weights = tf.matmul(z * z, 0.5 * (1 - precision), transpose_b=True)
        log_weights += tf.matmul(z, loc * precision, transpose_b=True)
        return tf.random.stateless_categorical(tf.transpose(log_weights), 1, seed)

    return lambda: run(tf.constant([1, next(seeds)]))


def encode_many(block_size: int) -> dict:
    """A block of many with a shared codebook, on all cores.

    TFP has one codebook for each block, plain TensorFlow one for 16 blocks, since
    its memory grows with their number.
    """
    blocks = 512
    loc, log_scale = gaussians(blocks, block_size)
    ours = coder.MinimalRandomCoder(BITS, SEED, "shared", "sample")
    numbers = itertools.count()

    def encode():
        ours.encode(next(numbers) * blocks + np.arange(blocks), loc, log_scale)

    times = best_of_each(
        {
            "ours": encode,
            "TFP, graph": naive_call(tf.function, block_size),
            "TF, graph, shared": naive_many(block_size, 16),
        }
    )
    # z**2, z and 1 times their coefficients, for every candidate
    operations = 2 * (2 * block_size + 1) << BITS
    product = "multiply-adds of the product, all cores"
    return {
        "ours": times["ours"] / blocks,
        "peers": {
            "TFP, graph": times["TFP, graph"],
            "TF, graph, shared": times["TF, graph, shared"] / 16,
        },
        "limits": {product: operations / operations_per_ms()},
        "targets": {"TFP, graph": 120, product: 0.5},
    }


def generate() -> dict:
    """2**20 candidates of 32 dimensions, written to memory, ours in pieces."""
    shape, chunk = [1 << 20, 32], 1 << 11
    parts = 1 << CORES.bit_length() - 1
    share = shape[0] // parts

    @tf.function(jit_compile=True, autograph=False)
    def part(key, stream, first):
        def some(start):
            index = tf.cast(start + tf.range(chunk), tf.uint32)
            calls = philox_xla.calls(
                key, 0, stream, index, shape[1] // codebook.PER_CALL
            )
            return tf.map_fn(
                coder._table_normals,
                calls,
                fn_output_signature=[tf.float32] * codebook.PER_CALL,
            )

        return tf.map_fn(
            some,
            first + tf.range(0, share, chunk),
            fn_output_signature=[tf.float32] * codebook.PER_CALL,
        )

    pool = concurrent.futures.ThreadPoolExecutor(CORES)
    numbers = itertools.count()
    key = tf.constant(philox.split_seed(SEED), tf.uint32)

    def ours():
        stream = tf.constant(next(numbers), tf.uint32)
        firsts = [tf.constant(i * share) for i in range(parts)]
        return list(pool.map(lambda first: part(key, stream, first), firsts))

    index = np.arange(1 << 16, dtype=np.uint32)  # a part, for NumPy
    stream = np.zeros_like(index)
    normals = tf.random.stateless_normal
    jitted = tf.function(normals, jit_compile=True)
    peers = {
        "stateless_normal": lambda: normals(shape, [0, next(numbers)]),
        "stateless_normal, jitted": lambda: jitted(shape, [0, next(numbers)]),
        "NumPy Philox": lambda: np.random.Generator(
            np.random.Philox(next(numbers))
        ).standard_normal(shape, np.float32),
    }
    times = best_of_each({"ours": ours, **peers})
    here = 16 * best(lambda: codebook.normals(SEED, 0, stream, index, 32), 3)
    return {
        "ours": times.pop("ours"),
        "peers": {**times, "ours in NumPy, from a 16th": here},
        "limits": {
            "generator, all cores": 2**24 / words_per_ms() / CORES,
            "memory": 4 * 2**25 / bytes_per_ms(),
        },
        "targets": dict.fromkeys(peers, 3),
    }


def one_shot(block_size: int = 20) -> dict:
    """All blocks of models of growing size at once; ms per thousand weights."""
    ours = coder.MinimalRandomCoder(BITS, SEED, "shared", "largest_weight")
    found = {}
    for weights in (62_500, 250_000, 1_000_000):
        blocks = weights // block_size
        loc, log_scale = gaussians(blocks, block_size)
        numbers = np.arange(blocks)
        if not found:  # compiles the passes that these models need
            for some in (256, blocks):
                ours.encode(numbers[:some], loc[:some], log_scale[:some])
        time = milliseconds(functools.partial(ours.encode, numbers, loc, log_scale))
        found[f"{weights:,} weights"] = time / weights * 1e3
    names = list(found)
    return {
        "unit": "ms per 1,000 weights",
        "ours": found.pop(names[-1]),
        "peers": found,
        "targets": {names[0]: 0.9},
    }


def trellis(state_bits: int, target: float) -> dict:
    """A million weights at one bit each, in one go; ms per thousand weights."""
    weights, block_size = 1_000_000, 20
    blocks = weights // block_size
    loc, log_scale = gaussians(blocks, block_size)
    ours = TrellisCoder(
        state_bits, BITS, num_weights=weights, block_size=block_size, seed=SEED
    )
    blockwise = coder.MinimalRandomCoder(BITS, SEED, "shared", "largest_weight")
    sixteenth, some = blocks // 16, 1000

    def encode(coder, count):
        return lambda: coder.encode(np.arange(count), loc[:count], log_scale[:count])

    def naive():
        viterbi(ours.code, loc.reshape(-1)[:some], log_scale.reshape(-1)[:some])

    times = best_of_each(
        {"ours": encode(ours, blocks), "MRC": encode(blockwise, sixteenth)}, 2
    )
    # Of each weight and state: three sums, two products and one to add up. Of each stem
    # and symbol: 15 comparisons with two choices each. Of each state and symbol: three.
    operations = 2**state_bits * (6 + (45 / 16 + 3) / 4)  # a weight
    return {
        "unit": "ms per 1,000 weights",
        "ours": times["ours"] / weights * 1e3,
        "peers": {
            "MRC, 2**20, shared, from a 16th": 16 * times["MRC"] / weights * 1e3,
            "NumPy, from 1,000 weights": milliseconds(naive) / some * 1e3,
        },
        # A product that is added at once counts as two for the machine.
        "limits": {"operations, all cores": 2e3 * operations / operations_per_ms()},
        "targets": {"MRC, 2**20, shared, from a 16th": target},
    }


def viterbi(code: TrellisCode, loc: np.ndarray, log_scale: np.ndarray) -> list:
    """The choices of a trellis as NumPy makes them, a pass for each weight."""
    states, table = 1 << code.state_bits, code.table()
    score, choices = np.zeros(states, np.float32), []
    weights = np.arange(len(loc))
    entering = np.diff(code.entered(weights), prepend=0)
    for offset, m, s, symbols in zip(
        code.offsets(weights), loc, np.exp(-log_scale), entering
    ):
        for _ in range(symbols):
            paths = score.reshape(16, -1)
            choices.append(paths.argmax(0).astype(np.uint8))
            score = np.repeat(paths.max(0), 16)
        z = table[(np.arange(states) + offset) & (len(table) - 1)]
        t = (z - m) * s
        score = score + 0.5 * (z - t) * (z + t)
    return choices


ROWS = {
    "log sigma of 1 M weights, forward and backward, graph": lambda: variance(
        False, 1e-3
    ),
    "the same, XLA": lambda: variance(True, 1e-3),
    "the same, graph, s from 0.1": lambda: variance(False, 0.1),
    "the same, XLA, s from 0.1": lambda: variance(True, 0.1),
    "encode a block, own codebook, D = 20": lambda: encode_one(20),
    "the same, D = 32": lambda: encode_one(32),
    "the same, D = 40": lambda: encode_one(40),
    "memory for it, D = 32, K = 2**16": lambda: encode_memory(16),
    "the same, K = 2**20": lambda: encode_memory(20),
    "the same, K = 2**24": lambda: encode_memory(24),
    "memory of TFP, graph, K = 2**20": naive_memory,
    "encode a block of many, shared codebook, D = 20": lambda: encode_many(20),
    "the same, D = 32, shared": lambda: encode_many(32),
    "generate a codebook of 2**20 x 32": generate,
    "encode a model of 1 M weights in one shot, D = 20": one_shot,
    "the same as a trellis, 2**12 states": lambda: trellis(12, 4),
    "the same, 2**16 states": lambda: trellis(16, 1),
}
