"""A training run in phases, which may be killed and goes on where it was."""

import contextlib
import io
import itertools
import json
import math
import os
import pathlib
import reprlib
import time
import warnings
from collections.abc import Callable, Sequence

import filelock
import keras
import numpy as np
import tensorflow as tf

from tfmiracle.environment import environment
from tfmiracle.files import check_folder, write_atomically
from tfmiracle.hosts.models import posteriors
from tfmiracle.training import progress
from tfmiracle.training.callbacks import CompressionCallback
from tfmiracle.training.coding_loop import CodingLoop, plain_logs

PHASES = ("warmup", "variational", "coding")
# Optimizer steps between two returns to Python.
STEPS_PER_EXECUTION = 10
_NAMES = {
    "warmup": "Deterministic training",
    "variational": "Variational training",
    "coding": "Coding and fine-tuning",
}
# A checkpoint is due when this many seconds have passed, and this many times as long
# as the last one took to write.
_CHECKPOINT_SECONDS = 20.0
_CHECKPOINT_SHARE = 100
_HINT_ON_NAMES = (
    " Keras numbers layers on from what was built before in the process: name them, or "
    "call `keras.utils.clear_session()` before the model is built."
)


class Run:
    """What a run has reached so far, kept in a working directory if there is one.

    A run is a sequence of phases that train and stages that are evaluated between
    them, always the same ones in the same order. `train` and `evaluate` skip what the
    working directory says is done. The state of a phase that was broken off
    (variables of model and optimizer, random state, place in the data, blocks coded) is
    restored from the last checkpoint, so that the result is the same as without the
    interruption; in another environment it is not, and a warning tells. Checkpoints are
    written atomically, and take about 1 % of the time.

    Use it as a context manager, which holds the lock of the working directory.

    Args:
      workdir: the working directory, made if it does not exist; None keeps nothing.
      settings: everything that the result depends on; anything JSON can say.
      verbose: 0 for silence, 1 for progress, see `compress`.

    Attributes:
      stages: stage -> metrics.
      curve: one dict for every few steps: "phase", "step" counted over all phases,
        "seconds" spent, means of loss and metrics since the last entry, and of the
        blocks not coded yet mean "kl_bits", "max_kl_bits" and how many of them are
        "over_budget" by more than 1 %.
      result: what `finish` was given, if the run has been finished before.

    Raises:
      ValueError: if the working directory is in use, belongs to a run of other
        settings, or is damaged.
      OSError: if it cannot be written.
    """

    def __init__(
        self, workdir: str | os.PathLike | None, settings: dict, verbose: int = 1
    ):
        self.workdir = None if workdir is None else pathlib.Path(workdir)
        self.stages = {}
        self.curve = []
        self.result = None
        self._settings = json.loads(json.dumps(settings))
        found = environment()
        self._environment = {**found["versions"], **found["machine"]}
        self._verbose = verbose
        self._seconds_before = 0.0
        self._steps_before = 0
        self._state = None
        self._lock = None
        if self.workdir is not None:
            check_folder(self.workdir)
            self.workdir.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self.workdir / "lock")
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                raise ValueError(
                    f"The working directory {workdir} is in use by another run."
                ) from None
            try:
                self._open()
            except BaseException:
                self._lock.release()
                raise
        self._start = time.monotonic()
        self._last_checkpoint = self._start
        self._checkpoint_took = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._lock is not None:
            self._lock.release()

    @property
    def seconds(self) -> float:
        """Time spent, over all sittings that reached a checkpoint."""
        return self._seconds_before + time.monotonic() - self._start

    @property
    def goes_on(self) -> bool:
        """Whether the state of a phase that was broken off is still to be restored."""
        return self._state is not None

    def _open(self):
        for left_over in self.workdir.glob(".miracle-*.tmp"):
            left_over.unlink()
        if (self.workdir / "result.json").exists():
            saved = self.result = _read(self.workdir / "result.json")
        elif (self.workdir / "state.npz").exists():
            saved, self._state = _read_state(self.workdir / "state.npz")
            self._phase, self._step = saved["phase"], saved["step"]
            self._coding = saved["coding"]
        else:
            return
        found = _differences(saved["settings"], self._settings)
        if found:
            hint = _HINT_ON_NAMES if "/name was" in found else ""
            raise ValueError(
                f"The working directory {self.workdir} holds a run of other settings: "
                f"{found}. Choose another one, or delete it.{hint}"
            )
        if self.result is None:
            found = _differences(saved.get("environment", {}), self._environment)
            if found:
                warnings.warn(
                    f"The run in {self.workdir} goes on elsewhere than it was begun: "
                    f"{found}. Its result will be that of neither alone. Go on where "
                    "it was begun, or delete the folder to start again, if it must be "
                    "reproducible.",
                    stacklevel=4,
                )
        self.stages = saved["stages"]
        self.curve = saved["curve"]
        self._seconds_before = saved["seconds"]

    def _is_past(self, phase):
        return self._state is not None and PHASES.index(phase) < PHASES.index(
            self._phase
        )

    def evaluate(self, stage: str, evaluation: Callable[[], dict]) -> None:
        """Sets `stages[stage]`, unless it is known."""
        if stage not in self.stages:
            self.stages[stage] = plain_logs(evaluation())

    def train(
        self,
        model: keras.Model,
        phase: str,
        batches: Callable[[str, int], tf.data.Dataset],
        steps: int,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        coding: CodingLoop | None = None,
        class_weight: dict[int, float] | None = None,
    ) -> None:
        """Trains a compiled model for `steps`, and codes it if `coding` is given.

        Args:
          model: the model, compiled with `STEPS_PER_EXECUTION`.
          phase: one of `PHASES`.
          batches: (phase, step) -> the endless batches of the phase from there on.
          steps: number of steps, rounded up to whole executions.
          callbacks: further callbacks for `fit`.
          coding: what codes.
          class_weight: see `fit`.

        Raises:
          ValueError: if the loss is not finite, or the data ends too soon.
        """
        total = -(-steps // STEPS_PER_EXECUTION) * STEPS_PER_EXECUTION
        if self._is_past(phase):
            self._steps_before += total
            return
        start = 0
        if self._state is not None:
            start = self._step
            model.optimizer.build(model.trainable_variables)
            self._restore(model)
            if coding is not None:
                coding.resume(self._coding)
        self._say(phase, start, total)
        if start < total:
            # The coding says itself how many blocks are left.
            verbose = 0 if coding else self._verbose
            in_lines = verbose and not progress.is_interactive()
            record = _Record(self, phase, start, total, coding, in_lines)
            model.fit(
                batches(phase, start),
                steps_per_epoch=total - start,
                shuffle=False,
                class_weight=class_weight,
                verbose=0 if in_lines else verbose,
                callbacks=[
                    *([CompressionCallback(coding)] if coding else []),
                    record,
                    *callbacks,
                ],
            )
            if record.step < total and not model.stop_training:
                raise ValueError(
                    f"The data ended after {record.step} of {total} steps of {phase} "
                    "training. Is the dataset empty, or a generator that ends?"
                )
        elif coding:  # nothing to train, but all to code
            others = keras.callbacks.CallbackList(
                callbacks, model=model, verbose=0, epochs=0, steps=0
            )
            others.on_train_begin()
            coding.start(model)
            coding.finish()
            others.on_train_end()
        self._steps_before += total

    def finish(self, result: dict) -> None:
        """Notes the result; the run is over."""
        self.result = {
            "settings": self._settings,
            "stages": self.stages,
            "curve": self.curve,
            "seconds": self.seconds,
            **result,
        }
        if self.workdir is not None:
            data = json.dumps(self.result).encode()
            write_atomically(self.workdir / "result.json", data, overwrite=True)
            (self.workdir / "state.npz").unlink(missing_ok=True)

    def _say(self, phase, start, total):
        if self._verbose:
            on = f", going on from step {start}" if start else ""
            print(f"{_NAMES[phase]}, {total} steps{on}", flush=True)

    def _restore(self, model):
        variables = _variables(model)
        if [tuple(v.shape) for v in variables] != [a.shape for a in self._state]:
            raise ValueError(
                f"The state in {self.workdir} does not fit the model. Delete the "
                "working directory to start again."
            )
        for variable, value in zip(variables, self._state, strict=True):
            variable.assign(value)
        self._state = None

    def _checkpoint(self, model, phase, step, coding):
        if self.workdir is None:
            return
        now = time.monotonic()
        wait = max(_CHECKPOINT_SECONDS, _CHECKPOINT_SHARE * self._checkpoint_took)
        if now - self._last_checkpoint < wait:
            return
        state = {
            "settings": self._settings,
            "environment": self._environment,
            "phase": phase,
            "step": step,
            "stages": self.stages,
            "curve": self.curve,
            "seconds": self.seconds,
            "coding": coding and coding.state(),
        }
        arrays = [keras.ops.convert_to_numpy(v) for v in _variables(model)]
        write_atomically(
            self.workdir / "state.npz", _state_bytes(state, arrays), overwrite=True
        )
        self._last_checkpoint = time.monotonic()
        self._checkpoint_took = self._last_checkpoint - now


class _Record(keras.callbacks.Callback):
    """Writes the curve of a run, watches its loss, and has checkpoints made."""

    def __init__(self, run, phase, start, total, coding, in_lines):
        super().__init__()
        self._run, self._phase, self._coding = run, phase, coding
        self._first, self._total = start, total
        self.step = start
        # At most some hundred entries a phase, but no more than 200 steps apart.
        executions = min(max(total // (200 * STEPS_PER_EXECUTION), 1), 20)
        self._window = executions * STEPS_PER_EXECUTION
        self._closed = False
        self._lines = in_lines and progress.Lines(_NAMES[phase], total, "step", start)

    def on_train_batch_begin(self, batch, logs=None):
        if self._closed:
            self.model.reset_metrics()
            self._closed = False

    def on_train_batch_end(self, batch, logs=None):
        step = self.step = self._first + batch + 1
        if self._lines and self._lines.is_due(step):
            self._lines.update(step, _numbers(logs))
        if step % self._window and step < self._total:
            return
        self._closed = True
        logs = plain_logs(logs)
        self._run.curve.append(
            {
                "phase": self._phase,
                "step": self._run._steps_before + step,
                "seconds": round(self._run.seconds, 3),
                **logs,
                **_kl_of_blocks(self.model),
            }
        )
        if not math.isfinite(logs.get("loss", 0.0)):
            raise ValueError(
                f"The loss is {logs['loss']} after {step} steps of {self._phase} "
                "training. Lower the learning rate, or look for extreme values in the "
                "data."
            )
        self._run._checkpoint(self.model, self._phase, step, self._coding)


def _numbers(logs):
    logs = plain_logs(logs)
    return [(name, value) for name, value in logs.items() if isinstance(value, float)]


def _kl_of_blocks(model):
    """What a curve says of the blocks that are not fixed; nothing without any."""
    found = [
        (posterior.block_kl().numpy()[~posterior.fixed] / math.log(2), posterior)
        for posterior, _ in posteriors(model)
        if posterior.parameterization.codable
    ]
    kl_bits = np.concatenate([np.zeros(0), *(kl for kl, _ in found)])
    if not len(kl_bits):
        return {}
    return {
        "kl_bits": float(np.mean(kl_bits)),
        "max_kl_bits": float(np.max(kl_bits)),
        "over_budget": sum(int(np.sum(p.is_over_budget(kl))) for kl, p in found),
    }


def _differences(then: dict, now: dict) -> str:
    keys = sorted(then.keys() | now.keys())
    found = [_difference(then.get(key), now.get(key), key) for key in keys]
    return "; ".join(filter(None, found))


def _difference(then, now, place: str) -> str | None:
    """Says where two structures differ first."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = sorted(then.keys() | now.keys())
        pairs = [(then.get(key), now.get(key), f"{place}/{key}") for key in keys]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = [(*pair, f"{place}/{i}") for i, pair in enumerate(zip(then, now))]
    elif then == now:
        return None
    else:
        return f"{place} was {reprlib.repr(then)} and is {reprlib.repr(now)}"
    return next(filter(None, itertools.starmap(_difference, pairs)), None)


def _variables(model):
    return [*model.variables, *model.optimizer.variables]


def _state_bytes(state: dict, arrays: list[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    # NumPy's files do not know bfloat16, which float32 holds.
    arrays = [a.astype(np.float32) if a.dtype.name == "bfloat16" else a for a in arrays]
    np.savez(buffer, text, *arrays)
    return buffer.getvalue()


def _read_state(path):
    with _damage(path), np.load(path, allow_pickle=False) as archive:
        text, *arrays = [archive[f"arr_{i}"] for i in range(len(archive.files))]
        return json.loads(text.tobytes()), arrays


def _read(path):
    with _damage(path):
        return json.loads(path.read_bytes())


@contextlib.contextmanager
def _damage(path):
    try:
        yield
    except Exception as error:  # zipfile and zlib have many of their own
        raise ValueError(
            f"{path} is damaged ({error}). Delete the working directory to start again."
        ) from error
