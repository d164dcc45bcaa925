"""Statistics of BatchNormalization for the weights of inference."""

import keras
import numpy as np
import pytest
from support import fix_all

import tfmiracle
from tfmiracle.recalibration import recalibrate

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
