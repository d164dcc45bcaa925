"""The same bits in new processes, whatever threads, instructions and modes they use."""

import json

import pytest
from support import GOLDEN, run_python
from test_decoder import DIGESTS, digest

from tfmiracle import decoder

DECODE = """
import json, os
from numpy._core._multiarray_umath import __cpu_features__ as features
from support import GOLDEN
from test_decoder import DIGESTS, digest
from tfmiracle.decoder import decode
print(json.dumps({
    "hash": hash("a"),
    "disabled": [f for f in os.environ.get("NPY_DISABLE_CPU_FEATURES", "").split()
                 if not features[f]],
    "digests": {name: digest(decode(GOLDEN / f"{name}.miracle").weights.values())
                for name in DIGESTS},
}))
"""


def run(code, monkeypatch, settings, *arguments):
    """What code prints as JSON in a new process with some environment variables."""
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(GOLDEN.parent))
        for name, value in settings.items():
            patch.setenv(name, value)
        process = run_python(code, *arguments)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def vector_instructions():
    """Those that NumPy has code for, beyond its baseline, and this processor knows."""
    from numpy._core import _multiarray_umath as core

    return [f for f in core.__cpu_dispatch__ if core.__cpu_features__[f]]


def test_the_numpy_decoder(monkeypatch):
    instructions = vector_instructions()
    plain = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
    bare = {
        "PYTHONHASHSEED": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONOPTIMIZE": "2",
        "NPY_DISABLE_CPU_FEATURES": " ".join(instructions),
    }
    results = [run(DECODE, monkeypatch, settings) for settings in (plain, bare)]
    for result in results:
        assert result["digests"] == DIGESTS
    # The processes did differ.
    assert results[0]["hash"] != results[1]["hash"]
    assert results[1]["disabled"] == instructions


VALUES = """
import dataclasses, hashlib, json, os, pathlib, sys

import keras
import numpy as np
import tensorflow as tf
from support import GOLDEN
from test_decoder import DIGESTS, digest

import tfmiracle
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import (
    MiracleFile,
)
from tfmiracle.hosts.loading import to_network
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS

PARTS = ("mean_kl", "mean_var")
for kind in ("intra", "inter"):
    set_threads = getattr(tf.config.threading, f"set_{kind}_op_parallelism_threads")
    set_threads(int(os.environ["OMP_NUM_THREADS"]))


def of_golden_file(name, parameterization):
    '''The posteriors of a golden file, all of whose blocks are fixed.'''
    for group in MiracleFile.read(GOLDEN / f"{name}.miracle").groups:
        coder = MinimalRandomCoder(
            group.code.block_bits, codebook=group.code.codebook
        )
        specification = PARAMETERIZATIONS.get(parameterization)
        made = specification.posterior(group.layout, coder=coder)
        (final,) = (v for v in made.weights if v.name == "final_scale")
        final.assign(group.scales)
        made.fix(np.arange(group.layout.num_blocks), group.codes)
        yield made


def values_in_all_modes(posterior):
    yield "XLA", posterior.values()
    yield "XLA, sampled", posterior.values(sample=True)
    yield "XLA around it", tf.function(posterior.values, jit_compile=True)()
    tf.config.run_functions_eagerly(True)
    yield "eager", posterior.values()
    yield "eager, sampled", posterior.values(sample=True)
    tf.config.run_functions_eagerly(False)
    posterior._compiled_values = tf.function(posterior._values)
    yield "graph", posterior.values()


def coded_values(path):
    '''Of each group, the values that the decoder gives.'''
    file = MiracleFile.read(path)
    weights = list(decode(file).weights.values())
    result = [[None] * len(group.layout.variables) for group in file.groups]
    for place, value in zip(file.coded, weights, strict=True):
        if place is not None:
            result[place[0]][place[1]] = value
    return result


def compare(expected, made):
    '''The modes in which posteriors have other values than expected.'''
    for posterior, values in zip(made, expected, strict=True):
        for mode, here in values_in_all_modes(posterior):
            modes.add(mode)
            if digest(np.asarray(v) for v in here) != digest(values):
                wrong.append([mode, type(posterior).__name__])


def network():
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(6, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4),
        ]
    )


wrong, modes = [], set()
goldens = ("per_block", "shared") if sys.argv[2] == "goldens" else ()
for name, parameterization in zip(goldens, PARTS):
    path = GOLDEN / f"{name}.miracle"
    compare(coded_values(path), of_golden_file(name, parameterization))
    rebuilt = to_network(decode(path)).get_weights()
    if digest(rebuilt) != digest(decode(path).weights.values()):
        wrong.append(["network", name])

folder = pathlib.Path(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.normal(size=(90, 8, 8, 1)).astype(np.float32)
y = x[:, :4, 0, 0].argmax(1)
recipe = tfmiracle.Recipe(
    block_size=40, block_bits=8, batch_size=16, warmup_steps=10, train_steps=20,
    blocks_per_round=4, finetune_steps=10, seed=11,
)
files = {}
for part in sys.argv[3:]:
    tfmiracle.compress(
        network(), (x, y), path=folder / "net.miracle", verbose=0, overwrite=True,
        recipe=dataclasses.replace(recipe, parameterization=part),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        rules={"dense*/kernel": "hash=3"}, keep_posterior=True,
    )
    for kind in ("miracle", "posterior.npz"):
        data = (folder / f"net.{kind}").read_bytes()
        files[f"{part}.{kind}"] = hashlib.sha256(data).hexdigest()

print(json.dumps({
    "hash": hash("a"),
    "digests": {name: digest(decode(GOLDEN / f"{name}.miracle").weights.values())
                for name in DIGESTS},
    "wrong": wrong,
    "modes": sorted(modes),
    "files": files,
}))
"""


def environment(threads, onednn, hash_seed):
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_ENABLE_ONEDNN_OPTS": str(onednn),
        "XLA_FLAGS": "--xla_cpu_prefer_vector_width=512" if onednn else "",
        "PYTHONHASHSEED": str(hash_seed),
    }


@pytest.mark.slow
def test_tensorflow_in_all_modes_and_compress(monkeypatch, tmp_path):
    parts = ["mean_kl", "mean_var"]
    one = run(VALUES, monkeypatch, environment(1, 0, 0), tmp_path, "goldens")
    two = run(VALUES, monkeypatch, environment(2, 1, 1), tmp_path, "goldens", *parts)
    again = run(VALUES, monkeypatch, environment(2, 1, 2), tmp_path, "files", *parts)
    for result in (one, two):
        assert result["digests"] == DIGESTS
        assert result["wrong"] == []
        assert len(result["modes"]) == 6
    assert len({result["hash"] for result in (one, two, again)}) == 3
    # The same seed, machine, versions and number of threads: the same files.
    assert len(two["files"]) == 4
    assert two["files"] == again["files"]


def test_the_digest_tells_one_bit():
    weights = decoder.decode(GOLDEN / "shared.miracle").weights
    before = digest(weights.values())
    last = [v for v in weights.values() if v.dtype == "float32"][-1]
    last.view("u4").reshape(-1)[-1] ^= 1
    assert digest(weights.values()) != before
