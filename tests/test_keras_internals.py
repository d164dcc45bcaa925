"""What Keras does beyond its documented interface, as the package relies on it."""

import ast

import keras
import numpy as np
import pytest
from keras import layers
from support import PACKAGE

from tfmiracle import keras_internals as internals


@pytest.fixture
def nested():
    inner = keras.Sequential([layers.Input((3,)), layers.Dense(2), layers.Dropout(0.5)])
    return keras.Sequential([layers.Input((3,)), inner, layers.Dense(1)])


def test_walk_finds_every_layer_once(nested):
    inner, last = nested.layers
    found = [layer for layer in internals.walk(nested) if layer is not nested]
    expected = [inner, last, *inner.layers]
    for layer in expected:
        assert sum(layer is other for other in found) == 1
    assert nested in list(internals.walk(nested))


def test_walk_finds_layers_that_are_attributes():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.several = layers.Dense(1), [layers.Dense(2)]

    net = Net()
    assert {net.one, *net.several} <= set(internals.walk(net))
    assert net.one in internals.children(net)


def test_children_are_one_level_down(nested):
    assert set(nested.layers) <= set(internals.children(nested))
    assert nested.layers[0].layers[0] not in internals.children(nested)


def test_seed_generators_are_those_of_the_layer_itself(nested):
    inner, last = nested.layers
    assert len(internals.seed_generators(inner.layers[1])) == 1
    assert internals.seed_generators(last) == []


def test_a_variable_tracked_as_not_trainable_stays_so():
    class Idle(layers.Dense):
        def build(self, shape):
            super().build(shape)
            assert internals.own_trainable_variables(self) == [self.kernel, self.bias]
            internals.track_as_not_trainable(self, self.kernel)

    layer = Idle(2)
    layer.build((None, 3))
    kernel, bias = layer.kernel, layer.bias
    layer.trainable = False
    layer.trainable = True
    assert layer.trainable_variables == [bias]
    assert layer.non_trainable_variables == [kernel]


def test_losses_are_forgotten_when_the_outermost_call_begins():
    seen = []

    class Penalized(layers.Layer):
        def call(self, x):
            seen.append(internals.has_losses(self))
            self.add_loss(keras.ops.sum(x))
            seen.append(internals.has_losses(self))
            return x

    layer = Penalized()
    layer(np.ones((1, 1)))
    layer(np.ones((1, 1)))
    assert seen == [False, True, False, True]


def test_loss_weights_beside_what_cannot_be_serialized():
    net = keras.Sequential([layers.Input((1,)), layers.Dense(1)])
    assert internals.compiled_loss_weights(net) is None
    net.compile("adam", "mse")
    assert internals.compiled_loss_weights(net) is None
    net.compile("adam", lambda y, p: p, [2.0], metrics=[object().__eq__])
    assert internals.compiled_loss_weights(net) == [2.0]


def test_without_training_setup_nothing_of_it_is_serialized(nested):
    inner = nested.layers[0]
    for model in (nested, inner):
        model.compile("adam", "mse")
    with pytest.raises(KeyError), internals.without_training_setup(nested):
        config = keras.saving.serialize_keras_object(nested)
        raise KeyError  # also after an error all is as before
    assert "compile_config" not in str(config) and "'Dropout'" in str(config)
    assert "compile_config" in keras.saving.serialize_keras_object(nested)
    assert inner.get_compile_config()["loss"] == "mse"


def test_the_mode_of_rematerialization():
    assert internals.rematerialization(layers.Dense(1)) is None
    with keras.RematScope(mode="full"):
        layer = layers.Dense(1)
    assert internals.rematerialization(layer) == "full"


def test_stateless_scope_is_the_innermost_open_one():
    assert internals.stateless_scope() is None
    with keras.StatelessScope(), keras.StatelessScope() as inner:
        assert internals.stateless_scope() is inner


def test_variables_behind_scopes():
    variable = keras.Variable(np.zeros(2, np.float32))
    with keras.StatelessScope([(variable, keras.ops.ones(2))]):
        assert np.array_equal(internals.stored_value(variable), [0, 0])
        internals.assign_past_scopes(variable, keras.ops.ones(2) * 3)
        assert np.array_equal(variable, [1, 1])
    assert np.array_equal(variable, [3, 3])
    seen = []

    class Reads(layers.Layer):
        def call(self, x):
            seen.extend([variable.dtype, internals.stored_dtype(variable)])
            return x

    Reads(dtype="mixed_bfloat16")(np.ones((1, 1)))
    assert seen == ["bfloat16", "float32"]


def test_nothing_else_in_the_package_touches_private_names_of_keras():
    names = {
        node.attr
        for node in ast.walk(ast.parse((PACKAGE / "keras_internals.py").read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    }
    for path in PACKAGE.rglob("*.py"):
        if path.name == "keras_internals.py":
            continue
        tree = ast.parse(path.read_text())
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & (names | {"src"}), path
