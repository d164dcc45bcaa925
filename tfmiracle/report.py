"""A study's records as the tables and figures of Lin et al. (2023), beside theirs.

A study leaves one JSON record a run in `WORKDIR/records`; `write_report` makes Table 1
and Figures 1 to 3 of the paper from them. NumPy alone reads, counts and writes the
tables; the figures need matplotlib, the extra `report`.
"""

import base64
import csv
import html
import io
import itertools
import json
import math
import os
import pathlib

import numpy as np

from tfmiracle.miracle_file import write_atomically

PARAMETERIZATIONS = ("mean_var", "mean_kl")  # the paper's order, everywhere
STRATEGIES = ("uniform", "magnitude", "kl")

# Lin et al. (2023), Table 1: error on MNIST after coding in %, mean and standard error
# over 10 seeds, by block size; ratios; optimizer iterations of variational training.
PAPER_ERRORS = {
    20: {"mean_var": (0.82, 0.07), "mean_kl": (0.77, 0.05)},
    30: {"mean_var": (0.79, 0.05), "mean_kl": (0.87, 0.08)},
    40: {"mean_var": (0.87, 0.07), "mean_kl": (0.96, 0.08)},
}
PAPER_RATIOS = {20: 555, 30: 833, 40: 1111}
PAPER_STEPS = {"mean_var": 200_000, "mean_kl": 100_000}
PAPER_SEEDS = 10

# When a run counts as converged, see `iterations_to_converge`.
CONVERGED_FACTOR = 1.1
BUDGET_TOLERANCE = 0.01
FINAL_FRACTION = 0.05
SMOOTHING_FRACTION = 0.02

# What the paper says of Figure 3, made precise, see `pruning_statements`.
UNIFORM_ACCURACY = 0.80
KL_ACCURACY = 0.85
COLLAPSED_ACCURACY = 0.50
STANDARD_ERRORS = 2.0

_NAMES = {"mean_var": "Mean-Var", "mean_kl": "Mean-KL"}
_EMPTY = "—"
_TABLES = ("table1", "convergence", "statements")
_FIGURES = ("dynamics", "histograms", "pruning")


def write_report(
    workdir: str | os.PathLike, output: str | os.PathLike | None = None
) -> dict:
    """Writes the tables, the figures and a page with all of them.

    The files are `table1`, `convergence` and `statements` (.md and .csv), `dynamics`,
    `histograms` and `pruning` (.png and .svg; only those the records have data for)
    and `report.html`, which needs no other file. The same records make the same bytes.

    Args:
      workdir: folder of a study, with `records/*.json`.
      output: folder to write to, by default `WORKDIR/report`; made if it is missing.
        What an earlier report left there is replaced.

    Returns:
      "report" (path of the page), "output", "files" (their names), "runs", "model",
      "data", "scale", and the rows of the tables: "table1" and "convergence" (one dict
      a block size and parameterization; None where there is no value) and
      "statements".

    Raises:
      ValueError: if there are no records, one is damaged or none of a study, they do
        not belong together, or matplotlib is missing.
    """
    records = read_records(workdir)
    output = pathlib.Path(workdir) / "report" if output is None else output
    output = pathlib.Path(output)
    cells = table1(records)
    convergence = convergence_table(records)
    statements = pruning_statements(records)
    rows = {
        "table1": _table1_rows(cells),
        "convergence": _convergence_rows(convergence),
        "statements": _statement_rows(statements),
    }
    notes = {
        "table1": _table1_notes(records, cells),
        "convergence": _convergence_notes(),
        "statements": _statement_notes(),
    }
    figures = _figures(records, convergence)

    files = {}
    for name, table in zip(_TABLES, (cells, convergence, statements)):
        files[f"{name}.md"] = _markdown(rows[name], notes[name]).encode()
        files[f"{name}.csv"] = _csv(table).encode()
    for name, formats in figures.items():
        for suffix, data in formats.items():
            files[f"{name}.{suffix}"] = data
    files["report.html"] = _page(records, rows, notes, figures).encode()

    output.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomically(output / name, data, overwrite=True)
    for name in _FIGURES:
        if name not in figures:  # one of an earlier report would not fit this one
            for suffix in ("png", "svg"):
                (output / f"{name}.{suffix}").unlink(missing_ok=True)
    return {
        "report": str(output / "report.html"),
        "output": str(output),
        "files": sorted(files),
        "runs": len(records),
        **{key: records[0][key] for key in ("model", "data", "scale")},
        "table1": cells,
        "convergence": convergence,
        "statements": statements,
    }


# Records


def read_records(workdir: str | os.PathLike) -> list[dict]:
    """Reads and checks the records of a study.

    Returns:
      The records by block size, parameterization and seed, each with its path as
      "file".

    Raises:
      ValueError: if there is none; if one is damaged or none of a study (the text
        names the file and the key); if two are of the same run; or if they do not
        belong together, as those of studies at different scales.
    """
    folder = pathlib.Path(workdir) / "records"
    records = [_read_record(path) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ValueError(
            f"{folder} holds no records (*.json). Give the folder of a study that has "
            "finished a run at least."
        )
    records.sort(key=lambda r: (*_cell_of(r), r["seed"]))
    for record in records[1:]:
        for key in ("scale", "model", "data"):
            _check_same(records[0], record, key, "one report is of one study")
    for one, other in itertools.pairwise(records):
        if _cell_of(one) == _cell_of(other):
            if one["seed"] == other["seed"]:
                raise ValueError(
                    f"{one['file']} and {other['file']} are records of the same run. "
                    "Remove one."
                )
            reason = "runs that differ in their seed alone are averaged"
            for key in sorted({*one["settings"], *other["settings"]} - {"seed"}):
                _check_same(one, other, f"settings.{key}", reason)
            _check_same(one, other, "steps.train", reason)
    return records


def _cell_of(record):
    place = PARAMETERIZATIONS.index(record["parameterization"])
    return record["block_size"], place


def _check_same(one, other, key, reason):
    values = []
    for record in (one, other):
        value = record
        for part in key.split("."):
            value = value.get(part)
        values.append(value)
    if values[0] != values[1]:
        raise ValueError(
            f"{one['file']} and {other['file']} differ in {key} ({values[0]!r} and "
            f"{values[1]!r}), but {reason}. Keep studies in folders of their own."
        )


def _is_count(value):
    return type(value) is int and value >= 0


def _is_positive_count(value):
    return _is_count(value) and value > 0


def _is_number(value):
    return type(value) in (int, float) and math.isfinite(value)


def _is_positive(value):
    return _is_number(value) and value > 0


def _is_fraction(value):
    return _is_number(value) and 0 <= value <= 1


def _is_text(value):
    return isinstance(value, str)


def _is_object(value):
    return isinstance(value, dict)


def _list_of(check):
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_in_order(value):
    return _list_of(_is_number)(value) and all(
        a <= b for a, b in itertools.pairwise(value)
    )


def _is_fractions(value):
    """At least one, each larger than the one before."""
    return (
        _list_of(_is_fraction)(value)
        and len(value) > 0
        and all(a < b for a, b in itertools.pairwise(value))
    )


_KEYS = {
    ("format",): (lambda v: v == 1, "1, the version this package reads"),
    ("parameterization",): (
        lambda v: v in PARAMETERIZATIONS,
        f"one of {', '.join(PARAMETERIZATIONS)}",
    ),
    ("block_size",): (_is_positive_count, "an integer of at least 1"),
    ("seed",): (_is_count, "an integer of at least 0"),
    ("scale",): (_is_positive, "a positive number"),
    ("model",): (_is_text, "a text"),
    ("data",): (_is_text, "a text"),
    ("settings",): (_is_object, "an object"),
    ("settings", "block_bits"): (_is_positive_count, "an integer of at least 1"),
    ("versions",): (_is_object, "an object"),
    ("machine",): (_is_object, "an object"),
    ("seconds",): (_is_number, "a number"),
    ("sizes", "payload_ratio"): (_is_positive, "a positive number"),
    ("errors", "posterior_mean"): (_is_fraction, "a number from 0 to 1"),
    ("errors", "posterior_sample"): (_is_fraction, "a number from 0 to 1"),
    ("errors", "decoded"): (_is_fraction, "a number from 0 to 1"),
    ("steps", "train"): (_is_count, "an integer of at least 0"),
    ("steps", "total"): (_is_count, "an integer of at least 0"),
    ("curve", "phase"): (_list_of(_is_text), "a list of texts"),
    ("curve", "step"): (_is_in_order, "a list of numbers in order"),
    ("curve", "cross_entropy"): (_list_of(_is_number), "a list of numbers"),
    ("curve", "kl_bits"): (
        _list_of(lambda v: v is None or _is_number(v)),
        "a list of numbers or null",
    ),
}
_CURVE = ("phase", "step", "cross_entropy", "kl_bits")


def _read_record(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    try:
        record = json.loads(path.read_bytes(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no readable JSON: {error}. Remove it or run it again."
        ) from error
    for key, (check, wanted) in _KEYS.items():
        _check_key(path, record, key, check, wanted)
    _check_lengths(path, record, "curve", _CURVE)
    kl_bits = record["settings"].get("kl_bits")
    if not (kl_bits is None or (_is_number(kl_bits) and kl_bits >= 0)):
        _refuse_value(path, ("settings", "kl_bits"), "a number of at least 0", kl_bits)
    for name in _optional(path, record, "histograms"):
        for part in ("loc", "log_scale"):
            key = ("histograms", name, part)
            _check_key(path, record, (*key, "edges"), _is_in_order, "numbers in order")
            _check_key(path, record, (*key, "counts"), _list_of(_is_number), "numbers")
            histogram = record["histograms"][name][part]
            if len(histogram["edges"]) != len(histogram["counts"]) + 1:
                raise ValueError(
                    f"{path}: {'.'.join(key)} must have one edge more than counts."
                )
    for name in _optional(path, record, "pruning"):
        if name not in STRATEGIES:
            _refuse_value(path, ("pruning",), f"by {', '.join(STRATEGIES)}", name)
        key = ("pruning", name)
        fractions = (_is_fractions, "increasing numbers from 0 to 1")
        accuracy = (_list_of(_is_fraction), "numbers from 0 to 1")
        _check_key(path, record, (*key, "fractions"), *fractions)
        _check_key(path, record, (*key, "accuracy"), *accuracy)
        _check_lengths(path, record["pruning"], name, ("fractions", "accuracy"))
    return {**record, "file": str(path)}


def _optional(path, record, key):
    value = record.get(key) or {}
    if not _is_object(value):
        _refuse_value(path, (key,), "an object", value)
    return value


def _check_key(path, record, key, check, wanted):
    value = record
    for position, name in enumerate(key):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(
                f"{path} lacks {'.'.join(key[: position + 1])!r}, so it is no record "
                "of a study. Remove it or run it again."
            )
        value = value[name]
    if not check(value):
        _refuse_value(path, key, wanted, value)


def _refuse_value(path, key, wanted, value):
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise ValueError(f"{path}: {'.'.join(key)} must be {wanted}. Received: {shown}")


def _check_lengths(path, record, key, names):
    lengths = {name: len(record[key][name]) for name in names}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path}: {key} has lists of different lengths: {lengths}")


def _runs(records, parameterization, block_size=None):
    return [
        r
        for r in records
        if r["parameterization"] == parameterization
        and block_size in (None, r["block_size"])
    ]


def _block_sizes(records):
    return sorted({r["block_size"] for r in records})


def _budget_bits(record):
    kl_bits = record["settings"].get("kl_bits")
    return record["settings"]["block_bits"] if kl_bits is None else kl_bits


# Numbers


def mean_and_error(values) -> tuple[float | None, float | None]:
    """Mean and standard error (sample standard deviation / sqrt(n)).

    Either is None where it does not exist: for no values, and the error for one.
    """
    values = np.asarray(values, np.float64)
    if not len(values):
        return None, None
    mean = float(values.mean())
    if len(values) == 1:
        return mean, None
    return mean, float(values.std(ddof=1) / math.sqrt(len(values)))


def iterations_to_converge(curve: dict, budget_bits: float) -> int | None:
    """The optimizer step from which a run has converged in variational training.

    That is the first step from which on, to the end of the phase "variational",

    - the running cross-entropy is at most `CONVERGED_FACTOR` times its final value,
      the mean over the last `FINAL_FRACTION` of the phase's windows (these count as
      converged themselves), and
    - the running mean KL of a block is at most `budget_bits`, up to `BUDGET_TOLERANCE`
      of it.

    "Running" is the median of each window and its neighbours within
    `SMOOTHING_FRACTION` of the windows on either side (fewer at the ends). It takes
    away single outliers; but unlike a mean it leaves a curve that only falls as it is,
    so that it does not shift the step.

    Args:
      curve: equally long lists "phase", "step", "cross_entropy" (any unit) and
        "kl_bits", one value a window of training steps; None in "kl_bits" is not at
        budget.
      budget_bits: KL of a block allowed, in bits.

    Returns:
      The step of the first window from which both hold, or None if they do not hold
      in the end.
    """
    chosen = _variational(curve)
    count = len(chosen)
    if not count:
        return None
    cross_entropy = _numbers(curve["cross_entropy"])[chosen]
    kl_bits = np.nan_to_num(_numbers(curve["kl_bits"])[chosen], nan=np.inf)
    last = math.ceil(count * FINAL_FRACTION)
    half = round(count * SMOOTHING_FRACTION)
    final = cross_entropy[-last:].mean()
    converged = _running_median(cross_entropy, half) <= CONVERGED_FACTOR * final
    converged[-last:] = True
    converged &= _running_median(kl_bits, half) <= budget_bits * (1 + BUDGET_TOLERANCE)
    missed = np.flatnonzero(~converged)
    first = missed[-1] + 1 if len(missed) else 0
    return None if first == count else int(curve["step"][chosen[first]])


def _variational(curve):
    """Indices of the windows before coding."""
    return np.flatnonzero(np.array(curve["phase"], object) == "variational")


def _numbers(values):
    return np.array([np.nan if v is None else v for v in values], np.float64)


def _running_median(values, half):
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.nanmedian(windows, axis=1)


def _percent(fraction):
    return f"{100 * fraction:.0f} %"


def _rounded(value):
    return None if value is None else round(value, 6)


# Table 1


def table1(records: list[dict]) -> list[dict]:
    """The paper's Table 1: a dict a block size and parameterization.

    Errors are on the test set in %, each a mean over "n" seeds with its standard
    error. "difference_percent" is ours minus the paper's error after coding,
    "difference_in_errors" the same in units of both standard errors together (the root
    of the sum of their squares), and "outside_paper_spread" whether that is over
    `STANDARD_ERRORS`. All block sizes of the paper have rows; what is missing is None.
    """
    cells = []
    for block_size in sorted({*PAPER_ERRORS, *_block_sizes(records)}):
        for parameterization in PARAMETERIZATIONS:
            runs = _runs(records, parameterization, block_size)
            cell = {
                "block_size": block_size,
                "parameterization": parameterization,
                "payload_ratio": _rounded(
                    mean_and_error([r["sizes"]["payload_ratio"] for r in runs])[0]
                ),
                "n": len(runs),
                "seeds": [r["seed"] for r in runs],
            }
            for stage in ("decoded", "posterior_mean", "posterior_sample"):
                values = [100 * r["errors"][stage] for r in runs]
                mean, error = mean_and_error(values)
                cell[f"{stage}_error_percent"] = _rounded(mean)
                cell[f"{stage}_standard_error_percent"] = _rounded(error)
            paper = PAPER_ERRORS.get(block_size, {}).get(parameterization)
            cell["paper_error_percent"] = paper[0] if paper else None
            cell["paper_standard_error_percent"] = paper[1] if paper else None
            cell.update(_difference(cell))
            cell["train_steps"] = runs[0]["steps"]["train"] if runs else None
            total, _ = mean_and_error([r["steps"]["total"] for r in runs])
            cell["total_steps"] = None if total is None else round(total)
            cell["scale"] = records[0]["scale"]
            cell["paper_payload_ratio"] = PAPER_RATIOS.get(block_size)
            cell["paper_train_steps"] = PAPER_STEPS[parameterization] if paper else None
            cell["paper_n"] = PAPER_SEEDS if paper else None
            cells.append(cell)
    return cells


def _difference(cell):
    ours = cell["decoded_error_percent"], cell["decoded_standard_error_percent"]
    paper = cell["paper_error_percent"], cell["paper_standard_error_percent"]
    difference = in_errors = None
    if None not in (ours[0], paper[0]):
        difference = ours[0] - paper[0]
        if ours[1] is not None:
            in_errors = difference / math.hypot(ours[1], paper[1])
    return {
        "difference_percent": _rounded(difference),
        "difference_in_errors": _rounded(in_errors),
        "outside_paper_spread": None
        if in_errors is None
        else abs(in_errors) > STANDARD_ERRORS,
    }


def _table1_rows(cells):
    names = [_NAMES[p] for p in PARAMETERIZATIONS]
    header = ["Block size", "Ratio"]
    for name in names:
        header += [f"{name}, %", "n", f"{name}, paper, %"]
    rows = [header]
    for block_size in sorted({c["block_size"] for c in cells}):
        row = [c for c in cells if c["block_size"] == block_size]
        ratios = {f"{c['payload_ratio']:.0f}x" for c in row if c["n"]}
        line = [str(block_size), " / ".join(sorted(ratios)) or _EMPTY]
        for cell in row:
            line += [
                _plus_minus(
                    cell["decoded_error_percent"],
                    cell["decoded_standard_error_percent"],
                    ".2f",
                ),
                str(cell["n"]) if cell["n"] else _EMPTY,
                _plus_minus(
                    cell["paper_error_percent"],
                    cell["paper_standard_error_percent"],
                    ".2f",
                ),
            ]
        rows.append(line)
    line = ["Optimizer iterations", ""]
    for parameterization in PARAMETERIZATIONS:
        steps = {
            c["train_steps"]
            for c in cells
            if c["parameterization"] == parameterization and c["n"]
        }
        ours = " / ".join(f"{s:,}" for s in sorted(steps))
        line += [ours or _EMPTY, "", f"{PAPER_STEPS[parameterization]:,}"]
    return [*rows, line]


def _plus_minus(mean, error, form):
    if mean is None:
        return _EMPTY
    return f"{mean:{form}} ± {'n/a' if error is None else f'{error:{form}}'}"


def _table1_notes(records, cells):
    first = records[0]
    notes = [
        f"Error of {first['model']} on the test set of {first['data']} after coding, "
        "mean ± standard error over n seeds. The paper's figures (Lin et al. 2023, "
        f"Table 1) are for LeNet-5 on MNIST over {PAPER_SEEDS} seeds.",
        f"Scale of the study: {first['scale']:g}, where 1 is the paper's number of "
        "optimizer steps. Iterations are those of variational training, before coding.",
        "Ratio: bytes of the float32 weights over bytes of the indices (payload).",
    ]
    if any(c["n"] == 1 for c in cells):
        notes.append(
            "n/a: one seed has no standard error, so the cell is not compared with the "
            "paper."
        )
    empty = [c for c in cells if not c["n"]]
    if empty:
        notes.append(f"{_EMPTY}: no run yet ({len(empty)} of {len(cells)} cells).")
    rule = (
        f"more than {STANDARD_ERRORS:g} combined standard errors from the paper's mean"
    )
    outside = [
        f"{_NAMES[c['parameterization']]} with blocks of {c['block_size']} "
        f"({c['difference_percent']:+.2f} points, {c['difference_in_errors']:+.1f} "
        "standard errors)"
        for c in cells
        if c["outside_paper_spread"]
    ]
    compared = sum(c["outside_paper_spread"] is not None for c in cells)
    verdict = (
        ", ".join(outside) if outside else f"none of the {compared} cells compared"
    )
    return [*notes, f"Outside the paper's spread, {rule}: {verdict}."]


# Convergence


def convergence_table(records: list[dict]) -> list[dict]:
    """Iterations to converge, a dict a block size and parameterization.

    "iterations" is the mean of `iterations_to_converge` over the "converged" of "n"
    seeds.
    """
    table = []
    for block_size in _block_sizes(records):
        for parameterization in PARAMETERIZATIONS:
            runs = _runs(records, parameterization, block_size)
            steps = [iterations_to_converge(r["curve"], _budget_bits(r)) for r in runs]
            steps = [s for s in steps if s is not None]
            mean, error = mean_and_error(steps)
            table.append(
                {
                    "block_size": block_size,
                    "parameterization": parameterization,
                    "n": len(runs),
                    "converged": len(steps),
                    "iterations": _rounded(mean),
                    "iterations_standard_error": _rounded(error),
                    "train_steps": runs[0]["steps"]["train"] if runs else None,
                    "budget_bits": _budget_bits(runs[0]) if runs else None,
                }
            )
    return table


def _convergence_rows(table):
    header = ["Block size"]
    for name in (_NAMES[p] for p in PARAMETERIZATIONS):
        header += [f"{name}, iterations", "converged", "trained"]
    rows = [[*header, "Mean-Var / Mean-KL"]]
    for block_size in sorted({c["block_size"] for c in table}):
        row = [c for c in table if c["block_size"] == block_size]
        line = [str(block_size)]
        for cell in row:
            mean, error = cell["iterations"], cell["iterations_standard_error"]
            count = f"{cell['converged']} of {cell['n']}" if cell["n"] else _EMPTY
            steps = f"{cell['train_steps']:,}" if cell["n"] else _EMPTY
            line += [_plus_minus(mean, error, ",.0f"), count, steps]
        var, kl = (c["iterations"] for c in row)
        rows.append([*line, f"{var / kl:.2f}" if var is not None and kl else _EMPTY])
    steps = [PAPER_STEPS[p] for p in PARAMETERIZATIONS]
    paper = ["Paper"]
    for count in steps:
        paper += [_EMPTY, _EMPTY, f"{count:,}"]
    return [*rows, [*paper, f"{steps[0] / steps[1]:.2f} (of those trained)"]]


def _convergence_notes():
    return [
        "Iterations: the optimizer step from which on the cross-entropy of training is "
        f"at most {CONVERGED_FACTOR:g} times its final value (the mean of the last "
        f"{_percent(FINAL_FRACTION)} of the windows) and the mean KL of a block at "
        f"most its budget + {_percent(BUDGET_TOLERANCE)}; both are running medians "
        f"over ±{_percent(SMOOTHING_FRACTION)} of the windows. Mean ± standard error "
        "over the seeds that converged (n/a: one seed).",
        "The final value is each run's own, so a run that was stopped early can look "
        "converged.",
    ]


# Pruning


def pruning_statements(records: list[dict]) -> list[dict]:
    """The paper's three statements on pruning, answered from the records.

    All runs of a parameterization count alike, over block sizes and seeds, as in
    Figure 3. Accuracy between two measured fractions is interpolated. The paper's
    words are made precise so: "a test accuracy of 80 % is maintained" is a mean of at
    least `UNIFORM_ACCURACY`; "nearly identical" a difference of at most
    `STANDARD_ERRORS` combined standard errors at every measured fraction; "close to
    90 %" a mean of at least `KL_ACCURACY`; "falls off almost to random guessing" a mean
    below `COLLAPSED_ACCURACY`, when more answers are wrong than right.

    Returns:
      Dicts of texts: "statement", "criterion", "answer" ("yes", "no" or "no data") and
      "numbers", which decide.
    """
    uniform = _accuracy_at(records, "mean_kl", "uniform", 0.3)
    at_90 = _accuracy_at(records, "mean_kl", "kl", 0.9)
    at_50 = _accuracy_at(records, "mean_var", "kl", 0.5)
    worst = _largest_difference(records, "magnitude", 0.5)
    return [
        {
            "statement": "Mean-KL keeps 80 % accuracy when 30 % of the weights are "
            "pruned uniformly at random.",
            "criterion": "mean accuracy of Mean-KL at 30 % >= "
            f"{_percent(UNIFORM_ACCURACY)}",
            "answer": _answer(_compared(uniform, lambda a: a >= UNIFORM_ACCURACY)),
            "numbers": f"Mean-KL: {_accuracy(uniform)}",
        },
        {
            "statement": "Pruned by magnitude, both are the same up to 50 %.",
            "criterion": f"difference of the means <= {STANDARD_ERRORS:g} combined "
            "standard errors at every measured fraction up to 50 %",
            "answer": _answer(worst and worst[0] <= STANDARD_ERRORS),
            "numbers": "no data"
            if worst is None
            else f"largest: {worst[0]:.1f} standard errors, with {_percent(worst[1])} "
            f"pruned (Mean-Var {_accuracy(worst[2])}, Mean-KL {_accuracy(worst[3])})",
        },
        {
            "statement": "Pruned by KL, Mean-KL keeps close to 90 % accuracy at 90 %, "
            "and Mean-Var has collapsed at 50 %.",
            "criterion": "mean accuracy of Mean-KL at 90 % >= "
            f"{_percent(KL_ACCURACY)} and of Mean-Var at 50 % < "
            f"{_percent(COLLAPSED_ACCURACY)}",
            "answer": _answer(
                _compared(at_90, lambda a: a >= KL_ACCURACY),
                _compared(at_50, lambda a: a < COLLAPSED_ACCURACY),
            ),
            "numbers": f"Mean-KL: {_accuracy(at_90)}; Mean-Var: {_accuracy(at_50)}",
        },
    ]


def _pruned(records, parameterization, strategy):
    """Fractions and accuracies, a pair of arrays each a run."""
    found = [
        (r.get("pruning") or {}).get(strategy) for r in _runs(records, parameterization)
    ]
    return [(_numbers(p["fractions"]), _numbers(p["accuracy"])) for p in found if p]


def _accuracy_at(records, parameterization, strategy, fraction):
    """Mean and standard error over the runs that were pruned that far."""
    return mean_and_error(
        [
            np.interp(fraction, fractions, accuracy)
            for fractions, accuracy in _pruned(records, parameterization, strategy)
            if fractions[0] <= fraction <= fractions[-1]
        ]
    )


def _pruning_curve(records, parameterization, strategy):
    """Fractions, mean accuracies and standard errors (NaN for one run)."""
    runs = _pruned(records, parameterization, strategy)
    if not runs:
        return None
    grid = np.unique(np.concatenate([fractions for fractions, _ in runs]))
    points = [_accuracy_at(records, parameterization, strategy, f) for f in grid]
    return grid, *(_numbers(values) for values in zip(*points))


def _largest_difference(records, strategy, limit):
    """In combined standard errors: how large, at which fraction, of what; or None."""
    curves = [_pruning_curve(records, p, strategy) for p in PARAMETERIZATIONS]
    if any(curve is None for curve in curves):
        return None
    shared = np.intersect1d(curves[0][0], curves[1][0])
    if not len(shared) or shared[-1] < limit:
        return None
    found = []
    for fraction in shared[shared <= limit]:
        one, other = (
            _accuracy_at(records, p, strategy, fraction) for p in PARAMETERIZATIONS
        )
        if None in (one[1], other[1]):
            return None
        error = math.hypot(one[1], other[1])
        gap = abs(one[0] - other[0])
        size = gap / error if error else math.inf if gap else 0.0
        found.append((size, float(fraction), one, other))
    return max(found, key=lambda f: f[0])


def _compared(estimate, holds):
    return None if estimate[0] is None else holds(estimate[0])


def _answer(*parts):
    if any(part is False for part in parts):
        return "no"
    return "no data" if None in parts else "yes"


def _accuracy(estimate):
    mean, error = estimate
    if mean is None:
        return "no data"
    return f"{100 * mean:.1f} ± {'n/a' if error is None else f'{100 * error:.1f}'} %"


def _statement_rows(statements):
    keys = ("statement", "criterion", "answer", "numbers")
    rows = [["Statement of the paper", "Criterion", "Answer", "Numbers"]]
    return rows + [[s[key] for key in keys] for s in statements]


def _statement_notes():
    return [
        "Over all block sizes and seeds of a parameterization, mean ± standard error "
        "(n/a: one run). The criteria are ours; the paper's words are vaguer. Equal "
        "curves, too, can be more than "
        f"{STANDARD_ERRORS:g} standard errors apart at one of many fractions."
    ]


# Figures

# Colours of Okabe and Ito, which the colour-blind can tell apart; in grey, the one is
# dark and dashed or hatched, the other light and solid.
_COLORS = {"mean_var": "#0072B2", "mean_kl": "#E69F00"}
_LINES = {"mean_var": (0, (4, 1.5)), "mean_kl": "-"}
_MARKERS = {"mean_var": "s", "mean_kl": "o"}
# Open around filled, so that both are seen where the curves are the same.
_POINTS = {
    "mean_var": {"marker": "s", "markersize": 6.5, "markerfacecolor": "none"},
    "mean_kl": {"marker": "o", "markersize": 3.5},
}
_HATCHES = {"mean_var": "//////", "mean_kl": None}
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "tfmiracle",
}
_WIDTH = 6.75  # inches, the text width of the paper


def _figures(records, convergence):
    """The bytes of each figure that the records have data for, by name and format."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise ValueError(
            "The figures of a report need matplotlib. Install it with "
            "pip install 'tfmiracle[report]'."
        ) from error
    # Over the defaults, so that a user's own settings do not change the bytes.
    with matplotlib.style.context(["default", _STYLE]):
        drawn = {
            "dynamics": _draw_dynamics(records, convergence),
            "histograms": _draw_histograms(records),
            "pruning": _draw_pruning(records),
        }
        return {
            name: _saved(figure) for name, figure in drawn.items() if figure is not None
        }


def _saved(figure):
    found = {}
    # Neither a date nor the version of matplotlib, so that bytes can be compared.
    for suffix, metadata in (
        ("png", {"Software": None}),
        ("svg", {"Date": None, "Creator": None}),
    ):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=metadata)
        found[suffix] = buffer.getvalue()
        figure.set_layout_engine("none")  # the places of the first are for both
    return found


def _figure(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _legend(figure, handles):
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


def _line(parameterization, **style):
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=_COLORS[parameterization],
        linestyle=_LINES[parameterization],
        label=_NAMES[parameterization],
        **style,
    )


def _draw_dynamics(records, convergence):
    """Cross-entropy and KL in variational training; None without such a phase."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    records = [r for r in records if len(_variational(r["curve"]))]
    if not records:
        return None
    converged = {
        (c["block_size"], c["parameterization"]): c["iterations"] for c in convergence
    }
    budget_style = {"color": "0.3", "linewidth": 0.8, "linestyle": ":"}
    mark_style = {"markersize": 6, "markeredgecolor": "black"}
    block_sizes = _block_sizes(records)
    figure = _figure(_WIDTH * max(1, len(block_sizes) / 3), 3.6)
    axes = figure.subplots(
        2, len(block_sizes), sharex=True, sharey="row", squeeze=False
    )
    for column, block_size in zip(axes.T, block_sizes):
        for parameterization in PARAMETERIZATIONS:
            runs = _runs(records, parameterization, block_size)
            if not runs:
                continue
            color = _COLORS[parameterization]
            iterations = converged[block_size, parameterization]
            for axis, key in zip(column, ("cross_entropy", "kl_bits")):
                step, mean, low, high = _over_seeds(runs, key)
                axis.plot(step, mean, color=color, linestyle=_LINES[parameterization])
                axis.fill_between(step, low, high, color=color, alpha=0.3, linewidth=0)
                if iterations is None:
                    continue
                place = iterations, np.interp(iterations, step, mean)
                marker = _MARKERS[parameterization]
                axis.plot(*place, marker=marker, color=color, zorder=3, **mark_style)
                if key == "cross_entropy":
                    axis.annotate(
                        f"{iterations / 1000:.3g}",
                        place,
                        (0, 6),
                        textcoords="offset points",
                        horizontalalignment="center",
                        fontsize=7,
                    )
        column[0].set_title(f"Blocks of {block_size} weights")
        budgets = {_budget_bits(r) for r in records if r["block_size"] == block_size}
        for budget in budgets:
            column[1].axhline(budget, **budget_style)
        column[1].set_xlabel("Optimizer steps (thousands)")
        column[1].set_xlim(left=0)
        column[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}"))
    for axis in axes.flat:
        if np.isfinite(axis.dataLim.minposy):  # there is something positive
            axis.set_yscale("log")
    for axis in axes[1]:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axes[0][0].set_ylabel("Cross-entropy (nats)")
    axes[1][0].set_ylabel("KL of a block (bits)")
    figure.align_ylabels(axes[:, 0])
    handles = []
    for parameterization in PARAMETERIZATIONS:
        style = {"color": _COLORS[parameterization], **mark_style}
        marker = _MARKERS[parameterization]
        handles += [
            _line(parameterization),
            Line2D([], [], marker=marker, linestyle="", label="converged", **style),
        ]
    _legend(figure, [*handles, Line2D([], [], label="budget", **budget_style)])
    return figure


def _over_seeds(runs, key):
    """Steps, mean, least and largest value over the runs, where any has one."""
    curves = [(r["curve"], _variational(r["curve"])) for r in runs]
    curves = [(_numbers(c["step"])[i], _numbers(c[key])[i]) for c, i in curves]
    steps = np.unique(np.concatenate([step for step, _ in curves]))
    values = np.ma.masked_invalid(
        [np.interp(steps, *curve, left=np.nan, right=np.nan) for curve in curves]
    )
    found = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
    return steps, *(np.ma.filled(value.astype(float), np.nan) for value in found)


def _shown_histograms(records):
    """For each parameterization that has any, the record whose histograms are drawn."""
    found = [r for r in records if r.get("histograms")]
    complete = [
        size
        for size in _block_sizes(found)
        if all(_runs(found, p, size) for p in PARAMETERIZATIONS)
    ]
    for size in (complete or _block_sizes(found))[:1]:
        runs = {p: _runs(found, p, size) for p in PARAMETERIZATIONS}
        return {p: r[0] for p, r in runs.items() if r}
    return {}


def _draw_histograms(records):
    """Means and log standard deviations by variable; None without data."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import NullFormatter

    shown = {p: r["histograms"] for p, r in _shown_histograms(records).items()}
    if not shown:
        return None
    # A band of two rows for kernels, another for biases, ...
    names = list(dict.fromkeys(name for h in shown.values() for name in h))
    kinds = dict.fromkeys(name.rsplit("/")[-1] for name in names)
    bands = []
    for kind in kinds:
        band = [name for name in names if name.rsplit("/")[-1] == kind]
        bands += [band[i : i + 4] for i in range(0, len(band), 4)]
    columns = max(map(len, bands))
    width = _WIDTH * max(1 / 2, columns / 4)
    figure = _figure(width, 2.6 * len(bands) + 0.3)
    axes = figure.subplots(2 * len(bands), columns, squeeze=False)
    labels = {"loc": "Mean", "log_scale": "Log std. deviation"}
    for place, axis in np.ndenumerate(axes):
        band, part = bands[place[0] // 2], list(labels)[place[0] % 2]
        if place[1] >= len(band):
            axis.set_axis_off()
            continue
        name = band[place[1]]
        densities = [
            _draw_histogram(axis, p, histograms[name][part])
            for p, histograms in shown.items()
            if name in histograms
        ]
        densities = np.concatenate(densities)
        densities = densities[densities > 0]
        if len(densities):
            # Whole decades, so that there are two labels, and a single count is seen.
            decades = np.log10([densities.min() / 2, densities.max()])
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_ylim(10 ** np.floor(decades[0]), 10 ** np.ceil(decades[1]))
        if part == "loc":
            axis.set_title(name)
        axis.set_xlabel(labels[part])
        axis.grid(False)
        if not place[1]:
            axis.set_ylabel("Density")
    _legend(
        figure,
        [
            Patch(
                facecolor=(_COLORS[p], 0.35),
                edgecolor=_COLORS[p],
                hatch=_HATCHES[p],
                label=_NAMES[p],
            )
            for p in PARAMETERIZATIONS
        ],
    )
    return figure


def _draw_histogram(axis, parameterization, histogram):
    """Returns the densities drawn."""
    edges, counts = _numbers(histogram["edges"]), _numbers(histogram["counts"])
    # Edges are rounded in a record; a bin without width becomes part of the next.
    distinct = np.unique(edges)
    if len(distinct) < 2:
        return np.zeros(0)
    bins = np.minimum(np.searchsorted(distinct, edges[:-1]), len(distinct) - 2)
    counts = np.bincount(bins, counts, minlength=len(distinct) - 1)
    density = counts / np.maximum(counts.sum(), 1) / np.diff(distinct)
    axis.stairs(
        density,
        distinct,
        fill=True,
        facecolor=(_COLORS[parameterization], 0.35),
        edgecolor=_COLORS[parameterization],
        hatch=_HATCHES[parameterization],
        linewidth=0.8,
    )
    return density


def _draw_pruning(records):
    """Accuracy against the fraction pruned; None without data."""
    titles = {
        "uniform": "Uniformly at random",
        "magnitude": "Smallest absolute value",
        "kl": "Smallest KL to zero",
    }
    if not any(_pruned(records, p, s) for p in PARAMETERIZATIONS for s in STRATEGIES):
        return None
    figure = _figure(_WIDTH, 2.5)
    axes = figure.subplots(1, len(STRATEGIES), sharex=True, sharey=True)
    for axis, strategy in zip(axes, STRATEGIES):
        for parameterization in PARAMETERIZATIONS:
            curve = _pruning_curve(records, parameterization, strategy)
            if curve is None:
                continue
            fractions, mean, error = (100 * values for values in curve)
            color = _COLORS[parameterization]
            axis.plot(
                fractions,
                mean,
                color=color,
                linestyle=_LINES[parameterization],
                markevery=max(1, len(fractions) // 10),
                **_POINTS[parameterization],
            )
            axis.fill_between(
                fractions, mean - error, mean + error, color=color, alpha=0.3, lw=0
            )
        axis.set_title(titles[strategy])
        axis.set_xlabel("Weights set to zero (%)")
        axis.set_xlim(-4, 104)
        axis.set_ylim(0, 104)
    axes[0].set_ylabel("Test accuracy (%)")
    _legend(figure, [_line(p, **_POINTS[p]) for p in PARAMETERIZATIONS])
    return figure


def _captions(records):
    shown = _shown_histograms(records)
    runs = " and ".join(
        f"{_NAMES[p]} (blocks of {r['block_size']}, seed {r['seed']})"
        for p, r in shown.items()
    )
    pruned = ", ".join(
        f"{_NAMES[p]}: {sum(bool(r.get('pruning')) for r in _runs(records, p))}"
        for p in PARAMETERIZATIONS
    )
    return {
        "dynamics": "Variational training, as the paper's Figure 2: mean (line) and "
        "range (band) over seeds of the cross-entropy of training and of the mean KL "
        "of a block. Markers: the mean number of iterations to converge, in thousands.",
        "histograms": "Posterior means and log standard deviations (natural logarithm) "
        "by variable, as the paper's Figure 1, on a logarithmic axis. The bins of runs "
        f"differ, so one run of each is shown, as in the paper: {runs}.",
        "pruning": "Accuracy of the decoded network when weights are set to zero, as "
        "the paper's Figure 3: mean (line) and standard error (band) over block sizes "
        f"and seeds. Runs: {pruned}.",
    }


# Files


def _markdown(rows, notes):
    def line(cells):
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    lines = [line(rows[0]), line(["---"] * len(rows[0])), *map(line, rows[1:])]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _csv(table):
    def cell(value):
        if isinstance(value, bool):
            return "yes" if value else "no"
        return " ".join(map(str, value)) if isinstance(value, list) else value

    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in table)
    return buffer.getvalue()


_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; background: #fff; }
h1, h2 { line-height: 1.2; }
table { border-collapse: collapse; font-size: 0.9rem; margin: 1rem 0; }
th { border-bottom: 2px solid #222; text-align: left; vertical-align: bottom; }
td { border-bottom: 1px solid #ddd; vertical-align: top; }
th, td { padding: 0.3rem 0.7rem; }
.wide { overflow-x: auto; }
.note, figcaption { color: #555; font-size: 0.9rem; margin: 0.3rem 0; }
figure { margin: 1rem 0; }
img { max-width: 100%; }
"""


def _page(records, rows, notes, figures):
    first = records[0]
    study = (
        f"{first['model']} on {first['data']}, scale {first['scale']:g}: "
        f"{len(records)} {'run' if len(records) == 1 else 'runs'}, "
        f"{sum(r['seconds'] for r in records) / 3600:,.1f} hours."
    )
    captions = _captions(records)

    def table(name):
        return _html_table(rows[name]) + "".join(map(_paragraph, notes[name]))

    def picture(name):
        if name not in figures:
            return _paragraph("The records have no data for this figure.")
        data = base64.b64encode(figures[name]["svg"]).decode()
        return (
            f'<figure><img alt="{html.escape(captions[name])}" '
            f'src="data:image/svg+xml;base64,{data}"/>\n'
            f"<figcaption>{html.escape(captions[name])}</figcaption></figure>\n"
        )

    sections = {
        "Error after coding": table("table1"),
        "Training": picture("dynamics") + table("convergence"),
        "Posteriors": picture("histograms"),
        "Pruning": picture("pruning") + table("statements"),
        "Settings": _html_table(_settings_rows(records)),
        "Versions and machines": _html_table(_versions_rows(records)),
    }
    body = "".join(f"<h2>{name}</h2>\n{text}" for name, text in sections.items())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width"/>\n'
        f"<title>Mean-Var and Mean-KL</title>\n<style>{_CSS}</style></head>\n<body>\n"
        "<h1>MIRACLE with Mean-Var and Mean-KL parameterization</h1>\n"
        f"<p>{html.escape(study)}</p>\n{body}</body>\n</html>\n"
    )


def _paragraph(text):
    return f'<p class="note">{html.escape(text)}</p>\n'


def _html_table(rows):
    def line(tag, cells):
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>\n"

    head, *body = rows
    lines = "".join(line("td", cells) for cells in body)
    return (
        f'<div class="wide"><table>\n<thead>{line("th", head)}</thead>\n'
        f"<tbody>{lines}</tbody></table></div>\n"
    )


def _settings_rows(records):
    """The values each setting has, by parameterization."""
    rows = [["Setting", *(_NAMES[p] for p in PARAMETERIZATIONS)]]
    for key in dict.fromkeys(key for r in records for key in r["settings"]):
        row = [key]
        for parameterization in PARAMETERIZATIONS:
            settings = [r["settings"] for r in _runs(records, parameterization)]
            row.append(_distinct(s[key] for s in settings if key in s))
        rows.append(row)
    return rows


def _versions_rows(records):
    rows = [["What", "Values"]]
    for part in ("versions", "machine"):
        for key in dict.fromkeys(key for r in records for key in r[part]):
            values = _distinct(r[part][key] for r in records if key in r[part])
            rows.append([key, values])
    return rows


def _distinct(values):
    shown = dict.fromkeys(v if isinstance(v, str) else json.dumps(v) for v in values)
    return ", ".join(shown) or _EMPTY
