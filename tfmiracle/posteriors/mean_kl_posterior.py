"""Q by mean and KL."""

import math

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.layout import WeightLayout
from tfmiracle.posteriors.exact_budget import ExactBudgetPosterior
from tfmiracle.posteriors.mean_kl import mean_kl_standardized
from tfmiracle.posteriors.parameterization import MeanKL

_MAX_LOGIT = 1e30


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLPosterior(ExactBudgetPosterior):
    """Gaussian posterior parameterized by mean and KL (Lin et al. 2023, section 3).

    Each block has a budget kappa; weight w gets the share gamma_w of it (softmax of the
    quota logits), its mean is mu = rho sqrt(2 gamma_w kappa) tanh(tau) (equation 5) and
    its variance follows (equation 3). The KL of every block thus equals the budget,
    whatever the parameters.

    Where the budget falls in the course of training, means fall with its root, unless
    tau grows: do not code before training has made up for that.

    Args:
      layout: see `BlockPosterior`.
      parameterization: its options. Quota logits are held divided by their rate, as
        `CodingDistribution` holds log rho.
      **kwargs: see `BlockPosterior`.
    """

    def __init__(
        self, layout: WeightLayout, parameterization: MeanKL | None = None, **kwargs
    ):
        super().__init__(layout, parameterization or MeanKL(), **kwargs)

    def _create_parameters(self):
        self.tau = self._add("tau", self.block_shape)
        self.quota_logits = self._add("quota_logits", self.block_shape)

    def _parameters(self):
        return [self.tau, self.quota_logits, self._budget]

    def _standardize(self, parameters, log_scale, mask):
        tau, quota, budget = parameters
        rate = self.parameterization.quota_rate
        logits = tf.clip_by_value(rate * quota, -_MAX_LOGIT, _MAX_LOGIT)
        log_share = tf.nn.log_softmax(tf.where(mask, logits, -4 * _MAX_LOGIT))
        # The root is formed in the exponent: kappa -> sqrt(kappa) has no finite
        # derivative at 0.
        sqrt_kappa = tf.exp(0.5 * log_share) * math.sqrt(self.kl_nats)
        return mean_kl_standardized(tau, tf.sqrt(budget) * sqrt_kappa)

    def _initial(self, loc, scale, mask, warm):
        z = loc / scale
        logits = np.log(z**2 + 0.5) if warm else np.zeros_like(z)
        logits = np.where(mask, logits, -np.inf)
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        initial = self.parameterization.initial_budget
        limit = np.sqrt(2 * share * initial * self.kl_nats)
        tanh = z / np.maximum(limit, np.finfo(np.float32).tiny)
        return [
            np.arctanh(np.clip(tanh, -0.99, 0.99)),
            np.where(mask, logits, 0) / self.parameterization.quota_rate,
            np.full((len(z), 1), initial),
        ]
