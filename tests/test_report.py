"""The report of a study, from records made up here."""

import base64
import csv
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from support import run_python

from tfmiracle import report
from tfmiracle.report import (
    convergence_table,
    iterations_to_converge,
    mean_and_error,
    pruning_statements,
    read_records,
    table1,
    write_report,
)

TABLES = {
    f"{t}.{s}" for t in ("table1", "convergence", "statements") for s in ("md", "csv")
}
PICTURES = {
    f"{name}.{suffix}"
    for name in ("dynamics", "histograms", "pruning")
    for suffix in ("png", "svg")
}


def curve(cross_entropy, kl_bits=None, phase="variational"):
    count = len(cross_entropy)
    return {
        "phase": [phase] * count,
        "step": [100 * (i + 1) for i in range(count)],
        "cross_entropy": list(cross_entropy),
        "kl_bits": [20.0] * count if kl_bits is None else list(kl_bits),
        "accuracy": [0.9] * count,
    }


def record(parameterization="mean_kl", block_size=20, seed=0, **changes):
    """A small one without histograms and pruning."""
    made = {
        "format": 1,
        "parameterization": parameterization,
        "block_size": block_size,
        "seed": seed,
        "scale": 0.5,
        "model": "lenet5",
        "data": "mnist",
        "settings": {
            "parameterization": parameterization,
            "block_size": block_size,
            "block_bits": 20,
            "kl_bits": None,
            "seed": seed,
        },
        "versions": {"tfmiracle": "0.1.0", "numpy": "2.0 <beta> & more"},
        "machine": {"processor": "a processor", "cores": 2},
        "seconds": 1800.0,
        "sizes": {
            "payload_ratio": {20: 555.26, 30: 833.4, 40: 1111.1}.get(block_size, 5)
        },
        "sha256": "00",
        "errors": {"posterior_mean": 0.01, "posterior_sample": 0.02, "decoded": 0.009},
        "steps": {
            "train": {"mean_var": 100_000, "mean_kl": 50_000}[parameterization],
            "total": 174_200,
        },
        "curve": curve([2, 1, 0.5, 0.2, 0.1, 0.1]),
        "coding": {"step": [], "blocks": [], "kl_bits": []},
    }
    return {**made, **changes}


def with_error(decoded, *cell):
    made = record(*cell)
    made["errors"]["decoded"] = decoded
    return made


def with_pruning(parameterization, seed=0, **accuracies):
    """Accuracies at 0, 30, 50, 90 and 100 % pruned, by strategy."""
    pruning = {
        strategy: {
            "fractions": [0, 0.3, 0.5, 0.9, 1][: len(values)],
            "accuracy": values,
        }
        for strategy, values in accuracies.items()
    }
    return record(parameterization, 20, seed, pruning=pruning)


def with_all(parameterization, block_size=20, seed=0):
    rng = np.random.default_rng([block_size, seed, len(parameterization)])
    counts = rng.integers(0, 50, 20).tolist()
    edges = np.linspace(-1 - seed, 1, 21).tolist()
    histogram = {"edges": edges, "counts": counts}
    fractions = np.linspace(0, 1, 11)
    pruned = {
        "fractions": fractions.tolist(),
        "accuracy": (0.98 - 0.8 * fractions**2 - 0.01 * rng.random()).tolist(),
    }
    return record(
        parameterization,
        block_size,
        seed,
        curve=curve(
            2 * np.exp(-np.arange(40) / 8) + 0.1 + 0.01 * rng.random(40),
            [*np.geomspace(300, 20, 20), *[20] * 19, None],
        ),
        histograms={
            name: {"loc": histogram, "log_scale": histogram}
            for name in ("conv1/kernel", "conv1/bias")
        },
        pruning={s: pruned for s in ("uniform", "magnitude", "kl")},
    )


def saved(folder, *records):
    (folder / "records").mkdir(exist_ok=True)
    for r in records:
        name = f"{r['parameterization']}_b{r['block_size']}_s{r['seed']}.json"
        (folder / "records" / name).write_text(json.dumps(r))
    return folder


def loaded(folder, *records):
    return read_records(saved(folder, *records))


def find(rows, block_size, parameterization):
    (row,) = (
        r
        for r in rows
        if (r["block_size"], r["parameterization"]) == (block_size, parameterization)
    )
    return row


# Numbers


def test_mean_and_error():
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([3]) == (3, None)
    assert mean_and_error([1, 2, 3, 4, 5]) == (3, pytest.approx((2.5 / 5) ** 0.5))


def test_table1_is_exact(tmp_path):
    records = loaded(
        tmp_path,
        with_error(0.008, "mean_kl", 20, 0),
        with_error(0.010, "mean_kl", 20, 1),
        with_error(0.0123, "mean_var", 30, 7),
    )
    cells = table1(records)
    assert [(c["block_size"], c["parameterization"]) for c in cells] == [
        (size, p) for size in (20, 30, 40) for p in ("mean_var", "mean_kl")
    ]
    assert find(cells, 20, "mean_kl") == {
        "block_size": 20,
        "parameterization": "mean_kl",
        "payload_ratio": 555.26,
        "n": 2,
        "seeds": [0, 1],
        "decoded_error_percent": 0.9,
        "decoded_standard_error_percent": 0.1,
        "posterior_mean_error_percent": 1.0,
        "posterior_mean_standard_error_percent": 0.0,
        "posterior_sample_error_percent": 2.0,
        "posterior_sample_standard_error_percent": 0.0,
        "paper_error_percent": 0.77,
        "paper_standard_error_percent": 0.05,
        "difference_percent": 0.13,
        "difference_in_errors": pytest.approx(0.13 / np.hypot(0.1, 0.05), abs=1e-6),
        "outside_paper_spread": False,
        "train_steps": 50_000,
        "total_steps": 174_200,
        "scale": 0.5,
        "paper_payload_ratio": 555,
        "paper_train_steps": 100_000,
        "paper_n": 10,
    }
    one_seed = find(cells, 30, "mean_var")
    assert one_seed["decoded_error_percent"] == 1.23
    assert one_seed["decoded_standard_error_percent"] is None
    assert one_seed["outside_paper_spread"] is None
    missing = find(cells, 40, "mean_kl")
    assert missing["n"] == 0 and missing["paper_error_percent"] == 0.96
    for key in ("payload_ratio", "decoded_error_percent", "train_steps", "total_steps"):
        assert missing[key] is None

    text = report._markdown(
        report._table1_rows(cells), report._table1_notes(records, cells)
    )
    table, notes = text.split("\n\n", 1)
    assert table.split("\n") == [
        "| Block size | Ratio | Mean-Var, % | n | Mean-Var, paper, % "
        "| Mean-KL, % | n | Mean-KL, paper, % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 20 | 555x | — | — | 0.82 ± 0.07 | 0.90 ± 0.10 | 2 | 0.77 ± 0.05 |",
        "| 30 | 833x | 1.23 ± n/a | 1 | 0.79 ± 0.05 | — | — | 0.87 ± 0.08 |",
        "| 40 | — | — | — | 0.87 ± 0.07 | — | — | 0.96 ± 0.08 |",
        "| Optimizer iterations |  | 100,000 |  | 200,000 | 50,000 |  | 100,000 |",
    ]
    assert "Scale of the study: 0.5" in notes
    assert "n/a: one seed has no standard error" in notes
    assert "—: no run yet (4 of 6 cells)." in notes
    assert "none of the 1 cells compared" in notes

    rows = list(csv.DictReader(io.StringIO(report._csv(cells))))
    assert len(rows) == 6
    row = rows[1]
    assert row["decoded_error_percent"] == "0.9" and row["seeds"] == "0 1"
    assert row["outside_paper_spread"] == "no"
    assert rows[5]["n"] == "0" and rows[5]["decoded_error_percent"] == ""
    assert rows[2]["outside_paper_spread"] == ""


def test_outside_the_papers_spread(tmp_path):
    records = loaded(
        tmp_path,
        *(with_error(0.0119 + 0.0001 * s, "mean_var", 40, s) for s in range(3)),
        *(with_error(0.0095 + 0.0001 * s, "mean_kl", 40, s) for s in range(3)),
    )
    cells = table1(records)
    cell = find(cells, 40, "mean_var")
    error = np.hypot(0.01 / 3**0.5, 0.07)
    assert cell["difference_in_errors"] == pytest.approx(0.33 / error, abs=1e-4)
    assert cell["outside_paper_spread"] is True
    assert find(cells, 40, "mean_kl")["outside_paper_spread"] is False
    assert report._table1_notes(records, cells)[-1] == (
        "Outside the paper's spread, more than 2 combined standard errors from the "
        "paper's mean: Mean-Var with blocks of 40 (+0.33 points, +4.7 standard errors)."
    )


def test_block_sizes_that_the_paper_lacks(tmp_path):
    cells = table1(loaded(tmp_path, record(block_size=25)))
    assert [c["block_size"] for c in cells[::2]] == [20, 25, 30, 40]
    cell = find(cells, 25, "mean_kl")
    assert cell["paper_error_percent"] is None and cell["paper_train_steps"] is None
    assert report._table1_rows(cells)[2][5:] == ["0.90 ± n/a", "1", "—"]


# Convergence

FALLING = [5, 4, 3, 2, 1.2, 1.1, 1.05, 1.02, 1.01, 1.0]  # converged from the sixth on


@pytest.mark.parametrize(
    "cross_entropy, kl_bits, expected",
    [
        (FALLING, None, 600),
        (FALLING, [20.2] * 10, 600),  # 1 % over the budget is at it
        (FALLING, [20.21] * 10, None),
        (FALLING, [5.0] * 10, 600),
        (FALLING, [300] * 8 + [20] * 2, 900),
        (FALLING, [300] * 2 + [20] * 8, 600),
        (FALLING, [20] * 9 + [21], None),
        (FALLING, [None] * 7 + [20] * 3, 800),
        (FALLING, [None] * 10, None),
        ([1.0] * 10, None, 100),
        ([1.0] * 6 + [1.5] + [1.0] * 3, None, 800),  # from which on, not at which
        ([3.0] * 9 + [1.0], None, 1000),  # the last window is the measure
        ([1.0], None, 100),
        ([], None, None),
    ],
)
def test_iterations_to_converge(cross_entropy, kl_bits, expected):
    assert iterations_to_converge(curve(cross_entropy, kl_bits), 20) == expected


def test_final_value_is_the_mean_over_the_last_windows():
    # Of 40 windows the last two: (0.8 + 1.2) / 2 = 1; smoothed over one on each side.
    values = [1.2] * 20 + [1.1] * 18 + [0.8, 1.2]
    assert iterations_to_converge(curve(values), 20) == 2100
    values = [1.2] * 20 + [1.11] * 18 + [0.8, 1.2]
    assert iterations_to_converge(curve(values), 20) == 3900


def test_single_windows_do_not_count():
    values = [2.0] * 30 + [1.0] * 70
    assert iterations_to_converge(curve(values), 20) == 3100
    values[80] = 9.0
    kl_bits = [20.0] * 100
    kl_bits[60] = 400.0
    assert iterations_to_converge(curve(values, kl_bits), 20) == 3100
    values[80:86] = [9.0] * 6
    assert iterations_to_converge(curve(values, kl_bits), 20) == 8700


def test_only_variational_training_counts():
    phases = [
        curve([9, 9], [None, None], "warmup"),
        curve(FALLING),
        curve([3, 3, 3], [400, None, 400], "coding"),
    ]
    joined = {key: [v for p in phases for v in p[key]] for key in phases[0]}
    joined["step"] = [100 * (i + 1) for i in range(15)]
    assert iterations_to_converge(joined, 20) == 800
    assert iterations_to_converge(phases[2], 500) is None


def test_convergence_table(tmp_path):
    slow = curve([5, 5, *FALLING])
    never = curve(FALLING, [30.0] * 10)
    records = loaded(
        tmp_path,
        record("mean_var", 20, 0, curve=slow),
        record("mean_var", 20, 1, curve=curve([5, 5, 5, 5, *FALLING])),
        record("mean_var", 20, 2, curve=never),
        record("mean_kl", 20, 0, curve=curve(FALLING)),
        record("mean_var", 30, 0, curve=never),
    )
    table = convergence_table(records)
    assert find(table, 20, "mean_var") == {
        "block_size": 20,
        "parameterization": "mean_var",
        "n": 3,
        "converged": 2,
        "iterations": 900,
        "iterations_standard_error": 100,
        "train_steps": 100_000,
        "budget_bits": 20,
    }
    assert find(table, 30, "mean_kl")["n"] == 0
    assert find(table, 30, "mean_var")["iterations"] is None
    assert report._convergence_rows(table)[1:] == [
        [
            "20",
            "900 ± 100",
            "2 of 3",
            "100,000",
            "600 ± n/a",
            "1 of 1",
            "50,000",
            "1.50",
        ],
        ["30", "—", "0 of 1", "100,000", "—", "—", "—", "—"],
        ["Paper", "—", "—", "200,000", "—", "—", "100,000", "2.00 (of those trained)"],
    ]


def test_budget_is_kl_bits_if_set(tmp_path):
    made = record(curve=curve(FALLING, [18.5] * 10))
    made["settings"]["kl_bits"] = 18.0
    (row,) = (r for r in convergence_table(loaded(tmp_path, made)) if r["n"])
    assert (row["budget_bits"], row["converged"]) == (18.0, 0)


# Pruning


def statements(folder, *records):
    return [
        (s["answer"], s["numbers"])
        for s in pruning_statements(loaded(folder, *records))
    ]


def test_statements_that_hold(tmp_path):
    flat = [0.99, 0.99, 0.98, 0.5, 0.1]
    found = statements(
        tmp_path,
        with_pruning(
            "mean_kl", 0, uniform=[1, 0.79, 0.5], magnitude=flat, kl=[1, 1, 1, 0.9]
        ),
        with_pruning(
            "mean_kl", 1, uniform=[1, 0.83, 0.5], magnitude=flat, kl=[1, 1, 1, 0.88]
        ),
        with_pruning(
            "mean_var", 0, magnitude=[0.99, 0.98, 0.96, 0.1, 0.1], kl=[1, 0.5, 0.1]
        ),
        with_pruning(
            "mean_var", 1, magnitude=[0.99, 1.0, 0.99, 0.1, 0.1], kl=[1, 0.5, 0.2]
        ),
    )
    assert found == [
        ("yes", "Mean-KL: 81.0 ± 2.0 %"),
        # 98 against 97.5 ± 1.5 %; the difference at 90 % does not count.
        (
            "yes",
            "largest: 0.3 standard errors, with 50 % pruned "
            "(Mean-Var 97.5 ± 1.5 %, Mean-KL 98.0 ± 0.0 %)",
        ),
        ("yes", "Mean-KL: 89.0 ± 1.0 %; Mean-Var: 15.0 ± 5.0 %"),
    ]


def test_statements_that_do_not_hold(tmp_path):
    flat = [0.99, 0.99, 0.98]
    found = statements(
        tmp_path,
        with_pruning(
            "mean_kl", 0, uniform=[1, 0.7, 0.5], magnitude=flat, kl=[1, 1, 1, 0.9]
        ),
        with_pruning(
            "mean_kl", 1, uniform=[1, 0.8, 0.5], magnitude=flat, kl=[1, 1, 1, 0.9]
        ),
        with_pruning("mean_var", 0, magnitude=[0.99, 0.9, 0.98], kl=[1, 1, 0.6]),
        with_pruning("mean_var", 1, magnitude=[0.99, 0.92, 0.98], kl=[1, 1, 0.5]),
    )
    assert [answer for answer, _ in found] == ["no", "no", "no"]
    assert found[0][1] == "Mean-KL: 75.0 ± 5.0 %"
    assert found[1][1].startswith("largest: 8.0 standard errors, with 30 % pruned")


def test_statements_without_data(tmp_path):
    nothing = ("no data", "Mean-KL: no data")
    assert statements(tmp_path, record()) == [
        nothing,
        ("no data", "no data"),
        ("no data", "Mean-KL: no data; Mean-Var: no data"),
    ]
    # Not pruned far enough; one run each, so no standard error; and one half decides.
    found = statements(
        tmp_path,
        with_pruning("mean_kl", uniform=[1], magnitude=[1, 1, 1], kl=[1, 1, 1, 0.3]),
        with_pruning("mean_var", magnitude=[1, 1, 1], kl=[1]),
    )
    assert found == [
        nothing,
        ("no data", "no data"),
        ("no", "Mean-KL: 30.0 ± n/a %; Mean-Var: no data"),
    ]


def test_accuracy_between_measured_fractions(tmp_path):
    made = with_pruning("mean_kl")
    made["pruning"] = {"uniform": {"fractions": [0.2, 0.4], "accuracy": [0.9, 0.8]}}
    assert statements(tmp_path, made)[0] == ("yes", "Mean-KL: 85.0 ± n/a %")


# Records


def test_order_of_records(tmp_path):
    records = loaded(
        tmp_path,
        record("mean_kl", 30, 0),
        record("mean_kl", 20, 10),
        record("mean_kl", 20, 9),
        record("mean_var", 20, 0),
    )
    assert [r["file"].rpartition("/")[2] for r in records] == [
        "mean_var_b20_s0.json",
        "mean_kl_b20_s9.json",
        "mean_kl_b20_s10.json",
        "mean_kl_b30_s0.json",
    ]


def test_no_records(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"records holds no records.*study"):
            write_report(folder)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "no readable JSON"),
        ('{"format": 1', "no readable JSON"),
        ('{"format": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "no readable JSON"),
        ("[]", "lacks 'format'"),
        ("{}", "lacks 'format'"),
    ],
)
def test_files_that_are_no_records(tmp_path, text, match):
    folder = saved(tmp_path, record())
    (folder / "records" / "odd.json").write_text(text)
    with pytest.raises(ValueError, match=rf"odd\.json.*{match}"):
        write_report(folder)


BAD = [
    ("format", 2, "format must be 1"),
    ("parameterization", "mean", "parameterization must be one of mean_var, mean_kl"),
    ("block_size", 0, "block_size must be an integer of at least 1"),
    ("seed", True, "seed must be an integer"),
    ("scale", "1", "scale must be a positive number"),
    ("settings", [], "settings must be an object"),
    ("settings.block_bits", None, "settings.block_bits must be an integer"),
    ("settings.kl_bits", -1, "settings.kl_bits must be a number of at least 0"),
    ("sizes", 3, "lacks 'sizes.payload_ratio'"),
    ("errors.decoded", 0.9, None),
    ("errors.decoded", 1.5, "errors.decoded must be a number from 0 to 1"),
    ("errors.posterior_mean", None, "errors.posterior_mean must be a number"),
    ("curve.step", [6, 5, 4, 3, 2, 1], "curve.step must be a list of numbers in order"),
    ("curve.cross_entropy", [1, None], "curve.cross_entropy must be a list of numbers"),
    ("curve.kl_bits", [1, None], "curve has lists of different lengths"),
    ("curve.phase", [1, 1], "curve.phase must be a list of texts"),
    ("histograms", 5, "histograms must be an object"),
    ("histograms.a/kernel", {}, "lacks 'histograms.a/kernel.loc'"),
    (
        "histograms.a/kernel",
        {"loc": {"edges": [0, 1], "counts": [1, 2]}},
        "histograms.a/kernel.loc must have one edge more than counts",
    ),
    (
        "histograms.a/kernel",
        {"loc": {"edges": [1, 0], "counts": [1]}},
        "histograms.a/kernel.loc.edges must be numbers in order",
    ),
    ("pruning", [1], "pruning must be an object"),
    ("pruning.other", {}, "pruning must be by uniform, magnitude, kl"),
    ("pruning.kl", {"fractions": [0, 1]}, "lacks 'pruning.kl.accuracy'"),
    (
        "pruning.kl",
        {"fractions": [0, 100], "accuracy": [1, 0]},
        "pruning.kl.fractions must be increasing numbers from 0 to 1",
    ),
    (
        "pruning.kl",
        {"fractions": [0, 1], "accuracy": [1]},
        "kl has lists of different lengths",
    ),
]


@pytest.mark.parametrize("key, value, match", BAD)
def test_bad_records(tmp_path, key, value, match):
    made = record(histograms={}, pruning={})
    *path, last = key.split(".")
    place = made
    for part in path:
        place = place[part]
    place[last] = value
    folder = saved(tmp_path, record(seed=1))
    (folder / "records" / "bad.json").write_text(json.dumps(made))
    if match is None:
        assert len(read_records(folder)) == 2
        return
    with pytest.raises(ValueError, match=re.escape(match)) as caught:
        read_records(folder)
    assert str(folder / "records" / "bad.json") in str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["scale", "model", "settings", "versions", "seconds", "errors", "steps", "curve"],
)
def test_every_key_is_needed(tmp_path, key):
    made = record()
    del made[key]
    with pytest.raises(ValueError, match=rf"mean_kl_b20_s0.json lacks '{key}'"):
        loaded(tmp_path, made)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"scale": 1.0}, r"differ in scale \(0.5 and 1.0\).*one study"),
        ({"model": "digits_cnn"}, "differ in model"),
        ({"data": "fashion_mnist"}, "differ in data"),
        ({"settings": {"block_bits": 16}}, r"differ in settings\.block_bits"),
        (
            {"steps": {"train": 7, "total": 7}},
            r"differ in steps\.train \(50000 and 7\)",
        ),
    ],
)
def test_records_that_do_not_belong_together(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match) as caught:
        loaded(tmp_path, record(seed=0), record(seed=1, **changes))
    for name in ("mean_kl_b20_s0.json", "mean_kl_b20_s1.json"):
        assert name in str(caught.value)


def test_records_of_the_same_run(tmp_path):
    folder = saved(tmp_path, record())
    (folder / "records" / "copy.json").write_text(json.dumps(record()))
    with pytest.raises(
        ValueError, match=r"copy\.json and .*are records of the same run"
    ):
        read_records(folder)


# What is written


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a report, and what `write_report` returned."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("study")
    saved(
        folder,
        *(
            with_all(parameterization, block_size, seed)
            for parameterization in ("mean_kl", "mean_var")
            for block_size in (20, 30)
            for seed in (0, 1)
            if (parameterization, block_size) != ("mean_var", 30)
        ),
    )
    return folder, write_report(folder)


def test_summary(made):
    folder, summary = made
    json.dumps(summary, allow_nan=False)
    assert set(summary["files"]) == TABLES | PICTURES | {"report.html"}
    assert {p.name for p in (folder / "report").iterdir()} == set(summary["files"])
    assert summary["report"] == str(folder / "report" / "report.html")
    assert summary["output"] == str(folder / "report")
    assert (summary["runs"], summary["scale"]) == (6, 0.5)
    assert (summary["model"], summary["data"]) == ("lenet5", "mnist")
    records = read_records(folder)
    assert summary["table1"] == table1(records)
    assert summary["convergence"] == convergence_table(records)
    assert summary["statements"] == pruning_statements(records)


def test_tables_are_written(made):
    folder = made[0] / "report"
    lines = (folder / "table1.md").read_text().split("\n")
    assert lines[2] == (
        "| 20 | 555x | 0.90 ± 0.00 | 2 | 0.82 ± 0.07 | 0.90 ± 0.00 | 2 | 0.77 ± 0.05 |"
    )
    assert lines[3].startswith("| 30 | 833x | — | — |")
    for name, count in (("table1", 6), ("convergence", 4), ("statements", 3)):
        with open(folder / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == count
        assert None not in rows[0] and None not in rows[0].values()
    for answer in ("no", "yes"):
        assert f"| {answer} |" in (folder / "statements.md").read_text()


def test_pictures(made):
    folder = made[0] / "report"
    for name in PICTURES:
        data = (folder / name).read_bytes()
        if name.endswith(".png"):
            assert data.startswith(b"\x89PNG\r\n\x1a\n")
            assert int.from_bytes(data[16:20], "big") > 600  # pixels
        else:
            root = ElementTree.fromstring(data)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert b"<dc:date>" not in data


def test_page_needs_nothing_else(made):
    text = (made[0] / "report" / "report.html").read_text()
    root = ElementTree.fromstring(text.partition("\n")[2])
    assert root.tag == "html"
    for element in root.iter():
        assert element.tag not in ("script", "link", "iframe", "object")
        assert "href" not in element.attrib
    images = root.findall(".//img")
    prefix = "data:image/svg+xml;base64,"
    for image in images:
        assert image.get("src").startswith(prefix) and image.get("alt")
        ElementTree.fromstring(base64.b64decode(image.get("src")[len(prefix) :]))
        text = text.replace(image.get("src"), "")
    for word in ("url(", "@import", "http"):
        assert word not in text
    assert len(images) == 3
    assert len(root.findall(".//table")) == 5
    shown = " ".join(root.itertext())
    assert "0.90 ± 0.00" in shown and "0.77 ± 0.05" in shown
    assert "2.0 <beta> & more" in shown and "block_bits" in shown
    assert "Mean-Var (blocks of 20, seed 0) and Mean-KL (blocks of 20, seed 0)" in shown
    assert "6 runs, 3.0 hours" in shown


def test_bytes_are_the_same_in_another_process(made, tmp_path):
    """One with other settings of matplotlib, which are left alone, and no TensorFlow.

    Nor pyplot, which would keep the figures.
    """
    code = """
import sys
from tfmiracle.report import write_report
assert "matplotlib" not in sys.modules
import matplotlib
matplotlib.rcParams.update({"font.size": 20, "lines.linewidth": 9})
summary = write_report(sys.argv[1], sys.argv[2])
assert summary["output"] == sys.argv[2]
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams["font.size"] == 20
"""
    folder, summary = made
    output = tmp_path / "new" / "report"
    result = run_python(code, folder, output, without=["tensorflow", "keras"])
    assert result.returncode == 0, result.stderr
    for name in summary["files"]:
        assert (output / name).read_bytes() == (folder / "report" / name).read_bytes()


def test_figures_without_data(tmp_path):
    pytest.importorskip("matplotlib")
    # Another report is there, and the record has no curve but that of coding.
    folder = saved(tmp_path, record(curve=curve([1, 1], phase="coding")))
    (folder / "report").mkdir()
    for name in PICTURES | {"table1.md", "of_the_user.png"}:
        (folder / "report" / name).write_text("old")
    summary = write_report(folder)
    assert set(summary["files"]) == TABLES | {"report.html"}
    there = {path.name for path in (folder / "report").iterdir()}
    assert there == {*summary["files"], "of_the_user.png"}
    assert (folder / "report" / "table1.md").read_text() != "old"
    text = (folder / "report" / "report.html").read_text()
    assert text.count("The records have no data for this figure.") == 3


@pytest.mark.filterwarnings("error")
def test_sparse_records(tmp_path):
    """Nothing that a study may leave makes the figures fail or complain."""
    pytest.importorskip("matplotlib")
    flat = {"edges": [-1, 0, 1], "counts": [0, 0]}
    sparse = record(
        "mean_var",
        50,
        3,
        curve=curve([0.0, 1.0], [None, None]),
        histograms={"w": {"loc": flat, "log_scale": flat}},
        pruning={"kl": {"fractions": [0.5], "accuracy": [0.3]}},
    )
    other = record(
        "mean_kl", 50, 0, curve=curve([1.0], [20]), histograms={}, pruning={}
    )
    folder = saved(tmp_path, sparse, other)
    summary = write_report(folder)
    assert set(summary["files"]) == TABLES | PICTURES | {"report.html"}


def test_histograms_are_of_a_block_size_that_both_have(tmp_path):
    lacking = with_all("mean_kl", 20)
    del lacking["histograms"]
    records = loaded(
        tmp_path,
        with_all("mean_var", 20),
        lacking,
        *(with_all(p, 30, s) for p in ("mean_var", "mean_kl") for s in (1, 2)),
    )
    shown = report._shown_histograms(records)
    assert {p: (r["block_size"], r["seed"]) for p, r in shown.items()} == {
        "mean_var": (30, 1),
        "mean_kl": (30, 1),
    }
    shown = report._shown_histograms(records[:2])
    assert {p: r["block_size"] for p, r in shown.items()} == {"mean_var": 20}


def test_bins_without_width():
    pytest.importorskip("matplotlib")
    axis = report._figure(1, 1).subplots()
    histogram = {"edges": [0, 0, 1, 1, 3, 3], "counts": [1, 2, 3, 4, 10]}
    density = report._draw_histogram(axis, "mean_kl", histogram)
    np.testing.assert_allclose(density, [3 / 20, 17 / 20 / 2])
    histogram = {"edges": [2, 2], "counts": [5]}
    assert not len(report._draw_histogram(axis, "mean_kl", histogram))


def test_curves_over_seeds():
    runs = [
        record(curve=curve([1, 2, 3], [None, 20, 20])),
        record(curve=curve([3, 4, 5, 6], [None, 30, 40, 50])),
    ]
    step, mean, low, high = report._over_seeds(runs, "cross_entropy")
    np.testing.assert_array_equal(step, [100, 200, 300, 400])
    np.testing.assert_array_equal(mean, [2, 3, 4, 6])
    np.testing.assert_array_equal(low, [1, 2, 3, 6])
    np.testing.assert_array_equal(high, [3, 4, 5, 6])
    mean = report._over_seeds(runs, "kl_bits")[1]
    np.testing.assert_array_equal(mean, [np.nan, 25, 30, 50])


def test_without_matplotlib(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = saved(tmp_path, record())
    with pytest.raises(ValueError, match=r"pip install 'tfmiracle\[report\]'"):
        write_report(folder)
    assert not (folder / "report").exists()
