"""Whole Keras models made variational."""

import json
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from keras import layers
from support import COUNT_COMPILED, HOST, run_python

import tfmiracle
from tfmiracle.hosts.models import (
    VariationalModel,
    codable_variables,
    plain_weights,
    posteriors,
)

LN2 = np.log(2)
PARAMETERS = ["log_coding_scale", "tau", "quota_logits"]
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


pytestmark = pytest.mark.usefixtures("seeded")


def sequential():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(3)],
        name="net",
    )


def functional():
    """Two inputs and two outputs, by name."""
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    x = layers.Dense(5)(layers.Concatenate()([a, b]))
    return keras.Model(
        {"a": a, "b": b},
        {"big": layers.Dense(3, name="big")(x), "small": layers.Dense(1)(x)},
    )


@keras.saving.register_keras_serializable("test_models")
class Residual(keras.Model):
    """Subclassed, without a `training` argument, and with a weight of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4, activation="relu")
        self.parts = [layers.Dense(4), layers.LayerNormalization()]

    def build(self, shape):
        for layer in (self.hidden, *self.parts):
            layer.build(shape)
        self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")

    def call(self, x):
        y = self.hidden(x)
        for layer in self.parts:
            y = layer(y)
        return x + self.gain * y


def subclassed():
    model = Residual()
    model.build((None, 4))
    return model


def tower(name, built):
    inputs = [keras.Input((4,))] if built else []
    return keras.Sequential([*inputs, layers.Dense(4, name="fc")], name=name)


def nested():
    """Models in a model, whose layers have the same names, and a shared one."""
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    x = shared(tower("one", True)(inputs)) + tower("two", True)(shared(inputs))
    return keras.Model(inputs, layers.Dense(2, name="out")(x), name="outer")


def nested_sequential():
    model = keras.Sequential([tower("one", False), tower("two", False)], name="outer")
    model.build((None, 4))
    return model


def normalized():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(2),
        ]
    )


NETS = {
    "sequential": (sequential, X),
    "functional": (functional, {"a": X, "b": X + 1}),
    "subclassed": (subclassed, X),
    "nested": (nested, X),
    "nested_sequential": (nested_sequential, X),
    "normalized": (normalized, X),
}
of_every_net = pytest.mark.parametrize("make, x", NETS.values(), ids=NETS)


def flat(structure):
    return [np.asarray(y) for y in tf.nest.flatten(structure)]


def assert_same(actual, expected):
    for a, b in zip(flat(actual), flat(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def step(model, x, optimizer):
    """One step of training that needs no compiled model."""
    with tf.GradientTape() as tape:
        total = sum(tf.reduce_sum(y**2) for y in tf.nest.flatten(model(x, training=1)))
    gradients = tape.gradient(total, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return gradients


# Any Keras model.


@of_every_net
def test_the_wrapper_computes_what_the_net_does(make, x, eager):
    net = make()
    model = VariationalModel(net, block_size=4, seed=1)
    assert [id(v) for v in model.coded_variables] == [
        id(v) for v in net.trainable_variables
    ]
    expected = model(x)
    assert_same(model(x, training=False), expected)
    assert model.materialize() is net
    assert_same(net(x), expected)
    sizes = [v.size for v in map(keras.ops.convert_to_numpy, net.trainable_variables)]
    assert model.block_posterior.layout.num_weights == sum(sizes)
    kl = tfp.distributions.kl_divergence(model.posterior, model.prior)
    np.testing.assert_allclose(kl, 20 * -(-sum(sizes) // 4) * LN2, rtol=1e-5)


@of_every_net
def test_training_moves_the_posterior_and_nothing_else_of_the_weights(make, x, eager):
    net = make()
    model = VariationalModel(net, block_size=4, seed=1)
    raw = net.get_weights()
    trainable = net.trainable_variables
    optimizer = keras.optimizers.Adam(0.05)
    for gradient in step(model, x, optimizer):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)
    moved = [
        v.name
        for v, before in zip(net.weights, raw, strict=True)
        if np.any(v.numpy() != before)
    ]
    assert moved == ["moving_mean", "moving_variance"] * (make is normalized)
    # `net` itself stays an ordinary model.
    assert net.trainable_variables == trainable


@of_every_net
def test_the_four_lists_are_complete_and_disjoint(make, x):
    model = VariationalModel(make(), block_size=4)
    for whole, trainable, rest in (
        (model.variables, model.trainable_variables, model.non_trainable_variables),
        (model.weights, model.trainable_weights, model.non_trainable_weights),
    ):
        ids = [id(v) for v in (*trainable, *rest)]
        assert len(set(ids)) == len(ids) == len(whole)
        assert set(ids) == {id(v) for v in whole}
        assert [v.name for v in trainable] == PARAMETERS
    for value in (False, True):
        model.trainable = value
        assert len(model.trainable_variables) == 3 * value
        assert len(model.non_trainable_variables) == len(ids) - 3 * value + (
            len(model.variables) - len(model.weights)
        )


@of_every_net
def test_saved_and_loaded(make, x, tmp_path, eager):
    model = VariationalModel(make(), block_size=4, seed=1, name="mine")
    model.compile(keras.optimizers.Adam(0.05), "mse")
    y = tf.nest.map_structure(lambda y: y.numpy() + 1, model(x))
    model.fit(x, y, epochs=2, verbose=0)
    # In the middle of coding.
    model.block_posterior.finalize_coding_scale()
    model.block_posterior.fix([0, 3], [7, 2**20 - 1])
    model.fit(x, y, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.name == "mine"
    assert_same(loaded(x), model(x))
    assert np.flatnonzero(loaded.block_posterior.fixed).tolist() == [0, 3]
    layout, other = model.block_posterior.layout, loaded.block_posterior.layout
    assert layout.variables == other.variables
    assert layout.num_scales == len({v.path.rpartition("/")[0] for v in
                                     model.coded_variables})  # fmt: skip
    # It goes on as if it had never stopped, up to the seeds, which Keras does not save.
    for a, b in zip(model.variables, loaded.variables, strict=True):
        if a.name == "seed_generator_state":
            b.assign(a.value)
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert loaded.optimizer.iterations == 4
    assert_same(loaded.optimizer.variables, model.optimizer.variables)
    model.reset_metrics()  # which train_on_batch does in newer versions of Keras
    expected = model.train_on_batch(x, y)
    np.testing.assert_array_equal(loaded.train_on_batch(x, y), expected)
    assert_same(loaded.variables, model.variables)
    # And once more: the patterns of a loaded model are those of the first.
    loaded.save(tmp_path / "again.keras")
    assert_same(keras.saving.load_model(tmp_path / "again.keras")(x), loaded(x))


def test_a_saved_model_holds_its_weights_once(tmp_path):
    model = VariationalModel(sequential())
    assert not model._trainable_variables
    assert not model._non_trainable_variables
    assert len(model.weights) == 4 + 10


# Compiled.


def mixing_data():
    x = np.random.default_rng(3).normal(size=(64, 4)).astype(np.float32)
    return x, np.tanh(x[:, :3] - x[:, 1:])


def mixing_model(seed):
    net = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(3),
        ]
    )
    model = VariationalModel(
        net, block_size=5, kl_bits=60, seed=seed, rules={"kernel": "hash=2"}
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def test_fit_learns():
    keras.utils.set_random_seed(1)
    x, y = mixing_data()
    model = mixing_model(1)
    history = model.fit(x, y, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert history[-1] < 0.5 * history[0]
    assert np.any(model.net.layers[1].moving_mean.numpy())
    assert model.block_posterior.noise_seed.state.numpy()[1] == 32
    error = model.evaluate(x, y, verbose=0)
    assert error < history[-1]  # the mean is better than a sample
    # The net alone does the same.
    net = model.materialize()
    net.compile(loss="mse")
    np.testing.assert_allclose(net.evaluate(x, y, verbose=0), error, rtol=1e-5)


def test_the_same_seed_gives_the_same_run(eager):
    x, y = mixing_data()

    def run(seed):
        keras.utils.set_random_seed(5)
        model = mixing_model(seed)
        losses = model.fit(x, y, epochs=2, verbose=0).history["loss"]
        return losses, model.get_weights()

    first, again, other = run(1), run(1), run(2)
    assert first[0] == again[0]
    assert_same(first[1], again[1])
    assert first[0] != other[0]


FIT = """
import keras, numpy as np
import tfmiracle

parts = keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)
net = keras.Sequential(parts)
model = tfmiracle.VariationalModel(net, block_size=4, l2=1e-3)
model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=True)
counts = []
count = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: counts.append(compiled())
)
x = np.random.default_rng(0).normal(size=(8, 4))
model.fit(x, x[:, :3], epochs=4, verbose=0, callbacks=[count])
print(counts)
"""


@pytest.mark.slow
def test_fit_in_xla_compiles_once(tmp_path):
    process = run_python(COUNT_COMPILED + FIT, tmp_path)
    assert process.returncode == 0, process.stderr
    first, *later = json.loads(process.stdout.splitlines()[-1])
    assert first > 0 and later == [first] * 3


@pytest.mark.parametrize("parameterization", ["mean_kl", "mean_var", "sites"])
def test_a_step_in_xla_does_not_wait_for_the_host(parameterization):
    model = VariationalModel(sequential(), parameterization, block_size=4, l2=1e-3)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    data = tf.constant(X), tf.constant(X[:, :3])
    model.train_on_batch(*data)  # builds the optimizer
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=True)
    program = step.experimental_get_compiler_ir(*data)(stage="hlo")
    assert "dot(" in program  # that of the network
    assert not re.search(HOST, program)


# Which weights are coded.


def test_frozen_layers_are_left_out(eager):
    net = normalized()
    net.layers[0].trainable = False
    frozen = net.layers[0].get_weights()
    model = VariationalModel(net, block_size=4)
    names = [v.name for v in model.coded_variables]
    assert names == ["gamma", "beta", "kernel", "bias"]
    step(model, X, keras.optimizers.Adam(0.1))
    assert_same(net.layers[0].get_weights(), frozen)


def test_stored_weights_train_as_usual(tmp_path, eager):
    net = normalized()
    model = VariationalModel(
        net, block_size=4, rules={"gamma": "store", "beta": "store", "*/bias": "store"}
    )
    assert [v.name for v in model.coded_variables] == ["kernel", "kernel"]
    names = sorted(v.name for v in model.trainable_variables)
    assert names == sorted([*PARAMETERS, "bias", "gamma", "beta", "bias"])
    before = {v.path: v.numpy() for v in net.weights}
    step(model, X, keras.optimizers.Adam(0.1))
    changed = [v.name for v in net.weights if np.any(v.numpy() != before[v.path])]
    statistics = ["moving_mean", "moving_variance"]
    assert changed == ["bias", "gamma", "beta", *statistics, "bias"]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.name for v in loaded.coded_variables] == ["kernel", "kernel"]
    assert_same(loaded(X), model(X))


@pytest.mark.parametrize(
    "make, rules, factors",
    [
        (sequential, {"kernel": "hash=3"}, [3, 1, 3, 1]),
        (sequential, {"*": "hash=4", "bias": "code"}, [4, 1, 4, 1]),
        (nested, {"one/fc/kernel": "hash=2"}, None),
        (
            nested,
            {"one/fc/*": "hash=2", "shared/kernel": "hash=5", "out/*": "hash=3"},
            None,
        ),
        (nested_sequential, {"outer/one/fc/kernel": "hash=2"}, [2, 1, 1, 1]),
    ],
)
def test_rules_survive_saving(make, rules, factors, tmp_path, eager):
    # A wide prior, so that no mean is cut off.
    model = VariationalModel(make(), block_size=4, rules=rules, log_scale=0.0)
    coded = model.block_posterior.layout.variables
    if factors:
        assert [v.hash_factor for v in coded] == factors
    else:
        by_path = {v.path: c for v, c in zip(model.coded_variables, coded, strict=True)}
        assert by_path["one/fc/kernel"].hash_factor == 2
        assert by_path["two/fc/kernel"].hash_factor == 1
    assert model.block_posterior.layout.num_effective < sum(v.size for v in coded)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.block_posterior.layout.variables == coded
    assert_same(loaded(X), model(X))
    # Weights that share a value do so in the network.
    kernel = model.materialize().trainable_variables[0].numpy()
    assert len(np.unique(np.abs(kernel))) == coded[0].effective_size


def test_a_model_saved_while_frozen_can_be_loaded(tmp_path, eager):
    model = VariationalModel(sequential(), block_size=4)
    expected = model(X)
    model.trainable = False
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same(loaded(X), expected)
    assert not loaded.trainable_variables
    loaded.trainable = True
    assert len(loaded.trainable_variables) == 3


def test_wrapped_around_variational_layers(tmp_path, eager):
    def make():
        return keras.Sequential(
            [
                keras.Input((4,)),
                tfmiracle.MeanKLDense(6, seed=1),
                layers.Dense(5),
                tfmiracle.MeanKLDense(2, seed=2),
            ]
        )

    net = make()
    model = VariationalModel(net, block_size=4, seed=3)
    assert len(posteriors(net)) == 2
    ((posterior, variables),) = posteriors(model)
    assert posterior is model.block_posterior
    assert [tuple(v.shape) for v in variables] == [
        (4, 6), (6,), (6, 5), (5,), (5, 2), (2,)
    ]  # fmt: skip
    assert posterior.layout.num_weights == 24 + 6 + 30 + 5 + 10 + 2
    assert len(model.trainable_variables) == 3
    for value in (False, True):
        model.trainable = value
    assert len(model.trainable_variables) == 3
    values = posterior(training=False)
    expected = X
    for kernel, bias in zip(values[::2], values[1::2], strict=True):
        expected = expected @ kernel + bias
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)
    for gradient in step(model, X, keras.optimizers.Adam(0.1)):
        assert np.any(gradient)
    model.save(tmp_path / "model.keras")
    assert_same(keras.saving.load_model(tmp_path / "model.keras")(X), model(X))
    # Alone, the layers have the blocks to themselves.
    assert len(make().trainable_variables) == 3 + 2 + 3


def test_wrapped_twice_the_outer_model_decides(eager):
    inner = VariationalModel(sequential(), block_size=4, seed=1)
    outer = VariationalModel(inner, block_size=6, seed=2)
    assert posteriors(outer) == [(outer.block_posterior, outer.coded_variables)]
    assert len(outer.trainable_variables) == 3
    state = inner.block_posterior.noise_seed.state.numpy()
    kernel = outer.block_posterior(training=False)[0]
    hidden = np.tanh(X @ kernel + outer.block_posterior(training=False)[1])
    _, _, kernel, bias = outer.block_posterior(training=False)
    np.testing.assert_allclose(outer(X), hidden @ kernel + bias, rtol=1e-4, atol=1e-5)
    outer(X, training=True)
    np.testing.assert_array_equal(inner.block_posterior.noise_seed.state.numpy(), state)


def test_what_has_a_posterior_of_its_own_cannot_be_stored():
    parts = [layers.Input((4,)), tfmiracle.MeanKLDense(3, name="a"), layers.Dense(2)]
    inner = VariationalModel(sequential(), block_size=4)
    for net, path in ((keras.Sequential(parts), "a/bias"), (inner, "*/kernel")):
        with pytest.raises(ValueError, match=r"`rules` store .*posterior of its own"):
            VariationalModel(net, block_size=4, rules={path: "store"})


def test_as_a_layer_of_another_model(eager):
    inner = VariationalModel(sequential(), block_size=4, seed=1)
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, layers.Dense(1)(inner(inputs)))
    (part,) = posteriors(outer)
    assert part[0] is inner.block_posterior
    first, second = outer(X, training=True), outer(X, training=True)
    assert np.all(first != second)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(outer(X, training=True) ** 2)
    for gradient in tape.gradient(total, inner.trainable_variables):
        assert np.any(gradient)
    assert_same(outer(X), outer.layers[-1](inner(X)))


def test_lists_of_weights():
    net = normalized()
    net.layers[-1].trainable = False
    names = ["kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"]
    assert [v.name for v in codable_variables(net)] == names[:4]
    assert [v.name for v in plain_weights(net)] == [*names, "kernel", "bias"]
    model = VariationalModel(net)
    assert plain_weights(model) == plain_weights(net)
    mixed = keras.Sequential(
        [keras.Input((4,)), tfmiracle.MeanKLDense(2), layers.Dense(2)]
    )
    assert [v.name for v in plain_weights(mixed)] == ["kernel", "bias"] * 2
    assert [v.name for v in codable_variables(mixed)] == ["kernel", "bias"] * 2


# Other behaviour.


def test_regularizers_see_the_sample_and_are_counted_once(eager):
    square, total = keras.regularizers.L2(1.0), keras.regularizers.L1(1.0)
    net = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, kernel_regularizer=square, activity_regularizer=total),
            layers.Dense(2, bias_regularizer=square, bias_initializer="ones"),
        ]
    )
    model = VariationalModel(net, block_size=4, rules={"*/bias": "store"})
    y = model(X)
    kernel = model.block_posterior(training=False)[0].numpy()
    activity = np.abs(X @ kernel + net.layers[0].bias.numpy()).sum() / len(X)
    expected = sorted([np.sum(kernel**2), activity, 2.0])
    np.testing.assert_allclose(sorted(model.losses), expected, rtol=1e-5)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    loss = model.evaluate(X, np.zeros((8, 2)), verbose=0)
    np.testing.assert_allclose(loss, np.sum(expected) + np.mean(y**2), rtol=1e-5)
    sampled = model.train_on_batch(X, np.zeros((8, 2)))
    assert sampled != loss


def test_l2_counts_the_sample_in_training_only(eager):
    rules = {"kernel": "hash=2", "*/bias": "store"}
    model = VariationalModel(sequential(), block_size=4, rules=rules, l2=0.5)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    target = np.zeros((8, 3))
    np.testing.assert_allclose(
        model.evaluate(X, target, verbose=0), np.mean(model(X) ** 2), rtol=1e-6
    )
    assert not model.losses
    y = model(X, training=True)
    state = model.block_posterior.noise_seed.state
    state.assign(state.numpy() - [0, 1])  # the same noise again
    kernels = model.block_posterior(training=True)
    expected = 0.5 * sum(np.sum(v.numpy().astype(float) ** 2) for v in kernels)
    np.testing.assert_allclose(model.losses, [expected], rtol=1e-6)
    state.assign(state.numpy() - [0, 1])
    np.testing.assert_allclose(
        model.train_on_batch(X, target), np.mean(y**2) + expected, rtol=1e-6
    )


def test_l2_counts_once_where_a_model_is_called_twice():
    inner = VariationalModel(sequential(), block_size=4, l2=0.5)
    a, b = keras.Input((4,)), keras.Input((4,))
    twice = keras.Model([a, b], inner(a) + inner(b))
    twice([X, X], training=True)
    (loss,) = twice.losses
    mean = sum(np.sum(v.numpy() ** 2) for v in inner.block_posterior.values())
    assert 0.5 * mean < loss < 5 * mean


def test_l2_makes_weights_small():
    model = VariationalModel(sequential(), block_size=4, l2=10.0)
    before = np.linalg.norm(model.block_posterior.loc_and_scale())
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, X[:, :3], epochs=20, verbose=0)
    assert np.linalg.norm(model.block_posterior.loc_and_scale()) < 0.5 * before


def test_materialized_samples(eager):
    model = VariationalModel(sequential(), block_size=4, seed=1)
    model.block_posterior.finalize_coding_scale()
    model.block_posterior.fix([1], [5])
    mean = model.materialize().get_weights()
    first = model.materialize(sample=True).get_weights()
    second = model.materialize(sample=True).get_weights()
    fixed = model.block_posterior.layout.expand(
        np.outer(np.arange(len(model.block_posterior.fixed)) == 1, np.ones(4))
    )
    for a, b, c, where in zip(mean, first, second, fixed, strict=True):
        np.testing.assert_array_equal(b == c, where != 0)
        np.testing.assert_array_equal(a == b, where != 0)
    loc, scale = (x.numpy() for x in model.block_posterior.loc_and_scale())
    values = np.concatenate([v.ravel() for v in first])
    assert np.abs((values - loc) / scale).max() > 1


def test_deterministic_training_of_a_hashed_net_and_a_warm_start_from_it(eager):
    options = {"block_size": 4, "seed": 3, "rules": {"kernel": "hash=3"}}
    net = sequential()
    model = VariationalModel(net, "deterministic", **options)
    assert [v.name for v in model.trainable_variables] == ["log_coding_scale", "loc"]
    assert_same(model(X, training=True), model(X, training=False))
    target = X[:, :3]
    model.compile(keras.optimizers.Adam(0.1), "mse")
    losses = model.fit(X, target, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    expected = model(X)
    assert_same(model.materialize()(X), expected)
    # The same hashes: the start loses nothing but what the budget forbids.
    warm = VariationalModel(net, warm_start=True, kl_bits=1e4, **options)
    np.testing.assert_allclose(warm(X), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(warm(X, training=True), expected, rtol=1e-3, atol=1e-3)
    other = VariationalModel(
        net, warm_start=True, kl_bits=1e4, **{**options, "seed": 4}
    )
    assert np.abs(other(X) - expected).max() > 0.1


def test_warm_start_takes_the_weights_as_they_are(eager):
    net = sequential()
    expected = net(X)
    model = VariationalModel(net, warm_start=True, kl_bits=60, block_size=4)
    np.testing.assert_allclose(model(X), expected, rtol=0.05, atol=0.01)
    assert len(model.block_posterior.coding_scale) == 2
    # `warm_start` is of the moment; a copy starts from the weights of its own net.
    assert "warm_start" not in model.get_config()


def test_configuration_round_trip():
    options = {
        "parameterization": {
            "name": "mean_kl",
            "config": {
                "quota_rate": 3.0,
                "initial_budget": 4.0,
                "annealing_steps": 100,
            },
        },
        "coder": {
            "name": "mrc",
            "config": {
                "block_bits": 11,
                "codebook": "per_block",
                "selection": "sample",
            },
        },
        "prior": {"name": "zero", "config": {}},
        "block_size": 7,
        "kl_bits": 9.5,
        "rules": {"kernel": "hash=2 own_scale", "*/bias": "store=float16"},
        "log_scale": -1.5,
        "log_scale_rate": 2.0,
        "l2": 0.25,
        "seed": 2**64 - 1,
    }
    model = VariationalModel(sequential(), **options)
    config = model.get_config()
    assert {k: config[k] for k in options} == options
    copy = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(model)
    )
    assert copy.get_config() == config
    posterior = copy.block_posterior
    assert posterior.layout.variables == model.block_posterior.layout.variables
    assert posterior.layout.seed == 2**64 - 1
    assert posterior.code.codebook == "per_block"
    assert (posterior.code.block_bits, posterior.kl_bits) == (11, 9.5)
    assert posterior.parameterization == tfmiracle.MeanKL(3.0, 4.0, 100)
    clone = keras.models.clone_model(model)
    assert clone.get_config()["treatments"] == config["treatments"]


def test_integer_weights_are_not_coded():
    @keras.saving.register_keras_serializable("tests_of_tfmiracle")
    class Counting(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros")
            self.gain = self.add_weight(shape=(3,), initializer="ones")

        def call(self, x):
            return x * self.gain

    net = keras.Sequential([keras.Input((3,)), Counting()])
    model = VariationalModel(net)
    assert [tuple(v.shape) for v in model.coded_variables] == [(3,)]


def test_summary_counts_what_trains(capsys):
    model = VariationalModel(sequential(), block_size=4)
    lines = []
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    # 51 weights in 13 blocks of 4, two scales, a fingerprint.
    assert f"Trainable params: {2 * 52 + 2}" in text
    assert f"Non-trainable params: {51 + 2 + 3 * 52 + 2 * 13 + 8}" in text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rules": {"conv/kernel": "hash=2"}}, r"`rules`.*'conv/kernel'.*/kernel"),
        ({"rules": {"gamma": "store"}}, r"`rules`.*'gamma'.*/kernel"),
        ({"rules": {"*": "store"}}, "'net'.*no trainable weights"),
        ({"rules": {"kernel": "hash=1.5"}}, "A rule must say.* 'hash=1.5'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        VariationalModel(sequential(), **options)


def test_nets_that_cannot_be_wrapped():
    unbuilt = keras.Sequential([layers.Dense(2)], name="unbuilt")
    with pytest.raises(ValueError, match=r"'unbuilt'.*no weights yet"):
        VariationalModel(unbuilt)
    frozen = sequential()
    frozen.trainable = False
    with pytest.raises(ValueError, match=r"'net'.*no trainable weights"):
        VariationalModel(frozen)
    broken = sequential()
    broken.layers[0].bias.assign(np.full(6, np.nan))
    with pytest.raises(ValueError, match="not finite"):
        VariationalModel(broken)


@pytest.mark.parametrize(
    "name", ["train_step", "test_step", "compute_loss", "compute_metrics"]
)
def test_nets_with_training_of_their_own_cannot_be_wrapped(name):
    own = type("Own", (keras.Sequential,), {name: lambda self, *args: 1 / 0})
    net = own([layers.Input((4,)), layers.Dense(2)])
    with pytest.raises(ValueError, match=f"Own has a `{name}` of its own"):
        VariationalModel(net)
    net = keras.Sequential([layers.Input((4,)), layers.Dense(2)])
    setattr(net, name, lambda *args: 1 / 0)
    with pytest.raises(ValueError, match=f"Sequential has a `{name}` of its own"):
        VariationalModel(net)


def test_layers_that_assign_to_their_weights(eager):
    normal = layers.SpectralNormalization(layers.Dense(3, name="dense"))
    net = keras.Sequential([layers.Input((4,)), normal])
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"assigns to .*dense/kernel.*rule"):
        VariationalModel(net)(x, training=True)
    before = normal.layer.kernel.numpy()
    VariationalModel(net, rules={"dense/kernel": "store"})(x, training=True)
    assert np.any(normal.layer.kernel.numpy() != before)


def test_losses_by_the_names_of_outputs(eager):
    x = layers.Input((4,))
    outputs = [layers.Dense(3, name="one")(x), layers.Dense(2, name="two")(x)]
    model = VariationalModel(keras.Model(x, outputs))
    assert model.output_names == ["one", "two"]
    model.compile("adam", {"two": "mae", "one": "mse"}, {"two": 0.0, "one": 1.0})
    y = {"one": np.zeros((2, 3)), "two": np.ones((2, 2))}
    x = np.ones((2, 4), np.float32)
    loss = model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, np.mean(model(x)[0] ** 2), rtol=1e-5)


def test_inputs_are_cast_as_the_net_casts_them(eager):
    """Not to float16 by a wrapper made under another policy."""
    net = keras.Sequential([layers.Input((1,)), layers.Embedding(2100, 1)])
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("float16")
        model = VariationalModel(net)
    finally:
        keras.config.set_dtype_policy(before)
    x = np.float32([[2049], [2051]])
    model.materialize()
    np.testing.assert_array_equal(model(x), net(x))
    assert model(x)[0] != model(x)[1]


# What is no Keras model.


def of_another(module, **members):
    """An instance of a class as it would come from `module`."""
    return type("Sequential", (), {"__module__": module, **members})()


@pytest.mark.parametrize(
    "model, advice",
    [
        (of_another("tf_keras.src.models", get_weights=None), "Keras 2 .tf_keras."),
        (of_another("tensorflow.python.keras", get_weights=None), "Keras 2"),
        (
            type("Own", (type(of_another("tf_keras.x", get_weights=0)),), {})(),
            "Keras 2",
        ),
        (of_another("torch.nn.modules.container"), "copy the weights"),
        ("net.keras", r"keras\.saving\.load_model"),
        (pathlib.Path("net.keras"), r"keras\.saving\.load_model"),
        (layers.Dense(3), "into a keras.Sequential"),
        (keras.Sequential, r"Pass what .*Received: Sequential$"),
        (lambda x: x, "Pass what .*Received: function$"),
        (None, "Pass what .*Received: NoneType$"),
    ],
)
def test_what_is_no_model_of_keras(model, advice, tmp_path):
    with pytest.raises(ValueError, match=f"^`net` must be a Keras model. .*{advice}"):
        VariationalModel(model)
    with pytest.raises(ValueError, match=f"^`model` must be a Keras model. .*{advice}"):
        tfmiracle.compress(model, (X, X), path=tmp_path / "file")
    assert not list(tmp_path.iterdir())
