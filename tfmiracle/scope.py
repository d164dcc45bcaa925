"""Makes variables of untouched Keras layers read as other tensors.

The one module that relies on how `keras.StatelessScope` works inside; the contract is
held by `tests/test_scope.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence

import keras


class SubstitutionScope(keras.StatelessScope):
    """Lets some variables read as given tensors, and nothing else change.

    A plain `keras.StatelessScope` diverts every assignment, so that statistics of
    BatchNormalization and states of dropout seeds would be lost. Here reads and
    assignments of all other variables pass through: to the enclosing scope if there is
    one, else to the variables themselves. Where such scopes are nested, the outermost
    one that substitutes a variable wins.

    Losses added inside are found in `losses` after the scope; its owner adds them.

    Args:
      variables: `keras.Variable`s to substitute.
      values: tensors of the same shapes.
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence):
        super().__init__(
            list(zip(variables, values, strict=True)),
            collect_losses=True,
            initialize_variables=False,
        )

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
        return variable._value if value is None else value

    def add_update(self, update):
        variable, value = update
        if id(variable) in self.state_mapping:
            super().add_update(update)
        elif self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            variable._direct_assign(value)


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


def is_substituted(variable: keras.Variable) -> bool:
    """Whether an enclosing `SubstitutionScope` substitutes `variable`."""
    scope = keras.src.backend.get_stateless_scope()
    return isinstance(scope, SubstitutionScope) and scope.substitutes(variable)
