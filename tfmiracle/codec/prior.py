"""The coding distribution P = N(nu, rho**2): where its means nu are. NumPy only.

Its standard deviations rho are trained, one for each group of variables, and part of
the file.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tfmiracle.codec.layout import WeightLayout
from tfmiracle.registry import Registry


class Prior(abc.ABC):
    """Gives the mean of P to every effective weight.

    Whoever has a prior of their own derives a frozen dataclass whose fields are
    integers of at least 0, and registers it with `PRIORS.register`, here and where
    files of it are decoded.

    Attributes:
      identifier: name of the kind of prior in a file, printable ASCII.
    """

    identifier: ClassVar[str]

    @abc.abstractmethod
    def loc(self, layout: WeightLayout) -> np.ndarray | None:
        """float32[num_blocks, block_size]: nu of every slot; None for zero everywhere.

        It must be the same bits on every platform.
        """

    def get_config(self) -> dict:
        return dataclasses.asdict(self)

    def parameters(self) -> tuple[int, ...]:
        """The fields, as a file holds them."""
        return tuple(self.get_config().values())

    @classmethod
    def from_parameters(cls, parameters: Sequence[int]) -> "Prior":
        """Reverses `parameters`.

        Raises:
          ValueError: if there are too many or too few, or one is out of range.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if len(parameters) != len(names):
            raise ValueError(
                f"A prior of kind {cls.identifier!r} has {len(names)} parameters. "
                f"Received: {list(parameters)}"
            )
        return cls(*parameters)


PRIORS = Registry("prior", Prior)


@PRIORS.register
@dataclasses.dataclass(frozen=True)
class ZeroMean(Prior):
    """P = N(0, rho**2), as in Havasi et al. (2019)."""

    identifier: ClassVar[str] = "zero"

    def loc(self, layout: WeightLayout) -> None:
        return None


def weights(z: np.ndarray, rho: np.ndarray, nu: np.ndarray | None) -> np.ndarray:
    """nu + rho z in float32, product and sum rounded each, as the decoder has them."""
    product = np.multiply(z, rho, dtype=np.float32)
    return product if nu is None else np.add(product, nu, dtype=np.float32)
