"""Forward passes that leave no trace, in which layers are watched."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfmiracle.keras_internals import global_seed_generator


@contextlib.contextmanager
def wrapped_calls(
    layers: Sequence[keras.Layer], wrap: Callable[[keras.Layer, Callable], Callable]
) -> Iterator[None]:
    """Replaces `call` of each layer by `wrap(layer, call)` for a while."""
    before = [vars(layer).get("call") for layer in layers]
    try:
        for layer in layers:
            layer.call = wrap(layer, layer.call)
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            if call is not None:
                layer.call = call
            else:
                vars(layer).pop("call", None)


@contextlib.contextmanager
def state_kept(model: keras.Model) -> Iterator[None]:
    """Puts back afterwards what passes change: statistics, states, seeds."""
    variables = [v for v in model.variables if not v.trainable]
    variables.append(global_seed_generator().state)
    values = [tf.identity(v) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
