"""Compression in one call, its settings, and the size it is asked for."""

import dataclasses
import functools
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from support import CONFIGS, fix_all, own_classes

import tfmiracle
from tfmiracle import ONE_SHOT, PAPER, Recipe, cli
from tfmiracle.coding.coder import CODERS
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.datasets import load_dataset
from tfmiracle.hosts.models import VariationalModel
from tfmiracle.hosts.network import to_file
from tfmiracle.miracle_file import (
    MiracleFile,
)
from tfmiracle.posteriors.parameterization import (
    PARAMETERIZATIONS,
    Deterministic,
    MeanKL,
    MeanVar,
)
from tfmiracle.recipe import PAPER_MEAN_VAR
from tfmiracle.studies.architectures import ARCHITECTURES
from tfmiracle.training import coding_loop
from tfmiracle.training.data import augmented, training_batches
from tfmiracle.training.objective import describe
from tfmiracle.training.run import PHASES
from tfmiracle.training.size import recipe_for, target_bytes

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FAST = Recipe(
    block_size=150,
    block_bits=8,
    codebook="per_block",
    batch_size=16,
    train_steps=10,
    blocks_per_round=8,
    finetune_steps=10,
)


def examples(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


def small_net(units=40, normalized=True):
    """7 * units + 4 * units of BatchNormalization + 3 * units + 3 weights."""
    keras.utils.set_random_seed(3)
    net = keras.Sequential(
        [
            layers.Input((6,), name="x"),
            layers.Dense(units, "relu", name="one"),
            *([layers.BatchNormalization(name="norm")] if normalized else []),
            layers.Dense(3, name="two"),
        ],
        name="net",
    )
    net.compile(loss=LOSS, metrics=["accuracy"])
    return net


@pytest.fixture
def short(few_steps):
    """Runs of three steps."""
    return dataclasses.replace(FAST, train_steps=2, finetune_steps=1)


# Whole runs.


def test_on_a_cpu_the_network_stays_outside_of_xla(tmp_path):
    if any(d.device_type != "CPU" for d in tf.config.list_physical_devices()):
        pytest.skip("there is an accelerator")
    found = []
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: found.append(look.model.jit_compile)
    )
    path, options = tmp_path / "net.miracle", {"callbacks": [look], "verbose": 0}
    tfmiracle.compress(small_net(), examples(), path=path, recipe=FAST, **options)
    assert found and not any(found)


def test_the_architecture_is_left_out_on_request(tmp_path, short):
    path, workdir = tmp_path / "net.miracle", tmp_path / "run"
    options = {"architecture": False, "record": True, "workdir": workdir, "verbose": 0}
    net, recipe = small_net(), dataclasses.replace(short, blocks_per_round=64)
    result = tfmiracle.compress(
        net, examples(), 700, path, recipe=recipe, metadata={"a": 1}, **options
    )
    assert result.file.architecture is None and result.file_bytes <= 700
    assert result.file.metadata == {"a": 1}
    assert json.loads(path.with_suffix(".record.json").read_text())["recipe"]
    with pytest.raises(ValueError, match="pass it"):
        tfmiracle.load(path)
    loaded = tfmiracle.load(path, model=keras.models.clone_model(net))
    for a, b in zip(loaded.get_weights(), result.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_compress(tmp_path, quick, capsys):
    net = small_net()
    before = [np.array(v) for v in net.weights]
    path = tmp_path / "net.miracle"
    x, y = examples()
    result = tfmiracle.compress(
        net,
        (x, y),
        target=800,
        path=path,
        recipe=dataclasses.replace(
            FAST, warmup_steps=10, blocks_per_round=64, finetune_steps=3
        ),
        rules={"one/kernel": "hash=2"},
        metrics=["accuracy"],
        validation_data=(x, y),
        metadata={"note": "to myself"},
        record=True,
        verbose=0,
    )
    assert capsys.readouterr().out == ""
    print(result)
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"error before [\d.]+%, after [\d.]+% \(validation data\)", first
    )
    assert f"before {1 - result.stages['warmup']['accuracy']:.2%}" in first
    assert f"after {1 - result.stages['decoded']['accuracy']:.2%}" in first
    assert rest[0].startswith(f"{path}: {path.stat().st_size:,} bytes, of which ")
    assert len(rest) == 3 and rest[2].endswith(" seconds")
    assert repr(result) == str(result)

    # The model given is untouched.
    for variable, value in zip(net.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert net.loss is LOSS and all(v.trainable for v in net.trainable_variables)

    assert result.path == str(path)
    assert result.file_bytes == path.stat().st_size <= 800
    file = MiracleFile.read(path)
    assert file.num_weights == 7 * 40 + 4 * 40 + 3 * 40 + 3
    assert result.ratio == 4 * file.num_weights / path.stat().st_size
    assert result.payload_ratio == 4 * file.num_weights / file.payload_bytes
    assert file.groups[0].layout.variables[0].hash_factor == 2
    assert file.metadata == {"note": "to myself"}

    made_with = json.loads(path.with_suffix(".record.json").read_text())
    assert made_with["coder"][0]["config"]["selection"] == "largest_weight"
    block_size = file.groups[0].layout.block_size
    assert made_with["recipe"] == {
        **FAST.settings(),
        "block_size": block_size,
        "warmup_steps": 10,
        "blocks_per_round": 64,
        "finetune_steps": 3,
    }

    stages = ["original", "warmup", "posterior_mean", "posterior_sample", "decoded"]
    assert list(result.stages) == stages
    for metrics in result.stages.values():
        assert metrics["loss"] > 0 and 0 <= metrics["accuracy"] <= 1
    logits = tfmiracle.load(path).predict(x, verbose=0)
    np.testing.assert_array_equal(logits, result.model.predict(x, verbose=0))
    accuracy = np.mean(np.argmax(logits, 1) == y)
    assert result.stages["decoded"]["accuracy"] == pytest.approx(accuracy)

    num_blocks = file.groups[0].layout.num_blocks
    rounds = -(-num_blocks // 64)
    # Ten steps at a time, and enough of them for all rounds.
    assert [r["step"] for r in result.history] == [10 * i for i in range(rounds)]
    assert result.history[-1]["blocks"] == num_blocks


def test_a_dataset_no_validation_and_progress(tmp_path, short, capsys):
    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(16)
    path = tmp_path / "net.miracle"
    net = small_net()
    net.compile("sgd")
    result = tfmiracle.compress(
        net,
        batches,
        path=path,
        recipe=short,
        loss=LOSS,
        rules={"two/*": "store"},
    )
    assert result.stages == {}
    out = capsys.readouterr().out
    assert "Variational training, 2 steps" in out and "Coding" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert repr(result).startswith("not evaluated (no validation data)\n")
    file = MiracleFile.read(path)
    assert [place is None for place in file.coded[-2:]] == [True, True]
    # one/kernel, one/bias and gamma, beta of the normalization.
    assert file.groups[0].layout.num_blocks == -(-(7 * 40 + 2 * 40) // 150)
    with pytest.raises(FileExistsError):
        tfmiracle.compress(net, batches, path=path, recipe=short, loss=LOSS)


@pytest.mark.slow
def test_digits_stay_readable(tmp_path):
    digits = load_dataset("digits")
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, "relu"),
            layers.Dense(10),
        ]
    )
    net.compile("adam", LOSS, metrics=["accuracy"])
    net.fit(digits.x_train, digits.y_train, batch_size=32, epochs=20, verbose=0)
    recipe = Recipe(
        block_bits=10,
        train_steps=500,
        blocks_per_round=100,
        finetune_steps=20,
    )
    test = (digits.x_test, digits.y_test)
    result = tfmiracle.compress(
        net,
        (digits.x_train, digits.y_train),
        target="12x",
        path=tmp_path / "net.miracle",
        recipe=recipe,
        metrics=["accuracy"],
        validation_data=test,
        verbose=0,
    )
    assert result.ratio > 11 and result.file_bytes <= 4 * 2410 / 12
    assert result.stages["original"]["accuracy"] > 0.93
    assert result.stages["decoded"]["accuracy"] > 0.85


# What is refused.


def refused(match, *, net=None, data=None, error=ValueError, tmp_path, **kwargs):
    path = tmp_path / "net.miracle"
    with pytest.raises(error, match=match):
        tfmiracle.compress(
            net or small_net(),
            examples() if data is None else data,
            **{"path": path, "recipe": FAST, "verbose": 0, **kwargs},
        )
    assert list(tmp_path.iterdir()) == []


def test_bad_data_is_refused(tmp_path):
    x, y = examples()
    for pair in ((x, y[:-1]), (x[:-1], y), (x[:0], y[:0])):
        refused("same number of examples", data=pair, tmp_path=tmp_path)
    for other in (x, [x], (x,), (x, y, y, y), {"x": x}):
        refused("must be a tuple", data=other, tmp_path=tmp_path)
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad[5, 2] = value
        refused("not finite", data=(bad, y), tmp_path=tmp_path)
    empty = tf.data.Dataset.from_tensor_slices((x, y)).take(0).batch(4)
    refused("empty", data=empty, tmp_path=tmp_path)


def test_dropout_without_a_seed_follows_that_of_the_recipe(quick, tmp_path):
    def run(name, around, seed=0):
        keras.utils.set_random_seed(around)
        drop = layers.Dropout(0.5, name="drop")
        parts = [layers.Input((6,), name="x"), drop, layers.Dense(3, name="out")]
        net = keras.Sequential(parts, name="net")
        net.set_weights([np.ones((6, 3)), np.zeros(3)])
        recipe = dataclasses.replace(FAST, block_size=5, seed=seed)
        state = drop.seed_generator.state.numpy()
        result = tfmiracle.compress(
            net, examples(), None, tmp_path / name, recipe, loss=LOSS, verbose=0
        )
        np.testing.assert_array_equal(drop.seed_generator.state, state)
        return (tmp_path / name).read_bytes(), [row["loss"] for row in result.curve]

    first = run("first", 1)
    assert run("again", 2) == first
    assert run("other", 2, seed=1)[1] != first[1]


def many_heads():
    """Two inputs and two outputs, in an order that their names do not have."""
    keras.utils.set_random_seed(3)
    a, b = layers.Input((6,), name="a"), layers.Input((2,), name="b")
    x = layers.Concatenate()([a, b])
    outputs = [layers.Dense(1, name="dense_4")(x), layers.Dense(1, name="dense_3")(x)]
    net = keras.Model([a, b], outputs, name="net")
    weights = {"dense_3": 0.5, "dense_4": 1.0}
    net.compile("adam", {"dense_3": "mse", "dense_4": "mae"}, weights)
    return net


def test_lists_of_inputs_and_losses_by_name(tmp_path, quick):
    net, (x, _) = many_heads(), examples()
    y = {"dense_3": np.ones((64, 1)), "dense_4": np.zeros((64, 1))}
    data = [x, x[:, :2]], y
    expected = net.evaluate(*data, verbose=0, return_dict=True)
    result = tfmiracle.compress(
        net, data, path=tmp_path / "file", recipe=FAST, validation_data=data, verbose=0
    )
    original = result.stages["original"]
    np.testing.assert_allclose(original["loss"], expected["loss"], rtol=1e-5)
    assert result.model.output_names == ["dense_4", "dense_3"]
    loaded = tfmiracle.load(tmp_path / "file")
    assert loaded.output_names == ["dense_4", "dense_3"]
    for here, there in zip(result.model(data[0]), loaded(data[0])):
        np.testing.assert_array_equal(here, there)


def test_weights_of_examples_and_metrics_that_are_vectors(tmp_path, quick):
    x, y = examples()
    data = x.tolist(), np.eye(3)[y].tolist(), np.linspace(0, 1, 64)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    result = tfmiracle.compress(
        small_net(),
        data,
        path=tmp_path / "file",
        recipe=FAST,
        loss=loss,
        metrics=[keras.metrics.F1Score(average=None, name="f1")],
        validation_data=data,
        workdir=tmp_path / "new" / "work",
        verbose=0,
    )
    logits = result.model.predict(x, verbose=0)
    expected = loss(np.eye(3)[y], logits, sample_weight=data[2])
    assert result.stages["decoded"]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert all(len(stage["f1"]) == 3 for stage in result.stages.values())


def test_lists_of_inputs_and_the_loss_weights_in_distillation(tmp_path, quick):
    net, (x, _) = many_heads(), examples()
    result = tfmiracle.compress(
        net,
        [x, x[:, :2]],
        path=tmp_path / "file",
        recipe=FAST,
        distill=True,
        verbose=0,
    )
    config = result.model.get_compile_config()
    assert config["loss_weights"] == {"dense_3": 0.5, "dense_4": 1.0}


def test_models_with_a_posterior_are_refused(tmp_path):
    model = VariationalModel(small_net())
    of_layers = keras.Sequential([layers.Input((6,)), tfmiracle.MeanKLDense(3)])
    for made in (model, of_layers):
        with pytest.raises(ValueError, match="has a posterior already"):
            tfmiracle.compress(made, examples(), path=tmp_path / "file", loss=LOSS)


def test_datasets_without_an_end_or_a_beginning(tmp_path, quick):
    def run(data, **options):
        return tfmiracle.compress(
            small_net(), data, path=tmp_path / "a", recipe=FAST, verbose=0, **options
        )

    batches = tf.data.Dataset.from_tensor_slices(examples()).batch(16)
    with pytest.raises(ValueError, match="`validation_data` never ends"):
        run(examples(), validation_data=batches.repeat())
    with (
        pytest.warns(UserWarning, match="ran out of data"),
        pytest.raises(ValueError, match="The data ended after 0 of 10 steps"),
    ):
        run(batches.filter(lambda x, y: False))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("warmup_steps, phases", [(0, 2), (10, 3)])
def test_callbacks_see_every_phase_also_one_without_steps(
    quick, tmp_path, warmup_steps, phases
):
    seen = []
    notes = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append("begin"),
        on_train_end=lambda logs: seen.append("end"),
    )
    recipe = dataclasses.replace(FAST, blocks_per_round=1000, warmup_steps=warmup_steps)
    tfmiracle.compress(
        small_net(),
        examples(),
        path=tmp_path / "file",
        recipe=recipe,
        verbose=0,
        callbacks=[notes],
    )
    assert seen == ["begin", "end"] * phases


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, short):
    x, y = examples()
    x[:, 0] = np.nan
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    refused(
        "loss is nan after 1 steps of variational",
        data=batches,
        recipe=short,
        tmp_path=tmp_path,
    )


def test_bad_arguments_are_refused(tmp_path):
    net = small_net()
    net.loss = None
    refused("`loss` is missing", net=net, tmp_path=tmp_path)
    unbuilt = keras.Sequential([layers.Dense(3)])
    refused("no weights yet", net=unbuilt, loss="mse", tmp_path=tmp_path)
    refused("fits no variable", rules={"three/kernel": "hash=2"}, tmp_path=tmp_path)
    refused("fits no variable", rules={"three/kernel": "store"}, tmp_path=tmp_path)
    refused("A rule must say", rules={"one/kernel": "hash=0"}, tmp_path=tmp_path)
    refused("could be coded", rules={"*": "store"}, tmp_path=tmp_path)
    refused("`target` must be", target="small", tmp_path=tmp_path)
    refused("cannot be met", target=10, tmp_path=tmp_path)
    refused("JSON", metadata={"x": object()}, tmp_path=tmp_path)
    refused("must be a tfmiracle.Recipe", recipe={"seed": 3}, tmp_path=tmp_path)
    refused("must be a Keras model", net="net.keras", loss="mse", tmp_path=tmp_path)
    refused("`validation_data` must", validation_data=3, tmp_path=tmp_path)
    refused("`rules` must be a dict", rules="*/bias", tmp_path=tmp_path)
    for name in ("distill", "keep_posterior", "architecture", "record", "overwrite"):
        message = f"`{name}` must be True or False. Received: {name}='x.json'"
        refused(message, **{name: "x.json"}, tmp_path=tmp_path)
    for folder in (".", "", tmp_path):
        for options in ({}, {"record": True}, {"workdir": tmp_path / "run"}):
            refused(
                "is a folder; give the name of a file",
                path=folder,
                error=IsADirectoryError,
                tmp_path=tmp_path,
                **options,
            )
    none = tmp_path / "none" / "net.miracle"
    refused("not exist", path=none, error=FileNotFoundError, tmp_path=tmp_path)


def test_loss_weights_of_the_model_are_kept(tmp_path, short):
    net = small_net()
    net.compile(loss=LOSS, loss_weights=[3.0])
    (x, y), path = examples(), tmp_path / "net.miracle"
    recipe = dataclasses.replace(short, train_steps=0)
    options = {"path": path, "recipe": recipe, "validation_data": (x, y), "verbose": 0}
    result = tfmiracle.compress(net, (x, y), **options)
    plain = float(LOSS(y, net(x)))
    assert result.stages["original"]["loss"] == pytest.approx(3 * plain, rel=1e-4)
    given = tfmiracle.compress(net, (x, y), loss=LOSS, overwrite=True, **options)
    assert given.stages["original"]["loss"] == pytest.approx(plain, rel=1e-4)


class Plain(keras.losses.Loss):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, y, p):
        return self.factor * keras.losses.mean_squared_error(y, p)

    def bound(self, y, p):
        return self.call(y, p)


def squares(y, p, factor=1.0):
    return factor * keras.ops.mean(keras.ops.square(y - p), -1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: squares(y, p),
        functools.partial(squares, factor=1.0),
        Plain(1.0),
        Plain(1.0).bound,
        [Plain(1.0).__call__],
    ],
)
def test_losses_and_metrics_that_keras_cannot_serialize(tmp_path, short, loss):
    net, x = small_net(), examples()[0]
    net.compile("adam", loss)
    data, work = (x, x[:, :3]), tmp_path / "work"
    recipe = dataclasses.replace(short, train_steps=1, blocks_per_round=100)
    options = {"metrics": [lambda y, p: squares(y, p)], "validation_data": data}
    options |= {"workdir": work, "verbose": 0, "path": tmp_path / "file"}
    result = tfmiracle.compress(net, data, recipe=recipe, **options)
    found = result.stages["decoded"]
    expected = np.mean((tfmiracle.load(tmp_path / "file")(x) - data[1]) ** 2)
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    # Another process would go on with what it makes anew.
    options["metrics"] = [lambda y, p: squares(y, p)]
    assert tfmiracle.compress(net, data, recipe=recipe, **options).stages


def test_descriptions_of_losses_and_metrics_are_the_same_in_every_process():
    def made():
        metrics = [keras.metrics.MeanSquaredError(), "mae", lambda y, p: p]
        return [Plain(2.0), {"a": LOSS, "b": squares}, Plain(1.0).bound, *metrics, None]

    first, again = describe(made()), describe(made())
    text = json.dumps(first)
    assert first == again and "0x" not in text
    assert "test_compression.Plain" in text and "from_logits" in text
    hard, soft = (keras.losses.BinaryCrossentropy(from_logits=b) for b in (0, 1))
    assert describe(hard) != describe(soft)


def test_l2_is_in_the_loss_of_all_training_and_of_no_evaluation(tmp_path, short):
    recipe = dataclasses.replace(short, warmup_steps=2, blocks_per_round=1)
    data = examples()
    results = [
        tfmiracle.compress(
            small_net(),
            data,
            path=tmp_path / f"{l2}.miracle",
            recipe=dataclasses.replace(recipe, l2=l2),
            validation_data=data,
            verbose=0,
        )
        for l2 in (0.0, 1e3)
    ]
    plain, penalized = (
        {row["phase"]: row["loss"] for row in result.curve} for result in results
    )
    assert all(penalized[phase] > 100 * plain[phase] for phase in plain)
    assert set(plain) == set(PHASES)
    for stages in zip(*(result.stages.values() for result in results), strict=True):
        assert stages[1]["loss"] < 10 * stages[0]["loss"]


def images(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 3, 4, 1)).astype(np.float32)
    return x, np.argmax(x[:, 0, :3, 0], axis=1)


def image_net():
    keras.utils.set_random_seed(3)
    net = keras.Sequential(
        [
            layers.Input((3, 4, 1)),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.Flatten(),
            layers.Dense(3, name="dense"),
        ]
    )
    net.compile(loss=LOSS)
    return net


def test_training_images_are_shifted_and_no_others(tmp_path, short, monkeypatch):
    recipe = dataclasses.replace(short, max_shift=1, warmup_steps=2, block_size=40)
    recipe = dataclasses.replace(recipe, blocks_per_round=1)
    (x, y), trained_on, recalibrated_on = images(), [], []
    fit, recalibrate = VariationalModel.fit, coding_loop.recalibrate

    def watched_fit(self, batches, **kwargs):
        trained_on.append(np.concatenate([b for b, _ in batches.take(8)]))
        return fit(self, batches, **kwargs)

    def watched_recalibrate(model, batches):
        recalibrated_on.extend(batches.take(4).as_numpy_iterator())
        return recalibrate(model, batches)

    monkeypatch.setattr(VariationalModel, "fit", watched_fit)
    monkeypatch.setattr(coding_loop, "recalibrate", watched_recalibrate)
    result = tfmiracle.compress(
        image_net(),
        (x, y),
        path=tmp_path / "net.miracle",
        recipe=recipe,
        validation_data=(x, y),
        verbose=0,
    )
    original = {image.tobytes() for image in x}
    assert len(trained_on) == 3  # phases
    for seen in trained_on:
        kept = np.mean([image.tobytes() in original for image in seen])
        assert 0 < kept < 0.3  # 1 / 9 of them
    assert len(np.unique(np.concatenate(trained_on), axis=0)) > 2 * len(x)
    assert len(recalibrated_on) == 4
    assert {image.tobytes() for b in recalibrated_on for image in b} <= original
    plain = result.model.evaluate(x, y, verbose=0)
    assert result.stages["decoded"]["loss"] == pytest.approx(plain, rel=1e-5)


def test_training_images_are_mirrored_without_a_shift():
    x = np.arange(5 * 4 * 4, dtype=np.float32).reshape(5, 4, 4, 1)
    recipe = Recipe(batch_size=2, flip=True)
    batches = augmented(training_batches((x, x[:, 0, 0, 0]), recipe), recipe)
    seen = np.concatenate([images for images, _ in batches("warmup", 0).take(20)])
    either = np.concatenate([x, x[:, :, ::-1]])
    np.testing.assert_array_equal(np.unique(seen, axis=0), np.unique(either, axis=0))
    plain = training_batches((x, x), Recipe())
    assert augmented(plain, Recipe()) is plain


@pytest.mark.parametrize("max_shift, count", [(3, 64), (4, 5)])
def test_images_too_small_to_shift(tmp_path, max_shift, count):
    options = {"recipe": Recipe(max_shift=max_shift), "path": tmp_path / "net.miracle"}
    x, y = images(count)
    for data in ((x, y), tf.data.Dataset.from_tensor_slices((x, y)).batch(4)):
        with pytest.raises(ValueError, match=f"`max_shift` .*={max_shift} .* 3, 4, 1"):
            tfmiracle.compress(image_net(), data, **options)


# The size of the file.


def size_of(net, block_size, recipe, **kwargs):
    metadata = kwargs.pop("metadata", None)
    model = VariationalModel(
        net, block_size=block_size, block_bits=recipe.block_bits, **kwargs
    )
    return to_file(fix_all(model), metadata)


WORDS = {"words": [n * 37 % 1000 for n in range(200)]}


@pytest.mark.parametrize("bits", [3, 8, 20])
@pytest.mark.parametrize(
    "target, options",
    [
        (1500, {}),
        ("2.6 kB", {"rules": {"*/bias": "store"}}),
        ("21x", {"rules": {"one/kernel": "hash=3"}}),
        ("2.5 bits", {"metadata": WORDS}),
    ],
)
def test_targets_are_used_and_not_exceeded(bits, target, options):
    net = small_net(500, normalized=False)
    recipe = Recipe(block_bits=bits)
    budget = target_bytes(target, sum(v.numpy().size for v in net.weights))
    size = recipe_for(net, target, recipe, **options).block_size
    file = size_of(net, size, recipe, **options)
    actual = len(file.to_bytes())
    assert actual <= budget
    # Smaller blocks would not do, but for what stored variables may need.
    smaller = size_of(net, size - 1, recipe, **options) if size > 1 else None
    slack = 80 + sum(v.nbytes for v in file.stored)
    assert smaller is None or len(smaller.to_bytes()) > budget - slack - bits


def test_stored_values_may_grow_in_training():
    """Zeros compress well, trained statistics do not."""
    net = small_net(300)
    size = recipe_for(net, 4000, Recipe(block_bits=8)).block_size
    rng = np.random.default_rng(0)
    norm = net.get_layer("norm")
    norm.set_weights([rng.gamma(2.0, size=300) for _ in range(4)])
    file = size_of(net, size, Recipe(block_bits=8))
    used = len(file.to_bytes())
    smaller = size_of(net, size - 1, Recipe(block_bits=8))
    assert used <= 4000 < len(smaller.to_bytes()) + 2 * 64


@pytest.mark.parametrize("target", [1, 100, "1000x", "0.01 bits", "5 B"])
def test_impossible_targets_are_refused(target):
    net = small_net(300)
    with pytest.raises(ValueError, match="`target` cannot be met") as refusal:
        recipe_for(net, target, FAST)
    least, ratio, bits, *parts = re.search(
        r"takes ([\d,]+) \('([\d.]+x)', '([\d.]+ bits)'\): ([\d,]+) for architecture, "
        r".*?, ([\d,]+) for the layout .*?, ([\d,]+) for stored variables, (\d+) for "
        r"the shortest code, (\d+) in reserve",
        str(refusal.value),
    ).groups()
    least = int(least.replace(",", ""))
    assert sum(int(part.replace(",", "")) for part in parts) == least
    # What it promises holds, and is the least.
    for possible in (least, ratio, bits):
        assert recipe_for(net, possible, FAST).block_size > 0
    with pytest.raises(ValueError, match="cannot be met"):
        recipe_for(net, least - 1, FAST)


@pytest.mark.parametrize(
    "target, hint",
    [
        (2, "Did you mean '2x', a ratio?"),
        ("1.5", "Did you mean '1.5x', a ratio?"),
        (200, "(As a ratio, '200x', it would be "),
        ("200 B", None),
        ("1000x", None),
    ],
)
def test_a_ratio_that_was_meant_is_asked_for(target, hint):
    with pytest.raises(ValueError, match="cannot be met") as refusal:
        recipe_for(small_net(500), target, FAST)
    assert hint is None or hint in str(refusal.value)
    assert (hint is not None) == ("ratio" in str(refusal.value))


def test_rules_that_would_help_are_named():
    def refusal(net, **options):
        with pytest.raises(ValueError, match="cannot be met") as found:
            recipe_for(net, 100, FAST, **options)
        return str(found.value)

    net = small_net(300)
    text = refusal(net)
    assert "The rules" not in text  # statistics have 8 bits as it is
    whole = {"*/moving_mean": "store", "*/moving_variance": "store"}
    text = refusal(net, rules=whole)
    rules = dict.fromkeys(whole, "store=8bit")
    assert f"The rules {rules} save about 1,800 bytes." in text

    def least(text):
        return int(re.search(r"takes ([\d,]+)", text)[1].replace(",", ""))

    shorter = refusal(net, rules=rules)
    assert "8bit" not in shorter
    assert least(shorter) == pytest.approx(least(text) - 1800, abs=70)
    stored = refusal(net, rules={"one/kernel": "store"})
    assert "'*/kernel': 'store=8bit'" in stored and "hash=N" in stored
    assert "own_scale" not in text
    assert "Without the rule 'own_scale'" in refusal(net, rules={"*": "own_scale"})
    plain = refusal(small_net(300, normalized=False))
    assert "float16" not in plain and "hash" not in plain


@pytest.mark.parametrize(
    "target, expected",
    [
        (3300, 3300),
        (np.int64(12), 12),
        (99.9, 99),
        ("3300", 3300),
        ("3300 B", 3300),
        ("3300b", 3300),
        ("3.3 kB", 3300),
        (" 3.3KB ", 3300),
        (".5 MB", 500_000),
        ("1e3", 1000),
        ("1.5e+1 kB", 15_000),
        ("500x", 8),
        ("500 X", 8),
        ("0.5x", 8000),
        ("0.06 bits", 7),
        ("1 bit", 125),
        ("32 BITS", 4000),
    ],
)
def test_targets_are_read(target, expected):
    assert target_bytes(target, 1000) == expected


@pytest.mark.parametrize(
    "target",
    ["", "x", "kB", "0", "0x", 0, -5, "-5 B", "5 GB", "5 kbits", "1,000", "5 5"]
    + ["1e", "1..2", "nan", "inf", "1e999", "1e999 bits", None, True, "0.0 bits", "٣"],
)
def test_targets_that_cannot_be_read(target):
    with pytest.raises(ValueError, match="`target` must be"):
        target_bytes(target, 1000)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="0123456789.eE+- xbBkKmMits", max_size=10))
def test_any_target_is_read_or_refused(text):
    try:
        found = target_bytes(text, 1000)
    except ValueError as error:
        assert "`target` must be" in str(error)
        return
    text = text.strip().lower()
    number = text.rstrip("bkmxits ")
    unit = text.removeprefix(number).strip()
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "bit": 125, "bits": 125}
    exact = 4000 / float(number) if unit == "x" else float(number) * units[unit]
    assert exact - 1 - 1e-9 * exact <= found <= exact * (1 + 1e-9)


# The order of the data.


def test_every_epoch_is_another_permutation():
    x = np.arange(20, dtype=np.float32)[:, np.newaxis]
    recipe = Recipe(batch_size=4, seed=2**64 - 1)
    batches = training_batches((x, 10 * x[:, 0]), recipe)

    def epochs(phase):
        taken = list(batches(phase, 0).take(10).as_numpy_iterator())
        for inputs, labels in taken:
            assert inputs.shape == (4, 1)
            np.testing.assert_array_equal(10 * inputs[:, 0], labels)
        order = np.concatenate([inputs[:, 0] for inputs, _ in taken])
        return order.astype(int).reshape(2, 20)

    orders = [*epochs("warmup"), *epochs("variational"), *epochs("coding")]
    for order in orders:
        assert sorted(order) == list(range(20))
    assert len({tuple(order) for order in orders}) == 6
    np.testing.assert_array_equal(epochs("coding"), orders[4:])
    other = training_batches((x, x), dataclasses.replace(recipe, seed=1))
    first = np.concatenate([b[0][:, 0] for b in other("coding", 0).take(5)])
    assert first.tolist() != orders[4].tolist()


@pytest.mark.parametrize("count, batch_size", [(20, 4), (7, 3), (3, 8)])
def test_batches_go_on_from_any_step(count, batch_size):
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    recipe = Recipe(batch_size=batch_size)
    for batches in (
        training_batches((x, x), recipe),
        training_batches(
            tf.data.Dataset.from_tensors((x, x)).unbatch().batch(2), recipe
        ),
    ):
        whole = list(batches("coding", 0).take(12).as_numpy_iterator())
        for step in (1, 5, 6, 11):
            rest = list(batches("coding", step).take(12 - step).as_numpy_iterator())
            np.testing.assert_equal(rest, whole[step:])


def test_no_thread_tunes_the_batches():
    """Fitting would have to wait for it in the end."""
    x = np.zeros((4, 2, 2, 1), np.float32)
    recipe = Recipe(batch_size=2, max_shift=1)
    batches = training_batches((x, x), recipe)
    for these in (batches, augmented(batches, recipe)):
        assert these("coding", 0).options().autotune.enabled is False


@pytest.mark.parametrize("flip", [False, True])
def test_shifts_and_flips_go_on_from_any_step_and_differ_between_phases(flip):
    x = np.arange(5 * 4 * 4, dtype=np.float32).reshape(5, 4, 4, 1)
    recipe = Recipe(batch_size=2, max_shift=2, flip=flip, seed=2**64 - 1)
    batches = augmented(training_batches((x, x[:, 0, 0, 0]), recipe), recipe)
    whole = list(batches("coding", 0).take(9).as_numpy_iterator())
    for step in (1, 4, 8):
        rest = list(batches("coding", step).take(9 - step).as_numpy_iterator())
        np.testing.assert_equal(rest, whole[step:])
    seen = np.concatenate([images for images, _ in whole])
    assert len(np.unique(seen, axis=0)) > 10
    for images, labels in whole:
        # Pixels only move: each is of the image that the label names.
        image = (images // 16).reshape(2, -1)
        np.testing.assert_array_equal(image, np.tile(labels[:, None] // 16, 16))

    same = (x[:1], x[:1, 0, 0, 0])
    batches = augmented(training_batches(same, recipe), recipe)
    phases = [list(batches(phase, 0).take(6)) for phase in PHASES]
    assert len({np.stack([b for b, _ in taken]).tobytes() for taken in phases}) == 3


def test_few_examples_fill_a_batch_over_and_over():
    x = np.arange(3, dtype=np.float32)[:, np.newaxis]
    batches = training_batches((x, x), Recipe(batch_size=8))
    inputs, _ = next(iter(batches("warmup", 0)))
    assert np.bincount(inputs.numpy().astype(int)[:, 0]).tolist() in (
        [3, 3, 2],
        [3, 2, 3],
        [2, 3, 3],
    )


# Settings.


def test_changes_are_what_differs_from_the_defaults():
    assert Recipe().changes() == {}
    changes = {"block_size": 7, "warm_start": False, "kl_bits": 3.5}
    assert Recipe(**changes).changes() == changes
    assert Recipe(**PAPER.changes()) == PAPER
    assert Recipe(parameterization="mean_kl") == Recipe()
    assert json.loads(json.dumps(PAPER.settings()))["quota_rate"] == 1.0


def test_numbers_of_numpy_will_do():
    recipe = Recipe(
        MeanKL(quota_rate=np.float32(0.5), annealing_steps=np.int64(9)),
        block_size=np.int32(7),
        block_bits=np.int64(8),
        l2=np.float32(0.25),
        warm_start=np.bool_(False),
        seed=np.uint64(3),
    )
    assert json.loads(json.dumps(recipe.settings())) == recipe.settings()
    coder = tfmiracle.MinimalRandomCoder(np.int64(4), selection="sample")
    settings_of_coder = Recipe(coder=coder).settings()["coder"]
    assert json.loads(json.dumps(settings_of_coder)) == settings_of_coder
    assert recipe == Recipe(
        MeanKL(quota_rate=0.5, annealing_steps=9),
        block_size=7,
        block_bits=8,
        l2=0.25,
        warm_start=False,
        seed=3,
    )


def test_specifications_by_name_class_or_object():
    for name in ("mean_var", MeanVar, MeanVar()):
        assert Recipe(parameterization=name) == Recipe(parameterization=MeanVar())
    config = PARAMETERIZATIONS.serialize(MeanVar(beta=1e-4))
    assert Recipe(parameterization=config).parameterization == MeanVar(beta=1e-4)
    for config in ({"gamma": 1}, {2: 3}, None):
        with pytest.raises(ValueError, match=r"options of .*'mean_var' are log_"):
            Recipe(parameterization={"name": "mean_var", "config": config})
    for name in ("deterministic", "mean_kurtosis", Deterministic()):
        with pytest.raises(
            ValueError, match=r"codable=True .*: mean_kl, mean_var, sites\. "
        ):
            Recipe(parameterization=name)


def test_an_option_that_is_missing_is_named():
    with own_classes(CODERS):

        @CODERS.register
        @dataclasses.dataclass(frozen=True)
        class Needy(MinimalRandomCoder):
            identifier = "needy"
            size: int = dataclasses.field(kw_only=True)

        with pytest.raises(ValueError, match=r"missing a required .*'size'"):
            CODERS.get("needy")


@pytest.mark.parametrize(
    "config", [{}, {"name": "mrc"}, {"name": "mrc", "bits": 3}, {1: 2}]
)
def test_what_a_dict_must_have(config):
    with pytest.raises(ValueError, match="`coder` as a dict must have the keys 'name'"):
        Recipe(coder=config)


@pytest.mark.parametrize(
    "option",
    [{"block_bits": 9}, {"codebook": "per_block"}, {"selection": "sample"}],
    ids=str,
)
def test_a_coder_object_says_its_options_alone(option):
    coder = tfmiracle.MinimalRandomCoder(block_bits=8)
    (name,) = option
    message = f"`{name}` is what the object given as `coder` says itself"
    for said in (coder, CODERS.serialize(coder), tfmiracle.MinimalRandomCoder):
        for make in (
            Recipe,
            functools.partial(tfmiracle.VariationalModel, small_net()),
            functools.partial(tfmiracle.MeanKLDense, 3),
        ):
            with pytest.raises(ValueError, match=message):
                make(coder=said, **option)
    # What the object says, too, or does not have, contradicts nothing.
    same = tfmiracle.MinimalRandomCoder(**option)
    assert Recipe(coder=same, **option, state_bits=9).coder == same


def test_the_budget_falls_in_the_first_half():
    posterior = Recipe(parameterization=MeanKL(initial_budget=4.0), train_steps=701)
    assert posterior.posterior == MeanKL(initial_budget=4.0, annealing_steps=350)
    posterior = Recipe(parameterization=MeanKL(annealing_steps=7), train_steps=701)
    assert posterior.posterior == MeanKL(annealing_steps=7)


def test_default_learning_rates_suit_the_parameterization():
    assert Recipe().learning_rates == (1e-2, 5e-3)
    assert Recipe(parameterization="mean_var").learning_rates == (2e-3, 1e-3)
    assert Recipe(finetune_learning_rate=0.5).learning_rates == (1e-2, 0.5)
    assert PAPER.learning_rates == (1e-3, 1e-3)


def test_the_paper():
    """Lin, Flamich and Hernández-Lobato (2023), section 4 and appendix C."""
    expected = Recipe(
        block_size=20,
        block_bits=20,
        kl_bits=None,  # the divergence is the length of the code
        codebook="per_block",
        selection="sample",
        batch_size=200,
        warmup_steps=0,
        train_steps=100_000,
        learning_rate=1e-3,
        parameterization=MeanKL(quota_rate=1.0),
        log_scale_rate=1.0,
        decay="constant",
        warm_start=False,
        log_scale=-2.0,
        blocks_per_round=1,
        finetune_steps=100,
        finetune_learning_rate=1e-3,
        seed=0,
    )
    assert expected == PAPER
    assert MeanVar(-10.0, 1.0, 1e-8, 5e-5) == PAPER_MEAN_VAR


def flags_of(path):
    values = flags.FlagValues()
    cli.COMMANDS["compress"].define(values)
    rest = values(["tfmiracle", f"--flagfile={path}"])
    assert rest == ["tfmiracle"]
    return values, cli.recipe_of(values)


COMPRESS = [
    p
    for p in sorted(CONFIGS.glob("*.flags"))
    if "table" not in p.stem and p.stem != "one_shot"
]


@pytest.mark.parametrize("path", COMPRESS, ids=lambda p: p.stem)
def test_configurations_are_valid(path):
    values, recipe = flags_of(path)
    assert values.output is None
    assert values.model in ARCHITECTURES
    cli.rules_of(values)
    assert recipe.train_steps > 0
    if values.target is not None:
        target_bytes(values.target, 10_000)


def test_the_configuration_without_training():
    _, recipe = flags_of(CONFIGS / "one_shot.flags")
    assert recipe == ONE_SHOT


@pytest.mark.parametrize("block_size", [20, 30, 40])
def test_configurations_of_the_paper(block_size):
    values, recipe = flags_of(CONFIGS / f"lenet5_mnist_b{block_size}.flags")
    assert recipe == dataclasses.replace(PAPER, block_size=block_size)
    assert values.model == "lenet5"
    assert cli.rules_of(values) == {
        "conv2/kernel": "hash=2",
        "dense1/kernel": "hash=64",
    }
    assert values.target is None and values.validation_fraction == 0
