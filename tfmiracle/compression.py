"""The whole way in one call: train under the budget, code, write the file."""

import dataclasses
import os
import re
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle import miracle_file
from tfmiracle.callbacks import CompressionCallback
from tfmiracle.miracle_file import MiracleFile
from tfmiracle.models import VariationalModel, plain_weights
from tfmiracle.network import build_network, load, plain_architecture, to_file
from tfmiracle.recipe import Recipe

# Optimizer steps between two returns to Python.
_STEPS_PER_EXECUTION = 10
# What settings and lengths may take more in the file than in the probe for its size.
_SLACK = 64
# Each phase of a run shuffles the data in its own order.
_PHASES = ("warmup", "variational", "coding")


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
    """

    path: str
    model: keras.Model
    file: MiracleFile
    file_bytes: int
    stages: dict[str, dict[str, float]]
    history: list[dict[str, float]]

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
    hashing: dict[str, int] | None = None,
    stored: Sequence[str] | None = None,
    loss=None,
    metrics: Sequence | None = None,
    validation_data=None,
    metadata: dict | None = None,
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
      hashing, stored: see `VariationalModel`.
      loss: loss as for `compile`; by default that of `model`, with its loss weights.
      metrics: metrics as for `compile`.
      validation_data: `(x, y)` or a `tf.data.Dataset`, evaluated after every stage.
      metadata: further entries for the file's metadata; anything JSON can say.
      overwrite: whether an existing file may be replaced.
      verbose: 0 for silence, 1 for progress bars.

    Returns:
      A `CompressionResult`.

    Raises:
      ValueError: if an argument is out of range, the data is not finite, the target
        cannot be met, or the model has no loss.
      FileExistsError: if `path` exists and `overwrite` is false.
    """
    recipe = recipe or Recipe()
    miracle_file.check_output(path, overwrite)
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a Keras model. Received: {type(model).__name__}"
        )
    net = _copy(model)
    if validation_data is not None and not isinstance(validation_data, tf.data.Dataset):
        validation_data = _examples("validation_data", validation_data)
    loss_weights = None
    if loss is None and model.compiled:
        loss = model.loss
        loss_weights = model.get_compile_config().get("loss_weights")
    if loss is None:
        raise ValueError(
            "`loss` is missing: compile the model with a loss first, or pass one."
        )
    batches, steps_per_epoch = _training_batches(data, recipe)
    if target is not None:
        size = block_size_for(
            net, target, recipe, hashing=hashing, stored=stored, metadata=metadata
        )
        recipe = dataclasses.replace(recipe, block_size=size)
    callback = CompressionCallback(
        path,
        recipe.blocks_per_round,
        recipe.finetune_steps,
        selection=recipe.selection,
        overwrite=overwrite,
        metadata={"recipe": recipe.changes(), **(metadata or {})},
        verbose=verbose,
    )
    options = {
        "block_size": recipe.block_size,
        "hashing": hashing,
        "stored": stored,
        "seed": recipe.seed,
    }
    stages = {}

    def train(trained, phase, steps, schedule, callbacks=()):
        trained.compile(
            keras.optimizers.Adam(schedule),
            loss,
            loss_weights=loss_weights,
            metrics=metrics,
            steps_per_execution=_STEPS_PER_EXECUTION,
        )
        if not steps:
            return
        # A progress bar for about every pass over the data, but ten at most.
        epochs = 1 if callbacks else min(10, max(1, steps // steps_per_epoch))
        history = trained.fit(
            batches(phase),
            epochs=epochs,
            steps_per_epoch=-(-steps // epochs),
            shuffle=False,
            verbose=0 if callbacks else verbose,
            callbacks=list(callbacks),
        )
        if not np.isfinite(history.history["loss"][-1]):
            raise ValueError(
                f"The loss is {history.history['loss'][-1]} after {phase} training. "
                "Lower the learning rate, or look for extreme values in the data."
            )

    def evaluate(stage, network):
        if validation_data is None:
            return
        if not network.compiled:
            network.compile(loss=loss, loss_weights=loss_weights, metrics=metrics)
        stages[stage] = _evaluate(network, validation_data, recipe.batch_size)

    def schedule(learning_rate, steps):
        if recipe.decay == "constant" or not steps:
            return learning_rate
        return keras.optimizers.schedules.CosineDecay(learning_rate, steps)

    def say(text):
        if verbose:
            print(text, flush=True)

    evaluate("original", net)
    if recipe.warmup_steps:
        say(f"Deterministic training, {recipe.warmup_steps} steps")
        steps = recipe.warmup_steps
        warmup = VariationalModel(net, "deterministic", **options)
        train(warmup, "warmup", steps, schedule(recipe.warmup_learning_rate, steps))
        evaluate("warmup", warmup)
        warmup.materialize()

    variational = VariationalModel(
        net,
        block_bits=recipe.block_bits,
        kl_bits=recipe.kl_bits,
        codebook=recipe.codebook,
        warm_start=recipe.warm_start,
        log_scale=recipe.log_scale,
        quota_rate=recipe.quota_rate,
        log_scale_rate=recipe.log_scale_rate,
        **options,
    )
    steps = recipe.train_steps
    say(f"Variational training, {steps} steps")
    train(variational, "variational", steps, schedule(recipe.learning_rate, steps))
    evaluate("posterior_mean", variational)
    evaluate("posterior_sample", variational.materialize(sample=True))

    steps = max(1, callback.steps_needed(variational))
    say(f"Coding and fine-tuning, {steps} steps")
    train(variational, "coding", steps, recipe.finetune_learning_rate, [callback])

    decoded = load(path)
    decoded.compile(loss=loss, loss_weights=loss_weights, metrics=metrics)
    evaluate("decoded", decoded)
    return CompressionResult(
        os.fspath(path),
        decoded,
        callback.file,
        callback.file_bytes,
        stages,
        callback.history,
    )


def block_size_for(
    net: keras.Model,
    target: str | int,
    recipe: Recipe | None = None,
    *,
    hashing: dict[str, int] | None = None,
    stored: Sequence[str] | None = None,
    metadata: dict | None = None,
) -> int:
    """The smallest block size with which the file of `net` is no larger than `target`.

    Args:
      net: a built Keras model.
      target, hashing, stored, metadata: see `compress`.
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
        hashing=hashing,
        stored=stored,
        seed=recipe.seed,
    )
    posterior = probe.block_posterior
    posterior.finalize_coding_scale()
    posterior.fix([0], [0])
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
    num_blocks = (budget - fixed) * 8 // max(recipe.block_bits, 1)
    if num_blocks < 1:
        raise ValueError(
            f"`target` cannot be met: {target!r} is {budget} bytes, but architecture, "
            f"layout and stored variables alone may take {fixed}, and one block takes "
            f"{recipe.block_bits} bits."
        )
    return -(-posterior.layout.num_effective // num_blocks)


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


def _copy(model):
    """A copy of the network, made as the file will make it."""
    if not model.built:
        raise ValueError(
            f"`model` ({model.name!r}) has no weights yet. Build it first."
        )
    copy = build_network(plain_architecture(model))
    copy.set_weights([keras.ops.convert_to_numpy(v) for v in plain_weights(model)])
    return copy


def _examples(name, data):
    if not (isinstance(data, tuple | list) and len(data) in (2, 3)):
        raise ValueError(
            f"`{name}` must be a tuple (x, y) of arrays or a batched tf.data.Dataset. "
            f"Received: {type(data).__name__}"
        )
    return tuple(data)


def _training_batches(data, recipe):
    """Returns a function, phase -> endless batches, and the steps of an epoch."""
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        if not cardinality:
            raise ValueError("`data` is an empty tf.data.Dataset.")
        return lambda phase: data.repeat(), cardinality if cardinality > 0 else 1000
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

    def batches(phase):
        # The order of each epoch is a function of its number, with no state.
        seed = np.uint64(recipe.seed).astype(np.int64)
        stream = _PHASES.index(phase)

        def order(epoch):
            return tf.data.Dataset.from_tensor_slices(
                tf.random.experimental.stateless_shuffle(
                    tf.range(count), seed=[seed, epoch * len(_PHASES) + stream]
                )
            )

        def gather(index):
            return tf.nest.map_structure(lambda a: tf.gather(a, index), arrays)

        return (
            tf.data.Dataset.counter()
            .flat_map(order)
            .batch(recipe.batch_size, drop_remainder=True)
            .map(gather)
            .prefetch(2 * _STEPS_PER_EXECUTION)
        )

    return batches, max(1, count // recipe.batch_size)


def _evaluate(network, data, batch_size):
    if isinstance(data, tf.data.Dataset):
        return network.evaluate(data, verbose=0, return_dict=True)
    return network.evaluate(
        *data, batch_size=max(batch_size, 256), verbose=0, return_dict=True
    )
