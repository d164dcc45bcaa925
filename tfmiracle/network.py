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

import tfmiracle
from tfmiracle.coded_posterior import CodedPosterior, indices_crc32
from tfmiracle.decoder import DEFAULT_MAX_WEIGHTS, DecodedNetwork, decode
from tfmiracle.keras_internals import walk
from tfmiracle.layers import VariationalLayer
from tfmiracle.miracle_file import (
    MAX_DESCRIPTION_BYTES,
    MAX_METADATA_BYTES,
    CodedGroup,
    FileFormatError,
    MiracleFile,
)
from tfmiracle.models import (
    VariationalModel,
    configuration,
    ids_under_posteriors,
    plain_weights,
    posteriors,
)
from tfmiracle.rules import Treatment


def to_file(model: keras.Model, metadata: dict | None = None) -> MiracleFile:
    """Collects what a `.miracle` file of a model holds.

    Args:
      model: a `VariationalModel`, or a model with variational layers, whose blocks are
        all fixed.
      metadata: further entries for the file's metadata; anything JSON can say.

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
            posterior.block_bits,
            posterior.codebook,
            posterior.coding_scale,
            keras.ops.convert_to_numpy(posterior.indices).astype(np.int64),
        )
        for posterior, _ in parts
    ]
    stored = [v for v, place in zip(variables, coded, strict=True) if place is None]
    rules, dtypes = {}, [None] * len(stored)
    if isinstance(model, VariationalModel):
        dtypes, places = model.stored_dtypes, _places(model.net)
        for pattern, treatment in model.rules.items():
            if Treatment.parse(treatment).stored:  # the layout tells of the others
                path = pattern.removeprefix(f"{model.net.name}/").split("/")
                rules["/".join(places.get(part, part) for part in path)] = treatment
    _check_stored(model, stored)
    stored = [_storable(v, dtype) for v, dtype in zip(stored, dtypes, strict=True)]
    description = {
        "tfmiracle": tfmiracle.__version__,
        "parameterization": [type(posterior).__name__ for posterior, _ in parts],
        "kl_bits": [getattr(posterior, "kl_bits", None) for posterior, _ in parts],
        **({"rules": rules} if rules else {}),
        **(metadata or {}),
    }
    return MiracleFile(
        _names(_plain(model), variables),
        coded,
        groups,
        stored,
        architecture_by_place(model),
        description,
    )


def coded_posterior(model: keras.Model) -> CodedPosterior:
    """Q of every effective weight of a model, beside its file; see `to_file`."""
    parts = [posterior for posterior, _ in _coded_parts(model)]
    loc, scale = zip(*(posterior.loc_and_scale() for posterior in parts))
    return CodedPosterior(
        [x.numpy() for x in loc],
        [x.numpy() for x in scale],
        indices_crc32(keras.ops.convert_to_numpy(p.indices) for p in parts),
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
      ValueError: if the model cannot be described, see `configuration`, contains a
        variational layer of another package, for which no plain layer is known, or
        something that JSON cannot say.
    """
    if isinstance(model, VariationalModel):
        return plain_architecture(model.net)
    architecture = _strip(configuration(model))
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
) -> keras.Model:
    """Loads the network of a `.miracle` file as a plain Keras model.

    Args:
      path: the file.
      custom_objects: name -> class, for layers that are not registered with Keras.
      max_weights: refuse files that claim more weights than this. It bounds what the
        decoder allocates; Keras allocates what the architecture asks for. None for a
        file that you trust.

    Returns:
      The model with the decoded weights, not compiled; nothing of tfmiracle is in it.

    Raises:
      FileFormatError: if the file is damaged, or its weights do not fit its network.
      ValueError: if Keras cannot rebuild the network, see `build_network`.
      OSError: if the file cannot be read.
    """
    return to_network(decode(path, max_weights), custom_objects)


def to_network(
    decoded: DecodedNetwork, custom_objects: dict | None = None
) -> keras.Model:
    """Builds the Keras model of a decoded file, see `load`."""
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
    """Turns variational layers and models into the plain ones."""
    if isinstance(config, list | tuple):
        return [_strip(item) for item in config]
    if not isinstance(config, dict):
        return config
    cls = _class_of(config)
    if cls is VariationalModel:
        # What calls it inside another model goes by its name.
        place = {k: v for k, v in config.items() if k in ("name", "inbound_nodes")}
        net = _strip(config["config"]["net"])
        if "name" in net["config"]:
            net["config"]["name"] = config["config"]["name"]
        return {**net, **_strip(place)}
    if "output_layers" in config:
        config = _counted_from_one(config)
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
    return {k: _strip(v) for k, v in config.items()}


def _class_of(config):
    """The registered class that a configuration is of, None if there is none."""
    name = config.get("registered_name")
    return keras.saving.get_registered_object(name) if name else None


def _counted_from_one(config):
    """Configuration of a functional model whose inner posteriors become functional.

    Keras counts the calls of layers from 0 where inputs and outputs are listed, but
    those of functional models from 1.
    """

    def is_functional(config):
        if _class_of(config) is VariationalModel:
            return is_functional(config["config"]["net"])
        return "output_layers" in config["config"]

    moved = {
        layer["name"]
        for layer in config["layers"]
        if _class_of(layer) is VariationalModel and is_functional(layer)
    }

    def counted(ends):
        match ends:
            case [str(name), int(call), int(tensor)]:
                return [name, call + (name in moved), tensor]
            case dict():
                return {key: counted(end) for key, end in ends.items()}
            case _:
                return [counted(end) for end in ends]

    return {**config, "output_layers": counted(config["output_layers"])}


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


def _storable(variable, dtype: str | None) -> np.ndarray:
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
    with np.errstate(over="ignore"):
        short = value.astype(dtype)
    if not np.array_equal(np.isfinite(short), np.isfinite(value)):
        raise ValueError(
            f"Variable {variable.path} has values up to {np.max(np.abs(value)):g}, too "
            f"large for {dtype}. Store it as it is."
        )
    return short
