"""Coders of the literature: candidates arrive in time, an early one takes few bits.

Candidate i = 0, 1, ... of a block arrives at time T_i = E_0 + ... + E_i, a sum of
exponential variables of mean 1, so that candidates and times are a Poisson process. A
rule, which differs from coder to coder, chooses one by times and density ratios
r = dQ/dP, in such a way that it is a sample of Q. To find a sample of Q takes about
2**KL candidates, and so its index, in a universal code, about KL bits and some more.

- Poisson functional representation: the candidate of smallest T_i / r_i. Li and El
  Gamal, "Strong functional representation lemma and applications to coding theorems"
  (2018).
- A* coding: the same, found by a bound on r, or among the first candidates alone.
  Flamich, Markou and Hernández-Lobato, "Fast relative entropy coding with A* coding"
  (2022).
- Ordered random coding: the same among a fixed number of candidates, whose times are
  those of as many exponential variables in order. Theis and Yosri, "Algorithms for the
  communication of samples" (2022).
- Greedy Poisson rejection sampling: the first one with T_i < sigma(r_i). Flamich,
  "Greedy Poisson rejection sampling" (2023).

They are references beside `mrc` and `trellis`, in NumPy and float64, for blocks of a KL
divergence up to 16 bits.
"""

from __future__ import annotations

import abc
import dataclasses
import numbers
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np

from tfmiracle.codec import philox
from tfmiracle.codec.codebook import normal_quantiles, normals
from tfmiracle.codec.philox import Domain
from tfmiracle.codec.universal import UniversalCode
from tfmiracle.coding.coder import (
    CODERS,
    LOWEST,
    Coder,
    EncodedBlocks,
    check_posterior,
)

MAX_BITS = 16  # of the KL divergence of a block; time grows as 2**block_bits
MAX_INDEX_BITS = 24
_CHUNK = 1 << 8, 1 << 15  # candidates at a time, at first and at most


class Found(NamedTuple):
    """What the search in a block found.

    Attributes:
      index: of the candidate.
      log_weight: its log importance weight, in nats.
      log_evidence: see `EncodedBlocks`.
      num_candidates: how many were looked at.
    """

    index: int
    log_weight: float
    log_evidence: float
    num_candidates: int


@dataclasses.dataclass(frozen=True)
class PoissonCoder(Coder):
    """What the coders have in common.

    Attributes:
      block_bits: budget of KL(Q || P) of a block in bits, an integer from 0 to 16. In a
        file a block takes a few bits more, see `UniversalCode.bits`.
      seed: see `Coder`.

    Raises:
      ValueError: an attribute is out of range.
    """

    block_bits: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        _check_integer("block_bits", self.block_bits, 0, MAX_BITS)
        philox.split_seed(self.seed)

    @property
    def code(self) -> UniversalCode:
        return UniversalCode(self.seed, self.block_bits)

    def encode(
        self,
        blocks: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
        before: np.ndarray | None = None,
    ) -> EncodedBlocks:
        """Chooses a candidate for each block, see `Coder.encode`.

        Raises:
          ValueError: also if the search in a block takes too long.
        """
        blocks, loc, log_scale = check_posterior(blocks, loc, log_scale)
        rows = zip(blocks, loc.astype(np.float64), log_scale.astype(np.float64))
        found = [self.search(*row) for row in rows]
        return EncodedBlocks(
            np.array([x.index for x in found], np.int64),
            np.array([x.log_weight for x in found], np.float32),
            np.array([x.log_evidence for x in found], np.float32),
        )

    @abc.abstractmethod
    def search(self, block: int, loc: np.ndarray, log_scale: np.ndarray) -> Found:
        """Chooses a candidate for one block.

        Args:
          block: its number.
          loc, log_scale: float64 `[D]`, see `Coder.encode`.

        Raises:
          ValueError: it takes too long.
        """

    def _arrivals(
        self, block: int, loc: np.ndarray, log_scale: np.ndarray, limit: int
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Some candidates after the other, up to `limit` of them.

        Yields:
          The index of the first one, the log importance weights and the times since the
          candidate before, float64 `[n]` both.
        """
        first, most = 0, _CHUNK[0]
        while first < limit:
            indices = np.arange(first, min(first + most, limit), dtype=np.uint32)
            blocks = np.full_like(indices, block)
            z = normals(self.seed, Domain.CODEBOOK, blocks, indices, len(loc))
            weights = log_ratios(z.astype(np.float64), loc, log_scale).sum(1)
            gaps = _exponentials(self.seed, block, first, len(indices))
            yield first, np.maximum(weights, LOWEST), gaps
            first += len(indices)
            most = min(first, _CHUNK[1])

    def _race(
        self,
        block: int,
        loc: np.ndarray,
        log_scale: np.ndarray,
        limit: int,
        in_order: bool = False,
    ) -> tuple[Found, bool]:
        """Finds the smallest T_i / r_i of the first `limit` candidates.

        The evidence that it returns is a lower bound for that of these candidates.

        Args:
          block, loc, log_scale: see `search`.
          limit: how many candidates there are.
          in_order: whether times are those of `limit` exponential variables in order,
            not of a process that goes on.

        Returns:
          What it found, and whether no later candidate of the process could beat it.
        """
        bound, best, time, total = log_ratio_bound(loc, log_scale), np.inf, 0.0, -np.inf
        for first, weights, gaps in self._arrivals(block, loc, log_scale, limit):
            if in_order:  # the gap after j of them is shorter (Rényi 1953)
                gaps = gaps * (limit / (limit - first - np.arange(len(gaps))))
            times = time + np.cumsum(gaps)
            costs = np.log(times) - weights
            i = costs.argmin()
            if costs[i] < best:
                best, index, weight = costs[i], first + i, weights[i]
            time, tried = times[-1], first + len(times)
            total = np.logaddexp(total, np.logaddexp.reduce(weights))
            if decided := np.log(time) - bound >= best:
                break
        return Found(index, weight, total - np.log(limit), tried), decided


@CODERS.register
@dataclasses.dataclass(frozen=True)
class PoissonFunctionalCoder(PoissonCoder):
    """Poisson functional representation (Li and El Gamal 2018), a sample of Q.

    Of all candidates it chooses that of smallest T_i / r_i. Once T_i / sup r is larger
    than the smallest, no later one can beat it, so that the search takes sup r
    candidates on average. Where the density of Q over that of P is unbounded, it is
    still bounded over the candidates that there are: no weight of them is beyond 4.35.

    Attributes:
      block_bits, seed: see `PoissonCoder`.
      max_candidates: the most candidates that the search in a block may take, 1 to
        2**30. A block with a larger sup r is refused.

    Raises:
      ValueError: an attribute is out of range.
    """

    identifier: ClassVar[str] = "pfr"
    max_candidates: int = 1 << 24

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_max_candidates(self.max_candidates)

    def search(self, block: int, loc: np.ndarray, log_scale: np.ndarray) -> Found:
        bound = log_ratio_bound(loc, log_scale)
        if bound <= np.log(self.max_candidates):
            found, decided = self._race(block, loc, log_scale, self.max_candidates)
            if decided:
                return found._replace(log_evidence=0.0)
        raise _too_long(block, self.max_candidates, bound)


@CODERS.register
@dataclasses.dataclass(frozen=True)
class AStarCoder(PoissonFunctionalCoder):
    """A* coding with a global bound (Flamich, Markou and Hernández-Lobato 2022).

    The candidates have Gumbel variables G_i = -log T_i, and that of largest
    G_i + log r_i is chosen, by the bound sup r. So without a depth limit it is the
    choice of `PoissonFunctionalCoder`, which see for what it refuses.

    Attributes:
      block_bits, max_candidates, seed: see `PoissonFunctionalCoder`.
      index_bits: depth limit, 0 to 24: there are the first 2**index_bits candidates
        only, and whatever Q is, one of them is chosen. It is a sample of Q but for a
        bias that shrinks as `index_bits` grows. None for no limit.

    Raises:
      ValueError: an attribute is out of range.
    """

    identifier: ClassVar[str] = "a_star"
    index_bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_index_bits(self.index_bits)

    def search(self, block: int, loc: np.ndarray, log_scale: np.ndarray) -> Found:
        if self.index_bits is None:
            return super().search(block, loc, log_scale)
        return self._race(block, loc, log_scale, 1 << self.index_bits)[0]


@CODERS.register
@dataclasses.dataclass(frozen=True)
class OrderedRandomCoder(PoissonCoder):
    """Ordered random coding (Theis and Yosri 2022).

    Of 2**index_bits candidates it chooses one in proportion to r, as `mrc` does, but by
    exponential variables in order, so that small indices are likelier. It is a sample
    of Q but for a bias that shrinks as `index_bits` grows.

    Attributes:
      block_bits, seed: see `PoissonCoder`.
      index_bits: 0 to 24; None for block_bits + 4.

    Raises:
      ValueError: an attribute is out of range.
    """

    identifier: ClassVar[str] = "orc"
    index_bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_index_bits(self.index_bits)

    def search(self, block: int, loc: np.ndarray, log_scale: np.ndarray) -> Found:
        bits = self.block_bits + 4 if self.index_bits is None else self.index_bits
        return self._race(block, loc, log_scale, 1 << bits, in_order=True)[0]


@CODERS.register
@dataclasses.dataclass(frozen=True)
class GreedyPoissonCoder(PoissonCoder):
    """Greedy Poisson rejection sampling (Flamich 2023), a sample of Q.

    It chooses the first candidate with T_i < sigma(r_i), see `stretch`. The density of
    Q over that of P may be unbounded. The search takes sup r candidates on average,
    mostly far fewer, but now and then many times more.

    Attributes:
      block_bits, seed: see `PoissonCoder`.
      max_candidates: the most candidates that the search in a block may take, 1 to
        2**30.

    Raises:
      ValueError: an attribute is out of range.
    """

    identifier: ClassVar[str] = "gprs"
    max_candidates: int = 1 << 24

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_max_candidates(self.max_candidates)

    def search(self, block: int, loc: np.ndarray, log_scale: np.ndarray) -> Found:
        bound, limit, time = log_ratio_bound(loc, log_scale), self.max_candidates, 0.0
        if bound < -1e-6:  # sup r is at least 1, since E_P[r] is
            raise ValueError(
                f"Q of block {block} lies beyond the candidates, whose weights are up "
                "to 4.35 standard deviations of P; look for divergence in training."
            )
        log_ratio, log_time = stretch(loc, log_scale)
        for first, weights, gaps in self._arrivals(block, loc, log_scale, limit):
            times = time + np.cumsum(gaps)
            until = np.interp(weights, log_ratio, log_time, right=np.inf)
            accepted = np.log(times) < until
            if accepted.any():
                i = accepted.argmax()
                return Found(first + i, weights[i], 0.0, first + i + 1)
            time = times[-1]
        raise _too_long(block, limit, bound)


def log_ratios(z: np.ndarray, loc: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
    """log q(z) / p(z) in nats, each dimension by itself, float64 of any shape."""
    t = (z - loc) * np.exp(-log_scale)
    return 0.5 * (z - t) * (z + t) - log_scale


def log_ratio_bound(loc: np.ndarray, log_scale: np.ndarray) -> float:
    """The largest log density ratio of Q to P, in nats, that a candidate may have.

    Args:
      loc, log_scale: float64 `[D]`, see `Coder.encode`.
    """
    most = float(normal_quantiles()[-1])
    # In each dimension it is a parabola, largest at its top or at an end.
    curvature = -np.expm1(2 * log_scale)
    top = loc / np.where(curvature > 1e-12, curvature, 1e-12)
    z = np.stack([np.clip(top, -most, most), np.full_like(top, most)])
    z = np.concatenate([z, -z[1:]])
    return float(log_ratios(z, loc, log_scale).max(0).sum())


# The Fourier transform of `survival`: points, and the period in nats. Images that the
# period brings in are below exp(-40) of what is computed.
_POINTS, _PERIOD, _MAX_LOG = 1 << 16, 128.0, 32.0
_LEAST = 1e-9  # probability that nothing is accepted; beyond its accuracy


def stretch(loc: np.ndarray, log_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The function sigma of greedy Poisson rejection sampling, on a grid.

    A candidate of density ratio h is accepted up to time sigma(h), the integral of
    1 / S(x) over x from 0 to h, see `survival`.

    Args:
      loc, log_scale: float64 `[D]`, see `Coder.encode`.

    Returns:
      log h, up to `log_ratio_bound`, and log sigma(h), float64 both. Beyond the grid
      sigma is so large that any candidate is accepted.
    """
    log_ratio, probability = survival(loc, log_scale)
    slope = np.exp(log_ratio) / np.maximum(probability, _LEAST)
    area = 0.5 * np.cumsum(np.diff(log_ratio) * (slope[1:] + slope[:-1]))
    return log_ratio, np.log(slope[0] + np.append(0.0, area))


def survival(loc: np.ndarray, log_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The probability S(h) that no candidate is accepted up to time sigma(h).

    It is Q(r >= h) - h P(r >= h) = 1 - E_P[min(r, h)]. In finance an option costs as
    much, and so it is found by the formula of Lewis, "A simple option formula for
    general jump-diffusion and other exponential Levy processes" (2001), from the
    moments E_P[r**s] at s = 1/2 + iu:

        E_P[min(r, h)] = sqrt(h) / pi
            * integral over u > 0 of Re(E_P[r**s] * h**(-iu)) / (u**2 + 1/4).

    In one dimension the result is good to 2e-5, if the KL divergence is above 1e-6 nats
    (to 2e-4 below), where several share it to 1e-6. What `gprs` draws should be about
    as close to Q, in total variation.

    Args:
      loc, log_scale: float64 `[D]`, see `Coder.encode`.

    Returns:
      log h on an even grid, up to `log_ratio_bound`, and S(h), float64 both.
    """
    step = _PERIOD / _POINTS
    u = 2 * np.pi / _PERIOD * np.arange(_POINTS // 2 + 1)
    s = 0.5 + 1j * u
    log_moment = np.zeros_like(s)
    for mu, log_sigma in zip(loc, log_scale):
        if mu or log_sigma:
            v = s + (1 - s) * np.exp(2 * log_sigma)
            log_moment += (1 - s) * log_sigma - 0.5 * np.log(v)
            log_moment -= 0.5 * mu**2 * s * (1 - s) / v
    terms = np.exp(log_moment) / (u**2 + 0.25)
    integral = np.fft.fftshift(np.fft.irfft(terms.conj()) / step)
    log_ratio = step * np.arange(-_POINTS // 2, _POINTS // 2)
    bound = min(log_ratio_bound(loc, log_scale), _MAX_LOG)
    inside = (log_ratio > -_MAX_LOG) & (log_ratio < bound)
    log_ratio, integral = log_ratio[inside], integral[inside]
    return log_ratio, 1 - np.exp(0.5 * log_ratio) * integral


def _exponentials(seed: int, block: int, first: int, count: int) -> np.ndarray:
    """Exponential variables of mean 1 from number `first` on, a multiple of 4."""
    counter = np.zeros((-(-count // 4), 4), np.uint32)
    counter[:, 0] = first // 4 + np.arange(len(counter))
    counter[:, 2], counter[:, 3] = block, Domain.ARRIVAL
    words = philox.philox4x32(counter, philox.split_seed(seed)).reshape(-1)[:count]
    return -np.log((words + 0.5) * 2.0**-32)


def _too_long(block, max_candidates, bound):
    return ValueError(
        f"The search in block {block} takes more than `max_candidates`, "
        f"{max_candidates:,}; on average it takes as many as the largest density ratio "
        f"of Q to P, 2**{bound / np.log(2):.1f}. Lower `block_bits`, make blocks "
        "smaller, raise `max_candidates`, or take another coder, such as 'mrc'."
    )


def _check_integer(name, value, least, most):
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (integer and least <= value <= most):
        raise ValueError(
            f"`{name}` must be an integer from {least:,} to {most:,}. "
            f"Received: {name}={value!r}"
        )


def _check_max_candidates(max_candidates):
    _check_integer("max_candidates", max_candidates, 1, 1 << 30)


def _check_index_bits(index_bits):
    if index_bits is not None:
        _check_integer("index_bits", index_bits, 0, MAX_INDEX_BITS)
