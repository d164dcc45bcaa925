"""A study's records as the tables and figures of Lin et al. (2023), beside theirs."""

import base64
import csv
import html
import io
import itertools
import json
import math
import operator
import os
import pathlib

import numpy as np

from tfmiracle.files import write_atomically
from tfmiracle.studies.figures import FIGURES, captions, draw_figures
from tfmiracle.studies.records import (
    BUDGET_TOLERANCE,
    CONVERGED_FACTOR,
    FINAL_FRACTION,
    PARAMETERIZATIONS,
    SMOOTHING_FRACTION,
    accuracy_at,
    block_sizes,
    budget_bits,
    converged_iterations,
    iterations_to_same_loss,
    mean_and_error,
    pruning_curve,
    read_records,
    runs,
)

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

# Below it, a difference to the paper is called one.
SIGNIFICANCE = 0.05

# What the paper says of Figure 3, made precise, see `pruning_statements`.
UNIFORM_ACCURACY = 0.80
KL_ACCURACY = 0.85
COLLAPSED_ACCURACY = 0.30
SAME_ACCURACY = 0.02

_EMPTY = "—"


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
      "data", "scale", and the tables "table1", "convergence" and "statements".

    Raises:
      ValueError: if the records are not right, see `read_records`, or matplotlib is
        missing.
      OSError: if `output` cannot be written.
    """
    records = read_records(workdir)
    output = pathlib.Path(output or pathlib.Path(workdir) / "report")
    output.mkdir(parents=True, exist_ok=True)
    tables = {
        "table1": table1(records),
        "convergence": convergence_table(records),
        "statements": pruning_statements(records),
    }
    texts = {  # rows and notes
        "table1": table1_text(records, tables["table1"]),
        "convergence": convergence_text(tables["convergence"]),
        "statements": statements_text(tables["statements"]),
    }
    figures = draw_figures(records)
    files = {"report.html": _page(records, texts, figures).encode()}
    for name in tables:
        files[f"{name}.md"] = markdown(*texts[name]).encode()
        files[f"{name}.csv"] = csv_text(tables[name]).encode()
    for name, formats in figures.items():
        files |= {f"{name}.{suffix}": data for suffix, data in formats.items()}

    for name, data in files.items():
        write_atomically(output / name, data, overwrite=True)
    for name in set(FIGURES) - set(figures):  # of an earlier report, not of this one
        for suffix in ("png", "svg"):
            (output / f"{name}.{suffix}").unlink(missing_ok=True)
    return {
        "report": str(output / "report.html"),
        "output": str(output),
        "files": sorted(files),
        "runs": len(records),
        **{key: records[0][key] for key in ("model", "data", "scale")},
        **tables,
    }


def _by_block_size(rows):
    groups = itertools.groupby(rows, operator.itemgetter("block_size"))
    return [(block_size, list(group)) for block_size, group in groups]


def _rounded(value):
    return value and round(value, 6)


def _probability(p):
    return f"p = {p:.2g}" if p >= 1e-6 else "p < 1e-6"


def _percent(fraction):
    return f"{100 * fraction:.0f} %"


def _plus_minus(mean, error, form):
    if mean is None:
        return _EMPTY
    return f"{mean:{form}} ± {'n/a' if error is None else f'{error:{form}}'}"


def table1(records: list[dict]) -> list[dict]:
    """The paper's Table 1: a dict a block size and parameterization.

    Errors are on the test set in %, each a mean over "n" seeds with its standard
    error. "difference_percent" is ours minus the paper's error after coding, "p_value"
    what Student's t-test says of it (which takes the spread over seeds for the same in
    both, so one seed of ours is enough). "blocks_over_budget" of "blocks" had more KL
    than their budget when they were coded, up to "max_kl_bits". All block sizes of the
    paper have rows; what is missing is None.
    """
    return [
        _table1_cell(records, block_size, p)
        for block_size in sorted({*PAPER_ERRORS, *block_sizes(records)})
        for p in PARAMETERIZATIONS
    ]


def _table1_cell(records, block_size, parameterization):
    found = runs(records, parameterization, block_size)
    errors = {}
    for stage in ("decoded", "posterior_mean", "posterior_sample"):
        mean, error = mean_and_error([100 * r["errors"][stage] for r in found])
        errors[f"{stage}_error_percent"] = _rounded(mean)
        errors[f"{stage}_standard_error_percent"] = _rounded(error)
    first = records[0]
    in_paper = (first["model"], first["data"].lower()) == ("lenet5", "mnist")
    in_paper &= block_size in PAPER_ERRORS
    in_paper &= all(r["settings"]["block_bits"] == 20 for r in found)
    paper = PAPER_ERRORS[block_size][parameterization] if in_paper else (None, None)
    difference = p_value = None
    if found and in_paper:
        ours = [100 * r["errors"]["decoded"] for r in found]
        difference = errors["decoded_error_percent"] - paper[0]
        p_value = _p_value(ours, *paper, PAPER_SEEDS)
    coding = [r["coding"] for r in found]
    ratio, _ = mean_and_error([r["sizes"]["payload_ratio"] for r in found])
    total, _ = mean_and_error([r["steps"]["total"] for r in found])
    return {
        "block_size": block_size,
        "parameterization": parameterization,
        "payload_ratio": _rounded(ratio),
        "n": len(found),
        "seeds": [r["seed"] for r in found],
        **errors,
        "paper_error_percent": paper[0],
        "paper_standard_error_percent": paper[1],
        "difference_percent": _rounded(difference),
        "p_value": p_value,
        "blocks": sum(r["sizes"]["blocks"] for r in found),
        "blocks_over_budget": sum(sum(c["over_budget"]) for c in coding),
        "max_kl_bits": max(
            (kl for c in coding for kl in c["max_kl_bits"]), default=None
        ),
        "train_steps": found[0]["steps"]["train"] if found else None,
        "total_steps": round(total) if found else None,
        "scale": first["scale"],
        "paper_payload_ratio": PAPER_RATIOS.get(block_size),
        "paper_train_steps": PAPER_STEPS[parameterization] if in_paper else None,
        "paper_n": PAPER_SEEDS if in_paper else None,
    }


def _p_value(values, mean, error, count):
    """That values have the mean of others, of which mean and standard error are known.

    Two-sided, by Student's t-test.
    """
    from scipy.stats import ttest_ind_from_stats  # takes a while

    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    other = mean, error * math.sqrt(count), count
    return float(
        ttest_ind_from_stats(np.mean(values), spread, len(values), *other).pvalue
    )


def table1_text(records, cells):
    rows, last = [["Block size", "Ratio"]], ["Optimizer iterations", ""]
    for p, name in PARAMETERIZATIONS.items():
        rows[0] += [f"{name}, %", "n", f"{name}, paper, %"]
        steps = {f"{r['steps']['train']:,}" for r in runs(records, p)}
        last += [" / ".join(sorted(steps)) or _EMPTY, "", f"{PAPER_STEPS[p]:,}"]
    for block_size, pair in _by_block_size(cells):
        ratios = {f"{c['payload_ratio']:.0f}x" for c in pair if c["n"]}
        row = [str(block_size), " / ".join(sorted(ratios)) or _EMPTY]
        for cell in pair:
            ours = cell["decoded_error_percent"], cell["decoded_standard_error_percent"]
            paper = cell["paper_error_percent"], cell["paper_standard_error_percent"]
            row += [_plus_minus(*ours, ".2f"), str(cell["n"] or _EMPTY)]
            row.append(_plus_minus(*paper, ".2f"))
        rows.append(row)

    def name(cell):
        kind = PARAMETERIZATIONS[cell["parameterization"]]
        return f"{kind} with blocks of {cell['block_size']}"

    first, empty = records[0], sum(not c["n"] for c in cells)
    compared = [c for c in cells if c["p_value"] is not None]
    differing = ", ".join(
        f"{name(c)} ({c['difference_percent']:+.2f} points, "
        f"{_probability(c['p_value'])})"
        for c in compared
        if c["p_value"] < SIGNIFICANCE
    )
    over = ", ".join(
        f"{name(c)} ({c['blocks_over_budget']:,} of {c['blocks']:,}, up to "
        f"{c['max_kl_bits']:.1f} bits)"
        for c in cells
        if c["blocks_over_budget"]
    )
    notes = [
        f"Error of {first['model']} on the test set of {first['data']} after coding, "
        "mean ± standard error over n seeds. The paper's figures (Lin et al. 2023, "
        f"Table 1) are for LeNet-5 on MNIST over {PAPER_SEEDS} seeds.",
        f"Scale of the study, the fraction of its steps that were taken: "
        f"{first['scale']:g}. Iterations are those of training, before coding. "
        f"Dtype policy of the network: {first['dtype_policy']}.",
        "Ratio: bytes of the float32 weights over bytes of the indices (payload).",
        any(c["n"] == 1 for c in cells) and "n/a: one seed has no standard error.",
        empty and f"{_EMPTY}: no run yet ({empty} of {len(cells)} cells).",
        compared
        and "Different from the paper's mean (Student's t-test, "
        f"p < {SIGNIFICANCE:g}; cells compared: {len(compared)}): "
        f"{differing or 'none'}.",
        f"Blocks coded with more KL than their budget + {_percent(BUDGET_TOLERANCE)}: "
        f"{over or 'none'}.",
    ]
    return [*rows, last], [note for note in notes if note]


def convergence_table(records: list[dict]) -> list[dict]:
    """Iterations to converge, a dict a block size and parameterization.

    "iterations" is the mean of `iterations_to_converge` over the "converged" of "n"
    seeds, "same_loss_iterations" that of `iterations_to_same_loss` over the "same_loss"
    seeds that count.
    """
    table = []
    for block_size in block_sizes(records):
        same = iterations_to_same_loss(records, block_size)
        for p, same_loss in zip(PARAMETERIZATIONS, same.T):
            found = runs(records, p, block_size)
            iterations = converged_iterations(found)
            row = {"block_size": block_size, "parameterization": p, "n": len(found)}
            for name, values in (("", iterations), ("same_loss_", same_loss)):
                mean, error = mean_and_error(values)
                row[f"{name}iterations"] = _rounded(mean)
                row[f"{name}iterations_standard_error"] = _rounded(error)
            table.append(
                {
                    **row,
                    "converged": len(iterations),
                    "same_loss": len(same_loss),
                    "train_steps": found[0]["steps"]["train"] if found else None,
                    "budget_bits": budget_bits(found[0]) if found else None,
                }
            )
    return table


def convergence_text(table):
    names = PARAMETERIZATIONS.values()
    ratio_of = " / ".join(names)
    rows = [["Block size"]]
    for name in names:
        rows[0] += [f"{name}, iterations", "of those trained", "converged"]
    rows[0] += [ratio_of, *(f"{name}, to the same loss" for name in names)]
    rows[0] += ["seeds", ratio_of]
    for block_size, pair in _by_block_size(table):
        row = [str(block_size)]
        for cell in pair:
            mean, share = cell["iterations"], _EMPTY
            if mean is not None:
                share = f"{mean / cell['train_steps']:.0%} of {cell['train_steps']:,}"
            row.append(_plus_minus(mean, cell["iterations_standard_error"], ",.0f"))
            row += [share, f"{cell['converged']} of {cell['n']}"]
        row.append(_ratio(cell["iterations"] for cell in pair))
        for cell in pair:
            mean = cell["same_loss_iterations"]
            error = cell["same_loss_iterations_standard_error"]
            row.append(_plus_minus(mean, error, ",.0f"))
        row.append(str(pair[0]["same_loss"]))
        rows.append([*row, _ratio(cell["same_loss_iterations"] for cell in pair)])
    trained = [f"{steps:,}" for steps in PAPER_STEPS.values()]
    ratio = _ratio(PAPER_STEPS.values())
    return rows, [
        "Iterations: the optimizer step from which on the cross-entropy of training is "
        f"at most {CONVERGED_FACTOR:g} times its final value (the mean of the last "
        f"{_percent(FINAL_FRACTION)} of the windows) and the mean KL of a block at "
        f"most its budget + {_percent(BUDGET_TOLERANCE)}; both are running medians "
        f"over ±{_percent(SMOOTHING_FRACTION)} of the windows. Mean ± standard error "
        "over the seeds that converged (n/a: one seed).",
        "The final value is each run's own. Where most of the steps trained are "
        "needed, the cross-entropy was still falling in the end, and the ratio says "
        "little more than how long each was trained.",
        "To the same loss: the same, but for both the final value of that run of a "
        "seed which ended with the larger cross-entropy.",
        f"The paper trained for {' and '.join(trained)} iterations ({ratio}).",
    ]


def _ratio(pair):
    one, other = pair
    return f"{one / other:.2f}" if one and other else _EMPTY


def pruning_statements(records: list[dict]) -> list[dict]:
    """The paper's three statements on pruning, answered from the records.

    All runs of a parameterization count alike, over block sizes and seeds, as in
    Figure 3. The paper's words are made precise so: "a test accuracy of 80 % is
    maintained" is a mean of at least `UNIFORM_ACCURACY`; "nearly identical" a
    difference of the means of at most `SAME_ACCURACY` at every measured fraction;
    "close to 90 %" a mean of at least `KL_ACCURACY`; "falls off almost to random
    guessing" a mean below `COLLAPSED_ACCURACY`.

    Returns:
      Dicts of texts: "statement", "criterion", "answer" ("yes", "no" or "no data") and
      "numbers", which decide.
    """
    uniform = accuracy_at(records, "mean_kl", "uniform", 0.3)
    at_90 = accuracy_at(records, "mean_kl", "kl", 0.9)
    at_50 = accuracy_at(records, "mean_var", "kl", 0.5)
    difference, numbers = _largest_difference(records)
    found = (
        (
            "Mean-KL keeps 80 % accuracy when 30 % of the weights are pruned uniformly "
            "at random.",
            f"mean accuracy of Mean-KL at 30 % >= {_percent(UNIFORM_ACCURACY)}",
            [None if uniform[0] is None else uniform[0] >= UNIFORM_ACCURACY],
            f"Mean-KL: {_accuracy(*uniform)}",
        ),
        (
            "Pruned by magnitude, both are the same up to 50 %.",
            f"difference of the means <= {_percent(SAME_ACCURACY)} at every measured "
            "fraction up to 50 %",
            [None if difference is None else difference <= SAME_ACCURACY],
            numbers,
        ),
        (
            "Pruned by KL, Mean-KL keeps close to 90 % accuracy at 90 %, and Mean-Var "
            "has collapsed at 50 %.",
            f"mean accuracy of Mean-KL at 90 % >= {_percent(KL_ACCURACY)} and of "
            f"Mean-Var at 50 % < {_percent(COLLAPSED_ACCURACY)}",
            [
                None if at_90[0] is None else at_90[0] >= KL_ACCURACY,
                None if at_50[0] is None else at_50[0] < COLLAPSED_ACCURACY,
            ],
            f"Mean-KL: {_accuracy(*at_90)}; Mean-Var: {_accuracy(*at_50)}",
        ),
    )
    return [
        {
            "statement": statement,
            "criterion": criterion,
            "answer": "no" if False in met else "no data" if None in met else "yes",
            "numbers": numbers,
        }
        for statement, criterion, met, numbers in found
    ]


def _largest_difference(records):
    """Of the mean accuracies by magnitude up to 50 %: as a number, and in words."""
    curves = [pruning_curve(records, p, "magnitude") for p in PARAMETERIZATIONS]
    shared = np.intersect1d(curves[0][0], curves[1][0])
    if not any(shared >= 0.5):
        return None, "no data"
    differences = []
    for fraction in shared[shared <= 0.5]:
        one, other = (
            accuracy_at(records, p, "magnitude", fraction) for p in PARAMETERIZATIONS
        )
        text = f"Mean-Var {_accuracy(*one)}, Mean-KL {_accuracy(*other)}"
        differences.append((abs(one[0] - other[0]), fraction, text))
    largest, fraction, text = max(differences)
    return largest, f"largest with {_percent(fraction)} pruned: {text}"


def _accuracy(mean, error):
    if mean is None:
        return "no data"
    return f"{_plus_minus(100 * mean, error and 100 * error, '.1f')} %"


def statements_text(statements):
    header = ["Statement of the paper", "Criterion", "Answer", "Numbers"]
    return [header, *(list(s.values()) for s in statements)], [
        "Over all block sizes and seeds of a parameterization, mean ± standard error "
        "(n/a: one run). The criteria are ours; the paper's words are vaguer."
    ]


def markdown(rows, notes):
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def csv_text(table):
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


def _page(records, texts, figures):
    first, words = records[0], captions(records)
    hours = sum(r["seconds"] for r in records) / 3600
    study = (
        f"{first['model']} on {first['data']}, scale {first['scale']:g}: "
        f"{len(records)} {'run' if len(records) == 1 else 'runs'}, {hours:,.1f} hours."
    )

    def picture(name):
        if name not in figures:
            return _paragraph("The records have no data for this figure.")
        data = base64.b64encode(figures[name]["svg"]).decode()
        text = html.escape(words[name])
        return (
            f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"/>\n'
            f"<figcaption>{text}</figcaption></figure>\n"
        )

    settings = [["Setting", *PARAMETERIZATIONS.values()]]
    for key in dict.fromkeys(key for r in records for key in r["settings"]):
        found = [[r["settings"] for r in runs(records, p)] for p in PARAMETERIZATIONS]
        settings.append([key, *(_distinct(values, key) for values in found)])
    software = [["What", "Values"]]
    for part in ("versions", "machine"):
        found = [r[part] for r in records]
        software += [[key, _distinct(found, key)] for key in first[part]]
    sections = {
        "Error after coding": _html_table(*texts["table1"]),
        "Training": picture("dynamics") + _html_table(*texts["convergence"]),
        "Posteriors": picture("histograms"),
        "Pruning": picture("pruning") + _html_table(*texts["statements"]),
        "Settings": _html_table(settings),
        "Versions and machines": _html_table(software),
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


def _html_table(rows, notes=()):
    def line(tag, cells):
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>\n"

    return (
        f'<div class="wide"><table>\n<thead>{line("th", rows[0])}</thead>\n'
        f"<tbody>{''.join(line('td', row) for row in rows[1:])}</tbody></table></div>\n"
        f"{''.join(map(_paragraph, notes))}"
    )


def _distinct(found, key):
    values = [f[key] for f in found if key in f]
    shown = dict.fromkeys(v if isinstance(v, str) else json.dumps(v) for v in values)
    return ", ".join(shown) or _EMPTY
