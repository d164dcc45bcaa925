"""What every coder does: it chooses codes for blocks of a posterior."""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np

from tfmiracle.codec.code import RandomCode
from tfmiracle.registry import Registry


class EncodedBlocks(NamedTuple):
    """What `Coder.encode` found for each block.

    Attributes:
      codes: integers `[B, *code.shape(D)]`, the chosen codes.
      log_weight: float32 `[B]`, log importance weight of the chosen candidate, in nats.
      log_evidence: float32 `[B]`, log of the mean importance weight of all candidates,
        in nats. Its ideal is 0; far below, the code is too short for the block's KL
        divergence.
    """

    codes: np.ndarray
    log_weight: np.ndarray
    log_evidence: np.ndarray


class Coder(abc.ABC):
    """Encodes blocks of independent Gaussian weights, relative entropy coding.

    A coder is a frozen dataclass of options, one of which is `seed`. It goes with a
    random code, which knows how to decode. Whoever has a coder of their own derives
    from this class and gives an object of it wherever `coder` is an argument; with
    `CODERS.register` its name will do, and saved models load.

    Attributes:
      seed: unsigned 64-bit integer that code and coding depend on. In a posterior it
        is that of the layout, whatever the object had (`with_seed`).
    """

    identifier: ClassVar[str]
    seed: int

    @property
    @abc.abstractmethod
    def code(self) -> RandomCode:
        """The random code that decodes what this coder encodes."""

    @abc.abstractmethod
    def encode(
        self, blocks: np.ndarray, loc: np.ndarray, log_scale: np.ndarray
    ) -> EncodedBlocks:
        """Chooses codes for some blocks.

        Everything is relative to the coding distribution P = N(nu, rho**2): a weight
        with Q = N(mu, sigma**2) has loc = (mu - nu) / rho and
        log_scale = log(sigma / rho), and a decoded z stands for nu + rho * z. A
        dimension with loc = log_scale = 0, such as padding, contributes nothing.

        Args:
          blocks: integers `[B]` from 0 to 2**32 - 1, the numbers of the blocks.
          loc: float32 `[B, D]`.
          log_scale: float32 `[B, D]`, from -80 to 80 nats.

        Raises:
          ValueError: shapes do not fit, or a block has a value out of range.
        """

    def with_seed(self, seed: int) -> "Coder":
        """The same under another seed, which the layout of the weights gives."""
        return dataclasses.replace(self, seed=seed)

    def get_config(self) -> dict:
        """The options but for the seed."""
        config = dataclasses.asdict(self)
        del config["seed"]
        return config


# Of a candidate by its importance weight: by chance, or the largest.
SELECTIONS = ("sample", "largest_weight")

CODERS = Registry("coder", Coder, mrc="tfmiracle.coding.minimal_random")


def coder_of(coder: str | dict | Coder, **options) -> Coder:
    """The coder for what a user gave.

    Args:
      coder: a `Coder`, which says all by itself; what `CODERS.serialize` made; or the
        name of one.
      **options: options of a coder given by name; those that it does not have are left
        out.

    Raises:
      ValueError: if there is none of this name, or an option is out of range.
    """
    if not isinstance(coder, str):
        return CODERS.get(coder)
    cls = CODERS.find(coder)
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{k: v for k, v in options.items() if k in known})
