"""All that the package uses of Keras beyond its documented interface.

Each of these has a test in `tests/test_keras_internals.py` that tells when Keras
changes. Nothing else in the package touches a name of Keras with an underscore.
"""

import contextlib
from collections.abc import Iterator

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


def compiled_loss_weights(model: keras.Model):
    """`loss_weights` as the model was compiled with, None without any.

    `get_compile_config` serializes everything else, too, which may be impossible.
    """
    setup = getattr(model, "_compile_config", None)  # a `compile` of its own has none
    return setup and setup.config.get("loss_weights")


@contextlib.contextmanager
def without_training_setup(model: keras.Model) -> Iterator[None]:
    """Lets Keras serialize a model as if nothing in it were compiled."""
    models = [layer for layer in walk(model) if hasattr(layer, "get_compile_config")]
    try:
        for layer in models:
            layer.get_compile_config = lambda: None
        yield
    finally:
        for layer in models:
            vars(layer).pop("get_compile_config", None)


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
