"""The report of a study, from records made up."""

import base64
import csv
import io
import json
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import scipy.stats
from study_records import FALLING, curve, loaded, record, saved, sparse, with_all
from support import run_python

from tfmiracle.studies import report
from tfmiracle.studies.figures import FIGURES
from tfmiracle.studies.records import iterations_to_same_loss, read_records
from tfmiracle.studies.report import (
    convergence_table,
    pruning_statements,
    table1,
    write_report,
)

TABLES = {
    f"{t}.{s}" for t in ("table1", "convergence", "statements") for s in ("md", "csv")
}
PICTURES = {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg")}


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


def find(rows, block_size, parameterization):
    (row,) = (
        r
        for r in rows
        if (r["block_size"], r["parameterization"]) == (block_size, parameterization)
    )
    return row


# Tables


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
        "p_value": find(cells, 20, "mean_kl")["p_value"],  # see below
        "blocks": 2484,
        "blocks_over_budget": 0,
        "max_kl_bits": 20.1,
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
    assert one_seed["p_value"] < 0.1
    missing = find(cells, 40, "mean_kl")
    assert missing["n"] == 0 and missing["paper_error_percent"] == 0.96
    for key in ("payload_ratio", "decoded_error_percent", "train_steps", "total_steps"):
        assert missing[key] is None

    text = report.markdown(*report.table1_text(records, cells))
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
    assert "Scale of the study, the fraction of its steps that were taken: 0.5" in notes
    assert "Dtype policy of the network: float32." in notes
    assert "n/a: one seed has no standard error" in notes
    assert "—: no run yet (4 of 6 cells)." in notes
    assert (
        "p < 0.05; cells compared: 2): Mean-Var with blocks of 30 (+0.44 points, "
        "p = 0.026)." in notes
    )
    assert "Blocks coded with more KL than their budget + 1 %: none." in notes

    rows = list(csv.DictReader(io.StringIO(report.csv_text(cells))))
    assert len(rows) == 6
    row = rows[1]
    assert row["decoded_error_percent"] == "0.9" and row["seeds"] == "0 1"
    assert rows[5]["n"] == "0" and rows[5]["decoded_error_percent"] == ""
    assert rows[4]["p_value"] == ""


def test_differences_to_the_paper(tmp_path):
    records = loaded(
        tmp_path,
        *(with_error(0.0119 + 0.0001 * s, "mean_var", 40, s) for s in range(3)),
        with_error(0.0095, "mean_kl", 40, 0),
    )
    cells = table1(records)
    # The paper's ten seeds, made up with its mean and standard error.
    for values, cell in (
        ([1.19, 1.20, 1.21], find(cells, 40, "mean_var")),
        ([0.95], find(cells, 40, "mean_kl")),
    ):
        mean, error = cell["paper_error_percent"], cell["paper_standard_error_percent"]
        paper = scipy.stats.zscore(np.arange(10), ddof=1) * error * 10**0.5 + mean
        expected = scipy.stats.ttest_ind(values, paper).pvalue
        assert cell["p_value"] == pytest.approx(expected, abs=1e-6)
    assert report.table1_text(records, cells)[1][-2] == (
        "Different from the paper's mean (Student's t-test, p < 0.05; cells compared: "
        "2): Mean-Var with blocks of 40 (+0.33 points, p = 0.029)."
    )


def test_blocks_over_their_budget(tmp_path):
    coding = {"max_kl_bits": [19.0, 23.45], "over_budget": [0, 3]}
    records = loaded(tmp_path, record(), record("mean_var", coding=coding))
    cells = table1(records)
    cell = find(cells, 20, "mean_var")
    assert (cell["blocks"], cell["blocks_over_budget"]) == (1242, 3)
    assert report.table1_text(records, cells)[1][-1] == (
        "Blocks coded with more KL than their budget + 1 %: Mean-Var with blocks of 20 "
        "(3 of 1,242, up to 23.4 bits)."
    )


@pytest.mark.parametrize("change", [{"model": "digits_cnn"}, {"data": "digits"}])
def test_other_networks_are_not_compared(change, tmp_path):
    cell = find(table1(loaded(tmp_path, record(**change))), 20, "mean_kl")
    assert cell["n"] == 1
    assert cell["paper_error_percent"] is cell["p_value"] is None


def test_block_sizes_that_the_paper_lacks(tmp_path):
    records = loaded(tmp_path, record(block_size=25))
    cells = table1(records)
    assert [c["block_size"] for c in cells[::2]] == [20, 25, 30, 40]
    cell = find(cells, 25, "mean_kl")
    assert cell["paper_error_percent"] is None and cell["paper_train_steps"] is None
    assert report.table1_text(records, cells)[0][2][5:] == ["0.90 ± n/a", "1", "—"]


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
        "same_loss": 1,
        "same_loss_iterations": 800,
        "same_loss_iterations_standard_error": None,
        "train_steps": 100_000,
        "budget_bits": 20,
    }
    assert find(table, 30, "mean_kl")["n"] == 0
    assert find(table, 30, "mean_var")["iterations"] is None
    assert report.convergence_text(table)[0][1:] == [
        [
            "20",
            *("900 ± 100", "1% of 100,000", "2 of 3"),
            *("600 ± n/a", "1% of 50,000", "1 of 1"),
            *("1.50", "800 ± n/a", "600 ± n/a", "1", "1.33"),
        ],
        ["30", "—", "—", "0 of 1", "—", "—", "0 of 0", "—", "—", "—", "0", "—"],
    ]


def test_iterations_to_the_same_loss(tmp_path):
    lower = [value / 2 for value in FALLING]
    records = loaded(
        tmp_path,
        record("mean_var", seed=0, curve=curve(FALLING)),
        record("mean_kl", seed=0, curve=curve(lower)),
        record("mean_var", seed=1, curve=curve(lower)),
        record("mean_kl", seed=1, curve=curve(FALLING)),
        record("mean_var", seed=2, curve=curve(FALLING)),  # has no other
        record("mean_var", seed=3, curve=curve(FALLING)),
        record("mean_kl", seed=3, curve=curve(FALLING, [30.0] * 10)),  # never
        record("mean_var", seed=4, curve=curve(FALLING)),
        record("mean_kl", seed=4, curve=curve(FALLING, phase="coding")),
        record("mean_kl", block_size=30, curve=curve(FALLING)),
    )
    assert iterations_to_same_loss(records, 20).tolist() == [[600, 400], [400, 600]]
    assert iterations_to_same_loss(records, 30).shape == (0, 2)


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
        # The difference at 90 % does not count.
        (
            "yes",
            "largest with 50 % pruned: Mean-Var 97.5 ± 1.5 %, Mean-KL 98.0 ± 0.0 %",
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
    assert found[1][1].startswith("largest with 30 % pruned: Mean-Var 91.0 ± 1.0 %")


def test_statements_without_data(tmp_path):
    nothing = ("no data", "Mean-KL: no data")
    assert statements(tmp_path, record()) == [
        nothing,
        ("no data", "no data"),
        ("no data", "Mean-KL: no data; Mean-Var: no data"),
    ]
    # Not pruned far enough; and one half decides.
    found = statements(
        tmp_path,
        with_pruning("mean_kl", uniform=[1], magnitude=[1, 1, 1], kl=[1, 1, 1, 0.3]),
        with_pruning("mean_var", magnitude=[1, 1], kl=[1]),
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
from tfmiracle.studies.report import write_report
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
def test_output_is_checked_before_drawing(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw_figures", lambda records: 1 / 0)
    saved(tmp_path, record())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        write_report(tmp_path, tmp_path / "file")


def test_tables_of_sparse_records(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw_figures", lambda records: {})
    summary = write_report(saved(tmp_path, *sparse()))
    assert set(summary["files"]) == TABLES | {"report.html"}
    assert [row["converged"] for row in summary["convergence"]] == [0, 1]
    assert {s["answer"] for s in summary["statements"]} == {"no data"}


def test_without_matplotlib(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = saved(tmp_path, record())
    with pytest.raises(ValueError, match=r"pip install 'tfmiracle\[report\]'"):
        write_report(folder)
    assert not any((folder / "report").iterdir())


def test_nothing_is_written_without_records(tmp_path):
    with pytest.raises(ValueError, match="holds no records"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()
