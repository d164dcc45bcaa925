"""The whole way in one call: train under the budget, code, write the file."""

import dataclasses
import os
import pathlib
import types
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle import files
from tfmiracle.decoder import decode
from tfmiracle.hosts.loading import to_network
from tfmiracle.hosts.models import (
    VariationalModel,
    WholeBatches,
    check_model,
    fixed_batch,
    posteriors,
)
from tfmiracle.hosts.network import (
    check_network,
    plain_architecture,
)
from tfmiracle.keras_internals import compiled_loss_weights, seed_generators, walk
from tfmiracle.miracle_file import MiracleFile, check_metadata
from tfmiracle.recipe import Recipe
from tfmiracle.training.coding_loop import CodingLoop
from tfmiracle.training.data import (
    checksum,
    read_data,
    recalibration_inputs,
    shifted,
    training_batches,
)
from tfmiracle.training.distillation import relabel, soft_loss
from tfmiracle.training.run import PHASES, STEPS_PER_EXECUTION, Run
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
    recipe = recipe or Recipe()
    if not isinstance(recipe, Recipe):
        raise ValueError(
            "`recipe` must be a tfmiracle.Recipe, such as Recipe(train_steps=3000). "
            f"Received: recipe={recipe!r}"
        )
    outputs = _Outputs(path, workdir, keep_posterior, record, overwrite)
    check_metadata(metadata)
    check_model(model)
    description = plain_architecture(model)  # raises, before anything else is done
    objective = _Objective.of(model, loss, metrics, class_weight, distill)

    # Data.
    once = isinstance(data, types.GeneratorType)
    labelled = objective.loss is not None and not distill
    data = read_data("data", data, model, labelled, once=workdir is None)
    if validation_data is not None:
        validation_data = read_data(
            "validation_data", validation_data, model, labelled, ends=True
        )
    batch_size = fixed_batch(model) or recipe.batch_size
    recipe = dataclasses.replace(recipe, batch_size=batch_size)
    if distill:
        # Of `model`: the labels of a dataset are made as it is read, and the copy of it
        # that is trained changes.
        hard = model.loss if model.compiled else None
        data = relabel(data, model, hard, batch_size)
        validation_data = relabel(validation_data, model, hard, batch_size)
    examples = training_batches(data, recipe)
    batch = None
    if not once or objective.loss is None:  # what a generator gives is for the training
        batch, *_ = next(iter(examples(PHASES[0], 0)), (None,))

    # Network, and the blocks that meet the target.
    net = _copy(model, recipe.seed, batch)
    objective.check(net, batch, data)
    if target is not None:
        recipe = recipe_for(
            net,
            target,
            recipe,
            rules=rules,
            metadata=metadata,
            architecture=architecture,
        )

    settings = {
        "recipe": recipe.settings(),
        "rules": rules,
        "metadata": metadata,
        "keep_posterior": keep_posterior,
        "architecture": architecture,
        "record": record,
        **objective.settings(),
        "model": description,
        "weights": checksum(net.get_weights()),
        "data": checksum(data),
        "validation_data": checksum(validation_data),
    }

    def decoded():
        found = decode(outputs.file, max_weights=None)
        return objective.compile(to_network(found, architecture=description))

    with Run(workdir, settings, verbose) as run:
        if run.result is None:
            # Made before anything trains: it checks its arguments.
            coding = CodingLoop(
                outputs.file,
                recipe.blocks_per_round,
                recipe.finetune_steps,
                overwrite=overwrite or workdir is not None,
                recalibration_data=recalibration_inputs(examples, recipe),
                posterior_path=outputs.posterior,
                metadata=metadata,
                architecture=architecture,
                record_path=outputs.record,
                record={"recipe": recipe.settings()},
                verbose=verbose,
            )
            batches = shifted(examples, recipe) if recipe.max_shift else examples
            phases = _Phases(
                run, recipe, rules, objective, batches, validation_data, callbacks
            )
            phases.evaluate("original", objective.compile(net))
            phases.warm_up(net)
            variational = phases.train(net)
            phases.code(variational, coding)
            phases.evaluate("decoded", decoded())
            run.finish({"history": coding.history})
        outputs.publish()
    file = MiracleFile.read(path, max_weights=None)
    return CompressionResult(
        os.fspath(path),
        decoded(),
        file,
        os.path.getsize(path),
        run.result["stages"],
        run.result["history"],
        run.result["curve"],
        run.result["seconds"],
    )


class _Outputs:
    """The files of a run: where they are made, and where they will be.

    Attributes:
      file, posterior, record: where each is made, None for one that is not wanted.
    """

    def __init__(self, path, workdir, keep_posterior, record, overwrite):
        path = pathlib.Path(path)
        self._overwrite = overwrite
        suffixes = {"file": ".miracle"}
        suffixes |= {"posterior": ".posterior.npz"} if keep_posterior else {}
        suffixes |= {"record": ".record.json"} if record else {}
        final = {
            name: path if name == "file" else path.with_suffix(suffix)
            for name, suffix in suffixes.items()
        }
        made, begun = final, False
        if workdir is not None:
            folder = pathlib.Path(workdir)
            made = {name: folder / f"coded{suffixes[name]}" for name in final}
            states = ("state.npz", "result.json")
            begun = any((folder / name).exists() for name in states)
        self.file, self.posterior, self.record = (
            made.get(name) for name in ("file", "posterior", "record")
        )
        self._places = [(made[name], final[name]) for name in final]
        for source, output in self._places:
            # What a run has made before it may make again, also in its own folder.
            to_come = made is not final and source == output and not output.exists()
            if not (to_come or (begun and _is_copied(source, output))):
                files.check_output(output, overwrite)

    def publish(self):
        """Copies what was made elsewhere to where it will be."""
        for source, output in self._places:
            if not _is_copied(source, output):
                files.write_atomically(output, source.read_bytes(), self._overwrite)


@dataclasses.dataclass(frozen=True)
class _Objective:
    """What is minimized and measured."""

    loss: object
    loss_weights: object
    metrics: object
    class_weight: dict | None

    @classmethod
    def of(cls, model, loss, metrics, class_weight, distill):
        """That of a model, unless another loss is given."""
        weights = None
        if loss is None and model.compiled:
            loss, weights = model.loss, compiled_loss_weights(model)
        if distill:
            hard = model.loss if model.compiled else None
            loss = soft_loss(hard) if loss is hard else loss
        return cls(loss, weights, metrics, class_weight)

    def check(self, net, batch, data):
        """Raises a ValueError if there is nothing to minimize, or weights clash."""
        if self.loss is None and not _adds_losses(net, batch):
            raise ValueError(
                "`loss` is missing: compile the model with a loss first, pass one, or "
                "have a layer call `add_loss`."
            )
        has_weights = isinstance(data, tuple) and len(data) == 3
        if self.class_weight is not None and (self.loss is None or has_weights):
            raise ValueError(
                "`class_weight` needs labels with a `loss`, and no weights of examples."
            )

    def compile(self, network, learning_rate=1e-3):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        network.compile(
            keras.optimizers.Adam(learning_rate),
            self.loss,
            loss_weights=self.loss_weights,
            metrics=self.metrics,
            # Several steps under several replicas are more than Keras can do.
            steps_per_execution=1 if replicas > 1 else STEPS_PER_EXECUTION,
            # With XLA where there is an accelerator. On a CPU, where it makes
            # convolutions slow, only the posterior is compiled.
            jit_compile="auto",
        )
        return network

    def settings(self):
        """It, as JSON that another process would write, too."""
        names = ("loss", "loss_weights", "metrics", "class_weight")
        return {name: _description(getattr(self, name)) for name in names}


class _Phases:
    """The phases of a run, one after the other; `Run` skips those that are done."""

    def __init__(
        self, run, recipe, rules, objective, batches, validation_data, callbacks
    ):
        self._run, self._recipe, self._objective = run, recipe, objective
        self._options = {**recipe.model_options(), "rules": rules}
        self._batches, self._validation_data = batches, validation_data
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


def _is_copied(source, copy):
    both = source.is_file() and copy.is_file()
    return both and source.read_bytes() == copy.read_bytes()


def _description(setup):
    """What a loss or metrics are, as JSON that another process would write, too.

    Not as Keras serializes them, which many cannot be; without addresses, and without
    the names, which Keras numbers.
    """
    if isinstance(setup, dict):
        return {str(k): _description(v) for k, v in setup.items() if k != "name"}
    if isinstance(setup, list | tuple):
        return [_description(part) for part in setup]
    if setup is None or isinstance(setup, str | int | float):
        return setup if setup is None else str(setup)
    of = setup if hasattr(setup, "__qualname__") else type(setup)
    name = f"{of.__module__}.{of.__qualname__}"
    try:
        return [name, _description(dict(setup.get_config()))]
    except Exception:  # has none, or one that cannot be made
        return name


def _adds_losses(net, x):
    """Whether the network has losses of its own, by `add_loss`."""
    with keras.StatelessScope(collect_losses=True) as scope:  # which changes nothing
        net(x, training=True)
    return bool(scope.losses)


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
