"""How each variable of a network is treated: coded, hashed, or stored."""

import dataclasses
import fnmatch
import re
from collections.abc import Sequence

STORED_TYPES = ("float16", "float32", *(f"{bits}bit" for bits in range(2, 9)))
STATISTICS = "8bit"  # how those of BatchNormalization are stored, unless a rule says
# Of words in the order of the alphabet.
_RULE = re.compile(
    rf"code|(?P<store>store)(=(?P<dtype>{'|'.join(STORED_TYPES)}))?|"
    r"(hash=(?P<hash>0*[1-9][0-9]*)( |$))?(?P<own_scale>own_scale)?"
)


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What happens to a variable; `parse` reads it from the text of a rule.

    Attributes:
      stored: whether it is stored instead of coded.
      dtype: for a stored one, "float16", "float32", or "2bit" to "8bit" for levels on
        a scale of the variable's own (`tfmiracle.codec.parts.Levels`); by default its
        own.
      hash_factor: for a coded one, how many entries share a weight on average (Chen et
        al. 2015).
      own_scale: whether it has a coding scale of its own, and does not share one with
        the other variables of its layer.
    """

    stored: bool = False
    dtype: str | None = None
    hash_factor: int = 1
    own_scale: bool = False

    @classmethod
    def parse(cls, text: str) -> "Treatment":
        """Reads "code", "hash=64", "own_scale", "hash=2 own_scale", "store",
        "store=float16" or "store=6bit".

        Raises:
          ValueError: if it is something else.
        """
        words = " ".join(sorted(str(text).split()))
        match = _RULE.fullmatch(words)
        if not (words and match):
            raise ValueError(
                "A rule must say 'code', 'hash=N', 'own_scale', both of these, "
                f"'store', or 'store=' and one of {STORED_TYPES}. Received: {text!r}"
            )
        return cls(
            stored=match["store"] is not None,
            dtype=match["dtype"],
            hash_factor=int(match["hash"] or 1),
            own_scale=match["own_scale"] is not None,
        )

    def __str__(self):
        if self.stored:
            return f"store={self.dtype}" if self.dtype else "store"
        words = [f"hash={self.hash_factor}"] if self.hash_factor > 1 else []
        words += ["own_scale"] if self.own_scale else []
        return " ".join(words) or "code"


def treat(
    paths: Sequence[str],
    codable: Sequence[bool],
    rules: dict[str, str] | None,
    statistics: Sequence[bool] | None = None,
) -> list[Treatment]:
    """Decides how every variable of a network is treated.

    By default what can be coded is coded, statistics are stored in `STATISTICS` and the
    rest as it is. Where several rules fit a variable, the last one counts.

    Args:
      paths: paths of the variables.
      codable: whether each of them trains, and is of floating-point numbers.
      rules: pattern of a path (see `match_path`) -> text of a treatment.
      statistics: whether each of them is one that a normalization takes of its inputs;
        by default none is.

    Raises:
      ValueError: if a text cannot be read, or a pattern fits no variable or, where it
        says how to code, none that can be coded.
    """
    if not (rules is None or isinstance(rules, dict)):
        raise ValueError(
            "`rules` must be a dict, pattern of a path -> treatment. "
            f"Received: rules={rules!r}"
        )
    treatments = [
        Treatment(stored=not c, dtype=STATISTICS if s and not c else None)
        for c, s in zip(codable, statistics or [False] * len(codable), strict=True)
    ]
    for pattern, text in (rules or {}).items():
        treatment = Treatment.parse(text)
        fitting = [i for i, path in enumerate(paths) if match_path(path, pattern)]
        if not treatment.stored:
            fitting = [i for i in fitting if codable[i]]
        if not fitting:
            possible = [
                path for path, c in zip(paths, codable) if c or treatment.stored
            ]
            what = "variable" if treatment.stored else "variable that can be coded"
            raise ValueError(
                f"`rules` has a pattern {pattern!r} that fits no {what}. "
                f"There are: {', '.join(possible)}"
            )
        for i in fitting:
            treatments[i] = treatment
    return treatments


def match_path(path: str, pattern: str) -> bool:
    """Whether a shell pattern fits the end of a variable's path.

    "conv2/kernel" fits "lenet5/conv2/kernel", and "*/kernel" fits every kernel.
    """
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(
        path, f"*/{pattern}"
    )
