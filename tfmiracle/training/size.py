"""The size of a file: what a target means, and the blocks or bits that meet it."""

import bisect
import dataclasses
import math
import re

import keras
import numpy as np

from tfmiracle.hosts.models import VariationalModel
from tfmiracle.hosts.network import to_file
from tfmiracle.miracle_file import Levels
from tfmiracle.recipe import Recipe

# What scales and lengths may take more in the file than in the probe for its size.
_SLACK = 16


def recipe_for(
    net: keras.Model,
    target: str | int,
    recipe: Recipe | None = None,
    *,
    rules: dict[str, str] | None = None,
    metadata: dict | None = None,
    architecture: bool = True,
) -> Recipe:
    """The recipe by which the file of `net` is as large as `target` allows.

    A coder of any rate gets as many bits as there is room for; others get the smallest
    blocks.

    Args:
      net: a built Keras model.
      target, rules, metadata, architecture: see `compress`.
      recipe: what else decides the size.

    Raises:
      ValueError: if `target` cannot be read or cannot be met.
    """
    num_weights = sum(int(np.prod(v.shape)) for v in net.weights)
    budget = target_bytes(target, num_weights)
    recipe = recipe or Recipe()
    any_rate = recipe.made_coder().any_rate
    least = _with_bits(recipe, 8) if any_rate else recipe  # a byte, all in one block
    options = least.model_options() | {"block_size": num_weights}
    probe = VariationalModel(net, rules=rules, **options)
    posterior = probe.block_posterior
    if not posterior.code.exact_size:
        raise ValueError(
            f"`target` needs a coder whose codes have a known size. That of coder "
            f"{posterior.coder.identifier!r} varies: give `block_size` instead."
        )
    posterior.finalize_coding_scale()
    code, count = posterior.code, posterior.layout.num_effective
    posterior.fix([0], np.zeros((1, *code.shape(count)), int))
    file = to_file(probe, metadata, architecture)
    # What training changes may compress less after it than it does now: as noise.
    noise = np.random.default_rng(0)
    (group,) = file.groups
    scales = noise.uniform(0.01, 1, group.scales.shape).astype(np.float32)
    file = dataclasses.replace(
        file,
        groups=[dataclasses.replace(group, scales=scales)],
        stored=[_noise(v, noise) for v in file.stored],
    )
    fixed = len(file.to_bytes()) - file.payload_bytes + _SLACK

    if any_rate:
        room = min(budget - fixed, code.max_bytes)
        if room < 1:
            raise ValueError(_cannot_be_met(target, budget, file, rules))
        return _with_bits(recipe, 8 * room * min(recipe.block_size, count) / count)

    def fits(block_size):
        num_blocks = -(-count // block_size)
        return fixed + math.ceil(num_blocks * code.bits(block_size) / 8) <= budget

    if not fits(count):
        raise ValueError(_cannot_be_met(target, budget, file, rules))
    block_size = 1 + bisect.bisect_left(range(1, count), True, key=fits)
    return dataclasses.replace(recipe, block_size=block_size)


def _with_bits(recipe, block_bits):
    """The recipe with other bits of a block, which its coder may say itself."""
    coder = recipe.coder
    if not isinstance(coder, str):
        coder = dataclasses.replace(coder, block_bits=block_bits)
    return dataclasses.replace(recipe, coder=coder, block_bits=block_bits)


def _cannot_be_met(target, budget, file, rules):
    """Says what the smallest file is, what takes its bytes, and what would help."""
    parts = file.part_bytes()
    least = sum(parts.values()) + _SLACK
    count = file.num_weights
    ratio, bits = math.floor(40 * count / least) / 10, math.ceil(800 * least / count)
    text = (
        f"`target` cannot be met: {target!r} means {budget:,} bytes, but the smallest "
        f"file of this network that can be promised takes {least:,} ('{ratio:.1f}x', "
        f"'{bits / 100:.2f} bits'): {parts['description']:,} for architecture, names "
        f"and settings, {parts['layout']:,} for the layout with its coding scales, "
        f"{parts['stored']:,} for stored variables, {parts['indices']:,} for "
        f"the shortest code, {_SLACK} in reserve."
    )
    number = re.fullmatch(r"\s*([0-9.]+)\s*", str(target))
    if number:
        as_ratio = target_bytes(f"{number[1]}x", count)
        text += (
            f" Did you mean '{number[1]}x', a ratio?"
            if as_ratio >= least
            else f" (As a ratio, '{number[1]}x', it would be {as_ratio:,} bytes.)"
        )
    if parts["stored"] > least / 2:
        saved = {}
        stored = [n for n, p in zip(file.names, file.coded, strict=True) if p is None]
        for name, value in zip(stored, file.stored, strict=True):
            if isinstance(value, np.ndarray) and value.dtype == np.float32:
                *_, last = name.split("/")
                pattern = f"*/{last}" if last != name else name
                saved[pattern] = saved.get(pattern, 0) + value.nbytes * 3 // 4
        most = sorted(saved, key=saved.get, reverse=True)[:3]
        if most:
            advice = ", ".join(f"'{pattern}': 'store=8bit'" for pattern in most)
            text += (
                f" The rules {{{advice}}} save about "
                f"{sum(saved[pattern] for pattern in most):,} bytes."
            )
        text += " What trains, and no rule stores, is coded; 'hash=N' keeps it small."
    if any("own_scale" in rule for rule in (rules or {}).values()):
        text += " Without the rule 'own_scale' a variable takes 4 bytes less."
    return text


def _noise(stored, random):
    """A stored variable of the same kind that does not compress."""
    if isinstance(stored, Levels):
        least, most = (0 if stored.squared else -127), 128
        levels = random.integers(least, most, stored.shape, np.int8)
        return dataclasses.replace(stored, levels=levels)
    noise = np.frombuffer(random.bytes(stored.nbytes), stored.dtype)
    return noise.reshape(stored.shape)


def target_bytes(target: str | int, num_weights: int) -> int:
    """Reads a target size: bytes, "3.3 kB", "500x" or "0.06 bits" (a weight).

    Raises:
      ValueError: if it cannot be read, or is not positive.
    """
    match = re.fullmatch(
        r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(b|kb|mb|x|bits?|)\s*",
        str(target).lower(),
    )
    if not match or not 0 < float(match[1]) < float("inf"):
        raise ValueError(
            "`target` must be a number of bytes (3300, '3300 B' or '3.3 kB'), a ratio "
            f"('500x') or bits per weight ('0.06 bits'). Received: target={target!r}"
        )
    number, unit = float(match[1]), match[2]
    if unit == "x":
        return int(4 * num_weights / number)
    if unit.startswith("bit"):
        return int(number * num_weights / 8)
    return int(number * {"": 1, "b": 1, "kb": 1e3, "mb": 1e6}[unit])
