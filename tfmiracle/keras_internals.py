"""All that the package uses of Keras beyond its documented interface.

Each of these has a test in `tests/test_keras_internals.py` that tells when Keras
changes. Nothing else in the package touches a name of Keras with an underscore.
"""

from collections.abc import Callable, Iterator

import keras


def walk(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The layer and every layer inside it, each once."""
    return layer._flatten_layers()


def children(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that a layer holds itself."""
    return layer._layers


def seed_generators(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """Those of the layer itself, not of the layers inside it."""
    return layer._seed_generators


def global_seed_generator() -> keras.random.SeedGenerator:
    """Where `keras.random` takes seeds from that it is not given."""
    return keras.src.random.seed_generator.global_seed_generator()


def copy_mask(source, target):
    """Gives a tensor the mask that Keras has noted at another; returns the tensor."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None:
        target._keras_mask = mask
    return target


def own_trainable_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Those of the layer itself that are tracked as trainable."""
    return list(layer._trainable_variables)


def track_as_not_trainable(layer: keras.Layer, variable: keras.Variable) -> None:
    """Tracks a variable anew as one that `layer.trainable = True` leaves alone."""
    layer._untrack_variable(variable)
    variable.trainable = False
    layer._track_variable(variable)


def has_losses(layer: keras.Layer) -> bool:
    """Whether `add_loss` was called on the layer since the outermost call began."""
    return bool(layer._losses)


def rematerialization(layer: keras.Layer) -> str | None:
    """Mode of the `keras.RematScope` that the layer was made in."""
    return getattr(layer._remat_mode, "mode", None)


def stateless_scope() -> keras.StatelessScope | None:
    """The innermost `keras.StatelessScope` that is open."""
    return keras.src.backend.get_stateless_scope()


def stored_dtype(variable: keras.Variable) -> str:
    """The dtype of the values; `variable.dtype` is what an autocast scope makes it."""
    return variable._dtype


def stored_value(variable: keras.Variable):
    """The backend's variable, whatever scope is open."""
    return variable._value


def assign_past_scopes(variable: keras.Variable, value) -> None:
    """Assigns to the variable itself, whatever scope is open."""
    variable._direct_assign(value)


class CheckedVariable(keras.Variable):
    """A variable that has a look at every value before it is assigned.

    Whatever assigns it from outside of a compiled function: `set_weights`, weights that
    Keras loads from a file, a `tf.train.Checkpoint`.

    Args:
      check: called with the value; raises an error to refuse it.
    """

    def __init__(self, *args, check: Callable, **kwargs):
        super().__init__(*args, **kwargs)
        self._check_value = check

    def assign(self, value):
        self._check_value(value)
        return super().assign(value)

    def _restore_from_tensors(self, restored_tensors):
        for value in restored_tensors.values():
            self._check_value(value)
        return super()._restore_from_tensors(restored_tensors)
