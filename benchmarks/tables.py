"""Markdown tables, and means with their standard errors."""

from collections.abc import Iterable, Sequence

from tfmiracle.studies.records import mean_and_error


def markdown(titles: Sequence, rows: Iterable[Sequence]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def mean(values: Sequence[float], digits: int) -> str:
    """With the standard error, where there are several."""
    mean, error = mean_and_error(values)
    return f"{mean:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")
