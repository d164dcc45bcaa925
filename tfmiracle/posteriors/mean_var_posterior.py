"""Q by mean and log standard deviation."""

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.layout import WeightLayout
from tfmiracle.keras_internals import has_losses
from tfmiracle.posteriors.block_posterior import BlockPosterior
from tfmiracle.posteriors.coding_distribution import MAX_LOG_SCALE
from tfmiracle.posteriors.mean_kl import kl_from_standardized
from tfmiracle.posteriors.parameterization import MeanVar
from tfmiracle.posteriors.tensors import compiled, of_slot

# Mean and log sigma of Q relative to P, so far out that only their KL, a number of
# 1e24, still matters. It stays finite, also times the largest beta.
_MAX_RATIO = 1e12
_MAX_LOG_RATIO = 27.0
_BETA_RANGE = 1e-30, 1e4


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarPosterior(BlockPosterior):
    """Gaussian posterior parameterized by mean and log sigma (Havasi et al. 2019).

    Nothing keeps it to the budget by itself. In training each call adds the penalty
    sum_b beta_b KL_b (nats, over the blocks that are not fixed yet) to the loss and
    then anneals: beta_b grows by the factor 1 + beta_rate where KL_b exceeds the
    budget, and shrinks by it elsewhere (Lin et al. 2023, section 4). A block that is
    over its budget when its turn comes is coded with the bits it has all the same; its
    code is the less accurate for it, and `CompressionCallback` reports it.

    Args:
      layout: see `BlockPosterior`.
      parameterization: its options. log sigma is held divided by its rate, as
        `CodingDistribution` holds log rho.
      **kwargs: see `BlockPosterior`.
    """

    def __init__(
        self, layout: WeightLayout, parameterization: MeanVar | None = None, **kwargs
    ):
        super().__init__(layout, parameterization or MeanVar(), **kwargs)
        initial = self.parameterization.beta
        self.beta = self._add("beta", (layout.num_blocks,), False, initial)
        self._compiled_penalty = compiled(self._penalty)

    def _create_parameters(self):
        self.loc = self._add("loc", self.block_shape)
        self.log_stddev = self._add("log_stddev", self.block_shape)

    def _parameters(self):
        return [self.loc, self.log_stddev]

    def _standardize(self, parameters, log_scale, mask):
        loc, log_stddev = parameters
        rate = self.parameterization.log_stddev_rate
        log_ratio = rate * log_stddev - log_scale
        log_ratio = tf.clip_by_value(log_ratio, -MAX_LOG_SCALE, _MAX_LOG_RATIO)
        loc = tf.clip_by_value(loc, -_MAX_RATIO, _MAX_RATIO) * tf.exp(-log_scale)
        loc = tf.clip_by_value(loc, -_MAX_RATIO, _MAX_RATIO)
        zero = tf.zeros_like(loc)
        return tf.where(mask, loc, zero), tf.where(mask, log_ratio, zero)

    def initialize(self, *args, **kwargs):
        super().initialize(*args, **kwargs)
        self.beta.assign(np.full(self.layout.num_blocks, self.parameterization.beta))

    def _initial(self, loc, scale, mask, warm):
        options = self.parameterization
        log_stddev = options.log_stddev / options.log_stddev_rate
        return [loc, np.full(loc.shape, log_stddev)]

    def call(self, training: bool | None = None) -> list[tf.Tensor]:
        # Once a step, also where a layer is called several times in it: Keras forgets
        # the losses when the outermost layer is called.
        if training and not has_losses(self):
            parameters = map(tf.convert_to_tensor, self._parameters())
            penalty, beta = self._compiled_penalty(
                [*parameters, self.p.log_scale()],
                [self._is_fixed(), tf.convert_to_tensor(self.beta)],
            )
            self.add_loss(penalty)
            self.beta.assign(beta)
        return super().call(training)

    def _penalty(self, trained, state):
        *parameters, log_scale = trained
        fixed, beta = state
        tensors = self._tensors
        q = self._standardize(
            parameters, of_slot(log_scale, tensors.scale_index), tensors.mask
        )
        kl = tf.reduce_sum(kl_from_standardized(*q), -1)
        over = kl > self.kl_nats
        factor = 1.0 + self.parameterization.beta_rate
        annealed = tf.clip_by_value(
            tf.where(over, beta * factor, beta / factor), *_BETA_RANGE
        )
        penalty = tf.reduce_sum(tf.where(fixed, 0.0, tf.stop_gradient(beta) * kl))
        return penalty, tf.where(fixed, beta, annealed)
