"""From the variables of a network to blocks of effective weights, and back.

Needs NumPy only: the decoder and the posterior share this module, so that what is
trained, what is coded and what is decoded agree by construction.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence

import numpy as np

from tfmiracle.codec import philox


@dataclasses.dataclass(frozen=True)
class CodedVariable:
    """One variable whose values are coded.

    Attributes:
      shape: shape of the variable.
      hash_factor: how many entries of the variable share one effective weight on
        average (Chen et al. 2015); 1 means no hashing.
      scale_index: which coding scale rho of the layout belongs to the variable.
    """

    shape: tuple[int, ...]
    hash_factor: int = 1
    scale_index: int = 0

    def __post_init__(self):
        if not _is_positive_integer(self.hash_factor):
            raise ValueError(
                f"`hash_factor` must be a positive integer, got {self.hash_factor}."
            )
        if self.scale_index < 0:
            raise ValueError(f"`scale_index` must be >= 0, got {self.scale_index}.")

    @property
    def size(self) -> int:
        """Number of entries of the variable."""
        return math.prod(self.shape)

    @property
    def effective_size(self) -> int:
        """Number of effective weights that stand for the variable."""
        return -(-self.size // self.hash_factor)


class WeightLayout:
    """Places the weights of coded variables into blocks.

    Every variable contributes its effective weights, in order; a seeded permutation
    spreads this vector over `num_blocks * block_size` slots, so that a block mixes
    weights of all variables (Havasi et al. 2019) and the information budget can move
    between them. The slots left over at the end of the last block are padding.

    Args:
      variables: the coded variables, in the order of the network.
      block_size: number of weights in a block; at most all weights.
      seed: unsigned 64-bit integer; permutation, hashes and signs depend on it.

    Raises:
      ValueError: if there is no weight, or `block_size` or `seed` is out of range.
    """

    def __init__(self, variables: Sequence[CodedVariable], block_size: int, seed: int):
        self.variables = tuple(variables)
        philox.split_seed(seed)
        self.seed = int(seed)
        if not _is_positive_integer(block_size):
            raise ValueError(
                f"`block_size` must be a positive integer, got {block_size}."
            )
        if not self.num_effective:
            raise ValueError("There is no weight to code: the variables are empty.")
        self.block_size = min(int(block_size), self.num_effective)

    def __repr__(self):
        return (
            f"WeightLayout({self.num_effective} effective weights of "
            f"{len(self.variables)} variables, {self.num_blocks} blocks of "
            f"{self.block_size})"
        )

    @functools.cached_property
    def num_weights(self) -> int:
        """Number of entries of all variables."""
        return sum(v.size for v in self.variables)

    @functools.cached_property
    def num_effective(self) -> int:
        """Number of effective weights, which is what gets coded."""
        return sum(v.effective_size for v in self.variables)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_effective // self.block_size)

    @property
    def num_scales(self) -> int:
        return 1 + max(v.scale_index for v in self.variables)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """int64[num_effective]: the slot of each effective weight."""
        return philox.permutation(
            self.seed, philox.Domain.PERMUTATION, 0, self.num_effective
        )

    def hashing(self, variable_index: int) -> tuple[np.ndarray, np.ndarray]:
        """How the entries of a hashed variable share its effective weights.

        Each effective weight serves the same number of entries, at most `hash_factor`
        (the last ones may serve one less), each with a random sign.

        Returns:
          int64[size], the effective weight of each entry counted from the variable's
          first, and float32[size], its sign.
        """
        v = self.variables[variable_index]
        order = philox.permutation(
            self.seed, philox.Domain.HASH, variable_index, v.size
        )
        sign = philox.signs(self.seed, philox.Domain.SIGN, variable_index, v.size)
        return order % v.effective_size, sign

    def scale_index_of_slot(self) -> np.ndarray:
        """int32[num_blocks, block_size]: coding scale of each slot (padding: 0)."""
        of_weight = np.repeat(
            np.array([v.scale_index for v in self.variables], np.int32),
            [v.effective_size for v in self.variables],
        )
        return self.to_blocks(of_weight)

    def mask(self) -> np.ndarray:
        """bool[num_blocks, block_size]: False where a slot is padding."""
        return (
            np.arange(self.num_blocks * self.block_size) < self.num_effective
        ).reshape(self.num_blocks, self.block_size)

    def to_blocks(self, effective: np.ndarray) -> np.ndarray:
        """[num_effective] -> [num_blocks, block_size], zero where padded."""
        flat = np.zeros(self.num_blocks * self.block_size, effective.dtype)
        flat[self.slots] = effective
        return flat.reshape(self.num_blocks, self.block_size)

    def to_effective(self, blocks: np.ndarray) -> np.ndarray:
        """[num_blocks, block_size] -> [num_effective], in the order of the network."""
        return np.take(blocks.reshape(-1), self.slots)

    def expand(self, blocks: np.ndarray) -> list[np.ndarray]:
        """[num_blocks, block_size] -> the values of every variable.

        Only copies and sign flips, hence exact.
        """
        ends = np.cumsum([v.effective_size for v in self.variables])
        parts = np.split(self.to_effective(blocks), ends[:-1])
        values = []
        for i, (v, part) in enumerate(zip(self.variables, parts, strict=True)):
            if v.hash_factor > 1:
                index, sign = self.hashing(i)
                part = part[index] * sign
            values.append(part.reshape(v.shape))
        return values

    def project(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The values of every variable -> float32[num_blocks, block_size].

        A hashed variable is projected on the values that hashing allows (the mean over
        the entries that share a weight) and rescaled to its former norm, so that a
        fresh initialization keeps its variance; values that fit the hash come back
        unchanged. `expand(project(values))` then is the best start within the layout.
        """
        parts = []
        for i, (v, value) in enumerate(zip(self.variables, values, strict=True)):
            flat = np.asarray(value, np.float64).reshape(-1)
            if v.hash_factor > 1:
                index, sign = self.hashing(i)
                count = np.bincount(index, minlength=v.effective_size)
                total = np.bincount(index, flat * sign, minlength=v.effective_size)
                mean = total / count
                norm = np.sqrt(np.sum(count * mean**2))
                flat = mean * (np.linalg.norm(flat) / norm if norm else 1.0)
            parts.append(flat.astype(np.float32))
        return self.to_blocks(np.concatenate(parts))

    def pull_back(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """The derivatives by every variable -> float32[num_blocks, block_size].

        Those by the effective weights, the transpose of `expand`.
        """
        parts = []
        for i, (v, gradient) in enumerate(zip(self.variables, gradients, strict=True)):
            flat = np.asarray(gradient).reshape(-1)
            if v.hash_factor > 1:
                index, sign = self.hashing(i)
                flat = np.bincount(index, flat * sign, minlength=v.effective_size)
            parts.append(flat.astype(np.float32))
        return self.to_blocks(np.concatenate(parts))


def _is_positive_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and value >= 1
