"""Reading some variables as tensors, and what the scope needs of Keras for it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmiracle.hosts.layers import MeanKLDense
from tfmiracle.hosts.models import VariationalModel
from tfmiracle.hosts.scope import (
    SubstitutionScope,
    is_substituted,
    refuse_rematerialization,
    substitute,
)

pytestmark = pytest.mark.usefixtures("seeded")


def variable(value, **kwargs):
    return keras.Variable(np.asarray(value, np.float32), **kwargs)


def current_scope():
    return keras.src.backend.get_stateless_scope()


# What scope.py relies on in Keras.


class Recorder(keras.StatelessScope):
    """Writes down what Keras asks of a scope."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def get_current_value(self, variable):
        self.calls.append(("read", variable))
        return super().get_current_value(variable)

    def add_update(self, update):
        self.calls.append(("write", update[0]))
        super().add_update(update)

    def add_loss(self, loss):
        self.calls.append(("loss", loss))
        super().add_loss(loss)


def test_keras_asks_the_scope_for_every_value():
    v = variable([1.0, 2.0])
    reads = [
        lambda: v.value,
        lambda: tf.convert_to_tensor(v),
        lambda: keras.ops.convert_to_tensor(v),
        lambda: v + 0,
        lambda: keras.ops.add(v, 0),
        lambda: v.numpy(),
        lambda: v[:],
        lambda: tf.identity(v),
    ]
    for read in reads:
        with Recorder([(v, tf.constant([5.0, 6.0]))]) as scope:
            np.testing.assert_array_equal(read(), [5, 6])
        assert ("read", v) in scope.calls


def test_keras_tells_the_scope_every_assignment():
    v = variable([1.0, 2.0])
    for write in (v.assign, v.assign_add, v.assign_sub):
        with Recorder() as scope:
            write([1.0, 1.0])
        assert ("write", v) in scope.calls
        np.testing.assert_array_equal(v.numpy(), [1, 2])


def test_keras_tells_the_scope_losses_if_it_collects_them():
    layer = layers.ActivityRegularization(l1=1.0)
    for collect in (True, False):
        with Recorder(collect_losses=collect) as scope:
            layer(tf.ones([2, 3]))
        assert [float(loss) for loss in scope.losses] == [3.0] * collect
        assert [kind for kind, _ in scope.calls] == ["loss"] * collect
        assert not layer.losses


def test_keras_keeps_scopes_as_we_think():
    v, outside = variable([1.0]), current_scope()
    assert outside is None
    with keras.StatelessScope([(v, tf.constant([2.0]))], collect_losses=True) as a:
        assert current_scope() is a
        assert a.original_scope is None
        assert a.collect_losses and a.losses == []
        assert list(a.state_mapping) == [id(v)]
        with keras.StatelessScope() as b:
            assert current_scope() is b
            assert b.original_scope is a
        assert current_scope() is a
    assert current_scope() is None
    v._direct_assign(tf.constant([3.0]))
    np.testing.assert_array_equal(v._value, [3])


def test_keras_variables_have_a_dtype_of_their_own():
    v = variable([1.0])
    with keras.src.backend.AutocastScope("bfloat16"):
        assert (v.dtype, v._dtype) == ("bfloat16", "float32")


def test_keras_layers_tell_the_scope_they_were_made_in():
    assert layers.Dense(1)._remat_mode is None
    with keras.RematScope(mode="full"):
        assert layers.Dense(1)._remat_mode.mode == "full"


# SubstitutionScope.


def test_reads_see_the_value_and_gradients_reach_it():
    v, other = variable([[1.0, 2.0]]), variable([[3.0], [4.0]])
    value = tf.constant([[5.0, 6.0]])
    with tf.GradientTape() as tape:
        tape.watch(value)
        with SubstitutionScope([v], [value]):
            y = keras.ops.matmul(v, other)
    assert float(y[0, 0]) == 5 * 3 + 6 * 4
    gradient = tape.gradient(y, [value, other.value, v.value])
    np.testing.assert_array_equal(gradient[0], [[3, 4]])
    np.testing.assert_array_equal(gradient[1], [[5], [6]])
    assert gradient[2] is None
    np.testing.assert_array_equal(v.numpy(), [[1, 2]])


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_other_assignments_pass_through(wrap):
    v, other, counter = variable([1.0]), variable([2.0]), variable(0.0)

    @wrap
    def run():
        with SubstitutionScope([v], [tf.constant([7.0])]):
            other.assign(other + v)
            counter.assign_add(1.0)
            return other.value + 0

    np.testing.assert_array_equal(run(), [9])
    np.testing.assert_array_equal(run(), [16])
    np.testing.assert_array_equal(other.numpy(), [16])
    np.testing.assert_array_equal(v.numpy(), [1])
    assert counter.numpy() == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_substituted_variable_cannot_be_assigned(depth):
    v = variable([1.0])
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(SubstitutionScope([v], [tf.constant([7.0])]))
        if depth == 2:
            scopes.enter_context(SubstitutionScope([], []))
        with pytest.raises(ValueError, match=f"assigns to '{v.path}'"):
            v.assign_add([1.0])
        np.testing.assert_array_equal(v.numpy(), [7])
    np.testing.assert_array_equal(v.numpy(), [1])


def test_the_outermost_scope_wins():
    a, b, c = variable([1.0]), variable([2.0]), variable([3.0])
    with SubstitutionScope([a], [tf.constant([10.0])]):
        with SubstitutionScope([a, b], [tf.constant([20.0]), tf.constant([30.0])]):
            assert [v.numpy()[0] for v in (a, b, c)] == [10, 30, 3]
            assert [is_substituted(v) for v in (a, b, c)] == [True, True, False]
            with SubstitutionScope([b, c], [tf.constant([40.0]), tf.constant([50.0])]):
                assert [v.numpy()[0] for v in (a, b, c)] == [10, 30, 50]
                assert all(is_substituted(v) for v in (a, b, c))
        assert [v.numpy()[0] for v in (a, b, c)] == [10, 2, 3]
        assert [is_substituted(v) for v in (a, b, c)] == [True, False, False]
    assert [v.numpy()[0] for v in (a, b, c)] == [1, 2, 3]
    assert not any(is_substituted(v) for v in (a, b, c))


def test_inside_a_plain_scope_nothing_leaks():
    a, b, counter = variable([1.0]), variable([2.0]), variable([0.0])
    mapping = [(a, tf.constant([10.0])), (b, tf.constant([20.0]))]
    with keras.StatelessScope(mapping, collect_losses=True) as outer:
        assert not is_substituted(a)  # a plain scope replaces no samples
        with SubstitutionScope([a], [tf.constant([30.0])]) as inner:
            assert [v.numpy()[0] for v in (a, b, counter)] == [30, 20, 0]
            counter.assign_add([1.0])
            counter.assign_add([1.0])
            inner.add_loss(tf.constant(4.0))
        assert [v.numpy()[0] for v in (a, b, counter)] == [10, 20, 2]
    np.testing.assert_array_equal(outer.get_current_value(counter), [2])
    assert [float(loss) for loss in outer.losses] == [4.0]
    assert [v.numpy()[0] for v in (a, b, counter)] == [1, 2, 0]


def test_values_keep_the_dtype_of_the_variable():
    # 1 + 2**-10 is not a bfloat16.
    v, low = variable([1.0]), variable([1.0], dtype="bfloat16")
    fine = tf.constant([1 + 2.0**-10])
    with (
        keras.src.backend.AutocastScope("bfloat16"),
        SubstitutionScope([v, low], [fine, fine]),
    ):
        assert v.value.dtype == "bfloat16"
        with keras.src.backend.AutocastScope("float32"):
            np.testing.assert_array_equal(v.value, fine)
            np.testing.assert_array_equal(low.value, [1])


def test_an_exception_closes_the_scope():
    v = variable([1.0])
    with pytest.raises(RuntimeError, match="inside"), SubstitutionScope([v], [[2.0]]):
        raise RuntimeError("inside")
    assert current_scope() is None
    assert v.numpy() == 1


def test_as_many_values_as_variables():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        SubstitutionScope([variable([1.0])], [])


# Layers inside.


def test_losses_and_regularizers_reach_the_owner_once():
    owner = keras.layers.Layer()
    layer = layers.Dense(
        2, use_bias=False, kernel_regularizer=keras.regularizers.L1(10.0)
    )
    layer.build((None, 3))
    regularize = layers.ActivityRegularization(l1=1.0)
    with substitute(owner, [layer.kernel], [tf.ones([3, 2])]):
        regularize(layer(tf.ones([4, 3])))
    assert [float(loss) for loss in owner.losses] == [3 * 2, 10 * 6]
    assert not regularize.losses


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Noisy(keras.layers.Layer):
    """BatchNormalization, dropout and an added loss in one layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.5, seed=3)

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=None):
        self.add_loss(keras.ops.mean(x))
        return self.drop(self.norm(x, training=training), training=training)


def noisy_net():
    return keras.Sequential([keras.Input((4,)), layers.Dense(6), Noisy()])


X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def test_statistics_and_dropout_seeds_advance_as_without_the_scope():
    net = noisy_net()
    reference = keras.models.clone_model(net)
    reference.set_weights(net.get_weights())
    kernel, bias = net.layers[0].weights
    new_kernel = tf.constant(kernel.numpy() + 1)
    reference.layers[0].kernel.assign(new_kernel)
    owner = keras.layers.Layer()
    for _ in range(3):
        with substitute(owner, [kernel, bias], [new_kernel, bias.value]):
            actual = net(X, training=True)
        np.testing.assert_array_equal(actual, reference(X, training=True))
    pairs = zip(
        net.non_trainable_variables, reference.non_trainable_variables, strict=True
    )
    names = []
    for a, b in pairs:
        np.testing.assert_array_equal(a.numpy(), b.numpy())
        names.append(a.name)
    assert names == ["moving_mean", "moving_variance", "seed_generator_state"]
    assert net.layers[1].norm.moving_mean.numpy().any()
    assert net.layers[1].drop.seed_generator.state.numpy().tolist() == [3, 3]


def test_a_stateless_call_changes_nothing_and_returns_the_new_state(eager):
    net = noisy_net()
    net.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    model = VariationalModel(net, block_size=5, seed=1)
    before = [v.numpy() for v in model.variables]
    trainable = [v.numpy() for v in model.trainable_variables]
    state = [v.numpy() for v in model.non_trainable_variables]
    output, new_state, losses = model.stateless_call(
        trainable, state, X, training=True, return_losses=True
    )
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)
    # The same for real.
    np.testing.assert_array_equal(output, model(X, training=True))
    np.testing.assert_array_equal(sorted(losses), sorted(model.losses))
    assert len(losses) == 2
    changed = set()
    for v, old, new in zip(model.non_trainable_variables, state, new_state):
        np.testing.assert_array_equal(v.numpy(), new)
        if not np.array_equal(old, new):
            changed.add(v.name)
    assert changed == {"moving_mean", "moving_variance", "seed_generator_state"}


def test_a_stateless_call_uses_the_parameters_given(eager):
    model = VariationalModel(noisy_net(), block_size=5, seed=1)
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    state = [v.numpy() for v in model.non_trainable_variables]
    x = np.ones((2, 4), np.float32)
    output, _ = model.stateless_call(zeros, state, x, training=False)
    np.testing.assert_array_equal(output, np.zeros((2, 6)))  # tau = 0: all means are 0
    assert np.abs(model(x, training=False)).max() > 0


def test_variational_layers_inside_a_variational_model_draw_nothing(eager):
    inner = MeanKLDense(3, seed=1)
    model = VariationalModel(
        keras.Sequential([keras.Input((4,)), inner]), block_size=5, seed=2
    )
    state = inner.block_posterior.noise_seed.state.numpy()
    values = model.block_posterior(training=False)
    np.testing.assert_allclose(
        model(X, training=False), X @ values[0] + values[1], rtol=1e-5, atol=1e-6
    )
    model(X, training=True)
    np.testing.assert_array_equal(inner.block_posterior.noise_seed.state.numpy(), state)


def embed_and_attend():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True)(tokens)
    x = layers.MultiHeadAttention(2, 2)(x, x)
    x = layers.Bidirectional(layers.LSTM(3))(x)
    return keras.Model(tokens, layers.Dense(2)(x))


TOKENS = np.array([[1, 2, 3, 0, 0], [4, 5, 6, 1, 0]])


def test_embedding_attention_and_recurrence_read_the_samples(eager):
    net = embed_and_attend()
    model = VariationalModel(net, block_size=4, seed=1)
    assert len(model.coded_variables) == len(net.trainable_variables) == 17
    with tf.GradientTape() as tape:
        values = model.block_posterior(training=True)
        tape.watch(values)
        with substitute(model, model.coded_variables, values):
            loss = tf.reduce_sum(net(TOKENS, training=True) ** 2)
    for v, gradient in zip(
        model.coded_variables, tape.gradient(loss, values), strict=True
    ):
        assert gradient is not None, v.path
        # Attention does not see a shift of all keys.
        assert np.any(gradient) or v.path.endswith("key/bias"), v.path
    expected = model(TOKENS, training=False)
    np.testing.assert_array_equal(model.materialize()(TOKENS), expected)


@pytest.mark.slow
def test_embedding_attention_and_recurrence_train():
    model = VariationalModel(embed_and_attend(), block_size=4, seed=1)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    y = np.array([[1.0, 0.0], [0.0, 1.0]])
    losses = model.fit(TOKENS, y, epochs=60, verbose=0).history["loss"]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])


def policy_net():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6),
            layers.BatchNormalization(),
            layers.Dense(2, dtype="float32"),
        ]
    )


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16", "float64"])
def policy(request, kept_policy):
    keras.config.set_dtype_policy(request.param)
    return request.param


def test_policies_compute_as_plain_keras_with_a_float32_posterior(policy, eager):
    net = policy_net()
    model = VariationalModel(net, block_size=5, seed=1)
    assert {v.dtype for v in model.block_posterior.trainable_variables} == {"float32"}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(model(X, training=True), tf.float32) ** 2)
    for gradient in tape.gradient(loss, model.block_posterior.trainable_variables):
        assert gradient.dtype == tf.float32
        assert np.all(np.isfinite(gradient)) and np.any(gradient)
    # The float32 layer sees the weights in full.
    expected = model(X, training=False)
    np.testing.assert_array_equal(model.materialize()(X), expected)


def test_float64_as_default_dtype(eager):
    keras.config.set_floatx("float64")
    try:
        layer = MeanKLDense(2, dtype="float64", seed=1)
        assert layer(X, training=True).dtype == tf.float64
        assert layer.block_posterior.tau.dtype == "float32"
    finally:
        keras.config.set_floatx("float32")


def test_mixed_float16_trains_under_loss_scaling(eager):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = VariationalModel(policy_net(), block_size=5, seed=1)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
        model.compile(optimizer, "mse")
        y = X[:, :2].astype(np.float32)
        losses = model.fit(X, y, epochs=15, verbose=0).history["loss"]
    finally:
        keras.config.set_dtype_policy("float32")
    assert np.all(np.isfinite(losses))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    assert model.net.layers[1].moving_mean.numpy().any()


def test_the_loss_is_scaled_as_the_policy_of_the_network_says(eager):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = policy_net()
    finally:
        keras.config.set_dtype_policy("float32")
    model = VariationalModel(net, block_size=5, seed=1)
    model.compile("adam", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert {v.dtype for v in model.block_posterior.weights} == {"float32", "int32"}
    again = VariationalModel.from_config(model.get_config())
    assert again.dtype_policy.name == "mixed_float16"
    assert again.block_posterior.dtype_policy.name == "float32"


@pytest.mark.parametrize("mode", ["full", "list_of_layers"])
def test_rematerialized_layers_are_refused(mode):
    options = {"layer_names": ["a"]} if mode == "list_of_layers" else {}
    with keras.RematScope(mode=mode, **options):
        net = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="a")])
        layer = MeanKLDense(2)
    with pytest.raises(ValueError, match=f"RematScope.*{mode}"):
        VariationalModel(net)
    with pytest.raises(ValueError, match="RematScope"):
        layer.build((None, 4))
    with keras.RematScope(mode="activations"):
        refuse_rematerialization(layers.Dense(2))
