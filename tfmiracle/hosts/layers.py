"""Keras layers whose own weights are variational, under a budget of their own.

Each is the Keras layer of that name with a posterior over its weights, in the Mean-KL
or the Mean-Var parameterization. Blocks are local to the layer, so every layer gets the
same bits a weight; to let one budget move between layers, wrap the whole network in
`tfmiracle.VariationalModel`, in which these layers, too, share the blocks of the model.
"""

import inspect
import random

import keras

from tfmiracle.codec import philox
from tfmiracle.codec.prior import PRIORS, Prior
from tfmiracle.coding.coder import CODERS, Coder
from tfmiracle.hosts.scope import is_substituted, refuse_rematerialization, substitute
from tfmiracle.keras_internals import (
    own_trainable_variables,
    track_as_not_trainable,
)
from tfmiracle.options import check_option
from tfmiracle.posteriors.block_posterior import posterior_over
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS, Parameterization
from tfmiracle.recipe import DEFAULTS, Recipe, coder_of


class VariationalLayer:
    """Mixin that puts a posterior over the weights of a Keras layer.

    In training each call samples the weights; otherwise the mean of Q is used, and
    blocks that are coded always have their decoded values. A layer that is called
    several times in one forward pass draws a sample for each call.

    Args:
      parameterization: a `Parameterization`, or the name of one; by default that of the
        layer's name.
      block_size, block_bits, kl_bits, codebook, state_bits, selection: see
        `Recipe`.
      coder: a `Coder`, which says bits, codebook and selection itself, or the name of
        one, which takes those given here.
      prior: a `Prior`, or the name of one.
      log_scale, log_scale_rate: see `Recipe`.
      seed: unsigned 64-bit integer that layout, codebook and training noise depend on.
        By default 0, so that weights fit a layer built anew, with a random seed for the
        noise, which `keras.utils.set_random_seed` determines.
    """

    PARAMETERIZATION: str = DEFAULTS.parameterization

    def __init__(
        self,
        *args,
        parameterization: str | Parameterization | None = None,
        block_size: int = DEFAULTS.block_size,
        block_bits: float = DEFAULTS.block_bits,
        kl_bits: float | None = DEFAULTS.kl_bits,
        coder: str | Coder = DEFAULTS.coder,
        codebook: str = DEFAULTS.codebook,
        state_bits: int = DEFAULTS.state_bits,
        selection: str = DEFAULTS.selection,
        prior: str | Prior = DEFAULTS.prior,
        log_scale: float = DEFAULTS.log_scale,
        log_scale_rate: float = DEFAULTS.log_scale_rate,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self._parameterization = PARAMETERIZATIONS.get(
            self.PARAMETERIZATION if parameterization is None else parameterization
        )
        self._coder = coder_of(
            coder,
            block_bits=block_bits,
            codebook=codebook,
            state_bits=state_bits,
            selection=selection,
        )
        self._prior = PRIORS.get(prior)
        self._options = {
            "block_size": block_size,
            "kl_bits": kl_bits,
            "log_scale": log_scale,
            "log_scale_rate": log_scale_rate,
            "seed": seed,
        }
        for name in ("block_size", "kl_bits", "log_scale", "log_scale_rate"):
            check_option(Recipe, name, self._options[name])
        philox.split_seed(seed or 0)
        self.block_posterior = None
        self._substituted = []

    # Constructor arguments that the plain layer does not have.
    OPTIONS = tuple(inspect.getfullargspec(__init__).kwonlyargs)

    def build(self, input_shape):
        refuse_rematerialization(self)
        super().build(input_shape)
        self._substituted = own_trainable_variables(self)
        for variable in self._substituted:
            track_as_not_trainable(self, variable)
        seed = self._options["seed"]
        self.block_posterior = posterior_over(
            self._substituted,
            self._parameterization,
            coder=self._coder,
            prior=self._prior,
            warm_start=False,
            **{**self._options, "seed": seed or 0},
            # Layers whose layouts are equal must not have the same noise.
            noise_seed=random.randrange(2**31) if seed is None else seed,
        )

    def call(self, inputs, training=None):
        if is_substituted(self._substituted[0]):
            return super().call(inputs)
        values = self.block_posterior(training=training)
        with substitute(self, self._substituted, values):
            return super().call(inputs)

    def initialize_posterior(
        self,
        warm: bool = DEFAULTS.warm_start,
        warm_log_scale: float = DEFAULTS.warm_log_scale,
    ) -> None:
        """Restarts the posterior from the present values of the weights.

        Use it after `set_weights` with the weights of a trained layer.

        Args:
          warm, warm_log_scale: see `BlockPosterior.initialize`.
        """
        self._built_posterior().initialize(
            [keras.ops.convert_to_numpy(v) for v in self._substituted],
            warm,
            self._options["log_scale"],
            warm_log_scale,
        )

    @property
    def coded_variables(self) -> list[keras.Variable]:
        """The variables of the layer that are coded: its kernels and biases."""
        return list(self._substituted)

    @property
    def posterior(self):
        """Q as a TFP distribution over the flat kernel followed by the bias."""
        return self._built_posterior().distribution

    @property
    def prior(self):
        """The coding distribution P as a TFP distribution, laid out like Q."""
        return self._built_posterior().coding_distribution

    def _built_posterior(self):
        if self.block_posterior is None:
            raise ValueError(
                f"Layer {self.name!r} has no weights yet. Build it first: call it on "
                "data, or call `layer.build(input_shape)`."
            )
        return self.block_posterior

    def get_config(self):
        return {
            **super().get_config(),
            "parameterization": PARAMETERIZATIONS.serialize(self._parameterization),
            "coder": CODERS.serialize(self._coder),
            "prior": PRIORS.serialize(self._prior),
            **self._options,
        }


class MeanKLLayer(VariationalLayer):
    """A layer whose KL is the budget by construction (Lin et al. 2023)."""

    PARAMETERIZATION = "mean_kl"


class MeanVarLayer(VariationalLayer):
    """A layer whose KL is annealed to the budget (Havasi et al. 2019).

    The penalty is part of the loss in training, see `MeanVarPosterior`.
    """

    PARAMETERIZATION = "mean_var"


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLDense(MeanKLLayer, keras.layers.Dense):
    """`keras.layers.Dense` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLEinsumDense(MeanKLLayer, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLEmbedding(MeanKLLayer, keras.layers.Embedding):
    """`keras.layers.Embedding` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLConv1D(MeanKLLayer, keras.layers.Conv1D):
    """`keras.layers.Conv1D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLConv2D(MeanKLLayer, keras.layers.Conv2D):
    """`keras.layers.Conv2D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLConv3D(MeanKLLayer, keras.layers.Conv3D):
    """`keras.layers.Conv3D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLConv1DTranspose(MeanKLLayer, keras.layers.Conv1DTranspose):
    """`keras.layers.Conv1DTranspose` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLConv2DTranspose(MeanKLLayer, keras.layers.Conv2DTranspose):
    """`keras.layers.Conv2DTranspose` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLConv3DTranspose(MeanKLLayer, keras.layers.Conv3DTranspose):
    """`keras.layers.Conv3DTranspose` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLDepthwiseConv1D(MeanKLLayer, keras.layers.DepthwiseConv1D):
    """`keras.layers.DepthwiseConv1D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLDepthwiseConv2D(MeanKLLayer, keras.layers.DepthwiseConv2D):
    """`keras.layers.DepthwiseConv2D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLSeparableConv1D(MeanKLLayer, keras.layers.SeparableConv1D):
    """`keras.layers.SeparableConv1D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLSeparableConv2D(MeanKLLayer, keras.layers.SeparableConv2D):
    """`keras.layers.SeparableConv2D` under a Mean-KL posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarDense(MeanVarLayer, keras.layers.Dense):
    """`keras.layers.Dense` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarEinsumDense(MeanVarLayer, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarEmbedding(MeanVarLayer, keras.layers.Embedding):
    """`keras.layers.Embedding` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarConv1D(MeanVarLayer, keras.layers.Conv1D):
    """`keras.layers.Conv1D` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarConv2D(MeanVarLayer, keras.layers.Conv2D):
    """`keras.layers.Conv2D` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarConv3D(MeanVarLayer, keras.layers.Conv3D):
    """`keras.layers.Conv3D` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarConv1DTranspose(MeanVarLayer, keras.layers.Conv1DTranspose):
    """`keras.layers.Conv1DTranspose` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarConv2DTranspose(MeanVarLayer, keras.layers.Conv2DTranspose):
    """`keras.layers.Conv2DTranspose` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarConv3DTranspose(MeanVarLayer, keras.layers.Conv3DTranspose):
    """`keras.layers.Conv3DTranspose` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarDepthwiseConv1D(MeanVarLayer, keras.layers.DepthwiseConv1D):
    """`keras.layers.DepthwiseConv1D` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarDepthwiseConv2D(MeanVarLayer, keras.layers.DepthwiseConv2D):
    """`keras.layers.DepthwiseConv2D` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarSeparableConv1D(MeanVarLayer, keras.layers.SeparableConv1D):
    """`keras.layers.SeparableConv1D` under a Mean-Var posterior."""


@keras.saving.register_keras_serializable("tfmiracle")
class MeanVarSeparableConv2D(MeanVarLayer, keras.layers.SeparableConv2D):
    """`keras.layers.SeparableConv2D` under a Mean-Var posterior."""
