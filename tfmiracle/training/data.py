"""What `compress` takes as data, and the batches that it makes of it."""

import itertools
import threading
import types
import zlib

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.structures import as_arrays
from tfmiracle.training.augmentation import augment, check_augmentation
from tfmiracle.training.run import PHASES, STEPS_PER_EXECUTION


def read_data(
    name: str,
    data,
    net: keras.Model,
    labelled: bool = True,
    *,
    once: bool = False,
    ends: bool = False,
):
    """Brings examples of any kind that is accepted into one of two.

    Args:
      name: of the argument, for errors.
      data: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays or what NumPy makes
        arrays of, or of structures of them; a batched `tf.data.Dataset` of such
        tuples; a `keras.utils.PyDataset`; a generator of batches. Where no labels are
        needed, `x` or `(x,)` will do.
      net: the network that takes `x`.
      labelled: whether labels are needed.
      once: whether it is enough to have the batches once, as those of a generator.
      ends: whether the batches must come to an end.

    Returns:
      A tuple of structures of arrays with the same number of examples, or a
      `tf.data.Dataset` of tuples.

    Raises:
      ValueError: if it is of another kind, has no examples or no end, no labels where
        they are needed, or values that are not finite.
    """
    if isinstance(data, keras.utils.PyDataset):
        data = _numbered_batches(name, data)
    elif isinstance(data, types.GeneratorType):
        if not once:
            raise ValueError(
                f"`{name}` is a generator, whose batches come only once; evaluations "
                "and a `workdir` need them again. Pass arrays, a tf.data.Dataset or a "
                "keras.utils.PyDataset."
            )
        data = _generated_batches(name, data)
    if isinstance(data, tf.data.Dataset):
        if ends and data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(f"`{name}` never ends. Leave out its `repeat()`.")
        return _read_dataset(name, data, net, labelled)
    return _read_arrays(name, data, net, labelled)


def checksum(data) -> list[int] | str:
    """CRC-32 of each array of a structure; of a `tf.data.Dataset`, its element spec."""
    if isinstance(data, tf.data.Dataset):
        return str(data.element_spec)
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(data) if leaf is not None]
    # Arrays of objects (strings) hold addresses.
    leaves = [v.astype(str) if v.dtype.kind == "O" else v for v in leaves]
    return [zlib.crc32(v.tobytes()) for v in leaves]


def training_batches(data, recipe):
    """Returns a function, (phase, step) -> the endless batches from there on.

    Args:
      data: see `read_data`, whose result it is.
      recipe: size of the batches that are made of arrays, and their order.
    """
    if isinstance(data, tf.data.Dataset):
        return lambda phase, step: data.repeat().skip(step)
    count = len(tf.nest.flatten(data)[0])
    arrays = tf.nest.map_structure(tf.constant, data)
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


def augmented(batches, recipe):
    """The same with images augmented as the recipe says, anew in each step."""
    if not (recipe.max_shift or recipe.flip):
        return batches
    check_augmentation(recipe, batches(PHASES[0], 0).element_spec[0])

    def augmented(phase, step):
        def change(step, example):
            x, *labels = example
            # Numbers below 0: the orders of epochs have those from 0 on.
            seed = _seed(recipe, phase, -1 - step)
            return augment(x, recipe.max_shift, recipe.flip, seed), *labels

        numbered = batches(phase, step).enumerate(step)
        return numbered.map(change).prefetch(STEPS_PER_EXECUTION)

    return augmented


def recalibration_inputs(batches, recipe):
    """Inputs for `recalibrate`, None if it is not to be done."""
    if not recipe.recalibration_steps:
        return None
    steps = batches("coding", 0).take(recipe.recalibration_steps)
    return steps.map(lambda x, *labels: x)


def _seed(recipe, phase, number):
    """A seed for each phase and number, which may be negative."""
    seed = np.uint64(recipe.seed).astype(np.int64)
    return [seed, number * len(PHASES) + PHASES.index(phase)]


# Arrays.


def _read_arrays(name, data, net, labelled):
    if isinstance(data, list) and labelled:  # without labels it is a list of inputs
        data = tuple(data)
    parts = data if isinstance(data, tuple) else (data,)
    if not 1 + labelled <= len(parts) <= 3 or (labelled and parts[1] is None):
        raise ValueError(
            f"`{name}` must be a tuple (x, y) of arrays, a batched tf.data.Dataset of "
            "such pairs, a keras.utils.PyDataset or a generator; without labels only "
            "with `distill=True` or losses by `add_loss`. "
            f"Received: {_kind(data)}"
        )
    if len(parts) > 1 and parts[1] is None:
        parts = parts[:1]
    parts = tuple(
        _arrays(f"{part} of `{name}`", value)
        for part, value in zip(("x", "y", "sample weights"), parts)
        if value is not None
    )
    inputs, taken = len(tf.nest.flatten(parts[0])), len(_inputs_of(net))
    if taken and inputs != taken:
        raise ValueError(
            f"x of `{name}` holds {inputs} arrays, and {net.name!r} takes {taken}. A "
            "list of the examples' arrays is made one array by `np.stack`."
        )
    leaves = tf.nest.flatten(parts)
    count = len(leaves[0]) if leaves else 0
    if not count or any(len(leaf) != count for leaf in leaves):
        raise ValueError(
            f"The arrays in `{name}` must have the same number of examples, at least "
            f"one. Received shapes: {[leaf.shape for leaf in leaves]}"
        )
    for leaf in leaves:
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise ValueError(
                f"`{name}` holds values that are not finite (an array of shape "
                f"{leaf.shape}). Remove them first."
            )
    return parts


def _arrays(what, value):
    try:
        arrays = as_arrays(value)
    except Exception as error:  # of whatever object was asked for its array
        raise ValueError(
            f"{what} cannot be made an array of NumPy: {error} Received: {_kind(value)}"
        ) from error
    for leaf in tf.nest.flatten(arrays):
        is_text = leaf.dtype.kind == "O" and all(
            isinstance(v, str | bytes) for v in leaf.reshape(-1)
        )
        if leaf.ndim == 0 or not (leaf.dtype.kind in "fiubcSU" or is_text):
            raise ValueError(
                f"{what} must be arrays of numbers, one row for each example: sparse "
                "and ragged ones made dense, rows of one length. "
                f"Received: {leaf.dtype} of shape {leaf.shape}, from {_kind(value)}"
            )
    return arrays


def _kind(data):
    if isinstance(data, tuple | list):
        inner = ", ".join(dict.fromkeys(_kind(part) for part in data[:4]))
        return f"{type(data).__name__} of {len(data)} ({inner})"
    return type(data).__name__


def _inputs_of(net):
    """The symbolic inputs of a functional or sequential model, else none."""
    return keras.tree.flatten(getattr(net, "inputs", None) or [])


# Datasets.


def _read_dataset(name, data, net, labelled):
    if not int(data.cardinality()):
        raise ValueError(f"`{name}` is an empty tf.data.Dataset.")
    if not isinstance(data.element_spec, tuple):
        data = data.map(lambda x: (x,))
    x, *rest = data.element_spec
    if labelled and not rest:
        raise ValueError(
            f"`{name}` holds inputs alone; it must be a tuple (x, y) that each batch "
            "is. Without labels `distill=True` or losses by `add_loss` can be trained."
        )
    specs, inputs = tf.nest.flatten(x), _inputs_of(net)
    for spec, taken in zip(specs, inputs) if len(specs) == len(inputs) else ():
        shape = getattr(spec, "shape", tf.TensorShape(None))
        if shape.rank == len(taken.shape) - 1 and shape.is_compatible_with(
            taken.shape[1:]
        ):
            if shape.rank and shape[0] is None:
                continue  # a batch of rows to which Keras adds an axis
            raise ValueError(
                f"`{name}` is a tf.data.Dataset of single examples: inputs of shape "
                f"{tuple(shape)}, where {net.name!r} takes batches "
                f"{tuple(taken.shape)}. Batch it: `dataset.batch(64)`."
            )
    return data


def _numbered_batches(name, data):
    """The batches of a `PyDataset`, in the order of their numbers."""
    count = data.num_batches
    if count == 0:
        raise ValueError(f"`{name}` is an empty PyDataset.")
    numbers = itertools.count if count is None else lambda: range(count)
    first = [data[i] for i in range(2 if count is None else min(count, 2))]
    batches = tf.data.Dataset.from_generator(
        lambda: (_as_element(data[i]) for i in numbers()),
        output_signature=_signature(first),
    )
    size = tf.data.INFINITE_CARDINALITY if count is None else count
    return batches.apply(tf.data.experimental.assert_cardinality(size))


def _generated_batches(name, data):
    """The batches of a generator, each once."""
    first = list(itertools.islice(data, 2))
    if not first:
        raise ValueError(f"`{name}` is a generator that gives nothing.")
    batches = map(_as_element, itertools.chain(first, data))
    lock = threading.Lock()  # the last phase may still be fetching ahead

    def rest():
        while True:
            with lock:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    return tf.data.Dataset.from_generator(rest, output_signature=_signature(first))


def _as_element(batch):
    batch = batch if isinstance(batch, tuple | list) else (batch,)
    return tuple(as_arrays(part) for part in batch if part is not None)


def _signature(batches):
    """What some batches have in common; their number of examples may always differ."""

    def spec(*arrays):
        sizes = zip(*(a.shape[1:] for a in arrays), strict=True)
        shape = [size[0] if len(set(size)) == 1 else None for size in sizes]
        return tf.TensorSpec([None, *shape], arrays[0].dtype)

    return tf.nest.map_structure(spec, *map(_as_element, batches))
