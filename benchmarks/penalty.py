"""What becomes of a Mean-Var posterior if coded blocks stay in the KL penalty.

    python benchmarks/penalty.py --workdir=W --data=MNIST.npz --output=FILE.json

In this package a block leaves the penalty when it is coded, and its Q is kept as it
was. Left in, nothing but the penalty has a gradient there, so that Adam takes Q to P
while the other blocks are coded; as it remembers the likelihood's gradients, it does so
slowly at first. That is computed here, weight by weight, for the Mean-Var runs of a
study (with the rates of the paper) that still have their posteriors in W/runs, once for
the steps of the run and once for those of the paper. Then the files are pruned by KL,
ranked by one Q and by another; of weights that are back at P, the layer of smaller rho
goes first, then what comes first in the file. Writes accuracies, and quantiles of what
the paper's Figure 1 shows.
"""

import argparse
import dataclasses
import json
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.coded_posterior import CodedPosterior
from tfmiracle.codec.pruning import pruned_networks
from tfmiracle.datasets import load_dataset
from tfmiracle.decoder import decode, decoded_network
from tfmiracle.files import write_atomically
from tfmiracle.hosts.loading import accuracy_of, set_weights, to_network
from tfmiracle.miracle_file import (
    MiracleFile,
)
from tfmiracle.studies.records import read_record
from tfmiracle.studies.task import task_of

BATCHES = 100
FRACTIONS = tuple(i / 10 for i in range(10))
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def likelihood_moments(
    file: MiracleFile, posterior: CodedPosterior, net: keras.Model, data, settings
) -> np.ndarray:
    """Adam's second moments of loc and log sigma, of the likelihood's gradients alone.

    float32[2, num_effective]: mean squares over batches, with a sample of Q each.
    """
    layout, rng = file.groups[0].layout, np.random.default_rng(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hashing = [
        layout.hashing(i) if v.hash_factor > 1 else None
        for i, v in enumerate(layout.variables)
    ]

    @tf.function
    def gradients(x, y):
        variables = [v.value for v in net.weights]  # all of them are coded
        with tf.GradientTape() as tape:
            value = loss(y, net(x, training=True))
        return tape.gradient(value, variables)

    squares = np.zeros((2, layout.num_effective), np.float32)
    for _ in range(BATCHES):
        noise = posterior.scale[0] * rng.standard_normal(
            layout.num_effective, np.float32
        )
        sample = layout.to_blocks(posterior.loc[0] + noise)
        set_weights(net, list(decoded_network(file, [sample]).weights.values()))
        rows = rng.integers(0, len(data.x_train), settings["batch_size"])
        parts = gradients(data.x_train[rows], data.y_train[rows])
        parts = [g.numpy().reshape(-1) for g in parts]
        for i, shared in enumerate(hashing):
            if shared:
                index, sign = shared
                parts[i] = np.bincount(index, sign * parts[i])
        gradient = np.concatenate(parts)
        squares += np.square([gradient, gradient * noise])
    return squares / BATCHES


def adam(gradient, value, second, steps, learning_rate):
    """Entry i of `value` after `steps[i]` steps; `steps` must not increase.

    Starts from a second moment, and without bias correction: both have settled.
    """
    first, second = np.zeros_like(value), second.copy()
    for t in range(1, steps[0] + 1):
        some = slice(np.searchsorted(-steps, -t, side="right"))
        g = gradient(t, value[some], some)
        first[some] += 0.1 * (g - first[some])
        second[some] += 0.001 * (g * g - second[some])
        value[some] -= learning_rate * first[some] / (np.sqrt(second[some]) + 1e-7)
    return value


def with_penalty(
    file: MiracleFile,
    posterior: CodedPosterior,
    moments: np.ndarray,
    settings: dict,
    scale: float,
    beta: float,
) -> CodedPosterior:
    """Q where the penalty goes on, for `1 / scale` times the steps of the run.

    `beta` weighs it at first. It shrinks, as the KL soon is below the budget.
    """
    layout = file.groups[0].layout
    rounds = -(-layout.num_blocks // settings["blocks_per_round"])
    coded_in = layout.slots // layout.block_size // settings["blocks_per_round"]
    steps = round(settings["finetune_steps"] / scale) * (rounds - 1 - coded_in)
    order = np.argsort(-steps, kind="stable")
    rho, steps = coding_scale(file)[order], steps[order]
    factor = 1 + settings["beta_rate"] * scale
    loc = adam(
        lambda t, x, some: beta * factor**-t * x / rho[some] ** 2,
        posterior.loc[0][order],
        moments[0][order],
        steps,
        settings["finetune_learning_rate"],
    )
    log_scale = adam(
        lambda t, x, some: beta * factor**-t * np.expm1(2 * (x - np.log(rho[some]))),
        np.log(posterior.scale[0][order]),
        moments[1][order],
        steps,
        settings["finetune_learning_rate"],
    )
    back = np.argsort(order)
    return dataclasses.replace(
        posterior, loc=[loc[back]], scale=[np.exp(log_scale[back])]
    )


def coding_scale(file: MiracleFile) -> np.ndarray:
    """rho of every effective weight of the one group of a file."""
    (group,) = file.groups
    return group.layout.to_effective(group.scales[group.layout.scale_index_of_slot()])


def measured(folder: pathlib.Path, name: str, record: dict, data, beta: float) -> dict:
    file = MiracleFile.read(folder / f"{name}.miracle")
    posterior = CodedPosterior.read(folder / f"{name}.posterior.npz")
    posterior.check_fits(file)
    net, settings = to_network(decode(file)), record["settings"]
    data = task_of(net, data).data
    moments = likelihood_moments(file, posterior, net, data, settings)
    found = {"run": name, "fractions": FRACTIONS, "quantiles": QUANTILES}
    found["root_mean_square_gradients"] = np.sqrt(moments.mean(1)).tolist()
    for what, q in (
        ("as_coded", posterior),
        *(
            (what, with_penalty(file, posterior, moments, settings, scale, beta))
            for what, scale in (
                ("penalty_going_on", 1),
                ("penalty_going_on_at_full_length", record["scale"]),
            )
        ),
    ):
        log_ratio = np.log(q.scale[0] / coding_scale(file))
        found[what] = {
            "accuracy": [
                accuracy_of(net, pruned, data.x_test, data.y_test)
                for pruned in pruned_networks(file, "kl", FRACTIONS, q)
            ],
            "abs_loc": np.quantile(np.abs(q.loc[0]), QUANTILES).tolist(),
            "log_scale_over_rho": np.quantile(log_ratio, QUANTILES).tolist(),
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path)
    parser.add_argument("--data", required=True, help="MNIST as Keras' .npz file")
    parser.add_argument("--output", required=True)
    parser.add_argument(
        "--beta",
        type=float,
        default=1e-4,
        help="weight of the penalty when a block is coded; annealing ends near 1e-4",
    )
    arguments = parser.parse_args()
    data = load_dataset(arguments.data)
    folder = arguments.workdir / "runs"
    found = [
        measured(folder, path.stem, read_record(path), data, arguments.beta)
        for path in sorted((arguments.workdir / "records").glob("mean_var_*.json"))
        if (folder / f"{path.stem}.posterior.npz").exists()
    ]
    if not found:
        parser.error(f"--workdir: {folder} has no posterior of a Mean-Var run")
    text = json.dumps(found, indent=1) + "\n"
    write_atomically(arguments.output, text.encode(), overwrite=True)
    for what in (key for key, value in found[0].items() if isinstance(value, dict)):
        mean = np.mean([run[what]["accuracy"] for run in found], axis=0)
        print(what, *(f"{f:.0%}: {a:.1%}" for f, a in zip(FRACTIONS, mean)))


if __name__ == "__main__":
    main()
