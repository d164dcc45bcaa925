"""JSON of strangers: what the description of a file may be. Needs NumPy only."""

import json
import math

from tfmiracle.codec.parts import FileFormatError

_MAX_BRACKETS = 1 << 17
_MAX_DEPTH = 128
_MAX_DIGITS = 100


def parse(raw: bytes) -> dict:
    """Parses the JSON object of a description, within the bounds of the format.

    Raises:
      FileFormatError: if it is none, has a key twice, numbers that are not finite or
        of very many digits, or is nested too deeply.
      ValueError: if it is no JSON, or not in UTF-8.
    """
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        raise FileFormatError("The description has too many lists and objects.")
    try:
        content = json.loads(
            raw.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise FileFormatError("The description is nested too deeply.") from None
    if not isinstance(content, dict):
        raise FileFormatError("The description is no JSON object.")
    _check_depth(content)
    return content


def _check_depth(content):
    level, depth = [content], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise FileFormatError("The description is nested too deeply.")
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]


def _object(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        raise FileFormatError("An object of the description has a key twice.")
    return content


def _integer(text):
    if len(text) > _MAX_DIGITS:
        raise FileFormatError("A number of the description has too many digits.")
    return int(text)


def _finite(text):
    number = float(text)
    if math.isinf(number):
        raise FileFormatError(f"The description holds {text}, which is out of range.")
    return number


def _refuse_constant(name: str):
    raise FileFormatError(f"The description holds {name}, which is not JSON.")
