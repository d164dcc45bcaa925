"""Minimal random coding against the enumeration of all candidates in float64."""

import os
import re
import signal
import warnings

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support import HOST

from tfmiracle.codec import codebook, philox
from tfmiracle.codec.philox import Domain
from tfmiracle.coding import minimal_random as coder
from tfmiracle.coding import philox_xla
from tfmiracle.coding.coder import SELECTIONS
from tfmiracle.coding.minimal_random import MinimalRandomCoder

SEED = 0xFEDCBA9876543210
BITS = 15  # more than a chunk of either pass
CODEBOOKS = pytest.mark.parametrize("codebook_name", codebook.CODEBOOKS)
SELECTIONS = pytest.mark.parametrize("selection", SELECTIONS)


def the_papers(block_bits, seed, codebook="per_block", selection="sample"):
    """A coder with the choices of Havasi et al. (2019)."""
    return MinimalRandomCoder(block_bits, seed, codebook, selection)


def posterior(num_blocks, block_size, seed=0):
    """Blocks of a few nats; the last dimension of all, and the first block, padding."""
    rng = np.random.default_rng(seed)
    loc = rng.normal(0, 0.7, (num_blocks, block_size)).astype(np.float32)
    log_scale = rng.uniform(-1.2, 0.1, (num_blocks, block_size)).astype(np.float32)
    loc[:, -1] = loc[0] = log_scale[:, -1] = log_scale[0] = 0
    return loc, log_scale


def log_weights(the_coder, block, loc, log_scale):
    """Log importance weights of all candidates, float64 `[K]`."""
    indices = np.arange(1 << the_coder.block_bits)
    z = the_coder.code.candidates(np.full(len(indices), block), indices, len(loc))
    z, loc, log_scale = (x.astype(np.float64) for x in (z, loc, log_scale))
    return (
        scipy.stats.norm.logpdf(z, loc, np.exp(log_scale)) - scipy.stats.norm.logpdf(z)
    ).sum(1)


def log_mean(x):
    return np.logaddexp.reduce(x) - np.log(len(x))


def inverse_cdf(weights, uniform):
    return np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")


def reference_choice(the_coder, block, weights):
    """The index that the definition of the selection gives."""
    if the_coder.selection == "largest_weight":
        return weights.argmax()
    words = philox.words(the_coder.seed, Domain.SELECTION, block, 4).astype(object)
    uniforms = [((words[i] << 32 | words[i + 1]) >> 11) / 2**53 for i in (0, 2)]
    size = coder.leaf_size(the_coder.block_bits)
    leaves = np.exp(weights - weights.max()).reshape(-1, size)
    leaf = inverse_cdf(leaves.sum(1), uniforms[0])
    return leaf * size + inverse_cdf(leaves[leaf], uniforms[1])


def run_eager(function, *arguments):
    return function(*arguments)


def run_graph(function, *arguments):
    return tf.function(function)(*arguments)


def run_xla(function, *arguments):
    return tf.function(function, jit_compile=True)(*arguments)


RUNS = pytest.mark.parametrize("run", [run_eager, run_graph, run_xla])


@RUNS
def test_philox_gives_the_words_of_numpy(run):
    counters = np.concatenate(
        [
            np.array([[0] * 4, [2**32 - 1] * 4], np.uint32),
            philox.words(1, Domain.HASH, np.arange(5000), 4),  # with all kinds of NaN
        ]
    )
    key = (0xA4093822, 0x299F31D0)
    packed = run(
        philox_xla.philox4x32,
        [tf.constant(x) for x in counters.T],
        tf.constant(key, tf.uint32),
    )
    words = packed.numpy().astype("<c16").view("<u4").reshape(-1, 4)
    np.testing.assert_array_equal(words, philox.philox4x32(counters, key))


@RUNS
def test_candidates_are_those_of_the_decoder(run):
    def candidates(*address):
        return tf.stack(coder._table_normals(philox_xla.calls(*address, 3)))

    key, index = philox.split_seed(SEED), np.arange(4096, 4160)
    address = (key, Domain.CODEBOOK, 2**32 - 5, index)
    z = run(candidates, *(tf.constant(x, tf.uint32) for x in address)).numpy()
    z = z.transpose(2, 1, 0).reshape(64, 24)
    blocks, indices = np.full(64, 2**32 - 5), np.arange(4096, 4160)
    expected = codebook.candidates(SEED, blocks, indices, 24, shared=False)
    np.testing.assert_array_equal(z, expected)


@CODEBOOKS
@SELECTIONS
@pytest.mark.parametrize(
    "bits, num_blocks, block_size", [(0, 2, 7), (1, 2, 7), (BITS, 10, 7), (10, 9, 20)]
)
def test_encoding_is_that_of_the_enumeration(
    codebook_name, selection, bits, num_blocks, block_size
):
    the_coder = the_papers(bits, SEED, codebook_name, selection)
    blocks = np.arange(num_blocks) + 2**32 - num_blocks
    loc, log_scale = posterior(num_blocks, block_size + 1)
    loc, log_scale = loc[:, :-1], log_scale[:, :-1]  # the last is padding
    encoded = the_coder.encode(blocks, loc, log_scale)
    assert encoded.codes.dtype == np.int64
    assert encoded.log_weight.dtype == encoded.log_evidence.dtype == np.float32
    for row, block in enumerate(blocks):
        weights = log_weights(the_coder, block, loc[row], log_scale[row])
        index = encoded.codes[row]
        assert index == reference_choice(the_coder, block, weights)
        assert encoded.log_weight[row] == pytest.approx(weights[index], abs=1e-6)
        evidence = log_mean(weights)
        assert encoded.log_evidence[row] == pytest.approx(evidence, abs=1e-5)
    z = the_coder.code.candidates(blocks, encoded.codes, block_size)
    shared = codebook_name == "shared"
    expected = codebook.candidates(SEED, blocks, encoded.codes, block_size, shared)
    np.testing.assert_array_equal(z, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_has_threads_of_its_own():
    coder.pool(2).submit(int).result()
    child = os.fork()
    if not child:
        signal.alarm(5)  # ends it
        os._exit(coder.pool(2).submit(int).result(4))
    assert os.waitpid(child, 0)[1] == 0


def test_shared_blocks_are_scored_together():
    """Or the tests of the shared codebook miss the matrix products."""
    the_coder = the_papers(BITS, SEED, "shared")
    loc, log_scale = posterior(519, 7)
    log_scale[5] = -9

    def sizes(the_coder):
        batches = the_coder._batches(loc, log_scale)
        assert sorted(np.concatenate(batches)) == list(range(519))
        return [len(batch) for batch in batches]

    assert sizes(the_coder) == [512] + 7 * [1]
    assert sizes(the_papers(28, SEED, "shared")) == 8 * [64] + 7 * [1]
    assert sizes(the_papers(BITS, SEED)) == 519 * [1]


def test_blocks_of_more_than_one_product(monkeypatch):
    monkeypatch.setattr(coder, "workers", lambda: 3)
    monkeypatch.setattr(coder, "_PRODUCT_MAX", 96)
    the_coder = the_papers(BITS, SEED, "shared")
    loc, log_scale = posterior(200, 7)
    together = the_coder.encode(np.arange(200), loc, log_scale)
    for block in (0, 95, 96, 191, 192, 199):
        weights = log_weights(the_coder, block, loc[block], log_scale[block])
        assert together.codes[block] == reference_choice(the_coder, block, weights)
        evidence = log_mean(weights)
        assert together.log_evidence[block] == pytest.approx(evidence, abs=1e-5)


def test_large_leaves_are_weighed_one_by_one():
    the_coder = the_papers(10, SEED, "shared")
    loc, log_scale = (x / 8 for x in posterior(9, 520))
    encoded = the_coder.encode(np.arange(9), loc, log_scale)
    for block in range(9):
        weights = log_weights(the_coder, block, loc[block], log_scale[block])
        assert encoded.codes[block] == reference_choice(the_coder, block, weights)


@RUNS
def test_exponentials(run):
    x = np.concatenate([np.linspace(-87.3, 0, 100001), [-1e3, -3e38]], dtype=np.float32)
    y = run(coder._exp, tf.constant(x)).numpy().astype(np.float64)
    exact = np.exp(x.astype(np.float64))[:-2]
    assert (np.abs(y[:-2] - exact) <= (3e-7 - 1e-7 * x[:-2]) * exact).all()
    np.testing.assert_array_equal(y[-3:], [1, 2**-126, 2**-126])


@given(
    weights=arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 64, 128, 4096])),
        elements=st.one_of(st.just(-np.inf), st.floats(-200, 200, width=32)),
    ),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1 - 2**-53)),
)
def test_inverse_cdf(weights, uniform):
    weights[:, -1] = np.maximum(weights[:, -1], 0)
    found = coder._inverse_cdf(weights, np.full(len(weights), uniform))
    for row, index in zip(weights.astype(np.float64), found):
        row = np.exp(row - row.max())
        below, share = row[:index].sum() / row.sum(), row[index] / row.sum()
        assert share > 0
        assert below - 1e-6 <= uniform <= below + share + 1e-6


def test_sample_follows_the_weights_and_the_posterior():
    """With K far above e**KL, chosen candidates are samples of Q."""
    the_coder = the_papers(12, SEED)
    num_blocks, rng = 600, np.random.default_rng(1)
    loc = np.tile(np.float32([1, -0.5, 0]), (num_blocks, 1))
    log_scale = np.tile(np.float32([-0.3, -1, 0.1]), (num_blocks, 1))  # 1.4 nats
    blocks = np.arange(num_blocks)
    indices = the_coder.encode(blocks, loc, log_scale).codes

    # Where in its share of the cumulative weights an index lies is uniform.
    position = []
    for block in blocks:
        weights = np.exp(log_weights(the_coder, block, loc[block], log_scale[block]))
        below = weights[: indices[block]].sum()
        here = rng.uniform() * weights[indices[block]]
        position.append((below + here) / weights.sum())
    assert scipy.stats.kstest(position, "uniform").pvalue > 1e-3

    z = (the_coder.code.candidates(blocks, indices, 3) - loc) / np.exp(log_scale)
    for d in range(3):
        assert scipy.stats.kstest(z[:, d], "norm").pvalue > 1e-3
    assert np.abs(z.mean(0)).max() < 4 / np.sqrt(num_blocks)
    assert np.abs(z.var(0) - 1).max() < 4 * np.sqrt(2 / num_blocks)


def test_the_seed_of_the_selection_is_independent_of_the_block():
    uniforms = coder._uniforms(3, np.arange(2000))
    assert scipy.stats.kstest(uniforms[:, 0], "uniform").pvalue > 1e-3
    assert scipy.stats.kstest(uniforms[:, 1], "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(uniforms.T)[0, 1]) < 4 / np.sqrt(2000)


@CODEBOOKS
def test_first_of_equal_weights(codebook_name):
    the_coder = the_papers(BITS, SEED, codebook_name, "largest_weight")
    encoded = the_coder.encode(np.arange(9), *np.zeros((2, 9, 7), np.float32))
    assert encoded.codes.tolist() == 9 * [0]
    # In one dimension, many candidates are equal. Here the largest z is the best.
    blocks, loc = np.arange(40), np.full((40, 1), 10, np.float32)
    encoded = the_coder.encode(blocks, loc, np.zeros_like(loc))
    ties = 0
    for block in blocks:
        weights = log_weights(the_coder, block, loc[block], np.float32([0]))
        assert encoded.codes[block] == weights.argmax()
        ties += (weights == weights.max()).sum() - 1
    assert ties


@CODEBOOKS
@SELECTIONS
def test_padding_contributes_nothing(codebook_name, selection):
    the_coder = the_papers(BITS, SEED, codebook_name, selection)
    encoded = the_coder.encode(np.arange(9), *np.zeros((2, 9, 5), np.float32))
    assert not encoded.log_weight.any()
    assert not encoded.log_evidence.any()
    if codebook_name == "per_block":
        loc, log_scale = posterior(9, 5)
        padded = (np.pad(x, [(0, 0), (0, 3)]) for x in (loc, log_scale))
        short = the_coder.encode(np.arange(9), loc, log_scale)
        long = the_coder.encode(np.arange(9), *padded)
        np.testing.assert_array_equal(short.codes, long.codes)
        np.testing.assert_array_equal(short.log_weight, long.log_weight)
        # From passes of two programs, which round in their own ways.
        np.testing.assert_allclose(short.log_evidence, long.log_evidence, atol=1e-6)


@CODEBOOKS
def test_small_scales(codebook_name):
    """Variance ratios down to 1e-8, where a * z**2 + b * z + c loses all digits."""
    the_coder = the_papers(BITS, SEED, codebook_name, "largest_weight")
    blocks = np.arange(16)
    loc, log_scale = posterior(16, 7)
    loc[:, 2], log_scale[:, 2] = np.linspace(-2, 2, 16), np.linspace(-9.2, -1, 16)
    encoded = the_coder.encode(blocks, loc, log_scale)
    for row, block in enumerate(blocks):
        weights = log_weights(the_coder, block, loc[row], log_scale[row])
        assert encoded.codes[row] == weights.argmax()
        assert encoded.log_weight[row] == pytest.approx(weights.max(), rel=1e-6)
        assert encoded.log_evidence[row] == pytest.approx(log_mean(weights), abs=3e-3)


@CODEBOOKS
@SELECTIONS
@pytest.mark.parametrize("loc, log_scale", [(30, 0), (1e4, -9), (-1e30, -80), (0, 80)])
def test_far_from_the_candidates(codebook_name, selection, loc, log_scale):
    the_coder = the_papers(BITS, SEED, codebook_name, selection)
    blocks, shape = np.arange(9), (9, 7)
    loc = np.full(shape, loc, np.float32)
    log_scale = np.full(shape, log_scale, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        encoded = the_coder.encode(blocks, loc, log_scale)
    assert np.isfinite(encoded.log_weight).all()
    assert np.isfinite(encoded.log_evidence).all()
    assert (encoded.log_weight < -50).all()
    if selection == "largest_weight" and encoded.log_weight.max() > -1e30:
        weights = log_weights(the_coder, 3, loc[3], log_scale[3])
        assert encoded.log_weight[3] == pytest.approx(weights.max(), rel=1e-6)


@CODEBOOKS
@SELECTIONS
def test_one_block_at_a_time_or_all_together(codebook_name, selection):
    the_coder = the_papers(BITS, SEED, codebook_name, selection)
    loc, log_scale = posterior(12, 7)
    blocks = np.random.default_rng(0).permutation(12)
    together = the_coder.encode(blocks, loc[blocks], log_scale[blocks])
    again = the_coder.encode(blocks, loc[blocks], log_scale[blocks])
    np.testing.assert_array_equal(together, again)
    alone = [
        the_coder.encode([b], loc[b : b + 1], log_scale[b : b + 1]) for b in blocks
    ]
    np.testing.assert_array_equal(
        together.codes, np.concatenate([one.codes for one in alone])
    )
    np.testing.assert_array_equal(
        together.log_weight, np.concatenate([one.log_weight for one in alone])
    )


def test_seeds_and_blocks_matter():
    loc, log_scale = posterior(1, 7, seed=3)
    loc[0] = 0.3
    indices = {
        int(the_papers(BITS, seed).encode([block], loc, log_scale).codes[0])
        for seed in (1, 2, 2**32 + 1)
        for block in (0, 1)
    }
    assert len(indices) == 6


def test_nothing_is_compiled_again(monkeypatch):
    monkeypatch.setattr(coder, "workers", lambda: 1)
    loc, log_scale = posterior(1, 7)
    size, leaf = 1 << BITS, coder.leaf_size(BITS)
    passes = [
        coder._direct_pass(size, leaf, 7),
        coder._product_pass(size, leaf, 7),
        coder._leaf_pass(leaf, 7),
    ]

    def traced():
        return [one.experimental_get_tracing_count() for one in passes]

    before = traced()
    for seed, block in [(1, 2), (3, 4)]:
        the_papers(BITS, seed).encode([block], loc + seed, log_scale)
    for count in (9, 60):
        the_coder = the_papers(BITS, 0, "shared")
        the_coder.encode(np.arange(count), *posterior(count, 7))
    assert (np.array(traced()) - before <= 1).all()
    assert all(traced())


@pytest.mark.parametrize("make_pass", [coder._direct_pass, coder._product_pass])
def test_memory_does_not_grow_with_the_codebook(make_pass):
    """The largest array of the compiled program is the same, but for the results.

    And nothing in it waits for the host.
    """
    batch, coefficients = 1, [(20,), (20,), ()]
    if make_pass is coder._product_pass:
        batch, coefficients = 512, [(512, 41)]
    inputs = [tf.zeros(2, tf.uint32), *[tf.zeros([], tf.uint32)] * 2, tf.constant(0)]
    inputs += [tf.zeros(shape) for shape in coefficients]

    def largest(bits):
        leaf = coder.leaf_size(bits)
        run = make_pass.__wrapped__(1 << bits, leaf, 20)
        program = run.experimental_get_compiler_ir(*inputs)(stage="hlo")
        assert not re.search(HOST, program)
        shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program)
        sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
        results = batch * (1 << bits) // leaf
        return max(size for size in sizes if size != results)

    assert largest(14) == largest(22) <= 1 << 20


@CODEBOOKS
@pytest.mark.parametrize("blocks", [1, 9])
def test_the_number_of_cores_changes_nothing(codebook_name, blocks, monkeypatch):
    loc, log_scale = posterior(blocks, 7)
    found = []
    for cores in (1, 3, 8):
        monkeypatch.setattr(coder, "workers", lambda cores=cores: cores)
        ours = the_papers(18, SEED, codebook_name)
        found.append(ours.encode(np.arange(blocks), loc, log_scale))
    for other in found[1:]:
        for here, there in zip(found[0], other):
            np.testing.assert_array_equal(here, there)


@CODEBOOKS
def test_only_codes_that_exist_are_accepted(codebook_name):
    code = the_papers(4, SEED, codebook_name).code
    code.check(np.array([0, 15]))
    for bad in ([15, 16], [-1, 0]):
        with pytest.raises(ValueError, match="from 0 to 15, which 4 bits can say"):
            code.check(np.array(bad))


def test_no_blocks():
    encoded = the_papers(BITS, SEED).encode([], *np.zeros((2, 0, 7)))
    assert [array.shape for array in encoded] == [(0,), (0,), (0,)]


@pytest.mark.parametrize(
    "blocks, loc, log_scale, message",
    [
        ([[0]], [[0]], [[0]], r"blocks has shape \(1, 1\); pass a vector"),
        ([-1], [[0]], [[0]], "blocks holds -1; pass integers"),
        ([0], [0], [[0]], r"loc has shape \(1,\); pass one of \(1, block size\)"),
        ([0], [[0]], [[0], [0]], r"log_scale has shape \(2, 1\); pass one of \(1, bl"),
        ([0], [[]], [[]], r"loc has shape \(1, 0\); pass one of \(1, block size\)"),
        ([0], [[0]], [[0, 0]], r"shapes \(1, 1\) and \(1, 2\); pass arrays of the s"),
        ([7, 8], [[0], [np.nan]], [[0], [0]], "loc of block 8 is not finite; look"),
        ([7, 8], [[0], [0]], [[-np.inf], [0]], "log_scale of block 7 is not finite"),
        ([7, 8], [[0], [0]], [[0], [-81]], r"log_scale of block 8 holds -81\.0; pass"),
    ],
)
def test_bad_blocks(blocks, loc, log_scale, message):
    with pytest.raises(ValueError, match=message):
        the_papers(3, 0).encode(blocks, loc, log_scale)
