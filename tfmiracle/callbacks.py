"""Coding the posterior of a model, block by block, while it is fine-tuned."""

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Iterable

import keras
import numpy as np

import tfmiracle
from tfmiracle import miracle_file
from tfmiracle.coding.minimal_random import SELECTIONS
from tfmiracle.decoder import decode
from tfmiracle.models import plain_weights, posteriors
from tfmiracle.network import (
    check_network,
    coded_posterior,
    round_stored,
    to_file,
)
from tfmiracle.posterior import DeterministicPosterior
from tfmiracle.recalibration import recalibrate


class CompressionCallback(keras.callbacks.Callback):
    """Codes a model during `fit` and writes its `.miracle` file (Havasi et al. 2019).

    After `train_steps` steps of plain training the coding scales are fixed; then
    rounds alternate with fine-tuning: a round codes the next `blocks_per_round` blocks
    and fixes them to what the decoder will produce, `finetune_steps` steps adapt the
    blocks that are left. When the last block is coded, training stops; the file is
    made of the model as it then is, decoded and compared, and written. If `fit` ends
    before (epochs used up, early stopping), the remaining blocks are coded at once,
    without fine-tuning; a run that is interrupted writes nothing, and goes on from the
    blocks already coded in the next `fit`.

    Give `fit` enough epochs: `steps_needed(model)` steps. Callbacks that change weights
    when training ends (EarlyStopping that restores them) must come before this one.

    Args:
      filepath: the file to write.
      blocks_per_round: number of blocks coded between two stretches of fine-tuning.
      finetune_steps: number of steps between two rounds (100 in the paper, for rounds
        of one block). With `steps_per_execution`, the next multiple of it.
      train_steps: number of steps before the first round.
      selection: "sample" chooses the candidate with probability proportional to its
        importance weight (the paper's rule); "largest_weight" takes the best, which is
        more accurate at the same number of bits.
      overwrite: whether existing files may be replaced.
      recalibration_data: batches of inputs, from which the statistics of
        BatchNormalization are taken anew when all is coded; see `recalibrate`.
      posterior_path: where to write a `CodedPosterior`, Q of all weights as they were
        coded, which diagnostics and pruning need; by default nowhere.
      metadata: entries for the file's metadata; anything JSON can say, up to 1 MiB.
      architecture: whether the file says how the network is built. Without it the file
        is smaller, and whoever loads it needs the network: `load(path, model=network)`.
      record_path: where to write, as JSON, how the file was made: version of tfmiracle,
        parameterization, budget, selection, and `record`; by default nowhere.
      record: further entries of that.
      verbose: 0 for silence, 1 for a progress bar over blocks where `fit` itself shows
        none (`verbose=0`).

    Attributes:
      history: one dict a round: "step", "blocks" coded so far, mean "kl_bits" and
        "max_kl_bits" of the round's blocks, how many of them were "over_budget" by
        more than 1 %, mean "log_weight" and "log_evidence" in nats (see
        `EncodedBlocks`), "seconds" since the start, and the running logs
        of `fit` (loss and metrics).
      file: the `MiracleFile` written, or None.
      file_bytes: its size.
    """

    def __init__(
        self,
        filepath: str | os.PathLike,
        blocks_per_round: int = 1,
        finetune_steps: int = 100,
        train_steps: int = 0,
        selection: str = "sample",
        overwrite: bool = False,
        recalibration_data: Iterable | None = None,
        posterior_path: str | os.PathLike | None = None,
        metadata: dict | None = None,
        architecture: bool = True,
        record_path: str | os.PathLike | None = None,
        record: dict | None = None,
        verbose: int = 1,
    ):
        super().__init__()
        for name, value, least in (
            ("blocks_per_round", blocks_per_round, 1),
            ("finetune_steps", finetune_steps, 0),
            ("train_steps", train_steps, 0),
        ):
            if not (isinstance(value, int) and value >= least):
                raise ValueError(
                    f"`{name}` must be an integer of at least {least}. "
                    f"Received: {name}={value}"
                )
        if selection not in SELECTIONS:
            raise ValueError(
                f"`selection` must be one of {SELECTIONS}. "
                f"Received: selection={selection!r}"
            )
        # Errors should come before the training.
        size = len(json.dumps(metadata, allow_nan=False))
        if size > miracle_file.MAX_METADATA_BYTES:
            raise ValueError(
                f"`metadata` takes {size:,} bytes as JSON; at most "
                f"{miracle_file.MAX_METADATA_BYTES:,} are allowed. Keep what is large "
                "elsewhere."
            )
        self.filepath = os.fspath(filepath)
        self.blocks_per_round = blocks_per_round
        self.finetune_steps = finetune_steps
        self.train_steps = train_steps
        self.selection = selection
        self.overwrite = overwrite
        self.recalibration_data = recalibration_data
        self.posterior_path = posterior_path
        self.metadata = dict(metadata or {})
        self.architecture = architecture
        self.record_path = record_path
        self.record = dict(record or {})
        self.verbose = verbose
        self.history = []
        self.file = None
        self.file_bytes = None
        self._resumed = None
        for path in filter(None, (self.filepath, posterior_path, record_path)):
            miracle_file.check_output(path, overwrite)

    def steps_needed(self, model: keras.Model) -> int:
        """Number of training steps until all blocks of `model` are coded.

        If the model is compiled with `steps_per_execution`, that is accounted for.
        """
        fixed = np.concatenate([posterior.fixed for posterior, _ in posteriors(model)])
        rounds = -(-np.sum(~fixed) // self.blocks_per_round)
        execution = getattr(model, "steps_per_execution", 1)
        first, between = (
            -(-steps // execution) * execution
            for steps in (self._first_round(fixed.any()), self.finetune_steps)
        )
        return int(first + (rounds - 1) * between) if rounds else 0

    def state(self) -> dict:
        """Where the coding stands, as JSON can say it, for `resume`.

        Which blocks are coded, and how, is part of the model.
        """
        return {
            "step": self._step,
            "next_round": self._next_round,
            "seconds": time.monotonic() - self._start,
            "history": self.history,
        }

    def resume(self, state: dict) -> None:
        """Makes the next `fit` go on where `state()` was taken.

        Its model must have the variables of that moment, its data must go on from
        there.
        """
        self._resumed = state
        self.history = list(state["history"])

    def _first_round(self, started):
        return self.finetune_steps if started else self.train_steps

    def on_train_begin(self, logs=None):
        parts = posteriors(self.model)
        if not parts:
            raise ValueError(
                f"{self.model.name!r} has nothing to code. Wrap it in "
                "`tfmiracle.VariationalModel`, or build it from layers such as "
                "MeanKLDense."
            )
        if any(isinstance(p, DeterministicPosterior) for p, _ in parts):
            raise ValueError(
                f"{self.model.name!r} is deterministic: it has no posterior to code. "
                "Build the VariationalModel with parameterization='mean_kl'."
            )
        check_network(self.model)
        self._coders = [
            dataclasses.replace(posterior.coder, selection=self.selection)
            for posterior, _ in parts
        ]
        self._posteriors = [posterior for posterior, _ in parts]
        self._todo = self._not_coded()
        self._num_blocks = sum(p.layout.num_blocks for p in self._posteriors)
        state = self._resumed or {
            "step": 0,
            "next_round": self._first_round(len(self._todo) < self._num_blocks),
            "seconds": 0.0,
        }
        self._resumed = None
        self._steps_before_epoch = self._step = state["step"]
        self._next_round = state["next_round"]
        self._start = time.monotonic() - state["seconds"]
        self._bar = None
        if self.verbose and not (self.params or {}).get("verbose"):
            self._bar = keras.utils.Progbar(self._num_blocks, unit_name="block")
        self._code_what_is_due(logs)

    def on_train_batch_end(self, batch, logs=None):
        self._step = self._steps_before_epoch + batch + 1
        self._code_what_is_due(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._steps_before_epoch = self._step
        if logs is not None:
            logs["coded_blocks"] = self._num_blocks - len(self._todo)

    def on_train_end(self, logs=None):
        # Another callback may have restored weights of before some rounds.
        self._todo = self._not_coded()
        done = self._num_blocks - len(self._todo)
        self.history = [row for row in self.history if row["blocks"] <= done]
        while self._todo:
            self._round(logs)
        self._finish()

    def _not_coded(self):
        """A list of (posterior, block), in the order of coding."""
        return [
            (p, block)
            for p, posterior in enumerate(self._posteriors)
            for block in np.flatnonzero(~posterior.fixed)
        ]

    def _code_what_is_due(self, logs):
        while self._todo and self._step >= self._next_round:
            self._round(logs)
        if not self._todo:
            self.model.stop_training = True

    def _round(self, logs):
        now, self._todo = (
            self._todo[: self.blocks_per_round],
            self._todo[self.blocks_per_round :],
        )
        self._next_round = self._step + self.finetune_steps
        for posterior in self._posteriors:
            posterior.finalize_coding_scale()
        kl, excess, weight, evidence = [], [], [], []
        for p in dict.fromkeys(p for p, _ in now):
            posterior, blocks = self._posteriors[p], [b for q, b in now if q == p]
            loc, log_ratio = posterior.standardized(blocks)
            coded = self._coders[p].encode(blocks, loc.numpy(), log_ratio.numpy())
            posterior.fix(blocks, coded.codes)
            kl.append(posterior.block_kl(blocks).numpy() / np.log(2))
            excess.append(posterior.is_over_budget(kl[-1]))
            weight.append(coded.log_weight)
            evidence.append(coded.log_evidence)
        done = self._num_blocks - len(self._todo)
        kl = np.concatenate(kl)
        logs = plain_logs(logs)
        self.history.append(
            {
                "step": self._step,
                "blocks": done,
                "kl_bits": float(np.mean(kl)),
                "max_kl_bits": float(np.max(kl)),
                "over_budget": int(np.sum(np.concatenate(excess))),
                "log_weight": float(np.mean(np.concatenate(weight))),
                "log_evidence": float(np.mean(np.concatenate(evidence))),
                "seconds": time.monotonic() - self._start,
                **logs,
            }
        )
        if self._bar:
            numbers = [(k, v) for k, v in logs.items() if isinstance(v, float)]
            self._bar.update(done, numbers)

    def _finish(self):
        if self.recalibration_data is not None:
            recalibrate(self.model, self.recalibration_data)
        round_stored(self.model)
        self.file = to_file(self.model, self.metadata, self.architecture)
        data = self.file.to_bytes()
        self._verify(data)
        over = sum(row["over_budget"] for row in self.history)
        if over:
            most = max(row["max_kl_bits"] for row in self.history)
            warnings.warn(
                f"{over} of {self._num_blocks} blocks were coded while their KL was "
                f"above the budget, at most {most:.1f} bits; their codes are less "
                "accurate than they could be. Train or fine-tune longer, or raise "
                "`beta` or `beta_rate`.",
                stacklevel=2,
            )
        if self.posterior_path is not None:
            coded_posterior(self.model).write(self.posterior_path, self.overwrite)
        if self.record_path is not None:
            record = json.dumps(self._made_with(), indent=1) + "\n"
            miracle_file.write_atomically(
                self.record_path, record.encode(), self.overwrite
            )
        miracle_file.write_atomically(self.filepath, data, self.overwrite)
        self.file_bytes = len(data)

    def _made_with(self):
        parts = self._posteriors
        return {
            "tfmiracle": tfmiracle.__version__,
            "parameterization": [type(posterior).__name__ for posterior in parts],
            "kl_bits": [getattr(posterior, "kl_bits", None) for posterior in parts],
            "selection": self.selection,
            **self.record,
        }

    def _verify(self, data):
        """Decodes the bytes of the file and compares them with the model, exactly."""
        expected = {
            id(v): keras.ops.convert_to_numpy(value)
            for posterior, variables in posteriors(self.model)
            for v, value in zip(variables, posterior.values(), strict=True)
        }
        decoded = decode(data, max_weights=None).weights.values()
        for variable, value in zip(plain_weights(self.model), decoded, strict=True):
            right = expected.get(id(variable))
            if right is None:
                right = keras.ops.convert_to_numpy(variable)
            if not np.array_equal(value, right.astype(value.dtype), equal_nan=True):
                raise RuntimeError(
                    f"{self.filepath} would not decode to the coded weights of "
                    f"{variable.path}; it has not been written. This is a defect of "
                    "tfmiracle or of the machine: please report it."
                )


def plain_logs(logs: dict | None) -> dict:
    """What `fit` or `evaluate` logs, as JSON can say it: numbers, and lists of them."""
    return {k: np.asarray(v).tolist() for k, v in (logs or {}).items()}
