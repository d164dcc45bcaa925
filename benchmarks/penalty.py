"""What becomes of a Mean-Var posterior if coded blocks stay in the KL penalty.

    python benchmarks/penalty.py --workdir=W --data=MNIST.npz --output=FILE.json

In this package a block leaves the penalty when it is coded, and its Q is kept as it
was. Left in, nothing but the penalty has a gradient there, so that Adam takes Q to P
while the other blocks are coded. That is computed here, weight by weight, for the
Mean-Var runs of a study (with the rates of the paper) that still have their posteriors
in W/runs, as if Adam started anew at each block: what it remembers of the likelihood's
gradients, which is not kept, delays it for some thousand steps, so that blocks coded
late would keep more of their Q. Then the files are pruned by KL, ranked by the one Q
and by the other. Writes accuracies, and quantiles of what the paper's Figure 1 shows.
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np

from tfmiracle.coded_posterior import CodedPosterior
from tfmiracle.datasets import load_dataset
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import MiracleFile, write_atomically
from tfmiracle.network import accuracy_of, to_network
from tfmiracle.pruning import pruned_networks
from tfmiracle.records import read_record

FRACTIONS = tuple(i / 10 for i in range(10))
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def adam(gradient, value, steps, learning_rate):
    """Entry i of `value` after `steps[i]` steps; `steps` must not increase."""
    first, second = np.zeros_like(value), np.zeros_like(value)
    for t in range(1, steps[0] + 1):
        some = slice(np.searchsorted(-steps, -t, side="right"))
        g = gradient(t, value[some], some)
        first[some] += 0.1 * (g - first[some])
        second[some] += 0.001 * (g * g - second[some])
        rate = learning_rate * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        value[some] -= rate * first[some] / (np.sqrt(second[some]) + 1e-7)
    return value


def with_penalty(
    file: MiracleFile, posterior: CodedPosterior, record: dict
) -> CodedPosterior:
    """Q where the penalty goes on."""
    (group,), settings = file.groups, record["settings"]
    layout = group.layout
    rounds = -(-layout.num_blocks // settings["blocks_per_round"])
    coded_in = layout.slots // layout.block_size // settings["blocks_per_round"]
    steps = settings["finetune_steps"] * (rounds - 1 - coded_in)
    order = np.argsort(-steps, kind="stable")
    rho = coding_scale(file)[order]
    rest = steps[order], settings["finetune_learning_rate"]
    # The KL is below the budget, so beta shrinks. It hardly matters to Adam.
    beta, factor = 1e-4, 1 + settings["beta_rate"]
    loc = adam(
        lambda t, x, some: beta * factor**-t * x / rho[some] ** 2,
        posterior.loc[0][order],
        *rest,
    )
    log_scale = adam(
        lambda t, x, some: beta * factor**-t * np.expm1(2 * (x - np.log(rho[some]))),
        np.log(posterior.scale[0][order]),
        *rest,
    )
    back = np.argsort(order)
    return dataclasses.replace(
        posterior, loc=[loc[back]], scale=[np.exp(log_scale[back])]
    )


def coding_scale(file: MiracleFile) -> np.ndarray:
    """rho of every effective weight of the one group of a file."""
    (group,) = file.groups
    return group.layout.to_effective(group.scales[group.layout.scale_index_of_slot()])


def measured(folder: pathlib.Path, name: str, record: dict, data) -> dict:
    file = MiracleFile.read(folder / f"{name}.miracle")
    posterior = CodedPosterior.read(folder / f"{name}.posterior.npz")
    posterior.check_fits(file)
    net = to_network(decode(file))
    found = {"run": name, "fractions": FRACTIONS, "quantiles": QUANTILES}
    for what, q in (
        ("as_coded", posterior),
        ("penalty_going_on", with_penalty(file, posterior, record)),
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
    arguments = parser.parse_args()
    data = load_dataset(arguments.data)
    folder = arguments.workdir / "runs"
    found = [
        measured(folder, path.stem, read_record(path), data)
        for path in sorted((arguments.workdir / "records").glob("mean_var_*.json"))
        if (folder / f"{path.stem}.posterior.npz").exists()
    ]
    if not found:
        parser.error(f"--workdir: {folder} has no posterior of a Mean-Var run")
    text = json.dumps(found, indent=1) + "\n"
    write_atomically(arguments.output, text.encode(), overwrite=True)
    for what in ("as_coded", "penalty_going_on"):
        mean = np.mean([run[what]["accuracy"] for run in found], axis=0)
        print(what, *(f"{f:.0%}: {a:.1%}" for f, a in zip(FRACTIONS, mean)))


if __name__ == "__main__":
    main()
