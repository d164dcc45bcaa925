"""Kinds of things that are found by name, as Keras finds initializers."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by the `identifier` that each has.

    Args:
      argument: name of the argument that takes one of them, for errors.
      base: the class that they derive from.
    """

    def __init__(self, argument: str, base: type[T]):
        self._argument, self._base = argument, base
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

    def names(self) -> list[str]:
        return sorted(self._classes)

    def find(self, identifier: str) -> type[T]:
        """The class of an identifier.

        Raises:
          ValueError: if there is none.
        """
        if identifier not in self._classes:
            raise ValueError(
                f"`{self._argument}` must be a {self._base.__name__} or the name of "
                f"one that is registered: {', '.join(self.names())}. "
                f"Received: {self._argument}={identifier!r}"
            )
        return self._classes[identifier]

    def get(self, given: "str | dict | T") -> T:
        """An object for what a user gave.

        Args:
          given: a name, for the defaults; what `serialize` made; or an object, which
            is returned.

        Raises:
          ValueError: if there is none of this name, or an option is out of range.
        """
        if isinstance(given, self._base):
            return given
        if isinstance(given, dict) and given.keys() == {"name", "config"}:
            return self.find(given["name"])(**given["config"])
        return self.find(given if isinstance(given, str) else repr(given))()

    def serialize(self, thing: T) -> dict:
        """What JSON can say of an object, for `get`."""
        return {"name": thing.identifier, "config": thing.get_config()}
