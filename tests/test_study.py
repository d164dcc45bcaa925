"""A grid of runs: resumed, in parallel, one record each."""

import dataclasses
import json
import pathlib
import sys
import types

import filelock
import keras
import numpy as np
import pytest
from absl import flags
from support import own_classes

from tfmiracle import PAPER, Recipe, cli
from tfmiracle.coding.coder import CODERS
from tfmiracle.posteriors.parameterization import MeanVar
from tfmiracle.recipe import PAPER_MEAN_VAR
from tfmiracle.studies import study
from tfmiracle.studies.architectures import ARCHITECTURES
from tfmiracle.studies.study import Study, cell_name, run_study

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "paper_table1.flags"
RECIPE = Recipe(
    block_bits=6,
    batch_size=16,
    train_steps=20,
    blocks_per_round=8,
    finetune_steps=10,
    kl_bits=5.0,
)


def tiny(input_shape, num_classes):
    return keras.Sequential(
        [
            keras.layers.Input(input_shape),
            keras.layers.Dense(6, "relu", name="one"),
            keras.layers.Dense(num_classes, name="two"),
        ],
        name="tiny",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with 40 examples."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    y = np.argmax(x[:, :3], 1)
    np.savez(
        folder / "toy.npz",
        x_train=x[:40],
        y_train=y[:40],
        x_test=x[40:],
        y_test=y[40:],
    )
    return folder


@pytest.fixture
def small(folder, quick, monkeypatch):
    """A study of four runs."""
    monkeypatch.setitem(ARCHITECTURES, "lenet5", tiny)
    monkeypatch.setattr(study, "PRUNED_FRACTIONS", (0.0, 0.5))
    return Study(
        str(folder / "study"),
        str(folder / "toy.npz"),
        RECIPE,
        block_sizes=(10,),
        seeds=(0, 1),
        mean_var_train_steps=40,
        scale=0.5,
        name="toy",
    )


@pytest.fixture(scope="module")
def sittings():
    """What `done` notes, once."""
    return []


@pytest.fixture
def done(small, sittings, monkeypatch):
    """A study in three sittings: of each the result, the records and the lines.

    The first is broken off after two runs; during the second another process has the
    third run.
    """
    if sittings:
        return sittings
    monkeypatch.setattr(study, "_PROGRESS_SECONDS", 0.0)
    names = []
    compress = study.compress

    def stop_at_third(*args, path, **kwargs):
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(path.stem)
        return compress(*args, path=path, **kwargs)

    def sit():
        lines = []
        try:
            result = run_study(small, say=lines.append)
        except KeyboardInterrupt:
            result = names
        return result, records(small), lines

    with monkeypatch.context() as patch:
        patch.setattr(study, "compress", stop_at_third)
        first = sit()
    lock = filelock.FileLock(
        pathlib.Path(small.workdir, "runs", "mean_kl_b10_s1.lock"),
        is_singleton=False,
    )
    with lock:
        second = sit()
    sittings += [first, second, sit()]
    return sittings


def records(made):
    paths = sorted((pathlib.Path(made.workdir) / "records").glob("*.json"))
    return {path.stem: json.loads(path.read_bytes()) for path in paths}


def test_the_grid(small, done):
    result, made, _ = done[-1]
    assert result == {"total": 4, "done": 4, "left": 0}
    assert list(made) == [
        "mean_kl_b10_s0",
        "mean_kl_b10_s1",
        "mean_var_b10_s0",
        "mean_var_b10_s1",
    ]
    assert sum("error" in line for _, _, lines in done for line in lines) == 4
    for name, record in made.items():
        kind = record["parameterization"]
        assert name == f"{kind}_b{record['block_size']}_s{record['seed']}"
        assert record["format"] == 1 and record["scale"] == 0.5
        assert (record["model"], record["data"]) == ("lenet5", "toy")
        steps = {"mean_kl": 10, "mean_var": 20}[kind]
        assert record["settings"]["train_steps"] == record["steps"]["train"] == steps
        assert record["settings"]["finetune_steps"] == 5
        if kind == "mean_var":
            assert record["settings"]["beta_rate"] == MeanVar().beta_rate / 0.5
        # 6 * 5 + 6 + 6 * 3 + 3 weights in 6 blocks of 10, in one round.
        assert record["sizes"]["blocks"] == 6
        assert record["sizes"]["payload_bytes"] == 5
        file = pathlib.Path(small.workdir, "runs", f"{name}.miracle")
        assert record["sizes"]["file_bytes"] == file.stat().st_size
        assert set(record["errors"]) == {
            "original",
            "posterior_mean",
            "posterior_sample",
            "decoded",
        }
        length = len(record["curve"]["step"])
        assert length and all(len(c) == length for c in record["curve"].values())
        assert record["curve"]["cross_entropy"][0] > 0
        seconds = record["curve"]["seconds"]
        assert seconds[0] > 0 and seconds == sorted(seconds)
        assert record["coding"]["blocks"] == [6]
        assert record["coding"]["max_kl_bits"][0] >= record["coding"]["kl_bits"][0]
        for histogram in record["histograms"].values():
            for part in ("loc", "log_scale"):
                assert len(histogram[part]["edges"]) == 61
                assert len(histogram[part]["counts"]) == 60
        assert [sum(h["loc"]["counts"]) for h in record["histograms"].values()] == [
            30,
            6,
            18,
            3,
        ]
        accuracy = 1 - record["errors"]["decoded"]
        for curve in record["pruning"].values():
            assert curve["fractions"] == [0.0, 0.5]
            assert curve["accuracy"][0] == pytest.approx(accuracy, abs=1e-5)
    assert len({record["sha256"] for record in made.values()}) == 4


def test_stopped_it_goes_on_and_does_nothing_twice(done):
    (names, before, _), (second, _, _), (last, after, _) = done
    assert names == list(before) == ["mean_kl_b10_s0", "mean_var_b10_s0"]
    # A run that another process has is left to it.
    assert second == {"total": 4, "done": 3, "left": 1}
    assert last["left"] == 0
    for name, record in before.items():
        assert after[name] == record


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 3000])
def test_damaged_records_are_named(text, small, tmp_path):
    study = dataclasses.replace(small, workdir=str(tmp_path))
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "mean_kl_b10_s0.json").write_text(text)
    with pytest.raises(ValueError, match=r"mean_kl_b10_s0\.json"):
        run_study(study)


def test_a_working_directory_belongs_to_one_study(small, done, tmp_path):
    for change in (
        {"scale": 1.0},
        {"name": "other"},
        {"recipe": dataclasses.replace(RECIPE, learning_rate=0.1)},
        {"rules": {"one/kernel": "hash=2"}},
    ):
        with pytest.raises(
            ValueError, match=r"mean_kl_b10_s0\.json is of another study"
        ):
            run_study(dataclasses.replace(small, **change))
    # Also where no run is asked for that is there already.
    with pytest.raises(ValueError, match="is of another study: its scale"):
        run_study(dataclasses.replace(small, scale=1.0, seeds=(7,)))
    with np.load(small.data) as archive:
        arrays = dict(archive)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "data.npz"
    np.savez(other, **{**arrays, "x_test": arrays["x_test"] + 1})
    with pytest.raises(ValueError, match="is of another study: its data_crc32"):
        run_study(dataclasses.replace(small, data=str(other), seeds=(7,)))
    # Further seeds are welcome, and so are parts of the grid.
    more = dataclasses.replace(small, seeds=(1, 2), parameterizations=("mean_kl",))
    result = run_study(more, say=lambda line: None)
    assert result == {"total": 2, "done": 2, "left": 0}


def test_progress_tells_the_time_left(done):
    assert any(
        line.startswith("mean_var_b10_s0 (2 of 4): cross-entropy ")
        and line.endswith("min left for one process")
        for line in done[0][2]
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scale": 0.0}, "`scale` .*=0.0"),
        ({"scale": 2.0}, "`scale` .*=2.0"),
        ({"model": "vgg"}, "`model` must be one of .*'vgg'"),
        ({"seeds": ()}, "The grid is empty"),
        ({"parameterizations": ("mean",)}, "`parameterization` must be a.*mean_kl"),
        ({"block_sizes": (0,)}, "`block_size` must be"),
    ],
)
def test_bad_studies(change, message):
    with pytest.raises(ValueError, match=message):
        Study("work", "digits", RECIPE, **change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype_policy": "bf16"}, "'bf16' to a mixed precision DTypePolicy"),
        ({"dtype_policy": "int32"}, "`dtype_policy` must be .*'int32'"),
        ({"dtype_policy": "int8_from_float32"}, "`dtype_policy` must be"),
        ({"rules": {"three/kernel": "hash=2"}}, "three/kernel"),
        ({"recipe": dataclasses.replace(RECIPE, max_shift=100)}, "`max_shift` .*=100"),
    ],
)
def test_what_would_fail_everywhere_is_said_at_once(small, tmp_path, change, message):
    change["workdir"] = str(tmp_path)
    lines = []
    with pytest.raises(ValueError, match=message):
        run_study(dataclasses.replace(small, **change), say=lines.append)
    assert not lines
    assert keras.config.dtype_policy().name == "float32"


def test_the_papers_grid():
    values = flags.FlagValues()
    cli.COMMANDS["study"].define(values)
    values(["tfmiracle", f"--flagfile={CONFIG}", "--workdir=work", "--data=mnist"])
    made = cli.study_of(values)
    cells = {cell_name(recipe): recipe for recipe in made.cells()}
    assert len(cells) == 2 * 3 * 10
    assert cells["mean_kl_b20_s0"] == PAPER
    assert cells["mean_var_b40_s9"] == dataclasses.replace(
        PAPER,
        parameterization=PAPER_MEAN_VAR,
        train_steps=200_000,
        block_size=40,
        seed=9,
    )
    assert made.rules == {"conv2/kernel": "hash=2", "dense1/kernel": "hash=64"}


def test_a_run_that_fails_is_passed_over(small, monkeypatch, tmp_path):
    made = dataclasses.replace(small, workdir=str(tmp_path))
    whole = study.compress

    def fail_once(*args, path, **kwargs):
        if path.stem == "mean_var_b10_s0":
            raise ValueError("The loss is nan.")
        return whole(*args, path=path, **kwargs)

    lines = []
    with monkeypatch.context() as patch:
        patch.setattr(study, "compress", fail_once)
        with pytest.raises(ValueError, match="failed: mean_var_b10_s0"):
            run_study(dataclasses.replace(made, seeds=(0,)), say=lines.append)
    assert "mean_var_b10_s0 failed, ValueError: The loss is nan." in lines
    assert list(records(made)) == ["mean_kl_b10_s0"]
    made = dataclasses.replace(made, seeds=(0,))
    assert run_study(made, say=lines.append)["left"] == 0


@pytest.mark.parametrize("exitcode", [0, 1, -9])
def test_a_process_that_fails_is_not_passed_over(exitcode, small, monkeypatch):
    def nothing(*_):
        pass

    exitcodes = iter([0, exitcode])
    context = types.SimpleNamespace(
        Process=lambda **_: types.SimpleNamespace(
            start=nothing, join=nothing, exitcode=next(exitcodes)
        )
    )
    monkeypatch.setattr(study.multiprocessing, "get_context", lambda _: context)
    if not exitcode:
        assert run_study(small, jobs=2)["total"] == 4
        return
    with pytest.raises(ValueError, match="failed: 1 of 2 processes"):
        run_study(small, jobs=2)


@pytest.mark.slow
def test_the_command_with_two_processes(tmp_path, capsys, monkeypatch):
    """Which import what the user's own module registers, as the command does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "coder_of_mine.py").write_text(MINE)
    rng = np.random.default_rng(0)
    x, y = rng.random((40, 4, 4)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "toy.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    arguments = (
        f"study --data={tmp_path}/toy.npz --model=digits_cnn --workdir={tmp_path}/w "
        "--scale=0.5 --rules=dense1/kernel:hash=64 --block_sizes=500 --seeds=3 "
        "--block_bits=6 --kl_bits=5 --batch_size=10 --train_steps=40 "
        "--blocks_per_round=20 --finetune_steps=20 --dtype_policy=mixed_bfloat16 "
        "--import=coder_of_mine --coder=mine --json"
    ).split()
    for jobs in (2, 1):
        with own_classes(CODERS):
            assert cli.main([*arguments, f"--jobs={jobs}"]) == 0
            monkeypatch.delitem(sys.modules, "coder_of_mine")
        result = json.loads(capsys.readouterr().out)
        assert result == {"total": 2, "done": 2, "left": 0}


MINE = """
from tfmiracle.coding.coder import CODERS
from tfmiracle.coding.minimal_random import MinimalRandomCoder

@CODERS.register
class Mine(MinimalRandomCoder):
    identifier = "mine"
"""
