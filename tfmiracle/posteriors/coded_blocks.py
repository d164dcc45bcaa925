"""What is fixed of a posterior: the blocks that are coded."""

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.code import RandomCode
from tfmiracle.codec.layout import WeightLayout
from tfmiracle.posteriors.tensors import float_weight


class CodedBlocks(tf.Module):  # which checkpoints look into
    """The codes of blocks, what they decode to, and the Q that they were coded from.

    Args:
      owner: the layer that the variables are weights of.
      layout: where each weight has its place.
      code: the random code.
    """

    def __init__(self, owner: keras.Layer, layout: WeightLayout, code: RandomCode):
        super().__init__()
        self.code = code
        shape = layout.num_blocks, layout.block_size
        self.decoded = float_weight(owner, "decoded", shape, trainable=False)
        # An optimizer with momentum moves the parameters of fixed blocks on.
        self.loc = float_weight(owner, "coded_loc", shape, trainable=False)
        self.log_ratio = float_weight(owner, "coded_log_ratio", shape, trainable=False)
        self.codes = owner.add_weight(
            name="codes",
            shape=(layout.num_blocks, *code.shape(layout.block_size)),
            dtype="int32",
            initializer=keras.initializers.Constant(-1),
            trainable=False,
        )

    def are_fixed(self, codes):
        """Which blocks are fixed: bool `[B]` of their codes, array or tensor."""
        return codes[(slice(None), *(0 for _ in codes.shape[1:]))] >= 0

    def clear(self) -> None:
        """No block is fixed any more."""
        self.codes.assign(np.full(self.codes.shape, -1))

    def put(self, blocks, codes, decoded, loc, log_ratio) -> None:
        """Fixes blocks; all arguments have a row for each of them."""
        rows = np.asarray(blocks, np.int32)[:, None]
        for variable, values in (
            (self.loc, loc),
            (self.log_ratio, log_ratio),
            (self.decoded, decoded),
            (self.codes, codes.astype(np.int32)),
        ):
            for replica in _replicas(variable):
                replica.scatter_nd_update(rows, values)


def _replicas(variable: keras.Variable) -> list[tf.Variable]:
    """The copies of a variable under a `tf.distribute.Strategy`, or the only one.

    Each replica assigns to its own copy (Keras' default). What training assigns in a
    posterior depends on nothing but such variables, so that the copies stay the same;
    to wait for the other replicas in the middle of a step would mix up the losses that
    Keras collects.
    """
    value = variable.value
    if isinstance(value, tf.distribute.DistributedValues):
        return list(value.values)
    return [value]
