"""The curvature of the loss, against what is known of linear models; coding by it."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmiracle
from tfmiracle import ONE_SHOT, Recipe
from tfmiracle.datasets import load_dataset
from tfmiracle.studies.architectures import digits_cnn
from tfmiracle.training.curvature import curvature

FEATURES, OUTPUTS = 3, 4
X = np.random.default_rng(0).normal(size=(64, FEATURES)).astype(np.float32)


def linear(activation=None):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.layers.Input((FEATURES,)), keras.layers.Dense(OUTPUTS, activation)]
    )


def measured(net, loss, steps=600, weights=None, **options):
    """Of kernel and bias, averaged over many batches of all examples."""
    model = tfmiracle.VariationalModel(net, "sites", block_size=5, **options)
    found = curvature(model, [X] * steps, loss, weights, seed=3)
    return np.split(model.block_posterior.layout.to_effective(found), [-OUTPUTS])


def of_linear(by_logit):
    """Its diagonal, where that by the logits is known: `[examples, outputs]`."""
    kernel = (X**2).T @ by_logit / len(X)
    return kernel.reshape(-1), by_logit.mean(0)


def softmax(net):
    return tf.nn.softmax(X @ net.weights[0].numpy() + net.weights[1].numpy()).numpy()


@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), None),
        ("categorical_crossentropy", "softmax"),
    ],
)
def test_classes(loss, activation):
    net = linear(activation)
    p = softmax(net)
    for found, exact in zip(measured(net, loss), of_linear(p * (1 - p)), strict=True):
        np.testing.assert_allclose(found, exact, 0.2)
        np.testing.assert_allclose(found.mean(), exact.mean(), 0.05)


def test_independent_labels():
    net = linear("sigmoid")
    p = net(X).numpy()
    exact = of_linear(p * (1 - p) / OUTPUTS)  # Keras takes the mean over them
    for found, expected in zip(measured(net, "binary_crossentropy"), exact):
        np.testing.assert_allclose(found, expected, 0.2)


@pytest.mark.parametrize("loss", [None, "mse", "mae", keras.losses.Huber()])
def test_values(loss):
    exact = of_linear(np.full((len(X), OUTPUTS), 2 / OUTPUTS))
    for found, expected in zip(measured(linear(), loss), exact):
        np.testing.assert_allclose(found, expected, 0.2)


TWO = [("mse", 2), ({"b": "mse", "a": "mse"}, 2), ({"b": "mse"}, 1)]


@pytest.mark.parametrize("arranged", ["dict", "list"])
@pytest.mark.parametrize(("loss", "times"), TWO)
def test_several_outputs_add_up(loss, times, arranged):
    x = keras.layers.Input((FEATURES,))
    h = keras.layers.Dense(OUTPUTS, name="b")(x)
    a = keras.layers.Activation("linear", name="a")(h)
    net = keras.Model(x, {"b": h, "a": a} if arranged == "dict" else [h, a])
    once = of_linear(np.full((len(X), OUTPUTS), 2 / OUTPUTS))
    for found, expected in zip(measured(net, loss), once):
        np.testing.assert_allclose(found, times * expected, 0.2)
    with pytest.raises(ValueError, match=r"one for each of the 2 outputs"):
        measured(net, ["mse"] * 3, 1)


def test_each_output_has_its_own_loss_and_weight():
    """By name, whatever the order: a narrow head of classes, a wide one of values."""
    x = keras.layers.Input((FEATURES,))
    heads = [keras.layers.Dense(3, name="zz"), keras.layers.Dense(50, name="aa")]
    net = keras.Model(x, [head(x) for head in heads])
    loss = {
        "aa": "mse",
        "zz": keras.losses.CategoricalCrossentropy(from_logits=True),
    }
    model = tfmiracle.VariationalModel(net, "sites", block_size=5)
    found = curvature(model, [X] * 600, loss, {"aa": 4.0, "zz": 1.0})
    effective = model.block_posterior.layout.to_effective(found)
    (bias,) = np.split(effective, [9, 12])[1:2]
    logits = net(X)[0].numpy()
    p = tf.nn.softmax(logits).numpy()
    np.testing.assert_allclose(bias, (p * (1 - p)).mean(0), 0.2)
    np.testing.assert_allclose(effective[-50:].mean(), 4 * 2 / 50, 0.05)


def test_a_curvature_that_is_not_finite_is_told():
    x = keras.layers.Input((FEATURES,))
    h = keras.layers.Dense(OUTPUTS)(x)
    net = keras.Model(x, keras.ops.sqrt(keras.ops.relu(h)))
    with pytest.raises(ValueError, match="curvature of the loss is not finite"):
        measured(net, "mse", 1)


def test_an_output_for_each_position():
    net = keras.Sequential(
        [keras.layers.Input((8, FEATURES)), keras.layers.Dense(OUTPUTS)]
    )
    model = tfmiracle.VariationalModel(net, "sites", block_size=5)
    x = X[:64].reshape(8, 8, FEATURES)
    found = curvature(model, [x] * 2000, "mse")
    exact = of_linear(np.full((len(X), OUTPUTS), 2 / OUTPUTS))
    effective = model.block_posterior.layout.to_effective(found)
    np.testing.assert_allclose(effective, np.concatenate(exact), 0.2)


def test_entries_that_share_a_weight_are_one():
    net = linear()
    rules = {"kernel": "hash=12"}  # one weight, with signs
    (kernel,) = measured(net, "mse", rules=rules)[:1]
    model = tfmiracle.VariationalModel(net, "sites", block_size=5, rules=rules)
    _, sign = model.block_posterior.layout.hashing(0)
    signed = np.square(X @ sign.reshape(FEATURES, OUTPUTS)).mean(0).sum()
    np.testing.assert_allclose(kernel, 2 / OUTPUTS * signed, 0.2)


def test_what_does_not_matter_is_zero():
    x = keras.layers.Input((FEATURES,))
    net = keras.Model(x, keras.layers.Dense(OUTPUTS)(keras.layers.Rescaling(0.0)(x)))
    kernel, bias = measured(net, "mse", 3)
    np.testing.assert_array_equal(kernel, 0)
    assert np.all(bias > 0)


def test_sites_take_it():
    net = linear()
    sites = tfmiracle.Sites(initial_budget=1.0)
    model = tfmiracle.VariationalModel(net, sites, block_size=16)
    posterior = model.block_posterior
    largest = 1e6 * (np.arange(16).reshape(1, 16) == 3)
    posterior.observe(largest)
    _, log_ratio = posterior.standardized()
    assert np.argmin(log_ratio) == 3
    np.testing.assert_allclose(posterior.block_kl(), 20 * np.log(2), 1e-5)
    posterior.observe(np.zeros((1, 16)))  # nothing matters: all precisions the same
    precisions = posterior.log_precision.numpy()
    np.testing.assert_allclose(precisions, precisions[0, 0])


def test_only_for_what_starts_from_it():
    with pytest.raises(
        ValueError, match=r"`curvature_steps` must be 0 unless.*mean_kl"
    ):
        Recipe(curvature_steps=5)
    assert Recipe(curvature_steps=5, parameterization="sites").curvature_steps == 5


def test_one_shot(tmp_path):
    """Seconds, no labels, no loss in accuracy to speak of."""
    data = load_dataset("digits")
    keras.utils.set_random_seed(0)
    net = digits_cnn()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss, metrics=["accuracy"])
    net.fit(data.x_train, data.y_train, epochs=10, verbose=0)
    before = net.evaluate(data.x_test, data.y_test, verbose=0)[1]
    recipe = dataclasses.replace(ONE_SHOT, state_bits=12)  # for speed

    def coded(name):
        path, x = tmp_path / name, data.x_train
        tfmiracle.compress(net, x, "12x", path, recipe, distill=True, verbose=0)
        return path

    one, two = coded("one.miracle"), coded("two.miracle")
    assert one.read_bytes() == two.read_bytes()
    assert 4 * net.count_params() / len(one.read_bytes()) >= 12
    small = tfmiracle.load(one)
    small.compile(loss=loss, metrics=["accuracy"])
    assert small.evaluate(data.x_test, data.y_test, verbose=0)[1] > before - 0.01
