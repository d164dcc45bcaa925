"""Networks that are others when they are rebuilt, and those that only look like it."""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support import fix_all

import tfmiracle
from tfmiracle.hosts.comparison import first_difference
from tfmiracle.hosts.network import check_network
from tfmiracle.keras_internals import walk

registered = keras.saving.register_keras_serializable("test_comparison")


def batch(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sequential(*parts, shape=(4,)):
    return keras.Sequential([layers.Input(shape), *parts, layers.Dense(3)], name="net")


class Same(layers.Layer):
    def call(self, x):
        return x

    def compute_output_shape(self, shape):
        return shape


@registered
class RandomInBuild(layers.Layer):
    def build(self, shape):
        self.factor = tf.random.normal((shape[-1],))

    def call(self, x):
        return x * self.factor


@registered
class RandomInInit(Same):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.factor = np.random.normal()

    def call(self, x):
        return x * self.factor


@registered
class Counted(Same):
    count = itertools.count()

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.number = next(self.count)

    def call(self, x):
        return x + self.number


@registered
class Scaled(Same):
    factor = 1.0

    def call(self, x):
        return x * self.factor


@registered
class Shifted(Same):
    """Drops its argument."""

    def __init__(self, shift=0.0, **kwargs):
        super().__init__(**kwargs)
        self.shift = shift

    def get_config(self):
        return layers.Layer.get_config(self)

    def call(self, x):
        return x + self.shift


@registered
class Twice(layers.Layer):
    """Its inner layer has a name that Keras gives."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Scaled()

    def call(self, x):
        return self.inner(self.inner(x))


@registered
class Masking(Same):
    value = 0.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_mask(self, x, mask=None):
        return x[..., 0] > self.value


@registered
class Forgetful(layers.LSTM):
    factor = 1.0

    def call(self, *args, **kwargs):
        return super().call(*args, **kwargs) * self.factor


@registered
class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [layers.Dense(4), Scaled(name="inside"), layers.Dense(3)]
        self.offset = 0.0

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
            shape = part.compute_output_shape(shape)
        self.built = True

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x + self.offset


def changed(layer, **attributes):
    layer.build((None, 4))
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def masking_net():
    masking = Masking()
    masking.value = 1.0
    return sequential(masking, layers.LSTM(3), shape=(5, 2))


def shared_net():
    x = inputs = layers.Input((4,))
    shared = Scaled(name="found")
    for _ in range(2):
        x = layers.Dense(4)(shared(x))
    shared.factor = 2.0
    return keras.Model(inputs, {"a": x, "b": [shared(x), x]}, name="net")


def custom_net(**attributes):
    net = Net(name="net")
    net.build((None, 4))
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def inner_scaled(outer):
    outer.inner.factor = 1.001
    return outer


def bidirectional():
    layer = layers.Bidirectional(Forgetful(3))
    net = sequential(layer, shape=(5, 2))
    layer.backward_layer.factor = 2.0
    return net


def time_distributed():
    inner = Scaled(name="found")
    net = sequential(layers.TimeDistributed(inner), layers.LSTM(2), shape=(5, 2))
    inner.factor = 2.0
    return net


def patched():
    layer = layers.Dense(4, name="found")
    net = sequential(layer)
    layer.call = lambda *args, call=layer.call, **kwargs: 3 * call(*args, **kwargs)
    return net


def deep():
    scaled = Scaled(name="found")
    inner = keras.Sequential([layers.Input((4,)), layers.Dense(4), scaled])
    net = sequential(keras.Sequential([inner, layers.Dense(4)]), layers.ReLU())
    scaled.factor = 2.0
    return net


def without_inner_scaling():
    net = custom_net()
    net.parts[1].factor = 2.0
    return net


OTHERS = {
    "made in build": ("random_in_build", lambda: sequential(RandomInBuild())),
    "made in init": ("random_in_init", lambda: sequential(RandomInInit())),
    "counter": ("counted", lambda: sequential(Counted())),
    "attribute": ("scaled", lambda: sequential(changed(Scaled(), factor=1.001))),
    "argument": ("shifted", lambda: sequential(Shifted(1.0))),
    "inner layer": ("scaled", lambda: sequential(inner_scaled(Twice()))),
    "mask": ("lstm_cell", masking_net),
    "shared": ("found", shared_net),
    "subclass": ("net", lambda: custom_net(offset=1.0)),
    "inside subclass": ("inside", without_inner_scaling),
    "Bidirectional": ("backward_forgetful", bidirectional),
    "TimeDistributed": ("found", time_distributed),
    "patched": ("found", patched),
    "deep": ("found", deep),
    "second layer": (
        "scaled_1",
        lambda: sequential(
            Scaled(name="scaled"), changed(Scaled(name="scaled_1"), factor=3)
        ),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_other_networks_are_refused(case, wrapped, request):
    keras.utils.clear_session()
    if wrapped:
        request.getfixturevalue("eager")
    name, make = OTHERS[case]
    net = make()
    model = tfmiracle.VariationalModel(net, block_size=10) if wrapped else net
    x = batch(6, 4) if isinstance(net, Net) else batch(6, *net.input_shape[1:])
    state = [v.numpy() for v in model.variables]
    for inputs in (x, None):  # made up
        with pytest.raises(ValueError, match=rf"Layer '{name}' .*another network"):
            check_network(model, inputs)
    for v, old in zip(model.variables, state, strict=True):
        np.testing.assert_array_equal(v, old)
    assert [v.name for v in walk(net) if "call" in vars(v)] == ["found"] * (
        case == "patched"
    )


# What is random in inference, or unusual, is no other network.


@registered
class Sampling(Same):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seeds)


@registered
class Noise(Same):
    """Of a kind: Keras' without a seed, TensorFlow's, Python's."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}

    def call(self, x):
        if self.kind == "keras":
            return x + keras.random.normal(ops.shape(x))
        if self.kind == "tensorflow":
            return x + tf.random.normal(tf.shape(x))
        return x + random.random()


@registered
class MonteCarlo(layers.Dropout):
    def call(self, x, training=None):
        return super().call(x, training=True)


@registered
class Compiled(layers.Dense):
    @tf.function
    def call(self, x):
        return super().call(x)


@registered
class Calls(Same):
    """A state that every call changes."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * self.calls


@registered
class Structures(Same):
    def call(self, x):
        return {"x": x, "more": (x, [x + 1])}

    def compute_output_spec(self, x):
        return {"x": x, "more": (x, [x])}


def structures():
    x = layers.Input((4,))
    made = Structures()(x)
    return keras.Model({"in": x}, {"out": layers.Dense(3)(made["more"][1][0])})


def strings():
    x = layers.Input((), dtype="string")
    y = layers.StringLookup(vocabulary=["a", "b"])(x)
    return keras.Model(x, layers.Dense(2)(layers.Embedding(4, 3)(y)))


def tokens():
    x = layers.Input((None,), dtype="int32")
    y = layers.Embedding(9, 4, mask_zero=True)(x)
    y = layers.MultiHeadAttention(2, 2)(y, y)
    y = layers.Bidirectional(layers.LSTM(3))(y)
    return keras.Model(x, layers.Dense(2)(y))


def adapted():
    layer = layers.Normalization()
    layer.adapt(batch(9, 4))
    return sequential(layer)


def stateful():
    return keras.Sequential(
        [
            layers.Input(batch_shape=(8, 5, 2)),
            layers.LSTM(3, stateful=True),
            layers.Dense(3),
        ]
    )


def policy(name):
    options = {"dtype": name}
    parts = layers.Dense(5, "gelu", **options), layers.LayerNormalization(**options)
    return sequential(*parts)


def images():
    return sequential(
        layers.Conv2D(3, 3, padding="same"),
        layers.BatchNormalization(),
        layers.LeakyReLU(0.3),
        layers.SpatialDropout2D(0.5),
        layers.GlobalAveragePooling2D(),
        shape=(None, None, 3),
    )


GOOD = {
    "sampling": (lambda: sequential(Sampling()), (4,)),
    "monte carlo": (lambda: sequential(MonteCarlo(0.5), MonteCarlo(0.5, seed=1)), (4,)),
    "keras": (lambda: sequential(Noise("keras")), (4,)),
    "tensorflow": (lambda: sequential(Noise("tensorflow")), (4,)),
    "python": (lambda: sequential(Noise("python")), (4,)),
    "compiled": (lambda: sequential(Compiled(5)), (4,)),
    "states": (lambda: sequential(Calls(), Calls()), (4,)),
    "structures": (structures, None),
    "strings": (strings, None),
    "tokens": (tokens, None),
    "adapted": (adapted, (4,)),
    "stateful": (stateful, None),
    "half": (lambda: policy("mixed_float16"), (4,)),
    "bfloat16": (lambda: policy("mixed_bfloat16"), (4,)),
    "float64": (lambda: policy("float64"), (4,)),
    "images": (images, (20, 20, 3)),
    "subclass": (custom_net, (4,)),
}


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("wrapped", [False, True])
def test_networks_that_are_the_same_are_not_refused(case, wrapped, request):
    if wrapped:
        request.getfixturevalue("eager")
    make, shape = GOOD[case]
    net = make()
    model = tfmiracle.VariationalModel(net, block_size=10) if wrapped else net
    state = [v.numpy() for v in model.variables]
    check_network(model)
    if shape is not None:
        check_network(model, batch(100, *shape))
    for v, old in zip(model.variables, state, strict=True):
        np.testing.assert_array_equal(v, old)


@pytest.mark.parametrize("kind", ["keras", "tensorflow", "python"])
def test_layers_behind_noise_are_compared(kind):
    scaled = Scaled(name="found")
    net = sequential(Noise(kind), layers.Dense(4), scaled)
    check_network(net)
    scaled.factor = 1.001
    with pytest.raises(ValueError, match="Layer 'found'"):
        check_network(net)


def test_means_and_decoded_values_are_compared(eager):
    net = keras.Sequential(
        [layers.Input((4,)), tfmiracle.MeanKLDense(5, block_size=10), Scaled()]
    )
    check_network(net)
    check_network(fix_all(net))
    inner = tfmiracle.VariationalModel(sequential(layers.Dense(4)), block_size=10)
    outer = keras.Sequential([layers.Input((4,)), inner, Scaled(name="found")])
    check_network(fix_all(outer))
    outer.layers[-1].factor = 2.0
    with pytest.raises(ValueError, match="Layer 'found'"):
        check_network(outer)


def test_other_weights_are_a_difference():
    """That weights count at all."""
    net = sequential(layers.Dense(5, name="one"))
    copy = keras.models.clone_model(net)
    assert first_difference(net, [copy], batch(5, 4)).name == "one"
    copy.set_weights(net.get_weights())
    assert first_difference(net, [copy, net], batch(5, 4)) is None
    copy.layers[0].kernel.assign(net.layers[0].kernel * (1 + 1e-5))
    assert first_difference(net, [net, copy], batch(5, 4)).name == "one"


def test_numbers_that_are_not_finite_are_compared():
    def net(value):
        return sequential(Shifted(value, name="found"))

    for value, other in itertools.product((np.nan, np.inf, -np.inf, 1.0), repeat=2):
        one, two = net(value), net(other)
        two.set_weights(one.get_weights())
        found = first_difference(one, [two], batch(5, 4))
        same = np.array_equal(value, other, equal_nan=True)
        assert found is None if same else found.name == "found"


def test_a_copy_that_cannot_run_is_another_network():
    given = changed(Scaled(name="found"), factor=None)
    Scaled.factor, given.factor = None, 1.0
    try:
        with pytest.raises(ValueError, match="Layer 'found'"):
            check_network(sequential(layers.Dense(4), given), batch(5, 4))
    finally:
        Scaled.factor = 1.0


def test_data_that_the_network_cannot_take_is_an_error():
    with pytest.raises(ValueError, match="incompatible"):
        check_network(sequential(layers.Dense(4)), batch(5, 7))


# Where it is compared.


def test_compress_refuses_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(keras.Model, "fit", None)
    net = sequential(RandomInBuild(name="found"))
    with pytest.raises(ValueError, match="Layer 'found'"):
        tfmiracle.compress(
            net,
            (batch(40, 4), batch(40, 3)),
            path=tmp_path / "file",
            loss="mse",
            verbose=0,
        )
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("data", [None, [batch(8, 4)], iter([batch(8, 4)])])
def test_what_changes_in_training_is_found_before_a_file_is_written(
    data, tmp_path, quick
):
    scaled = Scaled(name="found")
    model = tfmiracle.VariationalModel(sequential(scaled), block_size=8, block_bits=4)
    model.compile("sgd", "mse")
    coding = tfmiracle.CompressionCallback(
        tmp_path / "file", 1, 1, recalibration_data=data, verbose=0
    )
    change = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(scaled, "factor", 2.0)
    )
    with pytest.raises(ValueError, match="Layer 'found'"):
        model.fit(batch(8, 4), batch(8, 3), verbose=0, callbacks=[coding, change])
    assert not (tmp_path / "file").exists()
