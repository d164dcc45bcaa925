"""How much each weight matters: the curvature of the loss at a network's weights."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tfmiracle.hosts.models import VariationalModel
from tfmiracle.training.distillation import cross_entropy, losses_of


def curvature(
    model: VariationalModel,
    batches: Iterable,
    loss=None,
    loss_weights=None,
    seed: int = 0,
) -> np.ndarray:
    """The diagonal of the Gauss-Newton matrix of the loss by the effective weights.

    For cross-entropies, labels are drawn from what the network itself says, and the
    mean square of their scores, the Fisher information, is that diagonal; any other
    loss is taken for the mean squared error. So no labels are needed. The scores of the
    examples of a batch are added up with random signs, and the square of that sum is
    on average the sum of their squares: a batch takes one backward pass.

    Args:
      model: whose `net` has the weights at which it is measured.
      batches: inputs, or tuples or lists that begin with them.
      loss, loss_weights: those that the network was compiled with.
      seed: unsigned 64-bit integer that labels and signs depend on.

    Returns:
      float32 `[num_blocks, block_size]`, the second derivative of the loss of an
      example by each weight; zero where padded.

    Raises:
      ValueError: if it is not finite, or there are several losses, but not one for each
        output.
    """
    variables, layout = model.coded_variables, model.block_posterior.layout

    @tf.function(reduce_retracing=True)
    def score_gradients(x, seed):
        with tf.GradientTape() as tape:
            outputs = model.net(x, training=False)
            losses = losses_of(model, outputs, loss)
            weights = _weights(model, outputs, loss_weights)
            score = tf.add_n(
                [
                    weight**0.5 * _signed_score(tf.cast(y, tf.float32), one, seed, i)
                    for i, (y, one, weight) in enumerate(
                        zip(tf.nest.flatten(outputs), losses, weights, strict=True)
                    )
                    if one is not None
                ]
            )
        values = [v.value for v in variables]
        found = tape.gradient(score, values, unconnected_gradients="zero")
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in found]

    squares, count = np.zeros(model.block_posterior.block_shape), 0
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        found = score_gradients(x, tf.constant([seed % 2**31, count], tf.int32))
        pulled = layout.pull_back([g.numpy() for g in found])
        squares += np.square(pulled, dtype=np.float64)
        count += 1
    found = (squares / max(count, 1)).astype(np.float32)
    if not np.isfinite(found).all():
        raise ValueError(
            "The curvature of the loss is not finite at these weights: an output, or "
            "its derivative by a weight, is not. Look for extreme values in the data, "
            "or set `curvature_steps` to 0."
        )
    return found


def _weights(model, outputs, loss_weights):
    """The weight of each output's loss, in the order of `losses_of`."""
    if loss_weights is None:
        return [1.0] * len(tf.nest.flatten(outputs))
    weights = losses_of(model, outputs, loss_weights)
    return [0.0 if weight is None else float(weight) for weight in weights]


def _signed_score(output, loss, seed, number):
    """The scores of all examples (and positions) of one output, with random signs.

    Divided by the root of their number, as the square is to be a mean.
    """
    output = output[:, tf.newaxis] if output.shape.rank == 1 else output
    signs_seed, seed = (
        tf.random.fold_in(seed, 2 * number),
        tf.random.fold_in(seed, 2 * number + 1),
    )
    size = output.shape[-1]
    flat = tf.reshape(output, [-1, size])
    name, from_logits = cross_entropy(loss)
    if name is None:
        # As d/dy of the squared error is the error: with noise for it, of the variance
        # that makes the mean square of the score its second derivative.
        noise = tf.random.stateless_normal(
            tf.shape(flat), seed, stddev=(2 / size) ** 0.5
        )
        score = tf.reduce_sum(noise * flat, -1)
    elif name == "binary_crossentropy":
        logits = flat if from_logits else _log(flat) - _log(1 - flat)
        drawn = tf.random.stateless_uniform(tf.shape(flat), seed)
        label = tf.cast(drawn < tf.sigmoid(logits), tf.float32)
        entropy = tf.nn.sigmoid_cross_entropy_with_logits(label, logits)
        score = tf.reduce_sum(entropy, -1) / size**0.5  # Keras takes the mean
    else:
        log_p = tf.nn.log_softmax(flat) if from_logits else _log(flat)
        label = tf.random.stateless_categorical(log_p, 1, seed)[:, 0]
        score = tf.gather(log_p, label, batch_dims=1)
    signs = tf.random.stateless_uniform(tf.shape(score), signs_seed, 0, 2, tf.int32)
    count = tf.cast(tf.size(score), tf.float32)
    return tf.reduce_sum(tf.cast(2 * signs - 1, tf.float32) * score) / tf.sqrt(count)


def _log(p):
    return tf.math.log(tf.maximum(p, 1e-30))
