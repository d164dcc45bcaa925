"""All settings of a compression run, with their defaults and checks: the one table."""

import dataclasses

from tfmiracle.codec import philox
from tfmiracle.codec.code import MinimalRandomCode
from tfmiracle.codec.codebook import check_code
from tfmiracle.codec.prior import PRIORS, Prior, ZeroMean
from tfmiracle.codec.trellis import TrellisCode, check_state_bits
from tfmiracle.coding.coder import CODERS, SELECTIONS, Coder
from tfmiracle.options import (
    FINITE,
    POSITIVE,
    SWITCH,
    changes,
    integer,
    number,
    one_of,
    option,
    options,
    or_none,
)
from tfmiracle.posteriors.parameterization import (
    PARAMETERIZATIONS,
    MeanKL,
    MeanVar,
    Parameterization,
    Sites,
)

# What a coder object says itself, and a coder given by name is made with.
CODER_OPTIONS = ("block_bits", "codebook", "state_bits", "selection")


@options
class Recipe:
    """How a network is trained and coded. The command line has a flag for each option.

    The defaults are for a trained network and minutes on a CPU, a compromise over
    networks and budgets; `PAPER` has the settings of Lin et al. (2023). `compress`,
    `VariationalModel`, layers and callback have their defaults from here.
    """

    parameterization: str | Parameterization = option(
        MeanKL(),
        "'mean_kl', or 'mean_var', which did better in a ResNet-20; in Python also an "
        "object that says more, such as MeanKL(quota_rate=1.0).",
    )
    block_size: int = option(20, "number of weights in a block.", integer(1))
    block_bits: float | int = option(
        MinimalRandomCode.block_bits,
        "bits of the code of a block: a whole number for 'mrc', which tries "
        "2**block_bits candidates; any number for 'trellis', on average.",
        number(0),
    )
    kl_bits: float | None = option(
        None,
        "KL(Q || P) of a block in bits; by default `block_bits`.",
        or_none(number(0)),
    )
    coder: str | Coder = option(
        "mrc",
        "'mrc', minimal random coding; 'trellis', one code for all blocks; or another "
        "coder that is registered. In Python also an object, which says bits, "
        "codebook, states and selection itself.",
    )
    state_bits: int = option(
        TrellisCode.state_bits,
        "'trellis': bits of the code that a weight depends on, 8 to 20. Each more "
        "doubles the time of coding and makes it more accurate.",
    )
    prior: str | Prior = option(
        ZeroMean(),
        "means of the coding distribution: 'zero', or another prior that is "
        "registered; in Python also an object.",
    )
    codebook: str = option(
        MinimalRandomCode.codebook,
        "'per_block', the paper's, or 'shared' by all blocks, which makes coding many "
        "blocks at once faster.",
    )
    selection: str = option(
        "largest_weight",
        "'sample' chooses a candidate with probability proportional to its importance "
        "weight, the paper's rule; 'largest_weight' takes the best, which is more "
        "accurate at the same number of bits.",
        one_of(*SELECTIONS),
    )
    batch_size: int = option(64, "examples in a training step.", integer(1))
    max_shift: int = option(
        0,
        "pixels by which training images, [batch, height, width, channels], are "
        "shifted at most, either way in height and width, at random (augmentation); "
        "labels are those of the image as it was. 0 is for inputs of any kind.",
        integer(0),
    )
    flip: bool = option(
        False,
        "whether training images, [batch, height, width, channels], are mirrored left "
        "to right at random (augmentation), before they are shifted.",
        SWITCH,
    )
    warmup_steps: int = option(
        0,
        "steps of deterministic training, before the variational training starts from "
        "the weights reached.",
        integer(0),
    )
    warmup_learning_rate: float = option(
        2e-3, "learning rate in deterministic training, at the start.", POSITIVE
    )
    curvature_steps: int = option(
        0,
        "'sites': batches on which the curvature of the loss at the weights is "
        "measured, from which the posterior starts; with 0 from the weights alone.",
        integer(0),
    )
    train_steps: int = option(6000, "steps of variational training.", integer(0))
    learning_rate: float | None = option(
        None,
        "learning rate of the means in variational training, at the start; by default "
        "1e-2, and for 'mean_var', whose means are weights, 2e-3.",
        or_none(POSITIVE),
    )
    l2: float = option(
        0.0,
        "weight in the loss, in all training, of the sum of squares of the coded "
        "variables' values, biases too; a weight that entries share counts in each.",
        number(0),
    )
    decay: str = option(
        "cosine",
        "what becomes of a learning rate in the course of training: 'cosine' (it falls "
        "to zero) or 'constant'.",
        one_of("cosine", "constant"),
    )
    warm_start: bool = option(
        True,
        "whether the posterior's scales and quotas start from the weights.",
        SWITCH,
    )
    log_scale: float = option(
        -2.0,
        "initial log standard deviation of the coding distribution without "
        "`warm_start`.",
        FINITE,
    )
    warm_log_scale: float = option(
        0.0,
        "with `warm_start`, initial log of the ratio of that standard deviation to the "
        "root mean square of the weights. 1 is better than 0 at one bit a weight, "
        "worse far below that.",
        FINITE,
    )
    log_scale_rate: float = option(
        1.0,
        "learning rate of the log coding scales relative to the means.",
        POSITIVE,
    )
    blocks_per_round: int = option(
        50, "blocks coded between two stretches of fine-tuning.", integer(1)
    )
    finetune_steps: int = option(
        50,
        "steps of fine-tuning between two rounds of coding; the next multiple of ten "
        "is taken.",
        integer(0),
    )
    finetune_learning_rate: float | None = option(
        None,
        "learning rate in fine-tuning, constant; by default half of the default of "
        "`learning_rate`.",
        or_none(POSITIVE),
    )
    recalibration_steps: int = option(
        50,
        "batches from which the statistics of BatchNormalization are taken anew after "
        "coding; 0 leaves them as training left them.",
        integer(0),
    )
    seed: int = option(0, "unsigned 64-bit integer; everything random depends on it.")

    def __post_init__(self):
        parameterization = PARAMETERIZATIONS.get(self.parameterization, codable=True)
        object.__setattr__(self, "parameterization", parameterization)
        if self.curvature_steps and not parameterization.observes:
            raise ValueError(
                "`curvature_steps` must be 0 unless the parameterization starts from "
                "the curvature, as 'sites' does. Received: "
                f"curvature_steps={self.curvature_steps} and parameterization="
                f"{parameterization.identifier!r}"
            )
        if isinstance(self.coder, str):  # found where it is used, with TensorFlow
            CODERS.check(self.coder)
        else:
            object.__setattr__(self, "coder", self.made_coder())
        object.__setattr__(self, "prior", PRIORS.get(self.prior))
        if self.block_bits == int(self.block_bits):  # flags are not whole
            object.__setattr__(self, "block_bits", int(self.block_bits))
        if self.coder == "mrc":
            check_code(self.block_bits, self.codebook)
        check_state_bits(self.state_bits)
        philox.split_seed(self.seed)

    @property
    def posterior(self) -> Parameterization:
        """The parameterization, its open options chosen for the length of training."""
        return self.parameterization.for_steps(self.train_steps)

    @property
    def learning_rates(self) -> tuple[float, float]:
        """Learning rates of variational training and of fine-tuning."""
        default = self.posterior.learning_rate
        return (
            self.learning_rate or default,
            self.finetune_learning_rate or default / 2,
        )

    def made_coder(self) -> Coder:
        """The coder, which checks its options. By name it needs TensorFlow."""
        return coder_of(self.coder, **{n: getattr(self, n) for n in CODER_OPTIONS})

    def model_options(self) -> dict:
        """What `VariationalModel` takes of it."""
        names = (
            "block_size",
            "block_bits",
            "kl_bits",
            "coder",
            "state_bits",
            "prior",
            "codebook",
            "selection",
            "warm_start",
            "log_scale",
            "warm_log_scale",
            "log_scale_rate",
            "l2",
            "seed",
        )
        return {name: getattr(self, name) for name in names}

    def settings(self) -> dict:
        """All options, as JSON can say them, and those of the parameterization."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found["parameterization"] = self.parameterization.identifier
        if isinstance(self.coder, Coder):
            found["coder"] = CODERS.serialize(self.coder)
            for name in CODER_OPTIONS:
                del found[name]
        found["prior"] = PRIORS.serialize(self.prior)
        return {**found, **self.parameterization.get_config()}

    def changes(self) -> dict:
        """The options that differ from the defaults."""
        return changes(self)


def coder_of(coder: str | dict | Coder, **options) -> Coder:
    """The coder for what a user gave.

    Args:
      coder: a `Coder`, which says all by itself; what `CODERS.serialize` made; or the
        name of one.
      **options: `CODER_OPTIONS` for a coder given by name; those that it does not have
        are left out.

    Raises:
      ValueError: if there is none of this name, an option is out of range, or an object
        says another value of one that is not the default.
    """
    if isinstance(coder, str):
        cls = CODERS.find(coder)
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in options.items() if k in known})
    coder = CODERS.get(coder)
    for name, value in options.items():
        if value not in (getattr(Recipe, name), getattr(coder, name, value)):
            raise ValueError(
                f"`{name}` is what the object given as `coder` says itself: "
                f"{name}={getattr(coder, name)!r}. Give it to the object alone, as in "
                f"{type(coder).__name__}({name}={value!r}). Received: {name}={value!r}"
            )
    return coder


DEFAULTS = Recipe()

# Without training: seconds instead of minutes, for two bits a weight and more.
ONE_SHOT = Recipe(
    parameterization=Sites(initial_budget=1.0),
    coder="trellis",
    curvature_steps=100,
    train_steps=0,
    blocks_per_round=2**30,  # all of them
    finetune_steps=0,
)

# Mean-KL; with `PAPER_MEAN_VAR` and train_steps=200_000 it is Mean-Var.
PAPER = Recipe(
    parameterization=MeanKL(quota_rate=1.0),
    codebook="per_block",
    selection="sample",
    batch_size=200,
    train_steps=100_000,
    learning_rate=1e-3,
    decay="constant",
    warm_start=False,
    blocks_per_round=1,
    finetune_steps=100,
    finetune_learning_rate=1e-3,
)
PAPER_MEAN_VAR = MeanVar(
    log_stddev=-10.0, log_stddev_rate=1.0, beta=1e-8, beta_rate=5e-5
)
