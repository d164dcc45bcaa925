"""Labels from a trained network."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmiracle
from tfmiracle import Recipe
from tfmiracle.training.distillation import relabel, soft_loss

X = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
Y = np.argmax(X[:, :3], 1)
HARD = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def teacher(loss=HARD, units=3, activation=None):
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(units, activation)]
    )
    net.compile(loss=loss)
    return net


def two_outputs():
    x = keras.layers.Input((4,))
    outputs = {name: keras.layers.Dense(2, name=name)(x) for name in ("p", "q")}
    net = keras.Model(x, outputs)
    net.compile(loss={"p": keras.losses.BinaryCrossentropy(True), "q": "mae"})
    return net


def softmax(y):
    odds = np.exp(y)
    return odds / odds.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "loss, activation, expected",
    [
        (HARD, None, softmax),
        (type(HARD)(from_logits=True, name="mine"), None, softmax),
        ("sparse_categorical_crossentropy", "softmax", lambda y: y),
        (keras.losses.CategoricalCrossentropy(from_logits=True), None, softmax),
        (keras.losses.BinaryCrossentropy(True), None, lambda y: 1 / (1 + np.exp(-y))),
        ("mse", None, lambda y: y),
        (keras.losses.Huber(), None, lambda y: y),
        (None, None, lambda y: y),
    ],
)
def test_labels_and_their_loss(loss, activation, expected):
    net = teacher(loss, activation=activation)
    outputs = net.predict(X, verbose=0)
    labels = expected(outputs)
    weight = np.arange(300.0)
    for data in (X, (X,), (X, Y), (X, Y, weight)):
        x, y, *rest = relabel(data, net, loss)
        assert x is X
        np.testing.assert_allclose(y, labels, rtol=1e-5, atol=1e-6)
        assert rest == ([] if len(data) != 3 else [weight])
    for data in (X, (X, Y), (X, Y, weight)):
        batches = relabel(
            tf.data.Dataset.from_tensor_slices(data).batch(128), net, loss
        )
        x, y, *rest = zip(*batches)
        np.testing.assert_array_equal(np.concatenate(x), X)
        np.testing.assert_allclose(np.concatenate(y), labels, rtol=1e-5, atol=1e-6)
        assert len(rest) == (isinstance(data, tuple) and len(data) == 3)
    assert relabel(None, net, loss) is None
    # The labels minimize the loss: it has no gradient at the outputs themselves.
    at = tf.constant(outputs)
    with tf.GradientTape() as tape:
        tape.watch(at)
        value = soft_loss(loss)(labels, at)
    np.testing.assert_allclose(tape.gradient(value, at) * 300, 0, atol=1e-4)


def test_several_outputs():
    net = two_outputs()
    _, labels = relabel(X, net, net.loss)
    outputs = net.predict(X, verbose=0)
    np.testing.assert_allclose(labels["p"], 1 / (1 + np.exp(-outputs["p"])), rtol=1e-4)
    np.testing.assert_allclose(labels["q"], outputs["q"], rtol=1e-4, atol=1e-6)
    assert isinstance(soft_loss(net.loss)["q"], keras.losses.MeanSquaredError)


def test_compress_without_labels(tmp_path):
    net = teacher()
    net.layers[0].set_weights([4 * np.eye(4, 3), np.zeros(3)])  # knows the answer
    recipe = Recipe(block_size=4, block_bits=12, train_steps=200, blocks_per_round=1)
    result = tfmiracle.compress(
        net,
        X,
        path=tmp_path / "net.miracle",
        recipe=dataclasses.replace(recipe, finetune_steps=20),
        distill=True,
        validation_data=X,
        metrics=["accuracy"],
        verbose=0,
    )
    assert result.stages["original"]["accuracy"] == 1
    assert result.stages["decoded"]["accuracy"] > 0.85
    small = tfmiracle.load(tmp_path / "net.miracle")
    assert np.mean(np.argmax(small.predict(X, verbose=0), -1) == Y) > 0.85


def test_labels_of_a_dataset_stay_those_of_the_teacher(tmp_path):
    net = teacher()
    outputs = net.predict(X, verbose=0)
    labels = tf.nn.softmax(outputs).numpy()
    seen = []

    class Loss(keras.losses.Loss):
        def call(self, y_true, y_pred):
            tf.py_function(lambda y: seen.append(y.numpy()), [y_true], [])
            return keras.losses.categorical_crossentropy(y_true, y_pred, True)

    recipe = Recipe(block_size=4, block_bits=8, warmup_steps=10, train_steps=10)
    tfmiracle.compress(
        net,
        tf.data.Dataset.from_tensor_slices(X).batch(len(X)),
        path=tmp_path / "net.miracle",
        recipe=dataclasses.replace(recipe, blocks_per_round=2, finetune_steps=10),
        loss=Loss(),
        distill=True,
        verbose=0,
    )
    assert len(seen) == 30  # ten of each phase
    np.testing.assert_allclose(seen, [labels] * len(seen), rtol=1e-4)


def test_losses_by_name_find_their_outputs():
    """Whatever the order of names and outputs."""
    x = keras.layers.Input((3,))
    heads = [keras.layers.Dense(4, name="zz"), keras.layers.Dense(4, name="aa")]
    net = keras.Model(x, [head(x) for head in heads])
    crossentropy = keras.losses.CategoricalCrossentropy(from_logits=True)
    inputs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    _, labels = relabel(inputs, net, {"aa": "mse", "zz": crossentropy})
    outputs = net(inputs)
    np.testing.assert_allclose(labels[0], keras.ops.softmax(outputs[0]), 1e-5)
    np.testing.assert_allclose(labels[1], outputs[1], 1e-5)
