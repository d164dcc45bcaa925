"""Records of a study, made up for what reads them."""

import json

import numpy as np

from tfmiracle.studies.records import read_records

FALLING = [5, 4, 3, 2, 1.2, 1.1, 1.05, 1.02, 1.01, 1.0]  # converged from the sixth on


def curve(cross_entropy, kl_bits=None, phase="variational"):
    count = len(cross_entropy)
    return {
        "phase": [phase] * count,
        "step": [100 * (i + 1) for i in range(count)],
        "cross_entropy": list(cross_entropy),
        "kl_bits": [20.0] * count if kl_bits is None else list(kl_bits),
        "accuracy": [0.9] * count,
    }


def record(parameterization="mean_kl", block_size=20, seed=0, **changes):
    """A small one without histograms and pruning."""
    made = {
        "format": 1,
        "parameterization": parameterization,
        "block_size": block_size,
        "seed": seed,
        "scale": 0.5,
        "model": "lenet5",
        "dtype_policy": "float32",
        "data": "mnist",
        "settings": {
            "parameterization": parameterization,
            "block_size": block_size,
            "block_bits": 20,
            "kl_bits": None,
            "seed": seed,
        },
        "versions": {"tfmiracle": "0.1.0", "numpy": "2.0 <beta> & more"},
        "machine": {"processor": "a processor", "cores": 2},
        "seconds": 1800.0,
        "sizes": {
            "payload_ratio": {20: 555.26, 30: 833.4, 40: 1111.1}.get(block_size, 5),
            "blocks": 1242,
        },
        "sha256": "00",
        "errors": {"posterior_mean": 0.01, "posterior_sample": 0.02, "decoded": 0.009},
        "steps": {
            "train": {"mean_var": 100_000, "mean_kl": 50_000}[parameterization],
            "total": 174_200,
        },
        "curve": curve([2, 1, 0.5, 0.2, 0.1, 0.1]),
        "coding": {"max_kl_bits": [20.1, 20.0], "over_budget": [0, 0]},
    }
    return {**made, **changes}


def with_all(parameterization, block_size=20, seed=0):
    rng = np.random.default_rng([block_size, seed, len(parameterization)])
    counts = rng.integers(0, 50, 20).tolist()
    edges = np.linspace(-1 - seed, 1, 21).tolist()
    histogram = {"edges": edges, "counts": counts}
    fractions = np.linspace(0, 1, 11)
    pruned = {
        "fractions": fractions.tolist(),
        "accuracy": (0.98 - 0.8 * fractions**2 - 0.01 * rng.random()).tolist(),
    }
    return record(
        parameterization,
        block_size,
        seed,
        curve=curve(
            2 * np.exp(-np.arange(40) / 8) + 0.1 + 0.01 * rng.random(40),
            [*np.geomspace(300, 20, 20), *[20] * 19, None],
        ),
        histograms={
            name: {"loc": histogram, "log_scale": histogram}
            for name in ("conv1/kernel", "conv1/bias")
        },
        pruning={s: pruned for s in ("uniform", "magnitude", "kl")},
    )


def sparse():
    """With as little as a study may leave."""
    flat = {"edges": [-1, 0, 1], "counts": [0, 0]}
    return (
        record(
            "mean_var",
            50,
            3,
            curve=curve([0.0, 1.0], [None, None]),
            histograms={"w": {"loc": flat, "log_scale": flat}},
            pruning={"kl": {"fractions": [0.5], "accuracy": [0.2]}},
        ),
        record("mean_kl", 50, curve=curve([1.0], [20]), histograms={}, pruning={}),
    )


def saved(folder, *records):
    (folder / "records").mkdir(exist_ok=True)
    for r in records:
        name = f"{r['parameterization']}_b{r['block_size']}_s{r['seed']}.json"
        (folder / "records" / name).write_text(json.dumps(r))
    return folder


def loaded(folder, *records):
    return read_records(saved(folder, *records))
