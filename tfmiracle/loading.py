"""From `.miracle` files to Keras models. Needs Keras and NumPy only, on any backend."""

import copy
import os
from collections.abc import Sequence

import keras
import numpy as np

from tfmiracle.decoder import DEFAULT_MAX_WEIGHTS, DecodedNetwork, decode
from tfmiracle.keras_internals import walk
from tfmiracle.miracle_file import FileFormatError


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
