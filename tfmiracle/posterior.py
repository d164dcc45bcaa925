"""The posterior Q over the effective weights, in blocks, and what is fixed of it."""

import math
import weakref
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.code import RandomCode
from tfmiracle.coding import coder as coders
from tfmiracle.coding.coder import Coder
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.keras_internals import has_losses
from tfmiracle.layout import CodedVariable, WeightLayout
from tfmiracle.mean_kl import kl_from_standardized, mean_kl_standardized

# exp() of a log scale stays a normal float32, with room for the products it enters.
_MAX_LOG_SCALE = 60.0
_MAX_LOGIT = 1e30
# Mean and log sigma of Q relative to P, so far out that only their KL, a number of
# 1e24, still matters. It stays finite, also times the largest beta.
_MAX_RATIO = 1e12
_MAX_LOG_RATIO = 27.0
_BETA_RANGE = 1e-30, 1e4
# Weights whose initial parameters are computed at a time, in float64.
_INITIALIZED = 1 << 20


class BlockPosterior(keras.layers.Layer):
    """A factorized posterior over the weights of a `WeightLayout`.

    Holds one trainable coding scale rho per group of variables (the coding distribution
    is P = N(0, rho^2)), the parameters of Q in arrays of shape
    `[num_blocks, block_size]`, and for every block the index of the candidate that it
    was fixed to. Called, it returns the values of the network's variables: a sample of
    Q if `training`, else its mean, and in both cases the decoded candidate for blocks
    that are fixed.

    Everything here is computed in float32, whatever the dtype policy of the network.

    Args:
      layout: where each weight has its place.
      coder: how blocks will be coded, under the seed of the layout; minimal random
        coding by default.
      kl_bits: the budget, KL(Q || P) of each block in bits; by default the bits of its
        code, as in the paper.
      log_scale_rate: how much faster the log coding scales learn than the means. The
        variable holds log rho / log_scale_rate, so that an optimizer that normalizes
        its steps (Adam) moves log rho by log_scale_rate times its learning rate. 1 is
        the paper's.
    """

    # Constructor arguments that the base class does not have.
    OPTIONS: tuple[str, ...] = ()

    def __init__(
        self,
        layout: WeightLayout,
        coder: Coder | None = None,
        kl_bits: float | None = None,
        log_scale_rate: float = 1.0,
        **kwargs,
    ):
        super().__init__(dtype="float32", autocast=False, **kwargs)
        coder = coders.get(coder or MinimalRandomCoder(), layout.seed)
        if kl_bits is None:
            kl_bits = coder.code.bits(layout.block_size)
        if not (0 <= kl_bits < math.inf):
            raise ValueError(
                "`kl_bits` must be a finite number of at least 0, the KL of a block in "
                f"bits. Received: kl_bits={kl_bits}"
            )
        _check_positive(log_scale_rate=log_scale_rate)
        self.layout = layout
        self.coder = coder
        self.kl_bits = float(kl_bits)
        self.log_scale_rate = float(log_scale_rate)
        self.noise_seed = keras.random.SeedGenerator(layout.seed % 2**31)
        self._raw_log_scale = self._add("log_coding_scale", (layout.num_scales,))
        self._create_parameters()
        # rho once it is final, 0 before: candidates are scaled by it, so it must not
        # move any more when the first block is coded.
        self._final_scale = self._add("final_scale", (layout.num_scales,), fixed=True)
        self._candidates = self._add("candidates", self.block_shape, fixed=True)
        # Q of the blocks that are fixed, as it was coded. An optimizer with momentum
        # moves their parameters on.
        self._coded_loc = self._add("coded_loc", self.block_shape, fixed=True)
        self._coded_log_ratio = self._add(
            "coded_log_ratio", self.block_shape, fixed=True
        )
        self.codes = self.add_weight(
            name="codes",
            shape=(layout.num_blocks, *self.code.shape(layout.block_size)),
            dtype="int32",
            initializer=keras.initializers.Constant(-1),
            trainable=False,
        )
        with tf.init_scope():
            self._tables = _Tables(layout)
        self._compiled_values = _compiled(self._values)
        self.built = True

    @property
    def code(self) -> RandomCode:
        """The random code of the blocks."""
        return self.coder.code

    @property
    def block_shape(self) -> tuple[int, int]:
        return self.layout.num_blocks, self.layout.block_size

    def _add(self, name, shape, fixed=False, value=0.0):
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=keras.initializers.Constant(value),
            trainable=not fixed,
            autocast=False,
        )

    # What a parameterization defines.

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

    def _log_scale(self):
        log_scale = self.log_scale_rate * tf.convert_to_tensor(self._raw_log_scale)
        final = tf.convert_to_tensor(self._final_scale)
        is_final = final > 0
        return tf.where(
            is_final,
            tf.math.log(tf.where(is_final, final, 1.0)),
            tf.clip_by_value(log_scale, -_MAX_LOG_SCALE, _MAX_LOG_SCALE),
        )

    def _scale(self):
        final = tf.convert_to_tensor(self._final_scale)
        return tf.where(final > 0, final, tf.exp(self._log_scale()))

    @property
    def coding_scale(self) -> np.ndarray:
        """float32[num_scales]: rho of every group of variables."""
        return keras.ops.convert_to_numpy(self._scale())

    def finalize_coding_scale(self) -> None:
        """Fixes rho, which must not change any more once a block is coded.

        Raises:
          ValueError: if it is not finite.
        """
        scale = self._scale()
        if not np.all(np.isfinite(scale)):
            raise ValueError(
                "A coding scale is not finite; look for divergence in training."
            )
        self._final_scale.assign(scale)

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
            [*parameters, self._log_scale(), self._scale()],
            [tf.convert_to_tensor(self._candidates), self._is_fixed(), noise],
        )

    def _is_fixed(self):
        return self._first_of(tf.convert_to_tensor(self.codes)) >= 0

    def _first_of(self, codes):
        """The first number of each code, -1 where a block is not fixed."""
        return codes[(slice(None), *(0 for _ in codes.shape[1:]))]

    def _values(self, trained, state):
        *parameters, log_scale, scale = trained
        candidates, fixed, noise = state
        tables = self._tables
        loc, log_ratio = self._standardize(
            parameters, _of_slot(log_scale, tables.scale_index), tables.mask
        )
        z = loc if noise is None else loc + tf.exp(log_ratio) * noise
        z = tf.where(fixed[:, None], candidates, z)
        return tables.expand(_of_slot(scale, tables.scale_index) * z)

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
            _of_slot(self._log_scale(), rows(self._tables.scale_index)),
            rows(self._tables.mask),
        )
        coded = rows(self._coded_loc), rows(self._coded_log_ratio)
        fixed = self._first_of(rows(self.codes))[:, None] >= 0
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
        rho = _of_slot(self._scale(), self._tables.scale_index)
        to_effective = self._tables.to_effective
        return to_effective(rho * loc), to_effective(rho * tf.exp(log_ratio))

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
        rho = self._tables.to_effective(
            _of_slot(self._scale(), self._tables.scale_index)
        )
        return _independent_normal(tf.zeros_like(rho), rho)

    # Initialization and coding.

    def initialize(
        self,
        values: Sequence[np.ndarray],
        warm: bool = False,
        log_scale: float = -2.0,
        warm_log_scale: float = 0.0,
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
        _check_finite(log_scale=log_scale, warm_log_scale=warm_log_scale)
        for i, value in enumerate(values):
            if not np.all(np.isfinite(value)):
                raise ValueError(
                    f"Coded variable {i} of shape {np.shape(value)} holds values that "
                    "are not finite. Start from a network whose weights are finite."
                )
        loc = self.layout.project(values)
        index = self.layout.scale_index_of_slot()
        log_scale = np.full(self.layout.num_scales, log_scale, np.float64)
        if warm:
            flat, mask = index.reshape(-1), self.layout.mask().reshape(-1)
            count = np.bincount(flat, mask, self.layout.num_scales)
            power = np.bincount(
                flat, np.square(loc.reshape(-1), dtype=np.float64), len(count)
            )
            some = power > 0
            log_scale[some] = 0.5 * np.log(power[some] / count[some]) + warm_log_scale
        log_scale = np.clip(log_scale, -_MAX_LOG_SCALE, _MAX_LOG_SCALE)
        self._raw_log_scale.assign(log_scale / self.log_scale_rate)
        self._final_scale.assign(np.zeros(self.layout.num_scales))
        self.codes.assign(np.full(self.codes.shape, -1))
        scale, mask = np.exp(log_scale), self.layout.mask()
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
        """bool[num_blocks]: which blocks are fixed to a candidate."""
        return self._first_of(keras.ops.convert_to_numpy(self.codes)) >= 0

    def fix(self, blocks: Sequence[int], codes: np.ndarray) -> None:
        """Fixes blocks to what their codes stand for, now and for ever.

        Args:
          blocks: block numbers.
          codes: the code of each block, see `RandomCode`.

        Raises:
          ValueError: if the coding scale is not final yet, or a code is out of range.
        """
        codes = np.asarray(codes)
        self.code.check(codes)
        if not np.all(keras.ops.convert_to_numpy(self._final_scale) > 0):
            raise ValueError(
                "The coding scale is still trained. Call `finalize_coding_scale()` "
                "before the first block is fixed."
            )
        candidates = self.code.candidates(
            np.asarray(blocks), codes, self.layout.block_size
        )
        rows = np.asarray(blocks, np.int32)[:, None]
        candidates = candidates * self._tables.mask.numpy()[blocks]
        loc, log_ratio = self.standardized(blocks)
        self._coded_loc.value.scatter_nd_update(rows, loc)
        self._coded_log_ratio.value.scatter_nd_update(rows, log_ratio)
        self._candidates.value.scatter_nd_update(rows, candidates)
        self.codes.value.scatter_nd_update(rows, codes.astype(np.int32))


@keras.saving.register_keras_serializable("tfmiracle")
class MeanKLPosterior(BlockPosterior):
    """Gaussian posterior parameterized by mean and KL (Lin et al. 2023, section 3).

    Each block has a budget kappa; weight w gets the share gamma_w of it (softmax of the
    quota logits), its mean is mu = rho sqrt(2 gamma_w kappa) tanh(tau) (equation 5) and
    its variance follows (equation 3). The KL of every block thus equals the budget,
    whatever the parameters.

    The budget can be larger at first and fall in the course of training. A network that
    starts from trained weights then loses information bit by bit, as in Mean-Var,
    instead of all at once. Means fall with the root of the budget, unless tau grows: do
    not code before training has made up for that. The paper has a constant budget.

    Args:
      layout, coder, kl_bits, log_scale_rate: see `BlockPosterior`.
      quota_rate: how much faster quota logits learn than tau, see `log_scale_rate`.
      initial_budget: the budget at first, in multiples of `kl_bits`.
      annealing_steps: number of calls in training in which the budget falls to
        `kl_bits`, by the same factor each; a layer that is called twice in a step takes
        half as many steps. From `finalize_coding_scale` on it is `kl_bits` in any case.
    """

    OPTIONS = ("quota_rate", "initial_budget", "annealing_steps")

    def __init__(
        self,
        layout: WeightLayout,
        *args,
        quota_rate: float = 1.0,
        initial_budget: float = 1.0,
        annealing_steps: int = 1000,
        **kwargs,
    ):
        super().__init__(layout, *args, **kwargs)
        _check_positive(quota_rate=quota_rate, annealing_steps=annealing_steps)
        if not 1 <= initial_budget <= 1e6:
            raise ValueError(
                "`initial_budget` must be a number from 1 to 1e6, a multiple of "
                f"`kl_bits`. Received: initial_budget={initial_budget}"
            )
        self.quota_rate = float(quota_rate)
        self.initial_budget = float(initial_budget)
        self.annealing_steps = annealing_steps
        self._budget = self._add("budget", (layout.num_blocks, 1), True, initial_budget)

    def _create_parameters(self):
        self.tau = self._add("tau", self.block_shape)
        self.quota_logits = self._add("quota_logits", self.block_shape)

    def _parameters(self):
        return [self.tau, self.quota_logits, self._budget]

    def _standardize(self, parameters, log_scale, mask):
        tau, quota, budget = parameters
        logits = tf.clip_by_value(self.quota_rate * quota, -_MAX_LOGIT, _MAX_LOGIT)
        log_share = tf.nn.log_softmax(tf.where(mask, logits, -4 * _MAX_LOGIT))
        # The root is formed in the exponent: kappa -> sqrt(kappa) has no finite
        # derivative at 0.
        sqrt_kappa = tf.exp(0.5 * log_share) * math.sqrt(self.kl_bits * math.log(2))
        return mean_kl_standardized(tau, tf.sqrt(budget) * sqrt_kappa)

    def call(self, training: bool | None = None) -> list[tf.Tensor]:
        values = super().call(training)
        if training and self.initial_budget > 1:
            factor = self.initial_budget ** (-1 / self.annealing_steps)
            budget = tf.convert_to_tensor(self._budget)
            self._budget.assign(tf.maximum(budget * factor, 1.0))
        return values

    def finalize_coding_scale(self) -> None:
        super().finalize_coding_scale()
        self._budget.assign(np.ones(self._budget.shape))

    def _initial(self, loc, scale, mask, warm):
        z = loc / scale
        logits = np.log(z**2 + 0.5) if warm else np.zeros_like(z)
        logits = np.where(mask, logits, -np.inf)
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        limit = np.sqrt(2 * share * self.initial_budget * self.kl_bits * math.log(2))
        tanh = z / np.maximum(limit, np.finfo(np.float32).tiny)
        return [
            np.arctanh(np.clip(tanh, -0.99, 0.99)),
            np.where(mask, logits, 0) / self.quota_rate,
            np.full((len(z), 1), self.initial_budget),
        ]


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
      layout, coder, kl_bits, log_scale_rate: see `BlockPosterior`.
      log_stddev: initial log sigma.
      log_stddev_rate: how much faster log sigma learns than the mean, see
        `log_scale_rate`.
      beta: initial weight of the penalty.
      beta_rate: relative change of beta in a step.
    """

    OPTIONS = ("log_stddev", "log_stddev_rate", "beta", "beta_rate")

    def __init__(
        self,
        layout: WeightLayout,
        *args,
        log_stddev: float = -10.0,
        log_stddev_rate: float = 1.0,
        beta: float = 1e-8,
        beta_rate: float = 5e-5,
        **kwargs,
    ):
        super().__init__(layout, *args, **kwargs)
        _check_positive(log_stddev_rate=log_stddev_rate, beta=beta, beta_rate=beta_rate)
        _check_finite(log_stddev=log_stddev)
        self.initial_log_stddev = float(log_stddev)
        self.log_stddev_rate = float(log_stddev_rate)
        self.initial_beta = float(beta)
        self.beta_rate = float(beta_rate)
        self.beta = self._add("beta", (layout.num_blocks,), True, beta)
        self._compiled_penalty = _compiled(self._penalty)

    def _create_parameters(self):
        self.loc = self._add("loc", self.block_shape)
        self._log_stddev = self._add("log_stddev", self.block_shape)

    def _parameters(self):
        return [self.loc, self._log_stddev]

    def _standardize(self, parameters, log_scale, mask):
        loc, log_stddev = parameters
        log_ratio = self.log_stddev_rate * log_stddev - log_scale
        log_ratio = tf.clip_by_value(log_ratio, -_MAX_LOG_SCALE, _MAX_LOG_RATIO)
        loc = tf.clip_by_value(loc, -_MAX_RATIO, _MAX_RATIO) * tf.exp(-log_scale)
        loc = tf.clip_by_value(loc, -_MAX_RATIO, _MAX_RATIO)
        zero = tf.zeros_like(loc)
        return tf.where(mask, loc, zero), tf.where(mask, log_ratio, zero)

    def initialize(self, *args, **kwargs):
        super().initialize(*args, **kwargs)
        self.beta.assign(np.full(self.layout.num_blocks, self.initial_beta))

    def _initial(self, loc, scale, mask, warm):
        log_stddev = self.initial_log_stddev / self.log_stddev_rate
        return [loc, np.full(loc.shape, log_stddev)]

    def call(self, training: bool | None = None) -> list[tf.Tensor]:
        # Once a step, also where a layer is called several times in it: Keras forgets
        # the losses when the outermost layer is called.
        if training and not has_losses(self):
            parameters = map(tf.convert_to_tensor, self._parameters())
            penalty, beta = self._compiled_penalty(
                [*parameters, self._log_scale()],
                [self._is_fixed(), tf.convert_to_tensor(self.beta)],
            )
            self.add_loss(penalty)
            self.beta.assign(beta)
        return super().call(training)

    def _penalty(self, trained, state):
        *parameters, log_scale = trained
        fixed, beta = state
        tables = self._tables
        q = self._standardize(
            parameters, _of_slot(log_scale, tables.scale_index), tables.mask
        )
        kl = tf.reduce_sum(kl_from_standardized(*q), -1)
        over = kl > self.kl_bits * math.log(2)
        factor = 1.0 + self.beta_rate
        annealed = tf.clip_by_value(
            tf.where(over, beta * factor, beta / factor), *_BETA_RANGE
        )
        penalty = tf.reduce_sum(tf.where(fixed, 0.0, tf.stop_gradient(beta) * kl))
        return penalty, tf.where(fixed, beta, annealed)


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
        super().initialize(values, log_scale=0.0)
        self.finalize_coding_scale()  # rho = 1: the parameters are the weights

    def _initial(self, loc, scale, mask, warm):
        return [loc]


PARAMETERIZATIONS = {
    "mean_kl": MeanKLPosterior,
    "mean_var": MeanVarPosterior,
    "deterministic": DeterministicPosterior,
}


def posterior_over(
    variables: Sequence[keras.Variable],
    parameterization: str = "mean_kl",
    *,
    block_size: int,
    seed: int,
    block_bits: int | None = None,
    codebook: str | None = None,
    hash_factors: Sequence[int] | None = None,
    scale_groups: Sequence[str] | None = None,
    warm_start: bool = False,
    log_scale: float = -2.0,
    warm_log_scale: float = 0.0,
    **options,
) -> BlockPosterior:
    """Builds a posterior over Keras variables, started at their present values.

    Args:
      variables: the variables.
      parameterization: a key of `PARAMETERIZATIONS`.
      block_size, seed: see `WeightLayout`.
      block_bits, codebook: see `MinimalRandomCoder`.
      hash_factors: hash factor of each variable, 1 by default; see `CodedVariable`.
      scale_groups: a name for each variable; those with the same name share a coding
        scale. By default, those of the same layer do.
      warm_start, log_scale, warm_log_scale: see `BlockPosterior.initialize`.
      **options: passed to the posterior's constructor, without those that only other
        parameterizations have.

    Raises:
      ValueError: if an argument is out of range or a value is not finite.
    """
    if parameterization not in PARAMETERIZATIONS:
        raise ValueError(
            f"`parameterization` must be one of {sorted(PARAMETERIZATIONS)}. "
            f"Received: parameterization={parameterization!r}"
        )
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
    cls = PARAMETERIZATIONS[parameterization]
    others = {name for c in PARAMETERIZATIONS.values() for name in c.OPTIONS}
    others.difference_update(cls.OPTIONS)
    coder = coders.get("mrc", block_bits=block_bits, codebook=codebook)
    options = {k: v for k, v in options.items() if k not in others}
    posterior = cls(layout, coder, **options)
    posterior.initialize(
        [keras.ops.convert_to_numpy(v) for v in variables],
        warm_start,
        log_scale,
        warm_log_scale,
    )
    return posterior


def _check_finite(**numbers):
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(
                f"`{name}` must be a finite number. Received: {name}={value}"
            )


def _check_positive(**numbers):
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(
                f"`{name}` must be a positive number. Received: {name}={value}"
            )


def _compiled(method):
    """Compiles `method(trained, state)` with XLA, and its gradient by `trained`.

    Sampling and hashing are many small element-wise operations, which XLA fuses. The
    network around them stays outside: on a CPU, XLA slows convolutions down.

    The gradient computes the method anew. Differentiated by TensorFlow, the compiled
    function would return a copy of all that the gradient needs, its own arguments and
    constants included, and that takes longer. There is no gradient by `state`.
    """
    method = weakref.WeakMethod(method)  # TensorFlow never forgets a custom gradient

    @tf.function(jit_compile=True)
    def forward(trained, state):
        return method()(trained, state)

    @tf.function(jit_compile=True)
    def backward(trained, state, upstream):
        with tf.GradientTape() as tape:
            tape.watch(trained)
            result = method()(trained, state)
        return tape.gradient(result, trained, upstream)

    def call(trained, state):
        @tf.custom_gradient
        def differentiable(*trained):  # these, or there are no second derivatives
            def gradient(*upstream):
                # What a network gathers from, as an Embedding does, has a sparse
                # gradient, for each size of which XLA would compile.
                upstream = [tf.convert_to_tensor(u) for u in upstream]
                return backward(trained, state, upstream)

            return forward(trained, state), gradient

        return differentiable(*trained)

    return call


# The gradients that tf.gather and tf.split have inside a function make XLA compile a
# training step anew each time. Those written here do not.


def _of_slot(scale: tf.Tensor, scale_index: tf.Tensor) -> tf.Tensor:
    """[num_scales] -> the scale of each slot."""

    @tf.custom_gradient
    def gather(scale):
        def gradient(upstream):
            return tf.math.unsorted_segment_sum(upstream, scale_index, scale.shape[0])

        return tf.gather(scale, scale_index), gradient

    return gather(scale)


def _signed_gather(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """[n] -> x[index] where the index is not negative, -x[-1 - index] elsewhere."""
    minus = index < 0
    place = tf.where(minus, -1 - index, index)

    @tf.custom_gradient
    def gather(x):
        def gradient(upstream):
            signed = tf.where(minus, -upstream, upstream)
            return tf.math.unsorted_segment_sum(signed, place, x.shape[0])

        values = tf.gather(x, place)
        return tf.where(minus, -values, values), gradient

    return gather(x)


class _Tables:
    """The layout as tensors, with gradients that need no scatter where none is due."""

    def __init__(self, layout: WeightLayout):
        self.mask = tf.constant(layout.mask())
        self.scale_index = tf.constant(layout.scale_index_of_slot())
        self._slots = tf.constant(layout.slots, tf.int32)
        of_slot = np.full(layout.num_blocks * layout.block_size, layout.num_effective)
        of_slot[layout.slots] = np.arange(layout.num_effective)
        self._weight_of_slot = tf.constant(of_slot, tf.int32)
        self._variables = layout.variables
        # Sign and place of each entry in one number, see `_signed_gather`.
        self._hashing = {
            i: tf.constant(np.where(sign > 0, index, -1 - index), tf.int32)
            for i, v in enumerate(layout.variables)
            if v.hash_factor > 1
            for index, sign in [layout.hashing(i)]
        }

    def to_effective(self, blocks: tf.Tensor) -> tf.Tensor:
        # An argument, although only the gradient needs it: SavedModel refuses gradients
        # that capture what the forward pass does not have.
        @tf.custom_gradient
        def permute(flat, weight_of_slot):
            def gradient(upstream):
                padded = tf.concat([upstream, tf.zeros([1], upstream.dtype)], 0)
                return tf.gather(padded, weight_of_slot), None

            return tf.gather(flat, self._slots), gradient

        return permute(tf.reshape(blocks, [-1]), self._weight_of_slot)

    def expand(self, blocks: tf.Tensor) -> list[tf.Tensor]:
        sizes = [v.effective_size for v in self._variables]

        @tf.custom_gradient
        def split(flat):
            return tf.split(flat, sizes), lambda *upstream: tf.concat(upstream, 0)

        parts = split(self.to_effective(blocks))
        for i, index in self._hashing.items():
            parts[i] = _signed_gather(parts[i], index)
        return [
            tf.reshape(part, v.shape)
            for part, v in zip(parts, self._variables, strict=True)
        ]


def _independent_normal(loc, scale):
    # TFP takes seconds to import and is needed by no other path through this module.
    import tensorflow_probability as tfp

    return tfp.distributions.Independent(
        tfp.distributions.Normal(loc, scale), reinterpreted_batch_ndims=1
    )
