"""How variables are treated, by their paths."""

import keras
import numpy as np
import pytest
from support import fix_all

import tfmiracle
from tfmiracle.codec.rules import Treatment, match_path, treat
from tfmiracle.decoder import decode
from tfmiracle.hosts.network import to_file

PATHS = ["net/a/kernel", "net/a/bias", "net/norm/gamma", "net/norm/mean"]
CODABLE = [True, True, True, False]


@pytest.mark.parametrize(
    "text, treatment",
    [
        ("code", Treatment()),
        ("hash=64", Treatment(hash_factor=64)),
        ("own_scale", Treatment(own_scale=True)),
        ("  hash=2   own_scale ", Treatment(hash_factor=2, own_scale=True)),
        ("store", Treatment(stored=True)),
        ("store=float16", Treatment(stored=True, dtype="float16")),
        ("store=float32", Treatment(stored=True, dtype="float32")),
    ],
)
def test_texts(text, treatment):
    assert Treatment.parse(text) == treatment
    assert Treatment.parse(str(treatment)) == treatment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hash",
        "hash=0",
        "hash=-1",
        "hash=1.5",
        "hash=x",
        "store=int8",
        "store=",
        "store hash=2",
        "store own_scale",
        "own_scale=1",
        "Code",
        "code, hash=2",
        "code store",
        "code hash=2",
        "store store=float16",
        "hash=2 hash=3",
        "hash=2own_scale",
        "own_scale own_scale",
        3,
        None,
    ],
)
def test_texts_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="A rule must say"):
        Treatment.parse(text)


def test_what_rules_decide():
    def decide(rules):
        return [str(t) for t in treat(PATHS, CODABLE, rules)]

    assert decide(None) == decide({}) == ["code", "code", "code", "store"]
    assert decide({"*": "hash=2"}) == ["hash=2", "hash=2", "hash=2", "store"]
    # The last one counts, as a whole.
    assert decide({"*": "store=float16", "a/*": "own_scale", "bias": "code"}) == [
        "own_scale",
        "code",
        "store=float16",
        "store=float16",
    ]


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"b/kernel": "code"}, "'b/kernel' that fits no variable that can be coded.*a"),
        (
            {"norm/mean": "hash=2"},
            "'norm/mean' that fits no variable that can be coded",
        ),
        ({"b/*": "store"}, "'b/\\*' that fits no variable. There are.*norm/mean"),
        ({"a/*": "keep"}, "A rule must say"),
        (["a/*"], "`rules` must be a dict"),
    ],
)
def test_rules_that_make_no_sense(rules, message):
    with pytest.raises(ValueError, match=message):
        treat(PATHS, CODABLE, rules)


@pytest.mark.parametrize(
    "path, pattern, fits",
    [
        ("net/conv2/kernel", "conv2/kernel", True),
        ("net/conv2/kernel", "net/conv2/kernel", True),
        ("conv2/kernel", "conv2/kernel", True),
        ("net/conv2/kernel", "kernel", True),
        ("net/conv2/kernel", "*/kernel", True),
        ("net/conv2/kernel", "conv?/k*", True),
        ("net/conv2/kernel", "*", True),
        ("net/conv2/kernel", "onv2/kernel", False),
        ("net/conv2/kernel", "conv2", False),
        ("net/conv2/kernel", "Conv2/kernel", False),
        ("net/conv2/kernel", "", False),
    ],
)
def test_patterns(path, pattern, fits):
    assert match_path(path, pattern) is fits


def net():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(6, name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3, name="two"),
        ],
        name="net",
    )


def test_a_model_follows_its_rules(tmp_path, eager):
    rules = {
        "one/kernel": "hash=2 own_scale",
        "norm/*": "store=float16",
        "two/bias": "store",
    }
    model = tfmiracle.VariationalModel(net(), block_size=8, rules=rules)
    norm = model.net.get_layer("norm")
    norm.gamma.assign(np.linspace(-1, 1, 6))
    layout = model.block_posterior.layout
    assert [v.hash_factor for v in layout.variables] == [2, 1, 1]
    assert [v.scale_index for v in layout.variables] == [0, 1, 2]
    model.save(tmp_path / "net.keras")
    model = keras.saving.load_model(tmp_path / "net.keras")
    file = to_file(fix_all(model))
    stored = {"norm/*": "store=float16", "two/bias": "store"}
    assert file.metadata["rules"] == stored
    weights = decode(file).weights
    assert [w.dtype.name for w in weights.values()] == [
        *["float32"] * 2,
        *["float16"] * 4,
        *["float32"] * 2,
    ]
    gamma = np.linspace(-1, 1, 6).astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(weights["norm/gamma"], gamma)
    file.write(tmp_path / "net.miracle")
    loaded = tfmiracle.load(tmp_path / "net.miracle")
    assert {v.dtype for v in loaded.weights} == {"float32"}
    np.testing.assert_array_equal(loaded.get_layer("norm").gamma, gamma)


def test_values_too_large_for_float16(eager):
    model = tfmiracle.VariationalModel(net(), rules={"norm/gamma": "store=float16"})
    model.net.get_layer("norm").gamma.assign(np.full(6, 1e6))
    with pytest.raises(ValueError, match=r"norm/gamma has values up to 1e\+06, too la"):
        to_file(fix_all(model))


def test_float16_survives_the_callback(tmp_path, quick):
    model = tfmiracle.VariationalModel(
        net(), block_size=40, block_bits=6, rules={"norm/*": "store=float16"}
    )
    model.compile("sgd", "mse")
    callback = tfmiracle.CompressionCallback(tmp_path / "a.miracle", 9, 1, verbose=0)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    model.fit(x, x[:, :3], verbose=0, callbacks=[callback])
    assert decode(tmp_path / "a.miracle").weights["norm/beta"].dtype == np.float16
