"""What a run says while it goes on."""

import sys
import warnings

import keras
import pytest

from tfmiracle.training import progress


@pytest.mark.parametrize("total", [1, 3, 9, 10, 77, 6000])
def test_a_phase_takes_ten_lines_at_most(total, capsys):
    lines = progress.Lines("Training", total, "step")
    for done in range(1, total + 1):
        lines.update(done, [("loss", 1 / done)])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == min(total, 10)
    assert said[-1] == f"Training: {total}/{total} steps, loss {1 / total:.4g}"
    assert all(line.isprintable() for line in said)


def test_lines_go_on_where_a_phase_does(capsys):
    lines = progress.Lines("Coding", 100, "block", done=95)
    assert not lines.is_due(99)
    lines.update(99)
    lines.update(100)
    assert capsys.readouterr().out == "Coding: 100/100 blocks\n"


def test_bars_on_a_terminal_only(monkeypatch):
    assert isinstance(progress.bar("Coding", 3, "block"), progress.Lines)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(progress.bar("Coding", 3, "block"), keras.utils.Progbar)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\n  b\tc\r\n", "a b c"),
        ("\x1b[1;31mred\x1b[0m and \x1b[2Kwiped\x1b[1G", "red and wiped"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        ("bell\x07 back\x08\x7f \x9b31m", "bell back 31m"),
        ("äöü 日本 ±", "äöü 日本 ±"),
        (ValueError("of\nan error"), "of an error"),
    ],
)
def test_one_line(text, expected):
    assert progress.one_line(text) == expected


def test_warnings_are_one_line(capsys):
    with progress.warnings_on_one_line():
        warnings.warn("\x1b[1mtwo\nlines\x1b[0m", stacklevel=1)
        warnings.warn("for developers", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "tfmiracle: warning: two lines\n"
