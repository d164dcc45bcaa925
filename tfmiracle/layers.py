"""Keras layers whose own weights are variational, under a budget of their own.

Each is the Keras layer of that name with a posterior over its weights, in the Mean-KL
or the Mean-Var parameterization. Blocks are local to the layer, so every layer gets the
same bits a weight; to let one budget move between layers, wrap the whole network in
`tfmiracle.VariationalModel`, in which these layers, too, share the blocks of the model.
"""

import inspect
import random

import keras

from tfmiracle.keras_internals import own_trainable_variables, track_as_not_trainable
from tfmiracle.posterior import posterior_over
from tfmiracle.scope import is_substituted, refuse_rematerialization, substitute


class VariationalLayer:
    """Mixin that puts a posterior over the weights of a Keras layer.

    In training each call samples the weights; otherwise the mean of Q is used, and
    blocks that are coded always have their decoded values. A layer that is called
    several times in one forward pass draws a sample for each call.

    Use one of its subclasses `MeanKLLayer` and `MeanVarLayer`, which take the arguments
    of the method.
    """

    PARAMETERIZATION: str
    # Constructor arguments that the plain layer does not have.
    OPTIONS: tuple[str, ...]

    def __init__(self, *args, options: dict, **kwargs):
        super().__init__(*args, **kwargs)
        self._options = options
        self.block_posterior = None
        self._substituted = []

    def build(self, input_shape):
        refuse_rematerialization(self)
        super().build(input_shape)
        self._substituted = own_trainable_variables(self)
        for variable in self._substituted:
            track_as_not_trainable(self, variable)
        seed = self._options["seed"]
        self.block_posterior = posterior_over(
            self._substituted,
            self.PARAMETERIZATION,
            name="posterior",
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
        self, warm: bool = True, warm_log_scale: float = 0.0
    ) -> None:
        """Restarts the posterior from the present values of the weights.

        Use it after `set_weights` with the weights of a trained layer.

        Args:
          warm, warm_log_scale: see `tfmiracle.posterior.BlockPosterior.initialize`.
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
        return {**super().get_config(), **self._options}


class MeanKLLayer(VariationalLayer):
    """A layer whose KL is the budget by construction (Lin et al. 2023).

    Args:
      block_size: number of weights in a block.
      block_bits: bits of the code of a block.
      kl_bits: KL(Q || P) of a block in bits; by default `block_bits`.
      codebook: "per_block" or "shared", see `tfmiracle.posterior.BlockPosterior`.
      log_scale: initial log standard deviation of the coding distribution.
      log_scale_rate: see `tfmiracle.posterior.BlockPosterior`.
      quota_rate, initial_budget, annealing_steps: see
        `tfmiracle.posterior.MeanKLPosterior`.
      seed: unsigned 64-bit integer that layout, codebook and training noise depend on.
        By default 0, so that weights fit a layer built anew, with a random seed for the
        noise, which `keras.utils.set_random_seed` determines.
    """

    PARAMETERIZATION = "mean_kl"

    def __init__(
        self,
        *args,
        block_size: int = 20,
        block_bits: int = 20,
        kl_bits: float | None = None,
        codebook: str = "per_block",
        log_scale: float = -2.0,
        log_scale_rate: float = 1.0,
        quota_rate: float = 1.0,
        initial_budget: float = 1.0,
        annealing_steps: int = 1000,
        seed: int | None = None,
        **kwargs,
    ):
        options = {
            "block_size": block_size,
            "block_bits": block_bits,
            "kl_bits": kl_bits,
            "codebook": codebook,
            "log_scale": log_scale,
            "log_scale_rate": log_scale_rate,
            "quota_rate": quota_rate,
            "initial_budget": initial_budget,
            "annealing_steps": annealing_steps,
            "seed": seed,
        }
        super().__init__(*args, options=options, **kwargs)

    OPTIONS = tuple(inspect.getfullargspec(__init__).kwonlyargs)


class MeanVarLayer(VariationalLayer):
    """A layer whose KL is annealed to the budget (Havasi et al. 2019).

    The penalty is part of the loss in training, see `MeanVarPosterior`.

    Args:
      block_size: number of weights in a block.
      block_bits: bits of the code of a block.
      kl_bits: KL(Q || P) of a block in bits; by default `block_bits`.
      codebook: "per_block" or "shared", see `tfmiracle.posterior.BlockPosterior`.
      log_scale: initial log standard deviation of the coding distribution.
      log_scale_rate: see `tfmiracle.posterior.BlockPosterior`.
      log_stddev, log_stddev_rate, beta, beta_rate: see
        `tfmiracle.posterior.MeanVarPosterior`.
      seed: unsigned 64-bit integer that layout, codebook and training noise depend on.
        By default 0, so that weights fit a layer built anew, with a random seed for the
        noise, which `keras.utils.set_random_seed` determines.
    """

    PARAMETERIZATION = "mean_var"

    def __init__(
        self,
        *args,
        block_size: int = 20,
        block_bits: int = 20,
        kl_bits: float | None = None,
        codebook: str = "per_block",
        log_scale: float = -2.0,
        log_scale_rate: float = 1.0,
        log_stddev: float = -10.0,
        log_stddev_rate: float = 1.0,
        beta: float = 1e-8,
        beta_rate: float = 5e-5,
        seed: int | None = None,
        **kwargs,
    ):
        options = {
            "block_size": block_size,
            "block_bits": block_bits,
            "kl_bits": kl_bits,
            "codebook": codebook,
            "log_scale": log_scale,
            "log_scale_rate": log_scale_rate,
            "log_stddev": log_stddev,
            "log_stddev_rate": log_stddev_rate,
            "beta": beta,
            "beta_rate": beta_rate,
            "seed": seed,
        }
        super().__init__(*args, options=options, **kwargs)

    OPTIONS = tuple(inspect.getfullargspec(__init__).kwonlyargs)


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
