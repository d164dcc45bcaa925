"""All that the package uses of Keras beyond its documented interface.

Each of these has a test in `tests/test_keras_internals.py` that tells when Keras
changes. Nothing else in the package touches a name of Keras with an underscore.
"""

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator

import keras

# Modules of operations on arrays. Of the others, those that call no functions.
_OPERATIONS = {
    "core": (
        "Cast",
        "ConvertToTensor",
        "SaturateCast",
        "Scatter",
        "ScatterUpdate",
        "Slice",
        "SliceUpdate",
        "StopGradient",
        "Unstack",
    ),
    "einops": ("Rearrange",),
    "image": None,
    "linalg": (
        "Cholesky",
        "CholeskyInverse",
        "Det",
        "Eig",
        "Eigh",
        "Inv",
        "Lstsq",
        "LuFactor",
        "MatrixRank",
        "Norm",
        "Pinv",
        "Qr",
        "SVD",
        "Solve",
        "SolveTriangular",
    ),
    "math": None,
    "nn": None,
    "numpy": None,
}
# What Keras calls arguments that it calls.
_FUNCTIONS = {
    "f",
    "fn",
    "fun",
    "func",
    "function",
    "pyfunc",
    "callable",
    "body",
    "cond",
}
_watching = threading.RLock()


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


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Those that `save_own_variables` numbers, in its order."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


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


def functional_class() -> type[keras.Model]:
    """The class of models that are made of inputs and outputs."""
    return keras.src.models.functional.Functional


def layers_of_applications() -> list[type[keras.Layer]]:
    """Layers of `keras.applications` that Keras does not export."""
    applications = keras.src.applications
    return [
        applications.convnext.LayerScale,
        applications.convnext.StochasticDepth,
        applications.inception_resnet_v2.CustomScaleLayer,
    ]


def operations() -> list[type[keras.Operation]]:
    """Operations on arrays, which are nodes of functional models.

    Operations that call functions, such as a `Map`, are not among them.
    """
    found = []
    for name, allowed in _OPERATIONS.items():
        module = importlib.import_module(f"keras.src.ops.{name}")
        for cls in vars(module).values():
            if (
                isinstance(cls, type)
                and issubclass(cls, keras.Operation)
                and cls.__module__ == module.__name__
                and (allowed is None or cls.__name__ in allowed)
                and not _FUNCTIONS & _parameters(cls)
            ):
                found.append(cls)
    return found


def _parameters(cls) -> set[str]:
    return {
        p for f in (cls.__init__, cls.call) for p in inspect.signature(f).parameters
    }


@contextlib.contextmanager
def watch_building(
    on_tensor: Callable[[tuple], None],
    on_weight: Callable[[tuple], None] | None = None,
) -> Iterator[None]:
    """Watches what this thread builds, before anything is allocated for it.

    Args:
      on_tensor: called with the shape of every symbolic tensor; it may raise.
      on_weight: called with the shape of every weight that a layer adds; it may raise.
        If given, weights start as zeros, whatever initializers they have.
    """
    thread = threading.get_ident()
    make_tensor, add_weight = keras.KerasTensor.__init__, keras.Layer.add_weight

    def tensor(self, shape, *args, **kwargs):
        if threading.get_ident() == thread:
            on_tensor(shape)
        make_tensor(self, shape, *args, **kwargs)

    def weight(self, *args, **kwargs):
        if on_weight is not None and threading.get_ident() == thread:
            names = ("shape", "initializer", "dtype")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            shape = kwargs.get("shape") or ()
            on_weight((shape,) if isinstance(shape, int) else tuple(shape))
            args, kwargs["initializer"] = (), "zeros"
        return add_weight(self, *args, **kwargs)

    with _watching:
        keras.KerasTensor.__init__, keras.Layer.add_weight = tensor, weight
        try:
            yield
        finally:
            keras.KerasTensor.__init__ = make_tensor
            keras.Layer.add_weight = add_weight
