"""Q by sites of a common temperature."""

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.layout import WeightLayout
from tfmiracle.posteriors.exact_budget import ExactBudgetPosterior
from tfmiracle.posteriors.parameterization import Sites
from tfmiracle.posteriors.sites import sites_standardized

# Site relative to P, and log of its precision: far out, and their squares finite.
_MAX_RATIO = 1e12
_MAX_LOG_PRECISION = 1e6


@keras.saving.register_keras_serializable("tfmiracle")
class SitesPosterior(ExactBudgetPosterior):
    """Gaussian posterior parameterized by sites.

    Each weight has a site, a mean in units of the weight and a precision relative to
    P's. Q is P times the sites to the power of a temperature that the block has in
    common, and that is solved for, so that the KL of every block equals the budget.
    Information moves between the weights of a block by itself, as under a common
    penalty in `MeanVarPosterior`, and no penalty needs annealing.

    Args:
      layout: see `BlockPosterior`.
      parameterization: its options. The log of the precision is held divided by its
        rate, as `CodingDistribution` holds log rho.
      **kwargs: see `BlockPosterior`.
    """

    def __init__(
        self, layout: WeightLayout, parameterization: Sites | None = None, **kwargs
    ):
        super().__init__(layout, parameterization or Sites(), **kwargs)

    def _create_parameters(self):
        self.site = self._add("site", self.block_shape)
        self.log_precision = self._add("log_precision", self.block_shape)

    def _parameters(self):
        return [self.site, self.log_precision, self._budget]

    def _standardize(self, parameters, log_scale, mask):
        site, log_precision, budget = parameters
        if not self.kl_bits:
            return tf.zeros_like(site), tf.zeros_like(site)
        m = tf.clip_by_value(site, -_MAX_RATIO, _MAX_RATIO) * tf.exp(-log_scale)
        m = tf.clip_by_value(m, -_MAX_RATIO, _MAX_RATIO)
        log_precision = tf.clip_by_value(
            self.parameterization.precision_rate * log_precision,
            -_MAX_LOG_PRECISION,
            _MAX_LOG_PRECISION,
        )
        return sites_standardized(m, log_precision, budget * self.kl_nats, mask)

    def _initial(self, loc, scale, mask, warm):
        log_precision = np.log((loc / scale) ** 2 + 0.5) if warm else np.zeros_like(loc)
        return [
            loc,
            np.where(mask, log_precision, 0) / self.parameterization.precision_rate,
            np.full((len(loc), 1), self.parameterization.initial_budget),
        ]

    def observe(self, curvature: np.ndarray) -> None:
        """Sets the precisions of the sites to the curvature of the loss at the weights.

        Half of it is a weight's own, which a few batches do not tell well, and half the
        mean over its variable.

        Args:
          curvature: `[num_blocks, block_size]`, at least 0, in any unit of the loss.
        """
        layout = self.layout
        sizes = [v.effective_size for v in layout.variables]
        own = layout.to_effective(np.asarray(curvature, np.float64))
        means = [part.mean() for part in np.split(own, np.cumsum(sizes)[:-1])]
        mixed = layout.to_blocks(0.5 * (own + np.repeat(means, sizes)))
        rho = self.coding_scale[layout.scale_index_of_slot()]
        precision = np.maximum(mixed, np.finfo(np.float32).tiny) * rho**2
        log_precision = np.where(layout.mask(), np.log(precision), 0)
        self.log_precision.assign(log_precision / self.parameterization.precision_rate)
