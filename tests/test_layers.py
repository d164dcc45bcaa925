"""Keras layers with a posterior over their own weights."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from keras import layers
from support import COUNT_COMPILED, fix_all, run_python

import tfmiracle
from tfmiracle.hosts.layers import MeanKLLayer
from tfmiracle.hosts.models import posteriors
from tfmiracle.posteriors.block_posterior import BlockPosterior
from tfmiracle.posteriors.parameterization import MeanKL

LN2 = math.log(2)

# Name, arguments, shape of an example.
LAYERS = [
    ("Dense", {"units": 3, "activation": "tanh"}, (5,)),
    ("EinsumDense", {"equation": "abc,cd->abd", "output_shape": (None, 3)}, (4, 5)),
    ("Embedding", {"input_dim": 11, "output_dim": 3}, (4,)),
    ("Conv1D", {"filters": 3, "kernel_size": 2, "strides": 2}, (6, 2)),
    ("Conv2D", {"filters": 3, "kernel_size": 2, "padding": "same"}, (4, 5, 2)),
    ("Conv3D", {"filters": 2, "kernel_size": 2}, (3, 3, 3, 2)),
    ("Conv1DTranspose", {"filters": 3, "kernel_size": 2}, (4, 2)),
    ("Conv2DTranspose", {"filters": 2, "kernel_size": 2, "strides": 2}, (3, 3, 2)),
    ("Conv3DTranspose", {"filters": 2, "kernel_size": 2}, (2, 2, 2, 2)),
    ("DepthwiseConv1D", {"kernel_size": 2, "depth_multiplier": 2}, (5, 3)),
    ("DepthwiseConv2D", {"kernel_size": 2}, (4, 4, 3)),
    ("SeparableConv1D", {"filters": 3, "kernel_size": 2}, (5, 2)),
    ("SeparableConv2D", {"filters": 3, "kernel_size": 2}, (4, 4, 2)),
]
of_every_layer = pytest.mark.parametrize(
    "name, arguments, shape", LAYERS, ids=[name for name, *_ in LAYERS]
)


pytestmark = pytest.mark.usefixtures("seeded")


def class_of(name):
    return getattr(tfmiracle, f"MeanKL{name}")


def batch(shape, size=4):
    rng = np.random.default_rng(0)
    if len(shape) == 1 and shape[0] == 4:  # indices for the embedding
        return rng.integers(0, 11, (size, *shape))
    return rng.normal(size=(size, *shape)).astype(np.float32)


def set_plain_weights(plain, layer):
    """Gives a plain layer the values that a variational layer has on average."""
    plain.set_weights([v.numpy() for v in layer.block_posterior(training=False)])


def gradients(layer, x):
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(x, training=True) ** 2)
    return tape.gradient(total, layer.trainable_variables)


# Every layer.


@of_every_layer
def test_every_layer_computes_what_keras_does_with_its_weights(
    name, arguments, shape, eager
):
    layer = class_of(name)(**arguments, block_size=4, seed=1)
    plain = getattr(layers, name)(**arguments)
    assert isinstance(layer, type(plain))
    x = batch(shape)
    plain.build(x.shape)
    layer.build(x.shape)
    set_plain_weights(plain, layer)
    np.testing.assert_array_equal(layer(x), plain(x))
    np.testing.assert_array_equal(layer(x, training=False), plain(x))
    assert layer.compute_output_shape(x.shape) == plain.compute_output_shape(x.shape)
    shapes = [tuple(v.shape) for v in plain.weights]
    assert [tuple(v.shape) for v in layer.coded_variables] == shapes
    # Each training pass is another sample, whose gradient reaches everything.
    first, second = layer(x, training=True), layer(x, training=True)
    assert np.all(np.any(first != second, axis=tuple(range(1, first.ndim))))
    posterior = layer.block_posterior
    assert [v.name for v in layer.trainable_variables] == [
        "log_coding_scale",
        "tau",
        "quota_logits",
    ]
    for gradient in gradients(layer, x):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)
    count = plain.count_params()
    assert posterior.layout.num_weights == count
    assert posterior.layout.num_scales == 1
    assert layer.posterior.event_shape == layer.prior.event_shape == [count]
    kl = tfp.distributions.kl_divergence(layer.posterior, layer.prior)
    np.testing.assert_allclose(kl, 20 * math.ceil(count / 4) * LN2, rtol=1e-5)


@of_every_layer
def test_every_layer_takes_every_argument_of_keras(name, arguments, shape):
    if name == "Embedding":
        common = {"embeddings_regularizer": "l2", "embeddings_constraint": "max_norm"}
    elif name.startswith("Depthwise"):
        common = {"depthwise_regularizer": "l2", "depthwise_initializer": "ones"}
    elif name.startswith("Separable"):
        common = {"pointwise_regularizer": "l2", "depthwise_constraint": "max_norm"}
    else:
        common = {"kernel_regularizer": "l2", "kernel_initializer": "ones"}
    common |= {"name": "mine", "dtype": "mixed_bfloat16", "trainable": False}
    plain = getattr(layers, name)(**arguments, **common)
    options = {
        "block_size": 7,
        "block_bits": 11,
        "kl_bits": 9.5,
        "codebook": "shared",
        "log_scale": -1.5,
        "log_scale_rate": 2.0,
        "seed": 2**63,
        "selection": "sample",
        "state_bits": 12,
        "coder": "mrc",
        "prior": "zero",
        "parameterization": MeanKL(3.0, 4.0, 100),
    }
    assert sorted(options) == sorted(MeanKLLayer.OPTIONS)
    layer = class_of(name)(**arguments, **common, **options)
    for option in ("block_bits", "codebook", "selection", "state_bits"):
        del options[option]  # part of the coder
    options["parameterization"] = {
        "name": "mean_kl",
        "config": {"quota_rate": 3.0, "initial_budget": 4.0, "annealing_steps": 100},
    }
    options["coder"] = {
        "name": "mrc",
        "config": {"block_bits": 11, "codebook": "shared", "selection": "sample"},
    }
    options["prior"] = {"name": "zero", "config": {}}
    assert layer.get_config() == {**plain.get_config(), **options}
    # Also from Keras' own configuration, and back from its own.
    assert class_of(name).from_config(plain.get_config()).name == "mine"
    copy = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert type(copy) is type(layer)
    assert copy.get_config() == layer.get_config()
    copy.build((None, *shape))
    posterior = copy.block_posterior
    assert posterior.layout.block_size == 7
    assert posterior.layout.seed == 2**63
    assert posterior.code.block_bits == 11
    assert posterior.kl_bits == 9.5
    assert posterior.code.codebook == "shared"
    assert posterior.parameterization == MeanKL(3.0, 4.0, 100)
    assert posterior.coder.selection == "sample"
    np.testing.assert_allclose(posterior.coding_scale, math.exp(-1.5), rtol=1e-6)


def every_layer_model():
    """One input and one output for each kind of layer."""
    inputs, outputs = [], []
    for i, (name, arguments, shape) in enumerate(LAYERS):
        dtype = "int32" if name == "Embedding" else "float32"
        inputs.append(keras.Input(shape, dtype=dtype))
        # Under names that Keras does not give again when the model is loaded.
        layer = class_of(name)(**arguments, block_size=5, seed=i, name=f"mine{i}")
        outputs.append(layers.Flatten()(layer(inputs[-1])))
    outputs = [layers.GlobalAveragePooling1D()(y[..., None]) for y in outputs]
    return keras.Model(inputs, outputs)


def test_every_layer_trains_and_survives_saving(tmp_path, eager):
    model = every_layer_model()
    x = [batch(shape) for _, _, shape in LAYERS]
    y = [np.full((4, 1), 0.1)] * len(LAYERS)
    model.compile(keras.optimizers.Adam(0.02), ["mse"] * len(LAYERS))
    start = [v.numpy() for v in model.trainable_variables]
    raw = [v.numpy() for _, vs in posteriors(model) for v in vs]
    history = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert np.all(np.isfinite(history))
    assert len(start) == 3 * len(LAYERS)
    for v, value in zip(model.trainable_variables, start, strict=True):
        assert np.any(v.numpy() != value), v.path
    for v, value in zip(
        [v for _, vs in posteriors(model) for v in vs], raw, strict=True
    ):
        np.testing.assert_array_equal(v.numpy(), value)
    posterior = posteriors(model)[0][0]
    posterior.finalize_coding_scale()
    posterior.fix([1, 2], [3, 4])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(model.predict_on_batch(x), loaded.predict_on_batch(x), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.flatnonzero(posteriors(loaded)[0][0].fixed).tolist() == [1, 2]
    # The rest of the state, too, and so the same run from here on.
    for a, b in zip(model.variables, loaded.variables, strict=True):
        if a.name == "seed_generator_state":  # which Keras does not save
            b.assign(a.value)
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    model.reset_metrics()  # which train_on_batch does in newer versions of Keras
    again = [m.train_on_batch(x, y) for m in (model, loaded)]
    np.testing.assert_array_equal(*again)
    for a, b in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


# Training as usual.


@pytest.mark.parametrize("kind", ["MeanKL", "MeanVar"])
def test_a_model_of_layers_is_exported(tmp_path, kind):
    model = keras.Sequential(
        [
            layers.Input((5, 5, 1)),
            getattr(tfmiracle, f"{kind}Conv2D")(2, 3, activation="relu", seed=1),
            layers.Flatten(),
            getattr(tfmiracle, f"{kind}Dense")(3, seed=2),
        ]
    )
    model.export(tmp_path / "saved_model", verbose=False)
    served = tf.saved_model.load(tmp_path / "saved_model")
    x = batch((5, 5, 1))
    np.testing.assert_allclose(served.serve(x), model(x), rtol=1e-6, atol=1e-7)


def image_net(**options):
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            tfmiracle.MeanKLConv2D(4, 3, activation="relu", seed=1, **options),
            layers.BatchNormalization(),
            layers.Flatten(),
            tfmiracle.MeanKLDense(2, seed=2, **options),
        ]
    )


def stripes(n=64):
    """Horizontal or vertical."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 2, n)
    x = rng.normal(0, 0.2, (n, 6, 6, 1)).astype(np.float32)
    x[y == 0, ::2] += 1
    x[y == 1, :, ::2] += 1
    return x, y


def test_a_convolutional_network_learns():
    model = image_net()
    model.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = stripes()
    history = model.fit(x, y, epochs=12, batch_size=32, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    _, accuracy = model.evaluate(x, y, verbose=0)
    assert accuracy > 0.9
    for posterior, _ in posteriors(model):
        np.testing.assert_allclose(posterior.block_kl(), 20 * LN2, rtol=2e-6)
        # One draw for each of the 24 steps.
        assert posterior.noise_seed.state.numpy()[1] == 24
    assert model.layers[1].moving_mean.numpy().any()


def test_calls_and_gradients_in_xla():
    layer = tfmiracle.MeanKLDense(2, block_size=4, seed=1)
    x = batch((5,))
    layer.build(x.shape)
    step = tf.function(lambda: gradients(layer, x), jit_compile=True)
    results = []
    for _ in range(4):
        results.append(step())
        layer.block_posterior.tau.assign_add(tf.ones([3, 4]))
    for a, b in zip(*results[:2], strict=True):
        assert np.all(np.isfinite(a)) and np.any(a) and np.any(a != b)
    assert layer.block_posterior.noise_seed.state.numpy()[1] == 4
    mean = tf.function(lambda: layer(x, training=False), jit_compile=True)
    np.testing.assert_allclose(mean(), layer(x), rtol=1e-5, atol=1e-6)


STEPS = """
import keras, numpy as np, tensorflow as tf
import tfmiracle

layer = tfmiracle.MeanKLDense(2, block_size=4, seed=1)
x = tf.ones([3, 5])
layer.build(x.shape)
variables = layer.trainable_variables


@tf.function(jit_compile=True)
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x, training=True) ** 2)
    return tape.gradient(loss, [v.value for v in variables])


counts = []
for _ in range(4):
    step()
    counts.append(compiled())
    layer.block_posterior.tau.assign_add(tf.ones([3, 4]))
print(counts)
"""


def test_a_step_in_xla_is_compiled_once(tmp_path):
    """Which the gradients of some operations would prevent."""
    process = run_python(COUNT_COMPILED + STEPS, tmp_path)
    assert process.returncode == 0, process.stderr
    first, *later = json.loads(process.stdout.splitlines()[-1])
    assert first > 0 and later == [first] * 3


@pytest.mark.slow
def test_fit_in_xla():
    model = keras.Sequential(
        [keras.Input((5,)), tfmiracle.MeanKLDense(2, kl_bits=99, seed=1)]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=True)
    x = batch((5,), 16)
    losses = model.fit(x, x[:, :2], epochs=100, verbose=0).history["loss"]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert model.layers[0].block_posterior.noise_seed.state.numpy()[1] == 100


# What a layer shows to Keras.


def test_toggling_trainable_brings_no_kernel_back():
    model = image_net()
    names = [v.path for v in model.trainable_variables]
    kernels = {id(v) for _, vs in posteriors(model) for v in vs}
    for switched in (model, *model.layers):
        switched.trainable = False
        assert not switched.trainable_variables
        switched.trainable = True
        assert [v.path for v in model.trainable_variables] == names
    assert not kernels & {id(v) for v in model.trainable_variables}
    assert kernels <= {id(v) for v in model.non_trainable_variables}


def test_a_layer_made_untrainable_can_be_trained_later(eager):
    layer = tfmiracle.MeanKLDense(2, trainable=False, seed=1)
    x = batch((5,))
    assert layer(x, training=True).shape == (4, 2)
    assert not layer.trainable_variables
    layer.trainable = True
    assert len(gradients(layer, x)) == 3
    assert [v.name for v in layer.coded_variables] == ["kernel", "bias"]


def test_set_weights_and_restart_from_them(eager):
    layer = tfmiracle.MeanKLDense(3, block_size=4, seed=1)
    x = batch((5,))
    layer.build(x.shape)
    for v in layer.coded_variables:
        v.assign(np.random.default_rng(5).normal(0, 0.5, v.shape))
    kernel, bias = (v.numpy() for v in layer.coded_variables)
    layer.initialize_posterior()
    assert np.abs(layer(x) - (x @ kernel + bias)).max() < 0.01
    rms = np.sqrt(np.mean(np.concatenate([kernel.ravel(), bias]) ** 2))
    np.testing.assert_allclose(layer.block_posterior.coding_scale, rms, rtol=1e-5)
    layer.initialize_posterior(warm=False)
    np.testing.assert_allclose(
        layer.block_posterior.coding_scale, math.exp(-2), rtol=1e-6
    )


def test_without_a_bias(eager):
    layer = tfmiracle.MeanKLDense(2, use_bias=False, seed=1)
    layer(batch((5,)))
    assert layer.posterior.event_shape == [10]


def test_regularizers_see_the_sample_and_activities_count(eager):
    layer = tfmiracle.MeanKLDense(
        2,
        kernel_regularizer=keras.regularizers.L2(1.0),
        bias_regularizer=keras.regularizers.L1(100.0),
        activity_regularizer=keras.regularizers.L1(1.0),
        use_bias=True,
        seed=1,
    )
    x = batch((5,))
    y = layer(x)
    kernel, bias = layer.block_posterior(training=False)
    sizes = [np.sum(kernel**2), *(np.sum(np.abs(v)) for v in (bias, y))]
    expected = [sizes[0], 100 * sizes[1], sizes[2] / len(x)]
    np.testing.assert_allclose(layer.losses, expected, rtol=1e-5)
    layer(x, training=True)
    assert len(layer.losses) == 3
    assert layer.losses[0] != expected[0]


def test_a_shared_layer_draws_for_each_call(eager):
    layer = tfmiracle.MeanKLDense(2, seed=1)
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [layer(inputs), layer(inputs)])
    first, second = model(batch((5,)), training=True)
    assert not np.any(first == second)
    first, second = model(batch((5,)))
    np.testing.assert_array_equal(first, second)
    assert len(posteriors(model)) == 1


def test_prediction_leaves_no_trace(eager):
    layer = tfmiracle.MeanKLDense(2, seed=1)
    x = batch((5,))
    expected = layer(x)
    before = [v.numpy() for v in layer.variables]
    np.testing.assert_array_equal(layer(x, training=False), expected)
    output, state = layer.stateless_call(
        layer.trainable_variables, layer.non_trainable_variables, x, training=False
    )
    np.testing.assert_array_equal(output, expected)
    for v, value in zip(layer.variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)
    for v, value in zip(layer.non_trainable_variables, state, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)


def test_masks_pass_through(eager):
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            tfmiracle.MeanKLEmbedding(11, 3, mask_zero=True, seed=1),
            tfmiracle.MeanKLDense(2, seed=2),
            layers.GlobalAveragePooling1D(),
        ]
    )
    x = np.array([[1, 2, 0, 0]])
    unmasked = model.layers[1](model.layers[0](x)).numpy()
    np.testing.assert_allclose(model(x)[0], unmasked[0, :2].mean(0), rtol=1e-6)


# Seeds.


def test_without_a_seed_keras_own_seed_decides(eager):
    def run(seed):
        keras.utils.set_random_seed(seed)
        made = [tfmiracle.MeanKLDense(2) for _ in range(2)]
        x = batch((5,))
        return [layer(x, training=True).numpy() for layer in made]

    first, again, other = run(1), run(1), run(2)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.any(a == c)
    # Of the noise alone, which layers of equal shapes must not have in common.
    made = [tfmiracle.MeanKLDense(2) for _ in range(5)]
    for layer in made:
        layer.build((None, 5))
        assert layer.block_posterior.layout.seed == 0
        assert layer.get_config()["seed"] is None
    assert len({int(m.block_posterior.noise_seed.state[0]) for m in made}) == 5


def test_a_given_seed_decides(eager):
    def draw(seed):
        layer = tfmiracle.MeanKLDense(2, kernel_initializer="ones", seed=seed)
        return layer(batch((5,)), training=True).numpy()

    np.testing.assert_array_equal(draw(3), draw(3))
    assert not np.any(draw(3) == draw(4))


# Weights into layers built anew.


def layer_net(kind="KL", **options):
    layer = getattr(tfmiracle, f"Mean{kind}Dense")(
        8, **{"block_bits": 8, "block_size": 10, **options}
    )
    return keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(2)])


def weight_file(model, folder, shards):
    name = "x.weights.json" if shards else "x.weights.h5"
    model.save_weights(folder / name, **shards)
    return folder / name


WAYS = {
    "file": lambda one, other, d: other.load_weights(weight_file(one, d, {})),
    "shards": lambda one, other, d: other.load_weights(
        weight_file(one, d, {"max_shard_size": 1e-6})
    ),
    "model": lambda one, other, d: other.set_weights(one.get_weights()),
    "layer": lambda one, other, d: other.layers[0].set_weights(
        one.layers[0].get_weights()
    ),
    "checkpoint": lambda one, other, d: tf.train.Checkpoint(model=other).restore(
        tf.train.Checkpoint(model=one).save(d / "checkpoint")
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_fit_layers_built_anew(way, eager, tmp_path):
    one, other, x = layer_net(), layer_net(), batch((5,))
    fix_all(one)
    WAYS[way](one, other, tmp_path)
    np.testing.assert_array_equal(one.layers[0](x), other.layers[0](x))
    assert other.layers[0].block_posterior.fixed.all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [{"seed": 3}, {"kl_bits": 7}, {"log_scale_rate": 2.0}, {"codebook": "per_block"}],
)
def test_weights_of_another_posterior_are_refused(way, options, eager, tmp_path):
    one, other = layer_net(), layer_net(**options)
    before = other.layers[0](batch((5,))).numpy()
    with pytest.raises(ValueError, match=r"mean_kl_dense.*another posterior.*`seed`"):
        WAYS[way](one, other, tmp_path)
    if way == "file":  # nothing of it is there
        np.testing.assert_array_equal(other.layers[0](batch((5,))), before)


def test_weights_of_a_model_whose_layout_is_another_are_refused(eager):
    def model(**options):
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="one")])
        return tfmiracle.VariationalModel(net, block_size=6, block_bits=8, **options)

    weights = model().get_weights()
    model().set_weights(weights)
    of_training = MeanKL(annealing_steps=5)
    model(parameterization=of_training, l2=1.0).set_weights(weights)
    for other in (
        {"seed": 1},
        {"rules": {"one/bias": "own_scale"}},
        {"parameterization": MeanKL(quota_rate=2.0)},
    ):
        with pytest.raises(ValueError, match=r"another posterior|shape"):
            model(**other).set_weights(weights)


def test_means_of_weights_keep_the_fingerprint(eager):
    weights = [layer_net().get_weights() for _ in range(3)]
    for shares in ((1 / 3, 1 / 3, 1 / 3), (0.1, 0.2, 0.7)):
        for dtype in (np.float32, np.float64):
            mean = [
                sum(dtype(s) * v.astype(dtype) for s, v in zip(shares, values))
                for values in zip(*weights, strict=True)
            ]
            layer_net().set_weights(mean)


# Subclasses.


@keras.saving.register_keras_serializable("test_layers")
class Doubled(tfmiracle.MeanKLDense):
    def __init__(self, factor=2.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs, training=None):
        return self.factor * super().call(inputs, training=training)

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


@keras.saving.register_keras_serializable("test_layers")
class MeanKLPReLU(MeanKLLayer, layers.PReLU):
    """A layer of the user's, from the mixin."""


def test_users_may_subclass(tmp_path, eager):
    model = keras.Sequential(
        [keras.Input((5,)), Doubled(units=3, seed=1), MeanKLPReLU(seed=2, block_size=2)]
    )
    x = batch((5,))
    kernel, bias = model.layers[0].block_posterior(training=False)
    (alpha,) = model.layers[1].block_posterior(training=False)
    y = 2 * (x @ kernel + bias)
    expected = np.where(y > 0, y, alpha * y)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
    assert len(model.trainable_variables) == 6
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[0], Doubled)
    np.testing.assert_array_equal(loaded(x), model(x))


def test_embeddings_are_not_compiled_for_each_length(monkeypatch):
    values, traces = BlockPosterior._values, []

    def traced(*arguments):
        traces.append(arguments)
        return values(*arguments)

    monkeypatch.setattr(BlockPosterior, "_values", traced)
    model = keras.Sequential(
        [
            layers.Input((None,), dtype="int32"),
            tfmiracle.MeanKLEmbedding(11, 4, block_size=5),
            layers.GlobalAveragePooling1D(),
        ]
    )
    model.compile("sgd", "mse")
    count = []
    for length in range(3, 8):
        model.train_on_batch(np.ones((2, length), np.int32), np.zeros((2, 4)))
        count.append(len(traces))
    assert count == 5 * count[:1]


# Errors.


def test_before_it_is_built():
    layer = tfmiracle.MeanKLDense(2, name="mine")
    for use in (
        lambda: layer.posterior,
        lambda: layer.prior,
        lambda: layer.initialize_posterior(),
    ):
        with pytest.raises(ValueError, match="'mine' has no weights yet"):
            use()
    assert layer.coded_variables == []
