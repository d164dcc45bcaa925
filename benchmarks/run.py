"""Runs the benchmarks and writes what they found.

    python benchmarks/run.py --output=FOLDER [--only=TEXT]

Needs gcc. A row is measured in a process of its own, everything in it within that one
process and in turns; take the ratios, and leave the machine alone meanwhile. Writes
`benchmarks.json` and `benchmarks.md`; rows that are there already, of the same machine
and versions, stay. `networks.py` is apart: it takes hours.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib

from tfmiracle.environment import configure

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
configure()
# ruff: noqa: E402, what follows imports TensorFlow

import decoding
import kernels
import timing
import training
from tables import markdown

ROWS = kernels.ROWS | training.ROWS | decoding.ROWS
SPAWN = multiprocessing.get_context("spawn")

EXPLANATION = """
Times are the shortest of several, in ms unless said; below 20 ms each is a mean over
calls in a row. "Peer / ours" is how many times less we take, "of the limit" the time
that the machine needs at least for that part of the work, divided by ours. A target is
such a ratio that this project set out to reach; "the limit allows" is what it would be
in the time that the machine needs at least.
"""


def measure(name: str) -> dict:
    return ROWS[name]()


def in_a_process_of_its_own(function, *arguments):
    with concurrent.futures.ProcessPoolExecutor(1, SPAWN) as pool:
        return pool.submit(function, *arguments).result()


def cells(name: str, row: dict) -> list[str]:
    """A row of the table."""
    ours = row["ours"]
    of = row.get("peers", {}) | row.get("limits", {})
    ratio = {peer: value / ours if ours else float("inf") for peer, value in of.items()}
    least = max(row.get("limits", {}).values(), default=0)

    def verdict(peer, target):
        if ratio[peer] >= target:
            return "yes"
        if peer in row.get("peers", {}) and of[peer] < target * least:
            return f"no, the limit allows {number(of[peer] / least)}"
        return "no"

    return [
        name,
        f"{number(ours)} {row.get('unit', '')}".strip(),
        "<br>".join(f"{p}: {number(ratio[p])}" for p in row.get("peers", {})),
        "<br>".join(f"{p}: {ratio[p]:.0%}" for p in row.get("limits", {})),
        "<br>".join(
            f"{number(target)} of {p}: {verdict(p, target)}"
            for p, target in row.get("targets", {}).items()
        ),
    ]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(figures: dict, machine: dict) -> str:
    titles = ["", "ours", "peer / ours", "of the limit", "target, reached?"]
    text = "    python benchmarks/run.py --output=FOLDER\n\n"
    text += ", ".join(f"{key} {value}" for key, value in machine.items()) + ".\n"
    rows = [cells(name, row) for name, row in figures.items()]
    return f"{text}{EXPLANATION}\n{markdown(titles, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    figures, machine = {}, in_a_process_of_its_own(timing.machine)
    path = flags.output / "benchmarks.json"
    if path.exists():
        found = json.loads(path.read_text())
        figures = found["figures"] if found["machine"] == machine else {}
    for name in ROWS:
        if flags.only in name:
            figures[name] = in_a_process_of_its_own(measure, name)
            print(*cells(name, figures[name]), sep=" | ", flush=True)
            figures = {row: figures[row] for row in ROWS if row in figures}
            record = json.dumps({"machine": machine, "figures": figures}, indent=1)
            path.write_text(record + "\n")
            (flags.output / "benchmarks.md").write_text(table(figures, machine))


if __name__ == "__main__":
    main()
