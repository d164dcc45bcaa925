"""Labels from a trained network, where there are no others."""

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.hosts.models import in_whole_batches
from tfmiracle.structures import as_arrays

_SOFT = {
    "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    "sparse_categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    "binary_crossentropy": keras.losses.BinaryCrossentropy,
}
_NAMES = {
    keras.losses.CategoricalCrossentropy: "categorical_crossentropy",
    keras.losses.SparseCategoricalCrossentropy: "sparse_categorical_crossentropy",
    keras.losses.BinaryCrossentropy: "binary_crossentropy",
}


def soft_loss(loss=None):
    """The loss that compares outputs with those of a trained network.

    Args:
      loss: the loss that it was trained with, a Keras loss or its name, or a structure
        of them like the outputs.

    Returns:
      The cross-entropy with soft labels where `loss` is one with labels of any kind,
      else the mean squared error; a structure like that of `loss`.
    """

    def soft(loss):
        name, from_logits = cross_entropy(loss)
        return _SOFT[name](from_logits) if name else keras.losses.MeanSquaredError()

    return tf.nest.map_structure(soft, "mse" if loss is None else loss)


def relabel(data, teacher: keras.Model, loss=None, batch_size: int = 64):
    """Replaces labels by the outputs of a trained network (Hinton et al. 2015).

    Args:
      data: inputs or a tuple `(x, y)` or `(x, y, sample_weight)`, as arrays or in a
        batched `tf.data.Dataset`; None stays None.
      teacher: the network.
      loss: see `soft_loss`; where it takes logits, labels become probabilities.
      batch_size: examples in a forward pass, if they are arrays.

    Returns:
      `(x, labels)` or `(x, labels, sample_weight)`, likewise.
    """

    def probabilities(loss):
        name, from_logits = (None, False) if loss is None else cross_entropy(loss)
        if not from_logits:
            return lambda y: y
        return keras.ops.sigmoid if name == "binary_crossentropy" else keras.ops.softmax

    def labels(x):
        outputs = in_whole_batches(teacher, x, training=False)
        losses = losses_of(teacher, outputs, loss)
        flat = [
            probabilities(one)(y)
            for one, y in zip(losses, tf.nest.flatten(outputs), strict=True)
        ]
        return tf.nest.pack_sequence_as(outputs, flat)

    if data is None:
        return None
    if isinstance(data, tf.data.Dataset):
        return data.map(lambda x, *rest: (x, labels(x), *rest[1:]))
    x, *rest = data if isinstance(data, tuple) else (data,)
    x = as_arrays(x)
    batches = tf.data.Dataset.from_tensor_slices((x,)).batch(batch_size).map(labels)
    parts = list(batches.as_numpy_iterator())
    y = tf.nest.map_structure(lambda *part: np.concatenate(part), *parts)
    return x, y, *rest[1:]


def losses_of(model: keras.Model, outputs, loss) -> list:
    """The loss of each output, in the order of `tf.nest.flatten(outputs)`.

    Args:
      model: whose outputs they are.
      outputs: a tensor or a structure of them.
      loss: one loss for all, or a structure like `outputs`, or a dictionary by the
        names of outputs. An output that has none there has None.

    Raises:
      ValueError: if there are several losses, but not one for each output.
    """
    flat = tf.nest.flatten(outputs)
    if isinstance(loss, dict):
        names = getattr(model, "output_names", None) or []
        if isinstance(outputs, dict):
            names = sorted(outputs)  # as `flatten` has them
        losses = [loss.get(name) for name in names]
    else:
        losses = tf.nest.flatten("mse" if loss is None else loss)
        losses = losses * len(flat) if len(losses) == 1 else losses
    if len(losses) != len(flat):
        raise ValueError(
            f"`loss` must be one loss, or one for each of the {len(flat)} outputs, "
            f"arranged as they are. Received: loss={loss!r}"
        )
    return losses


def cross_entropy(loss) -> tuple[str | None, bool]:
    """Name of a cross-entropy, or None, and whether it takes logits."""
    loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        name = _NAMES.get(type(loss))
        return name, bool(name and loss.get_config().get("from_logits"))
    name = getattr(loss, "__name__", None)
    return (name if name in _SOFT else None), False
