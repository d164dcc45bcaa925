"""Keras' JSON of a network, said shortly: what follows from the rest is left out.

`docs/format_v2.md`, section 4, has the rules. Needs the standard library only.
"""

import functools
import json
import pathlib
import re

MAX_OBJECTS = 1 << 16  # of a network that is said shortly; a small text could say more
_ABSENT = "-"  # key of a list of those keys that defaults have and the object has not


@functools.cache
def defaults() -> dict:
    """Class -> what its objects have in common; part of the format."""
    path = pathlib.Path(__file__).parent / "defaults_v2.json"
    return json.loads(path.read_text())


def shorten(architecture: dict) -> dict | None:
    """The short form, or None where there is none that says the same.

    Args:
      architecture: what `keras.saving.serialize_keras_object` returns.
    """
    try:
        short = _Names().shorten(architecture)
        agrees = same(lengthen(short)[0], architecture)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None  # not what Keras writes
    return short if agrees else None


def lengthen(short: dict) -> tuple[dict, list[str]]:
    """Reverses `shorten`.

    Returns:
      The architecture, and the names of its objects in the order of the text.

    Raises:
      ValueError: if there are more than `MAX_OBJECTS` objects, or one is malformed.
    """
    names = _Names()
    try:
        return names.lengthen(short), names.found
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"The network is malformed: {error!r}") from error


def same(one, other) -> bool:
    """Whether JSON of two values is the same: 1, 1.0 and true are not.

    It takes no more time than the smaller of them has entries.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict | list | tuple) or isinstance(other, dict | list | tuple):
        return False
    return one is other or json.dumps(one) == json.dumps(other)


class _Names:
    """One walk over a network, which numbers names as Keras does."""

    def __init__(self):
        self.found = []
        self._last = {}  # automatic name without its number -> the number it had last
        self._count = 0

    def _count_one(self):
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise ValueError(f"The network has more than {MAX_OBJECTS:,} objects.")

    def _next(self, prefix):
        number = self._last.get(prefix, -1) + 1
        return f"{prefix}_{number}" if number else prefix

    def _see(self, prefix, name):
        if not isinstance(name, str):
            return
        self.found.append(name)
        match = re.fullmatch(r"(.*?)(?:_([1-9][0-9]{0,8}))?", name, re.DOTALL)
        if match[1] == prefix:
            self._last[prefix] = int(match[2] or 0)

    def lengthen(self, node):
        if isinstance(node, list):
            return [self.lengthen(item) for item in node]
        if not isinstance(node, dict):
            return node
        name = node.get("class_name")
        default = defaults().get(name) if isinstance(name, str) else None
        if default is None or "module" in node:
            config = node.get("config")
            if name is not None and isinstance(config, dict):
                self._see(None, config.get("name"))
            return {key: self.lengthen(value) for key, value in node.items()}
        self._count_one()
        short = node.get("config", {})
        absent = short.get(_ABSENT, [])
        config = {}
        prefix = default.get("name")
        if prefix is not None and "name" not in absent:
            config["name"] = short.get("name", self._next(prefix))
            self._see(prefix, config["name"])
        own = {k: v for k, v in short.items() if k not in (_ABSENT, "name")}
        if prefix is None and "name" in short:
            own["name"] = short["name"]
        own = {key: self.lengthen(value) for key, value in own.items()}
        for key, value in default["config"].items():
            if key not in own and key not in absent:
                own[key] = self.lengthen(value)
        config |= own
        if name in _FOLLOWS:
            for key, value in _FOLLOWS[name](config).items():
                if key not in config and key not in absent:
                    config[key] = value
        if name == "Functional":
            _lengthen_nodes(config["layers"], self._count_one)
        rest = {k: self.lengthen(v) for k, v in node.items() if k != "config"}
        return {**default["head"], **rest, "config": config}

    def shorten(self, node):
        if isinstance(node, list):
            return [self.shorten(item) for item in node]
        if not isinstance(node, dict):
            return node
        name = node.get("class_name")
        default = defaults().get(name) if isinstance(name, str) else None
        config = node.get("config")
        if default is None or default["head"] != {
            key: node[key] for key in ("module", "registered_name") if key in node
        }:
            if name is not None and isinstance(config, dict):
                self._see(None, config.get("name"))
            return {key: self.shorten(value) for key, value in node.items()}
        prefix = default.get("name")
        short = {}
        if prefix is not None and "name" in config:
            if config["name"] != self._next(prefix):
                short["name"] = config["name"]
            self._see(prefix, config["name"])
        follows = _FOLLOWS[name](config) if name in _FOLLOWS else {}
        known = {key: _Names().lengthen(v) for key, v in default["config"].items()}
        known |= follows
        for key, value in config.items():
            if prefix is not None and key == "name":
                continue
            if key in known and same(known[key], value):
                continue
            if name == "Functional" and key == "layers":
                value = _shortened_nodes(value)
            short[key] = self.shorten(value)
        keys = [*known, *(["name"] if prefix is not None else [])]
        if absent := [key for key in keys if key not in config]:
            short[_ABSENT] = absent
        rest = {
            key: self.shorten(value)
            for key, value in node.items()
            if key not in (*default["head"], "class_name", "config")
        }
        own = {"config": short} if short else {}
        return {"class_name": name, **own, **rest}


def _ends(config):
    """Inputs and outputs of a network of one way."""
    names = [layer["config"]["name"] for layer in config["layers"]]
    return {"input_layers": [names[0], 0, 0], "output_layers": [names[-1], 0, 0]}


def _shape(config):
    """What a Sequential is built for."""
    first = config["layers"][0]["config"] if config["layers"] else {}
    return {"build_input_shape": first["batch_shape"]} if "batch_shape" in first else {}


_FOLLOWS = {"Functional": _ends, "Sequential": _shape}


def _tensor(name, *place):
    config = {"shape": [], "dtype": "float32", "keras_history": [name, *place]}
    return {"class_name": "__keras_tensor__", "config": config}


def _inbound(names, i, layer):
    """Calls of a layer of which the text says nothing: on what comes before it."""
    if layer["class_name"] == "InputLayer" or not i:
        return []
    masked = layer["class_name"] == "BatchNormalization"
    kwargs = {"mask": None} if masked else {}
    return [{"args": [_tensor(names[i - 1], 0, 0)], "kwargs": kwargs}]


def _lengthen_nodes(layers, count_one):
    """Completes `name` and `inbound_nodes` of the layers of a Functional.

    Calls `count_one` for each tensor that it makes.
    """
    names = [layer["config"]["name"] for layer in layers]

    def revive(value, i):
        if isinstance(value, list):
            return [revive(item, i) for item in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"t"}:
            step, *place = value["t"] if isinstance(value["t"], list) else [value["t"]]
            if not (type(step) is int and 0 <= i - step < len(names)):
                raise ValueError(f"A layer has an input {step} layers before it.")
            count_one()
            return _tensor(names[i - step], *(place or (0, 0)))
        return {key: revive(item, i) for key, item in value.items()}

    for i, layer in enumerate(layers):
        layer.setdefault("name", names[i])
        if "inbound_nodes" in layer:
            layer["inbound_nodes"] = [
                {"args": revive(call, i), "kwargs": {}}
                if isinstance(call, list)
                else revive(call, i)
                for call in layer["inbound_nodes"]
            ]
        else:
            count_one()
            layer["inbound_nodes"] = _inbound(names, i, layer)


def _shortened_nodes(layers):
    names = [layer["config"]["name"] for layer in layers]
    place_of = {name: i for i, name in enumerate(names)}

    def replace(value, i):
        if isinstance(value, list):
            return [replace(item, i) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("class_name") == "__keras_tensor__":
            name, *place = value["config"]["keras_history"]
            if name in place_of and value == _tensor(name, *place):
                step = i - place_of[name]
                return {"t": step if place == [0, 0] else [step, *place]}
        return {key: replace(item, i) for key, item in value.items()}

    shortened = []
    for i, layer in enumerate(layers):
        layer = dict(layer)
        calls = layer.pop("inbound_nodes")
        if layer["name"] == names[i]:
            del layer["name"]
        if calls != _inbound(names, i, layer):
            calls = [replace(call, i) for call in calls]
            layer["inbound_nodes"] = [
                call["args"]
                if call.keys() == {"args", "kwargs"} and not call["kwargs"]
                else call
                for call in calls
            ]
        shortened.append(layer)
    return shortened
