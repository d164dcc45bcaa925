"""Between Keras models and `.miracle` files."""

import collections
import copy
import itertools
import json
import os
import re
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec import version2
from tfmiracle.coded_posterior import CodedPosterior, codes_crc32
from tfmiracle.decoder import DEFAULT_MAX_WEIGHTS, DecodedNetwork, decode
from tfmiracle.keras_internals import walk
from tfmiracle.layers import VariationalLayer
from tfmiracle.miracle_file import (
    MAX_DESCRIPTION_BYTES,
    MAX_METADATA_BYTES,
    CodedGroup,
    FileFormatError,
    Levels,
    MiracleFile,
)
from tfmiracle.models import (
    VariationalModel,
    ids_under_posteriors,
    plain_weights,
    posteriors,
    statistics_ids,
)
from tfmiracle.rules import STATISTICS, Treatment


def to_file(
    model: keras.Model, metadata: dict | None = None, architecture: bool = True
) -> MiracleFile:
    """Collects what a `.miracle` file of a model holds.

    Args:
      model: a `VariationalModel`, or a model with variational layers, whose blocks are
        all fixed.
      metadata: entries for the file's metadata, beside the rules about what is stored;
        anything JSON can say.
      architecture: whether the file says how the network is built; see `load`.

    Raises:
      ValueError: if the model has no posterior, or blocks that are not coded yet, or a
        variable that cannot be stored.
    """
    parts = _coded_parts(model)
    for posterior, _ in parts:
        todo = int(np.sum(~posterior.fixed))
        if todo:
            raise ValueError(
                f"{todo} of {posterior.layout.num_blocks} blocks are not coded yet. "
                "Run `fit` with a CompressionCallback until it has coded all."
            )
    place_of = {
        id(v): (g, i) for g, (_, vs) in enumerate(parts) for i, v in enumerate(vs)
    }
    variables = plain_weights(model)
    coded = [place_of.get(id(v)) for v in variables]
    groups = [
        CodedGroup(
            posterior.layout,
            posterior.code,
            posterior.coding_scale,
            keras.ops.convert_to_numpy(posterior.codes).astype(np.int64),
        )
        for posterior, _ in parts
    ]
    stored = [v for v, place in zip(variables, coded, strict=True) if place is None]
    rules = {}
    if isinstance(model, VariationalModel):
        places = _places(model.net)
        for pattern, treatment in model.rules.items():
            if Treatment.parse(treatment).stored:  # the layout tells of the others
                path = pattern.removeprefix(f"{model.net.name}/").split("/")
                rules["/".join(places.get(part, part) for part in path)] = treatment
    _check_stored(model, stored)
    dtypes = _stored_dtypes(model, stored)
    description = architecture_by_place(model)
    return MiracleFile(
        _names(_plain(model), variables),
        coded,
        groups,
        [_storable(v, dtype) for v, dtype in zip(stored, dtypes, strict=True)],
        description if architecture else None,
        {**({"rules": rules} if rules else {}), **(metadata or {})},
        None if architecture else version2.fingerprint(description),
    )


def round_stored(model: keras.Model) -> None:
    """Gives stored variables the values that a file of the model will hold."""
    under = {id(v) for _, variables in posteriors(model) for v in variables}
    stored = [v for v in plain_weights(model) if id(v) not in under]
    for v, dtype in zip(stored, _stored_dtypes(model, stored), strict=True):
        value = _storable(v, dtype)
        if isinstance(value, Levels):
            v.assign(value.values())


def coded_posterior(model: keras.Model) -> CodedPosterior:
    """Q of every effective weight of a model, beside its file; see `to_file`."""
    parts = [posterior for posterior, _ in _coded_parts(model)]
    loc, scale = zip(*(posterior.loc_and_scale() for posterior in parts))
    return CodedPosterior(
        [x.numpy() for x in loc],
        [x.numpy() for x in scale],
        codes_crc32(keras.ops.convert_to_numpy(p.codes) for p in parts),
    )


def check_network(model: keras.Model) -> keras.Model:
    """Shows before the training what would make the file of a model wrong.

    Returns:
      The plain network, rebuilt for the purpose, with initial weights.

    Raises:
      ValueError: if the network cannot be described (its classes, a Lambda layer, a
        number that is not finite), is another one when it is rebuilt (other weights,
        `tf.Variable`s, an adapted vocabulary), takes more room to describe than a file
        has (a large vocabulary), or has weights that cannot be stored.
    """
    architecture = plain_architecture(model)
    net = build_network(architecture)
    here, there = plain_weights(model), net.weights
    if [tuple(v.shape) for v in here] != [tuple(v.shape) for v in there]:
        raise ValueError(
            f"{model.name!r} rebuilt from its configuration has other weights than it "
            "has now. Its layers must create all weights in `build`."
        )
    names = _names(_plain(model), here)
    size = len(json.dumps([architecture, names], separators=(",", ":")))
    room = MAX_DESCRIPTION_BYTES - MAX_METADATA_BYTES
    if size > room:
        raise ValueError(
            f"The configuration of {model.name!r} takes {size:,} bytes as JSON; a file "
            f"has room for {room:,}. Keep large vocabularies and constants outside."
        )
    for layer in walk(model):
        for name, value in vars(layer).items():
            if isinstance(value, dict) and not name.startswith("_"):
                value = [*value.values()]
            values = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(v, tf.Variable) for v in values):
                raise ValueError(
                    f"`{name}` of layer {layer.name!r} is a tf.Variable, of which "
                    "Keras does not know. Make it with `add_weight`."
                )
        # What Keras calls assets has no place in the file.
        if hasattr(layer, "save_assets") and not layer.get_config().get("vocabulary"):
            raise ValueError(
                f"The vocabulary of layer {layer.name!r} is not part of its "
                "configuration. Give it as the argument `vocabulary`, instead of "
                "`adapt`."
            )
    ruled = ids_under_posteriors(model)
    _check_stored(model, [v for v in here if id(v) not in ruled])
    return net


def plain_architecture(model: keras.Model) -> dict:
    """Serializes the network without anything variational, as Keras' JSON.

    Its layers have the names they have in `model`.

    Raises:
      ValueError: if the model contains a variational layer of another package, for
        which no plain layer is known, or something that JSON cannot say.
    """
    if isinstance(model, VariationalModel):
        return plain_architecture(model.net)
    try:
        config = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{model.name!r} has no configuration: {error} Its layers need "
            "`get_config`; the loss it is compiled with must be registered, too."
        ) from error
    architecture = _strip(config)
    try:
        json.dumps(architecture, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"The configuration of {model.name!r} cannot be written as JSON: its "
            "layers must not have arguments that are infinite or NaN."
        ) from error
    return architecture


def architecture_by_place(model: keras.Model) -> dict:
    """As `plain_architecture`, with the names of a file.

    Keras numbers on from what was built before in the process; a file should not
    depend on that. So `dense_7` and `dense_9` become `dense` and `dense_1`, in the
    order they have. Names that Keras could not have given stay as they are.
    """
    return _rename(plain_architecture(model), _places(_plain(model)))


def build_network(
    architecture: dict, custom_objects: dict | None = None
) -> keras.Model:
    """Builds the Keras model of a file, with initial weights.

    It runs no code from the file, but allocates what the architecture asks for.

    Raises:
      ValueError: if it names a class that is not registered, or holds a Lambda layer.
    """
    try:
        model = keras.saving.deserialize_keras_object(
            copy.deepcopy(architecture),  # which Keras empties
            custom_objects=custom_objects,
            safe_mode=True,
        )
    except Exception as error:
        raise ValueError(
            f"Keras cannot rebuild the network: {error} Custom classes must be "
            "registered (`keras.saving.register_keras_serializable`) or passed in "
            "`custom_objects`; Lambda layers are refused, since their code comes from "
            "the file."
        ) from error
    if not (isinstance(model, keras.Model) and model.built):
        raise ValueError(
            "The description of the network does not give a built Keras model. A "
            "subclassed model must define `build` or `get_build_config`."
        )
    return model


def load(
    path: str | os.PathLike,
    custom_objects: dict | None = None,
    max_weights: int | None = DEFAULT_MAX_WEIGHTS,
    model: keras.Model | None = None,
) -> keras.Model:
    """Loads the network of a `.miracle` file as a plain Keras model.

    Args:
      path: the file.
      custom_objects: name -> class, for layers that are not registered with Keras.
      max_weights: refuse files that claim more weights than this. It bounds what the
        decoder allocates; Keras allocates what the architecture asks for. None for a
        file that you trust.
      model: a built network like that of the file, which takes the weights. A file
        without its architecture needs it.

    Returns:
      `model`, or a new one, not compiled, with the decoded weights; nothing of
      tfmiracle is in it.

    Raises:
      FileFormatError: if the file is damaged, or its weights do not fit its network.
      ValueError: if Keras cannot rebuild the network, see `build_network`, or if
        `model` is another one.
      OSError: if the file cannot be read.
    """
    decoded = decode(path, max_weights)
    if model is None:
        return to_network(decoded, custom_objects)
    return into_network(decoded, model)


def into_network(decoded: DecodedNetwork, model: keras.Model) -> keras.Model:
    """Gives the weights of a decoded file to a network like its own, see `load`."""
    expected = decoded.fingerprint
    if expected is None:
        expected = version2.fingerprint(decoded.architecture)
    found = version2.fingerprint(architecture_by_place(model))
    shapes = [tuple(v.shape) for v in model.weights]
    # By position: paths of variables depend on how their layers came to be built.
    if found != expected or shapes != [v.shape for v in decoded.weights.values()]:
        raise ValueError(
            f"`model` ({model.name!r}) is not the network of the file: its layers, or "
            "their names or arguments, are others. Build it as it was when the file "
            "was written."
        )
    set_weights(model, list(decoded.weights.values()))
    return model


def to_network(
    decoded: DecodedNetwork, custom_objects: dict | None = None
) -> keras.Model:
    """Builds the Keras model of a decoded file, see `load`."""
    if decoded.architecture is None:
        raise ValueError(
            "The file was written without its architecture. Build the network as it "
            "was, and pass it: `tfmiracle.load(path, model=network)`."
        )
    model = build_network(decoded.architecture, custom_objects)
    shapes = [tuple(v.shape) for v in model.weights]
    if shapes != [value.shape for value in decoded.weights.values()]:
        raise FileFormatError("The weights of the file do not fit its network.")
    # By position: Keras numbers the names of layers anew in every process.
    set_weights(model, list(decoded.weights.values()))
    return model


def set_weights(model: keras.Model, values: Sequence[np.ndarray]) -> None:
    """As `model.set_weights`, which does not reach all that layers compute with."""
    model.set_weights(values)
    for layer in walk(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def accuracy_of(
    model: keras.Model, decoded: DecodedNetwork, x: np.ndarray, y: np.ndarray
) -> float:
    """Accuracy of a classifier with the weights of a decoded (or pruned) network.

    Args:
      model: the network, from `to_network`; it keeps the weights.
      decoded: the weights.
      x, y: inputs and class numbers.
    """
    set_weights(model, list(decoded.weights.values()))
    scores = model.predict(x, batch_size=500, verbose=0)
    return float(np.mean(np.argmax(scores, -1) == y))


def _plain(model):
    """The network that a model wraps, or the model itself."""
    return model.net if isinstance(model, VariationalModel) else model


def _coded_parts(model):
    parts = posteriors(model)
    if not parts:
        raise ValueError(
            f"{model.name!r} has nothing to code. Wrap it in "
            "`tfmiracle.VariationalModel`, or build it from layers such as MeanKLDense."
        )
    return parts


def _strip(config):
    """Turns variational layers into their plain Keras layers, drops training setup."""
    if isinstance(config, list | tuple):
        return [_strip(item) for item in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == "__keras_tensor__":
        # Where it comes from; shape and dtype Keras finds anew.
        history = config["config"]["keras_history"]
        tensor = {"shape": [], "dtype": "float32", "keras_history": history}
        return {**config, "config": _strip(tensor)}
    config = {k: v for k, v in config.items() if k != "compile_config"}
    name = config.get("registered_name")
    cls = keras.saving.get_registered_object(name) if name else None
    if cls is VariationalModel:
        return _strip(config["config"]["net"])
    if isinstance(cls, type) and issubclass(cls, VariationalLayer):
        base = cls.__mro__[cls.__mro__.index(VariationalLayer) + 1]
        if not base.__module__.startswith("keras."):
            raise ValueError(
                f"No plain Keras layer is known for {cls.__name__}. Derive variational "
                "layers from VariationalLayer and a layer of keras.layers."
            )
        inner = {k: v for k, v in config["config"].items() if k not in cls.OPTIONS}
        plain = {"module": "keras.layers", "class_name": base.__name__}
        config = {**config, **plain, "config": inner, "registered_name": None}
    config = {k: _strip(v) for k, v in config.items()}
    if _builds_its_layers(config):
        # Keras finds anew for what it built them.
        config.pop("build_config", None)
        for layer in config["config"]["layers"]:
            if layer.get("module") == "keras.layers":
                layer.pop("build_config", None)
    return config


def _builds_its_layers(config):
    """Whether Keras builds the layers of a model as it makes the model anew."""
    inner = config.get("config")
    layers = inner.get("layers") if isinstance(inner, dict) else None
    if config.get("module") == "keras" and config.get("class_name") == "Sequential":
        return bool(layers) and layers[0].get("class_name") == "InputLayer"
    return config.get("registered_name") == "Functional"


def _places(model) -> dict[str, str]:
    """Names that Keras gave to layers -> the same numbered within the model."""
    automatic, taken = {}, set()
    for layer in walk(model):
        prefix, number = re.fullmatch(r"(.*?)(?:_([0-9]+))?", layer.name).groups()
        if prefix.replace("_", "") == type(layer).__name__.lower():
            automatic[layer.name] = prefix, int(number or 0)
        else:
            taken.add(layer.name)
    places = {}
    for name, (prefix, _) in sorted(automatic.items(), key=lambda item: item[1]):
        numbered = (f"{prefix}_{i}" if i else prefix for i in itertools.count())
        places[name] = next(new for new in numbered if new not in taken)
        taken.add(places[name])
    return places


def _rename(config, places, within=None):
    """Renames layers where Keras' JSON speaks of them."""
    if isinstance(config, list):
        return [_rename(item, places, within) for item in config]
    if isinstance(config, dict):
        # Inputs and outputs may be dicts of layers.
        kept = within in ("input_layers", "output_layers")
        return {k: _rename(v, places, within if kept else k) for k, v in config.items()}
    if within in ("name", "keras_history", "input_layers", "output_layers"):
        return places.get(config, config) if isinstance(config, str) else config
    return config


def _names(model, variables) -> list[str]:
    """Paths below the model's own name, made unique."""
    names, seen, places = [], collections.Counter(), _places(model)
    for v in variables:
        parts = v.path.removeprefix(f"{model.name}/").split("/")
        name = "/".join(places.get(part, part) for part in parts)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _check_stored(model, variables):
    """Raises a ValueError if variables cannot be stored, or should not be.

    Frozen layers may hold constants that are not finite. Elsewhere they are divergence
    that has not reached the loss, as in the statistics of a BatchNormalization.
    """
    frozen = {
        id(v) for layer in walk(model) if not layer.trainable for v in layer.weights
    }
    for v in variables:
        if id(v) not in frozen and not np.all(np.isfinite(_storable(v, None))):
            raise ValueError(
                f"Variable {v.path} holds values that are not finite: look for "
                "divergence in training. If they are meant, freeze its layer "
                "(`trainable = False`)."
            )


def _stored_dtypes(model, stored) -> list[str | None]:
    """In what each stored variable is stored, None for what it is."""
    if isinstance(model, VariationalModel):
        return model.stored_dtypes
    statistics = statistics_ids(model)
    return [STATISTICS if id(v) in statistics else None for v in stored]


def _storable(variable, dtype: str | None) -> np.ndarray | Levels:
    value = keras.ops.convert_to_numpy(variable)
    if value.dtype.name == "bfloat16":  # NumPy has no such type; float32 holds it
        return value.astype(np.float32)
    if value.dtype.kind not in "fiub":
        raise ValueError(
            f"Variable {variable.path} has dtype {value.dtype}, which a .miracle file "
            "cannot store."
        )
    if dtype is None or value.dtype.kind != "f":
        return value
    if dtype.endswith("bit"):
        if value.dtype == np.float16:
            return value  # it could not hold what levels say
        squared = variable.name.endswith("variance")
        try:
            return Levels.of(value, int(dtype[0]), squared)
        except ValueError:  # as of frozen layers with values that are not finite
            return value
    with np.errstate(over="ignore"):
        short = value.astype(dtype)
    if not np.array_equal(np.isfinite(short), np.isfinite(value)):
        raise ValueError(
            f"Variable {variable.path} has values up to {np.max(np.abs(value)):g}, too "
            f"large for {dtype}. Store it as it is."
        )
    return short
