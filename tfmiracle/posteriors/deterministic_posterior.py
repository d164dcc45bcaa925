"""Q without noise."""

import math

import keras
import tensorflow as tf

from tfmiracle.posteriors.block_posterior import BlockPosterior


@keras.saving.register_keras_serializable("tfmiracle")
class DeterministicPosterior(BlockPosterior):
    """All probability on one point: a hashed network that trains as usual.

    It gives a trained start to the other posteriors; there is nothing to code.
    """

    def _create_parameters(self):
        self.loc = self._add("loc", self.block_shape)

    def _parameters(self):
        return [self.loc]

    def _standardize(self, parameters, log_scale, mask):
        loc = tf.where(mask, parameters[0], 0.0)
        return loc, tf.fill(tf.shape(loc), -math.inf)

    def initialize(self, values, *args, **kwargs):
        super().initialize(values, warm=False, log_scale=0.0)
        self.finalize_coding_scale()  # rho = 1: the parameters are the weights

    def _initial(self, loc, scale, mask, warm):
        return [loc]
