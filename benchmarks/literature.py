"""Coders of the literature beside minimal random coding and the trellis.

    python benchmarks/literature.py --blocks=200

prints a table of the coders for each KL divergence, and one of what their indices would
take in several codes for integers. What the columns are says
`docs/coders_literature.md`.
"""

import argparse
import time

import numpy as np
import scipy.special
from tables import markdown

from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.coding.poisson import (
    AStarCoder,
    GreedyPoissonCoder,
    OrderedRandomCoder,
    PoissonCoder,
)
from tfmiracle.coding.trellis import TrellisCoder

BLOCK_SIZE = 8
# What of the KL of a block each weight has.
SHARES = {"even": np.ones(BLOCK_SIZE), "uneven": 0.6 ** np.arange(BLOCK_SIZE)}


def posterior(bits: float, shares: np.ndarray, num_blocks: int):
    """loc and log_scale of blocks with a KL of `bits`, float32 `[B, D]`.

    Each mean is as far from 0 as those of a P that is right are on average.
    """
    log_scale = np.tile(-np.log(2) * bits * shares / shares.sum(), (num_blocks, 1))
    signs = np.random.default_rng(0).choice([-1, 1], log_scale.shape)
    loc = signs * np.sqrt(-np.expm1(2 * log_scale))
    return loc.astype(np.float32), log_scale.astype(np.float32)


def coders(bits: int, num_blocks: int) -> dict:
    found = {
        "`pfr`, `a_star`": AStarCoder(bits),
        f"`a_star`, {bits + 2} index bits": AStarCoder(bits, index_bits=bits + 2),
        f"`orc`, {bits} index bits": OrderedRandomCoder(bits, index_bits=bits),
        f"`orc`, {bits + 4} index bits": OrderedRandomCoder(bits),
        "`gprs`": GreedyPoissonCoder(bits, max_candidates=1 << 28),
    }
    for block_bits in (bits, bits + 3):
        for selection in ("sample", "largest_weight"):
            found[f"`mrc`, {selection}, {block_bits} bits"] = MinimalRandomCoder(
                block_bits, codebook="per_block", selection=selection
            )
        found[f"`trellis`, {block_bits} bits"] = TrellisCoder(
            state_bits=12,
            block_bits=block_bits,
            num_weights=num_blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
        )
    return found


def measured(coder, loc: np.ndarray, log_scale: np.ndarray) -> list:
    """Codes; bits, log2 q/p, squared error, candidates, CPU milliseconds of a block."""
    blocks = np.arange(len(loc))
    tried = np.nan
    if isinstance(coder, PoissonCoder):
        start = time.process_time()
        rows = [
            coder.search(*row)
            for row in zip(blocks, loc.astype(np.float64), log_scale.astype(np.float64))
        ]
        codes = np.array([row.index for row in rows])
        tried = np.mean([row.num_candidates for row in rows])
    else:
        coder.encode(blocks, loc, log_scale)  # compiles
        start = time.process_time()
        codes = coder.encode(blocks, loc, log_scale).codes
        if isinstance(coder, MinimalRandomCoder):
            tried = 1 << coder.block_bits
    seconds = time.process_time() - start
    z = coder.code.candidates(blocks, codes, BLOCK_SIZE).astype(np.float64)
    squares = ((z - loc) / np.exp(log_scale)) ** 2
    log_weights = (0.5 * (z**2 - squares) - log_scale).sum(1)
    return [
        codes,
        8 * len(coder.code.pack(codes, BLOCK_SIZE)) / len(blocks),
        log_weights.mean() / np.log(2),
        squares.mean(),
        tried,
        1e3 * seconds / len(blocks),
    ]


def integer_codes(numbers: np.ndarray, bits: int) -> list[float]:
    """Mean length in bits of integers from 1 on; each code has its best parameter."""
    log = np.log2(numbers)
    e = np.floor(log)

    def zeta(k):  # Boldi and Vigna 2005: e // k in unary, the rest in minimal binary
        least = 2 ** (k * (e // k))
        count = (2**k - 1) * least
        longer = np.ceil(np.log2(count))
        short = numbers - least < 2**longer - count
        return (e // k + 1 + longer - short).mean()

    def zipf(s):  # as long as an arithmetic coder makes it
        return s * log.mean() + np.log2(scipy.special.zeta(s))

    def rice(k):
        return (e + 1 + k + e // 2**k).mean()

    def centred(k):
        apart = np.where(e < bits, 2 * (bits - e) - 1, 2 * (e - bits))
        return (e + 1 + k + apart // 2**k).mean()

    share = np.bincount(e.astype(int)) / len(e)
    share = share[share > 0]
    return [
        e.mean() - (share * np.log2(share)).sum(),
        centred(2),
        min(rice(k) for k in range(5)),
        min(zipf(s) for s in 1 + 1 / np.linspace(2, 40, 100)),
        min(zeta(k) for k in range(1, 9)),
        (e + 1 + 2 * np.floor(np.log2(e + 1))).mean(),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 8, 12])
    arguments = parser.parse_args()
    titles = ["coder", "bits", "log2 q/p", "(z - μ)²/σ²", "candidates", "ms"]
    lengths = []
    for bits in arguments.bits:
        rows = []
        for name, coder in coders(bits, arguments.blocks).items():
            numbers = {}
            for what, shares in SHARES.items():
                q = posterior(bits, shares, arguments.blocks)
                codes, *numbers[what] = measured(coder, *q)
            if isinstance(coder, PoissonCoder):
                found = integer_codes(codes + 1.0, bits)
                lengths.append([bits, name, *(f"{x:.1f}" for x in found)])
            columns = zip(*numbers.values(), (".1f", ".1f", ".2f", ",.0f", ".2g"))
            rows.append([name, *(_cell(*column) for column in columns)])
        print(f"\nKL {bits} bits, {' / '.join(SHARES)}\n\n{markdown(titles, rows)}")
    titles = [
        "KL",
        "coder",
        "entropy of e",
        "this one",
        "Rice",
        "Zipf",
        "zeta",
        "delta",
    ]
    print(f"\nuneven\n\n{markdown(titles, lengths)}")


def _cell(*values):
    *values, form = values
    return " / ".join(format(x, form) for x in values if not np.isnan(x))


if __name__ == "__main__":
    main()
