"""Runs that are killed and go on."""

import dataclasses
import functools
import json
import os
import random
import shutil
import warnings

import keras
import kill
import numpy as np
import pytest

import tfmiracle
from tfmiracle import Recipe
from tfmiracle.training import run

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RECIPE = Recipe(
    block_size=60,
    block_bits=8,
    batch_size=16,
    warmup_steps=6,
    train_steps=8,
    blocks_per_round=2,
    finetune_steps=2,
)


class Killed(BaseException):
    pass


class KillAt(keras.callbacks.Callback):
    """Ends the process at a step, as far as the run can tell."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.fixture
def every_step(few_steps, monkeypatch):
    """Each step is an execution with a checkpoint after it."""
    monkeypatch.setattr(run, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(run, "_CHECKPOINT_SHARE", 0.0)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


def network(seed=None):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.layers.Input((6,), name="x"),
            keras.layers.Dense(20, "relu", name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.2, seed=seed, name="drop"),
            keras.layers.Dense(3, name="two"),
        ],
        name="net",
    )


def compress(folder, workdir="work", kill=None, recipe=RECIPE, net=None, **options):
    options = {
        "path": folder / "net.miracle",
        "validation_data": data(),
        "loss": LOSS,
        **options,
    }
    return tfmiracle.compress(
        net or network(),
        data(),
        recipe=recipe,
        metrics=["accuracy"],
        callbacks=[KillAt(kill)] if kill else (),
        workdir=workdir and folder / workdir,
        verbose=0,
        **options,
    )


def assert_goes_on(folder):
    """A run comes to its next step; there it is ended."""
    with pytest.raises(Killed):
        compress(folder, kill=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(recipe, workdir) -> folder and result of a run that nothing stopped."""

    @functools.cache
    def make(recipe, workdir):
        folder = tmp_path_factory.mktemp("whole")
        return folder, compress(folder, workdir, recipe=recipe, keep_posterior=True)

    return make


def without_time(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


# In the first phase, in the second and while coding; twice in each, or once.
@pytest.mark.parametrize(
    "options, workdir, kills",
    [
        ({}, "work", [3, 2, 5, 1, 5, 1]),
        ({"parameterization": "mean_var"}, None, [7, 8]),
        ({"coder": "trellis", "state_bits": 8, "block_bits": 7.5}, "work", [15, 1]),
    ],
)
def test_killed_anywhere_the_result_is_the_same(
    options, workdir, kills, tmp_path, every_step, whole
):
    recipe = dataclasses.replace(RECIPE, **options)
    folder, expected = whole(recipe, workdir)
    assert (folder / "work").exists() == bool(workdir)
    for step in kills:
        with pytest.raises(Killed):
            compress(tmp_path, kill=step, recipe=recipe)
        assert not (tmp_path / "net.miracle").exists()
    result = compress(tmp_path, recipe=recipe)
    data = (folder / "net.miracle").read_bytes()
    assert (tmp_path / "net.miracle").read_bytes() == data
    assert result.stages == expected.stages
    assert without_time(result.history) == without_time(expected.history)
    assert without_time(result.curve) == without_time(expected.curve)


def test_a_finished_run_is_not_repeated(tmp_path, every_step, whole, monkeypatch):
    folder, first = whole(RECIPE, "work")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    names = {p.name for p in (tmp_path / "work").iterdir()}
    assert names - {"lock"} == {"result.json", "coded.miracle", "coded.posterior.npz"}
    other = dataclasses.replace(RECIPE, seed=1)
    with pytest.raises(ValueError, match=r"other settings: recipe/.* was"):
        compress(tmp_path, recipe=other, keep_posterior=True)
    monkeypatch.setattr(keras.Model, "fit", None)
    again = compress(tmp_path, keep_posterior=True)
    assert again.stages == first.stages and again.history == first.history
    assert again.seconds == first.seconds
    # A file of that name with other content stays, a missing one is written again.
    (tmp_path / "net.miracle").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        compress(tmp_path, keep_posterior=True)
    assert (tmp_path / "net.miracle").read_bytes() == b"mine"
    (tmp_path / "net.miracle").unlink()
    (tmp_path / "net.posterior.npz").unlink()
    compress(tmp_path, keep_posterior=True)
    for kind in ("miracle", "posterior.npz"):
        data = (tmp_path / f"net.{kind}").read_bytes()
        assert data == (tmp_path / "work" / f"coded.{kind}").read_bytes()


def test_the_runs_own_file_may_be_the_one_asked_for(tmp_path, every_step):
    inside = tmp_path / "work" / "coded.miracle"
    with pytest.raises(Killed):
        compress(tmp_path, path=inside, kill=5)
    for _ in range(2):
        assert compress(tmp_path, path=inside).path == str(inside)
    (tmp_path / "work" / "result.json").unlink()
    with pytest.raises(FileExistsError):
        compress(tmp_path, path=inside)


def test_settings_of_a_working_directory_are_its_own(tmp_path, every_step):
    with pytest.raises(Killed):
        compress(tmp_path, kill=8)
    state = (tmp_path / "work" / "state.npz").read_bytes()
    with pytest.raises(ValueError, match=r"other settings: recipe/.* was"):
        compress(tmp_path, recipe=dataclasses.replace(RECIPE, seed=1))
    with pytest.raises(ValueError, match=r"other settings: loss.* was .*; rules.* was"):
        compress(tmp_path, loss="mse", rules={"two/*": "store"})
    x, y = data()
    with pytest.raises(ValueError, match=r"other settings: validation_data.* was"):
        compress(tmp_path, validation_data=(x + 1, y))
    assert (tmp_path / "work" / "state.npz").read_bytes() == state
    assert_goes_on(tmp_path)


def test_names_of_layers_are_settings(tmp_path, every_step):
    def unnamed():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(3)], name="net"
        )

    keras.utils.clear_session()
    with pytest.raises(Killed):
        compress(tmp_path, kill=8, net=unnamed())
    with pytest.raises(ValueError, match=r"/name was '.*clear_session"):
        compress(tmp_path, net=unnamed())
    keras.utils.clear_session()
    with pytest.raises(Killed):
        compress(tmp_path, kill=1, net=unnamed())


def test_another_environment_is_told(tmp_path, every_step, monkeypatch):
    def elsewhere():
        return {"versions": {"keras": "1.2.3"}, "machine": {"threads": 99}}

    with pytest.raises(Killed):
        compress(tmp_path, kill=8)
    with monkeypatch.context() as patch:
        patch.setattr(run, "environment", elsewhere)
        with (
            pytest.warns(
                UserWarning, match=r"keras was .* is '1.2.3'.*threads was .* 99"
            ),
            pytest.raises(Killed),
        ):
            compress(tmp_path, kill=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*goes on elsewhere")
            with pytest.raises(Killed):
                compress(tmp_path, kill=1)
    with pytest.warns(UserWarning, match=r"keras was '1.2.3' and is"):
        result = compress(tmp_path)
    monkeypatch.setattr(run, "environment", elsewhere)
    with warnings.catch_warnings():  # a run that is finished is what it is
        warnings.filterwarnings("error", message=".*goes on elsewhere")
        again = compress(tmp_path)
    assert again.stages == result.stages


def test_one_run_at_a_time(tmp_path, every_step):
    with (
        run.Run(tmp_path / "work", {}),
        pytest.raises(ValueError, match="in use by another run"),
    ):
        compress(tmp_path)
    assert_goes_on(tmp_path)


def test_damaged_states_are_named(tmp_path, every_step):
    with pytest.raises(Killed):
        compress(tmp_path, kill=8)
    path = tmp_path / "work" / "state.npz"
    state = path.read_bytes()
    for damaged in (b"", state[: len(state) // 2], b"PK" + state[2:100]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state.npz is damaged .*Delete"):
            compress(tmp_path)
    path.unlink()
    (tmp_path / "work" / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result.json is damaged"):
        compress(tmp_path)
    (tmp_path / "work" / "result.json").unlink()
    assert_goes_on(tmp_path)


def test_left_over_parts_are_removed(tmp_path, every_step):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".miracle-abc.tmp").write_bytes(b"half")
    assert_goes_on(tmp_path)
    assert not list((tmp_path / "work").glob(".miracle-*"))


def test_a_full_disk_loses_nothing(tmp_path, every_step, monkeypatch):
    with pytest.raises(Killed):
        compress(tmp_path, kill=8)
    state = (tmp_path / "work" / "state.npz").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            compress(tmp_path)
    assert (tmp_path / "work" / "state.npz").read_bytes() == state
    assert not list((tmp_path / "work").glob(".miracle-*"))
    assert_goes_on(tmp_path)


def test_the_curve_covers_all_phases(every_step, whole):
    _, result = whole(RECIPE, "work")
    phases = [row["phase"] for row in result.curve]
    assert phases == ["warmup"] * 6 + ["variational"] * 8 + ["coding"] * len(
        phases[14:]
    )
    steps = [row["step"] for row in result.curve]
    assert steps == list(range(1, len(steps) + 1))
    for row in result.curve:
        assert row["loss"] > 0 and 0 <= row["accuracy"] <= 1
    # No KL in deterministic training, nor when all is coded.
    assert "kl_bits" not in result.curve[-1]
    for row in result.curve[:-1]:
        kl_bits = None if row["phase"] == "warmup" else pytest.approx(8, rel=1e-4)
        assert row.get("kl_bits") == kl_bits and row.get("max_kl_bits") == kl_bits
        assert row.get("over_budget") == (None if row["phase"] == "warmup" else 0)
    seconds = [row["seconds"] for row in result.curve]
    assert seconds == sorted(seconds) and 0 < seconds[0] <= result.seconds
    json.dumps(result.curve, allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("command, kills", [("compress", 2), ("study", 1)])
def test_sigkill(command, kills, tmp_path):
    """The command line, killed by the system at random moments."""
    expected = kill.unbroken(command, tmp_path / "unbroken", eager=True)
    broken, rng = tmp_path / "broken", random.Random(1)
    assert kill.survive(command, expected, broken, kills, rng, eager=True) == kills
