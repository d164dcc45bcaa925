"""What works on which kinds of models: makes and checks `docs/coverage.md`.

`python tests/test_coverage.py --write` writes the document anew; the tests compare
every cell of it with what they find.
"""

import functools
import importlib.util
import os
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import fix_all

import tfmiracle
from tfmiracle.decoder import decode
from tfmiracle.hosts.loading import to_network
from tfmiracle.hosts.models import plain_weights
from tfmiracle.hosts.network import to_file
from tfmiracle.keras_internals import children, walk
from tfmiracle.miracle_file import (
    MiracleFile,
)

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "coverage.md"
WRITE = "TFMIRACLE_WRITE_COVERAGE"
COUNT = 8  # examples
ONNX = all(map(importlib.util.find_spec, ("onnx", "tf2onnx", "onnxruntime")))
TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
register = keras.saving.register_keras_serializable("test_coverage")


def numbers(*shape):
    """Examples."""
    return np.random.default_rng(7).normal(size=(COUNT, *shape)).astype(np.float32)


def tokens(length=5, below=10):
    return np.random.default_rng(7).integers(1, below, (COUNT, length)).astype("int32")


def targets(net, x):
    """Something to learn, for any network."""
    rng = np.random.default_rng(8)
    return tf.nest.map_structure(lambda y: rng.normal(size=y.shape), net(x))


def stack(shape, *parts, dtype=None):
    return keras.Sequential([layers.Input(shape, dtype=dtype), *parts])


# Families of models. Each is a function that returns a network and its inputs. Several
# inputs or outputs of one network have different shapes, by which exports are compared.

FAMILIES = {}


def family(name):
    def add(make):
        FAMILIES[name] = make
        return make

    return add


@family("`Sequential`")
def sequential():
    return stack((4,), layers.Dense(6, "relu"), layers.Dense(3)), numbers(4)


@family("functional, several inputs and outputs")
def functional():
    a, b = layers.Input((4,), name="a"), layers.Input((5,), name="b")
    h = layers.Dense(6, "relu")(layers.Concatenate()([a, b]))
    outputs = [layers.Dense(3, name="c")(h), layers.Dense(2, name="d")(h)]
    return keras.Model([a, b], outputs), [numbers(4), numbers(5)]


@family("functional, dicts of inputs and outputs")
def functional_dicts():
    a, b = layers.Input((4,)), layers.Input((5,))
    h = layers.Dense(6, "relu")(layers.Concatenate()([a, b]))
    outputs = {"d": layers.Dense(3)(h), "c": layers.Dense(2)(h)}
    net = keras.Model({"b": a, "a": b}, outputs)
    return net, {"b": numbers(4), "a": numbers(5)}


@register
class Subclassed(keras.Model):
    def __init__(self, units=6, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden, self.out = layers.Dense(units, "relu"), layers.Dense(3)

    def build(self, input_shape):
        self.hidden.build(input_shape)
        self.out.build((input_shape[0], self.units))
        self.gain = self.add_weight(shape=(3,), initializer="ones", name="gain")

    def call(self, x):
        return self.gain * self.out(self.hidden(x))

    def get_config(self):
        return {"name": self.name, "units": self.units}


@family("subclassed, with `build`")
def subclassed():
    net = Subclassed(5)
    net.build((None, 4))
    return net, numbers(4)


@register
class BuiltByCall(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [layers.Dense(6, "relu"), layers.Dropout(0.2), layers.Dense(3)]

    def call(self, x, training=None):
        for part in self.parts:
            x = part(x, training=training) if part is self.parts[1] else part(x)
        return x


@family("subclassed, built by a call")
def built_by_call():
    net = BuiltByCall()
    net(numbers(4))
    return net, numbers(4)


@family("nested models")
def nested():
    x = layers.Input((4,))
    inner = keras.Model(x, layers.Dense(5, "relu", name="fc")(x), name="inner")
    return stack((4,), inner, stack((5,), layers.Dense(3, name="fc"))), numbers(4)


@family("shared layers")
def shared():
    a, b = layers.Input((4,), name="a"), layers.Input((2, 4), name="b")
    dense = layers.Dense(5, "tanh")
    h = dense(a) + layers.GlobalAveragePooling1D()(dense(b))
    return keras.Model([a, b], layers.Dense(3)(h)), [numbers(4), numbers(2, 4)]


@family("residual connections")
def residual():
    x = layers.Input((4,))
    h = layers.Add()([x, layers.Dense(4, "relu")(x)])
    h = h + layers.Dense(4)(keras.ops.tanh(h))
    return keras.Model(x, layers.Dense(3)(h)), numbers(4)


@family("Dense, EinsumDense")
def dense():
    einsum = layers.EinsumDense("abc,cde->abde", (3, 2, 5), bias_axes="de")
    parts = layers.Dense(6, "relu"), einsum, layers.Flatten(), layers.Dense(3)
    return stack((3, 4), *parts), numbers(3, 4)


@family("transformer block: Embedding, MultiHeadAttention, LayerNormalization")
def transformer():
    x = layers.Input((5,), dtype="int32")
    h = layers.Embedding(10, 8)(x)
    normal = layers.LayerNormalization()(h)
    attend = layers.MultiHeadAttention(2, 4, dropout=0.1)
    h = h + attend(normal, normal, use_causal_mask=True)
    h = h + layers.Dense(8)(layers.Dense(12, "relu")(layers.LayerNormalization()(h)))
    return keras.Model(x, layers.Dense(10)(h)), tokens()


@family("Conv1D")
def conv1d():
    parts = layers.Conv1D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)
    return stack((8, 2), *parts), numbers(8, 2)


@family("Conv2D, pooling")
def conv2d():
    parts = layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D()
    return stack((8, 8, 2), *parts, layers.Flatten(), layers.Dense(3)), numbers(8, 8, 2)


@family("Conv3D")
def conv3d():
    parts = layers.Conv3D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)
    return stack((4, 4, 4, 1), *parts), numbers(4, 4, 4, 1)


@family("Conv1DTranspose, Conv2DTranspose")
def transposed():
    parts = layers.Conv1DTranspose(4, 3, 2, "same"), layers.Reshape((4, 2, 4))
    return stack((4, 2), *parts, layers.Conv2DTranspose(3, 3)), numbers(4, 2)


@family("Conv3DTranspose")
def transposed3d():
    return stack((2, 2, 2, 2), layers.Conv3DTranspose(3, 3)), numbers(2, 2, 2, 2)


@family("depthwise and separable convolutions")
def depthwise():
    parts = [
        layers.DepthwiseConv2D(3, depth_multiplier=2),
        layers.SeparableConv2D(4, 3, padding="same"),
        layers.Reshape((36, 4)),
        layers.DepthwiseConv1D(3),
        layers.SeparableConv1D(2, 3),
    ]
    return stack((8, 8, 2), *parts), numbers(8, 8, 2)


@family("LSTM")
def lstm():
    parts = layers.LSTM(4, return_sequences=True), layers.LSTM(3), layers.Dense(3)
    return stack((5, 2), *parts), numbers(5, 2)


@family("LSTM after Embedding, masked")
def masked():
    parts = (
        layers.LSTM(4, return_sequences=True),
        layers.TimeDistributed(layers.Dense(3)),
    )
    embedding = layers.Embedding(10, 4, mask_zero=True)
    net = stack((5,), embedding, *parts, dtype="int32")
    return net, tokens() * (np.arange(5) < 3).astype("int32")


@family("GRU")
def gru():
    return stack((5, 2), layers.GRU(4), layers.Dense(3)), numbers(5, 2)


@family("Bidirectional")
def bidirectional():
    return stack((5, 2), layers.Bidirectional(layers.LSTM(3)), layers.Dense(3)), (
        numbers(5, 2)
    )


@family("BatchNormalization")
def batch_normalization():
    parts = layers.Conv2D(3, 3, use_bias=False), layers.BatchNormalization()
    return stack((6, 6, 1), *parts, layers.Flatten(), layers.Dense(3)), numbers(6, 6, 1)


@family("PReLU")
def prelu():
    return stack((4,), layers.Dense(6), layers.PReLU(), layers.Dense(3)), numbers(4)


@family("Dropout, GaussianNoise")
def dropout():
    parts = layers.Dense(6, "relu"), layers.Dropout(0.5), layers.GaussianNoise(0.1)
    return stack((4,), *parts, layers.Dense(3)), numbers(4)


@family("Rescaling, Resizing")
def preprocessing():
    parts = layers.Rescaling(0.5, 0.1), layers.Resizing(6, 6), layers.Flatten()
    return stack((8, 8, 1), *parts, layers.Dense(3)), numbers(8, 8, 1)


@family("RandomFlip")
def random_flip():
    parts = layers.RandomFlip(), layers.Flatten(), layers.Dense(3)
    return stack((4, 4, 1), *parts), numbers(4, 4, 1)


@family("Normalization, adapted")
def normalization():
    x = 5 + 3 * numbers(4)
    normalize = layers.Normalization()
    normalize.adapt(x)
    return stack((4,), normalize, layers.Dense(3)), x


@family("Discretization, adapted")
def discretization():
    discretize = layers.Discretization(num_bins=4, output_mode="one_hot")
    discretize.adapt(numbers(4))
    parts = discretize, layers.Flatten(), layers.Dense(3)
    return stack((4,), *parts), numbers(4)


@family("IntegerLookup, vocabulary given")
def lookup():
    table = layers.IntegerLookup(vocabulary=list(range(2, 9)), output_mode="multi_hot")
    return stack((5,), table, layers.Dense(3), dtype="int64"), tokens().astype("int64")


@family("IntegerLookup, adapted")
def lookup_adapted():
    table = layers.IntegerLookup(max_tokens=8, output_mode="multi_hot")
    table.adapt(tokens())
    return stack((5,), table, layers.Dense(3), dtype="int64"), tokens().astype("int64")


@family("TextVectorization, adapted")
def text():
    vectorize = layers.TextVectorization(max_tokens=6, output_sequence_length=3)
    vectorize.adapt(["a b c", "c d"])
    parts = vectorize, layers.Embedding(6, 4), layers.Flatten(), layers.Dense(3)
    return stack((), *parts, dtype="string"), tf.constant(["a d"] * COUNT)


@register
class Custom(layers.Layer):
    """Weights of its own, one of them a scalar, and one that does not train."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.matrix = self.add_weight(shape=(input_shape[-1], self.units))
        self.gain = self.add_weight(shape=(), initializer="ones")
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False)

    def call(self, x, training=None):
        if training:
            self.calls.assign_add(1)
        return self.gain * keras.ops.matmul(x, self.matrix)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@family("custom layer, registered")
def custom():
    return stack((4,), Custom(6), layers.Dense(3)), numbers(4)


@register
def doubled(x):
    return 2 * x


@family("Lambda of a registered function")
def registered_lambda():
    return stack((4,), layers.Lambda(doubled), layers.Dense(3)), numbers(4)


@family("tied weights: ReversibleEmbedding")
def reversible():
    x = layers.Input((5,), dtype="int32")
    embedding = layers.ReversibleEmbedding(10, 4)
    h = layers.LayerNormalization()(embedding(x))
    return keras.Model(x, embedding(h, reverse=True)), tokens()


@register
class TiedModel(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding, self.dense = layers.Embedding(10, 4), layers.Dense(4, "tanh")

    def call(self, x):
        h = self.dense(self.embedding(x))
        return keras.ops.matmul(h, keras.ops.transpose(self.embedding.embeddings))


@family("tied weights: in a subclassed model")
def tied_model():
    net = TiedModel()
    net(tokens().astype("float32"))
    return net, tokens().astype("float32")


@register
class Transposed(layers.Layer):
    """Reads the table of a layer that is in its configuration."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))

    def get_config(self):
        embedding = keras.saving.serialize_keras_object(self.embedding)
        return {**super().get_config(), "embedding": embedding}

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**{**config, "embedding": embedding})


@family("tied weights: a layer in the configuration of another")
def tied_layer():
    x = layers.Input((5,), dtype="int32")
    embedding = layers.Embedding(10, 4)
    h = layers.Dense(4, "tanh")(embedding(x))
    return keras.Model(x, Transposed(embedding)(h)), tokens()


@family("frozen layers")
def frozen():
    base = stack((4,), layers.Dense(5, "relu"), layers.BatchNormalization())
    base.trainable = False
    return stack((4,), base, layers.Dense(6, trainable=False), layers.Dense(3)), (
        numbers(4)
    )


def mixed(policy):
    parts = layers.Conv2D(3, 3, dtype=policy), layers.BatchNormalization(dtype=policy)
    parts += layers.Flatten(), layers.Dense(3, dtype=policy)
    return stack((6, 6, 1), *parts), numbers(6, 6, 1)


@family("mixed_float16")
def mixed_float16():
    return mixed("mixed_float16")


@family("mixed_bfloat16")
def mixed_bfloat16():
    return mixed("mixed_bfloat16")


@family("mixed_float16 for all, integers as float32")
def mixed_global():
    keras.config.set_dtype_policy("mixed_float16")
    net = stack((5,), layers.Embedding(2100, 1), layers.Flatten(), layers.Dense(3))
    return net, 2048 + tokens().astype("float32")


@family("regularizers")
def regularizers():
    parts = [
        layers.Dense(6, kernel_regularizer="l2", activity_regularizer="l1"),
        layers.Dense(
            3, bias_regularizer="l1", kernel_regularizer="orthogonal_regularizer"
        ),
    ]
    return stack((4,), *parts), numbers(4)


@register
class Sparse(layers.Layer):
    def call(self, x):
        self.add_loss(1e-2 * keras.ops.sum(keras.ops.abs(x)))
        return x


@family("`add_loss`")
def added_loss():
    return stack((4,), layers.Dense(6), Sparse(), layers.Dense(3)), numbers(4)


@family("LoRA")
def lora():
    net = stack((4,), layers.Dense(6, "relu"), layers.Dense(3))
    net.layers[0].enable_lora(2)
    return net, numbers(4)


def quantized(mode):
    net = stack((4,), layers.Dense(6, "relu"), layers.Dense(3))
    net.quantize(mode)
    return net, numbers(4)


@family("quantized to int8: kernels stored as they are")
def int8():
    return quantized("int8")


@family("quantized to int4: kernels stored as they are")
def int4():
    return quantized("int4")


# Ways of training. Each is a function that builds, compiles and fits a model with the
# callbacks it is given, and returns the model and inputs.

WAYS = {}
X, Y = numbers(4), np.tanh(numbers(3))
LABELS = np.arange(COUNT) % 3


def way(name):
    def add(run):
        WAYS[name] = run
        return run

    return add


def wrapped(net, loss="mse", **kwargs):
    model = tfmiracle.VariationalModel(net, block_size=8, block_bits=6)
    model.compile("adam", loss, **kwargs)
    return model


def fitted(*data, callbacks, loss="mse", compiled=(), epochs=2, **kwargs):
    model = wrapped(sequential()[0], loss, **dict(compiled))
    model.fit(*data, epochs=epochs, verbose=0, callbacks=callbacks, **kwargs)
    return model, X


@way("compiled graph, the default")
def in_graph(callbacks, folder):
    tf.config.run_functions_eagerly(False)
    return fitted(X, Y, callbacks=callbacks)


@way("`jit_compile=True`")
def in_xla(callbacks, folder):
    tf.config.run_functions_eagerly(False)
    return fitted(X, Y, callbacks=callbacks, compiled={"jit_compile": True})


@way("`run_eagerly=True`")
def run_eagerly(callbacks, folder):
    return fitted(X, Y, callbacks=callbacks, compiled={"run_eagerly": True})


@way("`steps_per_execution`")
def steps_per_execution(callbacks, folder):
    compiled = {"steps_per_execution": 4}
    return fitted(X, Y, batch_size=1, callbacks=callbacks, compiled=compiled)


@way("`class_weight`")
def class_weight(callbacks, folder):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    return fitted(X, LABELS, class_weight=weights, callbacks=callbacks, loss=loss)


@way("`sample_weight`")
def sample_weight(callbacks, folder):
    weights = np.linspace(0, 1, COUNT)
    return fitted(X, Y, sample_weight=weights, callbacks=callbacks)


@way("custom loss and metrics")
def custom_loss(callbacks, folder):
    class Mean(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(keras.ops.mean(y_pred))

        def result(self):
            return keras.ops.convert_to_tensor(self.total)

    def loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)

    compiled = {"metrics": ["mae", Mean()], "weighted_metrics": ["mse"]}
    return fitted(X, Y, callbacks=callbacks, loss=loss, compiled=compiled)


@way("losses, weights and metrics by the names of outputs")
def by_name(callbacks, folder):
    net, x = functional()
    settings = {"metrics": {"d": ["mae"]}, "loss_weights": {"c": 1.0, "d": 2.0}}
    model = wrapped(net, {"c": "mse", "d": "mae"}, **settings)
    y = dict(zip("cd", targets(net, x)))
    model.fit(x, y, verbose=0, callbacks=callbacks)
    return model, x


@way("inputs by name")
def inputs_by_name(callbacks, folder):
    net, x = functional()
    model = wrapped(net)
    model.fit(dict(zip("ab", x)), targets(net, x), verbose=0, callbacks=callbacks)
    return model, x


@way("`tf.data.Dataset`")
def dataset(callbacks, folder):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(8).batch(4)
    return fitted(data, callbacks=callbacks)


@way("`keras.utils.PyDataset`")
def py_dataset(callbacks, folder):
    class Halves(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]

    return fitted(Halves(), callbacks=callbacks)


@way("Python generator")
def generator(callbacks, folder):
    def batches():
        while True:
            yield X, Y

    return fitted(batches(), steps_per_epoch=2, callbacks=callbacks)


@way("`validation_data`, `validation_split`")
def validation(callbacks, folder):
    fitted(X, Y, validation_split=0.5, callbacks=[])
    return fitted(X, Y, validation_data=(X, Y), callbacks=callbacks)


def stopping(callbacks, before):
    other = keras.callbacks.EarlyStopping(
        "loss", min_delta=1e3, patience=2, restore_best_weights=True
    )
    callbacks = [other, *callbacks] if before else [*callbacks, other]
    model = wrapped(sequential()[0])
    model.fit(X, Y, epochs=9, verbose=0, callbacks=callbacks)
    return model, X


@way("EarlyStopping(restore_best_weights=True) before ours")
def stopping_before(callbacks, folder):
    return stopping(callbacks, True)


@way("EarlyStopping(restore_best_weights=True) after ours")
def stopping_after(callbacks, folder):
    return stopping(callbacks, False)


@way("ModelCheckpoint, BackupAndRestore, CSVLogger, ReduceLROnPlateau")
def checkpoints(callbacks, folder):
    others = [
        keras.callbacks.ModelCheckpoint(folder / "best.keras", "loss"),
        keras.callbacks.ModelCheckpoint(
            folder / "x.weights.h5", save_weights_only=True
        ),
        keras.callbacks.BackupAndRestore(folder / "backup"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ReduceLROnPlateau("loss"),
    ]
    model, x = fitted(X, Y, epochs=9, callbacks=[*others, *callbacks])
    again = keras.saving.load_model(folder / "best.keras")
    assert_close(
        again(x, training=False),
        model(x, training=False),
        "the checkpoint computes something else",
    )
    return model, x


@way("TensorBoard")
def tensorboard(callbacks, folder):
    other = keras.callbacks.TensorBoard(folder / "logs", histogram_freq=1)
    return fitted(X, Y, callbacks=[other, *callbacks])


@way("averages of weights: `use_ema=True`, SwapEMAWeights")
def averages(callbacks, folder):
    model = wrapped(sequential()[0])
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    other = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[other, *callbacks])
    return model, X


# What cannot work. Each is a function that returns a network and its inputs.

REFUSALS = {}


def refusal(name):
    def add(make):
        REFUSALS[name] = make
        return make

    return add


@refusal("a model that is not built")
def unbuilt():
    return keras.Sequential([layers.Dense(3)]), numbers(4)


@refusal("nothing trains")
def all_frozen():
    net, x = sequential()
    net.trainable = False
    return net, x


@refusal("weights that are not finite")
def not_finite():
    net, x = sequential()
    net.layers[0].bias.assign(np.full(6, np.nan))
    return net, x


@refusal("`keras.RematScope`")
def rematerialized():
    with keras.RematScope(mode="full"):
        return sequential()


@refusal("Lambda of a Python function")
def python_lambda():
    return stack((4,), layers.Lambda(lambda x: 2 * x), layers.Dense(3)), numbers(4)


@refusal("layer without `get_config`")
def no_config():
    class NoConfig(layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    return stack((4,), NoConfig(doubled), layers.Dense(3)), numbers(4)


@refusal("layer that is not registered")
def unregistered():
    class Unregistered(layers.Dense):
        pass

    return stack((4,), Unregistered(3)), numbers(4)


@register
class Infinite(layers.Layer):
    def __init__(self, limit=np.inf, **kwargs):
        super().__init__(**kwargs)
        self.limit = limit

    def call(self, x):
        return keras.ops.minimum(x, self.limit)

    def get_config(self):
        return {**super().get_config(), "limit": self.limit}


@refusal("configuration that is not JSON: infinity")
def not_json():
    return stack((4,), Infinite(), layers.Dense(3)), numbers(4)


@register
class Changed(layers.Layer):
    size = 1

    def build(self, input_shape):
        self.gain = self.add_weight(shape=(self.size,))

    def call(self, x):
        return self.gain * x


@refusal("weights that do not follow from the configuration")
def changed():
    layer = Changed()
    layer.size = 4
    return stack((4,), layer, layers.Dense(3)), numbers(4)


@register
class Complex(layers.Layer):
    def build(self, input_shape):
        self.phase = self.add_weight(shape=(), dtype="complex64", trainable=False)

    def call(self, x):
        return x


@refusal("complex weights")
def complex_weights():
    return stack((4,), Complex(), layers.Dense(3)), numbers(4)


@register
class Hidden(layers.Layer):
    """Has a weight of which Keras does not know."""

    def build(self, input_shape):
        self.scale = tf.Variable(
            np.random.normal(size=input_shape[-1:]), dtype="float32"
        )

    def call(self, x):
        return self.scale * x


@refusal("`tf.Variable` as a weight")
def hidden():
    return stack((4,), Hidden(), layers.Dense(3)), numbers(4)


@refusal("quantized to float8")
def float8():
    return quantized("float8")


@refusal("SpectralNormalization, which assigns to weights")
def spectral():
    return stack((4,), layers.SpectralNormalization(layers.Dense(3))), numbers(4)


@register
class OwnStep(Subclassed):
    def train_step(self, data):
        raise AssertionError


@refusal("a `train_step` of its own")
def own_step():
    net = OwnStep()
    net.build((None, 4))
    return net, numbers(4)


@register
class OwnLoss(Subclassed):
    def compute_loss(self, *args, **kwargs):
        raise AssertionError


@refusal("a `compute_loss` of its own")
def own_loss():
    net = OwnLoss()
    net.build((None, 4))
    return net, numbers(4)


# Finding out.

ABILITIES = ["trains", "codes", "decodes", "saves", ".keras"]
EXPORTS = ["SavedModel", "LiteRT", "ONNX"]
STEPS = ["trains", "codes", "decodes"]


class WrongError(Exception):
    """No error was raised, but something is not as it should be."""


def require(condition, what):
    if not condition:
        raise WrongError(what)


def assert_close(ones, others, what, rtol=1e-4, atol=1e-5):
    ones, others = tf.nest.flatten(ones), tf.nest.flatten(others)
    require(len(ones) == len(others), what)
    for a, b in zip(ones, others):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        require(a.shape == b.shape and np.allclose(a, b, rtol, atol), what)


def reason(error):
    """The first sentence of an error, without what changes from time to time."""
    text = re.sub(
        r"\x1b\[[0-9]*m|\{\{.*?\}\}|<unknown>:0: error: |loc\(.*\)\):", "", str(error)
    )
    text = re.sub(r"^Exception encountered when calling .*", "", text.strip())
    text = " ".join(text.split())
    text = re.sub(r"(?<!\w)/[\w./-]+/", "…/", text)
    text = re.sub(r"([a-z])_\d+\b", r"\1", text)
    text = re.sub(r"0x[0-9a-f]+|(?<=at )\d{9,}", "…", text).replace("|", "/")
    text = re.split(r"(?<=[a-z)`']{3}\.) ", text)[0]
    text = text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " …"
    return (
        text if isinstance(error, WrongError) else f"`{type(error).__name__}`: {text}"
    )


def attempt(cells, column, function, *args):
    """Writes into `cells` whether a function works; returns what it returns."""
    try:
        result = function(*args)
    except Exception as error:
        cells[column] = f"no: {reason(error)}"
        return None
    cells[column] = "yes"
    return result


def arrays(variables):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in variables]


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def train(net, x):
    y = targets(net, x)
    model = wrapped(net)
    posterior = model.block_posterior
    before, means = arrays(net.weights), arrays([posterior.tau])
    history = model.fit(x, y, epochs=2, verbose=0).history
    require(np.all(np.isfinite(history["loss"])), "the loss is not finite")
    moved = posterior.layout.expand(posterior.tau.numpy() - means[0])
    still = [v.path for v, d in zip(model.coded_variables, moved) if not np.any(d)]
    require(not still, f"no gradient reaches {', '.join(still)}")
    asleep = {
        id(v) for layer in walk(net) if not layer.trainable for v in layer.weights
    }
    for v, value in zip(net.weights, before):
        kept = id(v) not in asleep or same_bits(value, arrays([v])[0])
        require(kept, f"{v.path} is frozen, but changes")
    return model, y


def encode(model, x, y, path):
    # All at the end: a `fit` that is stopped leaves iterators that take long to free.
    callback = tfmiracle.CompressionCallback(
        path, blocks_per_round=10**6, train_steps=10**6, verbose=0
    )
    model.fit(x, y, verbose=0, callbacks=[callback])
    require(callback.file_bytes == os.path.getsize(path), "no file was written")


def anatomy(model):
    """What `summary` shows, without names."""
    return [
        (type(part), part.dtype_policy.name, part.count_params())
        + (() if children(part) else (part.trainable,))
        for part in walk(model)
        if part is not model and not isinstance(part, layers.InputLayer)
    ]


def decoded(model, x, y, path):
    net = model.net
    values = {id(v): v for v in plain_weights(net)}
    values.update(zip(map(id, model.coded_variables), model.block_posterior.values()))
    expected, found = arrays(values.values()), decode(path).weights.values()
    counted = MiracleFile.read(path).num_weights == sum(v.size for v in expected)
    require(counted, "the file counts other weights")
    loaded = tfmiracle.load(path)
    for a, b, v in zip(expected, found, loaded.weights, strict=True):
        same = same_bits(a.astype(b.dtype), b)
        require(same, f"{v.path} has other bits in the file")
        require(same_bits(b.astype(v._dtype), arrays([v])[0]), f"{v.path} is not set")
    require(anatomy(loaded) == anatomy(net), "the decoded network has other layers")
    loaded.compile(loss="mse")
    outputs = [m(x, training=False) for m in (model, loaded)]
    assert_close(*outputs, "the decoded network computes something else")
    if y is not None:
        losses = [
            m.compute_loss(x, y, y_pred, training=False)
            for m, y_pred in zip((model, loaded), outputs)
        ]
        assert_close(*losses, "the decoded network has another loss")
    return loaded


def saved(model, x, folder):
    model.save(folder / "model.keras")
    again = keras.saving.load_model(folder / "model.keras")
    assert_close(
        again(x, training=False),
        model(x, training=False),
        "loaded, it computes something else",
    )


def examine(make, folder):
    """Abilities of a family of models."""
    cells = dict.fromkeys(ABILITIES, "-")
    net, x = make()
    trained = attempt(cells, "trains", train, net, x)
    if trained is None:
        return cells
    model, y = trained
    attempt(cells, "saves", saved, model, x, folder)
    path = folder / "net.miracle"
    attempt(cells, "codes", encode, model, x, y, path)
    if cells["codes"] == "yes":
        loaded = attempt(cells, "decodes", decoded, model, x, y, path)
        if loaded is not None:
            attempt(cells, ".keras", saved, loaded, x, folder)
    return cells


def examine_way(run, folder):
    if run is tensorboard and not TENSORBOARD:
        return dict.fromkeys(STEPS, "not run")
    cells = dict.fromkeys(STEPS, "-")
    path = folder / "net.miracle"
    callback = tfmiracle.CompressionCallback(path, 1, 1, verbose=0)
    result = attempt(cells, "codes", run, [callback], folder)
    if result is None:
        attempt(cells, "trains", run, [], folder)
    else:
        cells["trains"] = "yes"
        attempt(cells, "decodes", decoded, *result, None, path)
    return cells


def examine_refusal(make, folder):
    """When it is refused, and with which words."""
    net, x = make()
    try:
        model = wrapped(net)
    except Exception as error:
        return {"refused": "when wrapped", "message": reason(error)}
    path, y = folder / "net.miracle", np.zeros((COUNT, 3))
    callback = tfmiracle.CompressionCallback(path, train_steps=1, verbose=0)
    try:
        model.fit(x, y, epochs=2, verbose=0, callbacks=[callback])
    except Exception as error:
        started = int(model.optimizer.iterations) > 0
        when = "after training" if started else "when `fit` starts"
        return {"refused": when, "message": reason(error)}
    try:
        assert_close(
            tfmiracle.load(path)(x, training=False),
            model(x, training=False),
            "decoded, it is another network",
        )
    except Exception as error:
        return {"refused": "no", "message": reason(error)}
    return {"refused": "no", "message": "something of it is ignored"}


def saved_model(net, x, folder):
    net.export(folder / "saved_model", verbose=False)
    model = tf.saved_model.load(folder / "saved_model")  # its functions do not hold it
    return model.serve(x)


def by_shape(arrays_, shapes):
    """Which array belongs to which name."""
    require(len(arrays_) == len(shapes), "it has other inputs")
    return {
        name: next(a for a in arrays_ if fits(a, shape))
        for name, shape in shapes.items()
    }


def fits(array, shape):
    return len(array.shape) == len(shape) and tuple(array.shape[1:]) == tuple(shape[1:])


def litert(net, x, folder):
    net.export(folder / "net.tflite", format="litert", verbose=False)
    run = tf.lite.Interpreter(str(folder / "net.tflite")).get_signature_runner()
    shapes = {k: d["shape_signature"] for k, d in run.get_input_details().items()}
    try:
        return run(**by_shape(tf.nest.flatten(x), shapes))
    except RuntimeError as error:
        missing = "needs select TensorFlow operations, which this interpreter lacks"
        require("Select TensorFlow op" not in str(error), f"it converts, but {missing}")
        raise


def onnx(net, x, folder):
    import onnxruntime

    net.export(folder / "net.onnx", format="onnx", verbose=False)
    try:
        run = onnxruntime.InferenceSession(folder / "net.onnx")
    except Exception as error:
        missing = re.search(r"No Op registered for (\w+)", str(error))
        require(not missing, missing and f"ONNX Runtime has no operation {missing[1]}")
        raise
    shapes = {i.name: i.shape for i in run.get_inputs()}
    return run.run(None, by_shape([np.asarray(a) for a in tf.nest.flatten(x)], shapes))


def examine_exports(make, folder):
    cells = dict.fromkeys(EXPORTS, "-")
    if not ONNX:
        cells["ONNX"] = "not run"
    net, x = make()
    model = fix_all(wrapped(net))
    try:
        loaded = to_network(decode(to_file(model).to_bytes()))
        expected = loaded(x, training=False)
    except Exception:
        return cells
    tf.config.run_functions_eagerly(False)

    def compare(export):
        outputs = tf.nest.flatten(export(loaded, x, folder))
        pairs = []
        for y in tf.nest.flatten(expected):
            same = [o for o in outputs if fits(y, o.shape)]
            require(len(same) == 1, "it has other outputs")
            pairs.append((y, same[0]))
        half = "float16" in str(anatomy(loaded))
        tolerance = {"rtol": 0.05, "atol": 0.05} if half else {}
        assert_close(*zip(*pairs), "it computes something else", **tolerance)

    for column, export in zip(EXPORTS, (saved_model, litert, onnx)):
        if export is not onnx or ONNX:
            attempt(cells, column, compare, export)
    return cells


# The document.

INTRODUCTION = """# What works on which models

Made and checked by `tests/test_coverage.py`, which does all of this with small models.
Versions: {versions}.

## Models

- **trains**: wrapped in `VariationalModel`, `compile` and `fit` work as usual; a
  gradient reaches every coded variable, and what is frozen stays as it is.
- **codes**: `fit` with a `CompressionCallback` writes the file.
- **decodes**: `load` gives the same layers; every weight, coded or stored, has the bits
  that `decode` gives and the coded model had; outputs and loss are the same.
- **saves**: the `VariationalModel` itself, as `.keras`.
- **.keras**, **SavedModel**, **LiteRT**, **ONNX**: the decoded network is written so,
  read and run, and computes the same.

"""
WAYS_TITLE = "\n## Ways of training\n\n"
REFUSALS_TITLE = "\n## What cannot work\n\nIt should be refused before it trains.\n\n"


def versions():
    names = {"Keras": keras.__version__, "TensorFlow": tf.__version__}
    if ONNX:
        import onnx
        import tf2onnx

        names |= {"ONNX": onnx.__version__, "tf2onnx": tf2onnx.__version__}
    short = {name: ".".join(v.split(".")[:2]) for name, v in names.items()}
    return ", ".join(f"{name} {v}" for name, v in short.items())


def table(title, rows, columns, notes):
    lines = [[title, *columns], ["---"] * (1 + len(columns))]
    for name, cells in rows.items():
        line = [name]
        for column in columns:
            cell = cells[column]
            if cell.startswith("no: "):
                note = cell.removeprefix("no: ")
                if note not in notes:
                    notes.append(note)
                cell = f"no ({1 + notes.index(note)})"
            line.append(cell)
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(found):
    notes = []
    text = INTRODUCTION.format(versions=versions())
    text += table("model", found["models"], ABILITIES + EXPORTS, notes)
    text += WAYS_TITLE + table("`fit`", found["ways"], STEPS, notes)
    columns = ["refused", "message"]
    text += REFUSALS_TITLE + table("what", found["refusals"], columns, notes)
    if notes:
        text += "\n## Notes\n\n"
    return text + "".join(f"{i}. {note}\n" for i, note in enumerate(notes, 1))


def parse(text):
    """What `render` was given, and the versions."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.M))
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = [line[2:-2].split(" | ") for line in block.splitlines()]
        tables.append(
            {
                name: dict(zip(head[1:], [resolve(c, notes) for c in cells]))
                for name, *cells in rows
            }
        )
    found = dict(zip(("models", "ways", "refusals"), tables))
    return found, re.search(r"^Versions: (.*)\.$", text, re.M)[1]


def resolve(cell, notes):
    note = re.fullmatch(r"no \((\d+)\)", cell)
    return f"no: {notes[note[1]]}" if note else cell


@pytest.fixture(scope="module")
def found():
    """Collects results, and writes the document if asked."""
    results = {
        "models": {name: {} for name in FAMILIES},
        "ways": {name: {} for name in WAYS},
        "refusals": {name: {} for name in REFUSALS},
    }
    yield results
    if os.environ.get(WRITE):
        DOCUMENT.write_text(render(results), encoding="utf-8")


@pytest.fixture(autouse=True)
def fresh():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    yield
    keras.config.set_dtype_policy("float32")


@functools.cache
def documented():
    return parse(DOCUMENT.read_text(encoding="utf-8"))


def check(found, kind, name, cells):
    found[kind][name].update(cells)
    if os.environ.get(WRITE):
        return
    rows, made_with = documented()
    expected = {column: rows[kind].get(name, {}).get(column) for column in cells}
    for column, cell in cells.items():
        # What is not there says nothing about a document made where it is.
        if cell == "not run" or expected[column] == "not run":
            expected[column] = cell
    if made_with.split(", ")[:2] != versions().split(", ")[:2]:
        # Others word their errors in other ways, and export other things.
        cells, expected = (
            {
                k: str(v).partition(":")[0]
                for k, v in row.items()
                if k not in (*EXPORTS, "message")
            }
            for row in (cells, expected)
        )
    assert cells == expected, "`python tests/test_coverage.py --write` writes it anew"


@pytest.mark.parametrize("name", FAMILIES)
def test_models(name, quick, found, tmp_path):
    check(found, "models", name, examine(FAMILIES[name], tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_exports(name, quick, found, tmp_path):
    check(found, "models", name, examine_exports(FAMILIES[name], tmp_path))


@pytest.mark.parametrize("name", WAYS)
def test_ways_of_training(name, quick, found, tmp_path):
    check(found, "ways", name, examine_way(WAYS[name], tmp_path))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, quick, found, tmp_path):
    check(found, "refusals", name, examine_refusal(REFUSALS[name], tmp_path))


def test_the_document_has_these_rows_and_no_others():
    if os.environ.get(WRITE):
        pytest.skip("it is being written")
    rows = documented()[0]
    for kind, names in zip(rows, (FAMILIES, WAYS, REFUSALS)):
        assert list(rows[kind]) == list(names)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"Usage: {sys.argv[0]} --write")
    os.environ[WRITE] = "1"
    sys.exit(pytest.main([__file__, "-q", "-m", ""]))
