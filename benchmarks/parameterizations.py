"""Compares parameterizations on a small network with normalizations, without coding.

    python benchmarks/parameterizations.py --output=FOLDER [--seeds=0,1,2]
        [--steps=1500]

A network of 33,338 weights is trained on scikit-learn's digits; from its weights each
parameterization starts, for so many steps at half a bit a weight. The table has the
cross-entropy of samples of the posterior (the mean over six) and of its mean, with
statistics of BatchNormalization taken anew. Writes `parameterizations.json`, what is
there already stays, and a table.
"""

import argparse
import json
import pathlib
import time

from tables import markdown, mean
from timing import machine

from tfmiracle.environment import configure

configure()  # before TensorFlow is imported
# ruff: noqa: E402

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfmiracle
from tfmiracle import MeanKL, MeanVar, Sites
from tfmiracle.datasets import load_dataset
from tfmiracle.hosts.recalibration import recalibrate
from tfmiracle.training.curvature import curvature

BATCH_SIZE, SAMPLES, BLOCK_SIZE, KL_BITS = 64, 6, 40, 20
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# What differs: the parameterization, the learning rate, and whether it starts from the
# curvature of the loss.
VARIANTS = {
    "Mean-KL": (MeanKL(), 1e-2, False),
    "Mean-KL, four times the budget at first": (
        MeanKL(initial_budget=4.0),
        1e-2,
        False,
    ),
    "Mean-Var": (MeanVar(), 2e-3, False),
    "Mean-Var, faster standard deviations": (
        MeanVar(log_stddev_rate=20.0),
        2e-3,
        False,
    ),
    "sites": (Sites(), Sites.learning_rate, False),
    "sites, from the curvature": (Sites(), Sites.learning_rate, True),
    "sites, the same budget throughout": (
        Sites(initial_budget=1.0),
        Sites.learning_rate,
        False,
    ),
    "sites, slower": (Sites(precision_rate=20.0), 2e-3, False),
}


def network():
    x = inputs = layers.Input((8, 8, 1))
    for filters, strides in ((16, 1), (32, 2), (32, 1), (64, 1)):
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def batches(data, steps, seed):
    index = np.random.default_rng(seed).integers(
        0, len(data.x_train), (steps, BATCH_SIZE)
    )
    x, y = tf.constant(data.x_train), tf.constant(data.y_train)
    return tf.data.Dataset.from_tensor_slices(index).map(
        lambda i: (tf.gather(x, i), tf.gather(y, i))
    )


def schedule(rate, steps):
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps))


def trained(data, seed):
    """The network that all start from."""
    keras.utils.set_random_seed(seed)
    net = network()
    net.compile(schedule(3e-3, 900), LOSS, metrics=["accuracy"])
    net.fit(batches(data, 900, seed), verbose=0)
    return net


def measure(name, seed, steps, data):
    """Cross-entropy in nats, test error in %, KL of a block in bits, seconds."""
    parameterization, rate, from_curvature = VARIANTS[name]
    net = trained(data, seed)
    model = tfmiracle.VariationalModel(
        net,
        parameterization.for_steps(steps),
        block_size=BLOCK_SIZE,
        kl_bits=KL_BITS,
        warm_log_scale=0.0,
        seed=seed,
    )
    if from_curvature:
        found = curvature(model, batches(data, 100, seed), LOSS, seed)
        model.block_posterior.observe(found)
    model.compile(schedule(rate, steps), LOSS)
    start = time.perf_counter()
    model.fit(batches(data, steps, seed), verbose=0)
    seconds = time.perf_counter() - start
    model.block_posterior.finalize_coding_scale()

    def evaluated(sample):
        model.materialize(sample)
        recalibrate(net, [data.x_train])
        train = net.evaluate(data.x_train, data.y_train, verbose=0)[0]
        test, accuracy = net.evaluate(data.x_test, data.y_test, verbose=0)
        return {"train": train, "test": test, "error": 100 * (1 - accuracy)}

    samples = [evaluated(True) for _ in range(SAMPLES)]
    return {
        "sample": {
            key: float(np.mean([s[key] for s in samples])) for key in samples[0]
        },
        "mean": evaluated(False),
        "kl_bits": float(np.mean(model.block_posterior.block_kl()) / np.log(2)),
        "seconds": seconds,
    }


def table(found):
    rows = []
    for name, seeds in found["variants"].items():
        runs = list(seeds.values())
        rows.append(
            [
                name,
                len(runs),
                *(
                    mean([r["sample"][key] for r in runs], 4)
                    for key in ("train", "test")
                ),
                mean([r["sample"]["error"] for r in runs], 2),
                mean([r["mean"]["test"] for r in runs], 4),
                mean([r["kl_bits"] for r in runs], 1),
            ]
        )
    titles = ["", "seeds", "sample, training set, nats", "sample, test set, nats"]
    titles += ["sample, test error, %", "mean, test set, nats", "KL of a block, bits"]
    parts = ", ".join(f"{k} {v}" for k, v in found["machine"].items())
    return (
        "    python benchmarks/parameterizations.py --output=FOLDER\n\n"
        f"{found['steps']:,} steps; mean ± standard error over the seeds. {parts}.\n\n"
        + markdown(titles, rows)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "parameterizations.json"
    found = {"machine": machine(), "steps": arguments.steps, "variants": {}}
    if path.exists():
        found = json.loads(path.read_text())
        if found["steps"] != arguments.steps:
            parser.error(f"{path} has other --steps: choose another --output")
    data = load_dataset("digits")
    for seed in arguments.seeds.split(","):
        for name in VARIANTS:
            runs = found["variants"].setdefault(name, {})
            if seed not in runs:
                print(f"{name}, seed {seed}", flush=True)
                runs[seed] = measure(name, int(seed), found["steps"], data)
                path.write_text(json.dumps(found, indent=1) + "\n")
                (path.with_suffix(".md")).write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
