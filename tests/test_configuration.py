"""How networks are described: posteriors in them, what is unknown, what is left out."""

import json
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from support import batch, fix_all

import tfmiracle
from tfmiracle import load
from tfmiracle.hosts.models import VariationalModel
from tfmiracle.hosts.network import (
    check_network,
    plain_architecture,
    round_stored,
    to_file,
)
from tfmiracle.keras_internals import walk

# Posteriors inside other models.


def posterior_of(*parts, **options):
    net = keras.Sequential([layers.Input((4,)), *parts])
    return VariationalModel(net, block_size=5, block_bits=6, **options)


def functional_inside():
    x = layers.Input((4,))
    y = layers.Dense(4, "relu")(x)
    inner = keras.Model([x, y], [layers.Add()([x, y]), layers.Dense(2)(y)])
    return VariationalModel(inner, block_size=5, block_bits=6)


def between():
    x = layers.Input((4,))
    return keras.Model(x, layers.Dense(2)(posterior_of(layers.Dense(3))(x)))


def at_the_end():
    x = layers.Input((4,))
    y = layers.Dense(4)(x)
    return keras.Model(x, {"a": functional_inside()([x, y])[1], "b": y})


def one_output():
    x = layers.Input((4,))
    inner = keras.Model(x2 := layers.Input((4,)), layers.Dense(3)(x2))
    return keras.Model(x, VariationalModel(inner, block_size=5, block_bits=6)(x))


def called_twice():
    x = layers.Input((4,))
    shared, other = functional_inside(), posterior_of(layers.Dense(4))
    y, _ = shared([x, x])
    _, z = shared([other(y), y])
    return keras.Model(x, [z, shared([z_ := layers.Dense(4)(z), z_])[1]])


def beside_layers_of_their_own():
    return keras.Sequential(
        [
            layers.Input((4,)),
            posterior_of(layers.Dense(4), layers.BatchNormalization()),
            tfmiracle.MeanKLDense(4, block_size=5, block_bits=6, seed=1),
            posterior_of(layers.Dense(2), parameterization="mean_var"),
        ]
    )


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Holding(keras.Model):
    def __init__(self, part=None, **kwargs):
        super().__init__(**kwargs)
        self.part, self.last = part, layers.Dense(2)
        self.last.build((None, 4))
        self.built = True

    def build(self, shape):
        pass

    def call(self, x):
        return self.last(self.part(x))

    def get_config(self):
        part = keras.saving.serialize_keras_object(self.part)
        return {**super().get_config(), "part": part}

    @classmethod
    def from_config(cls, config):
        part = keras.saving.deserialize_keras_object(config.pop("part"))
        return cls(part, **config)


def inside_a_subclass():
    return Holding(posterior_of(layers.Dense(4)))


def inside_another_posterior():
    x = layers.Input((4,))
    net = keras.Model(x, layers.Dense(2)(functional_inside()([x, x])[0]))
    return VariationalModel(net, block_size=5, block_bits=6)


@pytest.mark.parametrize(
    "make",
    [
        between,
        at_the_end,
        one_output,
        called_twice,
        beside_layers_of_their_own,
        inside_a_subclass,
        inside_another_posterior,
    ],
)
def test_posteriors_inside_other_models(make, tmp_path, eager):
    keras.utils.set_random_seed(1)
    # Names of Keras do not start from nothing.
    keras.Sequential([layers.Input((4,)), layers.Dense(2)])
    model, x = make(), batch((4,))
    check_network(model)
    round_stored(fix_all(model))
    to_file(model).write(tmp_path / "file")
    decoded = load(tmp_path / "file")
    names = {type(layer).__name__ for layer in walk(decoded)}
    assert not names & {"VariationalModel", "MeanKLDense"}
    outputs = keras.tree.flatten(model(x)), keras.tree.flatten(decoded(x))
    for expected, actual in zip(*outputs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_posterior_inside_a_model_is_trained_and_coded(tmp_path, quick):
    keras.utils.set_random_seed(1)
    model, x = between(), batch((4,))
    model.compile("adam", "mse")
    callback = tfmiracle.CompressionCallback(tmp_path / "file", 2, 1, verbose=0)
    model.fit(x, x[:, :2], epochs=9, verbose=0, callbacks=[callback])
    loaded = load(tmp_path / "file")
    np.testing.assert_allclose(loaded(x), model(x, training=False), rtol=1e-5)


# What Keras would not find again.


class Unregistered(layers.Dense):
    pass


def unregistered(x):
    return 2 * x


class Ones(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.ones(shape, dtype)


class Same(keras.constraints.Constraint):
    def __call__(self, w):
        return w


class Sum(keras.regularizers.Regularizer):
    def __call__(self, w):
        return keras.ops.sum(w)

    def get_config(self):
        return {}


class UnregisteredModel(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(3)
        self.inner.build((None, 4))
        self.built = True

    def call(self, x):
        return self.inner(x)


def dense(**kwargs):
    return layers.Dense(3, name="part", **kwargs)


@pytest.mark.parametrize(
    "name, make",
    [
        ("Unregistered", lambda: Unregistered(3, name="part")),
        ("Unregistered", lambda: keras.Sequential([Unregistered(3, name="part")])),
        ("UnregisteredModel", lambda: UnregisteredModel(name="part")),
        ("function 'unregistered'", lambda: dense(activation=unregistered)),
        ("function 'unregistered'", lambda: layers.Lambda(unregistered, name="part")),
        ("Ones", lambda: dense(kernel_initializer=Ones())),
        ("Sum", lambda: dense(kernel_regularizer=Sum())),
        ("Same", lambda: dense(bias_constraint=Same())),
        ("Same", lambda: keras.Sequential([dense(bias_constraint=Same())])),
    ],
)
def test_what_is_not_registered_shows_when_it_is_wrapped(name, make, tmp_path):
    net = keras.Sequential([layers.Input((4,)), make(), layers.Dense(2)])
    line = r'@keras.saving.register_keras_serializable\("my_package"\)'
    message = rf"^{name} \(in 'part'\) is not registered .*: {line}$"
    with pytest.raises(ValueError, match=message):
        VariationalModel(net)
    with pytest.raises(ValueError, match=message):
        tfmiracle.compress(net, batch((4,)), None, tmp_path / "file", loss="mse")
    of_layers = keras.Sequential([layers.Input((4,)), tfmiracle.MeanKLDense(4), make()])
    of_layers.compile("adam", "mse")
    callback = tfmiracle.CompressionCallback(tmp_path / "file", verbose=0)
    with pytest.raises(ValueError, match=message):
        of_layers.fit(batch((4,)), batch((3,)), verbose=0, callbacks=[callback])
    assert int(of_layers.optimizer.iterations) == 0


def test_what_is_in_a_scope_of_custom_objects_is_known():
    objects = {"Unregistered": Unregistered, "unregistered": unregistered}
    with keras.saving.custom_object_scope(objects):
        parts = Unregistered(3), layers.Activation(unregistered)
        VariationalModel(keras.Sequential([layers.Input((4,)), *parts]))


@pytest.mark.parametrize(
    "part",
    [
        lambda: layers.Lambda(lambda x: x, name="part"),
        lambda: layers.Activation(lambda x: x, name="part"),
        lambda: dense(kernel_regularizer=lambda w: keras.ops.sum(w)),
    ],
)
def test_a_lambda_is_no_part_of_a_file(part):
    net = keras.Sequential([layers.Input((4,)), layers.Dense(4), part()])
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=r"lambda in 'part'.* holds no code"),
    ):
        warnings.simplefilter("ignore")  # of Keras, of the same
        VariationalModel(net)


def test_a_layer_without_a_configuration_is_named():
    class Holder(layers.Layer):
        def __init__(self, thing, **kwargs):
            super().__init__(**kwargs)
            self.thing = thing

        def call(self, x):
            return x

    holder = Holder(object(), name="part")
    net = keras.Sequential([layers.Input((4,)), layers.Dense(2), holder])
    with pytest.raises(ValueError, match=r"Holder \(layer 'part'\) .*`get_config`"):
        VariationalModel(net)


# Training setup that cannot be serialized.


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 1e-3


def test_a_training_setup_is_no_part_of_the_description():
    def net():
        parts = layers.Input((4,), name="x"), layers.Dense(2, name="one")
        return keras.Sequential(parts, name="net")

    plain, inner = plain_architecture(net()), net()
    for loss in (lambda y, p: p, Schedule().__call__, Schedule()):
        model = net()
        model.compile(keras.optimizers.Adam(Schedule()), loss, metrics=[lambda y, p: p])
        assert plain_architecture(model) == plain
        assert plain_architecture(VariationalModel(model)) == plain
        # Keras itself still has it.
        with pytest.raises(NotImplementedError):
            model.get_compile_config()
    inner.compile(keras.optimizers.Adam(Schedule()), "mse")
    outer = keras.Sequential([layers.Input((4,)), inner])
    assert "compile_config" not in json.dumps(plain_architecture(outer))
