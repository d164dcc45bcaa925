"""Q whose KL is the budget, whatever its parameters."""

import numpy as np
import tensorflow as tf

from tfmiracle.codec.layout import WeightLayout
from tfmiracle.posteriors.block_posterior import BlockPosterior
from tfmiracle.posteriors.parameterization import ExactBudget


class ExactBudgetPosterior(BlockPosterior):
    """A posterior each of whose blocks has exactly a KL of `kl_bits`, or more at first.

    The budget can be larger at first and fall in the course of training. A network that
    starts from trained weights then loses information bit by bit, as under a penalty,
    instead of all at once. The paper has a constant budget.

    Args:
      layout: see `BlockPosterior`.
      parameterization: its options. The budget falls by the same factor in each call in
        training; a layer that is called twice in a step takes half as many steps. From
        `finalize_coding_scale` on it is `kl_bits` in any case.
      **kwargs: see `BlockPosterior`.
    """

    def __init__(self, layout: WeightLayout, parameterization: ExactBudget, **kwargs):
        super().__init__(layout, parameterization, **kwargs)
        initial = self.parameterization.initial_budget
        # In multiples of `kl_bits`; a parameter of `_standardize`.
        self._budget = self._add("budget", (layout.num_blocks, 1), False, initial)

    def call(self, training: bool | None = None) -> list[tf.Tensor]:
        values = super().call(training)
        initial = self.parameterization.initial_budget
        if training and initial > 1:
            factor = initial ** (-1 / (self.parameterization.annealing_steps or 1000))
            budget = tf.convert_to_tensor(self._budget)
            self._budget.assign(tf.maximum(budget * factor, 1.0))
        return values

    def finalize_coding_scale(self) -> None:
        super().finalize_coding_scale()
        self._budget.assign(np.ones(self._budget.shape))
