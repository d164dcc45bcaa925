"""What every coder does: it chooses codes for blocks of a posterior."""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np

from tfmiracle.codec import philox
from tfmiracle.codec.code import RandomCode, layout_fields, own_fields
from tfmiracle.codec.layout import WeightLayout
from tfmiracle.options import check_argument, one_of
from tfmiracle.registry import Registry


class EncodedBlocks(NamedTuple):
    """What `Coder.encode` found for each block.

    Attributes:
      codes: integers `[B, *code.shape(D)]`, the chosen codes.
      log_weight: float32 `[B]`, log importance weight of the chosen candidate, in nats.
      log_evidence: float32 `[B]`, log of the mean importance weight of all candidates,
        in nats. Its ideal is 0; far below, the code is too short for the block's KL
        divergence. A coder that does not know it gives a lower bound.
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
        is that of the layout, whatever the object had (`for_layout`), as are the other
        fields of `tfmiracle.codec.code.LAYOUT_FIELDS`.
      any_rate: whether it has an option `block_bits` that may be any number, and its
        code a `max_bytes`, so that a file of any size is filled with the same blocks.
    """

    identifier: ClassVar[str]
    any_rate: ClassVar[bool] = False
    seed: int

    @property
    @abc.abstractmethod
    def code(self) -> RandomCode:
        """The random code that decodes what this coder encodes."""

    @abc.abstractmethod
    def encode(
        self,
        blocks: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
        before: np.ndarray | None = None,
    ) -> EncodedBlocks:
        """Chooses codes for some blocks.

        Everything is relative to the coding distribution P = N(nu, rho**2): a weight
        with Q = N(mu, sigma**2) has loc = (mu - nu) / rho and
        log_scale = log(sigma / rho), and a decoded z stands for nu + rho * z. A
        dimension with loc = log_scale = 0, such as padding, contributes nothing.

        Args:
          blocks: integers `[B]` from 0 to 2**32 - 1, the numbers of the blocks.
          loc: float32 `[B + A, D]`, where the last A <= `lookahead` rows are those of
            the blocks that follow, which will be coded later.
          log_scale: float32 `[B + A, D]`, from -80 to 80 nats.
          before: integers `code.shape(D)`, the code of the block before the first of
            `blocks`; None if that is not coded.

        Raises:
          ValueError: shapes do not fit, or a block has a value out of range.
        """

    def lookahead(self, block_size: int) -> int:
        """How many blocks that follow matter for the codes of some."""
        return 0

    def for_layout(self, layout: WeightLayout) -> "Coder":
        """The same for the weights of a layout."""
        return dataclasses.replace(self, **layout_fields(type(self), layout))

    def get_config(self) -> dict:
        """The options: all fields that no layout says."""
        return {name: getattr(self, name) for name in own_fields(self)}


MAX_LOG_SCALE = 80.0  # exp(-log_scale) is then a normal float32
LOWEST = -3e38  # instead of -inf, for log weights below the range of float32
# Of a candidate by its importance weight: by chance, or the largest.
SELECTIONS = ("sample", "largest_weight")

CODERS = Registry(
    "coder",
    Coder,
    mrc="tfmiracle.coding.minimal_random",
    trellis="tfmiracle.coding.trellis",
    orc="tfmiracle.coding.poisson",
    a_star="tfmiracle.coding.poisson",
    pfr="tfmiracle.coding.poisson",
    gprs="tfmiracle.coding.poisson",
)


def check_selection(selection: str) -> None:
    """Raises a ValueError unless there is such a selection."""
    check_argument("selection", selection, one_of(*SELECTIONS))


def check_posterior(
    blocks: np.ndarray, loc: np.ndarray, log_scale: np.ndarray, lookahead: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `Coder.encode`, checked, in the types that coders compute with.

    Args:
      blocks, loc, log_scale: see `Coder.encode`.
      lookahead: how many rows more than blocks there may be.

    Raises:
      ValueError: shapes do not fit, or a block has a value out of range.
    """
    blocks = philox.as_uint32("blocks", blocks)
    loc, log_scale = np.asarray(loc, np.float32), np.asarray(log_scale, np.float32)
    if blocks.ndim != 1:
        raise ValueError(f"blocks has shape {blocks.shape}; pass a vector.")

    def number(row):
        return blocks[row] if row < len(blocks) else blocks[-1] + row - len(blocks) + 1

    rows = range(len(blocks), len(blocks) + lookahead + 1)
    for name, value in (("loc", loc), ("log_scale", log_scale)):
        if value.ndim != 2 or len(value) not in rows or value.shape[1] == 0:
            raise ValueError(
                f"{name} has shape {value.shape}; pass one of ({len(blocks)}, "
                "block size), a row for each of the blocks."
            )
        bad = ~np.isfinite(value).all(1)
        if bad.any():
            raise ValueError(
                f"{name} of block {number(bad.argmax())} is not finite; look for "
                "divergence in training."
            )
    if loc.shape != log_scale.shape:
        raise ValueError(
            f"loc and log_scale have shapes {loc.shape} and {log_scale.shape}; "
            "pass arrays of the same shape."
        )
    bad = np.abs(log_scale).max(1) > MAX_LOG_SCALE
    if bad.any():
        row = bad.argmax()
        value = log_scale[row, np.abs(log_scale[row]).argmax()]
        raise ValueError(
            f"log_scale of block {number(row)} holds {value}; pass values from "
            f"{-MAX_LOG_SCALE} to {MAX_LOG_SCALE} nats."
        )
    return blocks, loc, log_scale
