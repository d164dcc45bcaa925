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
        name, from_logits = _cross_entropy(loss)
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
        name, from_logits = _cross_entropy(loss)
        if not from_logits:
            return lambda y: y
        return keras.ops.sigmoid if name == "binary_crossentropy" else keras.ops.softmax

    functions = tf.nest.map_structure(probabilities, "mse" if loss is None else loss)

    def labels(x):
        outputs = in_whole_batches(teacher, x, training=False)
        if callable(functions):
            return tf.nest.map_structure(functions, outputs)
        return tf.nest.map_structure(
            lambda y, function: function(y), outputs, functions, check_types=False
        )

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


def sampled_labels(outputs, loss, seed) -> list[tuple]:
    """Labels drawn from what a network says.

    Args:
      outputs: float32 outputs of the network.
      loss: a loss for all of them, or a structure like that of `outputs`, see
        `soft_loss`. Where it is no cross-entropy, labels are normal, of mean `outputs`
        and variance 1.
      seed: two integers, which decide what is drawn.

    Returns:
      For each output that has a loss: the loss that compares it with its labels, the
      labels, float32 like the output (those of classes are one-hot rows), and the
      output.

    Raises:
      ValueError: if there are several losses, but not one for each output.
    """
    flat = tf.nest.flatten(outputs)
    if isinstance(loss, dict) and isinstance(outputs, dict):
        loss = {name: loss.get(name) for name in outputs}
    losses = tf.nest.flatten("mse" if loss is None else loss)
    losses = losses * len(flat) if len(losses) == 1 else losses
    if len(losses) != len(flat):
        raise ValueError(
            f"`loss` must be one loss, or one for each of the {len(flat)} outputs, "
            f"arranged as they are. Received: loss={loss!r}"
        )
    return [
        (
            soft_loss(one),
            _draw(tf.stop_gradient(y), one, tf.random.fold_in(seed, 2 * i + 1)),
            y,
        )
        for i, (y, one) in enumerate(zip(flat, losses, strict=True))
        if one is not None
    ]


def _draw(outputs, loss, seed):
    name, from_logits = _cross_entropy(loss)
    if name is None:
        return outputs + tf.random.stateless_normal(tf.shape(outputs), seed)
    if name == "binary_crossentropy":
        p = tf.sigmoid(outputs) if from_logits else outputs
        return tf.cast(tf.random.stateless_uniform(tf.shape(p), seed) < p, tf.float32)
    classes = outputs.shape[-1]
    logits = tf.reshape(outputs, [-1, classes])
    if not from_logits:
        logits = tf.math.log(tf.maximum(logits, 1e-30))
    drawn = tf.random.stateless_categorical(logits, 1, seed)
    return tf.reshape(tf.one_hot(drawn[:, 0], classes), tf.shape(outputs))


def _cross_entropy(loss):
    """Name of a cross-entropy, or None, and whether it takes logits."""
    loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        name = _NAMES.get(type(loss))
        return name, bool(name and loss.get_config().get("from_logits"))
    name = getattr(loss, "__name__", None)
    return (name if name in _SOFT else None), False
