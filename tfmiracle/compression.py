"""The whole way in one call: train under the budget, code, write the file."""

import dataclasses
import json
import os
import pathlib
import re
import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle import miracle_file
from tfmiracle.augmentation import check_shift, random_shift
from tfmiracle.callbacks import CompressionCallback
from tfmiracle.datasets import as_arrays
from tfmiracle.decoder import decode
from tfmiracle.distillation import relabel, soft_loss
from tfmiracle.keras_internals import seed_generators, walk
from tfmiracle.miracle_file import Levels, MiracleFile
from tfmiracle.models import VariationalModel, plain_weights, posteriors
from tfmiracle.network import (
    architecture_by_place,
    check_network,
    plain_architecture,
    set_weights,
    to_file,
    to_network,
)
from tfmiracle.recipe import Recipe
from tfmiracle.run import PHASES, STEPS_PER_EXECUTION, Run

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
      history: one dict per round of coding, see `CompressionCallback`.
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
      data: training data, `(x, y)` arrays or a batched `tf.data.Dataset` of such
        pairs.
      target: size of the file: bytes (`3300`, `"3300 B"`, `"3.3 kB"`), a ratio to the
        float32 weights (`"500x"`), or bits per weight (`"0.06 bits"`). It is never
        exceeded. By default what `recipe.block_size` gives.
      path: the file to write.
      recipe: the settings; `Recipe()` by default.
      rules: see `VariationalModel`.
      loss: loss as for `compile`; by default that of `model`, with its loss weights.
      metrics: metrics as for `compile`.
      validation_data: `(x, y)` or a `tf.data.Dataset`, evaluated after every stage.
      distill: whether to train against the outputs of `model` instead of labels. `data`
        and `validation_data` may then be inputs alone; labels in them are ignored, so
        metrics, too, compare with `model`. The default loss is the cross-entropy of
        soft labels where `model` has one of hard labels, else the mean squared error.
      callbacks: further callbacks for every `fit`.
      metadata: entries for the file's metadata; anything JSON can say.
      workdir: folder in which the run keeps its state. Killed at any moment and called
        again with the same arguments, `compress` goes on where it was and writes the
        same file; called after it has finished, it trains nothing. A `tf.data.Dataset`
        must give the same batches in the same order each time for that. By default
        nothing is kept.
      keep_posterior: whether to write Q of all weights, too, as `.posterior.npz` beside
        the file; see `CodedPosterior`.
      architecture: whether the file says how the network is built. Without it the file
        is smaller, and whoever loads it needs the network: `load(path, model=network)`.
      record: whether to write how the file was made, `recipe` and versions, as
        `.record.json` beside the file.
      overwrite: whether existing files may be replaced.
      verbose: 0 for silence, 1 for progress bars.

    Returns:
      A `CompressionResult`.

    Raises:
      ValueError: if an argument is out of range, the data is not finite, the target
        cannot be met, or the model has no loss.
      FileExistsError: if `path` exists and `overwrite` is false.
    """
    recipe = recipe or Recipe()
    outputs = [pathlib.Path(path)]
    if keep_posterior:
        outputs.append(outputs[0].with_suffix(".posterior.npz"))
    if record:
        outputs.append(outputs[0].with_suffix(".record.json"))
    made, begun = outputs, False
    if workdir is not None:
        folder = pathlib.Path(workdir)
        suffixes = ["".join(output.suffixes[-2:]) for output in outputs[1:]]
        made = [folder / f"coded{suffix}" for suffix in (".miracle", *suffixes)]
        begun = any((folder / name).exists() for name in ("state.npz", "result.json"))
    for output, source in zip(outputs, made, strict=True):
        # What a run has made before it may make again, also in its own folder.
        to_come = made is not outputs and source == output and not output.exists()
        if not (to_come or (begun and _is_copied(source, output))):
            miracle_file.check_output(output, overwrite)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a Keras model. Received: {type(model).__name__}"
        )
    net = _copy(model, recipe.seed)
    description = plain_architecture(model)
    loss_weights = None
    if loss is None and model.compiled:
        loss = model.loss
        loss_weights = model.get_compile_config().get("loss_weights")
    if distill:
        hard = model.loss if model.compiled else None
        loss = soft_loss(hard) if loss is hard else loss
        # Of `model`: the labels of a dataset are made as it is read, and `net` changes.
        data = relabel(data, model, hard)
        validation_data = relabel(validation_data, model, hard)
    if isinstance(validation_data, tf.data.Dataset):
        if validation_data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("`validation_data` never ends. Leave out its `repeat()`.")
    elif validation_data is not None:
        validation_data = _examples("validation_data", validation_data)
    if loss is None:
        raise ValueError(
            "`loss` is missing: compile the model with a loss first, or pass one."
        )
    examples = _training_batches(data, recipe)
    batches = _shifted(examples, recipe) if recipe.max_shift else examples
    if target is not None:
        size = block_size_for(
            net,
            target,
            recipe,
            rules=rules,
            metadata=metadata,
            architecture=architecture,
        )
        recipe = dataclasses.replace(recipe, block_size=size)
    settings = {
        "recipe": dataclasses.asdict(recipe),
        "rules": rules,
        "metadata": metadata,
        "keep_posterior": keep_posterior,
        "architecture": architecture,
        "record": record,
        "loss": _description(loss),
        "loss_weights": loss_weights,
        "metrics": _description(metrics),
        "model": architecture_by_place(model),
        "weights": checksum(net.get_weights()),
        "data": checksum(data),
        "validation_data": checksum(validation_data),
    }
    layout = {
        "block_size": recipe.block_size,
        "rules": rules,
        "seed": recipe.seed,
    }

    def compiled(network, learning_rate=1e-3):
        network.compile(
            keras.optimizers.Adam(learning_rate),
            loss,
            loss_weights=loss_weights,
            metrics=metrics,
            steps_per_execution=STEPS_PER_EXECUTION,
            # With XLA where there is an accelerator. On a CPU, where it makes
            # convolutions slow, only the posterior is compiled.
            jit_compile="auto",
        )
        return network

    def decoded():
        # Under the names that the layers had, by which losses may be given.
        found = decode(made[0], max_weights=None)
        found = dataclasses.replace(found, architecture=description)
        return compiled(to_network(found))

    def schedule(learning_rate, steps):
        if recipe.decay == "constant" or not steps:
            return learning_rate
        return keras.optimizers.schedules.CosineDecay(learning_rate, steps)

    def evaluate(stage, network):
        if validation_data is not None:
            run.evaluate(stage, lambda: _evaluate(network, validation_data, recipe))

    with Run(workdir, settings, verbose) as run:
        if run.result is None:
            # The callback is made before anything trains: it checks its arguments.
            callback = CompressionCallback(
                made[0],
                recipe.blocks_per_round,
                recipe.finetune_steps,
                selection=recipe.selection,
                overwrite=overwrite or workdir is not None,
                recalibration_data=_inputs(examples, recipe),
                posterior_path=made[1] if keep_posterior else None,
                metadata=metadata,
                architecture=architecture,
                record_path=made[-1] if record else None,
                record={"recipe": recipe.changes()},
                verbose=verbose,
            )
            evaluate("original", compiled(net))
            if recipe.warmup_steps:
                steps = recipe.warmup_steps
                warmup = VariationalModel(net, "deterministic", l2=recipe.l2, **layout)
                compiled(warmup, schedule(recipe.warmup_learning_rate, steps))
                run.train(warmup, "warmup", batches, steps, callbacks)
                evaluate("warmup", warmup)
                warmup.materialize()
            steps = recipe.train_steps
            learning_rate, finetune_learning_rate = recipe.learning_rates
            variational = VariationalModel(net, **recipe.posterior_options(), **layout)
            compiled(variational, schedule(learning_rate, steps))
            run.train(variational, "variational", batches, steps, callbacks)
            evaluate("posterior_mean", variational)
            evaluate("posterior_sample", compiled(variational.materialize(sample=True)))
            compiled(variational, finetune_learning_rate)
            steps = callback.steps_needed(variational)
            run.train(variational, "coding", batches, steps, callbacks, callback)
            evaluate("decoded", decoded())
            run.finish({"history": callback.history})
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
    architecture: bool = True,
) -> int:
    """The smallest block size with which the file of `net` is no larger than `target`.

    Args:
      net: a built Keras model.
      target, rules, metadata, architecture: see `compress`.
      recipe: `block_bits` and what else of it decides the size.

    Raises:
      ValueError: if `target` cannot be read or cannot be met.
    """
    recipe = recipe or Recipe()
    probe = VariationalModel(
        net,
        block_size=sum(int(np.prod(v.shape)) for v in net.weights),
        block_bits=recipe.block_bits,
        codebook=recipe.codebook,
        rules=rules,
        seed=recipe.seed,
    )
    posterior = probe.block_posterior
    posterior.finalize_coding_scale()
    posterior.fix([0], [0])
    file = to_file(probe, metadata, architecture)
    # What is stored may compress less after training than it does now: as noise.
    noise = np.random.default_rng(0)
    file = dataclasses.replace(file, stored=[_noise(v, noise) for v in file.stored])
    fixed = len(file.to_bytes()) - file.payload_bytes + _SLACK
    budget = target_bytes(target, file.num_weights)
    num_blocks = (budget - fixed) * 8 // max(recipe.block_bits, 1)
    if num_blocks < 1:
        raise ValueError(
            f"`target` cannot be met: {target!r} is {budget} bytes, but architecture, "
            f"layout and stored variables alone may take {fixed}, and one block takes "
            f"{recipe.block_bits} bits."
        )
    return -(-posterior.layout.num_effective // num_blocks)


def _noise(stored, random):
    """A stored variable of the same kind that does not compress."""
    if isinstance(stored, Levels):
        least, most = (0 if stored.squared else -127), 128
        levels = random.integers(least, most, stored.shape, np.int8)
        return dataclasses.replace(stored, levels=levels)
    noise = np.frombuffer(random.bytes(stored.nbytes), stored.dtype)
    return noise.reshape(stored.shape)


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


def _copy(model, seed):
    """A copy of the network, made as the file will make it.

    Its layers with noise of their own (dropout) start from `seed`.
    """
    if not model.built:
        raise ValueError(
            f"`model` ({model.name!r}) has no weights yet. Build it first."
        )
    copy = check_network(model)
    if posteriors(model):
        raise ValueError(
            f"`model` ({model.name!r}) has a posterior already. Code it with `fit` and "
            "a CompressionCallback, or pass a plain network, such as what "
            "`VariationalModel.materialize` returns."
        )
    set_weights(copy, [keras.ops.convert_to_numpy(v) for v in plain_weights(model)])
    generators = [g for layer in walk(copy) for g in seed_generators(layer)]
    states = np.random.SeedSequence(seed).generate_state(len(generators))
    for generator, state in zip(generators, states, strict=True):
        generator.state.assign([int(state) % 2**31, 0])
    return copy


def _examples(name, data):
    if not (isinstance(data, tuple | list) and len(data) in (2, 3)):
        raise ValueError(
            f"`{name}` must be a tuple (x, y) of arrays or a batched tf.data.Dataset. "
            f"Received: {type(data).__name__}"
        )
    return tuple(as_arrays(part) for part in data if part is not None)


def _is_copied(source, copy):
    both = source.is_file() and copy.is_file()
    return both and source.read_bytes() == copy.read_bytes()


def checksum(data) -> list[int] | str:
    """CRC-32 of each array of a structure; of a `tf.data.Dataset`, its element spec."""
    if isinstance(data, tf.data.Dataset):
        return str(data.element_spec)
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(data) if leaf is not None]
    # Arrays of objects (strings) hold addresses.
    leaves = [v.astype(str) if v.dtype.kind == "O" else v for v in leaves]
    return [zlib.crc32(v.tobytes()) for v in leaves]


def _description(objects):
    """What a loss or metrics are, as text."""
    try:
        return json.dumps(keras.saving.serialize_keras_object(objects), default=str)
    except TypeError:  # a callable that Keras does not know
        return type(objects).__name__


def _training_batches(data, recipe):
    """Returns a function, (phase, step) -> the endless batches from there on."""
    if isinstance(data, tf.data.Dataset):
        if not int(data.cardinality()):
            raise ValueError("`data` is an empty tf.data.Dataset.")
        return lambda phase, step: data.repeat().skip(step)
    data = _examples("data", data)
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(data)]
    count = len(leaves[0])
    if not count or any(len(leaf) != count for leaf in leaves):
        raise ValueError(
            "The arrays in `data` must have the same number of examples, at least one. "
            f"Received shapes: {[leaf.shape for leaf in leaves]}"
        )
    for leaf in leaves:
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise ValueError(
                f"`data` holds values that are not finite (an array of shape "
                f"{leaf.shape}). Remove them first."
            )
    arrays = tf.nest.pack_sequence_as(data, [tf.constant(leaf) for leaf in leaves])
    # Nothing here takes long enough to be tuned, and whoever deletes an iterator may
    # have to wait for the thread that tunes it to wake up, for up to a minute.
    options = tf.data.Options()
    options.autotune.enabled = False

    def batches(phase, step):
        epoch, offset = divmod(step * recipe.batch_size, count)

        def order(epoch):
            # A function of the epoch's number, with no state.
            return tf.data.Dataset.from_tensor_slices(
                tf.random.experimental.stateless_shuffle(
                    tf.range(count), _seed(recipe, phase, epoch)
                )
            )

        def gather(index):
            return tf.nest.map_structure(lambda a: tf.gather(a, index), arrays)

        return (
            tf.data.Dataset.counter(epoch)
            .flat_map(order)
            .skip(offset)
            .batch(recipe.batch_size, drop_remainder=True)
            .map(gather)
            .prefetch(2 * STEPS_PER_EXECUTION)
            .with_options(options)
        )

    return batches


def _shifted(batches, recipe):
    """The same with images shifted at random, anew in each step."""
    check_shift(recipe.max_shift, batches(PHASES[0], 0).element_spec[0])

    def shifted(phase, step):
        def shift(step, example):
            x, *labels = example
            # Numbers below 0: the orders of epochs have those from 0 on.
            seed = _seed(recipe, phase, -1 - step)
            return random_shift(x, recipe.max_shift, seed), *labels

        numbered = batches(phase, step).enumerate(step)
        return numbered.map(shift).prefetch(STEPS_PER_EXECUTION)

    return shifted


def _seed(recipe, phase, number):
    """A seed for each phase and number, which may be negative."""
    seed = np.uint64(recipe.seed).astype(np.int64)
    return [seed, number * len(PHASES) + PHASES.index(phase)]


def _inputs(batches, recipe):
    if not recipe.recalibration_steps:
        return None
    steps = batches("coding", 0).take(recipe.recalibration_steps)
    return steps.map(lambda x, *labels: x)


def _evaluate(network, data, recipe):
    if isinstance(data, tf.data.Dataset):
        return network.evaluate(data, verbose=0, return_dict=True)
    x, y, *weights = data
    return network.evaluate(
        x,
        y,
        batch_size=max(recipe.batch_size, 256),
        sample_weight=weights[0] if weights else None,
        verbose=0,
        return_dict=True,
    )
