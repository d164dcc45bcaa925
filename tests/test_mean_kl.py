"""The Mean-KL kernels against Lambert's W at 50 digits."""

import importlib.util
import sys

import mpmath as mp
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmiracle.posteriors.mean_kl import (
    kl_from_standardized,
    log_scale_ratio,
    log_scale_ratio_pade,
    mean_kl_standardized,
)

# Relative error of value, gradient and second derivative.
TOLERANCE = {"float32": (4e-7, 2.5e-7, 4e-6), "float64": (6e-16, 6e-16, 2e-14)}
ENDS = (6.0, 8.5)  # of the fits in float32 and float64
DETERMINISTIC = settings(max_examples=60, deadline=None, derandomize=True)
MODES = {
    "eager": lambda f: f,
    "graph": tf.function,
    "xla": lambda f: tf.function(f, jit_compile=True),
}


def digits(s):
    """Enough to have 50 left of 1 - v, of order s, from v."""
    return 50 + int(max(0, -2.5 * mp.log10(s)))


def reference(s):
    """log(sigma / rho) and its first two derivatives, from eq. (3) as printed."""
    s = s if isinstance(s, mp.mpf) else mp.mpf(float(s))
    with mp.workdps(digits(s)):
        delta = s * s / 2
        v = -mp.lambertw(-mp.exp(-1 - delta)).real
        h = (1 - v) / s
        return -(1 - v + delta) / 2, -1 / (2 * h), (v - h * h) / (2 * s * h**3)


def relative_error(actual, expected):
    pairs = zip(np.ravel(actual), expected, strict=True)
    # numpy's maximum, unlike Python's, does not lose a NaN.
    return np.max([float(abs(mp.mpf(float(a)) - e) / (abs(e) or 1)) for a, e in pairs])


def derivatives(f, x):
    """f(x), f'(x) and f''(x) of an elementwise function."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = f(x)
        first = inner.gradient(y, x)
    return y, first, outer.gradient(first, x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_scale_ratio_matches_lambert_w(dtype):
    s = np.concatenate(
        [
            np.geomspace(1e-37, 1e-4, 60, dtype=dtype),
            np.linspace(1e-4, 8, 400, dtype=dtype),
            np.geomspace(8, 1e18, 60, dtype=dtype),
            *(
                np.nextafter(np.array(end, dtype), [0, end, 9], dtype=dtype)
                for end in ENDS
            ),
        ]
    )
    expected = zip(*map(reference, s), strict=True)
    actual = derivatives(log_scale_ratio, tf.constant(s))
    for a, e, tolerance in zip(actual, expected, TOLERANCE[dtype], strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= tolerance


@pytest.mark.parametrize("mode", MODES)
def test_log_scale_ratio_of_many_matches_float64(mode):
    s = np.geomspace(1e-3, 9, 1 << 20, dtype=np.float32)
    expected = derivatives(log_scale_ratio, tf.constant(s, tf.float64))
    actual = derivatives(MODES[mode](log_scale_ratio), tf.constant(s))
    for a, e, tolerance in zip(actual, expected, TOLERANCE["float32"], strict=True):
        np.testing.assert_allclose(a, e, tolerance)


@DETERMINISTIC
@given(
    st.floats(
        min_value=float(np.float32(1e-37)),
        max_value=float(np.float32(1e18)),
        width=32,
        allow_subnormal=False,
    )
)
def test_log_scale_ratio_anywhere(s):
    value, first, _ = derivatives(log_scale_ratio, tf.constant([s], tf.float32))
    expected = reference(s)
    assert relative_error(value, expected[:1]) <= TOLERANCE["float32"][0]
    assert relative_error(first, expected[1:2]) <= TOLERANCE["float32"][1]


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [(tf.float32, mode) for mode in MODES]
    + [(tf.float64, "eager"), (tf.float64, "graph")]
    + [(tf.bfloat16, "eager"), (tf.bfloat16, "xla"), (tf.float16, "eager")],
)
def test_log_scale_ratio_at_the_extremes(dtype, mode):
    tiny = np.array([0, 1e-45, 1e-40, 1e-30])
    huge = np.array([1e3, 1e18, dtype.max] if dtype != tf.float16 else [500, dtype.max])
    s = tf.constant(np.concatenate([tiny, huge]), dtype)
    value, first, second = (
        x.numpy().astype(np.float64)
        for x in derivatives(MODES[mode](log_scale_ratio), s)
    )
    rtol = {2: 1e-2, 4: 1e-6, 8: 1e-15}[dtype.size]
    s = s.numpy().astype(np.float64)
    near, far = s < 1, s > 1
    assert np.isfinite(value).all() and (value <= 0).all()
    # To first order in s at zero (XLA and Eigen flush subnormal values) ...
    np.testing.assert_allclose(value[near], -s[near] / 2, rtol, atol=2e-38)
    np.testing.assert_allclose(first[near], -0.5, rtol)
    np.testing.assert_allclose(second[near], -1 / 6, max(rtol, 1e-6))
    # ... and in 1 / s far away, where the value ends at the lowest number.
    with np.errstate(over="ignore"):
        expected = np.maximum(-(s[far] / 2) * (s[far] / 2), dtype.min)
    np.testing.assert_allclose(value[far], expected, max(rtol, 1e-5))
    np.testing.assert_allclose(first[far], -s[far] / 2, rtol)
    np.testing.assert_allclose(second[far], -0.5, rtol)


def test_half_precision_rounds_the_float32_result():
    s = tf.cast(tf.linspace(0.0, 30.0, 301), tf.bfloat16)
    expected = tf.cast(log_scale_ratio(tf.cast(s, tf.float32)), tf.bfloat16)
    np.testing.assert_array_equal(log_scale_ratio(s).numpy(), expected.numpy())


def test_log_scale_ratio_arguments():
    assert log_scale_ratio([[1.0, 2.0]]).shape == (1, 2)
    assert np.isnan(log_scale_ratio(float("nan")))
    with pytest.raises(TypeError, match="floating-point, got int32"):
        log_scale_ratio([1, 2])


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_modes_agree(mode):
    rng = np.random.default_rng(0)
    tau = tf.constant(3 * rng.normal(size=1000), tf.float32)
    sqrt_kappa = tf.constant(np.exp(3 * rng.normal(size=1000)), tf.float32)

    def evaluate(tau, sqrt_kappa):
        x = (tau, sqrt_kappa)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            m, log_ratio = mean_kl_standardized(*x)
            kl = kl_from_standardized(m, log_ratio)
        gradients = tape.gradient(m, x), tape.gradient(log_ratio, x)
        return m, log_ratio, kl, gradients

    expected = tf.nest.flatten(evaluate(tau, sqrt_kappa))
    actual = tf.nest.flatten(MODES[mode](evaluate)(tau, sqrt_kappa))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-6)


def test_pade_is_the_printed_formula():
    s = np.linspace(0.01, 3.8, 100)

    def printed(s):
        x = -mp.exp(-1 - mp.mpf(s) ** 2 / 2)
        t = mp.sqrt(2 * mp.e * x + 2)
        w = (mp.mpf(13) / 720 * t**3 + mp.mpf(257) / 720 * t**2 + t / 6 - 1) / (
            mp.mpf(103) / 720 * t**2 + mp.mpf(5) / 6 * t + 1
        )
        return mp.log(-w) / 2

    with mp.workdps(50):
        assert relative_error(log_scale_ratio_pade(s), map(printed, s)) < 1e-12


def test_pade_is_as_accurate_as_documented():
    delta = np.array([0.08, 0.1, 1.1, 1.3, 4.4, 4.6])
    s = np.sqrt(2 * delta)
    error = np.abs(np.expm1(2 * (log_scale_ratio_pade(s) - log_scale_ratio(s))))
    bounds = np.array([1e-6, 1e-6, 1e-3, 1e-3, 6e-2, 6e-2])
    np.testing.assert_array_equal(error > bounds, [False, True] * 3)

    s = np.sqrt(np.float32(2) * np.float32([7.22, 7.24, 20, 1e6, 1e38]))
    assert np.isnan(log_scale_ratio_pade(s)).tolist() == [False] + [True] * 4

    s = tf.constant([0, 1e-30, 1e-16, 1e-8, 1e-3])
    value, first, _ = derivatives(log_scale_ratio_pade, s)
    np.testing.assert_allclose(value, log_scale_ratio(s), rtol=3e-7)
    np.testing.assert_allclose(first, -0.5 - s / 6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_standardized_values_and_gradients(dtype):
    rng = np.random.default_rng(1)
    tau = np.append(4 * rng.normal(size=150), [0, 1e-20, 30, -30]).astype(dtype)
    sqrt_kappa = np.exp(rng.uniform(-20, 3, tau.shape)).astype(dtype)

    def expected(tau, sqrt_kappa):
        tau, sqrt_kappa = mp.mpf(float(tau)), mp.mpf(float(sqrt_kappa))
        tanh, sech = mp.tanh(tau), mp.sech(tau)
        s = 2 * sqrt_kappa * sech
        log_ratio, slope, _ = reference(s)
        root = mp.sqrt(2)
        return (
            root * sqrt_kappa * tanh,
            log_ratio,
            root * sqrt_kappa * sech**2,
            root * tanh,
            -slope * s * tanh,
            slope * 2 * sech,
        )

    x = (tf.constant(tau), tf.constant(sqrt_kappa))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        m, log_ratio = mean_kl_standardized(*x)
    actual = m, log_ratio, *tape.gradient(m, x), *tape.gradient(log_ratio, x)
    with mp.workdps(50):
        expected = zip(*map(expected, tau, sqrt_kappa), strict=True)
        for a, e in zip(actual, expected, strict=True):
            assert relative_error(a, e) <= (1e-6 if dtype == "float32" else 2e-15)


@pytest.mark.parametrize("mode", MODES)
def test_standardized_is_finite_everywhere(mode):
    tau = [-3e38, -100, -88, -1e-38, 0, 1e-38, 1e-5, 1, 50, 3e38]
    tau = tf.constant(tau, tf.float32)[:, tf.newaxis]
    sqrt_kappa = tf.constant([0, 1e-38, 1e-20, 1, 1e4, 9e18], tf.float32)

    def evaluate(tau, sqrt_kappa):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch((tau, sqrt_kappa))
            m, log_ratio = mean_kl_standardized(tau, sqrt_kappa)
        gradients = [tape.gradient(y, (tau, sqrt_kappa)) for y in (m, log_ratio)]
        return m, log_ratio, gradients

    for x in tf.nest.flatten(MODES[mode](evaluate)(tau, sqrt_kappa)):
        assert np.isfinite(x).all()


@DETERMINISTIC
@given(st.floats(-40, 40), st.floats(-69, 9))
def test_kl_of_standardized_is_kappa(tau, log_kappa):
    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 3e-15)):
        sqrt_kappa = np.exp(dtype(0.5 * log_kappa))
        m, log_ratio = mean_kl_standardized(dtype(tau), sqrt_kappa)
        kl = kl_from_standardized(m, log_ratio).numpy()
        assert abs(float(kl) / float(sqrt_kappa) ** 2 - 1) <= tolerance


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_kl_matches_the_gaussian_formula(sign, dtype):
    x = np.concatenate([np.geomspace(1e-18, 0.1, 60), np.linspace(0.1, 2, 100), [20]])
    x = (sign * x).astype(dtype)

    def expected(x):
        u = 2 * mp.mpf(float(x))
        return (mp.expm1(u) - u) / 2, mp.expm1(u), 2 * mp.exp(u)

    with mp.workdps(60):
        expected = zip(*map(expected, x), strict=True)
        actual = derivatives(lambda x: kl_from_standardized(0.0 * x, x), tf.constant(x))
        for a, e in zip(actual, expected, strict=True):
            assert relative_error(a, e) <= (4e-7 if dtype == "float32" else 1e-15)

    np.testing.assert_allclose(
        kl_from_standardized([3.0, -2.0], [0.0, 0.0]), [4.5, 2.0], rtol=1e-6
    )


def test_kl_is_constant_along_tau():
    """The budget holds by construction, so its gradient by tau vanishes."""
    tau = tf.constant(np.linspace(-6, 6, 101))
    sqrt_kappa = tf.ones_like(tau)
    with tf.GradientTape() as tape:
        tape.watch((tau, sqrt_kappa))
        kl = kl_from_standardized(*mean_kl_standardized(tau, sqrt_kappa))
    by_tau, by_sqrt_kappa = tape.gradient(kl, (tau, sqrt_kappa))
    np.testing.assert_allclose(by_tau, 0, atol=1e-14)
    np.testing.assert_allclose(by_sqrt_kappa, 2, rtol=1e-14)


def test_kernels_do_not_import_tensorflow_probability(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_probability", None)
    spec = importlib.util.find_spec(log_scale_ratio.__module__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
