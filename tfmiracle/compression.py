"""The whole way in one call: train under the budget, code, write the file."""

import bisect
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle import miracle_file
from tfmiracle.coding_loop import CodingLoop
from tfmiracle.data import (
    checksum,
    read_data,
    recalibration_inputs,
    shifted,
    training_batches,
)
from tfmiracle.decoder import decode
from tfmiracle.distillation import relabel, soft_loss
from tfmiracle.keras_internals import compiled_loss_weights, seed_generators, walk
from tfmiracle.loading import to_network
from tfmiracle.miracle_file import MiracleFile, section_bytes
from tfmiracle.models import (
    VariationalModel,
    WholeBatches,
    check_model,
    fixed_batch,
    posteriors,
)
from tfmiracle.network import (
    check_network,
    plain_architecture,
    to_file,
)
from tfmiracle.recipe import Recipe
from tfmiracle.run import PHASES, STEPS_PER_EXECUTION, Run
from tfmiracle.summary import compression, show_compression

# What settings and lengths may take more in the file than in the probe for its size.
_SLACK = 64


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
      metadata: further entries for the file's metadata; anything JSON can say.
      workdir: folder in which the run keeps its state. Killed at any moment and called
        again with the same arguments, `compress` goes on where it was and writes the
        same file; called after it has finished, it trains nothing. A `tf.data.Dataset`
        or `PyDataset` must give the same batches in the same order each time for that,
        which a generator cannot. By default nothing is kept.
      keep_posterior: whether to write Q of all weights, too, as `.posterior.npz` beside
        the file; see `CodedPosterior`.
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
    outputs = [pathlib.Path(path)]
    if keep_posterior:
        outputs.append(outputs[0].with_suffix(".posterior.npz"))
    made, begun = outputs, False
    if workdir is not None:
        folder = pathlib.Path(workdir)
        names = ("coded.miracle", "coded.posterior.npz")
        made = [folder / name for name in names[: len(outputs)]]
        begun = any((folder / name).exists() for name in ("state.npz", "result.json"))
    for output, source in zip(outputs, made, strict=True):
        # What a run has made before it may make again, also in its own folder.
        to_come = made is not outputs and source == output and not output.exists()
        if not (to_come or (begun and _is_copied(source, output))):
            miracle_file.check_output(output, overwrite)
    check_model(model)
    loss_weights = None
    if loss is None and model.compiled:
        loss = model.loss
        loss_weights = compiled_loss_weights(model)
    labelled = loss is not None and not distill
    once = workdir is None
    data = read_data("data", data, model, labelled, once=once)
    if validation_data is not None:
        validation_data = read_data(
            "validation_data", validation_data, model, labelled, ends=True
        )
    batch_size = fixed_batch(model) or recipe.batch_size
    recipe = dataclasses.replace(recipe, batch_size=batch_size)
    if distill:
        hard = model.loss if model.compiled else None
        loss = soft_loss(hard) if loss is hard else loss
        # Of `model`: the labels of a dataset are made as it is read, and `net` changes.
        data = relabel(data, model, hard, batch_size)
        validation_data = relabel(validation_data, model, hard, batch_size)
    examples = training_batches(data, recipe)
    batches = shifted(examples, recipe) if recipe.max_shift else examples
    batch, *_ = next(iter(examples(PHASES[0], 0)), (None,))
    net = _copy(model, recipe.seed, batch)
    if loss is None and not _adds_losses(net, batch):
        raise ValueError(
            "`loss` is missing: compile the model with a loss first, pass one, or have "
            "a layer call `add_loss`."
        )
    has_weights = isinstance(data, tuple) and len(data) == 3
    if class_weight is not None and (loss is None or has_weights):
        raise ValueError(
            "`class_weight` needs labels with a `loss`, and no weights of examples."
        )
    if target is not None:
        size = block_size_for(net, target, recipe, rules=rules, metadata=metadata)
        recipe = dataclasses.replace(recipe, block_size=size)
    settings = {
        "recipe": recipe.settings(),
        "rules": rules,
        "metadata": metadata,
        "keep_posterior": keep_posterior,
        "loss": _description(loss),
        "loss_weights": _description(loss_weights),
        "class_weight": _description(class_weight),
        "metrics": _description(metrics),
        "model": plain_architecture(model),
        "weights": checksum(net.get_weights()),
        "data": checksum(data),
        "validation_data": checksum(validation_data),
    }
    options = {**recipe.model_options(), "rules": rules}

    replicas = tf.distribute.get_strategy().num_replicas_in_sync

    def compiled(network, learning_rate=1e-3):
        network.compile(
            keras.optimizers.Adam(learning_rate),
            loss,
            loss_weights=loss_weights,
            metrics=metrics,
            # Several steps under several replicas are more than Keras can do.
            steps_per_execution=1 if replicas > 1 else STEPS_PER_EXECUTION,
            # With XLA where there is an accelerator. On a CPU, where it makes
            # convolutions slow, only the posterior is compiled.
            jit_compile="auto",
        )
        return network

    training = {"callbacks": callbacks, "class_weight": class_weight}

    def decoded():
        return compiled(to_network(decode(made[0], max_weights=None)))

    def schedule(learning_rate, steps):
        if recipe.decay == "constant" or not steps:
            return learning_rate
        return keras.optimizers.schedules.CosineDecay(learning_rate, steps)

    def evaluate(stage, network):
        if validation_data is not None:
            if fixed_batch(network):
                network = compiled(WholeBatches(network))
            run.evaluate(stage, lambda: _evaluate(network, validation_data, recipe))

    with Run(workdir, settings, verbose) as run:
        if run.result is None:
            # Made before anything trains: it checks its arguments.
            coding = CodingLoop(
                made[0],
                recipe.blocks_per_round,
                recipe.finetune_steps,
                overwrite=overwrite or workdir is not None,
                recalibration_data=recalibration_inputs(examples, recipe),
                posterior_path=made[1] if keep_posterior else None,
                metadata={"recipe": recipe.changes(), **(metadata or {})},
                verbose=verbose,
            )
            evaluate("original", compiled(net))
            if recipe.warmup_steps:
                steps = recipe.warmup_steps
                warmup = VariationalModel(net, "deterministic", **options)
                compiled(warmup, schedule(recipe.warmup_learning_rate, steps))
                run.train(warmup, "warmup", batches, steps, **training)
                evaluate("warmup", warmup)
                warmup.materialize()
            steps = recipe.train_steps
            learning_rate, finetune_learning_rate = recipe.learning_rates
            variational = VariationalModel(net, recipe.posterior, **options)
            compiled(variational, schedule(learning_rate, steps))
            run.train(variational, "variational", batches, steps, **training)
            evaluate("posterior_mean", variational)
            evaluate("posterior_sample", compiled(variational.materialize(sample=True)))
            compiled(variational, finetune_learning_rate)
            steps = coding.steps_needed(variational)
            run.train(variational, "coding", batches, steps, **training, coding=coding)
            evaluate("decoded", decoded())
            run.finish({"history": coding.history})
        for output, source in zip(outputs, made, strict=True):
            if not _is_copied(source, output):
                miracle_file.write_atomically(output, source.read_bytes(), overwrite)
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


def block_size_for(
    net: keras.Model,
    target: str | int,
    recipe: Recipe | None = None,
    *,
    rules: dict[str, str] | None = None,
    metadata: dict | None = None,
) -> int:
    """The smallest block size with which the file of `net` is no larger than `target`.

    Args:
      net: a built Keras model.
      target, rules, metadata: see `compress`.
      recipe: `block_bits` and what else of it decides the size.

    Raises:
      ValueError: if `target` cannot be read or cannot be met.
    """
    recipe = recipe or Recipe()
    probe = VariationalModel(
        net,
        rules=rules,
        **recipe.model_options()
        | {"block_size": sum(int(np.prod(v.shape)) for v in net.weights)},
    )
    posterior = probe.block_posterior
    posterior.finalize_coding_scale()
    code, count = posterior.code, posterior.layout.num_effective
    posterior.fix([0], np.zeros((1, *code.shape(posterior.layout.block_size)), int))
    file = to_file(probe, {"recipe": recipe.changes(), **(metadata or {})})
    # What is stored may compress less after training than it does now: as noise.
    noise = np.random.default_rng(0)
    stored = [
        np.frombuffer(noise.bytes(v.nbytes), v.dtype).reshape(v.shape)
        for v in file.stored
    ]
    file = dataclasses.replace(file, stored=stored)
    fixed = len(file.to_bytes()) - file.payload_bytes + _SLACK
    budget = target_bytes(target, file.num_weights)

    def fits(block_size):
        num_blocks = -(-count // block_size)
        return fixed + math.ceil(num_blocks * code.bits(block_size) / 8) <= budget

    if not fits(count):
        raise ValueError(_cannot_be_met(target, budget, file, rules))
    return 1 + bisect.bisect_left(range(1, count), True, key=fits)


def _cannot_be_met(target, budget, file, rules):
    """Says what the smallest file is, what takes its bytes, and what would help."""
    parts = section_bytes(file.to_bytes())
    least = sum(parts.values()) + _SLACK
    count = file.num_weights
    ratio, bits = math.floor(40 * count / least) / 10, math.ceil(800 * least / count)
    text = (
        f"`target` cannot be met: {target!r} means {budget:,} bytes, but the smallest "
        f"file of this network that can be promised takes {least:,} ('{ratio:.1f}x', "
        f"'{bits / 100:.2f} bits'): {parts['description']:,} for architecture, names "
        f"and settings, {parts['layout']:,} for the layout with its coding scales, "
        f"{parts['stored']:,} for stored variables, {parts['indices']:,} for one "
        f"block, {_SLACK} in reserve."
    )
    number = re.fullmatch(r"\s*([0-9.]+)\s*", str(target))
    if number:
        as_ratio = target_bytes(f"{number[1]}x", count)
        text += (
            f" Did you mean '{number[1]}x', a ratio?"
            if as_ratio >= least
            else f" (As a ratio, '{number[1]}x', it would be {as_ratio:,} bytes.)"
        )
    if parts["stored"] > least / 2:
        saved = {}
        stored = [n for n, p in zip(file.names, file.coded, strict=True) if p is None]
        for name, value in zip(stored, file.stored, strict=True):
            if value.dtype == np.float32:
                *_, last = name.split("/")
                pattern = f"*/{last}" if last != name else name
                saved[pattern] = saved.get(pattern, 0) + value.nbytes // 2
        most = sorted(saved, key=saved.get, reverse=True)[:3]
        if most:
            advice = ", ".join(f"'{pattern}': 'store=float16'" for pattern in most)
            text += (
                f" The rules {{{advice}}} save about "
                f"{sum(saved[pattern] for pattern in most):,} bytes."
            )
        text += " What trains, and no rule stores, is coded; 'hash=N' keeps it small."
    if any("own_scale" in rule for rule in (rules or {}).values()):
        text += " Without the rule 'own_scale' a variable takes 4 bytes less."
    return text


def target_bytes(target: str | int, num_weights: int) -> int:
    """Reads a target size: bytes, "3.3 kB", "500x" or "0.06 bits" (a weight).

    Raises:
      ValueError: if it cannot be read, or is not positive.
    """
    match = re.fullmatch(
        r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(b|kb|mb|x|bits?|)\s*",
        str(target).lower(),
    )
    if not match or not 0 < float(match[1]) < float("inf"):
        raise ValueError(
            "`target` must be a number of bytes (3300, '3300 B' or '3.3 kB'), a ratio "
            f"('500x') or bits per weight ('0.06 bits'). Received: target={target!r}"
        )
    number, unit = float(match[1]), match[2]
    if unit == "x":
        return int(4 * num_weights / number)
    if unit.startswith("bit"):
        return int(number * num_weights / 8)
    return int(number * {"": 1, "b": 1, "kb": 1e3, "mb": 1e6}[unit])


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
