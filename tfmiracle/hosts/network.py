"""From Keras models to `.miracle` files; `loading` is the way back."""

import collections
import json

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec import version2
from tfmiracle.codec.coded_posterior import CodedPosterior, codes_crc32
from tfmiracle.codec.parts import stored_values
from tfmiracle.codec.rules import STATISTICS, Treatment
from tfmiracle.decoder import DecodedNetwork
from tfmiracle.hosts.comparison import first_difference
from tfmiracle.hosts.describe import configuration, essential
from tfmiracle.hosts.layers import VariationalLayer
from tfmiracle.hosts.loading import build_network, set_weights, to_network
from tfmiracle.hosts.models import (
    VariationalModel,
    ids_under_posteriors,
    plain_weights,
    posteriors,
    statistics_ids,
)
from tfmiracle.keras_internals import walk
from tfmiracle.miracle_file import (
    MAX_DESCRIPTION_BYTES,
    MAX_METADATA_BYTES,
    CodedGroup,
    Levels,
    MiracleFile,
    check_description,
)


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
            posterior.codes.astype(np.int64),
            posterior.p.prior,
        )
        for posterior, _ in parts
    ]
    stored = [v for v, place in zip(variables, coded, strict=True) if place is None]
    rules = {}
    if isinstance(model, VariationalModel):
        rules = {
            pattern.removeprefix(f"{model.net.name}/"): treatment
            for pattern, treatment in model.rules.items()
            if Treatment.parse(treatment).stored  # the layout tells of the others
        }
    _check_stored(model, stored)
    dtypes = _stored_dtypes(model, stored)
    description = plain_architecture(model)
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
        if dtype is not None:
            v.assign(stored_values(_storable(v, dtype)))


def coded_posterior(model: keras.Model) -> CodedPosterior:
    """Q of every effective weight of a model, beside its file; see `to_file`."""
    parts = [posterior for posterior, _ in _coded_parts(model)]
    loc, scale = zip(*(posterior.loc_and_scale() for posterior in parts))
    return CodedPosterior(
        [x.numpy() for x in loc],
        [x.numpy() for x in scale],
        codes_crc32(p.codes for p in parts),
    )


def inference_weights(model: keras.Model) -> list[np.ndarray]:
    """The plain weights as inference uses them: means, or values decoded, of Q."""
    values = {
        id(v): value
        for posterior, variables in posteriors(model)
        for v, value in zip(variables, posterior.values(), strict=True)
    }
    plain = plain_weights(model)
    return [keras.ops.convert_to_numpy(values.get(id(v), v)) for v in plain]


def check_network(model: keras.Model, batch=None) -> keras.Model:
    """Shows before the training what would make the file of a model wrong.

    Args:
      model: the model.
      batch: inputs on which the network and what is rebuilt of it must compute the
        same; see `first_difference`.

    Returns:
      The plain network, rebuilt for the purpose, with the weights of inference.

    Raises:
      ValueError: if the network cannot be described (its classes, a Lambda layer, a
        number that is not finite), is another one when it is rebuilt (other weights or
        outputs, `tf.Variable`s, an adapted vocabulary), takes more room to describe
        than a file has (a large vocabulary), or has weights that cannot be stored.
    """
    architecture = plain_architecture(model)
    # Twice: what is random in `build` may agree once.
    net, again = build_network(architecture), build_network(architecture)
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
    check_description(architecture, names)
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
        if hasattr(layer, "save_assets") and not _has_its_vocabulary(layer):
            raise ValueError(
                f"The vocabulary of layer {layer.name!r} is not part of its "
                "configuration. Give it as the argument `vocabulary`, instead of "
                "`adapt` or `set_vocabulary`."
            )
    ruled = ids_under_posteriors(model)
    _check_stored(model, [v for v in here if id(v) not in ruled])
    _check_outputs(model, [net, again], batch)
    return net


def _has_its_vocabulary(layer):
    config = layer.get_config()
    if not config.get("vocabulary"):
        return False
    if not hasattr(layer, "get_vocabulary"):
        return True
    return type(layer).from_config(config).get_vocabulary() == layer.get_vocabulary()


def check_decoded(model: keras.Model, decoded: DecodedNetwork, batch=None) -> None:
    """Raises a ValueError if a file's network computes something else than `model`.

    Args:
      model: the model that the file was made of.
      decoded: the network of the file.
      batch: inputs of the model.
    """
    net = to_network(decoded, architecture=plain_architecture(model))
    _check_outputs(model, [net], batch)


def _check_outputs(model, nets, batch):
    weights = inference_weights(model)
    for net in nets:
        set_weights(net, weights)
    layer = first_difference(model, nets, batch)
    if layer is not None:
        raise ValueError(
            f"Layer {layer.name!r} ({type(layer).__name__}) of {model.name!r} computes "
            "something else when it is rebuilt from its configuration and has the same "
            "weights, so a file would hold another network. What its outputs depend on "
            "must be among its weights (`add_weight`) or in its `get_config`: not in "
            "constants made in `build`, attributes set later, or global variables."
        )


def plain_architecture(model: keras.Model) -> dict:
    """Serializes the network without anything variational, as Keras' JSON.

    Its layers keep their names: nobody can tell those that Keras gave from those that
    losses, rules and `get_layer` go by.

    Raises:
      ValueError: if the model cannot be described, see `configuration`, contains a
        variational layer of another package, for which no plain layer is known, or
        something that JSON cannot say.
    """
    if isinstance(model, VariationalModel):
        return plain_architecture(model.net)
    architecture = essential(_strip(configuration(model)))
    try:
        json.dumps(architecture, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"The configuration of {model.name!r} cannot be written as JSON: its "
            "layers must not have arguments that are infinite or NaN."
        ) from error
    return architecture


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


def _names(model, variables) -> list[str]:
    """Paths below the model's own name, made unique."""
    names, seen = [], collections.Counter()
    for v in variables:
        name = v.path.removeprefix(f"{model.name}/")
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
