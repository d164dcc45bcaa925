"""From `.miracle` files to Keras models. Needs Keras and NumPy only, on any backend."""

import collections
import json
import math
import os
from collections.abc import Sequence

import keras
import numpy as np

from tfmiracle.codec import keras_json, version2
from tfmiracle.decoder import DecodedNetwork, decode
from tfmiracle.hosts.allowed import OWN_SEQUENTIAL, Description, NotAllowed, Sequential
from tfmiracle.hosts.describe import configuration, essential
from tfmiracle.keras_internals import walk, watch_building
from tfmiracle.miracle_file import (
    FileFormatError,
)

# A network may have this many layers and operations, and more for each variable; and
# on average, a layer may take and give this many tensors.
_LAYERS, _LAYERS_PER_VARIABLE = 500, 20
_NODES_PER_LAYER = 4
# Tensors that Keras makes of a description, for each that it names: nested models are
# walked through several times.
_TENSORS = 30
_COPIES = 3  # of a weight, that may be made on the way
_MAX_RANK = 64
_MAX_TEXT = 1000  # letters of an error of Keras, at its start and at its end
_MAX_COMPUTED = 1 << 24  # entries of an array that is computed to build a layer


def load(
    path: str | os.PathLike,
    custom_objects: dict | None = None,
    max_weights: int | str | None = "auto",
    model: keras.Model | None = None,
) -> keras.Model:
    """Loads the network of a `.miracle` file as a plain Keras model.

    Nothing of the file is run: it may name layers, operations and activations of Keras,
    and what you register or pass. Of Lambda layers, only those of your functions.

    Args:
      path: the file.
      custom_objects: name -> class or function, for what is not registered with Keras.
      max_weights: refuse a file that claims more weights than this, see `decode`.
      model: a built network like that of the file, which takes the weights. A file
        without its architecture needs it.

    Returns:
      `model`, or a new one, not compiled, with the decoded weights; nothing of
      tfmiracle is in it.

    Raises:
      FileFormatError: if the file is damaged, or its weights do not fit its network.
      ValueError: if the network is refused or cannot be built, see `build_network`, or
        if `model` is another one.
      OSError: if the file cannot be read.
    """
    decoded = decode(path, max_weights)
    if model is None:
        return to_network(decoded, custom_objects)
    return into_network(decoded, model)


def into_network(decoded: DecodedNetwork, model: keras.Model) -> keras.Model:
    """Gives the weights of a decoded file to a network like its own, see `load`."""
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            "`model` must be a built Keras model: call it on a batch, or give it an "
            f"Input. Received: model={model!r}"
        )
    own = essential(configuration(model))
    if decoded.architecture is None:
        same = version2.fingerprint(own) == decoded.fingerprint
    else:  # a stranger's: nothing is made of it that is larger than `own`
        written = json.loads(json.dumps(own))
        there = essential(decoded.architecture)
        same = keras_json.same(*map(version2.nameless, (there, written)))
    shapes = [tuple(v.shape) for v in model.weights]
    # By position: paths of variables depend on how their layers came to be built.
    if not same or shapes != [v.shape for v in decoded.weights.values()]:
        raise ValueError(
            f"`model` ({model.name!r}) is not the network of the file: its layers, or "
            "their names or arguments, are others. Build it as it was when the file "
            "was written. (Keras numbers names on from what was built before in the "
            "process: name the layers, or call `keras.utils.clear_session()` first.)"
        )
    set_weights(model, list(decoded.weights.values()))
    return model


def to_network(
    decoded: DecodedNetwork,
    custom_objects: dict | None = None,
    architecture: dict | None = None,
) -> keras.Model:
    """Builds the Keras model of a decoded file, see `load`.

    Args:
      decoded, custom_objects: see `load`.
      architecture: that of the network, for a file without it.
    """
    architecture = decoded.architecture or architecture
    if architecture is None:
        raise ValueError(
            "The file was written without its architecture. Build the network as it "
            "was, and pass it: `tfmiracle.load(path, model=network)`."
        )
    shapes = [value.shape for value in decoded.weights.values()]
    model = build_network(architecture, custom_objects, shapes)
    # By position: Keras numbers the names of layers anew in every process.
    set_weights(model, list(decoded.weights.values()))
    return model


def build_network(
    architecture: dict,
    custom_objects: dict | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> keras.Model:
    """Builds the Keras model that a description from anywhere asks for.

    Args:
      architecture: the network as Keras' JSON.
      custom_objects: name -> class or function of the caller.
      shapes: of all weights, in the order of the network. If given, a network that asks
        for others is refused before they are allocated, and all weights are zeros;
        otherwise they are initial weights.

    Raises:
      FileFormatError: if the network has other weights than `shapes`.
      ValueError: if it holds what is not allowed (see `allowed`), if it takes far more
        work to build than it has weights, or if Keras cannot build it.
    """
    try:
        description = Description(architecture, custom_objects)
    except NotAllowed as error:
        raise ValueError(
            f"The network is refused: {error} A file may name layers, operations and "
            "activations of Keras. Custom classes and functions, also those of Lambda "
            "layers, must be registered (`keras.saving.register_keras_serializable`) "
            "or passed in `custom_objects`."
        ) from None
    if shapes is not None:
        _check_count(description, len(shapes))
    bounds = _Bounds(description, shapes)
    try:
        with watch_building(bounds.tensor, None if shapes is None else bounds.weight):
            model = keras.saving.deserialize_keras_object(
                description.config,
                custom_objects={**(custom_objects or {}), OWN_SEQUENTIAL: Sequential},
                safe_mode=True,
            )
    except Exception as error:
        if bounds.broken is not None:
            raise bounds.broken from None
        text = str(error)
        if len(text) > 2 * _MAX_TEXT:
            text = f"{text[:_MAX_TEXT]} ... {text[-_MAX_TEXT:]}"
        raise ValueError(f"Keras cannot rebuild the network: {text}") from error
    if bounds.broken is not None:
        raise bounds.broken
    if not (isinstance(model, keras.Model) and model.built):
        raise ValueError(
            "The description of the network does not give a built Keras model. A "
            "subclassed model must define `build` or `get_build_config`."
        )
    if shapes is None:
        _check_count(description, len(model.weights))
    elif [tuple(v.shape) for v in model.weights] != list(shapes):
        raise FileFormatError("The weights of the file do not fit its network.")
    return model


def _check_count(description, variables):
    """Refuses many layers without weights, which cost little in a file."""
    limit = _LAYERS + _LAYERS_PER_VARIABLE * variables
    if description.layers > limit:
        raise FileFormatError(
            f"The network has {description.layers:,} layers and operations for "
            f"{variables:,} variables; a file may have {limit:,}."
        )
    if description.nodes > _NODES_PER_LAYER * limit:
        raise FileFormatError(
            f"The layers of the network take {description.nodes:,} tensors for "
            f"{variables:,} variables; a file may have {_NODES_PER_LAYER * limit:,}."
        )


class _Bounds:
    """What a description may make Keras do. `broken` is the error when it does more."""

    def __init__(self, description, shapes):
        self.broken = None
        self._max_elements = _MAX_COMPUTED if description.computes else math.inf
        self._tensors = _TENSORS * (description.nodes + 10)
        if shapes is not None:
            # Wrappers copy the layer that they are given: `Bidirectional` builds three.
            self._left = collections.Counter([*shapes] * _COPIES)
        if description.largest_shape > self._max_elements:
            raise FileFormatError("A layer is built for too large an input.")

    def tensor(self, shape):
        self._tensors -= 1
        if self._tensors < 0:
            self._refuse("The network refers to itself too often to be built.")
        shape = tuple(shape) if isinstance(shape, list | tuple) else ()
        elements = math.prod(n for n in shape if isinstance(n, int))
        if len(shape) > _MAX_RANK or elements > self._max_elements:
            self._refuse("The network has a tensor of too many dimensions or entries.")

    def weight(self, shape):
        self._left[shape] -= 1
        if self._left[shape] < 0:
            self._refuse(
                "The weights of the file do not fit its network, which has another one "
                f"of shape {shape}."
            )

    def _refuse(self, text):
        # Keras catches errors in places, so that this one is raised again.
        self.broken = self.broken or FileFormatError(text)
        raise self.broken


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
    # Without `predict`, whose dataset takes longer than a small network.
    batches = (x[start : start + 500] for start in range(0, len(x), 500))
    scores = np.concatenate([model.predict_on_batch(batch) for batch in batches])
    return float(np.mean(np.argmax(scores, -1) == y))
