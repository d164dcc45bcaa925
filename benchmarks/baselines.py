"""Trains a built-in network in full, for what compresses it to start from.

    python benchmarks/baselines.py --data=CIFAR10.npz --network=resnet8 --output=FOLDER
        [--epochs=100] [--seed=0] [--dtype_policy=mixed_bfloat16]

Writes `resnet8.keras`, which `tfmiracle compress --model` takes, its weights rounded to
float16; `resnet8.json`, how it was made and what it reaches; and `table.md` of all
networks in the folder. Killed and started again, it goes on after the last epoch. The
test set is not used before the end.
"""

import argparse
import io
import json
import os
import pathlib
import tempfile
import time
import zipfile

from tfmiracle.environment import configure

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
configure()
# ruff: noqa: E402, what follows imports TensorFlow

import keras
import numpy as np
from tables import markdown
from timing import machine

from tfmiracle import Recipe
from tfmiracle.datasets import load_dataset
from tfmiracle.files import write_atomically
from tfmiracle.studies.architectures import ARCHITECTURES, new_network
from tfmiracle.studies.task import task_of
from tfmiracle.training.data import augmented, training_batches

VALIDATION = 5000  # images of the training set
WARMUP_EPOCHS = 2
SHARED = {"batch_size": 128, "max_shift": 4, "flip": True}
# Keras multiplies weight decay by the learning rate and leaves it out of the momentum:
# 1e-3 is about an L2 penalty of 1e-4 with a momentum of 0.9.
SGD = {"name": "SGD", "momentum": 0.9, "nesterov": True}
SGD |= {"learning_rate": 0.1, "weight_decay": 1e-3}
ADAMW = {"name": "AdamW", "learning_rate": 1e-3, "weight_decay": 0.05}
OPTIMIZERS = {"vision_transformer": ADAMW}  # others: SGD
# What the literature reports for CIFAR-10 as it was published.
LITERATURE = {
    "resnet8": "15 is what MLPerf Tiny asks for (Banbury et al., 2021)",
    "resnet20": "8.75 (He et al., 2016)",
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


NOTES = f"""
    python benchmarks/baselines.py --data=CIFAR10.npz --network=NAME --output=FOLDER

The networks that the command line knows, trained without compression on all training
images but {VALIDATION:,}; images are mirrored and shifted at random. Errors are those
of the `.keras` files, whose weights are rounded to float16. The test set was used once.
The JSON files have all settings.
`tfmiracle compress --model=NAME.keras` starts from one.
"""


def settings(flags):
    """All that the result depends on, but for the data."""
    names = ("network", "epochs", "seed", "dtype_policy")
    found = {name: getattr(flags, name) for name in names}
    return {**found, **SHARED, "optimizer": OPTIMIZERS.get(flags.network, SGD)}


def optimizer(net, epochs, steps, name, learning_rate, **options):
    """Its learning rate rises for `WARMUP_EPOCHS`, then falls to zero as a cosine."""
    rate = keras.optimizers.schedules.CosineDecay(
        0.0,
        (epochs - WARMUP_EPOCHS) * steps,
        warmup_target=learning_rate,
        warmup_steps=WARMUP_EPOCHS * steps,
    )
    made = keras.optimizers.get(
        {"class_name": name, "config": {"learning_rate": rate, **options}}
    )
    made.exclude_from_weight_decay(
        [v for v in net.trainable_variables if not v.path.endswith("kernel")]
    )
    made.build(net.trainable_variables)
    return made


class Checkpoint:
    """Weights, state of the optimizer and history of a network, in one file."""

    def __init__(self, path, net, settings):
        self._path, self._settings = path, settings
        self._variables = [*net.variables, *net.optimizer.variables]

    def restore(self):
        """Returns the history, a dictionary for each epoch done."""
        if not self._path.exists():
            return []
        with np.load(self._path) as file:
            text = json.loads(str(file["text"]))
            if text["settings"] != self._settings:
                raise SystemExit(f"{self._path} is of other settings: remove it.")
            for i, variable in enumerate(self._variables):
                variable.assign(file[str(i)])
        return text["history"]

    def save(self, history):
        values = {str(i): v.numpy() for i, v in enumerate(self._variables)}
        text = json.dumps({"settings": self._settings, "history": history})
        made = io.BytesIO()
        np.savez(made, text=text, **values)
        write_atomically(self._path, made.getvalue(), overwrite=True)


def train(net, task, settings, path):
    """Trains, from a checkpoint if there is one; returns the history."""
    data, epochs = task.data, settings["epochs"]
    recipe = Recipe(seed=settings["seed"], **SHARED)
    batches = training_batches((data.x_train, data.y_train), recipe)
    batches, steps = augmented(batches, recipe), len(data.x_train) // recipe.batch_size
    net.compile(
        optimizer(net, epochs, steps, **settings["optimizer"]),
        LOSS,
        metrics=["accuracy"],
        steps_per_execution=10,
        jit_compile=False,
    )
    checkpoint = Checkpoint(path, net, settings)
    history = checkpoint.restore()
    for epoch in range(len(history), epochs):
        start = time.monotonic()
        images = batches("warmup", epoch * steps).take(steps)
        logs = net.fit(images, verbose=0).history
        row = {name: values[0] for name, values in logs.items()}
        row["validation_accuracy"] = task.judge(net)["accuracy"]
        row["seconds"] = time.monotonic() - start
        history.append(row)
        checkpoint.save(history)
        cells = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
        print(f"epoch {epoch + 1} of {epochs}: {cells}", flush=True)
    return history


def deflated(net):
    """A `.keras` file, compressed: the weights, rounded to float16, take half of it."""
    made = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        net.save(path := pathlib.Path(folder, "net.keras"))
        with (
            zipfile.ZipFile(path) as stored,
            zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file,
        ):
            for name in stored.namelist():
                file.writestr(name, stored.read(name))
    return made.getvalue()


def run(flags):
    data, wanted = load_dataset(flags.data), settings(flags)
    held_out = data.hold_out(VALIDATION / len(data.x_train))
    name, path = flags.network, flags.output / flags.network

    def new(policy):
        return new_network(name, data.image_shape, data.num_classes, policy, flags.seed)

    net = new(flags.dtype_policy)
    validation = task_of(net, held_out, LOSS)
    checkpoint = path.with_suffix(".checkpoint.npz")
    history = train(net, validation, wanted, checkpoint)
    final = new("float32")
    final.set_weights([w.astype(np.float16) for w in net.get_weights()])
    final.compile(loss=LOSS)
    tasks = {"validation": validation, "test": task_of(final, data, LOSS)}
    record = {
        "data": pathlib.Path(flags.data).name,
        "settings": wanted,
        "machine": machine(),
        "weights": final.count_params(),
        "steps": int(net.optimizer.iterations),
        "seconds": sum(row["seconds"] for row in history),
        **{f"{key}_error": error(final, task) for key, task in tasks.items()},
        "history": history,
    }
    write_atomically(path.with_suffix(".keras"), deflated(final), overwrite=True)
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(path.with_suffix(".json"), text.encode(), overwrite=True)
    checkpoint.unlink()


def error(net, task):
    """Share of wrong answers in %."""
    return 100 * (1 - task.judge(net)["accuracy"])


def table(folder):
    """Markdown of the records in a folder."""
    titles = ["", "data", "weights", "validation error, %", "test error, %"]
    titles += ["test error in the literature, %", "epochs", "hours", "bytes of .keras"]
    rows = []
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text())
        name = record["settings"]["network"]
        rows.append(
            [
                name,
                record["data"],
                f"{record['weights']:,}",
                f"{record['validation_error']:.2f}",
                f"{record['test_error']:.2f}",
                LITERATURE.get(name, ""),
                record["settings"]["epochs"],
                f"{record['seconds'] / 3600:.1f}",
                f"{file.with_suffix('.keras').stat().st_size:,}",
            ]
        )
    return markdown(titles, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="CIFAR-10 as an .npz file")
    parser.add_argument("--network", required=True, choices=ARCHITECTURES)
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype_policy", default="float32")
    flags = parser.parse_args()
    if flags.epochs <= WARMUP_EPOCHS:
        parser.error(f"--epochs must be more than {WARMUP_EPOCHS}")
    flags.output.mkdir(parents=True, exist_ok=True)
    run(flags)
    text = f"{NOTES}\n{table(flags.output)}"
    write_atomically(flags.output / "table.md", text.encode(), overwrite=True)
    print(text)


if __name__ == "__main__":
    main()
