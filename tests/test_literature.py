"""Coders of the literature: samples of Q, short indices, files that decode."""

import keras
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st
from support import run_python

import tfmiracle
from tfmiracle.codec import philox
from tfmiracle.codec.philox import Domain
from tfmiracle.codec.universal import UniversalCode
from tfmiracle.coding import poisson
from tfmiracle.coding.coder import CODERS
from tfmiracle.coding.poisson import (
    AStarCoder,
    GreedyPoissonCoder,
    OrderedRandomCoder,
    PoissonFunctionalCoder,
)
from tfmiracle.decoder import decode
from tfmiracle.recipe import coder_of

SEED = 0xFEDCBA9876543210
NAMES = ["orc", "a_star", "pfr", "gprs"]
EXACT = pytest.mark.parametrize("cls", [PoissonFunctionalCoder, GreedyPoissonCoder])
CHANCE = 1e-6  # that a test of a right coder would fail, under another seed


def posterior(num_blocks, block_size, bits, seed=0):
    """Blocks of a KL of `bits`, whose samples are those of P, taken together."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.ones(block_size), num_blocks)
    log_scale = -np.log(2) * bits * share
    loc = np.sqrt(-np.expm1(2 * log_scale)) * rng.choice([-1, 1], log_scale.shape)
    return loc.astype(np.float32), log_scale.astype(np.float32)


def wide_posterior(num_blocks, block_size):
    """Blocks of any shape, some wider than P."""
    rng = np.random.default_rng(1)
    shape = num_blocks, block_size
    loc, log_scale = rng.normal(0, 0.5, shape), rng.uniform(-1.2, 0.1, shape)
    return loc.astype(np.float32), log_scale.astype(np.float32)


def kl(loc, log_scale):
    """KL(Q || P) of each block in nats."""
    loc, log_scale = loc.astype(np.float64), log_scale.astype(np.float64)
    return (0.5 * (np.expm1(2 * log_scale) + loc**2) - log_scale).sum(1)


def encoded(coder, loc, log_scale):
    blocks = np.arange(len(loc))
    found = coder.encode(blocks, loc, log_scale)
    return found, coder.code.candidates(blocks, found.codes, loc.shape[1])


@EXACT
@pytest.mark.parametrize(
    "block_size, make", [(1, posterior), (3, posterior), (2, wide_posterior)]
)
def test_what_is_coded_is_a_sample_of_q(cls, block_size, make):
    count = 1500 if cls is PoissonFunctionalCoder else 150
    bits = np.linspace(0.1, 4, count)[:, np.newaxis]
    q = make(count, block_size, *([bits] if make is posterior else []))
    found, z = encoded(cls(seed=SEED), *q)
    t = (z - q[0]) / np.exp(q[1])
    assert scipy.stats.kstest(t.reshape(-1), "norm").pvalue > CHANCE
    square = scipy.stats.kstest((t**2).sum(1), "chi2", (block_size,))
    assert square.pvalue > CHANCE
    # Independent of which Q: neither near nor far, narrow nor wide ones differ.
    for by in (q[0], q[1]):
        assert scipy.stats.spearmanr(t.reshape(-1), by.reshape(-1)).pvalue > CHANCE
    excess = found.log_weight - kl(*q)
    assert abs(excess.mean()) < 5 * excess.std() / np.sqrt(count)
    assert not found.log_evidence.any()
    weights = scipy.stats.norm.logpdf(z, q[0], np.exp(q[1])) - scipy.stats.norm.logpdf(
        z
    )
    np.testing.assert_allclose(found.log_weight, weights.sum(1), atol=1e-4)


@pytest.mark.parametrize("cls", [AStarCoder, OrderedRandomCoder])
def test_the_bias_shrinks_as_the_index_grows(cls):
    q = posterior(400, 3, 5.0)
    bias, squares = [], []
    for index_bits in (2, 5, 8, 12):
        coder = cls(5, SEED, index_bits=index_bits)
        found, z = encoded(coder, *q)
        assert found.codes.max() < 1 << index_bits
        bias.append(np.mean(kl(*q) - found.log_weight))
        squares.append((((z - q[0]) / np.exp(q[1])) ** 2).sum(1))
    assert bias[0] > 2 * bias[1] > 4 * bias[2] > 0
    assert abs(bias[3]) < 5 * np.std(found.log_weight) / 20
    p = [scipy.stats.kstest(square, "chi2", (3,)).pvalue for square in squares]
    assert p[0] < CHANCE < p[3]


@pytest.mark.parametrize("name", NAMES)
def test_the_code_is_about_as_short_as_theory_says(name):
    bits = 6
    coder = coder_of(name, block_bits=bits)
    found, _ = encoded(coder, *posterior(150, 3, bits))
    lengths = np.log2(found.codes + 1)
    # Of `pfr` it is below KL + 1.54 bits on average (Li and El Gamal 2018).
    error = 5 * lengths.std() / np.sqrt(len(lengths))
    assert bits - 3 < lengths.mean() < bits + 1.54 + error
    packed = 8 * len(coder.code.pack(found.codes, 3)) / len(found.codes)
    assert bits < packed < bits + np.log2(bits + 1) + 1.54
    assert packed == pytest.approx(coder.code.bits(3), abs=1)


def reference(coder, block, loc, log_scale, count, in_order):
    """The candidate of smallest T / r among the first ones, by definition."""
    code = coder.code
    z = code.candidates(np.full(count, block), np.arange(count), len(loc))
    ratio = scipy.stats.norm.logpdf(z, loc, np.exp(log_scale))
    ratio = (ratio - scipy.stats.norm.logpdf(z)).sum(1)
    words = philox.words(coder.seed, Domain.ARRIVAL, block, count)
    gaps = -np.log((words + 0.5) / 2**32)
    if in_order:
        gaps *= count / np.arange(count, 0, -1)
    return np.argmin(np.log(np.cumsum(gaps)) - ratio)


def test_the_choice_is_that_of_the_definition():
    q = posterior(40, 5, 5.0)
    for coder, in_order in (
        (PoissonFunctionalCoder(seed=SEED), False),
        (AStarCoder(seed=SEED), False),
        (AStarCoder(seed=SEED, index_bits=13), False),
        (OrderedRandomCoder(seed=SEED, index_bits=13), True),
    ):
        codes = coder.encode(np.arange(40), *q).codes
        for b in range(40):
            row = q[0][b], q[1][b]
            assert codes[b] == reference(coder, b, *row, 1 << 13, in_order)


@pytest.mark.parametrize(
    "loc, log_scale", [(0.5, -1), (1, -3), (0.9, -5), (2, -0.01), (0.3, 0.2), (0, 0.5)]
)
def test_survival_in_one_dimension(loc, log_scale):
    log_ratio, found = poisson.survival(np.array([loc]), np.array([log_scale]))
    h, scale = np.exp(log_ratio), np.exp(log_scale)
    # r(z) = h where a z**2 + b z + c = 0.
    a, b = 0.5 - 0.5 / scale**2, loc / scale**2
    c = -log_scale - 0.5 * (loc / scale) ** 2 - log_ratio
    root = np.sqrt(np.maximum(b * b - 4 * a * c, 0))
    ends = np.sort([(-b + root) / (2 * a), (-b - root) / (2 * a)], axis=0)
    p, q = (
        np.diff(scipy.stats.norm.cdf(ends, *args), axis=0)[0]
        for args in ((0, 1), (loc, scale))
    )
    if a > 0:
        p, q = 1 - p, 1 - q
    np.testing.assert_allclose(found, q - h * p, atol=1e-5)


@pytest.mark.parametrize("block_size", [2, 3, 8, 40])
def test_survival_in_many_dimensions(block_size):
    q = np.zeros(block_size), np.full(block_size, -0.4)
    log_ratio, found = poisson.survival(*q)
    # log r = -D log_scale - (exp(-2 log_scale) - 1) |z|**2 / 2.
    square = np.maximum(2 * (0.4 * block_size - log_ratio) / np.expm1(0.8), 0)
    p = scipy.stats.chi2.cdf(square, block_size)
    q = scipy.stats.chi2.cdf(square * np.exp(0.8), block_size)
    np.testing.assert_allclose(found, q - np.exp(log_ratio) * p, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_divergence_it_is_the_first_candidate(name):
    found = coder_of(name, block_bits=0).encode(
        np.arange(9), *np.zeros((2, 9, 5), np.float32)
    )
    if name != "orc":
        assert not found.codes.any()
    assert not found.log_weight.any()
    assert (found.log_evidence <= 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_padding_and_seeds(name):
    coder = coder_of(name, block_bits=4)
    q = posterior(12, 3, 4.0)
    together = coder.encode(np.arange(12), *q)
    alone = [coder.encode([b], q[0][b : b + 1], q[1][b : b + 1]) for b in range(12)]
    for array, parts in zip(together, zip(*alone)):
        np.testing.assert_array_equal(array, np.concatenate(parts))
    padded = coder.encode(np.arange(12), *(np.pad(x, [(0, 0), (0, 3)]) for x in q))
    np.testing.assert_array_equal(padded.codes, together.codes)
    other = coder_of(name, block_bits=4, seed=1).encode(np.arange(12), *q)
    assert np.any(other.codes != together.codes)
    assert [x.shape for x in coder.encode([], *np.zeros((2, 0, 3)))] == [(0,)] * 3


def test_a_search_that_takes_too_long_says_so():
    hard = posterior(2, 8, 40.0)
    for cls in (PoissonFunctionalCoder, AStarCoder, GreedyPoissonCoder):
        with pytest.raises(
            ValueError, match=r"block 7 takes more than `max_cand.* 2\*"
        ):
            cls(max_candidates=5000).encode([7, 8], *hard)
    # A density ratio without a bound, and Q where no candidate is.
    wide = np.zeros((1, 30), np.float32), np.full((1, 30), 0.5, np.float32)
    with pytest.raises(ValueError, match=r"16,777,216.* 2\*\*234"):
        PoissonFunctionalCoder().encode([7], *wide)
    far = np.full((1, 2), 30, np.float32), np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match="Q of block 7 lies beyond the candidates"):
        GreedyPoissonCoder().encode([7], *far)


@pytest.mark.parametrize("cls", [AStarCoder, OrderedRandomCoder])
@pytest.mark.parametrize("loc, log_scale", [(30, 0), (1e4, -9), (-1e30, -80), (0, 80)])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_among_few_candidates_one_is_always_chosen(cls, loc, log_scale):
    q = (np.full((2, 3), x, np.float32) for x in (loc, log_scale))
    found = cls(index_bits=6).encode([0, 1], *q)
    assert (found.codes < 64).all()
    assert np.isfinite(found.log_weight).all() and np.isfinite(found.log_evidence).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PoissonFunctionalCoder(17), "`block_bits`.* 0 to 16.*block_bits=17"),
        (lambda: GreedyPoissonCoder(2.5), r"`block_bits` must be an integer.*=2\.5"),
        (lambda: GreedyPoissonCoder(True), "`block_bits` must be an integer.*=True"),
        (lambda: GreedyPoissonCoder(max_candidates=0), "`max_candidates`.* 1 to 1,073"),
        (lambda: AStarCoder(index_bits=25), "`index_bits`.* 0 to 24.*=25"),
        (lambda: OrderedRandomCoder(index_bits=-1), "`index_bits`.* 0 to 24.*=-1"),
        (lambda: OrderedRandomCoder(seed=-1), "`seed` .*-1"),
        (lambda: UniversalCode(0, 31), "`block_bits` .* 0 to 30.*=31"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The code.


CODES = st.lists(st.integers(0, 2**31 - 2) | st.integers(0, 9), max_size=20)


@given(CODES, st.integers(0, 30))
@example([2**31 - 2] * 9, 0)
@example([0] * 9, 30)
def test_indices_come_back(codes, block_bits):
    code, codes = UniversalCode(0, block_bits), np.array(codes, np.int64)
    code.check(codes)
    packed = code.pack(codes, 3)
    unpacked = code.unpack(packed, len(codes), 3)
    assert unpacked.dtype == np.int64
    np.testing.assert_array_equal(unpacked, codes)
    length = 0
    for number in codes + 1:
        exponent = int(number).bit_length() - 1
        apart = exponent - block_bits
        length += 3 + exponent + (2 * apart if apart >= 0 else -2 * apart - 1) // 4
    assert len(packed) == -(-length // 8)


@given(st.binary(max_size=20), st.integers(0, 12), st.integers(0, 30))
@example(b"", 1, 12)
@example(b"\x00" * 4, 1, 12)
@example(b"\xff" * 50, 3, 12)
def test_bytes_are_those_of_some_indices_or_refused(packed, count, block_bits):
    code = UniversalCode(0, block_bits)
    try:
        codes = code.unpack(packed, count, 3)
    except ValueError:
        return
    code.check(codes)
    assert codes.shape == (count,)
    assert code.pack(codes, 3) == packed


def test_damaged_indices():
    code = UniversalCode(0, 4)
    packed = code.pack(np.arange(0, 3000, 10), 3)
    for bad, message in (
        (packed[:-1], "take .* bytes; there are"),
        (packed + b"\x00", "take .* bytes; there are"),
        (packed[:20], "fewer than 300 indices"),
        (b"", "fewer than 300 indices"),
        (packed + b"\x00" * 1800, "at most 1800 bytes"),
        (packed[:-1] + bytes([packed[-1] | 128]), "Bits after the last index"),
    ):
        with pytest.raises(ValueError, match=message):
            code.unpack(bad, 300, 3)
    with pytest.raises(ValueError, match="too large"):  # an exponent of 4 + 4 * 7
        code.unpack((1 << 14).to_bytes(6, "little"), 1, 3)
    for bad in ([-1], [2**31 - 1], [0.5]):
        with pytest.raises(ValueError, match="integers from 0 to 2147483646"):
            code.check(np.array(bad))


# Files.


def data():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return x, x[:, :2] - x[:, 2:]


def wrapped(coder, **options):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(5)])
    net.add(keras.layers.Dense(2))
    return tfmiracle.VariationalModel(net, coder=coder, block_size=4, **options)


@pytest.mark.parametrize("coder", ["orc", "gprs", AStarCoder(5, index_bits=9)])
def test_a_file_of_it_decodes(coder, tmp_path, eager):
    path = tmp_path / "net.miracle"
    model = wrapped(coder, block_bits=5)
    assert model.block_posterior.kl_bits == 5
    assert model.block_posterior.code.bits(4) == 8
    model.compile("adam", "mse")
    callback = tfmiracle.CompressionCallback(
        path, blocks_per_round=4, finetune_steps=1, train_steps=3, verbose=0
    )
    model.fit(*data(), epochs=20, verbose=0, callbacks=[callback])
    (group,) = callback.file.groups
    assert group.code == UniversalCode(0, 5)
    np.testing.assert_array_equal(model.block_posterior.codes, group.codes)
    np.testing.assert_array_equal(tfmiracle.load(path)(data()[0]), model(data()[0]))
    script = "import sys, tfmiracle.decoder as d\n"
    script += "for x in d.decode(sys.argv[1]).weights.values(): print(x.tobytes())"
    process = run_python(script, path, without=["keras", "tensorflow", "scipy"])
    expected = [str(x.tobytes()) for x in decode(path).weights.values()]
    assert process.stdout.split("\n")[:-1] == expected
    config = tfmiracle.VariationalModel.from_config(model.get_config())
    assert config.block_posterior.coder == model.block_posterior.coder


@pytest.mark.parametrize("name", NAMES)
def test_defaults_by_name(name):
    coder = coder_of(name)
    assert coder.identifier == name and coder == CODERS.find(name)()
    assert coder.block_bits == 12
    assert coder_of(name, block_bits=7, codebook="shared").block_bits == 7
    assert CODERS.get(CODERS.serialize(coder)) == coder
    with pytest.raises(ValueError, match=r"`block_bits` must be .* from 0 to 16"):
        wrapped(name)  # whose default is that of `mrc`


def test_bits_that_a_coder_refuses_are_refused_before_anything(tmp_path):
    net = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    net.compile(loss="mse")
    recipe = tfmiracle.Recipe(coder="orc")
    with pytest.raises(ValueError, match=r"`block_bits` must be .* from 0 to 16"):
        tfmiracle.compress(net, "no data", path=tmp_path / "a", recipe=recipe)
