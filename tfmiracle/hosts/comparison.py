"""Whether networks compute the same, and if not, the first layer that does not."""

import contextlib
import functools
import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.hosts.models import VariationalModel
from tfmiracle.hosts.passes import state_kept, wrapped_calls
from tfmiracle.keras_internals import children, copy_mask, seed_generators
from tfmiracle.posteriors.block_posterior import BlockPosterior

# Rows of a batch: so many, or fewer if inputs are large. All outputs are kept for them.
_ROWS = 32
_NUMBERS = 1 << 18
# Differences up to this many roundings of the largest number are none.
_ROUNDINGS = 16
# What dimensions that a network leaves open are in a batch that is made up.
_OPEN_SIZES = 16, 64


def first_difference(
    model: keras.Model, copies: Sequence[keras.Model], batch=None
) -> keras.Layer | None:
    """The first layer of `model` whose outputs in a copy are others, in inference.

    Each layer gets in the copies what it gets in `model`, so that the layer found is
    the one that differs. The model runs twice, and outputs that differ from themselves,
    as random ones do, are not compared. What passes change is put back.

    Args:
      model: a built Keras model, which may have posteriors.
      copies: plain networks made from it, with its weights.
      batch: inputs of the model. By default made up by the shapes that it takes; where
        they are not known, or it cannot run on that, nothing is compared.
    """
    for inputs in _made_up(model) if batch is None else _rows_of(batch):
        calls = []

        def record(layer, output, calls=calls):
            calls.append((layer, output))
            return output

        try:
            _run(model, inputs, record)
        except Exception:
            if inputs is batch:
                raise
            continue
        own = _replay(model, inputs, calls, same=True)
        generators = _generators(model)
        for copy in copies:
            found = []
            with contextlib.suppress(Exception):  # seen by what is missing then
                _replay(copy, inputs, calls[: len(own)], generators, found)
            for (layer, _), here, there in zip(calls, own, found):
                # What differs from itself by more is random.
                if any(o <= _ROUNDINGS < d - 4 * o for o, d in zip(here, there)):
                    return layer
            if len(found) < len(own):
                return calls[len(found)][0]
        break
    return None


def _run(network, inputs, see, generators=()):
    """A pass in which `see(layer, output)` says what each layer returns.

    Inner layers come before outer ones. What runs in a compiled function is not seen.
    """

    def watch(layer, call):
        @functools.wraps(call)
        def watched(*args, **kwargs):
            output = call(*args, **kwargs)
            return see(layer, output) if tf.executing_eagerly() else output

        return watched

    with state_kept(network), wrapped_calls(_layers(network), watch):
        for mine, other in zip(_generators(network), generators, strict=False):
            mine.state.assign(other.state)
        network(inputs, training=False)


def _replay(network, inputs, calls, generators=(), distances=None, same=False):
    """Distances of outputs from those of `calls`, by which they are replaced.

    As far as there are any and, if `same`, they are of the same layers.
    """
    distances = [] if distances is None else distances
    ended = False

    def compare(layer, output):
        nonlocal ended
        number = len(distances)
        ended |= number == len(calls) or (same and calls[number][0] is not layer)
        if ended:
            return output
        distances.append(_distances(calls[number][1], output))
        return _replaced(output, calls[number][1])

    _run(network, inputs, compare, generators)
    return distances


def _layers(network):
    """All layers, in an order in which those of posteriors change nothing."""
    found = {}

    def collect(layer):
        if id(layer) not in found and not isinstance(layer, BlockPosterior):
            found[id(layer)] = layer
            for child in children(layer):
                collect(child)

    collect(network)
    return [v for v in found.values() if not isinstance(v, VariationalModel)]


def _generators(network):
    return [g for layer in _layers(network) for g in seed_generators(layer)]


def _tensors(output):
    leaves = tf.nest.flatten(output, expand_composites=True)
    return [x for x in leaves if tf.is_tensor(x)]


def _distances(expected, output) -> list[float]:
    """Of each tensor, the largest difference, in roundings of the largest number."""
    expected, output = _tensors(expected), _tensors(output)
    if len(expected) != len(output):
        return [np.inf]
    return [_distance(a.numpy(), b.numpy()) for a, b in zip(expected, output)]


def _distance(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    rounding = {8: 2.0**-52, 4: 2.0**-23, 2: 2.0**-8}.get(a.dtype.itemsize, 0.125)
    if a.dtype.kind not in "fcV":  # V: bfloat16 and the like
        return 0.0 if np.array_equal(a, b) else np.inf
    if a.dtype.kind == "V":
        a, b = a.astype(np.float32), b.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | ((a != a) & (b != b))
        if np.all(same):
            return 0.0
        largest = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
        found = np.max(np.abs(a - b)[~same].astype(np.float64)) / (rounding * largest)
    return np.inf if np.isnan(found) else float(found)


def _replaced(output, expected):
    """An output with the values of another one, and its own masks."""
    leaves = tf.nest.flatten(output, expand_composites=True)
    values = _tensors(expected)
    if len(_tensors(output)) != len(values):
        return output
    values = iter(values)
    leaves = [
        copy_mask(x, tf.identity(next(values))) if tf.is_tensor(x) else x
        for x in leaves
    ]
    return tf.nest.pack_sequence_as(output, leaves, expand_composites=True)


def _rows_of(batch):
    """A few rows, and, for networks that take a whole batch alone, all of them."""
    with contextlib.suppress(AttributeError, TypeError):  # what has no rows
        leaves = tf.nest.flatten(batch)
        size = max(math.prod(n or 1 for n in x.shape[1:]) for x in leaves)
        rows = min(_ROWS, _NUMBERS // size + 1)
        yield tf.nest.map_structure(lambda x: x[:rows], batch)
    yield batch


def _made_up(model):
    """Batches that may suit a model, those first that tell more."""
    inputs = _inputs(model.net if isinstance(model, VariationalModel) else model)
    if inputs is None:
        return
    for size in _OPEN_SIZES:
        for rng in (np.random.default_rng(0), None):
            specs = [_random(x, size, rng) for x in tf.nest.flatten(inputs)]
            yield tf.nest.pack_sequence_as(inputs, specs)


def _random(spec, size, rng):
    """Numbers of a shape and dtype, with `size` for open dimensions; else zeros."""
    first, *rest = spec.shape
    shape = [first or 2, *(size if n is None else n for n in rest)]
    dtype = tf.as_dtype(spec.dtype)
    if dtype == tf.string:
        return tf.fill(shape, "a")
    if rng is None:
        return tf.zeros(shape, dtype)
    floating = dtype.is_floating
    return tf.cast(
        rng.normal(size=shape) if floating else rng.integers(0, 2, shape), dtype
    )


def _inputs(net):
    """A `keras.KerasTensor` for each input; None if they are not known."""
    with contextlib.suppress(AttributeError, ValueError):
        return net.input
    config = net.get_build_config() or {}
    shape = config.get("input_shape")
    return _with_shapes(shape) if shape else None


def _with_shapes(shape):
    if isinstance(shape, dict):
        return {key: _with_shapes(value) for key, value in shape.items()}
    if all(n is None or isinstance(n, int) for n in shape):
        return keras.KerasTensor(tuple(shape))
    return [_with_shapes(value) for value in shape]
