"""Pruning a decoded network (Lin et al. 2023, section 4 and appendix A)."""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from tfmiracle.codec import philox
from tfmiracle.codec.coded_posterior import CodedPosterior
from tfmiracle.decoder import DecodedNetwork, decode_blocks, decoded_network, parsed
from tfmiracle.miracle_file import (
    MiracleFile,
)

STRATEGIES = ("uniform", "magnitude", "kl")


def pruning_order(
    file: MiracleFile,
    strategy: str,
    posterior: CodedPosterior | None = None,
    seed: int = 0,
) -> np.ndarray:
    """The order in which the effective weights of a file are set to zero.

    Weights of all groups are ranked together; equal ones go in the order of the file.

    Args:
      file: the file.
      strategy: "uniform" (random), "magnitude" (smallest absolute value first), or
        "kl": smallest KL from Q to a Dirac delta at zero first, up to a constant
        `log(scale) + loc^2 / (2 scale^2)`.
      posterior: Q of the file, for "kl".
      seed: of the random order, an unsigned 64-bit integer.

    Returns:
      int64[n], positions in the effective weights of all groups, one after the other.

    Raises:
      ValueError: if the strategy is unknown, or `posterior` is missing or does not fit.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"`strategy` must be one of {STRATEGIES}. Received: strategy={strategy!r}"
        )
    if strategy == "uniform":
        count = sum(group.layout.num_effective for group in file.groups)
        return philox.permutation(seed, philox.Domain.PRUNING, 0, count)
    if strategy == "magnitude":
        score = np.abs(_effective(file))
    else:
        if not isinstance(posterior, CodedPosterior):
            raise ValueError(
                "`posterior` must be a CodedPosterior: strategy 'kl' ranks weights by "
                "Q. Compress with `keep_posterior`, and read it with "
                f"`CodedPosterior.read`. Received: posterior={posterior!r}"
            )
        posterior.check_fits(file)
        loc = np.concatenate(posterior.loc).astype(np.float64)
        scale = np.concatenate(posterior.scale).astype(np.float64)
        score = np.log(scale) + 0.5 * np.square(loc / scale)
    return np.argsort(score, kind="stable")


def pruned_networks(
    file: str | os.PathLike | bytes | MiracleFile,
    strategy: str,
    fractions: Sequence[float],
    posterior: CodedPosterior | None = None,
    seed: int = 0,
) -> Iterator[DecodedNetwork]:
    """The network of a file, once for every fraction of its weights set to zero.

    What is pruned is effective weights, what Q is over: all entries of a hashed
    variable that share one become zero with it. Variables that are stored stay.

    Args:
      file: path of a `.miracle` file, its bytes, or the parsed file, see `decode`.
      strategy, posterior, seed: see `pruning_order`.
      fractions: parts of the weights, from 0 to 1, rounded to whole weights.

    Raises:
      ValueError: if a fraction is out of range; see also `pruning_order`.
    """
    for fraction in fractions:
        if not 0 <= fraction <= 1:
            raise ValueError(
                "`fractions` must be numbers from 0 to 1. "
                f"Received: fractions={list(fractions)}"
            )
    file = parsed(file)
    order = pruning_order(file, strategy, posterior, seed)
    whole = _effective(file)
    ends = np.cumsum([group.layout.num_effective for group in file.groups])
    for fraction in fractions:
        weights = whole.copy()
        weights[order[: round(fraction * len(order))]] = 0
        parts = np.split(weights, ends[:-1])
        yield decoded_network(
            file,
            [
                group.layout.to_blocks(part)
                for group, part in zip(file.groups, parts, strict=True)
            ],
        )


def _effective(file):
    """float32[n]: the effective weights of all groups, one after the other."""
    return np.concatenate(
        [group.layout.to_effective(decode_blocks(group)) for group in file.groups]
    )
