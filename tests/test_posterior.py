"""The posterior over blocks: its numbers, its gradients, and what fixing does."""

import gc
import math
import weakref

import keras
import mpmath as mp
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
import tensorflow_probability as tfp
from hypothesis import given, settings
from hypothesis import strategies as st
from support import posterior_of

from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.decoder import decode_blocks
from tfmiracle.miracle_file import (
    CodedGroup,
)
from tfmiracle.posteriors import block_posterior as posterior_module
from tfmiracle.posteriors.block_posterior import posterior_over
from tfmiracle.posteriors.parameterization import Deterministic, MeanKL, MeanVar

DETERMINISTIC = settings(max_examples=25, deadline=None, derandomize=True)
LN2 = math.log(2)
LARGEST = float(np.finfo(np.float32).max)

# 43 effective weights: 8 blocks of 6 with 5 slots of padding.
HASHED = [
    CodedVariable((5, 7), 2, 0),
    CodedVariable((7,), 1, 0),
    CodedVariable((3, 3, 2), 1, 1),
]
PLAIN = [CodedVariable((5, 4), 1, 0), CodedVariable((4,), 1, 0), CodedVariable((3,))]


def layout(variables=HASHED, block_size=6, seed=1):
    return WeightLayout(variables, block_size, seed)


def random_posterior(variables=HASHED, block_size=6, seed=1, spread=1.5, **options):
    """Parameters far from their start, everywhere different."""
    options = {"quota_rate": 1.0, **options}
    posterior = posterior_of(MeanKL, layout(variables, block_size, seed), **options)
    rng = np.random.default_rng(seed)
    for v, center in zip(posterior.trainable_variables, (-2, 0, 0), strict=True):
        v.assign(center + spread * rng.normal(size=v.shape))
    return posterior


def random_values(variables=HASHED, size=0.1, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, size, v.shape).astype(np.float32) for v in variables]


@pytest.fixture
def noise(monkeypatch):
    """The noise of the next samples, known."""
    value = np.random.default_rng(7).normal(size=(100, 100)).astype(np.float32)

    def normal(shape, **kwargs):
        return tf.constant(value[: shape[0], : shape[1]])

    monkeypatch.setattr(keras.random, "normal", normal)
    return value


# The budget.

parameters = st.one_of(
    st.sampled_from([0.0, 1e30, -1e30, 3e38, -3e38, LARGEST, -LARGEST, 1e-45, 90.0]),
    st.floats(-5, 5, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@DETERMINISTIC
@given(
    st.lists(parameters, min_size=14, max_size=14),
    st.lists(st.sampled_from([0.0, -2.0, 1e30, -1e30, -LARGEST]), min_size=2),
    st.sampled_from([0.0, 1e-6, 1.0, 20.0, 28.0, 1000.0]),
    st.sampled_from([1, 2, 5, 7]),
    st.sampled_from([1.0, 1e-3, 5.0]),
)
def test_no_finite_parameter_breaks_the_budget(numbers, log_scale, kl, size, rate):
    coded = [CodedVariable((4,), 1, 0), CodedVariable((3,), 1, 1)]
    posterior = posterior_of(
        MeanKL, layout(coded, size), kl_bits=kl, quota_rate=rate, log_scale_rate=rate
    )
    numbers = np.resize(np.array(numbers, np.float32), (2, *posterior.block_shape))
    posterior.tau.assign(numbers[0])
    posterior.quota_logits.assign(numbers[1])
    posterior.p.start(None, False, log_scale[:2], 0.0)
    np.testing.assert_allclose(posterior.block_kl(), kl * LN2, rtol=2e-6)
    assert posterior.block_kl().shape == [posterior.layout.num_blocks]
    assert np.all(np.isfinite(posterior.coding_scale) & (posterior.coding_scale > 0))
    # Nothing is NaN, neither values nor gradients.
    tf.config.run_functions_eagerly(True)
    try:
        with tf.GradientTape() as tape:
            values = [*posterior(training=True), *posterior.loc_and_scale()]
            total = tf.add_n([tf.reduce_sum(v) for v in values])
    finally:
        tf.config.run_functions_eagerly(False)
    for tensor in (*values, *tape.gradient(total, posterior.trainable_variables)):
        assert np.all(np.isfinite(tensor))


def test_a_budget_of_zero_is_the_prior():
    posterior = random_posterior(kl_bits=0)
    np.testing.assert_array_equal(posterior.block_kl(), 0)
    loc, scale = posterior.loc_and_scale()
    np.testing.assert_array_equal(loc, 0)
    np.testing.assert_array_equal(scale, posterior.coding_distribution.stddev())


def test_padding_is_exactly_zero():
    posterior = random_posterior(spread=30.0)
    loc, log_ratio = (x.numpy() for x in posterior.standardized())
    padding = ~posterior.layout.mask()
    assert padding.sum() == 5
    np.testing.assert_array_equal(loc[padding], 0)
    np.testing.assert_array_equal(log_ratio[padding], 0)
    assert np.all(loc[~padding] != 0)
    # It takes nothing of the budget, and gradients never reach it.
    posterior = random_posterior()
    with tf.GradientTape() as tape:
        loc, log_ratio = posterior.standardized()
        total = tf.reduce_sum(loc**2) + tf.reduce_sum(log_ratio**2)
    for gradient in tape.gradient(total, [posterior.tau, posterior.quota_logits]):
        np.testing.assert_array_equal(gradient.numpy()[padding], 0)
        assert np.any(gradient.numpy()[-2])


def test_rows_can_be_asked_for():
    posterior = random_posterior(kl_bits=13)
    whole = posterior.standardized()
    for blocks in (slice(2, 5), np.array([7, 0, 7]), slice(None)):
        for part, full in zip(posterior.standardized(blocks), whole, strict=True):
            np.testing.assert_allclose(part, full.numpy()[blocks], rtol=1e-6)
    assert posterior.block_kl([1, 2]).shape == [2]


# Values and gradients against the formulas of the paper, at 40 digits.


def paper_weight(i, tau, logits, log_rho, kl, eps):
    """Weight i of a block, by equations (5) and (3) as printed."""
    share = mp.exp(logits[i]) / mp.fsum(map(mp.exp, logits))
    kappa, rho = share * kl, mp.exp(log_rho)
    mu = rho * mp.sqrt(2 * kappa) * mp.tanh(tau[i])
    z = mu / rho
    variance = -(rho**2) * mp.lambertw(-mp.exp(z**2 - 2 * kappa - 1)).real
    return mu + mp.sqrt(variance) * eps


def paper_block(tau, logits, log_rho, kl, eps, upstream):
    """Weights of a block and the gradient of their weighted sum."""
    with mp.workdps(40):
        size = len(tau)
        x = [mp.mpf(float(p)) for p in (*tau, *logits, log_rho)]
        eps = [mp.mpf(float(e)) for e in eps]

        def weight(i, x):
            return paper_weight(i, x[:size], x[size:-1], x[-1], kl, eps[i])

        def total(x):
            terms = [mp.mpf(float(u)) * weight(i, x) for i, u in enumerate(upstream)]
            return mp.fsum(terms)

        step = mp.mpf(10) ** -12
        gradient = []
        for j in range(len(x)):
            up, down = list(x), list(x)
            up[j] += step
            down[j] -= step
            gradient.append(float((total(up) - total(down)) / (2 * step)))
        return [float(weight(i, x)) for i in range(size)], gradient


@pytest.mark.parametrize(
    "mode, kl_bits", [("xla", 20.0), ("eager", 20.0), ("eager", 0.5)]
)
def test_samples_and_gradients_match_the_paper(mode, kl_bits, noise, request):
    if mode == "eager":
        request.getfixturevalue("eager")
    coded = [CodedVariable((4,), 1, 0), CodedVariable((5,), 1, 0)]
    posterior = random_posterior(coded, 3, kl_bits=kl_bits)
    upstream = np.random.default_rng(5).normal(size=9).astype(np.float32)
    with tf.GradientTape() as tape:
        weights = tf.concat(posterior(training=True), 0)
        total = tf.reduce_sum(weights * upstream)
    log_rho, tau, logits = posterior.trainable_variables
    gradient = tape.gradient(total, [log_rho, tau, logits])
    slots = posterior.layout.slots.reshape(-1)
    expected = np.zeros(9)
    for b in range(3):
        of_weight = [int(np.flatnonzero(slots == 3 * b + d)[0]) for d in range(3)]
        values, derivative = paper_block(
            tau.numpy()[b],
            logits.numpy()[b],
            log_rho.numpy()[0],
            mp.mpf(kl_bits) * mp.log(2),
            noise[b, :3],
            upstream[of_weight],
        )
        expected[of_weight] = values
        np.testing.assert_allclose(gradient[1][b], derivative[:3], rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(
            gradient[2][b], derivative[3:6], rtol=2e-5, atol=1e-6
        )
    np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-6)
    # w = rho (m + s eps): the derivative by log rho is the weight itself.
    np.testing.assert_allclose(gradient[0], [expected @ upstream], rtol=1e-5)


def test_hashed_gradients_are_sums_over_the_entries(noise, eager):
    posterior = random_posterior()
    upstream = random_values(size=1.0, seed=3)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(posterior.tau.value)
        values = posterior(training=True)
        total = tf.add_n([tf.reduce_sum(v * u) for v, u in zip(values, upstream)])
        loc, scale = posterior.loc_and_scale()
        effective = loc + scale * posterior.layout.to_effective(noise[:8, :6])
        index, sign = posterior.layout.hashing(0)
        collected = np.concatenate(
            [
                np.bincount(index, sign * upstream[0].ravel()),
                *(u.ravel() for u in upstream[1:]),
            ]
        )
        reference = tf.reduce_sum(effective * collected.astype(np.float32))
    for v in posterior.trainable_variables:
        actual, expected = tape.gradient(total, v), tape.gradient(reference, v)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
        assert np.any(actual)


# Sampling.


def test_without_training_the_values_are_the_mean():
    posterior = random_posterior()
    loc, _ = posterior.loc_and_scale()
    values = posterior(training=False)
    blocks = posterior.layout.to_blocks(loc.numpy())
    for value, expected in zip(values, posterior.layout.expand(blocks), strict=True):
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=2e-6)
    for value, again in zip(values, posterior(), strict=True):
        np.testing.assert_array_equal(value, again)
    assert posterior.noise_seed.state.numpy().tolist() == [1, 0]


def test_samples_have_the_mean_and_variance_of_q():
    posterior = random_posterior(PLAIN, 6, spread=0.7, kl_bits=12)
    loc, scale = (x.numpy() for x in posterior.loc_and_scale())
    n = 200
    samples = np.array(
        [np.concatenate([v.numpy().ravel() for v in posterior(training=True)])
         for _ in range(n)]
    )  # fmt: skip
    z = (samples - loc) / scale
    assert np.abs(z.mean(0)).max() < 4.5 / math.sqrt(n)
    assert np.abs(z.var(0) - 1).max() < 4.5 * math.sqrt(2 / n)
    assert scipy.stats.kstest(z.ravel(), "norm").pvalue > 1e-3
    # Independent from weight to weight and from call to call.
    correlation = np.corrcoef(z.T) - np.eye(z.shape[1])
    assert np.abs(correlation).max() < 5 / math.sqrt(n)
    assert np.abs(np.mean(z[1:] * z[:-1], 0)).max() < 5 / math.sqrt(n)


def test_entries_of_a_hashed_weight_are_one_sample(eager):
    posterior = random_posterior()
    value = posterior(training=True)[0].numpy().ravel()
    index, sign = posterior.layout.hashing(0)
    for j in range(18):
        assert len(set((value * sign)[index == j])) == 1


# Initialization.


def test_cold_start_is_the_papers():
    posterior = posterior_of(MeanKL, layout())
    values = random_values(size=0.3)
    posterior.initialize(values, warm=False)
    np.testing.assert_allclose(posterior.coding_scale, math.exp(-2), rtol=1e-6)
    np.testing.assert_array_equal(posterior.quota_logits.numpy(), 0)
    rho = math.exp(-2)
    count = posterior.layout.mask().sum(1, keepdims=True)  # 6, and 1 in the last block
    limit = np.broadcast_to(rho * np.sqrt(2 * 20 * LN2 / count), (8, 6))
    wanted = posterior.layout.project(values)
    loc = posterior.layout.to_blocks(posterior.loc_and_scale()[0].numpy())
    clipped = np.abs(wanted) > 0.99 * limit
    assert 0 < clipped.sum() < 20
    np.testing.assert_allclose(loc[~clipped], wanted[~clipped], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(
        loc[clipped], 0.99 * (limit * np.sign(wanted))[clipped], rtol=1e-5
    )


@pytest.mark.parametrize("warm_log_scale", [0.0, 1.0])
def test_warm_start(warm_log_scale):
    posterior = posterior_of(MeanKL, layout(), quota_rate=3.0, log_scale_rate=2.0)
    values = [v * s for v, s in zip(random_values(), (1.0, 1.0, 30.0), strict=True)]
    posterior.initialize(values, True, 5.0, warm_log_scale)
    effective = posterior.layout.to_effective(posterior.layout.project(values))
    groups = effective[:25], effective[25:]
    rho = np.array([np.sqrt(np.mean(g.astype(float) ** 2)) for g in groups])
    rho *= np.exp(warm_log_scale)
    np.testing.assert_allclose(posterior.coding_scale, rho, rtol=1e-6)
    z = posterior.layout.to_blocks(effective / np.repeat(rho, [25, 18]))
    mask = posterior.layout.mask()
    logits = posterior.parameterization.quota_rate * posterior.quota_logits.numpy()
    np.testing.assert_allclose(logits[mask], np.log(z**2 + 0.5)[mask], rtol=1e-5)
    np.testing.assert_array_equal(logits[~mask], 0)
    # The mean is the weight wherever its share allows.
    loc, _ = (x.numpy() for x in posterior.standardized())
    share = np.where(mask, z**2 + 0.5, 0)
    share /= share.sum(1, keepdims=True)
    limit = 0.99 * np.sqrt(2 * 20 * LN2 * share)
    np.testing.assert_allclose(loc, np.clip(z, -limit, limit), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(posterior.block_kl(), 20 * LN2, rtol=2e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("parameterization", (MeanKL, MeanVar, Deterministic))
def test_the_start_does_not_depend_on_how_many_are_computed_at_a_time(
    parameterization, monkeypatch
):
    starts = []
    for count in (1, 7, 1 << 20):
        monkeypatch.setattr(posterior_module, "_INITIALIZED", count)
        made = posterior_of(parameterization, layout())
        made.initialize(random_values(), warm=True)
        parameters = [p.numpy().ravel() for p in made.trainable_weights]
        starts.append(np.concatenate(parameters))
    for other in starts[1:]:
        np.testing.assert_array_equal(other, starts[0])
    assert np.any(starts[0])


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("kl_bits", [0, 20])
def test_any_finite_values_give_a_finite_start(warm, size, kl_bits):
    posterior = posterior_of(MeanKL, layout(), kl_bits=kl_bits)
    posterior.initialize(random_values(size=size), warm)
    for v in posterior.trainable_variables:
        assert np.all(np.isfinite(v.numpy()))
    if size == 0:  # groups without any weight have the cold scale
        np.testing.assert_allclose(posterior.coding_scale, math.exp(-2), rtol=1e-6)
    elif warm:  # not so far that products over- or underflow in float32
        expected = np.clip(size, math.exp(-60), math.exp(60))
        np.testing.assert_allclose(posterior.coding_scale, expected, rtol=0.5)


@pytest.mark.parametrize("log_scale", [-1000, -70.0, 70, 1e308])
def test_extreme_initial_scales_are_clipped(log_scale):
    posterior = posterior_of(MeanKL, layout())
    posterior.initialize(random_values(), warm=False, log_scale=log_scale)
    expected = math.exp(math.copysign(60, log_scale))
    np.testing.assert_allclose(posterior.coding_scale, expected, rtol=1e-5)


def test_starting_again_frees_everything():
    posterior = posterior_of(MeanKL, layout())
    posterior.initialize(random_values(), warm=False)
    start = [v.numpy() for v in posterior.variables]
    posterior.finalize_coding_scale()
    posterior.fix([1, 2], [3, 4])
    posterior.initialize(random_values(), warm=False, log_scale=-1.0)
    assert not posterior.fixed.any()
    np.testing.assert_allclose(posterior.coding_scale, math.exp(-1), rtol=1e-6)
    posterior.initialize(random_values(), warm=False)
    for v, value in zip(posterior.variables, start, strict=True):
        if v.name not in ("decoded", "coded_loc", "coded_log_ratio"):
            np.testing.assert_array_equal(v.numpy(), value)


def test_the_budget_falls_in_training():
    made = posterior_of(MeanKL, layout(), initial_budget=8.0, annealing_steps=3)
    made.initialize(random_values(), warm=True)
    # A start that 20 bits forbid.
    exact = posterior_of(MeanKL, layout(), kl_bits=160)
    exact.initialize(random_values(), warm=True)
    for ours, theirs in zip(made.standardized(), exact.standardized(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    budgets = []
    for _ in range(5):
        made(training=False)
        budgets.append(made.block_kl().numpy() / LN2)
        made(training=True)
    expected = np.array([160, 80, 40, 20, 20])[:, None]
    np.testing.assert_allclose(budgets, expected + 0 * budgets[0], rtol=2e-6)
    # A code has no room for more.
    made.initialize(random_values(), warm=True)
    np.testing.assert_allclose(made.block_kl(), 160 * LN2, rtol=2e-6)
    made.finalize_coding_scale()
    np.testing.assert_allclose(made.block_kl(), 20 * LN2, rtol=2e-6)


def test_rates_only_rescale_the_variables():
    values = random_values()
    plain = posterior_of(MeanKL, layout(), quota_rate=1.0)
    fast = posterior_of(MeanKL, layout(), quota_rate=5.0, log_scale_rate=3.0)
    gradients = []
    for posterior in (plain, fast):
        posterior.initialize(values, warm=True)
        with tf.GradientTape() as tape:
            loc, scale = posterior.loc_and_scale()
            total = tf.reduce_sum(loc) + tf.reduce_sum(scale**2)
        gradients.append(tape.gradient(total, posterior.trainable_variables))
    for v, w, rate in zip(
        plain.trainable_variables, fast.trainable_variables, (3, 1, 5), strict=True
    ):
        np.testing.assert_allclose(v.numpy(), rate * w.numpy(), rtol=1e-6)
    for g, h, rate in zip(*gradients, (3, 1, 5), strict=True):
        np.testing.assert_allclose(rate * g, h, rtol=1e-4, atol=1e-6)
    for a, b in zip(plain.standardized(), fast.standardized(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Coding.


def adam_steps(posterior, steps=3, learning_rate=0.3):
    optimizer = keras.optimizers.Adam(learning_rate)
    optimizer.build(posterior.trainable_variables)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum((v - 1) ** 2) for v in posterior(training=True)]
            )
        gradients = tape.gradient(loss, posterior.trainable_variables)
        optimizer.apply(gradients, posterior.trainable_variables)


def of_q(posterior):
    kl = np.repeat(posterior.block_kl()[:, None], posterior.layout.block_size, 1)
    return [*posterior.loc_and_scale(), posterior.layout.to_effective(kl)]


def to_layout(posterior, of_blocks):
    """A value of each block -> of each of its effective weights."""
    spread = np.repeat(of_blocks[:, None], posterior.layout.block_size, 1)
    return posterior.layout.to_effective(spread)


def test_the_coding_scale_is_final_after_finalize(eager):
    posterior = random_posterior()
    start = posterior.coding_scale
    adam_steps(posterior)
    trained = posterior.coding_scale
    assert np.all(trained != start)
    posterior.finalize_coding_scale()
    np.testing.assert_array_equal(posterior.coding_scale, trained)
    loc, scale = posterior.loc_and_scale()
    adam_steps(posterior)
    np.testing.assert_array_equal(posterior.coding_scale, trained)
    posterior.finalize_coding_scale()
    np.testing.assert_array_equal(posterior.coding_scale, trained)
    # The rest goes on training, under the same budget.
    assert not np.any(loc == posterior.loc_and_scale()[0])
    assert not np.any(scale == posterior.loc_and_scale()[1])
    np.testing.assert_allclose(posterior.block_kl(), 20 * LN2, rtol=2e-6)


def test_finalize_keeps_every_scale_to_the_bit():
    posterior = random_posterior([CodedVariable((2,), 1, i) for i in range(99)], 6)
    before = posterior.coding_scale
    assert len(set(before)) == 99
    for _ in range(2):
        posterior.finalize_coding_scale()
        np.testing.assert_array_equal(posterior.coding_scale, before)


def test_finalize_changes_no_value(eager):
    posterior = random_posterior()
    before = posterior(training=False)
    posterior.finalize_coding_scale()
    for a, b in zip(before, posterior(training=False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("codebook, mode", [("per_block", "xla"), ("shared", "eager")])
def test_fixed_blocks_are_what_the_decoder_decodes(codebook, mode, request):
    if mode == "eager":
        request.getfixturevalue("eager")
    posterior = random_posterior(codebook=codebook, block_bits=12)
    posterior.finalize_coding_scale()
    indices = np.array([0, 4095, 17, 1000, 5, 5, 2048, 77])
    decoded = posterior.layout.expand(
        decode_blocks(
            CodedGroup(
                posterior.layout, posterior.code, posterior.coding_scale, indices
            )
        )
    )
    order = [6, 0, 3, 7, 1]
    posterior.fix(order[:2], indices[order[:2]])
    posterior.fix(np.array(order[2:]), indices[order[2:]].tolist())
    fixed = np.isin(np.arange(8), order)
    np.testing.assert_array_equal(posterior.fixed, fixed)
    np.testing.assert_array_equal(posterior.codes, np.where(fixed, indices, -1))
    is_fixed = posterior.layout.expand(
        np.broadcast_to(fixed[:, None], (8, 6)).astype(np.float32)
    )
    free = posterior(training=False)
    coded_q = [np.where(to_layout(posterior, fixed), q, 0) for q in of_q(posterior)]

    def check():
        for training in (True, False):
            values = [v.numpy() for v in posterior(training=training)]
            for value, code, where in zip(values, decoded, is_fixed, strict=True):
                where = where != 0
                assert where.any()
                np.testing.assert_array_equal(value[where], code[where])
                assert not np.any(value[~where] == code[~where])
        # Q of what is fixed stays as it was coded, however an optimizer goes on.
        for q, expected in zip(of_q(posterior), coded_q, strict=True):
            now = np.where(to_layout(posterior, fixed), q, 0)
            np.testing.assert_array_equal(now, expected)

    check()
    adam_steps(posterior)
    check()
    trained = posterior(training=False)
    for before, after, where in zip(free, trained, is_fixed, strict=True):
        assert np.all((before.numpy() == after.numpy()) == (where != 0))
    posterior.fix([2, 4, 5], indices[[2, 4, 5]])
    for value, code in zip(posterior(training=True), decoded, strict=True):
        np.testing.assert_array_equal(value, code)


def test_fixed_blocks_get_no_gradient(eager):
    posterior = random_posterior()
    posterior.finalize_coding_scale()
    posterior.fix([2, 5], [9, 9])
    with tf.GradientTape() as tape:
        total = tf.add_n([tf.reduce_sum(v**2) for v in posterior(training=True)])
    scale, *gradients = tape.gradient(total, posterior.trainable_variables)
    np.testing.assert_array_equal(scale, 0)
    for gradient in gradients:
        has = np.any(gradient.numpy(), axis=1)
        # The last block has one weight, and that its whole budget.
        np.testing.assert_array_equal(has[:7], ~posterior.fixed[:7])


def test_padding_of_a_fixed_block_has_no_value():
    posterior = random_posterior()
    posterior.finalize_coding_scale()
    posterior.fix([7], [3])
    decoded = {v.name: v for v in posterior.variables}["decoded"].numpy()
    assert decoded[7, 0] != 0
    np.testing.assert_array_equal(decoded[7, 1:], 0)


def test_fixing_is_seen_by_a_traced_function():
    posterior = random_posterior()
    posterior.finalize_coding_scale()
    traces = []

    @tf.function
    def mean():
        traces.append(1)
        return posterior(training=False)[2]

    before = mean()
    posterior.fix(range(8), range(8))
    assert not np.any(mean() == before)
    np.testing.assert_array_equal(mean(), posterior(training=True)[2])
    assert len(traces) == 1


def test_fixing_needs_a_final_scale():
    posterior = random_posterior()
    with pytest.raises(ValueError, match="finalize_coding_scale"):
        posterior.fix([0], [0])
    assert not posterior.fixed.any()


@pytest.mark.parametrize(
    "blocks, indices, message",
    [
        ([0], [-1], "`codes` must be integers from 0 to 1023"),
        ([0], [1024], "`codes` must be integers from 0 to 1023"),
        ([0], [0.5], "`codes` must be integers from 0 to 1023"),
        ([8], [0], "`blocks` must be integers from 0 to 7"),
        ([-1], [0], "`blocks` must be integers from 0 to 7"),
        ([0, 1], [0], r"shapes \(2,\) and \(1,\)"),
    ],
)
def test_fix_refuses_what_is_out_of_range(blocks, indices, message):
    posterior = random_posterior(block_bits=10)
    posterior.finalize_coding_scale()
    with pytest.raises(ValueError, match=message):
        posterior.fix(blocks, indices)
    assert not posterior.fixed.any()


# As TFP distributions.


def test_distributions_are_the_gaussians_of_the_parameters():
    posterior = random_posterior(kl_bits=7.5)
    loc, scale = (x.numpy() for x in posterior.loc_and_scale())
    q, p = posterior.distribution, posterior.coding_distribution
    assert q.event_shape == p.event_shape == [43]
    assert q.batch_shape == p.batch_shape == []
    rho = np.repeat(posterior.coding_scale, [25, 18])
    np.testing.assert_array_equal(p.stddev(), rho)
    np.testing.assert_array_equal(p.mean(), 0)
    samples = q.sample(50, seed=[1, 2]).numpy()
    assert samples.shape == (50, 43)
    for distribution, center, spread in ((q, loc, scale), (p, 0, rho)):
        expected = scipy.stats.norm.logpdf(samples, center, spread).sum(-1)
        np.testing.assert_allclose(distribution.log_prob(samples), expected, rtol=1e-4)
    kl = tfp.distributions.kl_divergence(q, p)
    np.testing.assert_allclose(kl, np.sum(posterior.block_kl()), rtol=1e-5)
    np.testing.assert_allclose(kl, 8 * 7.5 * LN2, rtol=1e-5)


def test_gradients_reach_the_parameters_through_the_distributions():
    posterior = random_posterior()
    x = np.random.default_rng(2).normal(size=43).astype(np.float32)
    with tf.GradientTape(persistent=True) as tape:
        of_q = posterior.distribution.log_prob(x)
        of_p = posterior.coding_distribution.log_prob(x)
        sampled = tf.reduce_sum(posterior.distribution.sample(seed=[0, 1]) ** 2)
    variables = posterior.trainable_variables
    for total in (of_q, sampled):
        for gradient in tape.gradient(total, variables):
            assert np.all(np.isfinite(gradient)) and np.any(gradient)
    # d log p / d log rho = sum (x^2 / rho^2 - 1)
    rho = np.repeat(posterior.coding_scale, [25, 18])
    terms = (x / rho) ** 2 - 1
    np.testing.assert_allclose(
        tape.gradient(of_p, variables[0]), [terms[:25].sum(), terms[25:].sum()], 1e-4
    )


def test_distributions_follow_the_parameters():
    posterior = random_posterior()
    before = posterior.distribution.mean()
    posterior.tau.assign(-posterior.tau.value)
    np.testing.assert_allclose(posterior.distribution.mean(), -before)


# Other parameterizations and the function over Keras variables.


def test_deterministic_values_are_the_variables(eager):
    posterior = posterior_of(Deterministic, layout())
    values = posterior.layout.expand(posterior.layout.project(random_values()))
    posterior.initialize(values, warm=False)
    for training in (True, False):
        for value, expected in zip(posterior(training=training), values, strict=True):
            np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(posterior.coding_scale, 1)
    with tf.GradientTape() as tape:
        total = tf.add_n([tf.reduce_sum(v**2) for v in posterior(training=True)])
    gradient = tape.gradient(total, posterior.loc)
    count = np.bincount(posterior.layout.hashing(0)[0])
    count = posterior.layout.to_blocks(np.concatenate([count, np.ones(25)]))
    np.testing.assert_allclose(
        gradient, 2 * count * posterior.loc.numpy(), rtol=1e-5, atol=1e-7
    )


def test_a_trained_posterior_can_be_forgotten():
    """Although TensorFlow keeps every gradient that it was given for a graph."""

    def trained():
        posterior = random_posterior()

        @tf.function
        def gradient():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(posterior(training=True)[0])
            return tape.gradient(loss, posterior.tau)

        assert np.any(gradient())
        return weakref.ref(posterior)

    alive = trained()
    gc.collect()
    assert alive() is None


def test_smallest_layouts(eager):
    for block_size in (1, 5):
        posterior = posterior_of(MeanKL, layout([CodedVariable(())], block_size))
        posterior.initialize([np.float32(0.1)], warm=False)
        (value,) = posterior(training=False)
        np.testing.assert_allclose(value, 0.1, rtol=1e-5)
        assert value.shape == ()
        posterior.finalize_coding_scale()
        posterior.fix([0], [12345])
        assert posterior.fixed.tolist() == [True]


def keras_variables():
    net = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, name="first"),
            keras.layers.Dense(3, name="second"),
        ],
        name="net",
    )
    return net.trainable_variables


def test_posterior_over_keras_variables():
    variables = keras_variables()
    posterior = posterior_over(
        variables,
        block_size=5,
        seed=3,
        hash_factors=[4, 1, 2, 1],
        coder=MinimalRandomCoder(block_bits=9),
        kl_bits=8.0,
        warm_start=False,
        log_scale=-1.0,
    )
    assert posterior.layout.variables == (
        CodedVariable((6, 4), 4, 0),
        CodedVariable((4,), 1, 0),
        CodedVariable((4, 3), 2, 1),
        CodedVariable((3,), 1, 1),
    )
    assert (posterior.layout.block_size, posterior.layout.seed) == (5, 3)
    assert (posterior.code.block_bits, posterior.kl_bits) == (9, 8.0)
    np.testing.assert_allclose(posterior.coding_scale, math.exp(-1), rtol=1e-6)
    # Variables of one layer share a scale, if not told otherwise.
    groups = ["a", "a", "a", "b"]
    posterior = posterior_over(variables, block_size=5, seed=3, scale_groups=groups)
    assert [v.scale_index for v in posterior.layout.variables] == [0, 0, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite(bad):
    variables = keras_variables()
    variables[3].assign([0.0, bad, 0.0])
    with pytest.raises(ValueError, match=r"variable 3 of shape \(3,\).*not finite"):
        posterior_over(variables, block_size=5, seed=0)
