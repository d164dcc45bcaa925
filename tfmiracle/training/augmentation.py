"""Images shifted and mirrored at random, for training."""

import numpy as np
import tensorflow as tf

from tfmiracle.recipe import Recipe


def augment(images: tf.Tensor, max_shift: int, flip: bool, seed) -> tf.Tensor:
    """Mirrors and then shifts each image at random, each on its own.

    Shifts are by whole pixels, up or down, left or right. What moves in is the pixel at
    the edge.

    Args:
      images: `[batch, height, width, channels]`, any dtype.
      max_shift: the largest shift either way; all shifts are equally likely.
      flip: whether every other image, on average, is mirrored left to right.
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
    if flip:
        seed = tf.random.fold_in(seed, 0)  # shifts are the same as without
        mirrored = tf.random.stateless_uniform([count, 1], seed, 0, 2, tf.int32)
        columns = tf.where(mirrored == 1, width - 1 - columns, columns)
    augmented = tf.gather(images, rows, axis=1, batch_dims=1)
    augmented = tf.gather(augmented, columns, axis=2, batch_dims=1)
    return tf.ensure_shape(augmented, images.shape)


def check_augmentation(recipe: Recipe, inputs) -> None:
    """Raises a `ValueError` unless `inputs`, an array or a spec, can be changed so."""
    shape = getattr(inputs, "shape", None)
    known = isinstance(inputs, np.ndarray | tf.TensorSpec) and len(shape or ()) == 4
    if recipe.flip and not known:
        raise ValueError(
            "`flip` needs one input of images, [batch, height, width, channels]. Leave "
            f"it False. Received: flip=True and inputs of shape {shape}"
        )
    largest = recipe.max_shift
    if largest and not (
        known and all(size is None or size > largest for size in shape[1:3])
    ):
        raise ValueError(
            "`max_shift` needs one input of images, [batch, height, width, channels], "
            "that are higher and wider than it. Lower it, or leave it at 0. Received: "
            f"max_shift={largest} and inputs of shape {shape}"
        )
