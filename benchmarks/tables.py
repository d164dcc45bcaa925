"""Markdown tables, and means with their standard errors."""

from collections.abc import Iterable, Sequence

import numpy as np


def markdown(titles: Sequence, rows: Iterable[Sequence]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def mean(values: Sequence[float], digits: int) -> str:
    """With the standard error, where there are several."""
    text = f"{np.mean(values):,.{digits}f}"
    if len(values) > 1:
        text += f" ± {np.std(values, ddof=1) / len(values) ** 0.5:,.{digits}f}"
    return text
