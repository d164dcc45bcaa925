"""Statistics of BatchNormalization for the weights of inference."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import fix_all

import tfmiracle
from tfmiracle.hosts.recalibration import recalibrate

X = np.random.default_rng(0).normal(2, 3, size=(60, 4)).astype(np.float32)


def net():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(5, name="one"),
            keras.layers.BatchNormalization(name="norm", momentum=0.9),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, name="two"),
            keras.layers.BatchNormalization(name="last", trainable=False),
        ]
    )


def expected(kernel, bias, batches):
    hidden = [np.asarray(x @ kernel + bias, np.float64) for x in batches]
    return np.mean([h.mean(0) for h in hidden], 0), np.mean(
        [h.var(0) for h in hidden], 0
    )


@pytest.mark.parametrize("sizes", [[60], [20, 40], [10] * 6])
def test_statistics_are_means_over_batches(sizes, eager):
    model = net()
    batches = np.split(X, np.cumsum(sizes)[:-1])
    before = [v.numpy() for v in model.weights]
    assert recalibrate(model, batches) == 1
    norm = model.get_layer("norm")
    mean, variance = expected(*model.get_layer("one").get_weights(), batches)
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-4)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-4)
    changed = [
        v.path for v, old in zip(model.weights, before) if not np.array_equal(v, old)
    ]
    assert changed == [norm.moving_mean.path, norm.moving_variance.path]
    # As it was before: the momentum, and inference.
    assert norm.momentum == 0.9
    state = norm.moving_mean.numpy()
    model(X, training=False)
    np.testing.assert_array_equal(norm.moving_mean, state)
    model(X[:7], training=True)
    assert np.any(norm.moving_mean.numpy() != state)


def test_decoded_weights_count(eager):
    model = fix_all(tfmiracle.VariationalModel(net(), block_size=7))
    kernel, bias = model.block_posterior.values()[:2]
    recalibrate(model, [X[:30], X[30:]])
    norm = model.net.get_layer("norm")
    mean, variance = expected(kernel.numpy(), bias.numpy(), [X[:30], X[30:]])
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-4)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-4)


def test_nothing_to_do(eager):
    plain = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])

    def never():
        raise AssertionError("no batch is needed")
        yield

    assert recalibrate(plain, never()) == 0


def test_the_callback_recalibrates_before_it_writes(tmp_path, quick):
    model = tfmiracle.VariationalModel(net(), block_size=40, block_bits=6)
    model.compile("sgd", "mse")
    callback = tfmiracle.CompressionCallback(
        tmp_path / "a.miracle", 9, 1, recalibration_data=[X], verbose=0
    )
    model.fit(X, X[:, :3], verbose=0, callbacks=[callback])
    loaded = tfmiracle.load(tmp_path / "a.miracle")
    mean, _ = expected(*loaded.get_layer("one").get_weights(), [X])
    found = loaded.get_layer("norm").moving_mean
    step = np.max(np.abs(mean)) / 127  # in levels of 8 bits
    np.testing.assert_allclose(found, mean, atol=0.52 * step)
    np.testing.assert_array_equal(found, model.net.get_layer("norm").moving_mean)


# Calls of the network in which its statistics are constants.


@keras.saving.register_keras_serializable("test_recalibration")
class Frozen(keras.layers.Layer):
    """Calls what is inside as in inference."""

    def __init__(self, inner, how="call", **kwargs):
        super().__init__(**kwargs)
        self.inner, self.how = inner, how

    def call(self, x, training=None):
        if self.how == "call":
            return self.inner(x, training=False)
        if self.how == "training alone" and not training:
            return x
        return self.inner(x)


def norm(**options):
    return keras.layers.BatchNormalization(**options)


def frozen_later(inner):
    layer = Frozen(inner, "inner")
    layer.trainable = False
    return layer


class Twice(keras.layers.Layer):
    """One normalization, in training once and once not."""

    def __init__(self):
        super().__init__()
        self.norm = norm(center=False, scale=False)

    def call(self, x):
        return self.norm(self.norm(x), training=False)


def statistics(layer):
    return layer.moving_mean.numpy(), layer.moving_variance.numpy()


@pytest.mark.parametrize(
    "make",
    [
        Frozen,
        lambda inner: Frozen(keras.Sequential([inner])),
        lambda inner: Frozen(Frozen(inner, "inner")),
        frozen_later,
        lambda inner: keras.Sequential([Frozen(inner), keras.layers.Dropout(0.5)]),
        lambda inner: Frozen(inner, "training alone"),
    ],
)
def test_constants_are_not_touched(make, eager):
    inner, other = norm(), norm()
    inner.build((None, 4))
    model = keras.Sequential([keras.layers.Input((4,)), make(inner), other])
    inner.moving_mean.assign(np.full(4, 2.0))
    before = statistics(inner)
    assert recalibrate(model, [X[:30], X[30:]]) == 1
    np.testing.assert_array_equal(statistics(inner), before)
    for value, expected in zip(
        statistics(other), statistics_of(model.layers[0](X), [30]), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def statistics_of(x, at):
    parts = np.split(np.asarray(x, np.float64), at)
    return np.mean([p.mean(0) for p in parts], 0), np.mean([p.var(0) for p in parts], 0)


def test_each_call_counts_by_itself(eager):
    layer = Twice()
    model = keras.Sequential([keras.layers.Input((4,)), layer])
    layer.norm.moving_mean.assign(np.full(4, 2.0))
    recalibrate(model, [X])
    mean, variance = statistics_of(X, [])
    np.testing.assert_allclose(layer.norm.moving_mean, mean, rtol=1e-4)
    np.testing.assert_allclose(layer.norm.moving_variance, variance, rtol=1e-4)


def test_shared_layers_take_the_mean_over_their_calls(eager):
    inputs, shared = keras.layers.Input((4,)), norm()
    model = keras.Model(inputs, [shared(inputs), shared(inputs * 2)])
    assert recalibrate(model, [X[:30], X[30:]]) == 1
    values = [statistics_of(factor * X, [30]) for factor in (1, 2)]
    for value, expected in zip(statistics(shared), np.mean(values, 0), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4)


@keras.saving.register_keras_serializable("test_recalibration")
class Counts(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            self.calls.assign_add(1.0)
        return x


def test_nothing_else_changes(eager):
    """Neither seeds nor other states, though training is tried once."""
    seeded = keras.layers.GaussianNoise(1.0, seed=3)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            seeded,
            keras.layers.Dense(4),
            Counts(),
            norm(name="norm"),
            keras.layers.Dropout(0.5),
        ]
    )
    falling = tfmiracle.MeanKL(initial_budget=4.0, annealing_steps=9)
    model = tfmiracle.VariationalModel(model, falling, block_size=7)
    before = {v.path: v.numpy() for v in model.variables}
    recalibrate(model, [X])
    changed = [v.path for v in model.variables if np.any(v.numpy() != before[v.path])]
    assert [path.rpartition("/")[2] for path in changed] == [
        "moving_mean",
        "moving_variance",
    ]


class Compiled(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm = norm()
        self.norm.build((None, 4))
        self.built = True

    @tf.function
    def call(self, x):
        return self.norm(x)


def test_functions_of_the_network_keep_nothing_of_it():
    model = Compiled()
    batches = [X[:30], X[30:]]
    recalibrate(model, batches)
    found = statistics(model.norm)
    for value, expected in zip(found, statistics_of(X, [30]), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    expected = (X[:30] - found[0]) / np.sqrt(found[1] + model.norm.epsilon)
    np.testing.assert_allclose(model(X[:30], training=False), expected, atol=1e-4)
    np.testing.assert_array_equal(statistics(model.norm), found)
