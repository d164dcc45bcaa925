"""`MeanKLBijector` as a bijector, in the way TensorFlow Probability tests its own."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from tfmiracle.posteriors.bijectors import MeanKLBijector

tfd = tfp.distributions
NU, RHO = 0.3, 0.2


def parameters(n=500, dtype=np.float64, max_log_kappa=4.0):
    rng = np.random.default_rng(0)
    kappa = np.exp(rng.uniform(-14, max_log_kappa, n))
    return tf.constant(np.stack([1.5 * rng.normal(size=n), kappa], -1), dtype)


def bijector(dtype=np.float64, **kwargs):
    return MeanKLBijector(dtype(NU), dtype(RHO), **kwargs)


# Bijectors cache what they have computed for a tensor object: a fresh one makes the
# inverse compute, and a gradient flow.
def fresh(x):
    return tf.identity(x)


def test_forward_has_the_kl_and_mean_of_the_paper():
    x = parameters()
    loc, scale = tf.unstack(bijector().forward(x), axis=-1)
    tau, kappa = tf.unstack(x, axis=-1)
    prior = tfd.Normal(np.float64(NU), np.float64(RHO))
    kl = tfd.kl_divergence(tfd.Normal(loc, scale), prior)
    np.testing.assert_allclose(kl, kappa, rtol=1e-8)
    np.testing.assert_allclose(loc, NU + RHO * np.sqrt(2 * kappa) * np.tanh(tau))
    assert (scale < RHO).numpy().all()


def test_round_trip_float64():
    b, x = bijector(), parameters()
    y = b.forward(x)
    np.testing.assert_allclose(b.inverse(fresh(y)), x, rtol=1e-9)

    rng = np.random.default_rng(1)
    loc = NU + rng.normal(size=500)
    y = tf.constant(np.stack([loc, RHO * rng.uniform(1e-6, 0.999, 500)], -1))
    np.testing.assert_allclose(b.forward(fresh(b.inverse(y))), y, rtol=1e-10)


def test_round_trip_float32_loses_no_more_than_documented():
    b, x = bijector(np.float32), parameters(dtype=np.float32)
    tau, kappa = tf.unstack(x, axis=-1)
    tau_, kappa_ = tf.unstack(b.inverse(fresh(b.forward(x))), axis=-1)
    kappa_error = np.abs(kappa_ / kappa - 1)
    assert (kappa_error <= 1e-6 * (1 + 1 / np.sqrt(kappa))).all()
    tau_error = np.abs(tau_ - tau)
    assert (tau_error <= 1e-6 * (1 + np.cosh(tau) / np.sqrt(kappa))).all()


def test_inverse_where_tanh_saturates():
    # 1 - tanh(12) is 7.5e-11: atanh would be left with six digits.
    x = tf.constant([12.0, 10.0], tf.float64)
    y = bijector().forward(x)
    np.testing.assert_allclose(bijector().inverse(fresh(y)), x, rtol=1e-10)


def test_log_det_jacobian_matches_autodiff():
    b, x = bijector(), parameters()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = b.forward(x)
    _, expected = np.linalg.slogdet(tape.batch_jacobian(y, x))
    fldj = b.forward_log_det_jacobian(fresh(x), event_ndims=1)
    np.testing.assert_allclose(fldj, expected, rtol=1e-12, atol=1e-12)
    ildj = b.inverse_log_det_jacobian(fresh(y), event_ndims=1)
    np.testing.assert_allclose(ildj, -fldj, rtol=1e-9)
    total = b.forward_log_det_jacobian(fresh(x), event_ndims=2)
    np.testing.assert_allclose(total, np.sum(fldj), rtol=1e-12)


def test_log_det_jacobian_is_finite_for_extreme_parameters():
    x = tf.constant([[0, 1e-37], [100, 1e-30], [-3e38, 1e30], [100, 1e4], [0, 1e30]])
    b = MeanKLBijector()
    with tf.GradientTape() as tape:
        tape.watch(x)
        fldj = b.forward_log_det_jacobian(x)
    assert np.isfinite(fldj).all()
    assert np.isfinite(tape.gradient(fldj, x)).all()
    np.testing.assert_allclose(fldj[0], -0.5 * np.log(2), rtol=1e-6)


def test_batch_shapes():
    b = MeanKLBijector(loc=tf.zeros([3]), scale=tf.ones([2, 1, 1]))
    assert b.experimental_batch_shape() == (2, 1, 3)
    x = tf.ones([4, 1, 2])
    y = b.forward(x)
    assert y.shape == (2, 4, 3, 2)
    assert b.inverse(fresh(y)).shape == (2, 4, 3, 2)
    np.testing.assert_allclose(b.inverse(fresh(y)), tf.ones([2, 4, 3, 2]), rtol=1e-5)
    fldj = b.forward_log_det_jacobian(fresh(x))
    assert tf.broadcast_static_shape(fldj.shape, y.shape[:-1]) == y.shape[:-1]
    assert b.forward_event_shape([2]) == b.inverse_event_shape([2]) == [2]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_crosses_a_function_boundary(jit_compile):
    traces = []

    @tf.function(jit_compile=jit_compile)
    def evaluate(b, x):
        traces.append(b)
        return b.forward(x), b.forward_log_det_jacobian(x), b

    x = parameters(20, np.float32)
    for scale in (0.5, 2.0):
        b = MeanKLBijector(loc=1.0, scale=scale)
        y, fldj, back = evaluate(b, x)
        np.testing.assert_allclose(y, b.forward(x), rtol=1e-5, atol=1e-6)
        expected = b.forward_log_det_jacobian(x)
        np.testing.assert_allclose(fldj, expected, rtol=1e-5, atol=1e-6)
        assert isinstance(back, MeanKLBijector)
        assert back.scale == scale
    assert len(traces) == 1


def test_variables_stay_live_and_trainable():
    loc, log_scale = tf.Variable(0.0), tf.Variable(0.0)
    scale = tfp.util.DeferredTensor(log_scale, tf.exp)
    b = MeanKLBijector(loc, scale, validate_args=True)
    assert len(b.trainable_variables) == 2
    x = tf.constant([[0.4, 1.3]])
    before = b.forward(fresh(x))
    with tf.GradientTape() as tape:
        y = b.forward(fresh(x))
    for gradient in tape.gradient(y, b.trainable_variables):
        assert np.abs(gradient) > 0
    loc.assign(1.0)
    np.testing.assert_allclose(b.forward(fresh(x)) - before, [[1, 0]], atol=1e-6)


def test_inverse_is_differentiable():
    b = bijector()
    y = b.forward(parameters(50, max_log_kappa=2.0))
    with tf.GradientTape() as tape:
        tape.watch(y)
        x = b.inverse(fresh(y))
    _, expected = np.linalg.slogdet(tape.batch_jacobian(x, y))
    ildj = b.inverse_log_det_jacobian(fresh(y))
    np.testing.assert_allclose(ildj, expected, rtol=1e-8, atol=1e-8)


def test_validate_args():
    error = tf.errors.InvalidArgumentError
    with pytest.raises(error, match=r"`scale` of the coding distribution"):
        MeanKLBijector(scale=[1.0, 0.0], validate_args=True)
    b = MeanKLBijector(validate_args=True)
    for method in (b.forward, b.forward_log_det_jacobian):
        with pytest.raises(error, match=r"`kappa`.* must be positive"):
            method([[0.0, 0.0]])
    for method in (b.inverse, b.inverse_log_det_jacobian):
        with pytest.raises(error, match=r"less than that of the coding"):
            method([[0.0, 1.0]])
        with pytest.raises(error, match=r"`scale` must be positive"):
            method([[0.0, -0.5]])
    np.testing.assert_allclose(b.inverse(b.forward([0.5, 2.0])), [0.5, 2.0], rtol=1e-6)


def test_needs_a_last_axis_of_two():
    with pytest.raises(tf.errors.InvalidArgumentError, match="must equal 2"):
        MeanKLBijector().forward([1.0, 2.0, 3.0])


def test_parameter_properties():
    properties = MeanKLBijector.parameter_properties(dtype=tf.float32)
    constrain = properties["scale"].default_constraining_bijector_fn()
    assert constrain.forward(-50.0) > 0
    copy = MeanKLBijector(0.5, 2.0).copy(loc=1.0)
    np.testing.assert_allclose(copy.forward([0.0, 1e-10])[0], 1.0)
