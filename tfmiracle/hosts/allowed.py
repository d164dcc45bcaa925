"""What a network may be made of: its description is checked before Keras sees it.

Keras finds a class or a function by the names in a description, and runs constructors
and functions while it rebuilds a network. So only names that are listed here reach it:
what Keras exports as layers, operations, initializers and so on, found by what it is,
and what the caller has registered or passed. All else is refused.
"""

import functools
import math
from collections.abc import Iterator

import keras

from tfmiracle.keras_internals import (
    functional_class,
    layers_of_applications,
    operations,
)

# They read files, or hold code.
_REFUSED = ("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper")
# Where descriptions may call for one kind of thing only, by the end of the argument.
_KINDS = {
    "initializer": keras.initializers.Initializer,
    "regularizer": keras.regularizers.Regularizer,
    "constraint": keras.constraints.Constraint,
}
_PARTS = {
    "module",
    "class_name",
    "config",
    "registered_name",
    "build_config",
    "name",
    "inbound_nodes",
}
_NUMBERS = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32"
_DTYPES = ("bool", "uint64", *_NUMBERS.split())  # what has no hash may be sought
_MAX_LETTERS = 4096  # of a string; some of Keras' checks take the square of it
_MAX_ITEMS = 4096  # of a list among what a node takes; constants may be larger
# Arguments that count what is made at once.
_LIMITS = {"max_tokens": 1 << 20, "ngrams": 100}
OWN_SEQUENTIAL = "tfmiracle>Sequential"


class NotAllowed(ValueError):
    """A description holds what a network of a file may not be made of."""


class _Object(dict):
    """An object of a description, which shows as few letters.

    Keras puts the whole of it into the text of an error, once for each model around it.
    """

    def __repr__(self):
        return "{...}"

    def copy(self):
        return _Object(self)


class Sequential:
    """Builds a `keras.Sequential` in one go; Keras builds it anew for every layer."""

    @classmethod
    def from_config(cls, config, custom_objects=None):
        layers = [
            keras.saving.deserialize_keras_object(layer, custom_objects=custom_objects)
            for layer in config["layers"]
        ]
        model = keras.Sequential(layers, name=config["name"])
        shape = config.get("build_input_shape")
        if not model.built and isinstance(shape, list | tuple):
            model.build(shape)
        return model


class Description:
    """A description for Keras, made of allowed things only.

    Args:
      architecture: a network as Keras' JSON.
      custom_objects: name -> class or function of the caller.

    Attributes:
      config: the description; names that Keras resolves lead to allowed things.
      layers: number of layers and operations in it.
      nodes: number of tensors that nodes of the graph refer to, and of layers.
      computes: whether a layer computes with arrays as large as its input when it is
        built: states between batches, the mean of a `Normalization`.
      largest_shape: entries of the largest shape that layers are built for.

    Raises:
      NotAllowed: if it holds anything else; the text names it.
    """

    def __init__(self, architecture: dict, custom_objects: dict | None = None):
        self._custom = custom_objects or {}
        self.layers = self.nodes = 0
        self.computes, self.largest_shape = False, 0
        self.config = self._anything(architecture, "model")

    def _anything(self, value, key):
        """Checks what stands anywhere in a configuration; `key` is its argument."""
        if isinstance(value, str):
            if len(value) > _MAX_LETTERS:
                raise NotAllowed(f"`{key}` is a text of {len(value):,} characters.")
            return value
        if isinstance(value, list | tuple):
            if key in ("input_shape", "build_input_shape", "batch_shape", "shape"):
                known = math.prod(n for n in value if isinstance(n, int))
                self.largest_shape = max(self.largest_shape, known)
            # What an argument calls for, the items of a list need not be.
            return [self._anything(item, "") for item in value]
        if not isinstance(value, dict):
            return value
        if "class_name" not in value:
            return {k: self._anything(v, k) for k, v in value.items()}
        name = value["class_name"]
        if not isinstance(name, str):
            raise NotAllowed(f"`class_name` is {name!r}, no text.")
        if name.startswith("__"):
            return self._constant(name, value)
        if name == "function":
            return self._function(value, key)
        return self._object(value, key)

    def _constant(self, name, value):
        """Constants, as Keras writes them."""
        config = value.get("config")
        if name == "__ellipsis__":
            return {"class_name": name, "config": {}}
        if not isinstance(config, dict):
            raise NotAllowed(f"{name} has no configuration.")
        if name in ("__tensor__", "__numpy__"):
            if config.get("dtype") not in _DTYPES:
                raise NotAllowed(f"A constant has the dtype {config.get('dtype')!r}.")
            numbers = config.get("value")
            if not all(isinstance(n, bool | int | float) for n in _flat(numbers)):
                raise NotAllowed("A constant holds something else than numbers.")
            config = {"value": numbers, "dtype": config["dtype"]}
        elif name == "__slice__":
            config = {
                part: self._argument(config.get(part))
                for part in ("start", "stop", "step")
            }
        elif name == "__bytes__" and isinstance(config.get("value"), str):
            config = {"value": config["value"]}
        else:
            what = "the code of a Lambda layer" if name == "__lambda__" else name
            raise NotAllowed(f"It holds {what}.")
        return {"class_name": name, "config": config}

    def _function(self, value, key):
        """Functions of the caller, and Keras' activations where one belongs."""
        name, module = value.get("config"), value.get("module")
        if not isinstance(name, str):
            raise NotAllowed(f"A function of `{key}` has no name.")
        named = {"class_name": "function", "config": name}
        own = _of_caller(name, self._custom)
        if own is not None and not isinstance(own, type):
            return {**named, "module": None, "registered_name": name}
        if (
            key.endswith("activation")
            and module in ("builtins", "keras.activations")
            and name in _activations()
        ):
            return {**named, "module": "keras.activations", "registered_name": name}
        raise NotAllowed(
            f"The function {module}.{name} (`{key}`) is neither an activation of Keras "
            "nor known."
        )

    def _object(self, value, key):
        name, module = value["class_name"], value.get("module")
        registered = value.get("registered_name", name)
        title = f"{module}.{name}" if isinstance(module, str) else name
        if value.get("compile_config"):
            raise NotAllowed(f"{title} has a `compile_config`: training is no network.")
        strange = set(value) - _PARTS - {"compile_config", "shared_object_id"}
        if strange or not isinstance(value.get("config", ...), dict | None):
            raise NotAllowed(f"{title} has no configuration that Keras writes.")
        cls = isinstance(registered, str) and _of_caller(registered, self._custom)
        if cls:
            if not isinstance(cls, type):
                raise NotAllowed(f"{title} is no class.")
            found = {"module": None, "class_name": name, "registered_name": registered}
        else:
            cls = isinstance(module, str) and classes().get((module, name))
            if not cls or registered not in (None, name):
                raise NotAllowed(f"{title} is not known as a part of networks.")
            found = {"module": module, "class_name": name, "registered_name": None}
            for end, kind in _KINDS.items():
                if key.endswith(end) and not issubclass(cls, kind):
                    raise NotAllowed(f"{title} is no {end} (`{key}`).")
            self._check_arguments(title, cls, value["config"] or {})
            if cls is keras.Sequential:
                found["registered_name"] = OWN_SEQUENTIAL
        if issubclass(cls, keras.Operation):  # layers are among them
            self.layers += 1
            self.nodes += 1
        found["config"] = _Object(self._anything(value["config"] or {}, "config"))
        if value.get("build_config"):
            found["build_config"] = self._anything(
                value["build_config"], "build_config"
            )
        if "name" in value:
            found["name"] = self._anything(value["name"], "name")
        if "inbound_nodes" in value:
            nodes = value["inbound_nodes"]
            if not isinstance(nodes, list | tuple):
                raise NotAllowed(f"The nodes of {title} are not as Keras writes them.")
            found["inbound_nodes"] = [self._node(node) for node in nodes]
        return _Object(found)

    def _check_arguments(self, title, cls, config):
        """Refuses arguments of layers by which Keras would do more than build."""
        if isinstance(config.get("vocabulary"), str):
            raise NotAllowed(f"The `vocabulary` of {title} is a file to be read.")
        mean = issubclass(cls, keras.layers.Normalization) and "mean" in config
        self.computes |= bool(mean or config.get("stateful"))
        for name, limit in _LIMITS.items():
            if isinstance(config.get(name), int) and config[name] > limit:
                raise NotAllowed(
                    f"`{name}` of {title} is {config[name]}, over {limit}."
                )

    def _node(self, node):
        """A call of a layer or an operation: of tensors, with constants."""
        if not (isinstance(node, dict) and set(node) == {"args", "kwargs"}):
            raise NotAllowed("A node of the graph is not as Keras writes it.")
        before = self.nodes
        node = {part: self._argument(value) for part, value in node.items()}
        if self.nodes == before:
            # Keras would compute it at once.
            raise NotAllowed("A node of the graph takes no tensor.")
        return node

    def _argument(self, value):
        if isinstance(value, list | tuple):
            if len(value) > _MAX_ITEMS:
                raise NotAllowed(f"A node takes a list of {len(value):,} items.")
            return [self._argument(item) for item in value]
        if not isinstance(value, dict):
            return self._anything(value, "")
        name = value.get("class_name")
        if "class_name" not in value:
            return {k: self._argument(v) for k, v in value.items()}
        if name == "__keras_tensor__":
            config = value.get("config")
            parts = {"shape", "dtype", "keras_history"}
            if not (isinstance(config, dict) and parts <= set(config)):
                raise NotAllowed("A tensor of the graph is not as Keras writes it.")
            self.nodes += 1
            config = {part: self._anything(config[part], part) for part in parts}
            return {"class_name": name, "config": config}
        if isinstance(name, str) and name.startswith("__"):
            return self._constant(name, value)
        raise NotAllowed(f"A node of the graph takes {name!r}: no number, no tensor.")


def _of_caller(name: str, custom_objects: dict):
    """What the caller has registered under a name or passed, or None."""
    found = keras.saving.get_registered_object(name, custom_objects)
    # Variational layers are not for files: Keras' plain ones stand there.
    own = getattr(found, "__module__", None) or ""
    return None if own.split(".")[0] == "tfmiracle" else found


@functools.cache
def _activations() -> set[str]:
    names = set(dir(keras.activations)) - {"get", "serialize", "deserialize"}
    return {n for n in names if not n.startswith("_")}


@functools.cache
def classes() -> dict[tuple[str, str], type]:
    """(module, name) -> class, as Keras writes and resolves them."""
    classes = dict(_exported())
    # Where a class is defined is written if nothing exports it.
    classes |= {(c.__module__, c.__name__): c for c in classes.values()}
    return classes


def _exported() -> Iterator[tuple[tuple[str, str], type]]:
    policy, generator = keras.DTypePolicy, keras.random.SeedGenerator
    quantizers = keras.quantizers.Quantizer, keras.quantizers.QuantizationConfig
    for module, kinds in (
        ("layers", keras.Layer),
        ("initializers", keras.initializers.Initializer),
        ("regularizers", keras.regularizers.Regularizer),
        ("constraints", keras.constraints.Constraint),
        ("dtype_policies", policy),
        ("quantizers", quantizers),
        ("random", generator),
    ):
        for name, value in vars(getattr(keras, module)).items():
            known = isinstance(value, type) and issubclass(value, kinds)
            if known and name not in _REFUSED:
                yield (f"keras.{module}", name), value
    yield ("keras", "DTypePolicy"), policy
    yield ("keras", "SeedGenerator"), generator
    yield ("keras", "Sequential"), keras.Sequential
    yield ("keras.models", "Sequential"), keras.Sequential
    for cls in [functional_class(), *layers_of_applications(), *operations()]:
        yield (cls.__module__, cls.__name__), cls


def _flat(value):
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        else:
            yield item
