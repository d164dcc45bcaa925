"""Extreme settings and sizes: a right file, or a clear stop, and never a wrong file."""

import json
import math
import re

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers
from support import GOLDEN, fix_all, run_python
from test_callbacks import small_net

import tfmiracle
from tfmiracle import CompressionCallback, Recipe, VariationalModel
from tfmiracle.codec.codebook import normals
from tfmiracle.codec.philox import Domain
from tfmiracle.coding.minimal_random import MinimalRandomCoder
from tfmiracle.decoder import decode
from tfmiracle.hosts.loading import load
from tfmiracle.hosts.models import posteriors
from tfmiracle.hosts.network import to_file

PARTS = ("mean_kl", "mean_var", "sites")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# What a stop must say: a quantity, and of what.
CAUSES = (
    r"^(loc|log_scale) of block \d+ (is not finite|holds)|^A coding scale is not finite"
    r"|^The loss is (nan|inf|-inf) after|^Variable \S+ .*not finite"
)


pytestmark = pytest.mark.usefixtures("kept_policy")


def data(kind="normal"):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 5)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)
    return {
        "normal": (x, y),
        "zeros": (0 * x, y),  # no gradient in the first kernel
        "constant": (0 * x + 1, 0 * y),
        "huge": (1e30 * x, y),
        "tiny": (1e-30 * x, y),
    }[kind]


def code(model, path, x, y, batch_size=8):
    """Trains for a few steps, codes in three rounds with steps between them."""
    blocks = sum(p.layout.num_blocks for p, _ in posteriors(model))
    callback = CompressionCallback(
        path, -(-blocks // 3), 1, train_steps=2, overwrite=True, verbose=0
    )
    model.fit(x, y, batch_size=batch_size, epochs=4, verbose=0, callbacks=[callback])


def check_file(model, path, x):
    """A file decodes to finite weights, which give what the model computes."""
    decoded = decode(path).weights
    for name, value in decoded.items():
        assert np.isfinite(value).all(), name
    coded = [v.numpy() for p, _ in posteriors(model) for v in p.values()]
    found = [v for v in decoded.values() if any(np.array_equal(v, c) for c in coded)]
    assert len(found) >= len(coded)
    there = load(path).predict_on_batch(x)
    np.testing.assert_array_equal(there, model.predict_on_batch(x))
    return there


def outcome(path, parameterization, learning_rate=1e-2, **options):
    """Codes a network. Returns its outputs, or the message of a clear stop."""
    path.unlink(missing_ok=True)
    keras.config.set_dtype_policy(options.pop("policy", "float32"))
    x, y = data(options.pop("kind", "normal"))
    batch_size = options.pop("batch_size", 8)
    optimizer = options.pop("optimizer", keras.optimizers.Adam)(learning_rate)
    model = VariationalModel(
        small_net(),
        parameterization,
        **{"block_size": 8, "block_bits": 4, "state_bits": 8, **options},
    )
    model.compile(optimizer, LOSS)
    try:
        code(model, path, x, y, batch_size)
    except ValueError as error:
        assert not path.exists()
        return str(error)
    return check_file(model, path, x)


# Extremes that must work.

WORKING = {
    "a budget of 0.01 bits": {"kl_bits": 0.01},
    "a budget of 60 bits": {"kl_bits": 60.0},
    "blocks of one": {"block_size": 1},
    "60 bits a weight": {"block_size": 1, "kl_bits": 60.0},
    "0.01 bits a weight": {"block_size": 8, "kl_bits": 0.08},
    "one block": {"block_size": 4096},
    "rho = 1e-8": {"log_scale": math.log(1e-8)},
    "rho = 1e8": {"log_scale": math.log(1e8)},
    "no gradient": {"kind": "zeros"},
    "constant data": {"kind": "constant"},
    "a batch of one": {"batch_size": 1},
    "learning rate 1e-30": {"learning_rate": 1e-30},
    "float16": {"policy": "float16"},
    "mixed_float16": {"policy": "mixed_float16"},
    "bfloat16": {"policy": "bfloat16"},
    "mixed_bfloat16": {"policy": "mixed_bfloat16"},
    "float64": {"policy": "float64"},
    "a trellis of too few bits": {
        "coder": "trellis",
        "block_bits": 2.5,
        "kl_bits": 60.0,
    },
    "a trellis of 8 bits a weight": {"coder": "trellis", "block_bits": 64.0},
    "a trellis of blocks of one": {
        "coder": "trellis",
        "block_bits": 0.3,
        "block_size": 1,
    },
    "a trellis of no bytes": {"coder": "trellis", "block_bits": 0.0},
}


@pytest.mark.parametrize(
    "options, parameterization",
    # Each parameterization in turn; both in the slow test below.
    [(o, PARTS[i % len(PARTS)]) for i, o in enumerate(WORKING.values())],
    ids=WORKING.keys(),
)
def test_extremes_that_work(options, parameterization, tmp_path, quick):
    outputs = outcome(tmp_path / "file", parameterization, **options)
    assert isinstance(outputs, np.ndarray), outputs
    assert np.isfinite(outputs.astype(np.float32)).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("parameterization", PARTS)
def test_extremes_that_work_in_both_parameterizations(
    parameterization, tmp_path, quick
):
    more = [{"block_size": size} for size in (2, 3, 69, 100)]
    more += [{"kl_bits": bits} for bits in (0.0, 0.1, 1.0, 10.0, 30.0)]
    more += [{"log_scale": math.log(10.0**k)} for k in (-6, -4, -2, 0, 2, 4, 6)]
    for options in [*WORKING.values(), *more]:
        outputs = outcome(tmp_path / "file", parameterization, **options)
        assert isinstance(outputs, np.ndarray), (options, outputs)
        assert np.isfinite(outputs.astype(np.float32)).all(), options


# Extremes that need not work.

DIVERGING = {
    "learning rate 1e4": {"learning_rate": 1e4},
    "learning rate 1e20": {"learning_rate": 1e20},
    "learning rate 1e38": {"learning_rate": 1e38},
    "SGD at 1e30": {"learning_rate": 1e30, "optimizer": keras.optimizers.SGD},
    "float16, rho = 1e8": {"policy": "float16", "log_scale": math.log(1e8)},
    "mixed_float16, rho = 1e8": {"policy": "mixed_float16", "log_scale": math.log(1e8)},
    "rho = 1e26": {"log_scale": 60.0},
    "a budget of 1e5 bits": {"kl_bits": 1e5},
    "huge data": {"kind": "huge"},
}


@pytest.mark.parametrize("parameterization", PARTS)
@pytest.mark.parametrize("options", DIVERGING.values(), ids=DIVERGING.keys())
def test_a_right_file_or_a_clear_stop(options, parameterization, tmp_path, quick):
    result = outcome(tmp_path / "file", parameterization, **options)
    assert not isinstance(result, str) or re.search(CAUSES, result), result


@pytest.mark.exhaustive
def test_combined_extremes(tmp_path, quick):
    counts = {"file": 0, "stop": 0}

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(PARTS),
        st.fixed_dictionaries(
            {},
            optional={
                "learning_rate": st.integers(-38, 38).map(lambda k: 10.0**k),
                "kl_bits": st.sampled_from([0.0, 0.01, 0.3, 3.0, 20.0, 60.0]),
                "block_size": st.sampled_from([1, 2, 8, 64, 4096]),
                "log_scale": st.integers(-8, 8).map(lambda k: k * math.log(10)),
                "kind": st.sampled_from(["zeros", "constant", "huge", "tiny"]),
                "batch_size": st.sampled_from([1, 3, 16]),
                "policy": st.sampled_from(
                    ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16"]
                ),
                "codebook": st.sampled_from(["per_block", "shared"]),
                "coder": st.sampled_from(["mrc", "trellis"]),
                "warm_start": st.booleans(),
            },
        ),
    )
    def check(parameterization, options):
        result = outcome(tmp_path / "file", parameterization, **options)
        counts["stop" if isinstance(result, str) else "file"] += 1
        assert not isinstance(result, str) or re.search(CAUSES, result), result

    check()
    assert min(counts.values()) > 5, counts


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["norm/moving_mean", "two/bias"])
def test_stored_values_that_are_not_finite_are_not_written(name, value, eager):
    model = VariationalModel(small_net(), block_size=8, rules={"two/bias": "store"})
    fix_all(model)
    (variable,) = (v for v in model.net.weights if v.path.endswith(name))
    variable.assign(np.full(variable.shape, value))
    with pytest.raises(ValueError, match=f"{name} .*not finite"):
        to_file(model)


def test_a_part_without_gradient(tmp_path, quick):
    """A layer that the loss does not depend on."""
    options = {"block_size": 8, "block_bits": 4}
    keras.utils.set_random_seed(3)
    inputs = layers.Input((5,), name="x")
    used = tfmiracle.MeanKLDense(3, name="used", **options)(inputs)
    idle = tfmiracle.MeanKLDense(3, name="idle", **options)(inputs)
    model = keras.Model(inputs, {"used": used, "idle": idle}, name="net")
    model.compile(keras.optimizers.Adam(1e-2), {"used": LOSS, "idle": None})
    x, y = data()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        code(model, tmp_path / "file", x, {"used": y})
    there = load(tmp_path / "file").predict_on_batch(x)
    for key, here in model.predict_on_batch(x).items():
        np.testing.assert_array_equal(there[key], here)
        assert np.isfinite(here).all()


def test_compress_stops_with_the_loss(tmp_path, eager):
    x, y = data()
    recipe = Recipe(
        block_bits=4, batch_size=8, warmup_steps=10, warmup_learning_rate=1e38
    )
    with pytest.raises(ValueError, match=r"The loss is \w+ after 10 steps of warmup"):
        tfmiracle.compress(
            small_net(), (x, y), None, tmp_path / "file", recipe, loss=LOSS, verbose=0
        )
    assert not (tmp_path / "file").exists()


# Sizes.


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_to_code(frozen, tmp_path):
    inner = [layers.Dense(3, name="two")] if frozen else []
    net = keras.Sequential([layers.Input((5,)), layers.Flatten(), *inner], name="net")
    net.trainable = not frozen
    message = r"`net` \('net'\) has no trainable weights"
    with pytest.raises(ValueError, match=message):
        VariationalModel(net)
    for target in (None, "100x"):
        with pytest.raises(ValueError, match="has no trainable weights"):
            tfmiracle.compress(
                net, data(), target, tmp_path / "file", loss=LOSS, verbose=0
            )
    assert not (tmp_path / "file").exists()


def regression(count, **options):
    """One kernel of `count` weights, coded."""
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [layers.Input((count,), name="x"), layers.Dense(1, use_bias=False, name="one")],
        name="net",
    )
    model = VariationalModel(net, **{"block_bits": 4, **options})
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


@pytest.mark.parametrize("parameterization", PARTS)
@pytest.mark.parametrize(
    "count, block_size, blocks",
    [(1, 1, 1), (1, 20, 1), (97, 1, 97), (97, 2, 49), (97, 96, 2), (97, 97, 1)],
)
def test_one_weight_and_a_prime_number(
    count, block_size, blocks, parameterization, tmp_path, quick
):
    model = regression(count, parameterization=parameterization, block_size=block_size)
    assert model.block_posterior.layout.num_blocks == blocks
    x = np.random.default_rng(0).normal(size=(16, count)).astype(np.float32)
    code(model, tmp_path / "file", x, x.sum(1, keepdims=True))
    assert np.isfinite(check_file(model, tmp_path / "file", x)).all()
    (kernel,) = decode(tmp_path / "file").weights.values()
    assert kernel.shape == (count, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("codebook", ["per_block", "shared"])
def test_a_codebook_of_2_to_the_24(codebook, tmp_path):
    """The best of all candidates is found, coded in 3 bytes, and decoded."""
    bits, size = 24, 4
    rng = np.random.default_rng(5)
    loc = rng.normal(0, 1, (1, size)).astype(np.float32)
    log_scale = rng.uniform(-4, -3, loc.shape).astype(np.float32)
    coder = MinimalRandomCoder(bits, 9, codebook, "largest_weight")
    coded = coder.encode([0], loc, log_scale)
    best, weight = 0, -math.inf
    for start in range(0, 1 << bits, 1 << 18):
        indices = np.arange(start, start + (1 << 18), dtype=np.uint32)
        if codebook == "shared":
            z = coder.decode(np.zeros_like(indices), indices, size)
        else:
            z = normals(9, Domain.CODEBOOK, np.zeros_like(indices), indices, size)
        t = (z.astype(float) - loc) * np.exp(-log_scale.astype(float))
        weights = (0.5 * (z.astype(float) ** 2 - t**2)).sum(1) - log_scale.sum()
        if weights.max() > weight:
            best, weight = start + int(weights.argmax()), weights.max()
    assert coded.codes.tolist() == [best]
    assert coded.log_weight[0] == pytest.approx(weight, rel=1e-5)
    np.testing.assert_allclose(coded.log_evidence, 0, atol=1.0)

    model = regression(size, block_size=size, block_bits=bits, codebook=codebook)
    posterior = model.block_posterior
    posterior.finalize_coding_scale()
    posterior.fix([0], [2**24 - 1])
    file = to_file(model)
    assert file.payload_bytes == 3
    (kernel,) = decode(file.to_bytes()).weights.values()
    np.testing.assert_array_equal(kernel, posterior.values()[0])
    assert np.any(kernel)


LARGE = """
import json, time

import keras
import numpy as np
import tfmiracle
from support import fix_all
from tfmiracle.decoder import decode
from tfmiracle.hosts.network import to_file

SIDE = 3163  # times SIDE + 1 for the bias: 10,007,732 weights


def step(function):
    '''Its result; notes the time and the memory above what was there before.'''
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again
    before, start = memory("VmRSS"), time.monotonic()
    result = function()
    figures.append((time.monotonic() - start, memory("VmHWM") - before))
    return result


def memory(key):
    with open("/proc/self/status") as file:
        line, = (line for line in file if line.startswith(key))
    return 1024 * int(line.split()[1])


figures = []
net = keras.Sequential([keras.layers.Input((SIDE,)), keras.layers.Dense(SIDE)])
model = step(lambda: tfmiracle.VariationalModel(
    net, block_size=20, block_bits=12, codebook="shared",
))
step(lambda: fix_all(model))
data = step(lambda: to_file(model).to_bytes())
weights = step(lambda: decode(data)).weights
values = step(model.block_posterior.values)
assert len(weights) == len(values) == 2
for a, b in zip(weights.values(), values):
    assert np.array_equal(a, b)
print(json.dumps([sum(v.size for v in weights.values()), len(data), figures]))
"""


@pytest.mark.exhaustive
def test_ten_million_weights(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(GOLDEN.parent))
    process = run_python(LARGE)
    assert process.returncode == 0, process.stderr
    count, size, figures = json.loads(process.stdout.splitlines()[-1])
    assert count == 10_007_732
    assert size == pytest.approx(count / 20 * 12 / 8, rel=0.03)
    names = ("model", "fix", "to_file", "decode", "values")
    # Bytes for each weight, about twice what was measured. Times are only shown.
    limits = dict(zip(names, (260, 140, 20, 60, 60)))
    for name, (seconds, memory) in zip(names, figures, strict=True):
        print(f"{name}: {seconds:.1f} s, {memory / count:.0f} bytes a weight")
        assert memory < limits[name] * count
