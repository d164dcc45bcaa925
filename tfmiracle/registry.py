"""Kinds of things that are found by name, as Keras finds initializers."""

import importlib
import inspect
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by the `identifier` that each has.

    Args:
      argument: name of the argument that takes one of them, for errors.
      base: the class that they derive from.
      **homes: identifier -> the module that registers it, which is imported when it is
        asked for.
    """

    def __init__(self, argument: str, base: type[T], **homes: str):
        self._argument, self._base, self._homes = argument, base, homes
        self._classes: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Class decorator: lets a class be found by its `identifier`.

        Raises:
          ValueError: if the identifier is not printable ASCII of 1 to 255 characters,
            or another class has it.
        """
        name = cls.identifier
        right = isinstance(name, str) and name.isascii() and name.isprintable()
        if not right or not 1 <= len(name) <= 255:
            raise ValueError(
                f"`identifier` of {cls.__name__} must be printable ASCII, 1 to 255 "
                f"characters. Received: identifier={name!r}"
            )
        other = self._classes.get(name, cls)
        # A module that is loaded again, as in a notebook, may replace its own class.
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"`identifier` {name!r} of {cls.__name__} is that of {other.__name__} "
                "already. Choose another one."
            )
        self._classes[name] = cls
        return cls

    def names(self, **attributes) -> list[str]:
        """Identifiers of the classes that have these attributes."""
        names = sorted({*self._classes, *self._homes})
        return [n for n in names if not attributes or _has(self.find(n), attributes)]

    def check(self, identifier: str, **attributes) -> None:
        """Raises a ValueError unless there is such a class of this identifier."""
        if identifier not in self.names(**attributes):
            raise self._unknown(identifier, attributes)

    def find(self, identifier: str, **attributes) -> type[T]:
        """The class of an identifier.

        Raises:
          ValueError: if there is none that has these attributes.
        """
        self.check(identifier, **attributes)
        if identifier not in self._classes:
            importlib.import_module(self._homes[identifier])
        return self._classes[identifier]

    def get(self, given: "str | dict | T", **attributes) -> T:
        """An object for what a user gave.

        Args:
          given: a name or a class, for the defaults; what `serialize` made; or an
            object, which is returned.
          **attributes: what it must have.

        Raises:
          ValueError: if there is none of this name, its options are others, or out of
            range, or a dict has other keys.
        """
        made = given
        if isinstance(given, str):
            made = self._make(self.find(given, **attributes), {})
        elif isinstance(given, type) and issubclass(given, self._base):
            made = self._make(given, {})
        elif isinstance(given, dict):
            if given.keys() != {"name", "config"}:
                raise ValueError(
                    f"`{self._argument}` as a dict must have the keys 'name' and "
                    "'config', the options, as in {'name': "
                    f"{self.names()[0]!r}, 'config': {{}}}}. "
                    f"Received: {self._argument}={given!r}"
                )
            made = self._make(self.find(given["name"]), given["config"])
        if not isinstance(made, self._base) or not _has(made, attributes):
            raise self._unknown(given, attributes)
        return made

    def _make(self, cls, config):
        try:
            inspect.signature(cls).bind(**config)
        except TypeError as error:
            options = ", ".join(inspect.signature(cls).parameters)
            raise ValueError(
                f"The options of `{self._argument}` {cls.identifier!r} are "
                f"{options or 'none'}: {error}."
            ) from None
        return cls(**config)

    def _unknown(self, given, attributes):
        such = "".join(f" with {name}={value}" for name, value in attributes.items())
        return ValueError(
            f"`{self._argument}` must be a {self._base.__name__}{such} or the name of "
            f"one that is registered: {', '.join(self.names(**attributes))}. "
            f"Received: {self._argument}={given!r}"
        )

    def serialize(self, thing: T) -> dict:
        """What JSON can say of an object, for `get`."""
        config = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in thing.get_config().items()
        }
        return {"name": thing.identifier, "config": config}


def _has(thing, attributes):
    return all(getattr(thing, name) == value for name, value in attributes.items())
