"""A study's records, one JSON file a run: read, checked, counted. Needs NumPy only."""

import itertools
import json
import math
import os
import pathlib
import reprlib

import numpy as np

from tfmiracle.codec.pruning import STRATEGIES

PARAMETERIZATIONS = {"mean_var": "Mean-Var", "mean_kl": "Mean-KL"}  # in paper's order

# When a run counts as converged, see `iterations_to_converge`.
CONVERGED_FACTOR = 1.1
BUDGET_TOLERANCE = 0.01
FINAL_FRACTION = 0.05
SMOOTHING_FRACTION = 0.02

_LARGEST = float(np.finfo(np.float64).max)


def read_records(workdir: str | os.PathLike) -> list[dict]:
    """Reads and checks the records of a study.

    Returns:
      The records by block size, parameterization and seed, each with its path as
      "file", and with empty "histograms" and "pruning" where it lacks them.

    Raises:
      ValueError: if there is none; if one is damaged or none of a study (the text
        names the file and the key); if two are of the same run; or if they do not
        belong together, as those of studies at different scales.
    """
    folder = pathlib.Path(workdir) / "records"
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ValueError(
            f"{folder} holds no records (*.json). Give the folder of a study that has "
            "finished a run at least."
        )
    records.sort(key=lambda r: (*_cell(r), r["seed"]))
    for one, other in itertools.pairwise(records):
        files = f"{one['file']} and {other['file']}"
        in_cell = _cell(one) == _cell(other)
        if in_cell and one["seed"] == other["seed"]:
            raise ValueError(f"{files} are records of the same run. Remove one.")
        ours, theirs = _common(one), _common(other)
        for key in ours | theirs if in_cell else _COMMON:
            if ours.get(key) != theirs.get(key):
                raise ValueError(
                    f"{files} differ in {key} ({ours.get(key)!r} and "
                    f"{theirs.get(key)!r}), but a report is of one study and averages "
                    "over its seeds alone. Keep studies in folders of their own."
                )
    return records


def _cell(record):
    return record["block_size"], [*PARAMETERIZATIONS].index(record["parameterization"])


_COMMON = ("scale", "model", "dtype_policy", "data", "data_crc32")


def _common(record):
    """What the runs of a study at one place of its grid have in common."""
    found = {key: record.get(key) for key in _COMMON}
    settings = record["settings"].items()
    found |= {f"settings.{key}": value for key, value in settings if key != "seed"}
    return {**found, "steps.train": record["steps"]["train"]}


_DEFAULTS = {"dtype_policy": "float32", "histograms": {}, "pruning": {}}


def read_record(path: pathlib.Path) -> dict:
    """Reads and checks one record, see `read_records`."""
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no readable JSON: {error}. Remove it or run it again."
        ) from error
    if type(record) is dict:
        record = {**_DEFAULTS, **record, "file": str(path)}
    for place, kind in _RECORD.items():
        _check(f"{path}: record", record, place.split("."), kind)
    return record


def _is_number(value, least=-_LARGEST, largest=_LARGEST):
    return type(value) in (int, float) and least <= value <= largest


def _is_fraction(value):
    return _is_number(value, 0, 1)


def _list_of(check, in_order=list):
    return lambda v: type(v) is list and all(map(check, v)) and v == in_order(v)


_CHECKS = {
    "1, the version this package reads": lambda v: v == 1,
    "one of mean_var, mean_kl": lambda v: v in list(PARAMETERIZATIONS),
    "an integer of at least 0": lambda v: type(v) is int and v >= 0,
    "an integer of at least 1": lambda v: type(v) is int and v >= 1,
    "a number": _is_number,
    "a positive number": lambda v: _is_number(v) and v > 0,
    "a number of at least 0 or null": lambda v: v is None or _is_number(v, 0),
    "a number from 0 to 1": _is_fraction,
    "a text": lambda v: type(v) is str,
    "an object": lambda v: type(v) is dict,
    "an object by uniform, magnitude, kl": lambda v: (
        type(v) is dict and v.keys() <= {*STRATEGIES}
    ),
    "a list of texts": _list_of(lambda v: type(v) is str),
    "a list of numbers": _list_of(_is_number),
    "a list of numbers or null": _list_of(lambda v: v is None or _is_number(v)),
    "a list of numbers in order": _list_of(_is_number, sorted),
    "a list of numbers from 0 to 1": _list_of(_is_fraction),
    "a list of increasing numbers from 0 to 1": _list_of(
        _is_fraction, lambda v: sorted({*v})
    ),
    "an object with one edge more than counts": lambda v: (
        len(v["edges"]) == len(v["counts"]) + 1
    ),
    "an object with lists of one length": lambda v: (
        len({len(x) for x in v.values() if type(x) is list}) == 1
    ),
}
_RECORD = {  # what a record must hold, by place: "*" is any key, "a|b" both
    "format": "1, the version this package reads",
    "parameterization": "one of mean_var, mean_kl",
    "block_size": "an integer of at least 1",
    "seed": "an integer of at least 0",
    "scale": "a positive number",
    "seconds": "a number",
    "model|dtype_policy|data": "a text",
    "versions|machine": "an object",
    "settings.block_bits": "a positive number",
    "settings.kl_bits": "a number of at least 0 or null",
    "sizes.payload_ratio": "a positive number",
    "sizes.blocks": "an integer of at least 1",
    "errors.posterior_mean|posterior_sample|decoded": "a number from 0 to 1",
    "steps.train|total": "an integer of at least 0",
    "curve.phase": "a list of texts",
    "curve.step": "a list of numbers in order",
    "curve.cross_entropy": "a list of numbers",
    "curve.kl_bits": "a list of numbers or null",
    "coding.max_kl_bits|over_budget": "a list of numbers",
    "curve": "an object with lists of one length",
    "histograms.*.loc|log_scale.edges": "a list of numbers in order",
    "histograms.*.loc|log_scale.counts": "a list of numbers",
    "histograms.*.loc|log_scale": "an object with one edge more than counts",
    "pruning": "an object by uniform, magnitude, kl",
    "pruning.*.fractions": "a list of increasing numbers from 0 to 1",
    "pruning.*.accuracy": "a list of numbers from 0 to 1",
    "pruning.*": "an object with lists of one length",
}


def _check(name, value, places, kind):
    """Raises ValueError, with its name, if what the places lead to is not of a kind."""
    wanted = "an object" if places else kind
    if not _CHECKS[wanted](value):
        raise ValueError(f"{name} must be {wanted}. Received: {reprlib.repr(value)}")
    if places:
        for key in value if places[0] == "*" else places[0].split("|"):
            if key not in value:
                raise ValueError(f"{name} lacks {key!r}. Remove it or run it again.")
            _check(f"{name}.{key}", value[key], places[1:], kind)


def runs(records: list[dict], parameterization: str, block_size=None) -> list[dict]:
    """The records of a parameterization, with blocks of one size or of any."""
    found = [r for r in records if r["parameterization"] == parameterization]
    return [r for r in found if block_size in (None, r["block_size"])]


def block_sizes(records: list[dict]) -> list[int]:
    """The block sizes that occur, in order."""
    return sorted({r["block_size"] for r in records})


def budget_bits(record: dict) -> float:
    """KL of a block that the run allowed, in bits."""
    kl_bits = record["settings"]["kl_bits"]
    return record["settings"]["block_bits"] if kl_bits is None else kl_bits


def mean_and_error(values) -> tuple[float | None, float | None]:
    """Mean and standard error (sample standard deviation / sqrt(n)).

    Either is None where it does not exist: for no values, and the error for one.
    """
    values = np.asarray(values, np.float64)
    count = len(values)
    mean = float(values.mean()) if count else None
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    return mean, error


def variational(curve: dict, key: str) -> np.ndarray:
    """float64[n]: a column of a curve in variational training; NaN is for None."""
    phases = np.array(curve["phase"], str)
    return np.array(curve[key], np.float64)[phases == "variational"]


def final_cross_entropy(curve: dict) -> float | None:
    """The mean over the last `FINAL_FRACTION` of the windows of variational training.

    None without such windows.
    """
    cross_entropy = variational(curve, "cross_entropy")
    last = math.ceil(len(cross_entropy) * FINAL_FRACTION)
    return float(cross_entropy[-last:].mean()) if last else None


def iterations_to_converge(
    curve: dict, budget_bits: float, final: float | None = None
) -> int | None:
    """The optimizer step from which a run has converged in variational training.

    That is the first step from which on, to the end of the phase "variational",

    - the running cross-entropy is at most `CONVERGED_FACTOR` times `final` (the windows
      at the end that `final_cross_entropy` takes count as converged themselves), and
    - the running mean KL of a block is at most `budget_bits`, up to `BUDGET_TOLERANCE`
      of it.

    "Running" is the median of each window and its neighbours within
    `SMOOTHING_FRACTION` of the windows on either side (fewer at the ends). It takes
    away single outliers; but unlike a mean it leaves a curve that only falls as it is,
    so that it does not shift the step.

    Args:
      curve: lists "phase", "step", "cross_entropy" (any unit) and "kl_bits" (None is
        not at budget), one value a window of training steps.
      budget_bits: KL of a block allowed, in bits.
      final: the cross-entropy to compare with, at least the curve's own
        `final_cross_entropy`, which is the default.

    Returns:
      The step of the first window from which both hold, or None if they do not hold
      in the end.
    """
    cross_entropy = variational(curve, "cross_entropy")
    kl_bits = np.nan_to_num(variational(curve, "kl_bits"), nan=np.inf)
    count = len(cross_entropy)
    if not count:
        return None
    last = math.ceil(count * FINAL_FRACTION)
    half = round(count * SMOOTHING_FRACTION)
    final = final_cross_entropy(curve) if final is None else final
    converged = _running_median(cross_entropy, half) <= CONVERGED_FACTOR * final
    converged[-last:] = True
    converged &= _running_median(kl_bits, half) <= budget_bits * (1 + BUDGET_TOLERANCE)
    missed = np.flatnonzero(~converged)
    first = missed[-1] + 1 if len(missed) else 0
    return None if first == count else int(variational(curve, "step")[first])


def _running_median(values, half):
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.nanmedian(windows, axis=1)


def converged_iterations(records: list[dict]) -> list[int]:
    """`iterations_to_converge`, at its own budget, of each run that converged."""
    found = [iterations_to_converge(r["curve"], budget_bits(r)) for r in records]
    return [iterations for iterations in found if iterations is not None]


def iterations_to_same_loss(records: list[dict], block_size: int) -> np.ndarray:
    """int64[n, 2]: iterations of Mean-Var and Mean-KL to a loss that both have reached.

    That is, for each of n seeds that both have, the larger of the two
    `final_cross_entropy`. Seeds where one of them has no such step do not count.
    """
    by_seed = {}
    for p in PARAMETERIZATIONS:
        for record in runs(records, p, block_size):
            by_seed.setdefault(record["seed"], []).append(record)
    found = []
    for pair in by_seed.values():
        finals = [final_cross_entropy(r["curve"]) for r in pair]
        if len(pair) == len(PARAMETERIZATIONS) and None not in finals:
            runs_of = ((r["curve"], budget_bits(r), max(finals)) for r in pair)
            found.append([iterations_to_converge(*arguments) for arguments in runs_of])
    found = [iterations for iterations in found if None not in iterations]
    return np.array(found, np.int64).reshape(-1, len(PARAMETERIZATIONS))


def accuracy_at(
    records: list[dict], parameterization: str, strategy: str, fraction: float
) -> tuple[float | None, float | None]:
    """`mean_and_error` of the accuracy with a fraction of the weights pruned.

    Over all block sizes and seeds that were pruned that far; between two fractions that
    a run has, its accuracy is interpolated.
    """
    curves = _pruned(records, parameterization, strategy)
    return mean_and_error(
        [np.interp(fraction, x, y) for x, y in curves if x[0] <= fraction <= x[-1]]
    )


def pruning_curve(
    records: list[dict], parameterization: str, strategy: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Measured fractions, means and errors of `accuracy_at` there; NaN for None.

    Each is float64[n], with n = 0 without data.
    """
    curves = _pruned(records, parameterization, strategy)
    fractions = np.unique(np.array([f for x, _ in curves for f in x], float))
    points = [accuracy_at(records, parameterization, strategy, f) for f in fractions]
    return fractions, *np.array(points, np.float64).reshape(-1, 2).T


def _pruned(records, parameterization, strategy):
    """Fractions and accuracies of each run that has any."""
    found = [r["pruning"].get(strategy) for r in runs(records, parameterization)]
    return [(p["fractions"], p["accuracy"]) for p in found if p and p["fractions"]]
