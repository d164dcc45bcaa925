"""Coding during `fit`."""

import inspect
import json

import keras
import numpy as np
import pytest
from keras import layers

import tfmiracle
from tfmiracle import CompressionCallback
from tfmiracle.codec import codebook
from tfmiracle.coding.coder import CODERS
from tfmiracle.decoder import decode
from tfmiracle.hosts.models import plain_weights, posteriors
from tfmiracle.miracle_file import (
    MiracleFile,
)
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS
from tfmiracle.training import coding_loop
from tfmiracle.training.coding_loop import CodingLoop

BITS = 8


def data(count=48):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 5)).astype(np.float32)
    return x, np.argmax(x[:, :3] ** 2, axis=1)


def small_net():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            layers.Input((5,), name="x"),
            layers.Dense(6, "relu", name="one"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, name="two"),
        ],
        name="net",
    )


def wrapped(codebook="per_block", learning_rate=1e-2, **kwargs):
    """57 weights and 12 of BatchNormalization: 69 in 9 blocks."""
    model = tfmiracle.VariationalModel(
        small_net(), block_size=8, block_bits=BITS, codebook=codebook, seed=5, **kwargs
    )
    return compiled(model, learning_rate)


def of_layers(codebook="shared", learning_rate=1e-2, **kwargs):
    """36 + 21 weights in blocks of 8: 5 and 3 blocks."""
    keras.utils.set_random_seed(3)
    options = {"block_size": 8, "block_bits": BITS, "codebook": codebook, **kwargs}
    model = keras.Sequential(
        [
            layers.Input((5,), name="x"),
            tfmiracle.MeanKLDense(6, activation="relu", name="one", **options),
            layers.BatchNormalization(name="norm"),
            tfmiracle.MeanKLDense(3, name="two", **options),
        ],
        name="net",
    )
    return compiled(model, learning_rate)


def compiled(model, learning_rate=1e-2, **kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(learning_rate), loss, **kwargs)
    return model


def fit(model, callback, epochs=20, batch_size=8, more=(), **kwargs):
    return model.fit(
        *data(),
        batch_size=batch_size,
        epochs=epochs,
        verbose=0,
        callbacks=[callback, *more],
        **kwargs,
    )


def coded_values(model):
    """What the model computes with, in the order of the network."""
    values = {id(v): keras.ops.convert_to_numpy(v) for v in plain_weights(model)}
    for posterior, variables in posteriors(model):
        for v, value in zip(variables, posterior(training=False), strict=True):
            values[id(v)] = value.numpy()
    return list(values.values())


def assert_file_is_the_model(callback, model):
    values = coded_values(model)
    decoded = decode(callback.filepath)
    loaded = tfmiracle.load(callback.filepath)
    for value, weight, variable in zip(
        values, decoded.weights.values(), loaded.weights, strict=True
    ):
        np.testing.assert_array_equal(weight, value, strict=True)
        np.testing.assert_array_equal(variable.numpy(), value, strict=True)
    x = data()[0]
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5, atol=1e-5)


class Stop(keras.callbacks.Callback):
    """Does something at a step."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action, self.steps = step, action, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            self.action(self.model)


def stop(model):
    model.stop_training = True


def crash(model):
    raise ArithmeticError("another callback")


def interrupt(model):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["filepath", "record_path", "posterior_path"])
def test_a_folder_is_no_file(tmp_path, name):
    for folder in (".", "", tmp_path):
        options = {"filepath": tmp_path / "net.miracle", name: folder}
        with pytest.raises(IsADirectoryError, match="give the name of a file"):
            CompressionCallback(**options)


def test_one_path_for_two_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("record_path", "posterior_path"):
        with pytest.raises(ValueError, match="must be different files"):
            CompressionCallback("net.miracle", **{name: tmp_path / "net.miracle"})


# Whole runs.


@pytest.mark.parametrize(
    "make, num_blocks",
    [(wrapped, 9), pytest.param(of_layers, 8, marks=pytest.mark.slow)],
)
def test_fit_codes_and_ends_by_itself(tmp_path, make, num_blocks):
    path = tmp_path / "net.miracle"
    model = make()
    record = tmp_path / "record.json"
    callback = CompressionCallback(
        path, 4, 3, train_steps=2, verbose=0, metadata={"note": 1},
        record_path=record, record={"more": [2]},
    )  # fmt: skip
    history = fit(model, callback, epochs=50)
    steps = [2, 5, 8][: -(-num_blocks // 4)]
    assert [r["step"] for r in callback.history] == steps
    assert len(history.epoch) == -(-steps[-1] // 6)
    assert history.history["coded_blocks"][-1] == num_blocks
    assert callback.history[-1]["blocks"] == num_blocks
    for row in callback.history:
        assert row["kl_bits"] == pytest.approx(BITS, rel=1e-4)
        assert row["max_kl_bits"] == pytest.approx(BITS, rel=1e-4)
        assert 0 < row["loss"] < 10
        assert -5 < row["log_evidence"] < 3
        assert row["log_weight"] > 0
    assert callback.file_bytes == path.stat().st_size
    assert callback.file.metadata == {"note": 1}
    assert json.loads(record.read_text()) == {
        "tfmiracle": tfmiracle.__version__,
        "parameterization": [PARAMETERIZATIONS.serialize(tfmiracle.MeanKL())]
        * len(posteriors(model)),
        "kl_bits": [BITS] * len(posteriors(model)),
        "coder": [CODERS.serialize(p.coder) for p, _ in posteriors(model)],
        "more": [2],
    }
    assert MiracleFile.read(path).metadata == callback.file.metadata
    assert_file_is_the_model(callback, model)


def one_run(path):
    model = wrapped("shared")
    callback = CompressionCallback(path, 4, 2, train_steps=2, verbose=0)
    fit(model, callback, shuffle=False)
    return path.read_bytes()


def test_the_same_seed_gives_the_same_bytes(tmp_path, quick):
    assert one_run(tmp_path / "a") == one_run(tmp_path / "b")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_when_compiled(tmp_path):
    assert one_run(tmp_path / "a") == one_run(tmp_path / "b")


# The choice of candidates.


def log_weights(posterior, block):
    """log dQ/dP of every candidate of a block, from the densities."""
    loc, log_ratio = (x.numpy()[0] for x in posterior.standardized([block]))
    k = np.arange(2**BITS)
    z = codebook.candidates(
        posterior.layout.seed,
        np.full(len(k), block),
        k,
        posterior.layout.block_size,
        shared=posterior.code.shared,
    ).astype(np.float64)
    log_q = -0.5 * ((z - loc) / np.exp(log_ratio)) ** 2 - log_ratio
    return np.sum(log_q + 0.5 * z**2, axis=1)


@pytest.mark.parametrize("selection", ["sample", "largest_weight"])
@pytest.mark.parametrize("kind", ["per_block", "shared"])
@pytest.mark.parametrize("make", [wrapped, of_layers])
def test_indices_are_candidates_of_large_weight(tmp_path, quick, make, kind, selection):
    # Q stays what it was when coded.
    model = make(kind, learning_rate=0.0, selection=selection)
    callback = CompressionCallback(tmp_path / "net.miracle", 3, 1, verbose=0)
    fit(model, callback)
    file = MiracleFile.read(tmp_path / "net.miracle")
    chosen = []
    for group, (posterior, _) in zip(file.groups, posteriors(model), strict=True):
        assert group.code.codebook == kind
        np.testing.assert_array_equal(group.scales, posterior.coding_scale)
        for block, index in enumerate(group.codes):
            weights = log_weights(posterior, block)
            chosen.append(weights[index])
            if selection == "largest_weight":
                assert index == np.argmax(weights)
            else:
                # Each candidate below has a chance of 1e-4 altogether to be chosen.
                order = np.sort(weights)
                share = np.cumsum(np.exp(order - np.logaddexp.reduce(order)))
                assert weights[index] > order[np.searchsorted(share, 1e-4)] - 1e-3
    blocks = np.diff([0, *(r["blocks"] for r in callback.history)])
    rounds = [r["log_weight"] for r in callback.history]
    assert np.dot(blocks, rounds) == pytest.approx(sum(chosen), rel=1e-3)
    assert_file_is_the_model(callback, model)


# Steps and rounds.


def count_a_step(self, data):
    """A step of training that does nothing, and is fast."""
    self.optimizer.iterations.assign_add(1)
    return {"loss": 0.0}


@pytest.mark.parametrize(
    "execution, train, finetune, per_round, batches, steps, blocks",
    [
        (1, 0, 3, 2, 6, [0, 3, 6, 9, 12], [2, 4, 6, 8, 9]),
        (1, 5, 1, 4, 2, [5, 6, 7], [4, 8, 9]),
        (1, 7, 0, 2, 3, [7] * 5, [2, 4, 6, 8, 9]),
        (2, 3, 3, 3, 6, [4, 8, 12], [3, 6, 9]),
        (3, 0, 7, 5, 6, [0, 9], [5, 9]),
        (3, 4, 2, 3, 3, [6, 9, 12], [3, 6, 9]),
        (1, 4, 100, 9, 6, [4], [9]),
        (1, 0, 100, 50, 6, [0], [9]),
    ],
)
def test_rounds_come_at_the_right_steps(
    tmp_path,
    quick,
    monkeypatch,
    execution,
    train,
    finetune,
    per_round,
    batches,
    steps,
    blocks,
):
    model = compiled(wrapped(), steps_per_execution=execution)
    monkeypatch.setattr(tfmiracle.VariationalModel, "train_step", count_a_step)
    callback = CompressionCallback(
        tmp_path / "net.miracle", per_round, finetune, train, verbose=0
    )
    assert callback.steps_needed(model) == steps[-1]
    fit(model, callback, batch_size=48 // batches)
    assert [r["step"] for r in callback.history] == steps
    assert [r["blocks"] for r in callback.history] == blocks
    # `fit` takes a step before it asks whether to stop.
    assert int(model.optimizer.iterations) == max(steps[-1], execution)
    assert callback.steps_needed(model) == 0


def test_an_early_end_codes_the_rest(tmp_path, quick):
    model = wrapped()
    callback = CompressionCallback(tmp_path / "a", 2, 4, train_steps=1, verbose=0)
    fit(model, callback, epochs=1)  # 6 steps
    assert [r["step"] for r in callback.history] == [1, 5, 6, 6, 6]
    assert_file_is_the_model(callback, model)

    model = wrapped()
    callback = CompressionCallback(tmp_path / "b", 4, 50, train_steps=40, verbose=0)
    fit(model, callback, more=[Stop(3, stop)])
    assert [r["step"] for r in callback.history] == [3, 3, 3]
    assert_file_is_the_model(callback, model)


def test_weights_that_early_stopping_restores_are_coded(tmp_path, quick):
    model = wrapped()
    stopping = keras.callbacks.EarlyStopping(
        "loss", min_delta=1e3, patience=2, restore_best_weights=True
    )
    callback = CompressionCallback(tmp_path / "a", 1, 4, verbose=0)
    model.fit(
        *data(), batch_size=8, epochs=9, verbose=0, callbacks=[stopping, callback]
    )
    # 18 steps were taken and 5 blocks coded; the weights after 6 steps come back.
    assert [r["blocks"] for r in callback.history] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [r["step"] for r in callback.history] == [0, 4, *[18] * 7]
    assert_file_is_the_model(callback, model)


def test_the_file_is_the_model_after_the_step_that_keras_takes(tmp_path, quick):
    """All blocks are coded when `fit` begins; what is stored trains on."""
    model = wrapped(rules={"*/bias": "store"}, learning_rate=0.1)
    callback = CompressionCallback(tmp_path / "a", 100, 100, verbose=0)
    before = model.net.get_layer("two").bias.numpy()
    fit(model, callback)
    assert np.any(model.net.get_layer("two").bias.numpy() != before)
    assert_file_is_the_model(callback, model)


def test_metrics_that_are_vectors(tmp_path, quick):
    model = wrapped()
    metric = keras.metrics.F1Score(average=None, name="f1")
    model.compile(
        "adam", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=[metric]
    )
    x, y = data()
    callback = CompressionCallback(tmp_path / "a", 5, 2, train_steps=1)
    model.fit(x, np.eye(3)[y], batch_size=8, epochs=9, verbose=0, callbacks=[callback])
    assert [len(row["f1"]) for row in callback.history] == [3, 3]


def test_outside_fit(tmp_path, quick, capsys):
    model = wrapped()
    callback = CompressionCallback(tmp_path / "a", 5)
    everything = keras.callbacks.CallbackList([callback], model=model)
    everything.on_train_begin()
    everything.on_train_end()
    assert "9/9" in capsys.readouterr().out
    assert_file_is_the_model(callback, model)


@pytest.mark.parametrize("make", [wrapped, of_layers])
def test_an_interrupted_run_goes_on(tmp_path, quick, make):
    path = tmp_path / "net.miracle"
    model = make()
    callback = CompressionCallback(path, 2, 4, train_steps=2, verbose=0)
    with pytest.raises(ArithmeticError):
        fit(model, callback, more=[Stop(7, crash)])
    assert not path.exists() and callback.file is None
    before = [
        (p.fixed, p.codes.copy(), p.coding_scale.copy()) for p, _ in posteriors(model)
    ]
    assert sum(fixed.sum() for fixed, _, _ in before) == 4
    todo = sum((~fixed).sum() for fixed, _, _ in before)

    again = CompressionCallback(path, 3, 5, train_steps=1000, verbose=0)
    assert again.steps_needed(model) == 5 * -(-todo // 3)
    with pytest.raises(KeyboardInterrupt):
        fit(model, again, more=[Stop(6, interrupt)])
    assert not path.exists()
    fit(model, again)
    # Fine-tuning first: a round came before the crash.
    assert [r["step"] for r in again.history[:2]] == [5, 5]
    for (posterior, _), (fixed, indices, scale) in zip(posteriors(model), before):
        assert np.all(posterior.codes[fixed] == indices[fixed])
        np.testing.assert_array_equal(posterior.coding_scale, scale)
    assert_file_is_the_model(again, model)


def test_a_coded_model_writes_its_file_again(tmp_path, quick):
    model = wrapped()
    fit(model, CompressionCallback(tmp_path / "a", 9, 1, verbose=0))
    norm = model.net.get_layer("norm")
    norm.moving_mean.assign(norm.moving_mean + 1)  # as training on would do
    callback = CompressionCallback(tmp_path / "b", 1, 1, verbose=0)
    assert callback.steps_needed(model) == 0
    fit(model, callback)
    assert callback.history == []
    assert_file_is_the_model(callback, model)


def test_fine_tuning_moves_only_what_is_left(tmp_path, quick):
    model = wrapped(learning_rate=0.5)
    posterior = model.block_posterior
    callback = CompressionCallback(tmp_path / "a", 3, 3, train_steps=1, verbose=0)
    seen = []

    def remember(model):
        fixed = posterior.fixed
        z = posterior.standardized()[0].numpy()
        values = [v.numpy() for v in posterior(training=False)]
        blocks = posterior.layout.project(values)
        seen.append((fixed, z, blocks))

    more = [Stop(step, remember) for step in (1, 3, 4)]
    fit(model, callback, more=more)
    (fixed, before, blocks), (_, after, later), (more_fixed, *_) = seen
    assert fixed.sum() == 3 and more_fixed.sum() == 6
    np.testing.assert_array_equal(blocks[fixed], later[fixed])
    mask = posterior.layout.mask()
    assert np.all((before != after)[~fixed].any(1))
    assert np.all((blocks != later)[~fixed].any(1))
    np.testing.assert_array_equal(before[~mask], 0)


# What goes wrong.


def test_an_existing_file_is_refused_at_once(tmp_path):
    path = tmp_path / "net.miracle"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        CompressionCallback(path)
    with pytest.raises(FileNotFoundError):
        CompressionCallback(tmp_path / "none" / "net.miracle")
    CompressionCallback(path, overwrite=True)
    assert path.read_bytes() == b"precious"


def test_a_file_that_appears_during_training_is_kept(tmp_path, quick):
    path = tmp_path / "net.miracle"
    model = wrapped()
    callback = CompressionCallback(path, 9, 1, train_steps=2, verbose=0)
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        fit(model, callback)
    assert path.read_bytes() == b"precious"
    other = CompressionCallback(tmp_path / "other.miracle", verbose=0)
    fit(model, other)  # nothing is lost
    assert_file_is_the_model(other, model) if other.history else None
    assert (tmp_path / "other.miracle").exists()


@pytest.mark.parametrize("name", ["overwrite", "architecture"])
def test_switches_are_true_or_false(tmp_path, name):
    with pytest.raises(ValueError, match=f"`{name}` must be True or False"):
        CompressionCallback(tmp_path / "net.miracle", **{name: None})


def test_help_tells_the_arguments():
    signature = inspect.signature(CompressionCallback)
    assert signature == inspect.signature(CodingLoop)
    for name in signature.parameters:
        assert f"\n      {name}:" in CompressionCallback.__doc__
    with pytest.raises(TypeError, match="selection"):
        CompressionCallback("net.miracle", selection="sample")


def test_metadata_are_checked_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"`metadata`.*JSON.*float32"):
        CompressionCallback(tmp_path / "net.miracle", metadata={"x": np.float32(1)})
    with pytest.raises(ValueError, match=r"`metadata`.*JSON.*nan"):
        CompressionCallback(tmp_path / "net.miracle", metadata={"x": np.nan})
    with pytest.raises(ValueError, match="2,000,009 bytes as JSON; at most 1,048"):
        CompressionCallback(tmp_path / "net.miracle", metadata={"x": "." * 2_000_000})


def test_what_cannot_be_coded_is_refused_before_training(tmp_path, quick):
    callback = CompressionCallback(tmp_path / "a", verbose=0)
    model = compiled(small_net())
    with pytest.raises(ValueError, match="nothing to code"):
        fit(model, callback)
    assert int(model.optimizer.iterations) == 0
    model = compiled(tfmiracle.VariationalModel(small_net(), "deterministic"))
    with pytest.raises(ValueError, match="deterministic"):
        fit(model, callback)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("name", ["tau", "quota_logits", "log_coding_scale"])
def test_parameters_that_are_not_finite_are_refused(tmp_path, quick, name):
    model = wrapped()
    variable = {v.name: v for v in model.block_posterior.variables}[name]
    variable.assign(np.full(variable.shape, np.nan))
    callback = CompressionCallback(tmp_path / "net.miracle", 2, 1, verbose=0)
    with pytest.raises(ValueError, match="finite"):
        fit(model, callback)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_decodes_to_something_else_is_not_written(
    tmp_path, quick, monkeypatch
):
    def wrong(data, **options):
        decoded = decode(data, **options)
        decoded.weights["two/bias"][1] += 1e-6
        return decoded

    monkeypatch.setattr(coding_loop, "decode", wrong)
    callback = CompressionCallback(tmp_path / "net.miracle", 9, 1, verbose=0)
    with pytest.raises(RuntimeError, match=r"two/bias.*not been written"):
        fit(wrapped(), callback)
    assert list(tmp_path.iterdir()) == []


def test_weights_created_outside_build_are_refused_before_training(tmp_path, quick):
    @keras.saving.register_keras_serializable("tests_of_tfmiracle")
    class Late(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = None

        def call(self, x):
            return x if self.inner is None else self.inner(x)

    late = Late()
    net = keras.Sequential([layers.Input((5,), name="x"), layers.Dense(3), late])
    late._tracker.unlock()
    late.inner = layers.Dense(3)
    late.inner.build((None, 3))
    model = compiled(tfmiracle.VariationalModel(net, block_size=8, block_bits=BITS))
    callback = CompressionCallback(tmp_path / "net.miracle", verbose=0)
    with pytest.raises(ValueError, match="other weights"):
        fit(model, callback)


def test_a_progress_bar_only_where_fit_shows_none(tmp_path, quick, capsys):
    fit(wrapped(), CompressionCallback(tmp_path / "a", 5, 1, verbose=0))
    assert capsys.readouterr().out == ""
    fit(wrapped(), CompressionCallback(tmp_path / "b", 5, 1))
    assert "9/9" in capsys.readouterr().out
