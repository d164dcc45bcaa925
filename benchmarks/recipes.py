"""Compares settings of `tfmiracle compress` on MNIST: error against minutes.

Each choice for Mean-KL is measured beside "a quarter of the steps", the lengths beside
one another, for either parameterization and for half the payload.

    python benchmarks/recipes.py --data=MNIST.npz --output=FOLDER [--seeds=0,1,2]
        [--only=NAME ...] [--dtype_policy=mixed_bfloat16] [--test]

Runs every variant with every seed, one after the other, each in a process of its own;
killed and started again, it goes on. Errors are those on 10,000 images held out of the
training set, which is what settings are chosen by; with --test, all 60,000 train, and
errors are those on the test set. Writes a JSON file a run, and a table and a curve of
all that are in the folder (with the packages of `tfmiracle[report]`).
"""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys

import matplotlib.figure
from tables import markdown, mean
from timing import machine

from tfmiracle.environment import configure
from tfmiracle.files import write_atomically
from tfmiracle.studies.records import mean_and_error

configure()  # before TensorFlow is imported

_PRESET = pathlib.Path(__file__).parents[1] / "configs" / "lenet5_mnist_quick.flags"
_lines = _PRESET.read_text().splitlines()
BASE = dict(line[2:].split("=", 1) for line in _lines if line.startswith("--"))
ALTERNATIVES = pathlib.Path(__file__).with_name("alternatives.py")


# What differs from BASE; None leaves a flag out. `steps` are those of warm start,
# training and fine-tuning after each of the rounds; `alternative` is one of
# alternatives.py.
LENGTHS = {
    "a quarter of the steps": (1000, 3000, 50),
    "half the steps": (2000, 6000, 90),
    "quick": (4000, 12000, 180),
    "twice the steps": (8000, 24000, 360),
    "four times the steps": (16000, 48000, 720),
}
QUARTER = LENGTHS["a quarter of the steps"]


def _mean_var(train, finetune):
    """Starts cold with hardly any noise, as in the paper; training raises beta e^10."""
    return {
        "parameterization": "mean_var",
        "warm_start": False,
        "log_stddev": -10,
        "log_stddev_rate": 1,
        "beta": 1e-8,
        "beta_rate": 10 / train,
        "l2": None,
        "learning_rate": 1e-3,
        "log_scale_rate": 1,
        "decay": "constant",
        "blocks_per_round": 5,
        "finetune_learning_rate": 1e-3,
        "steps": (0, train, finetune),
    }


# The quick one takes about a fifth longer than that of Mean-KL.
MEAN_VAR_LENGTHS = {
    "a quarter of the steps": (5000, 20),
    "half the steps": (10000, 30),
    "quick": (20000, 50),
    "twice the steps": (40000, 100),
    "four times the steps": (80000, 200),
}
# Mean-Var's defaults (beta from 1e-5 on), otherwise the preset. In a quarter of the
# steps beta grows four times as fast.
_warm_and_fast = {
    "parameterization": "mean_var",
    "l2": None,
    "learning_rate": 2e-3,
    "log_scale_rate": 1,
    "finetune_learning_rate": 1e-3,
}
WARM_AND_FAST = {
    "quick": {**_warm_and_fast, "steps": LENGTHS["quick"]},
    "a quarter of the steps": {**_warm_and_fast, "beta_rate": 4e-3, "steps": QUARTER},
}
WARM_AND_FAST_CHOICES = {
    "warm and fast": {},
    "warm, fast, L2 penalty": {"l2": BASE["l2"]},
    "warm, fast, learning rate constant": {"decay": "constant"},
    "warm, fast, largest KL first": {"alternative": "largest_kl_first"},
}
# Half the blocks and half the rounds, each fine-tuned twice as long, and half the
# effective weights: the paper's, in blocks of 40, did worse in one run. Mean-Var keeps
# those.
SMALLER = {
    f"half the payload, {name}": {
        "rules": "conv2/kernel:hash=4,dense1/kernel:hash=128",
        "block_size": 25,
        "steps": (warmup, train, 2 * finetune),
    }
    for name, (warmup, train, finetune) in LENGTHS.items()
}
# Bytes of codes: rules, weights in a block, and how much longer a round is fine-tuned,
# so that the steps are about as many.
_LESS = "conv2/kernel:hash=4,dense1/kernel:hash=128"
_LEAST = "conv2/kernel:hash=8,dense1/kernel:hash=256"
SIZES = {
    "3.1 kB": (BASE["rules"], 20, 1),
    "2.1 kB": (_LESS, 18, 1.5),
    "1.55 kB": (_LESS, 25, 2),
    "0.9 kB": (_LEAST, 30, 3.4),
}
CODERS = {
    f"{coder}, {size}, {name}": {
        "coder": coder,
        "rules": rules,
        "block_size": block_size,
        "steps": (warmup, train, round(longer * finetune)),
    }
    for name, (warmup, train, finetune) in LENGTHS.items()
    for size, (rules, block_size, longer) in SIZES.items()
    for coder in ("mrc", "trellis")
}
# More KL than bits, and KL that more weights share.
BUDGETS = {
    f"{name}, KL of {kl_bits} bits": {**variant, "kl_bits": kl_bits}
    for name, variant in CODERS.items()
    for kl_bits in (22, 25, 30, 40)
}
_at_155 = CODERS["trellis, 1.55 kB, a quarter of the steps"]
TRELLISES = {
    "18 state bits": {"state_bits": 18},
    "KL shared by 125 weights": {
        "block_size": 125,
        "block_bits": 100,
        "blocks_per_round": 5,
    },
    "KL shared by 625 weights": {
        "block_size": 625,
        "block_bits": 500,
        "blocks_per_round": 1,
    },
    "rounds of 50 blocks": {"blocks_per_round": 50, "steps": (1000, 3000, 210)},
}
# Whole files, filled to the byte.
FILES = {
    f"trellis, {target:,} bytes, {name}": {
        "coder": "trellis",
        "target": target,
        "rules": rules,
        "block_size": block_size,
        "block_bits": None,
        "max_shift": 1,
        "steps": (warmup, train, longer * finetune),
    }
    for name, (warmup, train, finetune) in LENGTHS.items()
    for target, rules, block_size, longer in (
        (3100, BASE["rules"], 20, 1),
        (1694, _LESS, 25, 2),
        (1140, _LEAST, 25, 3),
        (800, _LEAST, 25, 3),
    )
}
CHOICES = {
    "no L2 penalty": {"l2": None},
    # About as many images as in batches of 64.
    "batches of 32": {"batch_size": 32, "steps": (2000, 6000, 100)},
    "batches of 200": {"batch_size": 200, "steps": (320, 960, 20)},
    # About as many steps in all.
    "no warm start": {"steps": (0, 4000, 50), "warm_start": False},
    "10 blocks a round": {"blocks_per_round": 10, "steps": (1000, 3000, 20)},
    "100 blocks a round": {"blocks_per_round": 100, "steps": (1000, 3000, 190)},
    "scales from the weights": {"warm_log_scale": 0},
    "scales as fast as means": {"log_scale_rate": 1},
    "quotas five times as fast": {"quota_rate": 5},
    "learning rate 1e-2": {"learning_rate": 1e-2},
    "learning rate constant": {"decay": "constant"},
    "sampled candidates": {"selection": "sample"},
    "best of four on a batch": {"alternative": "best_on_a_batch"},
    "layer order": {"alternative": "layer_order"},
    "two weight samples a step": {"alternative": "two_samples"},
    "Flipout where not hashed": {"alternative": "flipout"},
    "network in float32": {"dtype_policy": "float32"},
    "KL of 18 bits": {"kl_bits": 18},
    "blocks of 16 weights, 16 bits": {"block_size": 16, "block_bits": 16},
    "blocks of 24 weights, 24 bits": {"block_size": 24, "block_bits": 24},
}
# As many images as in the preset.
_BATCHES_OF_32 = {"batch_size": 32, "steps": LENGTHS["twice the steps"]}
VARIANTS = {
    **{name: {"steps": steps} for name, steps in LENGTHS.items()},
    **{
        f"{name}: no L2 penalty": {"l2": None, "steps": LENGTHS[name]}
        for name in ("quick", "four times the steps")
    },
    "quick: learning rate constant": {"decay": "constant", "steps": LENGTHS["quick"]},
    "quick: batches of 32": _BATCHES_OF_32,
    "quick: batches of 32, images shifted by 1": {**_BATCHES_OF_32, "max_shift": 1},
    **{
        f"images shifted by {pixels}, {name}": {
            "max_shift": pixels,
            "steps": LENGTHS[name],
        }
        for name in ("quick", "twice the steps", "four times the steps")
        for pixels in (1, 2)
    },
    **{
        f"Mean-Var, {name}": _mean_var(*steps)
        for name, steps in MEAN_VAR_LENGTHS.items()
    },
    **{
        f"Mean-Var, {length}: {name}": {**settings, **choice}
        for length, settings in WARM_AND_FAST.items()
        for name, choice in WARM_AND_FAST_CHOICES.items()
    },
    **SMALLER,
    **{
        f"Mean-Var, half the payload, {name}": {**_mean_var(*steps), "block_size": 40}
        for name, steps in MEAN_VAR_LENGTHS.items()
    },
    **{f"quarter: {name}": {"steps": QUARTER, **v} for name, v in CHOICES.items()},
    **CODERS,
    **BUDGETS,
    **FILES,
    **{
        f"trellis, 1.55 kB, a quarter of the steps, {name}": {**_at_155, **choice}
        for name, choice in TRELLISES.items()
    },
}
STEPS = ("warmup_steps", "train_steps", "finetune_steps")
STAGES = ("warmup", "posterior_mean", "posterior_sample", "decoded")


def flags_of(variant: dict, common: dict) -> list[str]:
    settings = BASE | common | variant
    settings |= zip(STEPS, settings.pop("steps"))
    settings.pop("alternative", None)
    given = {name: value for name, value in settings.items() if value is not None}
    return sorted(f"--{name}={value}" for name, value in given.items())


def stem_of(name: str) -> str:
    return re.sub("[^A-Za-z0-9]+", "-", name)


def run(name: str, seed: int, arguments) -> None:
    """Makes the record of a run, unless it is there."""
    stem = f"{stem_of(name)}-{seed}"
    path, runs = arguments.output / f"{stem}.json", arguments.output / "runs"
    variant = VARIANTS[name]
    common = {} if arguments.test else {"validation_fraction": 1 / 6}
    if arguments.dtype_policy:
        common["dtype_policy"] = arguments.dtype_policy
    made_with = flags = flags_of(variant, common)
    command = ["-m", "tfmiracle", "compress"]
    if "alternative" in variant:
        command = [str(ALTERNATIVES), variant["alternative"]]
        made_with = [*flags, f"alternatives.py {variant['alternative']}"]
    if path.exists():
        record = json.loads(path.read_text())
        if record["made_with"] != made_with:
            sys.exit(f"{path} was made with other settings: choose another --output.")
        return
    print(f"{name}, seed {seed}", flush=True)
    command = [sys.executable, *command, *flags]
    command += [f"--data={arguments.data}", f"--seed={seed}", "--json", "--overwrite"]
    command += [f"--workdir={runs / stem}", f"--output={runs / stem}.miracle"]
    with (runs / f"{stem}.log").open("a") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log)
    if done.returncode:
        print(f"failed, see {runs / stem}.log", flush=True)
        return
    found = json.loads(done.stdout)
    keys = ("errors", "losses", "evaluated_on", "seconds", "file_bytes")
    record = {key: found[key] for key in keys}
    record |= {"machine": machine(), "made_with": made_with}
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(path, text.encode(), overwrite=False)


def records_in(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Those of each variant that has some, one for each seed."""
    found = {}
    for name in VARIANTS:
        paths = sorted(folder.glob(f"{stem_of(name)}-[0-9]*.json"))
        if paths:
            found[name] = [json.loads(path.read_text()) for path in paths]
    return found


def table(records: dict[str, list[dict]]) -> str:
    titles = ["", "seeds", *(f"{stage}, %" for stage in STAGES)]
    titles += ["decoded, nats", "minutes", "bytes"]
    rows = []
    for name, runs in records.items():
        errors = [
            mean([100 * r["errors"][stage] for r in runs], 2)
            if all(stage in r["errors"] for r in runs)
            else ""
            for stage in STAGES
        ]
        known = all("losses" in r for r in runs)
        loss = mean([r["losses"]["decoded"] for r in runs], 4) if known else ""
        minutes = mean([r["seconds"] / 60 for r in runs], 1)
        rows.append([name, len(runs), *errors, loss, minutes, runs[0]["file_bytes"]])
    made = [r for runs in records.values() for r in runs]
    sets = {r["evaluated_on"] for r in made}
    flag = "--dtype_policy="
    flags = {f for r in made for f in r["made_with"] if f.startswith(flag)}
    machines = {f"{key} {value}" for r in made for key, value in r["machine"].items()}
    notes = (
        f"Error by stage and cross-entropy, on the {' and '.join(sets)} set, mean ± "
        "standard error over the seeds. `VARIANTS` in `benchmarks/recipes.py` says "
        "what each one changes. "
        f"Made with {', '.join(sorted(flags | machines))}.\n"
    )
    return f"{notes}\n{markdown(titles, rows)}"


def curve(records: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Draws error against minutes: a line for each method, dots for its other runs."""

    def point(name):
        runs = records[name]
        minutes, _ = mean_and_error([r["seconds"] / 60 for r in runs])
        error, spread = mean_and_error([100 * r["errors"]["decoded"] for r in runs])
        return minutes, error, math.nan if spread is None else spread

    figure = matplotlib.figure.Figure((5, 3.5), layout="constrained")
    axes = figure.subplots()
    left = list(records)  # each goes to the first method whose prefix it has
    for first, label, style, color in (
        (
            "half the payload, ",
            "Mean-KL, half the payload and weights",
            "^:",
            "#009E73",
        ),
        (
            "Mean-Var, half the payload, ",
            "Mean-Var, half the payload",
            "v-.",
            "#CC79A7",
        ),
        ("Mean-Var, ", "Mean-Var", "s--", "#0072B2"),
        ("images shifted by 1, ", "Mean-KL, images shifted by 1", "D-", "#56B4E9"),
        ("images shifted by 2, ", "Mean-KL, images shifted by 2", "P-", "#000000"),
        ("", "Mean-KL", "o-", "#E69F00"),
    ):
        names = [name for name in left if name.startswith(first)]
        left = [name for name in left if name not in names]
        lengths = [first + name for name in LENGTHS]
        line = [point(name) for name in lengths if name in names]
        dots = [point(name) for name in names if name not in lengths]
        if dots:
            axes.plot(*zip(*(d[:2] for d in dots)), style[0], color=color, alpha=0.4)
        if line:
            minutes, errors, spread = zip(*line)
            axes.errorbar(
                minutes, errors, spread, fmt=style, color=color, label=label, capsize=3
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    cores = {r["machine"]["cores"] for runs in records.values() for r in runs}
    axes.set_xlabel(f"minutes (cores: {', '.join(map(str, sorted(cores)))})")
    sets = {r["evaluated_on"] for runs in records.values() for r in runs}
    axes.set_ylabel(f"error when decoded, {' and '.join(sets)} set, %")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="MNIST as Keras' .npz file")
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--only",
        action="append",
        choices=VARIANTS,
        metavar="NAME",
        help="a variant; by default all",
    )
    parser.add_argument("--dtype_policy", help="of the network, see tfmiracle compress")
    parser.add_argument("--test", action="store_true", help="report on the test set")
    arguments = parser.parse_args()
    (arguments.output / "runs").mkdir(parents=True, exist_ok=True)
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.only or VARIANTS:
            run(name, seed, arguments)
            records = records_in(arguments.output)
            (arguments.output / "table.md").write_text(table(records))
            curve(records, arguments.output / "curve.svg")
    print(table(records))


if __name__ == "__main__":
    main()
