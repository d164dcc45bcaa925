"""All settings of a compression run in one place."""

import dataclasses
import math

from tfmiracle import philox
from tfmiracle.codebook import check_code


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a network is trained and coded. The command line has a flag for each field.

    The defaults are for a trained network and minutes on a CPU, a compromise over
    networks and budgets; `PAPER` has the settings of Lin et al. (2023).

    Attributes:
      parameterization: "mean_kl" or "mean_var", which did better in a ResNet-20.
      block_size: number of weights in a block.
      block_bits: bits of the code of a block; coding tries 2**block_bits candidates.
      kl_bits: KL(Q || P) of a block in bits; by default `block_bits`.
      codebook: "per_block" or "shared".
      selection: "sample" or "largest_weight", see `CompressionCallback`.
      batch_size: examples in a training step.
      max_shift: pixels by which training images, `[batch, height, width, channels]`,
        are shifted at most, either way in height and width, at random (augmentation);
        labels are those of the image as it was. 0 is for inputs of any kind.
      warmup_steps: steps of deterministic training, before the variational training
        starts from the weights reached.
      warmup_learning_rate: for these, at the start.
      train_steps: steps of variational training.
      learning_rate: of the means in variational training, at the start; by default
        1e-2, for "mean_var", whose means are weights, 2e-3.
      log_scale_rate: learning rate of the log coding scales relative to the means.
      quota_rate: mean_kl: learning rate of the quota logits relative to the means.
      initial_budget: mean_kl: the KL of a block at first, in multiples of `kl_bits`; it
        falls to `kl_bits` in the first half of the steps of variational training.
      log_stddev: mean_var: initial log standard deviation of the posterior.
      log_stddev_rate: mean_var: learning rate of it relative to the means.
      beta: mean_var: initial weight of the KL of a block (nats) in the loss.
      beta_rate: mean_var: relative change of that weight in a step.
      l2: weight in the loss, in all training, of the sum of squares of the coded
        variables' values, biases too; a weight that entries share counts in each.
      decay: "cosine" (to zero, in either training) or "constant".
      warm_start: whether the posterior's scales and quotas start from the weights.
      log_scale: initial log standard deviation of the coding distribution, if not.
      warm_log_scale: if so, initial log of its ratio to the root mean square of the
        weights. 1 is better than 0 at one bit a weight, worse far below that.
      blocks_per_round: blocks coded between two stretches of fine-tuning.
      finetune_steps: steps of such a stretch; the next multiple of ten is taken.
      finetune_learning_rate: learning rate in fine-tuning, constant; by default half
        of the default above.
      recalibration_steps: batches from which the statistics of BatchNormalization are
        taken anew after coding; 0 leaves them as training left them.
      seed: unsigned 64-bit integer; everything random depends on it.
    """

    parameterization: str = "mean_kl"
    block_size: int = 20
    block_bits: int = 20
    kl_bits: float | None = None
    codebook: str = "shared"
    selection: str = "largest_weight"
    batch_size: int = 64
    max_shift: int = 0
    warmup_steps: int = 0
    warmup_learning_rate: float = 2e-3
    train_steps: int = 6000
    learning_rate: float | None = None
    log_scale_rate: float = 1.0
    quota_rate: float = 5.0
    initial_budget: float = 1.0
    log_stddev: float = -5.0
    log_stddev_rate: float = 5.0
    beta: float = 1e-5
    beta_rate: float = 1e-3
    l2: float = 0.0
    decay: str = "cosine"
    warm_start: bool = True
    log_scale: float = -2.0
    warm_log_scale: float = 0.0
    blocks_per_round: int = 50
    finetune_steps: int = 50
    finetune_learning_rate: float | None = None
    recalibration_steps: int = 50
    seed: int = 0

    def __post_init__(self):
        for name, least in (
            ("block_size", 1),
            ("batch_size", 1),
            ("max_shift", 0),
            ("blocks_per_round", 1),
            ("warmup_steps", 0),
            ("train_steps", 0),
            ("finetune_steps", 0),
            ("recalibration_steps", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**31:
                raise ValueError(
                    f"`{name}` must be an integer of at least {least}, below 2**31. "
                    f"Received: {name}={value!r}"
                )
        for name in (
            "warmup_learning_rate",
            "learning_rate",
            "finetune_learning_rate",
            "log_scale_rate",
            "quota_rate",
            "log_stddev_rate",
            "beta",
            "beta_rate",
        ):
            value = getattr(self, name)
            if value is None and name in ("learning_rate", "finetune_learning_rate"):
                continue
            if not 0 < value < math.inf:
                raise ValueError(
                    f"`{name}` must be a positive number. Received: {name}={value}"
                )
        if not (self.kl_bits is None or 0 <= self.kl_bits < math.inf):
            raise ValueError(
                f"`kl_bits` must be at least 0. Received: kl_bits={self.kl_bits}"
            )
        if not 1 <= self.initial_budget <= 1e6:
            raise ValueError(
                "`initial_budget` must be a number from 1 to 1e6. "
                f"Received: initial_budget={self.initial_budget}"
            )
        if not 0 <= self.l2 < math.inf:
            raise ValueError(f"`l2` must be at least 0. Received: l2={self.l2}")
        for name in ("log_scale", "warm_log_scale", "log_stddev"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(
                    f"`{name}` must be finite. Received: {name}={getattr(self, name)}"
                )
        for name, known in (
            ("parameterization", ("mean_kl", "mean_var")),
            ("decay", ("cosine", "constant")),
            ("selection", ("sample", "largest_weight")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}` must be one of {known}. "
                    f"Received: {name}={getattr(self, name)!r}"
                )
        check_code(self.block_bits, self.codebook)
        philox.split_seed(self.seed)

    @property
    def learning_rates(self) -> tuple[float, float]:
        """Learning rates of variational training and of fine-tuning."""
        default = {"mean_kl": 1e-2, "mean_var": 2e-3}[self.parameterization]
        return (
            self.learning_rate or default,
            self.finetune_learning_rate or default / 2,
        )

    def posterior_options(self) -> dict:
        """What `VariationalModel` takes of it, but for layout and seed."""
        names = (
            "parameterization",
            "block_bits",
            "kl_bits",
            "codebook",
            "warm_start",
            "log_scale",
            "warm_log_scale",
            "log_scale_rate",
            "quota_rate",
            "initial_budget",
            "log_stddev",
            "log_stddev_rate",
            "beta",
            "beta_rate",
            "l2",
        )
        options = {name: getattr(self, name) for name in names}
        options["annealing_steps"] = max(1, self.train_steps // 2)
        return options

    def changes(self) -> dict:
        """The fields that differ from the defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


# Mean-KL; with parameterization="mean_var" and train_steps=200_000 it is Mean-Var.
PAPER = Recipe(
    codebook="per_block",
    selection="sample",
    batch_size=200,
    train_steps=100_000,
    learning_rate=1e-3,
    quota_rate=1.0,
    log_stddev=-10.0,
    log_stddev_rate=1.0,
    beta=1e-8,
    beta_rate=5e-5,
    decay="constant",
    warm_start=False,
    blocks_per_round=1,
    finetune_steps=100,
    finetune_learning_rate=1e-3,
)
