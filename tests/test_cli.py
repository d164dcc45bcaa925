"""The command line."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from support import CONFIGS, GOLDEN, fix_all, run_python

import tfmiracle
from tfmiracle import CodedPosterior, cli
from tfmiracle.codec.pruning import STRATEGIES, pruned_networks
from tfmiracle.datasets import load_dataset
from tfmiracle.decoder import decode
from tfmiracle.hosts.loading import accuracy_of, to_network
from tfmiracle.hosts.network import to_file
from tfmiracle.miracle_file import (
    MiracleFile,
)

SIZES = {
    "file_bytes",
    "payload_bytes",
    "float32_bytes",
    "ratio",
    "payload_ratio",
    "weights",
    "effective_weights",
    "blocks",
    "block_size",
    "block_bits",
    "code",
    "codebook",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a data set, a compiled network, and a file made of one."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 6)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)
    arrays = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
    np.savez(folder / "data.npz", **arrays)
    np.savez(folder / "nan.npz", **{**arrays, "x_test": x[60:] * np.nan})
    np.savez(folder / "wide.npz", x_train=x[:, :5], y_train=y, x_test=x, y_test=y)
    np.savez(
        folder / "other.npz", x_train=x[:, :5], y_train=y, x_test=x[:, :5], y_test=y
    )
    np.savez(folder / "classes.npz", **{**arrays, "y_test": y[60:] + 5})
    np.savez(folder / "values.npz", **{**arrays, "y_train": y[:60] / 3})
    np.savez(folder / "text.npz", **{**arrays, "y_test": y[60:].astype(str)})

    keras.utils.set_random_seed(3)
    net = keras.Sequential(
        [
            layers.Input((6,), name="x"),
            layers.Dense(30, "relu", name="one"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, name="two"),
        ],
        name="net",
    )
    net.save(folder / "uncompiled.keras")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss)
    net.save(folder / "net.keras")
    a, b = layers.Input((6,)), layers.Input((6,))
    pair = keras.Model([a, b], layers.Dense(3)(layers.Add()([a, b])))
    pair.compile(loss=loss)
    pair.save(folder / "pair.keras")
    tags = keras.Sequential([layers.Input((6,)), layers.Embedding(9, 3)])
    tags.compile(loss=loss)
    tags.save(folder / "tags.keras")
    (folder / "broken.keras").write_bytes(b"PK but no archive")
    model = tfmiracle.VariationalModel(
        net, block_size=16, block_bits=8, rules={"one/kernel": "hash=2 own_scale"}
    )
    to_file(fix_all(model)).write(folder / "net.miracle")
    data = (folder / "net.miracle").read_bytes()
    (folder / "short.miracle").write_bytes(data[:-7])
    loc = rng.normal(size=model.block_posterior.layout.num_effective)
    loc = loc.astype(np.float32)
    CodedPosterior([loc], [np.exp(loc[::-1])]).write(folder / "net.posterior.npz")
    five = CodedPosterior([loc[:5]], [np.ones(5, np.float32)])
    five.write(folder / "five.posterior.npz")
    (folder / "not.miracle").write_bytes(b"something else")
    (folder / "import.flags").write_text("--import=json\n")
    (folder / "bad.flags").write_text("--block_size=7\n--no_such_flag=1\n")
    return folder


@pytest.fixture
def run(capsys):
    """Runs a command with --json and returns what it printed, parsed."""

    def run(*arguments):
        status = cli.main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert status == 0, err
        assert out.endswith("\n") and out.count("\n") == 1
        return json.loads(out)

    return run


def test_numbers_that_are_not_finite_are_null_in_json(run, monkeypatch):
    found = {"loss": math.nan, "history": [{"loss": -math.inf, "step": 3}], "x": (1.5,)}
    info = dataclasses.replace(cli.COMMANDS["info"], run=lambda *_: found)
    monkeypatch.setitem(cli.COMMANDS, "info", info)
    expected = {"loss": None, "history": [{"loss": None, "step": 3}], "x": [1.5]}
    assert run("info", "any.miracle") == expected


QUICK = [
    "--train_steps=2",
    "--block_size=100",
    "--block_bits=8",
    "--codebook=per_block",
    "--batch_size=10",
    "--finetune_steps=1",
    "--blocks_per_round=2",
]


def test_compress_and_evaluate_agree(made, tmp_path, few_steps, run):
    output = tmp_path / "out.miracle"
    result = run(
        "compress",
        f"--data={made / 'data.npz'}",
        f"--model={made / 'net.keras'}",
        f"--output={output}",
        "--rules=one/kernel:hash=2,*/bias:hash=3,norm/gamma:store",
        *QUICK,
    )
    assert set(result) == SIZES | {
        "error",
        "error_before",
        "errors",
        "losses",
        "evaluated_on",
        "seconds",
        "output",
        "history",
    }
    assert result["output"] == str(output) and result["evaluated_on"] == "test"
    stages = ["original", "posterior_mean", "posterior_sample", "decoded"]
    assert list(result["errors"]) == stages
    assert list(result["losses"]) == stages
    assert result["error"] == result["errors"]["decoded"]
    assert result["error_before"] == result["errors"]["original"]
    assert result["file_bytes"] == output.stat().st_size
    effective = 90 + 10 + 30 + 90 + 1  # one, beta of norm, two
    assert result["effective_weights"] == effective
    assert result["blocks"] == 3 == result["payload_bytes"]
    assert (result["block_size"], result["block_bits"]) == (100, 8)
    assert result["codebook"] == "per_block"
    assert result["weights"] == 180 + 30 + 120 + 90 + 3
    assert result["float32_bytes"] == 4 * result["weights"]
    assert result["ratio"] == round(4 * result["weights"] / result["file_bytes"], 1)
    assert result["history"][-1]["blocks"] == 3
    rules = {"norm/gamma": "store"}
    assert MiracleFile.read(output).metadata == {"rules": rules}

    evaluated = run("evaluate", output, f"--data={made / 'data.npz'}")
    assert set(evaluated) == SIZES | {"error", "examples"}
    assert evaluated["error"] == result["error"] and evaluated["examples"] == 20
    for key in SIZES:
        assert evaluated[key] == result[key]
    data = load_dataset(made / "data.npz")
    logits = tfmiracle.load(output).predict(data.x_test, verbose=0)
    wrong = np.mean(np.argmax(logits, 1) != data.y_test)
    assert evaluated["error"] == pytest.approx(wrong)


def test_a_built_in_network_is_trained_from_scratch(tmp_path, few_steps, capsys):
    rng = np.random.default_rng(0)
    x, y = rng.random((30, 4, 4)).astype(np.float32), np.arange(30) % 2
    np.savez(tmp_path / "tiny.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    status = cli.main(
        [
            "compress",
            f"--data={tmp_path / 'tiny.npz'}",
            "--model=digits_cnn",
            f"--output={tmp_path / 'out.miracle'}",
            "--validation_fraction=0.2",
            "--overwrite",
            *QUICK,
            "--block_size=30000",
            "--dtype_policy=mixed_bfloat16",
        ]
    )
    out, err = capsys.readouterr()
    assert status == 0
    net = tfmiracle.load(tmp_path / "out.miracle")
    assert {layer.compute_dtype for layer in net.layers[1:]} == {"bfloat16"}
    assert {w.dtype for w in net.weights} == {"float32"}
    assert keras.config.dtype_policy().name == "float32"
    lines = out.splitlines()
    assert len(lines) == 4
    assert re.match(r"error before [\d.]+%, after [\d.]+% \(validation set\)", lines[0])
    assert f"{tmp_path / 'out.miracle'}: " in lines[1]
    assert "indices" in lines[1] and "blocks of 30000 weights, 8 bits" in lines[2]
    assert "Variational training" in err


def compressed(tmp_path, net, x, y, **sets):
    """Compresses a network, evaluates and prunes the file; what the commands print."""
    net.save(tmp_path / "net.keras")
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, **sets}
    np.savez(tmp_path / "data.npz", **arrays)
    output, data = tmp_path / "out.miracle", f"--data={tmp_path / 'data.npz'}"
    model, output = f"--model={tmp_path / 'net.keras'}", str(tmp_path / "out.miracle")
    return [
        ["compress", data, model, f"--output={output}", *QUICK],
        ["evaluate", output, data],
        ["prune", output, data, "--fractions=0,0.5"],
    ]


def test_a_trellis_of_any_bits(made, tmp_path, few_steps, run, capsys):
    output = tmp_path / "out.miracle"
    arguments = [f"--data={made / 'data.npz'}", f"--model={made / 'net.keras'}"]
    trellis = ["--coder=trellis", "--state_bits=10", "--block_bits=3.5"]
    result = run(
        "compress",
        *arguments,
        f"--output={output}",
        *QUICK,
        "--block_size=40",
        *trellis,
    )
    effective = 210 + 60 + 93  # one, norm, two
    assert result["effective_weights"] == effective
    num_bytes = round(3.5 * effective / 40 / 8)
    assert result["payload_bytes"] == num_bytes == 4
    bits = round(8 * num_bytes * 40 / effective, 2)
    assert (result["code"], result["block_bits"]) == ("trellis", bits)
    assert result["codebook"] is None
    (group,) = MiracleFile.read(output).groups
    assert group.code.parameters() == (10, num_bytes)
    found = run("info", output)
    assert {key: found[key] for key in SIZES} == {key: result[key] for key in SIZES}
    coded = sum(v["bits"] for v in found["variables"] if v["treatment"] == "coded")
    assert coded == pytest.approx(8 * num_bytes, abs=0.5)
    assert cli.main(["info", str(output)]) == 0
    assert f"10 blocks of 40 weights, {bits} bits each" in capsys.readouterr().out
    evaluated = run("evaluate", output, arguments[0])
    assert evaluated["error"] == result["error"]


def test_sequences_and_one_hot_labels(tmp_path, few_steps, run):
    rng, y = np.random.default_rng(0), np.arange(30) % 3
    net = keras.Sequential(
        [layers.Input((4, 2)), layers.Conv1D(3, 2), layers.Flatten(), layers.Dense(3)]
    )
    net.compile(loss=keras.losses.CategoricalCrossentropy(from_logits=True))
    commands = compressed(tmp_path, net, rng.normal(size=(30, 4, 2)), np.eye(3)[y])
    result, evaluated, pruned = (run(*command) for command in commands)
    assert result["error"] == evaluated["error"]
    assert pruned["accuracy"][0] == pytest.approx(1 - result["error"])


def test_token_ids_and_a_sigmoid_unit(tmp_path, few_steps, run, capsys):
    ids = np.arange(120, dtype=np.uint8).reshape(30, 4)
    net = keras.Sequential(
        [
            layers.Input((4,), dtype="int32"),
            layers.Embedding(120, 2),
            layers.Flatten(),
            layers.Dense(1, "sigmoid"),
        ]
    )
    net.compile(loss="binary_crossentropy")
    commands = compressed(tmp_path, net, ids, np.arange(30) % 2)
    result = run(*commands[0])
    scores = tfmiracle.load(result["output"]).predict(ids.astype(int), verbose=0)
    wrong = np.mean((scores[:, 0] > 0.5) != np.arange(30) % 2)
    assert result["error"] == pytest.approx(wrong, abs=1e-6)
    assert cli.main(commands[1]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"error {wrong:.2%} of 30\n")
    assert err.endswith("y_test: outputs above 0.5 count as class 1\n")


def test_values_to_predict(tmp_path, few_steps, run, capsys):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=30)
    net = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    net.compile(loss="mse")
    compress, evaluate, prune = compressed(tmp_path, net, x, y)
    assert cli.main(compress) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"loss before \S+, after \S+ \(test set\)", first)
    assert len(rest) == 3
    result = run(*compress, "--overwrite")
    assert result["error"] is result["error_before"] is None
    assert set(result["errors"].values()) == {None}
    evaluated = run(*evaluate)
    distances = {"mean_squared_error", "mean_absolute_error"}
    assert set(evaluated) == SIZES | {"error", "examples"} | distances
    assert evaluated["error"] is None
    loss = result["losses"]["decoded"]
    assert evaluated["mean_squared_error"] == pytest.approx(loss, rel=1e-5)
    pruned = run(*prune)
    assert pruned["accuracy"] is None
    assert pruned["mean_squared_error"][0] == evaluated["mean_squared_error"]
    assert cli.main(evaluate) == 0
    assert capsys.readouterr().out.startswith("mean squared error ")
    assert cli.main(prune) == 0
    assert "50.0% pruned: mean squared error " in capsys.readouterr().out


def test_a_pipe_gets_plain_lines(made, tmp_path, few_steps, capsys):
    arguments = [f"--data={made / 'data.npz'}", f"--model={made / 'net.keras'}"]
    output = f"--output={tmp_path / 'out.miracle'}"
    steps = ["--train_steps=40", "--warmup_steps=3", "--block_size=9"]
    other = ["--noarchitecture", "--record"]
    assert cli.main(["compress", *arguments, output, *QUICK, *steps, *other]) == 0
    assert MiracleFile.read(tmp_path / "out.miracle").architecture is None
    made_with = json.loads((tmp_path / "out.record.json").read_text())
    assert made_with["recipe"]["train_steps"] == 40
    err = capsys.readouterr().err
    assert all(line.isprintable() for line in err.splitlines())
    assert err.count("Deterministic training:") == 3
    assert err.count("Variational training:") == 10
    assert re.search(r"^Variational training: 40/40 steps, .*loss \S+", err, re.M)
    assert 1 < err.count("Coding:") <= 10
    assert re.search(r"^Coding: (\d+)/\1 blocks", err, re.M)


# Reading files: no training, and TensorFlow only where it is needed.


def test_info(made, run, capsys):
    path = made / "net.miracle"
    result = run("info", path)
    assert set(result) == SIZES | {"variables", "metadata"}
    assert result["file_bytes"] == path.stat().st_size
    assert [v["name"] for v in result["variables"]] == MiracleFile.read(path).names
    rows = {v["name"]: v for v in result["variables"]}
    bits = 8 / 16  # a weight
    assert rows["one/kernel"] == {
        "name": "one/kernel",
        "shape": [6, 30],
        "treatment": "coded, hashed x2, own scale",
        "reason": "a rule",
        "bits": 90 * bits,
        "share": round(90 * bits / 8 / path.stat().st_size, 4),
    }
    assert rows["one/bias"]["treatment"] == "coded, own scale"
    assert rows["one/bias"]["reason"] == "a rule in its layer"
    assert rows["two/bias"]["treatment"] == "coded"
    assert rows["two/bias"]["reason"] == "it trains"
    assert rows["norm/moving_mean"]["reason"] == "it does not train"
    assert sum(v["share"] for v in result["variables"]) < 1
    assert rows["two/bias"]["treatment"] == "coded"
    assert rows["norm/moving_mean"]["treatment"] == "stored in levels"
    assert rows["norm/moving_mean"]["bits"] == 8 * 30
    assert cli.main(["info", str(path)]) == 0
    table = capsys.readouterr().out
    assert re.search(
        r"^one/kernel +6x30 +coded, hashed x2, own scale +a rule +45 +\S+%$",
        table,
        re.M,
    )


def test_info_of_files_with_any_metadata(tmp_path, run, capsys):
    for i, metadata in enumerate(
        [
            {},
            {"kl_bits": 3},
            {"kl_bits": []},
            {"kl_bits": [[1], [1]]},
            {"selection": {}},
            {"rules": 3},
            {"rules": {"[!\x1b]*": "store"}},
        ]
    ):
        path = tmp_path / f"{i}.miracle"
        stored = [np.zeros(0, np.float32)]
        MiracleFile(["a"], [None], [], stored, {}, metadata).write(path)
        result = run("info", path)
        assert result["metadata"] == metadata
        assert result["weights"] == result["payload_bytes"] == 0
        assert cli.main(["info", str(path)]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and out.rstrip()[-2:] != "{}"


def test_info_of_several_groups(run):
    result = run("info", GOLDEN / "shared.miracle")
    assert result["block_size"] == [9, 10] and result["block_bits"] == [11, 8]
    assert result["codebook"] == "shared"


def test_decode(made, tmp_path, run):
    output = tmp_path / "weights.npz"
    result = run("decode", made / "net.miracle", f"--output={output}")
    weights = decode(made / "net.miracle").weights
    assert result == {
        "output": str(output),
        "variables": len(weights),
        "weights": 180 + 30 + 120 + 90 + 3,
    }
    with np.load(output) as archive:
        assert archive.files == list(weights)
        for name, value in weights.items():
            np.testing.assert_array_equal(archive[name], value, strict=True)
    run("decode", made / "net.miracle", f"--output={output}", "--overwrite")


def test_decode_with_names_that_mean_something_to_numpy(tmp_path, run):
    names = ["file", "args", "allow_pickle", "../up", "ä"]
    values = [np.arange(i) for i in range(5)]
    MiracleFile(names, [None] * 5, [], values, {}).write(tmp_path / "odd.miracle")
    run("decode", tmp_path / "odd.miracle", f"--output={tmp_path / 'odd.npz'}")
    with np.load(tmp_path / "odd.npz") as archive:
        for name, value in zip(names, values):
            np.testing.assert_array_equal(archive[name], value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prune(made, run, strategy):
    path, data = made / "net.miracle", made / "data.npz"
    posterior = made / "net.posterior.npz"
    result = run(
        "prune",
        path,
        f"--data={data}",
        f"--strategy={strategy}",
        f"--posterior={posterior}",
        "--fractions=0,0.4,1",
        "--seeds=3",
    )
    file, loaded = MiracleFile.read(path), load_dataset(str(data))
    net = to_network(decode(file))
    seeds = range(3 if strategy == "uniform" else 1)
    accuracies = np.array(
        [
            [
                accuracy_of(net, pruned, loaded.x_test, loaded.y_test)
                for pruned in pruned_networks(
                    file, strategy, [0, 0.4, 1], CodedPosterior.read(posterior), seed
                )
            ]
            for seed in seeds
        ]
    )
    assert result["accuracy"] == pytest.approx(accuracies.mean(0), abs=1e-6)
    assert result["accuracy"][0] == pytest.approx(
        1 - run("evaluate", path, f"--data={data}")["error"], abs=1e-6
    )
    if strategy == "uniform":
        error = accuracies.std(0, ddof=1) / np.sqrt(3)
        assert result["standard_error"] == pytest.approx(error, abs=1e-6)
    else:
        assert result["standard_error"] == [None] * 3
    assert result["seeds"] == len(seeds) and result["examples"] == 20


def test_prune_tells_one_line_a_fraction(made, capsys):
    arguments = ["prune", made / "net.miracle", f"--data={made}/data.npz"]
    options = ["--strategy=uniform", "--fractions=0,0.5", "--seeds=2"]
    assert cli.main([*map(str, arguments), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"  50\.0% pruned: accuracy [\d.]+% ± [\d.]+%", lines[1])


def test_export_as_keras(made, tmp_path, run):
    output = tmp_path / "net.keras"
    arguments = ("export", made / "net.miracle", f"--output={output}", "--format=keras")
    result = run(*arguments)
    assert result == {
        "output": str(output),
        "format": "keras",
        "bytes": output.stat().st_size,
    }
    loaded = keras.saving.load_model(output)
    for variable, value in zip(
        loaded.weights, decode(made / "net.miracle").weights.values(), strict=True
    ):
        np.testing.assert_array_equal(variable.numpy(), value)
    run(*arguments, "--overwrite")
    assert os.listdir(tmp_path) == ["net.keras"]


def test_export_as_saved_model_replaces_nothing_else(made, tmp_path, run, capsys):
    output = tmp_path / "net"
    arguments = ["export", str(made / "net.miracle"), f"--output={output}"]
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    assert cli.main([*arguments, "--overwrite"]) == 2
    assert "no SavedModel" in capsys.readouterr().err
    assert os.listdir(output) == ["thesis.tex"]
    (output / "thesis.tex").unlink()
    output.rmdir()

    output.write_text("a file")
    assert cli.main(arguments) == 2
    capsys.readouterr()
    result = run(*arguments, "--overwrite")
    size = sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    assert result["bytes"] == size and result["format"] == "saved_model"
    assert cli.main(arguments) == 2
    assert "exists" in capsys.readouterr().err
    (output / "old").write_text("")
    run(*arguments, "--overwrite")
    assert not (output / "old").exists() and (output / "saved_model.pb").is_file()
    assert os.listdir(tmp_path) == ["net"]


def test_help_and_version(capsys):
    for arguments in ([], ["help"], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        for command in cli.COMMANDS:
            assert f"tfmiracle {command}" in out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{tfmiracle.__version__}\n"
    assert cli.main(["compress", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("--block_bits", "--target", "--rules", "--[no]warm_start"):
        assert flag in out
    # Every setting is explained.
    assert "weights in a block" in out and "constant" in out


# Bad input.

BAD = {
    "unknown command": "compres --data=digits",
    "command after a flag": "--json info {made}/net.miracle",
    "unknown flag": "info {made}/net.miracle --verbose=1",
    "flag of another command": "info {made}/net.miracle --data=digits",
    "no file given": "info",
    "two files given": "info {made}/net.miracle {made}/net.miracle",
    "file given to compress": "compress {made}/net.miracle",
    "missing file": "info {made}/none.miracle",
    "folder as a file": "info {made}",
    "truncated file": "info {made}/short.miracle",
    "truncated file, decode": "decode {made}/short.miracle --output={out}",
    "truncated file, evaluate": "evaluate {made}/short.miracle --data=digits",
    "truncated file, export": "export {made}/short.miracle --output={out}",
    "foreign file": "info {made}/not.miracle",
    "no output given": "decode {made}/net.miracle",
    "no output for export": "export {made}/net.miracle",
    "no output for compress": "compress --data=digits",
    "output below a file": "{compress} --output={made}/net.keras/out.miracle",
    "output below a file, decode": "decode {made}/net.miracle "
    "--output={made}/net.keras/weights.npz",
    "long name of the output": "{compress} --output={out}" + 300 * "x",
    "workdir that is a file": "{compress} --workdir={made}/net.keras",
    "workdir below a file": "{compress} --workdir={made}/net.keras/run",
    "study in a file": "study --data=digits --workdir={made}/net.keras",
    "report of a file": "report --workdir={made}/net.keras",
    "report into a file": "report --workdir={made} --output={made}/net.keras",
    "no data": "compress --output={out}",
    "no data for evaluate": "evaluate {made}/net.miracle",
    "empty output": "decode {made}/net.miracle --output=",
    "existing output": "decode {made}/net.miracle --output={made}/net.miracle",
    "existing output, export": "export {made}/net.miracle --format=keras "
    "--output={made}/net.keras",
    "existing output, compress": "{compress} --output={made}/net.miracle",
    "folder as output": "decode {made}/net.miracle --output={made} --overwrite",
    "folder missing": "decode {made}/net.miracle --output={out}/weights.npz",
    "wrong suffix, keras": "export {made}/net.miracle --output={out} --format=keras",
    "wrong suffix, litert": "export {made}/net.miracle --output={out} --format=litert",
    "unknown format": "export {made}/net.miracle --output={out} --format=onnx",
    "more weights than allowed": "info {made}/net.miracle --max_weights=20",
    "no weights allowed": "decode {made}/net.miracle --output={out} --max_weights=0",
    "more weights than allowed, export": "export {made}/net.miracle --output={out} "
    "--max_weights=20",
    "unknown data": "evaluate {made}/net.miracle --data=minst",
    "data of the wrong kind": "evaluate {made}/net.miracle --data={made}/net.keras",
    "NaN in data": "{compress} --data={made}/nan.npz",
    "NaN in data, evaluate": "evaluate {made}/net.miracle --data={made}/nan.npz",
    "shapes differ": "{compress} --data={made}/wide.npz",
    "shapes of another network": "{compress} --data={made}/other.npz",
    "no data for prune": "prune {made}/net.miracle",
    "truncated file, prune": "prune {made}/short.miracle --data={made}/data.npz",
    "unknown strategy": "{prune} --strategy=random",
    "pruning by KL without Q": "{prune} --strategy=kl",
    "missing posterior": "{prune} --posterior={made}/none.npz",
    "posterior of another file": "{prune} --strategy=kl "
    "--posterior={made}/five.posterior.npz",
    "posterior of the wrong kind": "{prune} --posterior={made}/net.keras",
    "no fraction": "{prune} --fractions=half",
    "fraction over 1": "{prune} --fractions=0.5,1.5",
    "no random order": "{prune} --strategy=uniform --seeds=0",
    "shapes of another network, prune": "prune {made}/net.miracle --data=digits",
    "shapes of another network, evaluate": "evaluate {made}/net.miracle --data=digits",
    "too many classes": "{compress} --data={made}/classes.npz",
    "unknown model": "{compress} --model=lenet6",
    "unknown dtype policy": "{compress} --model=digits_cnn --dtype_policy=bf16",
    "dtype policy of another": "{compress} --dtype_policy=mixed_bfloat16",
    "features for a built-in": "{compress} --model=lenet5",
    "features for a built-in, study": "study --data={made}/data.npz --workdir={out}",
    "values for a built-in": "{compress} --model=lenet5 --data={made}/values.npz",
    "values for classes": "{compress} --data={made}/values.npz",
    "text as labels": "{compress} --data={made}/text.npz",
    "text as labels, prune": "prune {made}/net.miracle --data={made}/text.npz",
    "labels of positions": "{compress} --model={made}/tags.keras",
    "uncompiled model": "{compress} --model={made}/uncompiled.keras",
    "two inputs": "{compress} --model={made}/pair.keras",
    "broken model": "{compress} --model={made}/broken.keras",
    "features to mirror": "{compress} --flip",
    "images too small": "{compress} --data=digits --model=lenet5",
    "rule without a treatment": "{compress} --rules=one/kernel",
    "rule with a bad treatment": "{compress} --rules=one/kernel:two",
    "hashing by 0": "{compress} --rules=one/kernel:hash=0",
    "hashing of nothing": "{compress} --rules=three/kernel:hash=2",
    "storing of nothing": "{compress} --rules=three/kernel:store",
    "unmeetable target": "{compress} --target=9B",
    "senseless target": "{compress} --target=small",
    "infinite target": "{compress} --target=1e999",
    "29 bits": "{compress} --block_bits=29",
    "block size 0": "{compress} --block_size=0",
    "no integer": "{compress} --block_size=many",
    "no number": "{compress} --learning_rate=fast",
    "learning rate NaN": "{compress} --learning_rate=nan",
    "negative seed": "{compress} --seed=-1",
    "unknown selection": "{compress} --selection=best",
    "unknown codebook": "{compress} --codebook=sobol",
    "unknown coder": "{compress} --coder=huffman",
    "unknown parameterization": "{compress} --parameterization=mean_kurtosis",
    "nothing to code": "{compress} --parameterization=deterministic",
    "an option of mean_var": "{compress} --parameterization=mean_var --beta=-1",
    "nothing trained": "{compress} --model=digits_cnn --train_steps=0 "
    "--finetune_steps=0",
    "nothing held out": "{compress} --validation_fraction=1e-9",
    "all held out": "{compress} --validation_fraction=1",
    "missing flag file": "{compress} --flagfile={made}/none.flags",
    "an import in a file": "info {made}/net.miracle --flagfile={made}/import.flags",
    "an import without =": "info {made}/net.miracle --import json",
    "a module that is not there": "info {made}/net.miracle --import=no.such_module",
    "unknown flag in a file": "{compress} --flagfile={made}/bad.flags",
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_status_2(made, tmp_path, capfd, line):
    compress = (
        f"compress --data={made}/data.npz --model={made}/net.keras "
        f"--output={tmp_path}/out.miracle --train_steps=1"
    )
    prune = f"prune {made}/net.miracle --data={made}/data.npz"
    line = line.replace("{compress}", compress).replace("{prune}", prune)
    arguments = line.format(made=made, out=tmp_path / "out").split()
    before = {path: path.read_bytes() for path in made.iterdir()}
    assert cli.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"tfmiracle: .{10,}\n", err), err
    assert not re.search("unexpected|Traceback|Errno", err), err
    assert list(tmp_path.iterdir()) == []
    assert {path: path.read_bytes() for path in made.iterdir()} == before


def test_an_option_of_another_parameterization_is_warned_of(made, tmp_path, capfd):
    compress = f"compress --data={made}/none.npz --output={tmp_path}/out.miracle"
    idle = "--beta is an option of mean_var and does nothing"
    assert cli.main([*compress.split(), "--beta=1", "--quota_rate=1"]) == 2
    err = capfd.readouterr().err
    assert idle in err and "--quota_rate" not in err and err.count("\n") == 2
    assert cli.main([*compress.split(), "--beta=1", "--parameterization=mean_var"]) == 2
    assert idle not in capfd.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_pipe_that_nobody_reads(made, options):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tfmiracle", "info", made / "net.miracle"]
    ended = subprocess.run([*command, *options], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_defects_are_told_from_bad_input(made, monkeypatch, capsys):
    def defect(values, path):
        raise KeyError("oops")

    command = cli.COMMANDS["info"]
    monkeypatch.setitem(
        cli.COMMANDS, "info", cli.dataclasses.replace(command, run=defect)
    )
    assert cli.main(["info", str(made / "net.miracle")]) == 1
    assert "unexpected KeyError" in capsys.readouterr().err
    monkeypatch.setenv("TFMIRACLE_TRACEBACK", "1")
    with pytest.raises(KeyError):
        cli.main(["info", str(made / "net.miracle")])


ENDS = {
    "info net.miracle": "",
    "compress": "; nothing is kept. With --workdir=FOLDER the same command would go on "
    "where it was",
    "compress --workdir=RUN": "; the same command goes on with what RUN keeps",
    "study --workdir=RUN": "; the same command goes on with what RUN keeps",
    "report --workdir=RUN": "",
}


@pytest.fixture
def interruptible():
    """Python's own handler, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("line, how_to_go_on", ENDS.items())
@pytest.mark.parametrize(
    "number, status, text",
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
    ],
)
def test_ends_by_a_signal(
    line, how_to_go_on, number, status, text, tmp_path, monkeypatch, capsys
):
    folders = []

    def work(*arguments):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            folders.append(folder)
            try:
                signal.raise_signal(number)
            except Exception:
                pytest.fail("what handles errors should not see it")

    before = signal.getsignal(number)
    name, *rest = line.split()
    command = dataclasses.replace(cli.COMMANDS[name], run=work)
    monkeypatch.setitem(cli.COMMANDS, name, command)
    assert cli.main([name, *rest]) == status
    assert capsys.readouterr().err == f"tfmiracle: {text}{how_to_go_on}\n"
    assert folders and list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    "error, status, text",
    [
        (ValueError("\x1b[1mfirst\x1b[0m\n\n  second\x07"), 2, "first second"),
        (ValueError("a\x1b]0;title\x07b\u202e\ud800c"), 2, "abc"),
        (FileNotFoundError(2, "No such file", "a b"), 2, "No such file: 'a b'"),
        (RuntimeError("x\n\x1b[2Jy"), 1, "unexpected RuntimeError: x y"),
    ],
)
def test_errors_are_one_line_without_colours(
    error, status, text, made, monkeypatch, capsys
):
    def fail(values, path):
        warnings.warn("\x1b[1mcareful\x1b[0m\n now", stacklevel=1)
        raise error

    command = dataclasses.replace(cli.COMMANDS["info"], run=fail)
    monkeypatch.setitem(cli.COMMANDS, "info", command)
    assert cli.main(["info", str(made / "net.miracle")]) == status
    warning, said = capsys.readouterr().err.splitlines()
    assert warning == "tfmiracle: warning: careful now"
    hint = " (set TFMIRACLE_TRACEBACK=1 to see where)"
    assert said == f"tfmiracle: {text}{hint if status == 1 else ''}"


# In processes of their own.

MAIN = "from tfmiracle.cli import main; sys.exit(main(sys.argv[1:]))"


def test_reading_needs_no_tensorflow(made, tmp_path):
    others = {"without": ["tensorflow", "keras", "sklearn"]}
    process = run_python(MAIN, "info", made / "net.miracle", "--json", **others)
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout)["blocks"] > 0
    output = tmp_path / "weights.npz"
    arguments = ("decode", made / "net.miracle", f"--output={output}")
    process = run_python(MAIN, *arguments, **others)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == f"wrote {output}\n" and output.is_file()


ALL = """
import dataclasses
import json
import math
from tfmiracle.cli import main

for arguments in json.loads(sys.argv[1]):
    print(main(arguments))
    sys.stderr.write("done")
"""


@pytest.mark.slow
def test_a_process_says_only_what_it_should(made, tmp_path):
    output, exported = tmp_path / "out.miracle", tmp_path / "net.tflite"
    compress = [
        "compress",
        f"--data={made / 'data.npz'}",
        f"--model={made / 'net.keras'}",
        f"--output={output}",
        "--json",
        *QUICK,
    ]
    export = ["export", str(output), f"--output={exported}", "--format=litert"]
    commands = [[*compress, "--target=5B"], compress, [*export, "--json"]]
    process = run_python(ALL, json.dumps(commands))
    assert process.returncode == 0, process.stderr
    first, result, second, sizes, third = process.stdout.splitlines()
    assert (first, second, third) == ("2", "0", "0")
    assert json.loads(result)["file_bytes"] == output.stat().st_size
    assert json.loads(sizes)["bytes"] == exported.stat().st_size
    refusal = process.stderr.partition("done")[0]
    assert re.fullmatch(r"tfmiracle: `target` cannot be met.*\n", refusal)


@pytest.mark.slow
def test_the_script_is_installed():
    script = os.path.join(os.path.dirname(sys.executable), "tfmiracle")
    if not os.path.exists(script):
        pytest.skip("tfmiracle is not installed in this environment")
    process = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert process.stdout == f"{tfmiracle.__version__}\n"


@pytest.mark.slow
def test_the_quick_start(run, tmp_path):
    """The first network of a newcomer, with the settings that are the defaults."""
    flagfile = CONFIGS / "digits.flags"
    output = tmp_path / "digits.miracle"
    result = run("compress", f"--flagfile={flagfile}", f"--output={output}")
    assert result["ratio"] > 265
    assert result["error_before"] < 0.025 and result["error"] < 0.025
