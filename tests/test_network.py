"""Between Keras models and files, in both directions."""

import json

import keras
import numpy as np
import pytest
import reference_decoder2
import tensorflow as tf
from keras import layers
from support import DEFAULTS, batch, fix_all, run_python

import tfmiracle
from tfmiracle.codec import keras_json
from tfmiracle.decoder import decode
from tfmiracle.hosts.layers import MeanKLLayer
from tfmiracle.hosts.loading import build_network, load, to_network
from tfmiracle.hosts.models import plain_weights, posteriors
from tfmiracle.hosts.network import (
    check_network,
    plain_architecture,
    round_stored,
    to_file,
)
from tfmiracle.keras_internals import walk
from tfmiracle.miracle_file import FileFormatError, Levels, MiracleFile

pytestmark = pytest.mark.usefixtures("eager")


def small_net(**kwargs):
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(5, "relu"), layers.Dense(3)], **kwargs
    )


def variational(net, **kwargs):
    return tfmiracle.VariationalModel(
        net, **{"block_size": 16, "block_bits": 8, **kwargs}
    )


def through_file(model, tmp_path, **kwargs):
    path = tmp_path / "net.miracle"
    to_file(model).write(path)
    return load(path, **kwargs)


def arrays(variables):
    return [keras.ops.convert_to_numpy(v) for v in variables]


def assert_equal_arrays(ones, others):
    for a, b in zip(ones, others, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def nested_net():
    """A functional model in a Sequential one, with variational layers in both."""
    options = {"block_size": 8, "block_bits": 8, "codebook": "shared"}
    x = inputs = layers.Input((8, 8, 1))
    x = tfmiracle.MeanKLConv2D(4, 3, activation="relu", strides=2, **options)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Add()([x, tfmiracle.MeanKLSeparableConv2D(4, 1, **options)(x)])
    inner = keras.Model(inputs, x, name="inner")
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            inner,
            layers.Flatten(),
            layers.Dropout(0.5),
            tfmiracle.MeanKLDense(3, kernel_regularizer="l2", **options),
            layers.Dense(2),
        ],
        name="outer",
    )


def test_variational_layers_become_those_of_keras():
    net = nested_net()
    architecture = plain_architecture(net)
    text = json.dumps(architecture)
    for word in ("tfmiracle", "MeanKL", "block_size", "codebook", "log_scale"):
        assert word not in text
    plain = build_network(architecture)
    types = [type(layer) for layer in walk(plain) if layer is not plain]
    for layer in (layers.Conv2D, layers.SeparableConv2D, layers.Dense):
        assert layer in types
    assert all(t.__module__.startswith("keras.") for t in types)
    assert [v.shape for v in plain.weights] == [v.shape for v in plain_weights(net)]
    assert len(plain.weights) == 2 + 4 + 3 + 2 + 2
    # What is not variational about the layers is kept.
    config = plain.get_layer("inner").layers[1].get_config()
    assert (config["strides"], config["activation"]) == ((2, 2), "relu")
    assert plain.layers[-2].kernel_regularizer is not None
    assert plain.layers[-3].rate == 0.5


def test_a_wrapped_model_becomes_itself():
    keras.backend.clear_session()  # so that Keras numbers from the start
    net = small_net()
    expected = keras.saving.serialize_keras_object(net)
    expected.pop("compile_config", None)
    # What Keras finds anew when it makes the network again.
    for layer in (expected, *expected["config"]["layers"]):
        layer.pop("build_config", None)
    for model in (net, variational(net), keras.Sequential([net])):
        architecture = plain_architecture(model)
        if not isinstance(model, keras.Sequential) or model is net:
            assert json.dumps(architecture) == json.dumps(expected)
    wrapped = keras.Sequential([layers.Input((6,)), variational(net)])
    plain = build_network(plain_architecture(wrapped))
    assert [type(layer) for layer in plain.layers] == [keras.Sequential]


def test_a_file_does_not_depend_on_what_was_built_before():
    def make():
        keras.utils.set_random_seed(1)
        x = layers.Input((8, 8, 3))
        y = layers.BatchNormalization()(layers.Conv2D(4, 3)(x))
        inner = keras.Sequential([layers.Flatten(), layers.Dense(5), layers.Dense(5)])
        y = inner(y)
        # Named like something that Keras numbers.
        shared, other = layers.Dense(5), layers.Dense(5, name="sum_1")
        sums = layers.Add()([shared(layers.Softmax()(y)), shared(y), other(y)])
        return keras.Model(x, [sums, y])

    nets = []
    for _ in range(2):
        keras.utils.clear_session()  # or Keras numbers on
        nets.append(make())
    models = [fix_all(variational(net)) for net in nets]
    for model in models:
        round_stored(model)
    files = [to_file(model) for model in models]
    assert files[0].to_bytes() == files[1].to_bytes()
    assert files[0].names == [
        "conv2d/kernel",
        "conv2d/bias",
        "batch_normalization/gamma",
        "batch_normalization/beta",
        "batch_normalization/moving_mean",
        "batch_normalization/moving_variance",
        "sequential/dense/kernel",
        "sequential/dense/bias",
        "sequential/dense_1/kernel",
        "sequential/dense_1/bias",
        "dense_2/kernel",
        "dense_2/bias",
        "sum_1/kernel",
        "sum_1/bias",
    ]
    loaded = to_network(decode(files[1]))
    x = batch((8, 8, 3))
    for a, b in zip(loaded(x), fix_all(variational(nets[1])).materialize()(x)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", [["dense_1", "dense_2"], ["dense_9", "dense_7"]])
def test_names_are_those_that_the_layers_have(names, tmp_path):
    """Also where Keras could have given them: nobody can tell, and users go by them."""
    x = layers.Input((4,), name="input_3")
    inner = keras.Sequential(
        [layers.Input((4,)), layers.Dense(4, name="encoder_2")], name="sequential_5"
    )
    outputs = [layers.Dense(i, name=name)(inner(x)) for i, name in enumerate(names, 2)]
    net = keras.Model(x, outputs, name="net")
    model = fix_all(variational(net, rules={"encoder_2/bias": "store=float16"}))
    file = to_file(model)
    assert file.names == [
        f"{layer}/{name}"
        for layer in ("sequential_5/encoder_2", *names)
        for name in ("kernel", "bias")
    ]
    assert file.metadata["rules"] == {"encoder_2/bias": "store=float16"}
    loaded = through_file(model, tmp_path)
    assert [layer.name for layer in loaded.layers] == [v.name for v in net.layers]
    assert loaded.output_names == names
    for name, width in zip(names, (2, 3), strict=True):
        assert loaded.get_layer(name).units == width
    loaded.compile("adam", dict.fromkeys(names, "mse"))
    # What `info` prints serves as a rule.
    again = variational(net, rules=dict.fromkeys(file.names[-2:], "store"))
    assert len(to_file(fix_all(again)).stored) == 2


def test_rules_in_the_file_are_below_the_name_of_the_model():
    net = keras.Sequential([layers.Input((6,)), layers.Dense(3, name="out")])
    rules = {f"{net.name}/out/bias": "store"}
    file = to_file(fix_all(variational(net, rules=rules)))
    assert file.metadata["rules"] == {"out/bias": "store"}


def test_dicts_of_inputs_and_outputs_keep_their_layers():
    layers.Input((4,))  # takes the name that Keras gives first
    a, b = layers.Input((4,)), layers.Input((4,))
    hidden = layers.Dense(5)(layers.Subtract()([a, b]))
    net = keras.Model({"a": a, "b": b}, {"p": layers.Dense(2)(hidden), "q": hidden})
    loaded = to_network(decode(to_file(fix_all(variational(net)))))
    x = {"a": batch((4,)), "b": 2 * batch((4,))}
    expected = fix_all(variational(net)).materialize()(x)
    for name, value in loaded(x).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)


def test_an_adapted_normalization_is_decoded(tmp_path, eager):
    x = np.random.default_rng(0).normal(5, 3, (50, 4)).astype(np.float32)
    normalization = layers.Normalization()
    normalization.adapt(x)
    given = layers.Normalization(mean=2.0, variance=3.0)
    net = keras.Sequential([layers.Input((4,)), normalization, given, layers.Dense(3)])
    model = fix_all(variational(net))
    loaded = to_network(decode(to_file(model)))
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-4, atol=1e-5)
    copy = check_network(net, x)
    np.testing.assert_allclose(copy(x), net(x), rtol=1e-4, atol=1e-5)


def test_compile_settings_do_not_go_into_the_file():
    net = small_net()
    before = json.dumps(plain_architecture(net))
    net.compile("adam", "mse", metrics=["mae"])
    assert json.dumps(plain_architecture(net)) == before


def test_a_decoded_model_computes_what_the_coded_one_did(tmp_path):
    for model in (fix_all(nested_net()), fix_all(variational(nested_net()))):
        x = batch((8, 8, 1))
        round_stored(model)
        decoded = through_file(model, tmp_path)
        np.testing.assert_allclose(decoded(x), model(x), rtol=1e-5, atol=1e-6)
        values = {id(v): keras.ops.convert_to_numpy(v) for v in plain_weights(model)}
        for posterior, variables in posteriors(model):
            for v, value in zip(variables, posterior(training=False), strict=True):
                values[id(v)] = value.numpy()
        assert_equal_arrays(arrays(decoded.weights), values.values())
        (tmp_path / "net.miracle").unlink()


def test_names_are_paths_below_the_model():
    file = to_file(fix_all(variational(small_net(name="some_name"))))
    assert [name.rpartition("/")[2] for name in file.names] == ["kernel", "bias"] * 2
    assert not any("some_name" in name for name in file.names)


def test_equal_paths_get_different_names():
    twin = [keras.Sequential([layers.Input((4,)), layers.Dense(4, name="a")], name="s")]
    twin.append(keras.models.clone_model(twin[0]))
    x = inputs = layers.Input((4,))
    for part in twin:
        x = part(x)
    twin[1].name = "s2"  # Keras wants different names at one time only
    net = keras.Model(inputs, x)
    model = fix_all(variational(net))
    names = to_file(model).names
    assert len(set(names)) == len(names) == 4
    assert sum(name.endswith("#2") for name in names) == 2


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Composite(layers.Layer):
    """Makes layers whose names are not in its configuration."""

    def build(self, input_shape):
        self.parts = [layers.Dense(6), layers.Dense(6)]
        for part in self.parts:
            part.build(input_shape)

    def call(self, x):
        return self.parts[1](keras.ops.tanh(self.parts[0](x)))


def test_loading_after_other_models_were_built(tmp_path):
    """Keras numbers layers anew; nothing may depend on the numbers."""
    net = keras.Sequential([layers.Input((6,)), Composite(), small_net()])
    model = fix_all(variational(net, rules={"*/kernel": "hash=2"}))
    x = batch((6,))
    first = through_file(model, tmp_path)
    for _ in range(3):
        small_net()
    again = load(tmp_path / "net.miracle")
    keras.utils.clear_session()
    small_net()
    last = load(tmp_path / "net.miracle")
    np.testing.assert_allclose(first(x), model(x), rtol=1e-5, atol=1e-6)
    for other in (again, last):
        assert_equal_arrays(arrays(first.weights), arrays(other.weights))
        np.testing.assert_array_equal(first(x), other(x))


def test_state_of_batch_normalization_comes_back_exactly(tmp_path):
    norm = layers.BatchNormalization()
    net = keras.Sequential([layers.Input((6,)), layers.Dense(5), norm])
    rng = np.random.default_rng(1)
    norm.set_weights([rng.gamma(2.0, size=5) for _ in range(4)])
    mean, variance = (v.numpy() for v in (norm.moving_mean, norm.moving_variance))
    rules = {"moving_*": "store"}
    decoded = through_file(fix_all(variational(net, rules=rules)), tmp_path)
    np.testing.assert_array_equal(decoded.layers[-1].moving_mean, mean)
    np.testing.assert_array_equal(decoded.layers[-1].moving_variance, variance)


@pytest.mark.parametrize(
    "rules, levels", [(None, 127), ({"moving_*": "store=5bit"}, 31)]
)
@pytest.mark.parametrize("wrap", [True, False])
def test_statistics_are_rounded_to_levels(tmp_path, wrap, rules, levels):
    norm = layers.BatchNormalization()
    dense = layers.Dense(5) if wrap else tfmiracle.MeanKLDense(5)
    net = keras.Sequential([layers.Input((6,)), dense, norm])
    rng = np.random.default_rng(1)
    norm.set_weights([rng.gamma(2.0, size=5) for _ in range(4)])
    mean, variance = (v.numpy() for v in (norm.moving_mean, norm.moving_variance))
    if not wrap and rules:
        return  # only a VariationalModel has rules
    model = fix_all(variational(net, rules=rules) if wrap else net)
    round_stored(model)
    for v, before, most in (
        (norm.moving_mean, mean, 15 if rules else 127),
        (norm.moving_variance, variance**0.5, levels),
    ):
        now = v.numpy()
        now = now**0.5 if v is norm.moving_variance else now
        error = np.max(np.abs(now - before)) * most / np.max(before)
        assert 0 < error < 0.51
    decoded = through_file(model, tmp_path)
    assert_equal_arrays(
        arrays(decoded.layers[-1].weights)[2:], arrays(norm.weights)[2:]
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rule", ["store=float16", "store=4bit", "store=8bit", "store"])
def test_what_is_stored_in_fewer_bits_is_so_in_the_model(tmp_path, rule, dtype):
    parts = layers.Dense(5, dtype=dtype), layers.BatchNormalization(dtype=dtype)
    net = keras.Sequential([layers.Input((6,)), *parts, layers.Dense(3)])
    rng = np.random.default_rng(1)
    for v in net.weights[1:-2]:
        v.assign(rng.gamma(2.0, size=5))
    rules = {"dense*/bias": rule, "*/beta": rule, "moving_*": rule}
    model = fix_all(variational(net, rules=rules))
    round_stored(model)
    decoded = through_file(model, tmp_path)
    assert_equal_arrays(arrays(decoded.weights), arrays(model.materialize().weights))


def nets_of_many_kinds():
    def stack(shape, *parts):
        return keras.Sequential([layers.Input(shape), *parts])

    keras.utils.clear_session()  # or Keras numbers on
    yield nested_net()
    keras.utils.clear_session()
    yield stack((5, 2), layers.Bidirectional(layers.LSTM(3)), layers.Dense(3, "gelu"))
    keras.utils.clear_session()
    yield stack((5, 2), layers.TimeDistributed(layers.Dense(3)), layers.GRU(4))
    keras.utils.clear_session()
    x = layers.Input((5,), dtype="int32")
    h = layers.Embedding(10, 8, mask_zero=True)(x)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    yield keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    keras.utils.clear_session()
    a, b = layers.Input((4,), name="a"), layers.Input((4,), name="b")
    shared = layers.Dense(5, kernel_regularizer="l2", bias_initializer="ones")
    yield keras.Model({"a": a, "b": b}, [shared(a) + shared(b), shared(b)])


@pytest.mark.parametrize("kind", range(5))
def test_a_short_description_says_the_same(kind):
    net = list(nets_of_many_kinds())[kind]
    architecture = plain_architecture(net)
    short = keras_json.shorten(architecture)
    assert len(json.dumps(short)) < len(json.dumps(architecture)) / 3.5
    long, names = keras_json.lengthen(short)
    assert long == architecture
    assert reference_decoder2.lengthen(short, DEFAULTS) == (architecture, names)
    again = build_network(long)
    assert plain_architecture(again) == architecture
    shapes = [v.shape for v in plain_weights(net)]
    assert [v.shape for v in again.weights] == shapes


def test_a_file_without_its_architecture(tmp_path):
    def make(activation="relu", name=None):
        keras.utils.clear_session()  # the names of layers are part of it
        first = layers.Dense(5, activation)
        norm = layers.BatchNormalization()
        parts = [layers.Input((6,)), first, norm, layers.Dense(3)]
        return keras.Sequential(parts, name=name)

    model = fix_all(variational(make()))
    round_stored(model)
    whole, path = to_file(model), tmp_path / "net.miracle"
    file = to_file(model, architecture=False)
    file.write(path)
    assert file.architecture is None and list(file.names) == list(whole.names)
    assert path.stat().st_size < len(whole.to_bytes())
    expected = decode(whole).weights
    for name, value in decode(path).weights.items():
        np.testing.assert_array_equal(value, expected[name])
    with pytest.raises(ValueError, match=r"load\(path, model=network\)"):
        load(path)
    fewer = keras.Sequential([layers.Input((6,)), *make().layers[:-1]])
    for wrong in (make("tanh"), fewer):
        with pytest.raises(ValueError, match="is not the network of the file"):
            load(path, model=wrong)
    whole.write(tmp_path / "whole.miracle")
    for source in (path, tmp_path / "whole.miracle"):
        net = make(name="another")
        assert load(source, model=net) is net
        assert_equal_arrays(arrays(net.weights), expected.values())
        with pytest.raises(ValueError, match="not the network of the file"):
            load(source, model=make("tanh"))


def test_frozen_and_stored_variables_come_back_exactly(tmp_path):
    net = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Normalization(axis=-1),
            layers.Dense(5, name="frozen", trainable=False),
            layers.Dense(4, name="coded", bias_initializer="normal"),
            layers.Dense(3, name="last"),
        ]
    )
    net.layers[0].adapt(batch((6,)))
    model = variational(net, rules={"coded/bias": "store"})
    file = to_file(fix_all(model))
    treatment = {n.rpartition("/")[2]: [] for n in file.names}
    for name, place in zip(file.names, file.coded, strict=True):
        treatment[name.rpartition("/")[2]].append(place is not None)
    assert treatment["kernel"] == [False, True, True]
    assert treatment["bias"] == [False, False, True]
    decoded = through_file(model, tmp_path)
    assert decoded.get_layer("frozen").trainable is False
    for name, place in zip(file.names, file.coded, strict=True):
        if place is None:
            index = list(file.names).index(name)
            np.testing.assert_array_equal(net.weights[index], decoded.weights[index])
    assert np.abs(decoded.get_layer("coded").bias.numpy()).min() > 0


@pytest.mark.parametrize(
    "policy, stored_as",
    [
        ("mixed_float16", "float32"),
        ("mixed_bfloat16", "float32"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("float64", "float64"),
    ],
)
def test_dtype_policies_come_back(tmp_path, policy, stored_as):
    norm = layers.BatchNormalization(dtype=policy)
    net = keras.Sequential([layers.Input((6,)), layers.Dense(5, dtype=policy), norm])
    norm.set_weights([np.linspace(0.1, 3, 5)] * 4)
    model = fix_all(variational(net, rules={"*/gamma": "store"}))
    round_stored(model)
    stored = [v for v in to_file(model).stored if not isinstance(v, Levels)]
    assert {v.dtype.name for v in stored} == {stored_as}
    decoded = through_file(model, tmp_path)
    assert [layer.dtype_policy.name for layer in decoded.layers] == [policy] * 2
    assert_equal_arrays(arrays(decoded.layers[1].weights)[2:], arrays(norm.weights)[2:])
    assert_equal_arrays(arrays(decoded.layers[1].weights)[:1], arrays([norm.gamma]))
    values = model.block_posterior(training=False)
    for v, value in zip(decoded.layers[0].weights, values):
        # A coded float32 is rounded to the type of the variable, once.
        np.testing.assert_array_equal(v, keras.ops.cast(value, v.dtype))


@keras.saving.register_keras_serializable("tests_of_tfmiracle")
class Registered(layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


class Unregistered(layers.Dense):
    def call(self, inputs):
        return 3 * super().call(inputs)


def test_custom_layers(tmp_path):
    x = batch((6,))
    model = variational(keras.Sequential([layers.Input((6,)), Registered(3)]))
    decoded = through_file(fix_all(model), tmp_path)
    assert type(decoded.layers[0]) is Registered
    np.testing.assert_allclose(decoded(x), model(x), rtol=1e-6)

    (tmp_path / "net.miracle").unlink()
    with keras.saving.custom_object_scope({"Unregistered": Unregistered}):
        model = variational(keras.Sequential([layers.Input((6,)), Unregistered(3)]))
        to_file(fix_all(model)).write(tmp_path / "net.miracle")
    file = MiracleFile.read(tmp_path / "net.miracle")
    # As in a process that has not heard of the class.
    text = json.dumps(file.architecture).replace("test_network", "module_of_others")
    stranger = json.loads(text)
    with pytest.raises(ValueError, match=r"Unregistered.*custom_objects"):
        build_network(stranger)
    decoded = load(tmp_path / "net.miracle", {"Unregistered": Unregistered})
    np.testing.assert_allclose(decoded(x), model(x), rtol=1e-6)


def test_variational_layers_of_others_without_a_plain_layer_are_refused():
    @keras.saving.register_keras_serializable("tests_of_tfmiracle")
    class MeanKLRegistered(MeanKLLayer, Registered):
        pass

    net = keras.Sequential([layers.Input((6,)), MeanKLRegistered(3, block_bits=8)])
    with pytest.raises(ValueError, match=r"plain Keras layer.*MeanKLRegistered"):
        plain_architecture(net)


def test_lambda_layers_are_refused_before_training(tmp_path):
    net = keras.Sequential(
        [layers.Input((6,)), layers.Dense(3), layers.Lambda(lambda x: x + 1)]
    )
    with pytest.raises(ValueError, match=r"lambda in 'lambda'.* holds no code"):
        variational(net)
    parts = layers.Input((6,)), tfmiracle.MeanKLDense(3), layers.Flatten()
    model = keras.Sequential([*parts, layers.Lambda(lambda x: x + 1, name="more")])
    model.compile("adam", "mse")
    callback = tfmiracle.CompressionCallback(tmp_path / "net.miracle", verbose=0)
    with pytest.raises(ValueError, match=r"lambda in 'more'.* holds no code"):
        model.fit(batch((6,)), batch((3,)), verbose=0, callbacks=[callback])
    assert not model.layers[0].block_posterior.fixed.any()


@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"class_name": "Dense", "config": {"units": 3}, "module": "keras.layers"},
        {"class_name": "system", "module": "os", "config": {"command": "true"}},
        {"class_name": "Sequential", "module": "keras", "config": None},
        {"class_name": "Sequential", "module": "keras", "config": {"layers": [7]}},
        {"class_name": "eval", "module": "builtins", "config": "1"},
    ],
)
def test_descriptions_of_no_network(architecture):
    with pytest.raises(ValueError, match="network"):
        build_network(architecture)


def test_subclassed_models_without_a_build_config_are_refused():
    @keras.saving.register_keras_serializable("tests_of_tfmiracle")
    class Subclassed(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

        def get_build_config(self):
            return None

    net = Subclassed()
    net(batch((6,)))
    with pytest.raises(ValueError, match="get_build_config"):
        build_network(plain_architecture(net))


def test_files_whose_weights_do_not_fit_are_refused():
    file = to_file(fix_all(variational(small_net())))
    decoded = decode(file)
    name = next(iter(decoded.weights))
    decoded.weights[name] = decoded.weights[name].T
    with pytest.raises(FileFormatError, match="do not fit"):
        to_network(decoded)
    del decoded.weights[name]
    with pytest.raises(FileFormatError, match="do not fit"):
        to_network(decoded)


def test_only_models_whose_blocks_are_all_coded_make_a_file():
    model = variational(small_net(), block_size=10)
    count = model.block_posterior.layout.num_blocks
    with pytest.raises(ValueError, match=f"{count} of {count} blocks"):
        to_file(model)
    model.block_posterior.finalize_coding_scale()
    model.block_posterior.fix([0, 2], [1, 255])
    with pytest.raises(ValueError, match=f"{count - 2} of {count} blocks"):
        to_file(model)
    with pytest.raises(ValueError, match="nothing to code"):
        to_file(small_net())


def test_variables_of_other_types_are_refused():
    @keras.saving.register_keras_serializable("tests_of_tfmiracle")
    class Strings(layers.Layer):
        def build(self, shape):
            self.v = self.add_weight(shape=(), dtype="complex64", trainable=False)

        def call(self, x):
            return x

    net = keras.Sequential([layers.Input((6,)), layers.Dense(3), Strings()])
    with pytest.raises(ValueError, match="complex64"):
        to_file(fix_all(variational(net)))


class Part(layers.Layer):
    """What the network of a file cannot have, by name."""

    def __init__(self, fault, **kwargs):
        super().__init__(**kwargs)
        self.fault = fault

    def build(self, shape):
        if self.fault == "tf.Variable":
            self.hidden = tf.Variable(tf.ones(shape[-1]))
        elif self.fault == "list of tf.Variable":
            self.hidden = [tf.Variable(1.0)]
        elif self.fault == "dict of tf.Variable":
            self.hidden = {"a": tf.Variable(1.0)}
        elif self.fault == "complex64":
            self.add_weight(shape=(), dtype="complex64", trainable=False)
        elif self.fault == "not finite":
            weight = self.add_weight(shape=(2,), name="mask", trainable=False)
            weight.assign([0, -np.inf])

    def call(self, x):
        return x

    def get_config(self):
        config = {"fault": self.fault}
        if self.fault == "infinity":
            config["limit"] = np.inf
        return {**super().get_config(), **config}

    @classmethod
    def from_config(cls, config):
        return cls(config["fault"], name=config["name"])


@pytest.mark.parametrize(
    "fault, message",
    [
        ("tf.Variable", "`hidden` of layer 'part' is a tf.Variable.*`add_weight`"),
        ("list of tf.Variable", "`hidden` of layer 'part' is a tf.Variable"),
        ("dict of tf.Variable", "`hidden` of layer 'part' is a tf.Variable"),
        ("complex64", "part/variable.* has dtype complex64"),
        ("not finite", "part/mask holds values that are not finite.*freeze"),
        ("infinity", "configuration of 'net' cannot be written as JSON"),
    ],
)
def test_what_a_file_cannot_hold_shows_before_training(fault, message, tmp_path):
    with keras.saving.custom_object_scope({"Part": Part}):
        parts = layers.Input((6,)), layers.Dense(3), Part(fault, name="part")
        net = keras.Sequential(parts, name="net")
        with pytest.raises(ValueError, match=message):
            check_network(variational(net))
        data = batch((6,)), batch((3,))
        with pytest.raises(ValueError, match=message):
            tfmiracle.compress(net, data, None, tmp_path / "file", loss="mse")
        model = variational(net)
        model.compile("adam", "mse")
        callback = tfmiracle.CompressionCallback(tmp_path / "file", verbose=0)
        with pytest.raises(ValueError, match=message):
            model.fit(*data, verbose=0, callbacks=[callback])
        assert not model.block_posterior.fixed.any()
    assert not list(tmp_path.iterdir())


def test_an_attribute_called_net_is_no_network(tmp_path):
    parts = [tfmiracle.MeanKLDense(3), tfmiracle.MeanKLDense(2)]
    model = keras.Sequential([layers.Input((6,)), *parts])
    for model.net in ("resnet", parts[1]):
        check_network(model)
    fix_all(model)
    assert_equal_arrays(
        through_file(model, tmp_path).get_weights(),
        [value for p, _ in posteriors(model) for value in arrays(p.values())],
    )


def test_vocabularies_must_be_arguments():
    def net(**kwargs):
        table = layers.IntegerLookup(output_mode="multi_hot", **kwargs)
        if not kwargs:
            table.adapt([3, 4, 5])
        parts = layers.Input((5,), dtype="int64"), table, layers.Dense(3)
        return variational(keras.Sequential(parts))

    check_network(net(vocabulary=[3, 4, 5]))
    with pytest.raises(ValueError, match=r"layer 'integer_lookup.*`vocabulary`"):
        check_network(net())
    with pytest.raises(ValueError, match=r"configuration of .* bytes as JSON; a file"):
        check_network(net(vocabulary=np.arange(600_000)))


@pytest.mark.parametrize("cls", [layers.StringLookup, layers.TextVectorization])
def test_a_vocabulary_that_was_set_later_is_refused(cls):
    table = cls(vocabulary=["a", "b"])
    inputs = layers.Input((1,), dtype="string")
    parts = inputs, table, layers.Embedding(9, 4), layers.Dense(3)
    model = variational(keras.Sequential(parts))
    check_network(model)
    table.set_vocabulary(["c", "d"])
    with pytest.raises(ValueError, match="`set_vocabulary`"):
        check_network(model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["norm/moving_mean", "out/bias"])
def test_stored_values_that_diverged_are_not_written(name, value):
    norm, out = layers.BatchNormalization(name="norm"), layers.Dense(3, name="out")
    net = keras.Sequential([layers.Input((6,)), layers.Dense(5), norm, out])
    model = fix_all(variational(net, rules={"out/bias": "store"}))
    (variable,) = (v for v in net.weights if v.path.endswith(name))
    variable.assign(np.full(variable.shape, value))
    with pytest.raises(ValueError, match=f"{name} holds values that are not finite"):
        to_file(model)
    (norm if "norm" in name else out).trainable = False
    stored = to_file(model).stored
    assert any(np.array_equal(v, variable, equal_nan=True) for v in stored)


def test_metadata_of_the_file():
    model = fix_all(variational(small_net(), kl_bits=6.5))
    assert to_file(model).metadata == {}
    assert to_file(model, {"mine": [1, 2]}).metadata == {"mine": [1, 2]}


EXPORTED = """
import keras, numpy as np, tensorflow as tf

folder = sys.argv[1] + "/"
x = np.load(folder + "x.npy")
np.save(folder + "keras.npy", keras.saving.load_model(folder + "net.keras")(x))
saved_model = tf.saved_model.load(folder + "net")
np.save(folder + "saved_model.npy", saved_model.serve(x))
interpreter = tf.lite.Interpreter(folder + "net.tflite")
interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], x.shape)
interpreter.allocate_tensors()
interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
interpreter.invoke()
output = interpreter.get_output_details()[0]["index"]
np.save(folder + "litert.npy", interpreter.get_tensor(output))
"""


@pytest.mark.slow
def test_exports_run_where_tfmiracle_is_not_installed(tmp_path):
    model = through_file(fix_all(nested_net()), tmp_path)
    x = batch((8, 8, 1))
    np.save(tmp_path / "x.npy", x)
    tf.config.run_functions_eagerly(False)
    model.save(tmp_path / "net.keras")
    model.export(tmp_path / "net", verbose=False)
    model.export(tmp_path / "net.tflite", format="litert", verbose=False)
    others = ["tfmiracle", "tensorflow_probability"]
    process = run_python(EXPORTED, tmp_path, without=others)
    assert process.returncode == 0, process.stderr[-2000:]
    for kind in ("keras", "saved_model", "litert"):
        result = np.load(tmp_path / f"{kind}.npy")
        np.testing.assert_allclose(result, model(x), rtol=1e-4, atol=1e-5)
