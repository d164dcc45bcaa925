"""Coding the posteriors of a model, block by block, and the file that comes of it."""

import json
import os
import time
import warnings
from collections.abc import Iterable

import keras
import numpy as np

import tfmiracle
from tfmiracle import files, miracle_file
from tfmiracle.coding.coder import CODERS
from tfmiracle.decoder import decode
from tfmiracle.hosts.models import plain_weights, posteriors
from tfmiracle.hosts.network import (
    check_decoded,
    check_network,
    coded_posterior,
    inference_weights,
    round_stored,
    to_file,
)
from tfmiracle.hosts.recalibration import recalibrate
from tfmiracle.miracle_file import (
    MiracleFile,
)
from tfmiracle.options import check_option, check_switches
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS
from tfmiracle.recipe import DEFAULTS, Recipe
from tfmiracle.training import progress


class CodingLoop:
    """Codes a model in rounds, between which it may be trained, and writes its file.

    A round codes the next `blocks_per_round` blocks and fixes them to what the decoder
    will produce. The loop does not train: whoever trains calls `advance` after each
    step, as `CompressionCallback` does. Without training, `start` and `finish` code
    everything at once:

        loop = CodingLoop("net.miracle")
        loop.start(model)
        file = loop.finish()

    Args:
      filepath: the file to write.
      **options: see `CompressionCallback`.

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
        blocks_per_round: int = DEFAULTS.blocks_per_round,
        finetune_steps: int = DEFAULTS.finetune_steps,
        train_steps: int = 0,
        overwrite: bool = False,
        recalibration_data: Iterable | None = None,
        posterior_path: str | os.PathLike | None = None,
        metadata: dict | None = None,
        architecture: bool = True,
        record_path: str | os.PathLike | None = None,
        record: dict | None = None,
        verbose: int = 1,
    ):
        check_option(Recipe, "blocks_per_round", blocks_per_round)
        check_option(Recipe, "finetune_steps", finetune_steps)
        check_option(Recipe, "train_steps", train_steps)
        check_switches(overwrite=overwrite, architecture=architecture)
        miracle_file.check_metadata(metadata)
        self.filepath = os.fspath(filepath)
        self.blocks_per_round = blocks_per_round
        self.finetune_steps = finetune_steps
        self.train_steps = train_steps
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
        self._bar = None
        paths = [self.filepath, posterior_path, record_path]
        paths = [path for path in paths if path is not None]
        for path in paths:
            files.check_output(path, overwrite)
        if len({os.path.abspath(path) for path in paths}) < len(paths):
            raise ValueError(
                "`filepath`, `posterior_path` and `record_path` must be different "
                f"files. Received: {', '.join(map(str, paths))}"
            )

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
            "step": self.step,
            "next_round": self._next_round,
            "seconds": time.monotonic() - self._start,
            "history": self.history,
        }

    def resume(self, state: dict) -> None:
        """Makes the next `start` go on where `state()` was taken.

        Its model must have the variables of that moment, its data must go on from
        there.
        """
        self._resumed = state
        self.history = list(state["history"])

    def _first_round(self, started):
        return self.finetune_steps if started else self.train_steps

    def start(self, model: keras.Model, quiet: bool = False) -> None:
        """Takes a model, and codes what is due before its training.

        Args:
          model: a `VariationalModel`, or a model with variational layers; some of its
            blocks may be coded already.
          quiet: whether something else shows how far it is.

        Raises:
          ValueError: if it cannot be coded, or would be another network when loaded.
        """
        self._model = model
        parts = posteriors(model)
        if not parts:
            raise ValueError(
                f"{model.name!r} has nothing to code. Wrap it in "
                "`tfmiracle.VariationalModel`, or build it from layers such as "
                "MeanKLDense."
            )
        if not all(posterior.parameterization.codable for posterior, _ in parts):
            raise ValueError(
                f"{model.name!r} is deterministic: it has no posterior to code. "
                "Build the VariationalModel with parameterization='mean_kl'."
            )
        self._batch = self._some_inputs()
        check_network(model, self._batch)
        self._posteriors = [posterior for posterior, _ in parts]
        self._todo = self._not_coded()
        self._num_blocks = sum(p.layout.num_blocks for p in self._posteriors)
        state = self._resumed or {
            "step": 0,
            "next_round": self._first_round(len(self._todo) < self._num_blocks),
            "seconds": 0.0,
        }
        self._resumed = None
        self.step = state["step"]
        self._next_round = state["next_round"]
        self._start = time.monotonic() - state["seconds"]
        if self.verbose and not quiet:
            self._bar = progress.bar("Coding", self._num_blocks, "block")
        self.advance(self.step)

    @property
    def coded_blocks(self) -> int:
        """How many blocks are coded."""
        return self._num_blocks - len(self._todo)

    @property
    def is_done(self) -> bool:
        """Whether all blocks are coded."""
        return not self._todo

    def advance(self, step: int, logs: dict | None = None) -> None:
        """Codes what is due after a number of training steps.

        Args:
          step: steps since `start`, or since the start of what was resumed.
          logs: numbers of the training, for `history`.
        """
        self.step = step
        while self._todo and step >= self._next_round:
            self._round(logs)

    def finish(self, logs: dict | None = None) -> MiracleFile:
        """Codes what is left at once; makes, decodes, compares and writes the file.

        Raises:
          RuntimeError: if it would not decode to the model; nothing is written then.
        """
        # Weights of before some rounds may have been restored.
        self._todo = self._not_coded()
        self.history = [r for r in self.history if r["blocks"] <= self.coded_blocks]
        while self._todo:
            self._round(logs)
        if self.recalibration_data is not None:
            recalibrate(self._model, self.recalibration_data)
        round_stored(self._model)
        file = to_file(self._model, self.metadata, self.architecture)
        data = file.to_bytes()
        self._verify(data)
        self._warn_of_excess()
        if self.posterior_path is not None:
            coded_posterior(self._model).write(self.posterior_path, self.overwrite)
        if self.record_path is not None:
            text = json.dumps(self._made_with(), indent=1) + "\n"
            files.write_atomically(self.record_path, text.encode(), self.overwrite)
        files.write_atomically(self.filepath, data, self.overwrite)
        self.file, self.file_bytes = file, len(data)
        return file

    def _not_coded(self):
        """A list of (posterior, block), in the order of coding."""
        return [
            (p, block)
            for p, posterior in enumerate(self._posteriors)
            for block in np.flatnonzero(~posterior.fixed)
        ]

    def _round(self, logs):
        now, self._todo = (
            self._todo[: self.blocks_per_round],
            self._todo[self.blocks_per_round :],
        )
        self._next_round = self.step + self.finetune_steps
        for posterior in self._posteriors:
            posterior.finalize_coding_scale()
        kl, excess, weight, evidence = [], [], [], []
        for p in dict.fromkeys(p for p, _ in now):
            posterior, blocks = self._posteriors[p], [b for q, b in now if q == p]
            coded = posterior.encode(blocks)
            posterior.fix(blocks, coded.codes)
            kl.append(posterior.block_kl(blocks).numpy() / np.log(2))
            excess.append(posterior.is_over_budget(kl[-1]))
            weight.append(coded.log_weight)
            evidence.append(coded.log_evidence)
        kl = np.concatenate(kl)
        logs = plain_logs(logs)
        self.history.append(
            {
                "step": self.step,
                "blocks": self.coded_blocks,
                "kl_bits": float(np.mean(kl)),
                "max_kl_bits": float(np.max(kl)),
                "over_budget": int(np.sum(np.concatenate(excess))),
                "log_weight": float(np.mean(np.concatenate(weight), dtype=np.float64)),
                "log_evidence": float(
                    np.mean(np.concatenate(evidence), dtype=np.float64)
                ),
                "seconds": time.monotonic() - self._start,
                **logs,
            }
        )
        if self._bar:
            numbers = [(k, v) for k, v in logs.items() if isinstance(v, float)]
            self._bar.update(self.coded_blocks, numbers)

    def _made_with(self):
        parts = self._posteriors
        return {
            "tfmiracle": tfmiracle.__version__,
            "parameterization": [
                PARAMETERIZATIONS.serialize(posterior.parameterization)
                for posterior in parts
            ],
            "kl_bits": [posterior.kl_bits for posterior in parts],
            "coder": [CODERS.serialize(posterior.coder) for posterior in parts],
            **self.record,
        }

    def _warn_of_excess(self):
        over = sum(row["over_budget"] for row in self.history)
        if over:
            most = max(row["max_kl_bits"] for row in self.history)
            warnings.warn(
                f"{over} of {self._num_blocks} blocks were coded while their KL was "
                f"above the budget, at most {most:.1f} bits; their codes are less "
                "accurate than they could be. Train or fine-tune longer, or raise "
                "`beta` or `beta_rate`.",
                stacklevel=3,
            )

    def _verify(self, data):
        """Decodes the bytes of the file and compares weights, exactly, and outputs."""
        decoded = decode(data, max_weights=None)
        for variable, right, value in zip(
            plain_weights(self._model),
            inference_weights(self._model),
            decoded.weights.values(),
            strict=True,
        ):
            if not np.array_equal(value, right.astype(value.dtype), equal_nan=True):
                raise RuntimeError(
                    f"{self.filepath} would not decode to the coded weights of "
                    f"{variable.path}; it has not been written. This is a defect of "
                    "tfmiracle or of the machine: please report it."
                )
        check_decoded(self._model, decoded, self._batch)

    def _some_inputs(self):
        """A batch of inputs, if there is one that can be had again."""
        data = self.recalibration_data
        if data is None or iter(data) is data:
            return None
        return next(iter(data), None)


def plain_logs(logs: dict | None) -> dict:
    """What `fit` or `evaluate` logs, as JSON can say it: numbers, and lists of them."""
    return {k: np.asarray(v).tolist() for k, v in (logs or {}).items()}
