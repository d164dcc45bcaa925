"""What every coder does: it chooses codes for blocks of a posterior."""

import abc
import dataclasses
import inspect
from typing import ClassVar, NamedTuple

import numpy as np

from tfmiracle.codec.code import RandomCode


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
    `register_coder` its name will do.

    Attributes:
      seed: unsigned 64-bit integer that code and coding depend on.
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

    def get_config(self) -> dict:
        """The options but for `seed`, which hosts give."""
        config = dataclasses.asdict(self)
        del config["seed"]
        return config


_CODERS: dict[str, type[Coder]] = {}


def register_coder(cls: type[Coder]) -> type[Coder]:
    """Class decorator: lets a coder be given by its `identifier`."""
    _CODERS[cls.identifier] = cls
    return cls


def get(coder: str | dict | Coder, seed: int = 0, **options) -> Coder:
    """Finds a coder, as `keras.initializers.get` finds an initializer.

    Args:
      coder: a name, a dict `{"name": ..., "config": ...}` as of `serialize`, or an
        object.
      seed: of the result.
      **options: for a name, options of the coder; those that are None, or that it does
        not have, are left out.

    Raises:
      ValueError: if there is no coder of this name, or an option is out of range.
    """
    if isinstance(coder, Coder):
        return dataclasses.replace(coder, seed=seed)
    config = options
    if isinstance(coder, dict):
        coder, config = coder["name"], coder["config"]
    if coder not in _CODERS:
        raise ValueError(
            f"`coder` must be a Coder or one of {sorted(_CODERS)}. "
            f"Received: coder={coder!r}"
        )
    cls = _CODERS[coder]
    known = inspect.signature(cls).parameters
    config = {k: v for k, v in config.items() if v is not None and k in known}
    return cls(**{**config, "seed": seed})


def serialize(coder: Coder) -> dict:
    """A coder as JSON can say it, for `get`."""
    return {"name": coder.identifier, "config": coder.get_config()}
