"""A grid of runs, parameterization x block size x seed, one record each."""

import dataclasses
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import filelock
import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.coded_posterior import CodedPosterior
from tfmiracle.codec.pruning import STRATEGIES, pruned_networks
from tfmiracle.datasets import Dataset, load_dataset
from tfmiracle.decoder import decode
from tfmiracle.environment import environment, usable_cores
from tfmiracle.files import beside, check_folder, write_atomically
from tfmiracle.hosts.loading import accuracy_of, to_network
from tfmiracle.hosts.models import VariationalModel
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS, Parameterization
from tfmiracle.recipe import Recipe
from tfmiracle.studies.architectures import ARCHITECTURES, new_network
from tfmiracle.studies.records import read_record
from tfmiracle.studies.task import task_of
from tfmiracle.training.augmentation import check_augmentation
from tfmiracle.training.compression import CompressionResult, compress
from tfmiracle.training.data import checksum
from tfmiracle.training.progress import one_line, warnings_on_one_line
from tfmiracle.training.run import STEPS_PER_EXECUTION

RECORD_FORMAT = 1
PRUNED_FRACTIONS = tuple(i / 10 for i in range(10))
PRUNED_ORDERS = 5  # random ones, for "uniform"
_PROGRESS_SECONDS = 30.0
_HISTOGRAM_BINS = 60
_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_KL = ("kl_bits", "max_kl_bits", "over_budget")


@dataclasses.dataclass(frozen=True)
class Study:
    """A grid of runs on one network and data set.

    Attributes:
      workdir: where everything is kept. `records/` has one JSON record for each run
        that is done, `runs/` what they wrote and the state of those that are not.
      data: see `load_dataset`.
      recipe: the settings common to all runs.
      parameterizations, block_sizes, seeds: the grid.
      model: a key of `ARCHITECTURES`.
      rules: see `VariationalModel`.
      mean_var_train_steps: steps of variational training for "mean_var", which needs
        more of them for its annealing; by default as many as `recipe` says.
      dtype_policy: Keras dtype policy of the network. With "mixed_bfloat16", which is
        faster on some processors, posteriors and coding are float32 all the same.
      scale: fraction of the steps, in all phases, to make a long study small. The
        annealing of beta is as much faster, so that it covers the same range. (Steps
        of fine-tuning are rounded up, see `Recipe`: choose a scale that leaves a
        multiple of ten.)
      name: name of the data set in the records.
    """

    workdir: str
    data: str
    recipe: Recipe
    parameterizations: tuple[str | Parameterization, ...] = ("mean_kl", "mean_var")
    block_sizes: tuple[int, ...] = (20, 30, 40)
    seeds: tuple[int, ...] = tuple(range(10))
    model: str = "lenet5"
    rules: dict[str, str] | None = None
    mean_var_train_steps: int | None = None
    dtype_policy: str = "float32"
    scale: float = 1.0
    name: str = "data"

    def __post_init__(self):
        if not 0 < self.scale <= 1:
            raise ValueError(
                "`scale` is the fraction of the steps, above 0 and at most 1. "
                f"Received: scale={self.scale}"
            )
        if self.model not in ARCHITECTURES:
            raise ValueError(
                f"`model` must be one of {sorted(ARCHITECTURES)}. "
                f"Received: model={self.model!r}"
            )
        if not self.cells():
            raise ValueError("The grid is empty: give at least one value of each kind.")

    def cells(self) -> list[Recipe]:
        """The settings of every run: seeds outermost, so that each adds a full grid."""
        return [
            self.recipe_of(parameterization, block_size, seed)
            for seed in self.seeds
            for block_size in self.block_sizes
            for parameterization in self.parameterizations
        ]

    def recipe_of(
        self, parameterization: str | Parameterization, block_size: int, seed: int
    ) -> Recipe:
        """The settings of one run, in the grid or beside it."""
        recipe = dataclasses.replace(
            self.recipe,
            parameterization=PARAMETERIZATIONS.get(parameterization).scaled(self.scale),
            block_size=block_size,
            seed=seed,
        )
        is_mean_var = recipe.parameterization.identifier == "mean_var"
        if is_mean_var and self.mean_var_train_steps is not None:
            recipe = dataclasses.replace(recipe, train_steps=self.mean_var_train_steps)
        steps = {
            name: round(getattr(recipe, name) * self.scale)
            for name in ("warmup_steps", "train_steps", "finetune_steps")
        }
        return dataclasses.replace(recipe, **steps)


def cell_name(recipe: Recipe) -> str:
    """Name of a run of a study, as in "mean_kl_b20_s0"."""
    return f"{recipe.parameterization.identifier}_b{recipe.block_size}_s{recipe.seed}"


def run_study(
    study: Study,
    jobs: int = 1,
    say: Callable[[str], None] | None = None,
    imports: Sequence[str] = (),
) -> dict[str, int]:
    """Runs what is not done yet of a study.

    Stopped at any moment and started again, it goes on where it was; runs that are done
    are not repeated. Several processes may work on the same study: each takes runs that
    no other one has. A run that fails is passed over, and reported in the end.

    Args:
      study: the study.
      jobs: number of processes side by side, which share the cores. How sums are
        rounded, and so the results in detail, depends on the cores of a process.
      say: prints a line of progress, where there is one process; to standard error by
        default.
      imports: modules that other processes import, for what is found by name.

    Returns:
      Number of runs "total", "done" (with a record), and "left".

    Raises:
      ValueError: if the working directory belongs to another study, or runs failed.
      OSError: if it cannot be written.
    """
    data = _data(study)
    check_folder(study.workdir)
    for folder in ("records", "runs"):
        (pathlib.Path(study.workdir) / folder).mkdir(parents=True, exist_ok=True)
    checksums = checksum(_arrays(data))
    for path in sorted((pathlib.Path(study.workdir) / "records").glob("*.json")):
        _check_record(study, path, checksums)
    _check_settings(study, data)
    if jobs == 1:
        failed = _work(study, data, say or _to_stderr)
    else:
        failed = _work_side_by_side(study, jobs, imports)
    if failed:
        raise ValueError(
            f"Of the study in {study.workdir} failed: {', '.join(failed)}. What was "
            "printed says why. Started again, it tries them again."
        )
    cells = study.cells()
    done = sum(_record_path(study, recipe).exists() for recipe in cells)
    return {"total": len(cells), "done": done, "left": len(cells) - done}


def _check_settings(study, data):
    """Raises at once what would make every run fail."""
    recipe = study.cells()[0]
    check_augmentation(recipe, data.x_train)
    VariationalModel(
        _network(study, recipe, data),
        recipe.posterior,
        rules=study.rules,
        **recipe.model_options(),
    )


def _data(study):
    """The data set as the networks of the study take it."""
    data = load_dataset(study.data)
    return task_of(_network(study, study.cells()[0], data), data, _LOSS).data


def _network(study, recipe, data):
    shape, classes = data.image_shape, data.num_classes
    return new_network(study.model, shape, classes, study.dtype_policy, recipe.seed)


def _work_side_by_side(study, jobs, imports):
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_worker, args=(study, jobs, i, imports), daemon=True)
        for i in range(jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = sum(worker.exitcode != 0 for worker in workers)
    return [f"{failed} of {jobs} processes"] if failed else []


def _worker(study, jobs, number, imports):
    """The whole of a process beside others; it fails if one of its runs does."""

    def stop_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=stop_with_parent, daemon=True).start()
    for name in imports:
        importlib.import_module(name)
    threads = max(1, usable_cores() // jobs)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        mine = range(number * threads, (number + 1) * threads)
        os.sched_setaffinity(0, {cores[i % len(cores)] for i in mine})
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says that it ends
    with warnings_on_one_line():
        sys.exit(bool(_work(study, _data(study), _to_stderr)))


def _to_stderr(text):
    print(text, file=sys.stderr, flush=True)


def _record_path(study, recipe):
    return pathlib.Path(study.workdir) / "records" / f"{cell_name(recipe)}.json"


def _arrays(data: Dataset):
    return data.x_train, data.y_train, data.x_test, data.y_test


def _check_record(study, path, checksums):
    record = read_record(path)
    place = (record[key] for key in ("parameterization", "block_size", "seed"))
    for key, value in _identity(study, study.recipe_of(*place), checksums).items():
        if record.get(key) != value:
            raise ValueError(
                f"{path} is of another study: its {key} is not the one asked for now. "
                "Choose another working directory."
            )


def _identity(study, recipe, checksums):
    return {
        "format": RECORD_FORMAT,
        "parameterization": recipe.parameterization.identifier,
        "block_size": recipe.block_size,
        "seed": recipe.seed,
        "scale": study.scale,
        "model": study.model,
        "dtype_policy": study.dtype_policy,
        "data": study.name,
        "data_crc32": checksums,
        "settings": json.loads(json.dumps({**recipe.settings(), "rules": study.rules})),
    }


def _work(study, data, say):
    """Runs cells that are neither done nor taken; returns the names of those failed."""
    runs, failed = pathlib.Path(study.workdir) / "runs", []
    progress = _Progress(study, say)
    for recipe in study.cells():
        if _record_path(study, recipe).exists():
            continue
        lock = filelock.FileLock(runs / f"{cell_name(recipe)}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue
        try:
            if not _record_path(study, recipe).exists():
                _run_cell(study, recipe, data, runs / cell_name(recipe), progress)
        except Exception as error:
            text = one_line(error)
            say(f"{cell_name(recipe)} failed, {type(error).__name__}: {text}")
            failed.append(cell_name(recipe))
        finally:
            lock.release()
    return failed


def _run_cell(study, recipe, data: Dataset, folder, progress):
    # As in a new process: the names of layers are part of the file.
    keras.backend.clear_session()
    net = _network(study, recipe, data)
    progress.begin(recipe)
    result = compress(
        net,
        (data.x_train, data.y_train),
        path=folder.with_suffix(".miracle"),
        recipe=recipe,
        rules=study.rules,
        loss=_LOSS,
        metrics=[
            "accuracy",
            keras.metrics.SparseCategoricalCrossentropy(
                name="cross_entropy", from_logits=True
            ),
        ],
        validation_data=(data.x_test, data.y_test),
        callbacks=[progress],
        workdir=folder,
        keep_posterior=True,
        overwrite=True,
        verbose=0,
    )
    record = _record(study, recipe, result, data)
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    write_atomically(_record_path(study, recipe), text.encode(), overwrite=True)
    progress.say(
        f"{cell_name(recipe)}: error {record['errors']['decoded']:.2%}, "
        f"{record['sizes']['file_bytes']:,} bytes, {result.seconds / 60:.0f} minutes"
    )


def _record(study, recipe, result: CompressionResult, data):
    file = result.file
    posterior = CodedPosterior.read(beside(result.path, ".posterior.npz"))
    last = result.curve[-1]["step"] if result.curve else 0
    return {
        **_identity(study, recipe, checksum(_arrays(data))),
        **environment(),
        "seconds": round(result.seconds, 1),
        "sizes": {
            "file_bytes": result.file_bytes,
            "payload_bytes": file.payload_bytes,
            "ratio": round(result.ratio, 1),
            "payload_ratio": round(result.payload_ratio, 1),
            "blocks": sum(g.layout.num_blocks for g in file.groups),
            "block_size": recipe.block_size,
            "block_bits": recipe.block_bits,
        },
        "sha256": hashlib.sha256(pathlib.Path(result.path).read_bytes()).hexdigest(),
        "errors": {
            stage: round(1 - metrics["accuracy"], 6)
            for stage, metrics in result.stages.items()
        },
        "steps": {
            "train": recipe.warmup_steps + recipe.train_steps,
            "total": last,
        },
        "curve": _columns(
            result.curve,
            ("phase", "step", "seconds", *_KL, "cross_entropy", "accuracy"),
        ),
        "coding": _columns(result.history, ("step", "seconds", "blocks", *_KL)),
        "histograms": _histograms(file, posterior),
        "pruning": _pruning(file, posterior, recipe.seed, data),
    }


def _columns(rows: Sequence[dict], names):
    """Rows by column, with five digits; None where one lacks a name."""

    def short(value):
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return {name: [short(row.get(name)) for row in rows] for name in names}


def _histograms(file, posterior):
    """Of mean and log standard deviation of the weights, for each variable."""
    histograms = {}
    for name, place in zip(file.names, file.coded, strict=True):
        if place is None:
            continue
        group, index = place
        sizes = [v.effective_size for v in file.groups[group].layout.variables]
        part = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        values = {
            "loc": posterior.loc[group][part].astype(np.float64),
            "log_scale": np.log(posterior.scale[group][part].astype(np.float64)),
        }
        histograms[name] = {}
        for key, value in values.items():
            counts, edges = np.histogram(value, _HISTOGRAM_BINS)
            histograms[name][key] = {
                "edges": [float(f"{e:.8g}") for e in edges],
                "counts": counts.tolist(),
            }
    return histograms


def _pruning(file, posterior, seed, data):
    net = to_network(decode(file))

    def accuracies(strategy, order_seed):
        return [
            accuracy_of(net, pruned, data.x_test, data.y_test)
            for pruned in pruned_networks(
                file, strategy, PRUNED_FRACTIONS, posterior, order_seed
            )
        ]

    first = PRUNED_ORDERS * seed
    seeds = {s: [seed] for s in STRATEGIES}
    seeds["uniform"] = [s % 2**64 for s in range(first, first + PRUNED_ORDERS)]
    return {
        strategy: {
            "fractions": list(PRUNED_FRACTIONS),
            "accuracy": np.mean([accuracies(strategy, s) for s in orders], 0)
            .round(6)
            .tolist(),
        }
        for strategy, orders in seeds.items()
    }


class _Progress(keras.callbacks.Callback):
    """Prints a line now and then: the run, what it has reached, the time left."""

    def __init__(self, study, say):
        super().__init__()
        self._study, self.say = study, say

    def begin(self, recipe):
        self._recipe = recipe

    def on_train_begin(self, logs=None):
        self._last_batch, self._last_line = -1, time.monotonic()
        self._num_effective = self.model.block_posterior.layout.num_effective
        # What this run trains after this phase, then the other runs.
        self._later = 0
        if not self.model.block_posterior.fixed.any():
            self._later += self._finetune_steps(self._recipe)
        if not self.model.block_posterior.parameterization.codable:
            self._later += self._recipe.train_steps
        names = [cell_name(recipe) for recipe in self._study.cells()]
        todo = [
            recipe
            for recipe in self._study.cells()
            if not _record_path(self._study, recipe).exists()
        ]
        self._number = f"{names.index(cell_name(self._recipe)) + 1} of {len(names)}"
        for recipe in todo:
            if recipe != self._recipe:
                self._later += recipe.warmup_steps + recipe.train_steps
                self._later += self._finetune_steps(recipe)

    def _finetune_steps(self, recipe):
        blocks = -(-self._num_effective // recipe.block_size)
        rounds = -(-blocks // recipe.blocks_per_round)
        between = -(-recipe.finetune_steps // STEPS_PER_EXECUTION) * STEPS_PER_EXECUTION
        return (rounds - 1) * between

    def on_train_batch_end(self, batch, logs=None):
        now = time.monotonic()
        if now - self._last_line < _PROGRESS_SECONDS:
            return
        step = (now - self._last_line) / (batch - self._last_batch)
        self._last_batch, self._last_line = batch, now
        left = (self._later + self.params["steps"] - batch - 1) * step
        hours, minutes = divmod(int(left / 60), 60)
        loss = (logs or {}).get("cross_entropy", float("nan"))
        self.say(
            f"{cell_name(self._recipe)} ({self._number}): cross-entropy {loss:.4f}, "
            f"{1000 * step:.0f} ms a step, {hours} h {minutes:02d} min left for one "
            "process"
        )
