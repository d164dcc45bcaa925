"""The whole way in one call: train under the budget, code, write the file."""

import dataclasses
import os
import types
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.decoder import decode
from tfmiracle.hosts.loading import to_network
from tfmiracle.hosts.models import (
    VariationalModel,
    WholeBatches,
    check_model,
    fixed_batch,
    posteriors,
)
from tfmiracle.hosts.network import check_network, plain_architecture
from tfmiracle.keras_internals import seed_generators, walk
from tfmiracle.miracle_file import MiracleFile, check_metadata
from tfmiracle.options import check_switches
from tfmiracle.recipe import Recipe
from tfmiracle.training.coding_loop import CodingLoop
from tfmiracle.training.curvature import curvature
from tfmiracle.training.data import (
    augmented,
    checksum,
    read_data,
    recalibration_inputs,
    training_batches,
)
from tfmiracle.training.distillation import relabel
from tfmiracle.training.objective import Objective
from tfmiracle.training.outputs import Outputs
from tfmiracle.training.run import PHASES, Run
from tfmiracle.training.size import recipe_for
from tfmiracle.training.summary import compression, show_compression


@dataclasses.dataclass(frozen=True)
class CompressionResult:
    """What `compress` returns.

    Attributes:
      path: the file written.
      model: the decoded network, a plain Keras model compiled with the loss of the
        original and the `metrics` given.
      file: the parsed file.
      file_bytes: its size.
      stages: stage -> metrics on the validation data, for the stages "original",
        "warmup" (deterministic, hashed), "posterior_mean", "posterior_sample" and
        "decoded". Empty without validation data.
      history: one dict per round of coding, see `CodingLoop`.
      curve: loss, metrics and KL over the steps, see `Run`.
      seconds: time taken.
    """

    path: str
    model: keras.Model
    file: MiracleFile
    file_bytes: int
    stages: dict[str, dict[str, float]]
    history: list[dict[str, float]]
    curve: list[dict]
    seconds: float

    def __repr__(self):
        return show_compression(
            compression(
                self.stages,
                self.file,
                self.file_bytes,
                self.path,
                self.seconds,
                "validation data" if self.stages else "no validation data",
            )
        )

    @property
    def ratio(self) -> float:
        """Size of all weights as float32 over the size of the file."""
        return self.file.float32_bytes / self.file_bytes

    @property
    def payload_ratio(self) -> float:
        """Size of all weights as float32 over that of the indices, the paper's."""
        return self.file.float32_bytes / max(self.file.payload_bytes, 1)


def compress(
    model: keras.Model,
    data,
    target: str | int | None = None,
    path: str | os.PathLike = "model.miracle",
    recipe: Recipe | None = None,
    *,
    rules: dict[str, str] | None = None,
    loss=None,
    metrics: Sequence | None = None,
    class_weight: dict[int, float] | None = None,
    validation_data=None,
    distill: bool = False,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    metadata: dict | None = None,
    workdir: str | os.PathLike | None = None,
    keep_posterior: bool = False,
    architecture: bool = True,
    record: bool = False,
    overwrite: bool = False,
    verbose: int = 1,
) -> CompressionResult:
    """Compresses a Keras model into a `.miracle` file.

    Args:
      model: a built Keras model, best a trained one. It is not changed.
      data: training data: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays or of
        structures of them, a batched `tf.data.Dataset` of such tuples, a
        `keras.utils.PyDataset` (taken in the order of its numbers; `on_epoch_end` is
        not called), or a generator that yields batches without end. `x` alone is
        enough for a model without labels, whose losses come from `add_loss`.
      target: size of the file: bytes (`3300`, `"3300 B"`, `"3.3 kB"`), a ratio to the
        float32 weights (`"500x"`), or bits per weight (`"0.06 bits"`). It is never
        exceeded. By default what `recipe.block_size` gives.
      path: the file to write.
      recipe: the settings; `Recipe()` by default.
      rules: see `VariationalModel`.
      loss: loss as for `compile`; by default that of `model`, with its loss weights.
        It is used, and not part of the file.
      metrics: metrics as for `compile`.
      class_weight: class number -> weight of its examples in training, as for `fit`.
      validation_data: as `data`, but no generator; evaluated after every stage.
      distill: whether to train against the outputs of `model` instead of labels. `data`
        and `validation_data` may then be inputs alone; labels in them are ignored, so
        metrics, too, compare with `model`. The default loss is the cross-entropy of
        soft labels where `model` has one of hard labels, else the mean squared error.
      callbacks: further callbacks for every `fit`.
      metadata: entries for the file's metadata; anything JSON can say.
      workdir: folder in which the run keeps its state. Killed at any moment and called
        again with the same arguments, `compress` goes on where it was and writes the
        same file; called after it has finished, it trains nothing. A `tf.data.Dataset`
        or `PyDataset` must give the same batches in the same order each time for that,
        which a generator cannot. By default nothing is kept.
      keep_posterior: whether to write Q of all weights, too, as `.posterior.npz` beside
        the file; see `CodedPosterior`.
      architecture: whether the file says how the network is built. Without it the file
        is smaller, and whoever loads it needs the network: `load(path, model=network)`.
      record: whether to write how the file was made, `recipe` and versions, as
        `.record.json` beside the file.
      overwrite: whether existing files may be replaced.
      verbose: 0 for silence, 1 for progress: bars on a terminal and in a notebook, a
        few lines elsewhere.

    Returns:
      A `CompressionResult`; printed, it is four lines.

    Raises:
      ValueError: if an argument is out of range, the data is not finite, the target
        cannot be met, the model has no loss, or `model` or `data` is of a kind that
        cannot be used.
      FileExistsError: if `path` exists and `overwrite` is false.
    """
    check_switches(
        distill=distill,
        keep_posterior=keep_posterior,
        architecture=architecture,
        record=record,
        overwrite=overwrite,
    )
    outputs = Outputs(path, workdir, keep_posterior, record, overwrite)
    check_metadata(metadata)
    recipe = _recipe_for(model, recipe)
    description = plain_architecture(model)  # raises, before anything else is done
    objective = Objective.of(model, loss, metrics, class_weight, distill)
    examples = _load(
        data, validation_data, model, recipe, objective, distill, workdir is None
    )
    net = _copy(model, recipe.seed, examples.batch)
    objective.check(net, examples.batch, examples.data)
    content = {"metadata": metadata, "architecture": architecture}
    if target is not None:
        recipe = recipe_for(net, target, recipe, rules=rules, **content)
    settings = {
        "recipe": recipe.settings(),
        "rules": rules,
        "keep_posterior": keep_posterior,
        "record": record,
        "model": description,
        "weights": checksum(net.get_weights()),
        "data": checksum(examples.data),
        "validation_data": checksum(examples.validation_data),
        **content,
        **objective.settings(),
    }

    def decoded(file):
        network = to_network(decode(file, max_weights=None), architecture=description)
        return objective.compile(network)

    with Run(workdir, settings, verbose) as run:
        if run.result is None:
            # Made before anything trains: it checks its arguments.
            coding = _coding_loop(outputs, recipe, examples, content, verbose)
            phases = _Phases(run, recipe, rules, objective, examples, callbacks)
            phases.evaluate("original", objective.compile(net))
            phases.warm_up(net)
            variational = phases.train(net)
            phases.code(variational, coding)
            phases.evaluate("decoded", decoded(outputs.file))
            run.finish({"history": coding.history})
        outputs.publish()
    return _result(path, decoded(path), run.result)


def _recipe_for(model, recipe):
    """The recipe for a model, both checked; a fixed batch has its own size."""
    recipe = Recipe() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise ValueError(
            "`recipe` must be a tfmiracle.Recipe, such as Recipe(train_steps=3000). "
            f"Received: recipe={recipe!r}"
        )
    check_model(model)
    batch_size = fixed_batch(model) or recipe.batch_size
    recipe = dataclasses.replace(recipe, batch_size=batch_size)
    recipe.made_coder()  # raises, before anything trains
    return recipe


@dataclasses.dataclass(frozen=True)
class _Examples:
    """Data as it is used.

    Attributes:
      data, validation_data: what `read_data` returns, with the labels to be learned.
      batches: (phase, step) -> the endless training batches from there on.
      batch: inputs, None if a generator gives its batches to the training alone.
    """

    data: object
    validation_data: object
    batches: Callable
    batch: object


def _load(data, validation_data, model, recipe, objective, distill, once):
    """Reads all examples; a generator will do if they are needed `once`."""
    is_generator = isinstance(data, types.GeneratorType)
    labelled = objective.loss is not None and not distill
    data = read_data("data", data, model, labelled, once=once)
    if validation_data is not None:
        validation_data = read_data(
            "validation_data", validation_data, model, labelled, ends=True
        )
    if distill:
        # Of `model`: the labels of a dataset are made as it is read, and the copy of it
        # that is trained changes.
        hard = model.loss if model.compiled else None
        data = relabel(data, model, hard, recipe.batch_size)
        validation_data = relabel(validation_data, model, hard, recipe.batch_size)
    batches = training_batches(data, recipe)
    batch = None
    if not is_generator or objective.loss is None:
        batch, *_ = next(iter(batches(PHASES[0], 0)), (None,))
    return _Examples(data, validation_data, batches, batch)


def _copy(model, seed, batch):
    """A copy of the network, made as the file will make it.

    It computes the same on a batch of inputs. Its layers with noise of their own
    (dropout) start from `seed`.
    """
    if not model.built:
        raise ValueError(
            f"`model` ({model.name!r}) has no weights yet. Build it first."
        )
    copy = check_network(model, batch)
    if posteriors(model):
        raise ValueError(
            f"`model` ({model.name!r}) has a posterior already. Code it with `fit` and "
            "a CompressionCallback, or pass a plain network, such as what "
            "`VariationalModel.materialize` returns."
        )
    generators = [g for layer in walk(copy) for g in seed_generators(layer)]
    states = np.random.SeedSequence(seed).generate_state(len(generators))
    for generator, state in zip(generators, states, strict=True):
        generator.state.assign([int(state) % 2**31, 0])
    return copy


def _coding_loop(outputs, recipe, examples, content, verbose):
    return CodingLoop(
        outputs.file,
        recipe.blocks_per_round,
        recipe.finetune_steps,
        overwrite=outputs.replaces,
        recalibration_data=recalibration_inputs(examples.batches, recipe),
        posterior_path=outputs.posterior,
        record_path=outputs.record,
        record={"recipe": recipe.settings()},
        verbose=verbose,
        **content,
    )


def _result(path, model, kept):
    """What `compress` returns, of the file and of what the run kept."""
    return CompressionResult(
        os.fspath(path),
        model,
        MiracleFile.read(path, max_weights=None),
        os.path.getsize(path),
        *(kept[name] for name in ("stages", "history", "curve", "seconds")),
    )


class _Phases:
    """The phases of a run, one after the other; `Run` skips those that are done."""

    def __init__(self, run, recipe, rules, objective, examples, callbacks):
        self._run, self._recipe, self._objective = run, recipe, objective
        self._options = {**recipe.model_options(), "rules": rules}
        self._batches = augmented(examples.batches, recipe)
        self._validation_data = examples.validation_data
        self._callbacks = callbacks

    def evaluate(self, stage, network):
        data = self._validation_data
        if data is not None:
            if fixed_batch(network):
                network = self._objective.compile(WholeBatches(network))
            self._run.evaluate(stage, lambda: _evaluate(network, data, self._recipe))

    def warm_up(self, net):
        """Deterministic training, hashed as the posterior will be; changes `net`."""
        steps = self._recipe.warmup_steps
        if steps:
            model = VariationalModel(net, "deterministic", **self._options)
            rate = self._schedule(self._recipe.warmup_learning_rate, steps)
            self._objective.compile(model, rate)
            self._fit(model, "warmup", steps)
            self.evaluate("warmup", model)
            model.materialize()

    def train(self, net):
        """Variational training under the budget; returns the model."""
        recipe = self._recipe
        model = VariationalModel(net, recipe.posterior, **self._options)
        if recipe.curvature_steps and not self._run.goes_on:
            batches = self._batches("variational", 0).take(recipe.curvature_steps)
            objective = self._objective
            losses = objective.loss, objective.loss_weights
            found = curvature(model, batches, *losses, recipe.seed)
            model.block_posterior.observe(found)
        rate = self._schedule(recipe.learning_rates[0], recipe.train_steps)
        self._objective.compile(model, rate)
        self._fit(model, "variational", recipe.train_steps)
        self.evaluate("posterior_mean", model)
        sampled = self._objective.compile(model.materialize(sample=True))
        self.evaluate("posterior_sample", sampled)
        return model

    def code(self, model, coding):
        """Coding and fine-tuning; writes the file."""
        self._objective.compile(model, self._recipe.learning_rates[1])
        self._fit(model, "coding", coding.steps_needed(model), coding)

    def _fit(self, model, phase, steps, coding=None):
        weight = self._objective.class_weight
        self._run.train(
            model, phase, self._batches, steps, self._callbacks, coding, weight
        )

    def _schedule(self, learning_rate, steps):
        if self._recipe.decay == "constant" or not steps:
            return learning_rate
        return keras.optimizers.schedules.CosineDecay(learning_rate, steps)


def _evaluate(network, data, recipe):
    if isinstance(data, tf.data.Dataset):
        return network.evaluate(data, verbose=0, return_dict=True)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    return network.evaluate(
        x,
        y,
        batch_size=recipe.batch_size,
        sample_weight=weights,
        verbose=0,
        return_dict=True,
    )
