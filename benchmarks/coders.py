"""Compares coders on the same posteriors at the same bits: how near to Q, how fast.

    python benchmarks/coders.py --output=FOLDER [--data=MNIST.npz] [--seeds=0,1,2]
        [--steps=4000,12000] [--only=PART]

A Gaussian source asks how far a coder is from Shannon's bound. Posteriors with an even
and an uneven KL, of 0.1 to 4 bits a weight, show log weight, spread and time. With
--data, so do those of a ResNet-8; and LeNet-5 is trained as by the preset (--steps:
those of warm start and training), once for each seed, and coded in one shot, without
fine-tuning; the networks are evaluated on the test set and on a sixth of the training
images, which is held out. Writes `coders.json`, what is there already stays, and tables
and a figure of all of it.
"""

import argparse
import json
import pathlib
import time
import typing

import matplotlib.figure
import numpy as np
import scipy.stats
from tables import markdown, mean
from timing import machine

from tfmiracle.environment import configure

configure()  # before TensorFlow is imported
# ruff: noqa: E402

import keras

import tfmiracle
from tfmiracle.codec.coded_posterior import CodedPosterior
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.coding.trellis import TrellisCoder
from tfmiracle.datasets import load_dataset
from tfmiracle.miracle_file import CodedGroup, MiracleFile
from tfmiracle.posteriors.parameterization import MeanKL
from tfmiracle.studies.architectures import ARCHITECTURES

BITS = 20  # of a block of minimal random coding
RATES = (0.1, 0.25, 0.5, 1, 2, 4)  # bits a weight
RULES = {"conv2/kernel": "hash=2", "dense1/kernel": "hash=64"}


def coders(block_bits: float) -> dict:
    """Coders that take so many bits for a block; MRC takes only blocks of 20."""
    trellises = {
        f"trellis, {bits} state bits": TrellisCoder(bits, block_bits)
        for bits in (8, 12, 16, 18)
    }
    trellises["trellis, 12 state bits, sampled"] = TrellisCoder(
        12, block_bits, "sample"
    )
    return {
        "MRC, largest": MinimalRandomCoder(BITS),
        "MRC, sampled": MinimalRandomCoder(BITS, selection="sample"),
        **trellises,
    }


def code(coder, loc, log_scale, seed=0):
    """Codes all blocks at once: the candidates, float32 of the shape of `loc`."""
    layout = WeightLayout([CodedVariable((loc.size,))], loc.shape[1], seed)
    coder = coder.for_layout(layout)
    blocks = np.arange(len(loc))
    found = coder.encode(blocks, loc.astype(np.float32), log_scale.astype(np.float32))
    return coder.code.candidates(blocks, found.codes, loc.shape[1])


# A Gaussian source.


def source(rate: float, weights: int = 4000, seed: int = 0) -> dict[str, float]:
    """Mean squared error over variance at `rate` bits a number, and the bounds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(weights)
    least = 2.0 ** (-2 * rate)
    # The candidate z stands for c z; its log weight is the squared error, but for a
    # factor and a constant, under this Q.
    c = np.sqrt(1 - least)
    precision = c**2 / least + 1
    block = round(BITS / rate)
    count = len(x) // block * block
    x = x[:count].reshape(-1, block)
    loc, log_scale = x * c / least / precision, np.full(x.shape, np.log(precision) / -2)
    errors = {
        name: float(np.mean((x - c * code(coder, loc, log_scale)) ** 2) / x.var())
        for name, coder in coders(BITS).items()
        if "sampled" not in name
    }
    return {
        **errors,
        "scalar quantization, entropy coded": uniform_quantizer(rate),
        "Shannon": least,
    }


def uniform_quantizer(rate: float) -> float:
    """Error of the best uniform scalar quantizer whose entropy is `rate`."""
    grid = np.linspace(-9, 9, 200_001)
    density = scipy.stats.norm.pdf(grid)
    density /= density.sum()

    def entropy_and_error(step):
        level = np.rint(grid / step).astype(int)
        level -= level.min()
        mass = np.bincount(level, density)
        centre = np.bincount(level, density * grid) / np.maximum(mass, 1e-300)
        error = np.sum(density * (grid - centre[level]) ** 2)
        mass = mass[mass > 0]
        return -np.sum(mass * np.log2(mass)), error

    low, high = 1e-2, 20.0
    for _ in range(60):
        step = np.sqrt(low * high)
        entropy, error = entropy_and_error(step)
        low, high = (step, high) if entropy > rate else (low, step)
    return float(error)


# Posteriors.


def posterior(rate: float, uneven: bool, weights: int = 4000, seed: int = 0):
    """Q relative to P: blocks that have 20 bits of KL, evenly spread or not."""
    rng = np.random.default_rng(seed)
    block = round(BITS / rate)
    shape = (weights // block, block)
    share = np.where(rng.random(shape) < 0.5, 1.6, 0.4) if uneven else np.ones(shape)
    loc, log_scale = rng.standard_normal(shape), -share * rate * np.log(2)

    def kl(factor):
        s = log_scale * factor
        m = loc * np.sqrt(1 - np.exp(2 * s))
        return np.sum(-s + (np.exp(2 * s) + m**2 - 1) / 2, axis=1) / np.log(2)

    low, high = np.zeros((len(loc), 1)), np.full((len(loc), 1), 20.0)
    for _ in range(60):
        factor = (low + high) / 2
        less = (kl(factor) < BITS)[:, np.newaxis]
        low, high = np.where(less, factor, low), np.where(less, high, factor)
    log_scale = log_scale * high
    return loc * np.sqrt(1 - np.exp(2 * log_scale)), log_scale


def nearness(z, loc, log_scale) -> dict[str, float]:
    """How near candidates are to samples of Q."""
    t = (z - loc) * np.exp(-log_scale)
    log_weight = 0.5 * (z**2 - t**2) - log_scale
    return {
        "log weight": float(log_weight.mean() / np.log(2)),  # bits a weight
        "spread": float(np.mean(t**2)),
        "distance": float(scipy.stats.kstest(t.reshape(-1), "norm").statistic),
    }


def on_posteriors(rate: float, uneven: bool) -> dict[str, dict[str, float]]:
    loc, log_scale = posterior(rate, uneven)
    return timed(coders(BITS), loc, log_scale)


def timed(coders, loc, log_scale) -> dict[str, dict[str, float]]:
    found = {}
    for name, coder in coders.items():
        code(coder, loc, log_scale)  # compiles
        start = time.perf_counter()
        z = code(coder, loc, log_scale)
        seconds = time.perf_counter() - start
        found[name] = nearness(z, loc, log_scale)
        found[name]["microseconds"] = 1e6 * seconds / loc.size
    return found


def a_million() -> dict[str, float]:
    """Seconds for a million weights at a bit each; MRC's from a sixteenth of them."""
    loc, log_scale = posterior(1, True, weights=1_000_000)
    some = loc[: len(loc) // 16], log_scale[: len(loc) // 16]
    found = {}
    for name, coder in coders(BITS).items():
        if name not in (
            "MRC, largest",
            *(f"trellis, {b} state bits" for b in (12, 16)),
        ):
            continue
        part = some if name.startswith("MRC") else (loc, log_scale)
        code(coder, *(x[:512] for x in part))  # compiles
        start = time.perf_counter()
        code(coder, *part)
        found[name] = (time.perf_counter() - start) * len(loc) / len(part[0])
    return found


# LeNet-5.


class Trained(typing.NamedTuple):
    """A network and its trained posterior: Q relative to P in blocks, and rho."""

    net: keras.Model
    group: CodedGroup
    loc: np.ndarray
    log_scale: np.ndarray
    rho: np.ndarray


def trained(network: str, seed: int, steps, rules, arguments) -> Trained:
    """Trains with blocks of 20 weights and 20 bits, with the rates of the preset."""
    held = load_dataset(arguments.data).hold_out(1 / 6)
    keras.utils.set_random_seed(seed)
    net = ARCHITECTURES[network]((28, 28, 1), 10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss, metrics=["accuracy"])
    path = arguments.output / "runs" / f"{network}-{steps[0]}-{steps[1]}-{seed}.miracle"
    if not path.exists():
        recipe = tfmiracle.Recipe(
            parameterization=MeanKL(quota_rate=1.0),
            coder=TrellisCoder(8),
            warmup_steps=steps[0],
            train_steps=steps[1],
            warm_log_scale=1.0,
            learning_rate=2e-2,
            log_scale_rate=0.1,
            l2=5e-5,
            blocks_per_round=1 << 30,
            finetune_steps=0,
            seed=seed,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        tfmiracle.compress(
            net,
            (_images(held.x_train), held.y_train),
            path=path,
            recipe=recipe,
            rules=rules,
            workdir=path.with_suffix(".run"),
            keep_posterior=True,
        )
    (group,) = MiracleFile.read(path).groups
    layout = group.layout
    q = CodedPosterior.read(path.with_suffix(".posterior.npz"))
    rho = group.scales[layout.scale_index_of_slot()].astype(np.float64)
    mask = layout.mask()
    loc = np.where(mask, layout.to_blocks(q.loc[0]) / rho, 0)
    scale = np.where(mask, layout.to_blocks(q.scale[0]), rho)
    return Trained(net, group, loc, np.log(scale / rho), rho)


def deep(seed: int, steps, arguments) -> dict[str, dict[str, float]]:
    """How near coders come to the posterior of a ResNet-8 at one bit a weight."""
    found = trained("resnet8", seed, steps, None, arguments)
    return timed(coders(BITS), found.loc, found.log_scale)


def in_one_shot(seed: int, steps, arguments) -> dict[str, dict[str, float]]:
    """A posterior of LeNet-5, trained as by the preset, coded without fine-tuning."""
    data = load_dataset(arguments.data)
    held = data.hold_out(1 / 6)
    sets = {
        "validation": (_images(held.x_test), held.y_test),
        "test": (_images(data.x_test), data.y_test),
    }
    net, group, loc, log_scale, rho = trained("lenet5", seed, steps, RULES, arguments)
    mask = group.layout.mask()

    def evaluated(z):
        values = group.layout.expand((z * rho).astype(np.float32))
        for variable, value in zip(net.weights, values, strict=True):
            variable.assign(value)
        losses = {
            name: net.evaluate(*data, batch_size=1000, verbose=0, return_dict=True)
            for name, data in sets.items()
        }
        return {
            f"{name} {metric}": value
            for name, found in losses.items()
            for metric, value in found.items()
        }

    rng = np.random.default_rng(seed)
    found = {"mean of Q": evaluated(loc)}
    draws = [loc + np.exp(log_scale) * rng.standard_normal(loc.shape) for _ in range(3)]
    found["exact samples"] = average(evaluated(z) for z in draws)
    for name, coder in coders(BITS).items():
        # One code says little of a coder: the mean over three tables or codebooks.
        results = []
        for table in range(3):
            z = code(coder, loc, log_scale, table)
            near = nearness(z[mask], loc[mask], log_scale[mask])
            results.append({**evaluated(z), **near})
        found[name] = average(results)
    return found


def average(results) -> dict[str, float]:
    results = list(results)
    return {key: float(np.mean([r[key] for r in results])) for key in results[0]}


def _images(x):
    return (x / 255.0).astype(np.float32).reshape(-1, 28, 28, 1)


# What was found.


def tables(found: dict) -> str:
    parts = [f"{k} {v}" for k, v in found["machine"].items()]
    text = "    python benchmarks/coders.py --output=FOLDER --data=MNIST.npz\n\n"
    text += ", ".join(parts) + ".\n"
    sources = {float(k): v for k, v in found.get("source", {}).items()}
    if sources:
        rows = [
            [name, *(f"{sources[rate][name]:.4f}" for rate in sources)]
            for name in sources[min(sources)]
        ]
        text += (
            "\nGaussian source: mean squared error over variance, by bits a number.\n\n"
            + markdown(["", *sources], rows)
        )
    for kind in ("even", "uneven", "resnet8"):
        for rate, coders in found.get(kind, {}).items():
            text += (
                f"\nThe posterior of a ResNet-8, trained for {rate} steps: the same "
                "columns.\n\n"
                if kind == "resnet8"
                else f"\nPosteriors with {kind} KL, {rate} bits a weight: log2 q/p for "
                "20 bits, (w - mu)^2 / sigma^2, distance of (w - mu) / sigma from "
                "normal (Kolmogorov), microseconds a weight.\n\n"
            )
            bits = 1 if kind == "resnet8" else float(rate)
            rows = [
                [
                    name,
                    f"{r['log weight'] * BITS / bits:.2f}",
                    f"{r['spread']:.3f}",
                    f"{r['distance']:.3f}",
                    f"{r['microseconds']:.1f}",
                ]
                for name, r in coders.items()
            ]
            text += markdown(["", "log weight", "spread", "distance", "time"], rows)
    if "a million" in found:
        rows = [[name, f"{value:.2f}"] for name, value in found["a million"].items()]
        text += "\nA million weights at one bit each.\n\n" + markdown(
            ["", "seconds"], rows
        )
    for steps, seeds in found.get("lenet5", {}).items():
        text += (
            f"\nLeNet-5 at 555x, trained for {steps} steps, coded in one shot: mean ± "
            "standard error over the seeds, each the mean over three tables or "
            "codebooks.\n\n"
        )
        runs = list(seeds.values())
        rows = []
        for name in runs[0]:
            rows.append([name])
            for metric, factor, digits in (
                ("log weight", 20, 2),
                ("spread", 1, 3),
                ("validation loss", 1, 4),
                ("test loss", 1, 4),
                ("test accuracy", 100, 2),
            ):
                values = [factor * run[name].get(metric, np.nan) for run in runs]
                if metric == "test accuracy":
                    values = [100 - value for value in values]
                known = np.isfinite(values).all()
                rows[-1].append(mean(values, digits) if known else "")
        titles = ["", "log2 q/p for 20", "spread", "validation, nats", "test, nats"]
        text += markdown([*titles, "test error, %"], rows)
    return text


def figure(found: dict, path: pathlib.Path) -> None:
    """Draws how many bits each coder needs beyond Shannon's bound."""
    sources = {float(k): v for k, v in found.get("source", {}).items()}
    drawn = matplotlib.figure.Figure((5, 3.5), layout="constrained")
    axes = drawn.subplots()
    for name in sources[min(sources)]:
        if name != "Shannon":
            bits = [0.5 * np.log2(v[name] / v["Shannon"]) for v in sources.values()]
            axes.plot(list(sources), bits, "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bits a number")
    axes.set_ylabel("bits more than Shannon's bound at this error")
    axes.legend(frameon=False)
    drawn.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--data", help="MNIST as Keras' .npz file, for LeNet-5")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", default="4000,12000")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "coders.json"
    found = json.loads(path.read_text()) if path.exists() else {"machine": machine()}
    steps = tuple(map(int, arguments.steps.split(",")))
    parts = {("source", f"{rate:g}"): lambda rate=rate: source(rate) for rate in RATES}
    for kind in ("even", "uneven"):
        for rate in RATES:
            parts[kind, f"{rate:g}"] = lambda kind=kind, rate=rate: on_posteriors(
                rate, kind == "uneven"
            )
    parts["a million",] = a_million
    if arguments.data:
        parts["resnet8", "500,1500"] = lambda: deep(0, (500, 1500), arguments)
        for seed in map(int, arguments.seeds.split(",")):
            parts["lenet5", arguments.steps, str(seed)] = lambda seed=seed: in_one_shot(
                seed, steps, arguments
            )
    for (*outer, last), measure in parts.items():
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        name = " ".join((*outer, last))
        if last in place or arguments.only not in name:
            continue
        print(name, flush=True)
        place[last] = measure()
        path.write_text(json.dumps(found, indent=1) + "\n")
        (arguments.output / "coders.md").write_text(tables(found))
        if found.get("source"):
            figure(found, arguments.output / "source.svg")


if __name__ == "__main__":
    main()
