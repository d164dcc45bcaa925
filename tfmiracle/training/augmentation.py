"""Images shifted at random, for training."""

import numpy as np
import tensorflow as tf


def random_shift(images: tf.Tensor, max_shift: int, seed) -> tf.Tensor:
    """Shifts each image by whole pixels, up or down, left or right, at random.

    What moves in is the pixel at the edge.

    Args:
      images: `[batch, height, width, channels]`, any dtype.
      max_shift: the largest shift either way; all shifts are equally likely.
      seed: two integers, which decide everything that is random.

    Returns:
      A tensor like `images`.
    """
    count, height, width = tf.unstack(tf.shape(images)[:3])
    shifts = tf.random.stateless_uniform(
        [2, count, 1], seed, -max_shift, max_shift + 1, tf.int32
    )
    down, right = tf.unstack(shifts)
    rows = tf.clip_by_value(tf.range(height) - down, 0, height - 1)
    columns = tf.clip_by_value(tf.range(width) - right, 0, width - 1)
    shifted = tf.gather(images, rows, axis=1, batch_dims=1)
    shifted = tf.gather(shifted, columns, axis=2, batch_dims=1)
    return tf.ensure_shape(shifted, images.shape)


def check_shift(max_shift: int, inputs) -> None:
    """Raises a `ValueError` unless `inputs`, an array or a spec, can be shifted so."""
    shape = getattr(inputs, "shape", None)
    known = isinstance(inputs, np.ndarray | tf.TensorSpec) and len(shape or ()) == 4
    if not known or any(size is not None and size <= max_shift for size in shape[1:3]):
        raise ValueError(
            "`max_shift` needs one input of images, [batch, height, width, channels], "
            "that are higher and wider than it. Lower it, or leave it at 0. Received: "
            f"max_shift={max_shift} and inputs of shape {shape}"
        )
