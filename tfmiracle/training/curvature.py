"""How much each weight matters: the curvature of the loss at a network's weights."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tfmiracle.hosts.models import VariationalModel
from tfmiracle.training.distillation import sampled_labels


def curvature(
    model: VariationalModel, batches: Iterable, loss=None, seed: int = 0
) -> np.ndarray:
    """The diagonal of the Fisher information of the effective weights.

    It is the expected second derivative of the log likelihood of labels that are drawn
    from what the network itself says, so that no others are needed. The scores of the
    examples of a batch are added up with random signs, and the square of that sum is
    on average the sum of their squares: a batch takes one backward pass.

    Args:
      model: whose `net` has the weights at which it is measured.
      batches: inputs, or tuples that begin with them.
      loss: the loss of the network, see `soft_loss`.
      seed: unsigned 64-bit integer that labels and signs depend on.

    Returns:
      float32 `[num_blocks, block_size]`, in nats for an example over squared units of
      the weight; zero where padded.
    """
    variables, layout = model.coded_variables, model.block_posterior.layout

    @tf.function
    def score_gradients(x, seed):
        with tf.GradientTape() as tape:
            score = _signed_score(model.net(x, training=False), loss, seed)
        values = [v.value for v in variables]
        found = tape.gradient(score, values, unconnected_gradients="zero")
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in found]

    squares, count = np.zeros(model.block_posterior.block_shape), 0
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple) else batch
        found = score_gradients(x, tf.constant([seed % 2**31, count], tf.int32))
        squares += np.square(layout.pull_back([g.numpy() for g in found]))
        count += 1
    return (squares / max(count, 1)).astype(np.float32)


def _signed_score(outputs, loss, seed):
    """A sum over examples (and positions, and outputs) with random signs.

    Divided by the root of the number of examples, as its square is to be a mean.
    """
    outputs = tf.nest.map_structure(lambda y: tf.cast(y, tf.float32), outputs)
    total = 0.0
    for i, (compare, label, output) in enumerate(sampled_labels(outputs, loss, seed)):
        if output.shape.rank == 1:
            label, output = label[:, tf.newaxis], output[:, tf.newaxis]
        shape = tf.shape(output)[:-1]
        signs = tf.random.stateless_uniform(
            shape, tf.random.fold_in(seed, 2 * i), 0, 2, tf.int32
        )
        signs = tf.cast(2 * signs - 1, tf.float32)
        count = tf.cast(tf.reduce_prod(shape), tf.float32)
        total += tf.sqrt(count) * compare(label, output, sample_weight=signs)
    return total
