"""Statistics of BatchNormalization that fit the weights a file will decode to."""

import contextlib
from collections.abc import Iterable

import keras

from tfmiracle.keras_internals import walk


def recalibrate(model: keras.Model, batches: Iterable) -> int:
    """Sets the statistics of all BatchNormalization to their means over batches.

    In training they follow samples of the weights, with a delay; here the network runs
    as in inference, with the mean of the posterior and the decoded values of blocks
    that are fixed, and only the normalizations take the statistics of each batch.
    Layers that are frozen keep theirs.

    Args:
      model: any Keras model.
      batches: inputs of the model, one batch after the other.

    Returns:
      The number of layers whose statistics were set.
    """
    layers = [
        layer
        for layer in walk(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
    if not layers:
        return 0
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_normalizing_batches(layer))
        for i, batch in enumerate(batches):
            for layer in layers:
                layer.momentum = i / (i + 1)  # the mean over all batches so far
            model(batch, training=False)
    return len(layers)


@contextlib.contextmanager
def _normalizing_batches(layer):
    """Lets a layer do as in training, whatever the layers around it do."""
    call, momentum = layer.call, layer.momentum
    layer.call = lambda inputs, training=None, mask=None: call(
        inputs, training=True, mask=mask
    )
    try:
        yield
    finally:
        layer.momentum = momentum
        del layer.call
