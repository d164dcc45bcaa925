"""What a run says while it goes on: bars on a terminal, plain lines elsewhere."""

import contextlib
import re
import sys
import warnings

_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_LINES = 10  # at most that many for a phase


def is_interactive() -> bool:
    """Whether standard output is a terminal or a notebook, which can redraw a line."""
    stdout_is_a_terminal = getattr(sys.stdout, "isatty", lambda: False)()
    return stdout_is_a_terminal or "ipykernel" in sys.modules


def bar(name: str, total: int, unit: str):
    """What has `update(done, values)` for pairs of a name and a number.

    It is a bar of Keras where it can be redrawn, else `Lines`.
    """
    if not is_interactive():
        return Lines(name, total, unit)
    import keras

    return keras.utils.Progbar(total, unit_name=unit)


class Lines:
    """Says where a phase stands, in a few lines without control characters.

    Args:
      name: of the phase, the start of each line.
      total: how many units there are.
      unit: what is counted, in the singular.
      done: how many there are at first.
    """

    def __init__(self, name: str, total: int, unit: str, done: int = 0):
        self._name, self._total, self._unit = name, total, unit
        self._line = self._line_of(done)

    def _line_of(self, done):
        return done * _LINES // max(self._total, 1)

    def is_due(self, done: int) -> bool:
        """Whether `update` would print a line."""
        return self._line_of(done) > self._line

    def update(self, done: int, values=()) -> None:
        """Prints a line if a tenth of the whole has passed since the last one."""
        if self.is_due(done):
            self._line = self._line_of(done)
            numbers = "".join(f", {name} {value:.4g}" for name, value in values)
            print(
                f"{self._name}: {done}/{self._total} {self._unit}s{numbers}", flush=True
            )


def one_line(text) -> str:
    """Any text, or error, on one line without what a terminal would obey."""
    words = " ".join(_ESCAPE.sub("", str(text)).split())
    return "".join(c for c in words if c.isprintable())


@contextlib.contextmanager
def warnings_on_one_line():
    """Warnings go to standard error as one line each, without source code."""

    def show(message, category, filename, lineno, file=None, line=None):
        print(f"tfmiracle: warning: {one_line(message)}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("ignore", DeprecationWarning)  # for who writes code
        yield
