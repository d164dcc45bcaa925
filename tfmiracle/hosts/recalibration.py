"""Statistics of BatchNormalization that fit the weights a file will decode to."""

import collections
import contextlib
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfmiracle.hosts.passes import state_kept, wrapped_calls
from tfmiracle.keras_internals import walk


def recalibrate(model: keras.Model, batches: Iterable) -> int:
    """Sets the statistics of all BatchNormalization to their means over batches.

    In training they follow samples of the weights, with a delay; here the network runs
    as in inference, with the mean of the posterior and the decoded values of blocks
    that are fixed, and only the normalizations take the statistics of each batch, in
    those of their calls in which training would. Layers that are frozen, or that the
    network calls with `training=False`, keep theirs.

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
    # By layer: whether each of its calls in a pass is one in training.
    trains = collections.defaultdict(list)
    updates = collections.Counter()

    def note(layer, call):
        def noted(inputs, training=None, mask=None):
            trains[id(layer)].append(bool(training))
            return call(inputs, training=False, mask=mask)

        return noted

    def normalize(layer, call):
        plan = iter(trains[id(layer)])

        def normalized(inputs, training=None, mask=None):
            training = next(plan, False)
            if training:  # the mean over all calls so far
                layer.momentum = updates[id(layer)] / (updates[id(layer)] + 1)
                updates[id(layer)] += 1
            return call(inputs, training=training, mask=mask)

        return normalized

    momenta = [layer.momentum for layer in layers]
    try:
        for i, batch in enumerate(batches):
            if not i:
                with state_kept(model), wrapped_calls(layers, note), _untraced():
                    model(batch, training=True)
            if any(map(any, trains.values())):
                with wrapped_calls(layers, normalize), _untraced():
                    model(batch, training=False)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return len(updates)


@contextlib.contextmanager
def _untraced():
    """Runs the functions of a network eagerly, or they would keep what is wrapped."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
