"""Makes variables of untouched Keras layers read as other tensors.

The one module that relies on how `keras.StatelessScope` works inside; the contract is
held by `tests/test_scope.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import keras

from tfmiracle.keras_internals import (
    assign_past_scopes,
    rematerialization,
    stateless_scope,
    stored_dtype,
    stored_value,
    walk,
)


class SubstitutionScope(keras.StatelessScope):
    """Lets some variables read as given tensors, and nothing else change.

    A plain `keras.StatelessScope` diverts every assignment, so that statistics of
    BatchNormalization and states of dropout seeds would be lost. Here reads and
    assignments of all other variables pass through: to the enclosing scope if there is
    one, else to the variables themselves. Where such scopes are nested, the outermost
    one that substitutes a variable wins.

    Losses added inside go to the enclosing scope; where there is none, they are found
    in `losses` afterwards and the owner of the scope adds them.

    Args:
      variables: `keras.Variable`s to substitute.
      values: tensors of the same shapes.
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence):
        super().__init__(collect_losses=True, initialize_variables=False)
        for variable, value in zip(variables, values, strict=True):
            # Not `variable.dtype`, which is what the layer around this scope computes
            # in: each layer inside casts what it reads to its own.
            value = keras.ops.convert_to_tensor(value, stored_dtype(variable))
            self.state_mapping[id(variable)] = value

    def substitutes(self, variable: keras.Variable) -> bool:
        """Whether this scope, or one like it around it, substitutes `variable`."""
        if id(variable) in self.state_mapping:
            return True
        outer = self.original_scope
        return isinstance(outer, SubstitutionScope) and outer.substitutes(variable)

    def get_current_value(self, variable):
        outer = self.original_scope
        if isinstance(outer, SubstitutionScope) and outer.substitutes(variable):
            return outer.get_current_value(variable)
        value = super().get_current_value(variable)
        if value is None and outer is not None:
            value = outer.get_current_value(variable)
        return stored_value(variable) if value is None else value

    def add_update(self, update):
        variable, value = update
        if id(variable) in self.state_mapping:
            raise ValueError(
                f"A layer assigns to {variable.path!r}, which the posterior samples. "
                "Keep it out of the code, with a rule that stores it."
            )
        if self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            assign_past_scopes(variable, value)

    def add_loss(self, loss):
        if self.original_scope is None:
            super().add_loss(loss)
        elif self.original_scope.collect_losses:
            self.original_scope.add_loss(loss)


@contextlib.contextmanager
def substitute(
    owner: keras.layers.Layer, variables: Sequence[keras.Variable], values: Sequence
) -> Iterator[None]:
    """Opens a `SubstitutionScope` inside `owner.call`.

    Afterwards `owner` adds the losses that arose inside, and those of the variables'
    regularizers, applied to the substituted values.
    """
    with SubstitutionScope(variables, values) as scope:
        yield
    for loss in scope.losses:
        owner.add_loss(loss)
    for variable, value in zip(variables, values, strict=True):
        if variable.regularizer is not None:
            owner.add_loss(variable.regularizer(value))


def refuse_rematerialization(layer: keras.layers.Layer) -> None:
    """Raises a ValueError if a layer was made in a `keras.RematScope`.

    What is computed anew for the gradient would not see substituted values, nor have
    the noise of the first time, and the gradients would silently be wrong.
    """
    for part in walk(layer):
        mode = rematerialization(part)
        if mode not in (None, "activations"):
            raise ValueError(
                f"Layer {part.name!r} was made in keras.RematScope(mode={mode!r}), in "
                "which variational weights have no gradients. Make it outside."
            )


def is_substituted(variable: keras.Variable) -> bool:
    """Whether an enclosing `SubstitutionScope` substitutes `variable`."""
    scope = stateless_scope()
    return isinstance(scope, SubstitutionScope) and scope.substitutes(variable)
