"""Options: a default, a check and a help text for each, in one place.

A class of options is a frozen dataclass, made by `options`, whose fields are made by
`option`. Its documentation, its checks and the flags of the command line come from the
fields.
"""

import dataclasses
import inspect
import math
import numbers
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Check(NamedTuple):
    """What a value must be, in words, and whether it is."""

    requirement: str
    accepts: Callable[[Any], bool]


def _is_integer(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def integer(least: int) -> Check:
    return Check(
        f"an integer of at least {least}, below 2**31",
        lambda value: _is_integer(value) and least <= value < 2**31,
    )


def number(least: float, most: float = math.inf) -> Check:
    """A finite number in a range, ends included."""
    upper = "" if most == math.inf else f", at most {most:g}"
    return Check(
        f"a finite number of at least {least:g}{upper}",
        lambda value: FINITE.accepts(value) and least <= value <= most,
    )


POSITIVE = Check(
    "a positive number", lambda value: _is_number(value) and 0 < value < math.inf
)
FINITE = Check(
    "a finite number", lambda value: _is_number(value) and math.isfinite(value)
)
SWITCH = Check("True or False", lambda value: isinstance(value, bool))


def one_of(*names: str) -> Check:
    return Check(f"one of {names}", lambda value: value in names)


def or_none(check: Check) -> Check:
    return Check(
        f"{check.requirement}, or None",
        lambda value: value is None or check.accepts(value),
    )


def option(default, help: str, check: Check | None = None):
    """A field of a class of options.

    Args:
      default: its default.
      help: what it is, to follow "name: " in documentation, and as help of a flag.
      check: what it must be; None where something else checks it.
    """
    return dataclasses.field(default=default, metadata={"help": help, "check": check})


def options(cls):
    """Class decorator: a frozen dataclass of checked options, documented by them."""
    own = cls.__dict__.get("__post_init__")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):  # which JSON does not know
                value = value.item()
                object.__setattr__(self, field.name, value)
            check_option(cls, field.name, value)
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__
    cls = dataclasses.dataclass(frozen=True)(cls)
    about = inspect.cleandoc(cls.__doc__ or cls.__name__)
    attributes = [
        textwrap.fill(
            f"{name}: {text}", 86, initial_indent="  ", subsequent_indent="    "
        )
        for name, text in help_texts(cls).items()
    ]
    cls.__doc__ = "\n".join([about, "", "Attributes:", *attributes])
    return cls


def help_texts(cls) -> dict[str, str]:
    """Name -> help of each option of a class."""
    return {
        field.name: field.metadata["help"]
        for field in dataclasses.fields(cls)
        if "help" in field.metadata
    }


def check_option(cls, name: str, value) -> None:
    """Raises a ValueError unless `value` will do for an option of a class."""
    check = cls.__dataclass_fields__[name].metadata.get("check")
    if check is not None:
        check_argument(name, value, check)


def check_argument(name: str, value, check: Check) -> None:
    """Raises a ValueError unless `value` will do for an argument."""
    if not check.accepts(value):
        raise ValueError(
            f"`{name}` must be {check.requirement}. Received: {name}={value!r}"
        )


def check_switches(**arguments) -> None:
    """Raises a ValueError unless each argument is True or False."""
    for name, value in arguments.items():
        check_argument(name, value, SWITCH)


def changes(instance) -> dict:
    """The options that differ from their defaults."""
    return {
        field.name: getattr(instance, field.name)
        for field in dataclasses.fields(instance)
        if getattr(instance, field.name) != field.default
    }
