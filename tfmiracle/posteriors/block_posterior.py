"""The posterior Q over the effective weights, in blocks."""

import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.code import RandomCode
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.codec.prior import PRIORS, Prior, ZeroMean, weights
from tfmiracle.coding.coder import MAX_LOG_SCALE, Coder, EncodedBlocks
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.keras_internals import own_variables
from tfmiracle.options import check_option
from tfmiracle.posteriors.coded_blocks import CodedBlocks
from tfmiracle.posteriors.coding_distribution import CodingDistribution
from tfmiracle.posteriors.fingerprint import Fingerprint
from tfmiracle.posteriors.mean_kl import kl_from_standardized
from tfmiracle.posteriors.noise import NoiseSeed
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS, Parameterization
from tfmiracle.posteriors.tensors import LayoutTensors, compiled, float_weight, of_slot
from tfmiracle.recipe import DEFAULTS, Recipe

# Weights whose initial parameters are computed at a time, in float64.
_INITIALIZED = 1 << 20


class BlockPosterior(keras.layers.Layer):
    """A factorized posterior over the weights of a `WeightLayout`.

    Its parts are the coding distribution `p`, the parameters of Q in arrays of shape
    `[num_blocks, block_size]`, which a subclass defines, and the blocks that are
    `coded`. Called, it returns the values of the network's variables: a sample of Q if
    `training`, else its mean, and in both cases the decoded values of blocks that are
    fixed.

    Everything here is computed in float32, whatever the dtype policy of the network.

    Args:
      layout: where each weight has its place.
      parameterization: the specification that it was made by.
      coder: how blocks will be coded, under the seed of the layout; minimal random
        coding by default.
      prior: the means of the coding distribution; zero by default.
      kl_bits: the budget, KL(Q || P) of each block in bits; by default what its code
        says, the bits that it takes, as in the paper.
      log_scale_rate: see `CodingDistribution`.
      noise_seed: seed of the noise in training; by default that of the layout.

    What its weights mean depends on the layout and the options. So these have a
    `Fingerprint` among the weights, and weights with another one are refused.
    """

    def __init__(
        self,
        layout: WeightLayout,
        parameterization: Parameterization,
        coder: Coder | None = None,
        prior: Prior | None = None,
        kl_bits: float | None = None,
        log_scale_rate: float = DEFAULTS.log_scale_rate,
        noise_seed: int | None = None,
        **kwargs,
    ):
        super().__init__(dtype="float32", autocast=False, **kwargs)
        check_option(Recipe, "kl_bits", kl_bits)
        check_option(Recipe, "log_scale_rate", log_scale_rate)
        self.layout = layout
        self.parameterization = parameterization
        self.coder = (coder or MinimalRandomCoder()).for_layout(layout)
        if kl_bits is None:
            kl_bits = self.code.kl_bits(layout.block_size)
        self.kl_bits = float(kl_bits)
        noise_seed = layout.seed if noise_seed is None else noise_seed
        self.noise_seed = NoiseSeed(noise_seed % 2**31)
        self.p = CodingDistribution(self, layout, prior or ZeroMean(), log_scale_rate)
        self._create_parameters()
        self.coded = CodedBlocks(self, layout, self.code)
        meaning = [
            PARAMETERIZATIONS.serialize(parameterization.meaning()),
            (layout.seed, layout.block_size),
            [(v.shape, v.hash_factor, v.scale_index) for v in layout.variables],
            (self.code.identifier, self.code.parameters()),
            PRIORS.serialize(self.p.prior),
            (self.kl_bits, log_scale_rate),
        ]
        with keras.name_scope(self.name):
            self._fingerprint = Fingerprint(meaning)
        with tf.init_scope():
            self._tensors = LayoutTensors(layout, self.p.loc)
        self._compiled_values = compiled(self._values)
        self.built = True

    @property
    def code(self) -> RandomCode:
        """The random code of the blocks."""
        return self.coder.code

    @property
    def kl_nats(self) -> float:
        """The budget of a block, `kl_bits`, in nats."""
        return self.kl_bits * math.log(2)

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layout.num_blocks, self.layout.block_size

    def load_own_variables(self, store):
        # Before any of them is assigned.
        for key, variable in enumerate(own_variables(self)):
            if variable is self._fingerprint and str(key) in store:
                variable.check(store[str(key)])
        super().load_own_variables(store)

    def _add(self, name, shape, trainable=True, value=0.0):
        return float_weight(self, name, shape, trainable, value)

    # What a parameterization defines. Everything is relative to the means of P.

    def _create_parameters(self) -> None:
        raise NotImplementedError

    def _parameters(self) -> list[keras.Variable]:
        """Variables that `_standardize` takes, with a row for each block."""
        raise NotImplementedError

    def _standardize(self, parameters, log_scale, mask):
        """Parameters, log rho and mask of the same blocks -> (mu / rho, log sigma/rho).

        Both are zero where padded. All tensors are `[..., block_size]`, or a parameter
        `[..., 1]`.
        """
        raise NotImplementedError

    def _initial(
        self, loc: np.ndarray, scale: np.ndarray, mask: np.ndarray, warm: bool
    ) -> list[np.ndarray]:
        """Parameters of some blocks whose mean is near `loc`; scale is their rho."""
        raise NotImplementedError

    # The coding distribution.

    @property
    def coding_scale(self) -> np.ndarray:
        """float32[num_scales]: rho of every group of variables."""
        return keras.ops.convert_to_numpy(self.p.scale())

    def finalize_coding_scale(self) -> None:
        """Fixes rho, which must not change any more once a block is coded.

        Raises:
          ValueError: if it is not finite.
        """
        self.p.finalize()

    # Values of the network's variables.

    def call(self, training: bool | None = None) -> list[tf.Tensor]:
        return self.values(sample=bool(training))

    def values(self, sample: bool = False) -> list[tf.Tensor]:
        """The values of the network's variables.

        Args:
          sample: whether to draw them from Q; by default they are its mean. Fixed
            blocks have their decoded values in any case.
        """
        noise = None
        if sample:
            noise = keras.random.normal(
                self.block_shape, dtype="float32", seed=self.noise_seed
            )
        parameters = map(tf.convert_to_tensor, self._parameters())
        return self._compiled_values(
            [*parameters, self.p.log_scale(), self.p.scale()],
            [tf.convert_to_tensor(self.coded.decoded), self._is_fixed(), noise],
        )

    def _is_fixed(self):
        return self.coded.are_fixed(tf.convert_to_tensor(self.coded.codes))

    def _values(self, trained, state):
        *parameters, log_scale, scale = trained
        decoded, fixed, noise = state
        tensors = self._tensors
        loc, log_ratio = self._standardize(
            parameters, of_slot(log_scale, tensors.scale_index), tensors.mask
        )
        z = loc if noise is None else loc + tf.exp(log_ratio) * noise
        values = tensors.weights(z, of_slot(scale, tensors.scale_index))
        return tensors.expand(tf.where(fixed[:, None], decoded, values))

    # Q as numbers, and as TFP distributions.

    def standardized(self, blocks=slice(None)) -> tuple[tf.Tensor, tf.Tensor]:
        """Q relative to P: `(mu / rho, log(sigma / rho))` of the given blocks.

        Blocks that are fixed have the Q they were coded from.

        Args:
          blocks: slice or integer array; all blocks by default.

        Returns:
          Two float32 tensors `[len(blocks), block_size]`, zero where padded.
        """

        def rows(x):  # slices have dense gradients
            x = tf.convert_to_tensor(x)
            return x[blocks] if isinstance(blocks, slice) else tf.gather(x, blocks)

        current = self._standardize(
            [rows(p) for p in self._parameters()],
            of_slot(self.p.log_scale(), rows(self._tensors.scale_index)),
            rows(self._tensors.mask),
        )
        coded = rows(self.coded.loc), rows(self.coded.log_ratio)
        fixed = self.coded.are_fixed(rows(self.coded.codes))[:, None]
        return tuple(tf.where(fixed, c, x) for c, x in zip(coded, current))

    def block_kl(self, blocks=slice(None)) -> tf.Tensor:
        """KL(Q || P) of each block in nats, float32[len(blocks)].

        Where a block is fixed, that of the Q it was coded from.
        """
        return tf.reduce_sum(kl_from_standardized(*self.standardized(blocks)), -1)

    def is_over_budget(self, kl_bits: np.ndarray) -> np.ndarray:
        """Whether the KL of blocks, in bits, exceeds `kl_bits` by more than 1 %."""
        return kl_bits > 1.01 * self.kl_bits

    def loc_and_scale(self) -> tuple[tf.Tensor, tf.Tensor]:
        """mu and sigma of every effective weight, in the order of the network."""
        loc, log_ratio = self.standardized()
        rho = of_slot(self.p.scale(), self._tensors.scale_index)
        to_effective = self._tensors.to_effective
        return (
            to_effective(self._tensors.weights(loc, rho)),
            to_effective(rho * tf.exp(log_ratio)),
        )

    @property
    def distribution(self):
        """Q as a TFP distribution over the vector of all effective weights.

        The vector has the order of the network: first all entries of the first
        variable. Built from the current parameters at each access, so that gradients
        reach them. Blocks that are fixed are described by the Q they were coded from.
        """
        return _independent_normal(*self.loc_and_scale())

    @property
    def coding_distribution(self):
        """P as a TFP distribution over the vector of all effective weights."""
        rho = of_slot(self.p.scale(), self._tensors.scale_index)
        to_effective = self._tensors.to_effective
        loc = self._tensors.weights(tf.zeros_like(rho), rho)
        return _independent_normal(to_effective(loc), to_effective(rho))

    # Initialization and coding.

    def initialize(
        self,
        values: Sequence[np.ndarray],
        warm: bool = DEFAULTS.warm_start,
        log_scale: float = DEFAULTS.log_scale,
        warm_log_scale: float = DEFAULTS.warm_log_scale,
    ) -> None:
        """Starts the posterior at given values of the network's variables.

        Started again, its coding scale is trained again, and no block is fixed.

        Args:
          values: one array per variable of the layout.
          warm: whether the values come from a trained network. If so, rho of each
            group starts at the root mean square of its values, and weights that are
            large beside rho start with a larger share of the information. If not, the
            start is the paper's: equal shares and log rho = `log_scale`.
          log_scale: initial log rho of a cold start.
          warm_log_scale: added to log rho in a warm start.

        Raises:
          ValueError: if a value, `log_scale` or `warm_log_scale` is not finite.
        """
        check_option(Recipe, "log_scale", log_scale)
        check_option(Recipe, "warm_log_scale", warm_log_scale)
        for i, value in enumerate(values):
            if not np.all(np.isfinite(value)):
                raise ValueError(
                    f"Coded variable {i} of shape {np.shape(value)} holds values that "
                    "are not finite. Start from a network whose weights are finite."
                )
        loc = self.layout.project(values)
        if self.p.loc is not None:
            loc = np.where(self.layout.mask(), loc - self.p.loc, 0)
        scale = self.p.start(loc, warm, log_scale, warm_log_scale)
        self.coded.clear()
        index, mask = self.layout.scale_index_of_slot(), self.layout.mask()
        initial = [np.empty(v.shape, np.float32) for v in self._parameters()]
        rows = -(-_INITIALIZED // self.layout.block_size)
        for start in range(0, self.layout.num_blocks, rows):
            some = slice(start, start + rows)
            values = self._initial(loc[some], scale[index[some]], mask[some], warm)
            for array, value in zip(initial, values, strict=True):
                array[some] = value
        for variable, array in zip(self._parameters(), initial, strict=True):
            variable.assign(array)

    @property
    def fixed(self) -> np.ndarray:
        """bool[num_blocks]: which blocks are fixed to the candidate of their code."""
        return self.coded.are_fixed(self.codes)

    @property
    def codes(self) -> np.ndarray:
        """int32[num_blocks, ...]: the codes of the blocks, -1 where not fixed."""
        return keras.ops.convert_to_numpy(self.coded.codes)

    def encode(self, blocks: Sequence[int]) -> EncodedBlocks:
        """Chooses codes for blocks, which `fix` takes.

        Args:
          blocks: block numbers, in order.

        Raises:
          ValueError: if Q is not finite, or the coder wants other blocks coded before.
        """
        blocks = np.asarray(blocks)
        count, size = self.layout.num_blocks, self.layout.block_size
        ahead = np.arange(blocks[-1] + 1, count)[: self.coder.lookahead(size)]
        loc, log_scale = self.standardized(np.append(blocks, ahead))
        before = None
        if blocks[0] and self.fixed[blocks[0] - 1]:
            before = self.codes[blocks[0] - 1]
        # A short last block may have more KL than its few weights can use.
        log_scale = np.clip(log_scale.numpy(), -MAX_LOG_SCALE, MAX_LOG_SCALE)
        return self.coder.encode(blocks, loc.numpy(), log_scale, before)

    def fix(self, blocks: Sequence[int], codes: np.ndarray) -> None:
        """Fixes blocks to what their codes stand for, now and for ever.

        Args:
          blocks: block numbers.
          codes: the code of each block, see `RandomCode`.

        Raises:
          ValueError: if the coding scale is not final yet, or a number is out of range.
        """
        blocks, codes = np.asarray(blocks), np.asarray(codes)
        count = self.layout.num_blocks
        if blocks.dtype.kind not in "iu" or np.any((blocks < 0) | (blocks >= count)):
            raise ValueError(
                f"`blocks` must be integers from 0 to {count - 1}. "
                f"Received: blocks={blocks}"
            )
        self.code.check(codes)
        expected = (len(blocks), *self.code.shape(self.layout.block_size))
        if codes.shape != expected:
            raise ValueError(
                "`codes` must have a row for each of `blocks`. Received: arrays of "
                f"shapes {blocks.shape} and {codes.shape}, where the code makes that "
                f"{expected}"
            )
        if not self.p.is_final:
            raise ValueError(
                "The coding scale is still trained. Call `finalize_coding_scale()` "
                "before the first block is fixed."
            )
        z = self.code.candidates(blocks, codes, self.layout.block_size)
        index = self._tensors.scale_index.numpy()[blocks]
        nu = None if self.p.loc is None else self.p.loc[blocks]
        decoded = weights(z, self.coding_scale[index], nu)
        decoded *= self._tensors.mask.numpy()[blocks]
        self.coded.put(blocks, codes, decoded, *self.standardized(blocks))


def posterior_over(
    variables: Sequence[keras.Variable],
    parameterization: str | dict | Parameterization = DEFAULTS.parameterization,
    *,
    block_size: int,
    seed: int,
    coder: Coder | None = None,
    prior: Prior | None = None,
    kl_bits: float | None = None,
    hash_factors: Sequence[int] | None = None,
    scale_groups: Sequence[str] | None = None,
    warm_start: bool = DEFAULTS.warm_start,
    log_scale: float = DEFAULTS.log_scale,
    warm_log_scale: float = DEFAULTS.warm_log_scale,
    log_scale_rate: float = DEFAULTS.log_scale_rate,
    noise_seed: int | None = None,
) -> BlockPosterior:
    """Builds a posterior over Keras variables, started at their present values.

    Args:
      variables: the variables.
      parameterization: a `Parameterization` or the name of one.
      block_size, seed: see `WeightLayout`.
      coder, prior, kl_bits, log_scale_rate, noise_seed: see `BlockPosterior`.
      hash_factors: hash factor of each variable, 1 by default; see `CodedVariable`.
      scale_groups: a name for each variable; those with the same name share a coding
        scale. By default, those of the same layer do.
      warm_start, log_scale, warm_log_scale: see `BlockPosterior.initialize`.

    Raises:
      ValueError: if an argument is out of range or a value is not finite.
    """
    if hash_factors is None:
        hash_factors = [1] * len(variables)
    if scale_groups is None:
        scale_groups = [v.path.rpartition("/")[0] for v in variables]
    number = {group: i for i, group in enumerate(dict.fromkeys(scale_groups))}
    layout = WeightLayout(
        [
            CodedVariable(tuple(v.shape), factor, number[group])
            for v, factor, group in zip(
                variables, hash_factors, scale_groups, strict=True
            )
        ],
        block_size,
        seed,
    )
    posterior = PARAMETERIZATIONS.get(parameterization).posterior(
        layout,
        coder=coder,
        prior=prior,
        kl_bits=kl_bits,
        log_scale_rate=log_scale_rate,
        noise_seed=noise_seed,
        name="posterior",
    )
    posterior.initialize(
        [keras.ops.convert_to_numpy(v) for v in variables],
        warm_start,
        log_scale,
        warm_log_scale,
    )
    return posterior


def _independent_normal(loc, scale):
    # TFP takes seconds to import and is needed by no other path through this module.
    import tensorflow_probability as tfp

    return tfp.distributions.Independent(
        tfp.distributions.Normal(loc, scale), reinterpreted_batch_ndims=1
    )
