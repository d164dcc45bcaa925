"""The Mean-Var parameterization: its numbers, its penalty, and the annealing."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from hypothesis import given, settings
from hypothesis import strategies as st
from support import posterior_of

import tfmiracle
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.hosts.models import posteriors as find_posteriors
from tfmiracle.posteriors.parameterization import MeanVar
from tfmiracle.recipe import PAPER_MEAN_VAR

LN2 = math.log(2)
VARIABLES = [CodedVariable((3, 4), 1, 0), CodedVariable((5,), 1, 1)]  # 17: 4 blocks
LARGEST = float(np.finfo(np.float32).max)


def posterior(seed=0, **options):
    """Means around 1, log sigma around -1, rho = exp(-0.5) and exp(0.3)."""
    made = posterior_of(
        MeanVar, WeightLayout(VARIABLES, 5, seed), **{"log_stddev_rate": 1.0, **options}
    )
    rng = np.random.default_rng(seed)
    made.p.start(None, False, [-0.5, 0.3], 0.0)
    made.loc.assign(rng.normal(size=made.block_shape))
    made.log_stddev.assign(rng.normal(-1, 0.5, made.block_shape))
    return made


def test_q_is_what_the_parameters_say(eager):
    q = posterior()
    loc, scale = q.loc_and_scale()
    layout = q.layout
    np.testing.assert_allclose(loc, layout.to_effective(q.loc.numpy()), rtol=1e-6)
    stddev = np.exp(layout.to_effective(q.log_stddev.numpy()))
    np.testing.assert_allclose(scale, stddev, rtol=2e-6)
    # KL of a block, from TFP in float64.
    rho = np.exp(np.array([-0.5, 0.3]))[layout.scale_index_of_slot()]
    kl = tfp.distributions.kl_divergence(
        tfp.distributions.Normal(
            q.loc.numpy().astype(float), np.exp(q.log_stddev.numpy().astype(float))
        ),
        tfp.distributions.Normal(tf.zeros_like(rho), rho),
    )
    expected = np.sum(np.where(layout.mask(), kl, 0), -1)
    np.testing.assert_allclose(q.block_kl(), expected, rtol=3e-6)


def test_the_start_is_the_papers():
    q = PAPER_MEAN_VAR.posterior(WeightLayout(VARIABLES, 5, 1))
    values = [np.full((3, 4), 0.25, np.float32), np.arange(5, dtype=np.float32)]
    q.initialize(values, warm=False)
    for value, start in zip(q.values(), values, strict=True):
        np.testing.assert_allclose(value, start, rtol=1e-6)
    np.testing.assert_allclose(q.loc_and_scale()[1], math.exp(-10), rtol=2e-6)
    np.testing.assert_allclose(q.coding_scale, math.exp(-2), rtol=1e-6)
    np.testing.assert_allclose(q.beta, 1e-8, rtol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_the_penalty_is_beta_times_kl(mode, request):
    if mode == "eager":
        request.getfixturevalue("eager")
    q = posterior(kl_bits=3.0, beta_rate=0.5)
    beta = np.array([0.1, 2.0, 0.0, 7.0], np.float32)
    q.beta.assign(beta)
    kl = q.block_kl().numpy()
    assert np.any(kl > 3 * LN2) and np.any(kl < 3 * LN2)
    with tf.GradientTape() as tape:
        q(training=True)
        (penalty,) = q.losses
    gradient = tape.gradient(penalty, q.trainable_variables)
    np.testing.assert_allclose(penalty, beta @ kl, rtol=1e-5)
    # d KL / d mu = mu / rho^2,  d KL / d log sigma = sigma^2 / rho^2 - 1.
    variance = np.exp(2 * np.array([-0.5, 0.3]))[q.layout.scale_index_of_slot()]
    mask, row = q.layout.mask(), beta[:, None]
    ratio = np.exp(2 * q.log_stddev.numpy()) / variance
    by_name = dict(zip((v.name for v in q.trainable_variables), gradient, strict=True))
    np.testing.assert_allclose(
        by_name["loc"], mask * row * q.loc.numpy() / variance, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        by_name["log_stddev"], mask * row * (ratio - 1), rtol=1e-5, atol=1e-6
    )
    # And d KL / d log rho = 1 - (sigma^2 + mu^2) / rho^2, over the weights of a scale.
    each = mask * row * (1 - ratio - q.loc.numpy() ** 2 / variance)
    index = q.layout.scale_index_of_slot()
    expected = [each[(index == i) & mask].sum() for i in range(2)]
    np.testing.assert_allclose(by_name["log_coding_scale"], expected, rtol=1e-5)


def test_beta_is_annealed_by_the_paper_rule(eager):
    q = posterior(kl_bits=3.0, beta=0.5, beta_rate=5e-5)
    over = q.block_kl().numpy() > 3 * LN2
    for _ in range(100):
        q(training=True)
    expected = 0.5 * np.where(over, 1.00005, 1 / 1.00005) ** 100
    np.testing.assert_allclose(q.beta, expected, rtol=1e-5)
    for look in (q.values, lambda: q.values(sample=True), lambda: q(training=False)):
        before = q.beta.numpy()
        look()
        np.testing.assert_array_equal(q.beta, before)
    assert not q.losses


def test_fixed_blocks_leave_the_penalty_and_keep_their_q(eager):
    q = posterior(kl_bits=3.0, beta=0.5, block_bits=4)
    q.finalize_coding_scale()
    kl = q.block_kl().numpy()
    loc = q.loc_and_scale()[0].numpy()
    q.fix([1, 3], [5, 15])
    with tf.GradientTape() as tape:
        q(training=True)
        (penalty,) = q.losses
    np.testing.assert_allclose(penalty, 0.5 * (kl[0] + kl[2]), rtol=1e-5)
    for gradient in tape.gradient(penalty, [q.loc.value, q.log_stddev.value]):
        np.testing.assert_array_equal(gradient.numpy()[[1, 3]], 0)
    assert np.all((q.beta.numpy() == 0.5) == [False, True, False, True])
    # Whatever an optimizer still does to their parameters.
    q.loc.assign_add(tf.ones(q.block_shape))
    fixed = np.isin(np.arange(4), [1, 3])
    np.testing.assert_array_equal(q.block_kl().numpy()[fixed], kl[fixed])
    assert np.all(q.block_kl().numpy()[~fixed] != kl[~fixed])
    same = q.layout.to_effective(np.repeat(fixed[:, None], 5, 1))
    np.testing.assert_array_equal(q.loc_and_scale()[0].numpy()[same], loc[same])


finite = st.one_of(
    st.sampled_from([0.0, LARGEST, -LARGEST, 1e30, -1e30, 100.0, -100.0, 1e-45]),
    st.floats(-5, 5, width=32),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(finite, min_size=1, max_size=17),
    st.lists(finite, min_size=1, max_size=17),
    st.lists(finite, min_size=2, max_size=2),
    st.sampled_from([1e-30, 1e-8, 1.0, 1e4]),
)
def test_finite_parameters_give_finite_numbers(loc, log_stddev, log_rho, beta):
    q = posterior_of(MeanVar, WeightLayout(VARIABLES, 5, 0), beta=beta)
    q.loc.assign(np.resize(np.array(loc, np.float32), q.block_shape))
    q.log_stddev.assign(np.resize(np.array(log_stddev, np.float32), q.block_shape))
    q.p.start(None, False, log_rho, 0.0)
    tf.config.run_functions_eagerly(True)
    try:
        with tf.GradientTape() as tape:
            values = q(training=True)
            total = tf.add_n([tf.reduce_sum(v) for v in values]) + q.losses[0]
        gradients = tape.gradient(total, q.trainable_variables)
    finally:
        tf.config.run_functions_eagerly(False)
    for tensor in (*values, total, *gradients, q.beta, q.block_kl()):
        assert np.all(np.isfinite(tensor))
    assert np.all(q.block_kl() >= 0) and np.all(q.beta.numpy() > 0)


# In hosts.


def data(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return x, np.argmax(x[:, :3], 1)


MEAN_VAR = tfmiracle.MeanVar(
    log_stddev=-3.0, log_stddev_rate=1.0, beta=1e-2, beta_rate=0.03
)
OPTIONS = {"kl_bits": 10.0, "parameterization": MEAN_VAR, "block_size": 10}


def of_layers():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((6,)),
            tfmiracle.MeanVarDense(8, activation="relu", **OPTIONS),
            tfmiracle.MeanVarDense(3, **OPTIONS),
        ]
    )


def whole():
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(3),
        ]
    )
    return tfmiracle.VariationalModel(net, warm_start=False, **OPTIONS)


@pytest.mark.parametrize("make", [of_layers, whole])
def test_fit_brings_the_kl_to_the_budget(make, tmp_path):
    model = make()
    model.compile(
        keras.optimizers.Adam(0.03),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=4,
    )
    posteriors = [p for p, _ in find_posteriors(model)]
    start = np.concatenate([p.block_kl() for p in posteriors]) / LN2
    assert np.mean(start) > 30
    many = (np.repeat(part, 20, axis=0) for part in data())  # epochs take long
    model.fit(*many, batch_size=16, epochs=6, verbose=0)
    kl = np.concatenate([p.block_kl() for p in posteriors]) / LN2
    assert np.all((kl > 5) & (kl < 15))
    loss, accuracy = model.evaluate(*data(), verbose=0)
    assert accuracy > 0.8
    # The penalty is no part of the loss of evaluation.
    logits = model(data()[0])
    crossentropy = keras.losses.sparse_categorical_crossentropy(
        data()[1], logits, from_logits=True
    )
    assert loss == pytest.approx(float(np.mean(crossentropy)), rel=1e-4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(data()[0]), logits, rtol=1e-5, atol=1e-5)
    for old, new in zip(posteriors, find_posteriors(loaded), strict=True):
        np.testing.assert_array_equal(old.beta, new[0].beta)


def test_a_layer_called_twice_is_penalized_once(eager):
    layer = tfmiracle.MeanVarDense(
        6,
        parameterization=tfmiracle.MeanVar(
            log_stddev=-10.0, log_stddev_rate=1.0, beta=0.5, beta_rate=1.0
        ),
        block_size=10,
    )
    x = keras.Input((6,))
    model = keras.Model(x, layer(layer(x)))
    before = layer.block_posterior.beta.numpy()
    kl = layer.block_posterior.block_kl().numpy()
    model(data()[0], training=True)
    assert len(model.losses) == 1
    assert float(model.losses[0]) == pytest.approx(float(before @ kl), rel=1e-4)
    factor = layer.block_posterior.beta.numpy() / before
    np.testing.assert_allclose(np.abs(np.log2(factor)), 1, rtol=1e-5)
    model(data()[0], training=False)
    assert model.losses == []


def test_every_layer_has_both_parameterizations():
    others = ("MeanKL", "MeanKLBijector")
    names = [n for n in tfmiracle.__all__ if n.startswith("MeanKL")]
    names = [n for n in names if n not in others]
    assert len(names) == 13
    for name in names:
        cls = getattr(tfmiracle, name.replace("MeanKL", "MeanVar"))
        assert cls.PARAMETERIZATION == "mean_var"
        assert cls.__mro__[-4:] == getattr(tfmiracle, name).__mro__[-4:]


def test_blocks_over_their_budget_are_coded_and_reported(tmp_path, quick):
    model = whole()
    model.compile("sgd", "mse")
    callback = tfmiracle.CompressionCallback(tmp_path / "net.miracle", 4, 1, verbose=0)
    x, _ = data()
    with pytest.warns(UserWarning, match=r"\d+ of 9 blocks .* above the budget"):
        model.fit(x, np.zeros((64, 3)), epochs=1, verbose=0, callbacks=[callback])
    assert callback.file is not None
    assert sum(row["over_budget"] for row in callback.history) == 9
    assert max(row["max_kl_bits"] for row in callback.history) > 20
    assert tfmiracle.load(tmp_path / "net.miracle").count_params() == 83
