"""Parameterizations of the posterior, as specifications.

A specification is a small frozen object. Hosts (`VariationalModel`, layers, `Recipe`)
hold one, and find it by name as Keras finds initializers. What it says is built by the
module of its posterior, which needs TensorFlow; this module does not.
"""

import abc
import dataclasses
import importlib
from typing import ClassVar

from tfmiracle.options import (
    FINITE,
    POSITIVE,
    integer,
    number,
    option,
    options,
    or_none,
)
from tfmiracle.registry import Registry


class Parameterization(abc.ABC):
    """How the means and variances of Q are made of trained variables.

    Whoever has one of their own derives a class from this one and another from
    `tfmiracle.posteriors.block_posterior.BlockPosterior`, and gives an object of the
    first wherever `parameterization` is an argument. With
    `PARAMETERIZATIONS.register` its name will do, and saved models load.

    Attributes:
      identifier: its name.
      learning_rate: of the means with Adam, where nothing else is said.
      codable: whether Q has a variance, without which there is nothing to code.
      observes: whether its posterior can start from the curvature of the loss, by a
        method `observe`.
    """

    identifier: ClassVar[str]
    learning_rate: ClassVar[float] = 1e-2
    codable: ClassVar[bool] = True
    observes: ClassVar[bool] = False

    @abc.abstractmethod
    def posterior(self, layout, **options):
        """Builds Q.

        Args:
          layout: the `WeightLayout` of its weights.
          **options: for the constructor of `BlockPosterior`.

        Returns:
          A `BlockPosterior`, not started yet (`BlockPosterior.initialize`).
        """

    def meaning(self) -> "Parameterization":
        """The same with the defaults for what only training depends on.

        Weights of a posterior may be loaded into another one whose parameterization has
        the same meaning.
        """
        return self

    def for_steps(self, train_steps: int) -> "Parameterization":
        """The same with what depends on the length of training, where it is open."""
        return self

    def scaled(self, scale: float) -> "Parameterization":
        """The same for training with `scale` times as many steps."""
        return self

    def get_config(self) -> dict:
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}


PARAMETERIZATIONS = Registry("parameterization", Parameterization)


def _initial_budget(default):
    return option(
        default,
        "the KL of a block at first, in multiples of `kl_bits`; it falls to `kl_bits` "
        f"in the course of `annealing_steps`. By default {default:g}.",
        number(1, 1e6),
    )


def _annealing_steps():
    return option(
        None,
        "calls in training in which the budget falls; by default half of the steps of "
        "variational training in `compress`, 1000 elsewhere.",
        or_none(integer(1)),
    )


class ExactBudget(Parameterization):
    """Meets the budget by construction, which may be larger at first.

    See `tfmiracle.posteriors.exact_budget.ExactBudgetPosterior`. A class of it has the
    options `initial_budget` and `annealing_steps`.
    """

    def meaning(self) -> "ExactBudget":
        return dataclasses.replace(self, initial_budget=1.0, annealing_steps=None)

    def for_steps(self, train_steps: int) -> "ExactBudget":
        if self.annealing_steps is not None:
            return self
        return dataclasses.replace(self, annealing_steps=max(1, train_steps // 2))


@PARAMETERIZATIONS.register
@options
class MeanKL(ExactBudget):
    """Mean and KL (Lin et al. 2023): each weight has a share of the budget.

    See `tfmiracle.posteriors.mean_kl_posterior.MeanKLPosterior`.
    """

    identifier: ClassVar[str] = "mean_kl"
    learning_rate: ClassVar[float] = 1e-2
    quota_rate: float = option(
        5.0, "learning rate of the quota logits relative to the means.", POSITIVE
    )
    initial_budget: float = _initial_budget(1.0)
    annealing_steps: int | None = _annealing_steps()

    def posterior(self, layout, **options):
        module = importlib.import_module("tfmiracle.posteriors.mean_kl_posterior")
        return module.MeanKLPosterior(layout, self, **options)


@PARAMETERIZATIONS.register
@options
class Sites(ExactBudget):
    """Pseudo-observations of weights, tempered so that a block meets its budget.

    See `tfmiracle.posteriors.sites_posterior.SitesPosterior`.
    """

    identifier: ClassVar[str] = "sites"
    learning_rate: ClassVar[float] = 5e-3
    observes: ClassVar[bool] = True
    precision_rate: float = option(
        8.0,
        "learning rate of the log precisions of sites relative to their means.",
        POSITIVE,
    )
    initial_budget: float = _initial_budget(4.0)
    annealing_steps: int | None = _annealing_steps()

    def posterior(self, layout, **options):
        module = importlib.import_module("tfmiracle.posteriors.sites_posterior")
        return module.SitesPosterior(layout, self, **options)


@PARAMETERIZATIONS.register
@options
class MeanVar(Parameterization):
    """Mean and log standard deviation (Havasi et al. 2019): the KL is annealed.

    See `tfmiracle.posteriors.mean_var_posterior.MeanVarPosterior`.
    """

    identifier: ClassVar[str] = "mean_var"
    learning_rate: ClassVar[float] = 2e-3
    log_stddev: float = option(
        -5.0, "initial log standard deviation of the posterior.", FINITE
    )
    log_stddev_rate: float = option(
        5.0, "learning rate of it relative to the means.", POSITIVE
    )
    beta: float = option(
        1e-5, "initial weight of the KL of a block (nats) in the loss.", POSITIVE
    )
    beta_rate: float = option(
        1e-3, "relative change of that weight in a step.", POSITIVE
    )

    def posterior(self, layout, **options):
        module = importlib.import_module("tfmiracle.posteriors.mean_var_posterior")
        return module.MeanVarPosterior(layout, self, **options)

    def meaning(self) -> "MeanVar":
        return MeanVar(log_stddev_rate=self.log_stddev_rate)

    def scaled(self, scale: float) -> "MeanVar":
        # So that annealing covers the same range.
        return dataclasses.replace(self, beta_rate=self.beta_rate / scale)


@PARAMETERIZATIONS.register
@options
class Deterministic(Parameterization):
    """No noise and no budget: prepares a warm start; there is nothing to code."""

    identifier: ClassVar[str] = "deterministic"
    codable: ClassVar[bool] = False

    def posterior(self, layout, **options):
        module = importlib.import_module("tfmiracle.posteriors.deterministic_posterior")
        return module.DeterministicPosterior(layout, self, **options)
