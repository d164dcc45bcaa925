"""Files from strangers: what loading refuses, what it costs, and what still loads."""

import copy
import json
import re

import keras
import numpy as np
import pytest
from keras import layers
from support import GOLDEN, run_python

import tfmiracle
from tfmiracle.decoder import DecodedNetwork
from tfmiracle.hosts import allowed, loading
from tfmiracle.hosts.loading import build_network, into_network, to_network
from tfmiracle.miracle_file import (
    FileFormatError,
)

pytestmark = pytest.mark.usefixtures("eager")


# Descriptions, as Keras writes them.


def thing(class_name, config=None, module="keras.layers", **other):
    return {
        "module": module,
        "class_name": class_name,
        "config": {} if config is None else config,
        "registered_name": None,
        **other,
    }


def function(module, name):
    return {
        "module": module,
        "class_name": "function",
        "config": name,
        "registered_name": name,
    }


def entry(shape, dtype="float32", **other):
    return thing("InputLayer", {"batch_shape": shape, "dtype": dtype, "name": "i"})


def sequential(*parts, shape=(None, 4), dtype="float32"):
    inputs = entry(list(shape), dtype)
    config = {"name": "s", "layers": [inputs, *parts], "build_input_shape": [*shape]}
    return thing("Sequential", config, "keras")


def dense(**config):
    return thing("Dense", {"name": "d", "units": 4, **config})


def tensor(layer="i", node=0):
    config = {"shape": [None, 4], "dtype": "float32", "keras_history": [layer, node, 0]}
    return {"class_name": "__keras_tensor__", "config": config}


def node(*args, **kwargs):
    return {"args": list(args), "kwargs": kwargs}


def functional(part, *nodes, shape=(None, 4), **other):
    """A model of one layer or operation, called once or several times."""
    inputs = {**entry(list(shape)), "name": "i", "inbound_nodes": []}
    part = {**part, "name": "n", "inbound_nodes": list(nodes), **other}
    part["config"] = {**part["config"], "name": "n"}
    config = {"name": "f", "layers": [inputs, part], "input_layers": [["i", 0, 0]]}
    config["output_layers"] = [["n", len(nodes) - 1, 0]]
    return thing("Functional", config, "keras.src.models.functional")


def operation(name, *nodes, module="numpy", shape=(None, 4), **config):
    part = thing(name, config, f"keras.src.ops.{module}")
    return functional(part, *(nodes or [node(tensor())]), shape=shape)


def constant(value, dtype="float32"):
    return {"class_name": "__numpy__", "config": {"value": value, "dtype": dtype}}


SET_FLOATX = function("keras.config", "set_floatx")
LAMBDA = {"class_name": "__lambda__", "config": {"code": "4wAA"}}
TFSM = thing("TFSMLayer", {"filepath": "somewhere"})

REFUSED = {
    # Functions where they are called while the graph is rebuilt.
    "Switch": operation("Switch", node(0, [SET_FLOATX], tensor()), module="core"),
    "Map": operation("Map", node(SET_FLOATX, tensor()), module="core"),
    "Cond": operation("Cond", node(tensor(), SET_FLOATX, SET_FLOATX), module="core"),
    "JVP": operation("JVP", node(SET_FLOATX, tensor(), tensor()), module="linalg"),
    "a function among arguments": operation("Add", node(SET_FLOATX, tensor())),
    "a layer among arguments": operation("Add", node(dense(), tensor())),
    "a call without tensors": operation("Full", node([10**10], 1.0)),
    "a call without arguments": operation("Full", {}),
    "calls that are none": functional(dense()) | {"inbound_nodes": 3},
    "a long list of indices": operation("Take", node(tensor(), [0] * 5000)),
    "a call as in HDF5 files": functional(dense(), [["i", 0, 0, {}]]),
    # Functions where none belongs, or others than activations.
    "activation": sequential(dense(activation=SET_FLOATX)),
    "activation that downloads": sequential(
        dense(activation=function("keras.utils", "get_file"))
    ),
    "activation that deserializes": sequential(
        dense(activation=function("keras.activations", "deserialize"))
    ),
    "loss as activation": sequential(dense(activation=function("builtins", "mse"))),
    "function as initializer": sequential(dense(kernel_initializer=SET_FLOATX)),
    "activation as initializer": sequential(
        dense(kernel_initializer=function("keras.activations", "relu"))
    ),
    "layer as initializer": sequential(dense(kernel_initializer=dense())),
    "initializer as regularizer": sequential(
        dense(kernel_regularizer=thing("Zeros", {}, "keras.initializers"))
    ),
    "function as dtype": sequential(dense(dtype=SET_FLOATX)),
    "function as scale": sequential(thing("Rescaling", {"scale": SET_FLOATX})),
    # Code.
    "Lambda": sequential(thing("Lambda", {"function": LAMBDA})),
    "Lambda, shape by code": sequential(
        thing("Lambda", {"function": "relu", "output_shape": LAMBDA})
    ),
    "Lambda of a function": sequential(thing("Lambda", {"function": SET_FLOATX})),
    "Lambda where it is defined": sequential(
        thing("Lambda", {"function": LAMBDA}, "keras.src.layers.core.lambda_layer")
    ),
    "code as activation": sequential(dense(activation=LAMBDA)),
    "pickles": sequential(thing("TorchModuleWrapper", {"module": "gAQu"})),
    "JAX": sequential(thing("JaxLayer", {"call_fn": SET_FLOATX})),
    "type of TensorFlow": sequential(
        dense(a={"class_name": "__typespec__", "config": [], "module": "os"})
    ),
    # Files.
    "SavedModel": sequential(TFSM),
    "SavedModel as activation": sequential(dense(activation=TFSM)),
    "SavedModel in a pipeline": sequential(thing("Pipeline", {"layers": [TFSM]})),
    "SavedModel where it is defined": sequential(
        thing("TFSMLayer", {"filepath": "x"}, "keras.src.export.tfsm_layer")
    ),
    "vocabulary": sequential(
        thing("StringLookup", {"vocabulary": "/etc/passwd"}), dtype="string"
    ),
    "vocabulary from the network": sequential(
        thing("IntegerLookup", {"vocabulary": "gs://bucket/file"}), dtype="int64"
    ),
    "vocabulary of texts": sequential(
        thing("TextVectorization", {"vocabulary": "/etc/passwd"}), dtype="string"
    ),
    # Other things than networks.
    "training": {**sequential(dense()), "compile_config": {"loss": SET_FLOATX}},
    "training of a part": sequential(
        {**sequential(dense()), "compile_config": {"optimizer": "adam"}}
    ),
    "optimizer": sequential(dense(a=thing("Adam", {}, "keras.optimizers"))),
    "metric": sequential(thing("Mean", {}, "keras.metrics")),
    "loss": sequential(thing("MeanSquaredError", {}, "keras.losses")),
    "function as a layer": sequential(thing("set_floatx", {}, "keras.config")),
    "other modules": sequential(thing("system", {"command": "true"}, "os")),
    "no module": sequential({"class_name": "Dense", "config": {"units": 4}}),
    "another registered name": sequential(dense() | {"registered_name": "Other"}),
    "ours": sequential(dense() | {"registered_name": "tfmiracle>MeanKLDense"}),
    "our own": thing("Sequential", {}, None, registered_name=allowed.OWN_SEQUENTIAL),
    "text as a constant": sequential(dense(a=constant(["a"], "U1000000000"))),
    "texts in a constant": sequential(dense(a=constant(["a"]))),
    "a list as a dtype": sequential(dense(a=constant([1], ["float32"]))),
    "further parts": sequential(dense() | {"spec_name": "a"}),
    "no configuration": sequential({"module": "keras.layers", "class_name": "Dense"}),
    "a class as a function": sequential(
        dense(activation=function("builtins", "test_loading>Scale"))
    ),
    "a class without a name": sequential({"class_name": 7, "config": {}}),
    "a long text": sequential(dense(name="d" * 5000)),
    "n-grams": sequential(thing("TextVectorization", {"ngrams": 10**9})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_keras_sees_it(name, monkeypatch):
    def deserialize(*args, **kwargs):
        raise AssertionError("Keras sees it")

    monkeypatch.setattr(keras.saving, "deserialize_keras_object", deserialize)
    with pytest.raises(ValueError, match="The network is refused: "):
        build_network(REFUSED[name])


def test_refusals_name_what_is_refused():
    for name, match in {
        "SavedModel": r"keras\.layers\.TFSMLayer",
        "activation": r"keras\.config\.set_floatx \(`activation`\)",
        "Lambda": "Lambda",
        "Switch": r"core\.Switch",
        "training": "compile_config",
    }.items():
        with pytest.raises(ValueError, match=match):
            build_network(REFUSED[name])


def test_what_is_allowed_is_what_keras_finds_by_its_name():
    retrieve = keras.src.saving.serialization_lib._retrieve_class_or_fn
    missing = set()
    for (module, name), cls in allowed.classes().items():
        try:
            assert retrieve(name, None, module, "class", {}) is cls
        except ValueError as error:  # a name that Keras does not write
            assert "not a KerasSaveable" in str(error)
            missing.add((module, name))
    assert not {place for place in missing if place[0] == "keras.layers"}
    assert not {place for place in missing if place[0].startswith("keras.src.ops")}
    assert ("keras.src.models.functional", "Functional") not in missing


def test_parts_of_networks_are_allowed():
    names = {name for _, name in allowed.classes()}
    parts = "AbsMaxQuantizer Dense DTypePolicy Functional L2 LSTMCell MaxNorm Zeros"
    assert {*parts.split(), "SeedGenerator", "Sequential"} < names
    other = "Accuracy Adam Cond FeatureSpace FlaxLayer JaxLayer Map Switch TFSMLayer"
    assert not {*other.split(), "MeanSquaredError", "TorchModuleWrapper"} & names


# Costs. A description claims much in few bytes; the file has no weights.

RELU = thing("Activation", {"activation": "relu"})


def nested(part, depth):
    for _ in range(depth):
        part = sequential(part)
    return part


COSTLY = {
    "Dense": sequential(dense(units=5 * 10**7)),
    "Embedding": sequential(
        thing("Embedding", {"input_dim": 10**9, "output_dim": 10**3})
    ),
    "Dense of a large input": sequential(dense(), shape=(None, 10**9)),
    "Dense that is built before": sequential(
        dense() | {"build_config": {"input_shape": [None, 10**9]}}
    ),
    "orthogonal": sequential(
        dense(
            units=10**5,
            kernel_initializer=thing("Orthogonal", {}, "keras.initializers"),
        ),
        shape=(None, 10**5),
    ),
    "attention": functional(
        thing("MultiHeadAttention", {"num_heads": 10**5, "key_dim": 10**5}),
        node(tensor(), tensor()),
        shape=(None, 5, 4),
    ),
    "GRU": sequential(thing("GRU", {"units": 10**5}), shape=(None, 5, 4)),
    "GRU in two directions": sequential(
        thing("Bidirectional", {"layer": thing("GRU", {"units": 10**5})}),
        shape=(None, 5, 4),
    ),
    "batch normalization": sequential(thing("BatchNormalization"), shape=(None, 10**9)),
    "Normalization": sequential(thing("Normalization"), shape=(None, 10**9)),
    "Normalization with constants": sequential(
        thing("Normalization", {"mean": 0.0, "variance": 1.0}), shape=(None, 10**9)
    ),
    "Normalization that is built before": sequential(
        thing("Normalization", {"mean": 0.0, "variance": 1.0})
        | {"build_config": {"input_shape": [None, 10**9]}}
    ),
    "states": sequential(
        thing("LSTM", {"units": 1, "stateful": True}), shape=(10**9, 3, 4)
    ),
    "spectrograms": sequential(
        thing("STFTSpectrogram", {"fft_length": 2**20, "frame_length": 2**20}),
        shape=(None, 10**8, 1),
    ),
    "steps one by one": sequential(
        thing("RepeatVector", {"n": 10**9}), thing("LSTM", {"units": 2, "unroll": True})
    ),
    "many layers": sequential(*[dense(name=f"d{i}") for i in range(3000)]),
    "many activations": sequential(
        *[thing("ReLU", {"name": f"d{i}"}) for i in range(20000)]
    ),
    "many cells": sequential(
        thing("RNN", {"cell": thing("StackedRNNCells", {"cells": [dense()] * 3000})})
    ),
    "many calls": functional(
        RELU, node(tensor()), *[node(tensor("n", i)) for i in range(15000)]
    ),
    "many arguments": functional(thing("Concatenate"), node([tensor()] * 25000)),
    "many parts": operation(
        "Split", indices_or_sections=10**9, axis=1, shape=(None, 10**9)
    ),
    "many outputs": operation("Unstack", module="core", axis=1, shape=(None, 10**9)),
    "many dimensions": operation("Reshape", newshape=[1] * 50000),
    "an error in many models": nested(dense(units=[0] * 1000000), 40),
}
RUN = """
import json, resource
from tfmiracle.decoder import DecodedNetwork
from tfmiracle.hosts.loading import to_network
from tfmiracle.miracle_file import (
    FileFormatError,
)

costly = json.load(open(sys.argv[1]))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 29), -1))
found = {}
for name, architecture in costly.items():
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + 20, -1))
    try:
        to_network(DecodedNetwork({}, architecture, {}))
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
    print(json.dumps(found), flush=True)
"""


def test_small_files_of_large_cost_are_refused(tmp_path):
    path = tmp_path / "costly.json"
    path.write_text(json.dumps(COSTLY))
    process = run_python(RUN, path)  # under limits of memory and time
    found = json.loads(process.stdout.splitlines()[-1])
    assert process.returncode == 0, (list(found), process.stderr)
    assert list(found) == list(COSTLY)
    for name, (error, text) in found.items():
        assert error in ("FileFormatError", "ValueError"), (name, text)
        assert "memory" not in text, (name, text)


def test_nested_models_take_time_by_their_depth():
    net = keras.Sequential([layers.Input((4,)), layers.Dense(4)])
    for _ in range(12):
        inputs = keras.Input((4,))
        net = keras.Model(inputs, net(net(inputs)))  # 2^12 calls of the innermost
    config = json.loads(json.dumps(plain(net)))
    found = to_network(DecodedNetwork(decoded(net), config, {}))
    np.testing.assert_array_equal(found.get_weights()[0], net.get_weights()[0])
    assert found.output_shape == (None, 4)


def plain(net):
    from tfmiracle.hosts.network import plain_architecture

    return plain_architecture(net)


def decoded(net):
    return {v.path: keras.ops.convert_to_numpy(v) for v in net.weights}


# What still loads.


def assert_loads(net, x, custom_objects=None):
    with keras.saving.custom_object_scope(custom_objects):
        config = json.loads(json.dumps(plain(net)))
    before = copy.deepcopy(config)
    found = to_network(DecodedNetwork(decoded(net), config, {}), custom_objects)
    assert config == before
    with keras.saving.custom_object_scope(custom_objects):
        other = keras.saving.deserialize_keras_object(before)
    assert type(found) is type(other)
    assert found.get_config() == other.get_config()
    ours, theirs = (
        [re.sub("variable_[0-9]+", "variable", v.path) for v in model.weights]
        for model in (found, other)
    )
    assert ours == theirs
    np.testing.assert_array_equal(found(x), net(x))
    return found


def batch(*shape):
    return np.random.default_rng(3).normal(size=(2, *shape)).astype(np.float32)


def test_sequential_models_are_those_of_keras():
    inner = keras.Sequential([layers.Dense(5, "relu"), layers.Dropout(0.5)], name="in")
    net = keras.Sequential([layers.Input((6,)), inner, layers.Dense(3)], name="out")
    inner.trainable = False
    found = assert_loads(net, batch(6))
    assert type(found) is type(found.layers[0]) is keras.Sequential
    assert (found.name, found.layers[0].name) == ("out", "in")
    assert found.input_shape == (None, 6)
    late = keras.Sequential([layers.Dense(2), layers.Dense(3)])
    late.build((None, 4))
    assert_loads(late, batch(4))


def test_graphs_of_operations():
    x = keras.Input((4, 6))
    y = keras.ops.einsum("abc->acb", x)[:, 1:4] * 2 + np.ones((3, 4), np.float32)
    y = keras.ops.where(y > 0, y, keras.ops.cast(3, "float32"))
    a, b = keras.ops.split(keras.ops.relu(y), 2, axis=-1)
    y = keras.ops.cast(keras.ops.concatenate([a, b], axis=1), "float16")
    y = keras.ops.reshape(keras.ops.cast(y, "float32")[..., None], (-1, 12))
    y = layers.Dense(3, keras.activations.gelu)(y)
    assert_loads(keras.Model(x, y), batch(4, 6))


def test_parts_with_objects_in_them():
    x = keras.Input((4, 6))
    y = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
    y = layers.MultiHeadAttention(2, 3)(y, y)
    y = layers.TimeDistributed(layers.Dense(2, activation=layers.LeakyReLU()))(y)
    y = layers.RNN(layers.StackedRNNCells([layers.GRUCell(2), layers.LSTMCell(3)]))(y)
    seed = keras.random.SeedGenerator(3)
    y = layers.Dense(
        3,
        "softmax",
        kernel_initializer=keras.initializers.Orthogonal(seed=seed),
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_constraint="non_neg",
        dtype=keras.DTypePolicy("mixed_float16"),
    )(layers.GaussianNoise(0.1)(y))
    assert_loads(keras.Model(x, y), batch(4, 6))


def test_low_rank_and_quantized_layers():
    net = keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dense(3)])
    net.layers[0].enable_lora(2)
    net.layers[1].quantize("int8")
    assert_loads(net, batch(6))


@keras.saving.register_keras_serializable("test_loading")
class Scale(layers.Layer):
    def __init__(self, function=None, part=None, **kwargs):
        super().__init__(**kwargs)
        self.function = keras.activations.get(function)
        self.part = part

    def build(self, shape):
        # More weights than are kept, with initializers of their own.
        self.scale = self.add_weight((shape[-1],), lambda s, dtype: np.ones(s, dtype))

    def call(self, x):
        return self.function(x * self.scale)

    def get_config(self):
        function = keras.activations.serialize(self.function)
        return {**super().get_config(), "function": function, "part": self.part}


OTHERS = [
    thing("Sequential", {"layers": "x"}, "keras"),
    thing("Sequential", {"layers": [7]}, "keras"),
    thing("Sequential", {"layers": {"0": 1}}, "keras"),
    {"class_name": "__keras_tensor__", "config": ["x"]},
    {"class_name": "__keras_tensor__", "config": {}},
    {"class_name": "Dense", "config": [1]},
    {"module": [1]},
    {},
    nested(dense(kernel_initializer=[0] * 1000000), 40),
    functional(thing("Add"), node([tensor("x" * 1000000)] * 10000)),
]


@pytest.mark.parametrize("architecture", OTHERS, ids=range(len(OTHERS)))
def test_other_networks_do_not_fit_a_model(architecture):
    model = keras.Sequential([layers.Input((4,)), layers.Dense(2)])
    own = json.loads(json.dumps(plain(model)))
    assert into_network(DecodedNetwork(decoded(model), own, {}), model) is model
    with pytest.raises(ValueError, match="is not the network of the file"):
        into_network(DecodedNetwork({}, architecture, {}), model)


@pytest.mark.parametrize("model", [keras.Sequential([layers.Dense(2)]), 3, "x.keras"])
def test_a_model_that_takes_weights_is_built(model):
    with pytest.raises(ValueError, match="`model` must be a built Keras model"):
        into_network(DecodedNetwork({}, None, {}), model)


@keras.saving.register_keras_serializable("test_loading")
def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def test_classes_and_functions_of_the_caller():
    net = keras.Sequential(
        [
            layers.Input((6,)),
            Scale(double, part={"vocabulary": "en", "list": [1, None, "a"]}),
            layers.Dense(3, double),
            layers.Lambda(double),
        ]
    )
    found = assert_loads(net, batch(6))
    assert found.layers[0].part == {"vocabulary": "en", "list": [1, None, "a"]}
    net = keras.Sequential([layers.Input((6,)), Scale(triple), layers.Lambda(triple)])
    with keras.saving.custom_object_scope({"triple": triple}):
        config = plain(net)
    with pytest.raises(ValueError, match=r"triple.*custom_objects"):
        to_network(DecodedNetwork(decoded(net), config, {}))
    assert_loads(net, batch(6), {"triple": triple})


def test_the_process_stays_as_it_was():
    def state():
        return (
            keras.config.floatx(),
            keras.config.dtype_policy().name,
            dict(keras.saving.get_custom_objects()),
            keras.KerasTensor.__init__,
            keras.Layer.add_weight,
        )

    before = state()
    assert_loads(keras.Sequential([layers.Input((6,)), layers.Dense(3)]), batch(6))
    for architecture in (REFUSED["activation"], COSTLY["Dense"]):
        with pytest.raises(ValueError):
            to_network(DecodedNetwork({}, architecture, {}))
    assert state() == before


def test_too_many_layers_for_their_variables_show_before_training():
    limit = loading._LAYERS + 2 * loading._LAYERS_PER_VARIABLE
    parts = [thing("ReLU", {"name": f"r{i}"}) for i in range(limit)]
    wide = thing("Pipeline", {"layers": parts})
    with pytest.raises(FileFormatError, match="layers and operations for 2 variables"):
        build_network(sequential(dense(), wide))


ALONE = """
import tfmiracle
model = tfmiracle.load(sys.argv[1])
print(model.count_params())
heavy = {"tensorflow_probability", "tfmiracle.posteriors", "tfmiracle.hosts.layers"}
heavy |= {"tfmiracle.hosts.models", "tfmiracle.hosts.network", "tf_keras"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_loading_needs_keras_and_numpy_only(tmp_path):
    from support import fix_all

    from tfmiracle.hosts.network import to_file

    net = keras.Sequential([layers.Input((6,)), layers.Dense(5), layers.Dense(3)])
    model = tfmiracle.VariationalModel(net, block_size=16, block_bits=8)
    to_file(fix_all(model)).write(tmp_path / "net.miracle")
    others = ["tensorflow_probability", "sklearn"]
    process = run_python(ALONE, tmp_path / "net.miracle", without=others)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "53"


def test_loading_without_tensorflow_under_another_backend():
    """A file loads where TensorFlow cannot be imported, with the same weights."""
    pytest.importorskip("jax", reason="needs jax, of the tests' dependencies")
    script = (
        "import os, sys\n"
        "os.environ['KERAS_BACKEND'] = 'jax'\n"
        "import numpy as np, keras, tfmiracle\n"
        "from tfmiracle.decoder import decode\n"
        "model = tfmiracle.load(sys.argv[1])\n"
        "assert keras.backend.backend() == 'jax' and 'tensorflow' not in sys.modules\n"
        "found = decode(sys.argv[1]).weights.values()\n"
        "for variable, value in zip(model.weights, found, strict=True):\n"
        "    np.testing.assert_array_equal(variable, value)\n"
        "x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)\n"
        "print(np.asarray(model(x)).tolist())\n"
    )
    path = GOLDEN / "per_block.miracle"
    blocked = ("tensorflow", "tensorflow_probability")
    result = run_python(script, path, without=blocked)
    assert result.returncode == 0, result.stderr
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
    expected = tfmiracle.load(path)(x)
    np.testing.assert_allclose(json.loads(result.stdout), expected, rtol=1e-5)
