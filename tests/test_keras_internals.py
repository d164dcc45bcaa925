"""What Keras does beyond its documented interface, as the package relies on it."""

import ast
import importlib
import pkgutil
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
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


def test_own_variables_are_saved_in_their_order():
    layer, store = layers.BatchNormalization(), {}
    layer.build((None, 3))
    layer.gamma.assign([1, 2, 3])
    layer.moving_mean.assign([4, 5, 6])
    layer.save_own_variables(store)
    for i, variable in enumerate(internals.own_variables(layer)):
        np.testing.assert_array_equal(store[str(i)], variable)
    assert len(store) == len(internals.own_variables(layer)) == 4


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


def test_random_numbers_without_a_seed_come_from_the_global_generator():
    state = internals.global_seed_generator().state
    before = state.numpy()
    first = keras.random.normal((3,))
    assert np.any(state.numpy() != before)
    state.assign(before)
    np.testing.assert_array_equal(keras.random.normal((3,)), first)


def test_masks_are_noted_at_tensors():
    masked = layers.Masking()(np.array([[[1.0], [0.0]]]))
    copied = internals.copy_mask(masked, tf.constant([[[3.0], [4.0]]]))
    pooled = layers.GlobalAveragePooling1D()(copied)
    np.testing.assert_array_equal(pooled, [[3.0]])  # of what is not masked
    plain = tf.constant(1.0)
    assert internals.copy_mask(tf.constant(2.0), plain) is plain


def test_a_checked_variable_sees_all_that_is_assigned_to_it(tmp_path):
    class Holder(layers.Layer):
        def __init__(self):
            super().__init__()
            self.value = internals.CheckedVariable(
                np.ones(2), trainable=False, check=lambda v: seen.append(np.array(v))
            )
            self.built = True

        def call(self, x):
            return x

    seen, net = [], keras.Sequential([layers.Input((2,)), Holder()])
    net.save_weights(tmp_path / "x.weights.h5")
    saved = tf.train.Checkpoint(net).save(tmp_path / "x")
    assert not seen
    net.set_weights([np.array([2, 3])])
    net.load_weights(tmp_path / "x.weights.h5")
    tf.train.Checkpoint(net).restore(saved)
    np.testing.assert_array_equal(seen, [[2, 3], [1, 1], [1, 1]])


def test_functional_models():
    inputs = keras.Input((3,))
    net = keras.Model(inputs, layers.Dense(2)(inputs))
    assert type(net) is internals.functional_class()


def test_layers_of_applications_are_all_that_are_not_exported():
    found = set()
    for _, name, _ in pkgutil.iter_modules(keras.src.applications.__path__):
        if name.endswith("_test"):
            continue
        module = importlib.import_module(f"keras.src.applications.{name}")
        found |= {
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, keras.Layer)
            and value.__module__ == module.__name__
        }
    assert found == set(internals.layers_of_applications())


def test_operations_call_no_functions():
    found = {cls.__name__: cls for cls in internals.operations()}
    modules = {cls.__module__.rpartition(".")[2] for cls in found.values()}
    assert modules == {"core", "einops", "image", "linalg", "math", "nn", "numpy"}
    assert {"Add", "Cast", "Einsum", "GetItem", "Rearrange", "Relu", "Slice"} < {*found}
    calling = (
        "AssociativeScan Cond ForiLoop JVP Map Scan Switch VectorizedMap WhileLoop"
    )
    assert not {*calling.split()} & {*found}


def test_building_is_watched():
    shapes, weights = [], []
    inputs = keras.Input((3,))
    before = keras.KerasTensor.__init__, keras.Layer.add_weight
    with internals.watch_building(shapes.append, weights.append):
        layer = layers.Dense(2, kernel_initializer="ones")
        layer(inputs)
        assert np.array_equal(layer.kernel, np.zeros((3, 2)))
        bare = keras.Layer()
        bare.add_weight((4,), "ones", "int32")
        bare.add_weight()
    assert shapes == [(None, 2)]
    assert weights == [(3, 2), (2,), (4,), ()]
    assert bare.weights[0].dtype == "int32"
    assert before == (keras.KerasTensor.__init__, keras.Layer.add_weight)

    with internals.watch_building(shapes.append):  # leaves initializers alone
        layer = layers.Dense(2, kernel_initializer="ones")
        layer(inputs)
    assert np.array_equal(layer.kernel, np.ones((3, 2)))


def test_a_watch_ends_with_an_error_and_sees_its_own_thread_only():
    def refuse(shape):
        raise ValueError("too much")

    before = keras.KerasTensor.__init__, keras.Layer.add_weight
    with (
        pytest.raises(ValueError, match="too much"),
        internals.watch_building(refuse, refuse),
    ):
        other = threading.Thread(target=layers.Dense(2).build, args=[(None, 3)])
        other.start()
        other.join()
        layers.Dense(2).build((None, 3))
    assert before == (keras.KerasTensor.__init__, keras.Layer.add_weight)


def test_nothing_else_in_the_package_touches_private_names_of_keras():
    names = {
        node.attr
        for node in ast.walk(ast.parse((PACKAGE / "keras_internals.py").read_text()))
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)
    }
    for path in PACKAGE.rglob("*.py"):
        if path.name == "keras_internals.py":
            continue
        tree = ast.parse(path.read_text())
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & (names | {"src"}), path
