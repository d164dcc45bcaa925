"""The sites parameterization, against its equation solved in float64."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

import tfmiracle
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.posteriors.mean_kl import kl_from_standardized
from tfmiracle.posteriors.sites import sites_standardized

SOLVERS = {
    "eager": sites_standardized,
    "graph": tf.function(sites_standardized),
    "xla": tf.function(sites_standardized, jit_compile=True),
}


def kl_at(log_a, m, log_e):
    """KL of a block in nats, as the module says it."""
    log_ae = log_a + log_e
    share = special.expit(log_ae)
    # log(1 + x) - x / (1 + x), which cancels for small x.
    x = np.exp(np.minimum(log_ae, -8.0))
    small = x**2 / 2 - 2 * x**3 / 3 + 3 * x**4 / 4 - 4 * x**5 / 5
    entropy = np.where(log_ae < -8, small, np.logaddexp(0, log_ae) - share)
    return 0.5 * np.sum(entropy + (share * m) ** 2)


def reference(m, log_e, kappa):
    """Mean and log scale of one block, float64."""
    m, log_e = np.asarray(m, float), np.asarray(log_e, float)
    ends = -200 - log_e.max(), 2 * kappa + 10 - log_e.max()
    log_a = optimize.brentq(
        lambda a: math.log(kl_at(a, m, log_e) / kappa), *ends, xtol=1e-13, rtol=1e-14
    )
    return special.expit(log_a + log_e) * m, -0.5 * np.logaddexp(0, log_a + log_e)


def draw(seed, size, largest, spread):
    rng = np.random.default_rng(seed)
    m = largest * rng.normal(size=size)
    return m.astype(np.float32), (spread * rng.normal(size=size)).astype(np.float32)


def standardized(m, log_e, kappa, mode="eager"):
    mask = tf.ones(np.shape(m), bool)
    return SOLVERS[mode](*map(tf.constant, (m, log_e, np.float32([kappa]))), mask)


@pytest.mark.parametrize("mode", SOLVERS)
@pytest.mark.parametrize("size", [1, 20, 400])
def test_q_solves_the_equation(mode, size):
    for largest in (0.0, 0.1, 2.0, 1e3):
        for spread in (0.0, 2.0, 30.0):
            for kappa in (1e-4, 0.3, 14.0, 500.0):
                m, log_e = draw(0, size, largest, spread)
                found = standardized(m, log_e, kappa, mode)
                expected = reference(m, log_e, kappa)
                np.testing.assert_allclose(found[0], expected[0], 3e-5, 1e-30)
                np.testing.assert_allclose(found[1], expected[1], 3e-5, 1e-30)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 50),
    st.floats(0, 1e12),
    st.floats(0, 1e5),
    st.floats(1e-6, 1e4),
)
def test_the_kl_is_the_budget(seed, size, largest, spread, kappa):
    m, log_e = draw(seed, size, largest / 10, spread)
    loc, log_ratio = standardized(m, log_e, kappa)
    kl = tf.reduce_sum(kl_from_standardized(loc, log_ratio))
    np.testing.assert_allclose(kl, kappa, 2e-5)
    assert np.all(log_ratio <= 0)


@pytest.mark.parametrize("mode", SOLVERS)
@pytest.mark.parametrize("kappa", [1e-3, 3.0, 60.0])
def test_gradients_are_those_of_the_solution(kappa, mode):
    m, log_e = draw(1, 6, 1.0, 1.5)
    rng = np.random.default_rng(2)
    up = [rng.normal(size=6) for _ in range(2)]

    at = [*map(tf.constant, (m, log_e, np.float32([kappa])))]
    with tf.GradientTape() as tape:
        tape.watch(at)
        q = SOLVERS[mode](*at, tf.ones_like(at[0], bool))
    found = tape.gradient(q, at, [tf.constant(u, tf.float32) for u in up])

    def loss(flat):
        q = reference(flat[:6], flat[6:12], flat[12])
        return sum(np.sum(u * x) for u, x in zip(up, q, strict=True))

    at = np.concatenate([m, log_e, [kappa]]).astype(float)
    steps = np.maximum(np.abs(at), 0.1) * 1e-4
    expected = [(loss(at + h) - loss(at - h)) / (2 * h.sum()) for h in np.diag(steps)]
    largest = np.abs(expected[:12]).max()
    np.testing.assert_allclose(np.concatenate(found), expected, 2e-4, 2e-5 * largest)


def test_what_a_block_has_in_common_cancels():
    m, log_e = draw(3, 20, 1.0, 1.0)
    one = standardized(m, log_e, 10.0)
    for by in (-1e4, 1e4):
        for a, b in zip(one, standardized(m, log_e + by, 10.0), strict=True):
            np.testing.assert_allclose(a, b, 1e-2)  # log_e has lost digits


def test_padding_is_p_and_costs_nothing():
    m, log_e = draw(4, 8, 1.0, 1.0)
    mask = np.arange(8) < 5
    kappa = tf.constant([4.0])
    loc, log_ratio = sites_standardized(
        tf.constant(m), tf.constant(log_e), kappa, tf.constant(mask)
    )
    np.testing.assert_array_equal(loc[5:], 0)
    np.testing.assert_array_equal(log_ratio[5:], 0)
    alone = standardized(m[:5], log_e[:5], 4.0)
    np.testing.assert_allclose(loc[:5], alone[0], 1e-6)
    np.testing.assert_allclose(log_ratio[:5], alone[1], 1e-6)


def posterior(budget=1.0, **options):
    layout = WeightLayout(
        [CodedVariable((3, 4), 1, 0), CodedVariable((5,), 1, 1)], 5, 0
    )
    made = tfmiracle.Sites(initial_budget=budget, **options).posterior(
        layout, kl_bits=8.0
    )
    rng = np.random.default_rng(0)
    values = [rng.normal(size=s).astype(np.float32) for s in ((3, 4), (5,))]
    made.initialize(values)
    return made, values


def test_a_warm_start_is_near_the_weights_and_within_the_budget():
    made, values = posterior()
    np.testing.assert_allclose(made.block_kl() / math.log(2), 8.0, 1e-5)
    loc, scale = made.loc_and_scale()
    flat = np.concatenate([v.reshape(-1) for v in values])
    # Shrunk towards P's mean, no further than that.
    ratio = loc / flat
    assert np.all((ratio > 0) & (ratio < 1))
    np.testing.assert_array_equal(scale > 0, True)


def test_the_budget_falls_and_is_met_when_coding_begins():
    made, _ = posterior(4.0, annealing_steps=2)
    for factor in (4.0, 2.0, 1.0, 1.0):
        np.testing.assert_allclose(made.block_kl() / math.log(2), 8 * factor, 1e-5)
        made(training=True)
    made, _ = posterior(4.0)
    made.finalize_coding_scale()
    np.testing.assert_allclose(made.block_kl() / math.log(2), 8.0, 1e-5)


def test_no_budget_is_p():
    layout = WeightLayout([CodedVariable((7,), 1, 0)], 4, 0)
    made = tfmiracle.Sites().posterior(layout, kl_bits=0.0)
    made.initialize([np.arange(7, dtype=np.float32)])
    np.testing.assert_array_equal(made.block_kl(), 0)
    np.testing.assert_array_equal(made.values()[0], 0)
