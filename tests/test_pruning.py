"""Pruning, against a ranking by brute force."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fix_all

import tfmiracle
from tfmiracle import CodedPosterior, decoder
from tfmiracle.codec import pruning
from tfmiracle.codec.pruning import STRATEGIES, pruned_networks, pruning_order
from tfmiracle.decoder import decode
from tfmiracle.hosts.loading import accuracy_of, to_network
from tfmiracle.hosts.network import to_file

CHECKS = settings(max_examples=20, deadline=None, derandomize=True)


def hashed_file():
    """One group: 12 weights for 24, 6, 18 and 3; normalization is stored in part."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(6, name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3, name="two"),
        ]
    )
    model = tfmiracle.VariationalModel(
        net, block_size=8, rules={"one/kernel": "hash=2", "norm/*": "store"}
    )
    return to_file(fix_all(model))


def grouped_file():
    """Two groups of 25 and 18 weights."""
    layers = [tfmiracle.MeanKLDense(n, block_size=7, seed=n) for n in (5, 3)]
    return to_file(fix_all(keras.Sequential([keras.layers.Input((4,)), *layers])))


FILES = {"hashed": hashed_file(), "grouped": grouped_file()}
SIZES = {"hashed": [39], "grouped": [25, 18]}
of_each_file = pytest.mark.parametrize("name", sorted(FILES))


def random_posterior(sizes, seed=0):
    rng = np.random.default_rng(seed)
    loc = [rng.normal(size=n).astype(np.float32) for n in sizes]
    scale = [np.exp(rng.normal(-1, 1, n)).astype(np.float32) for n in sizes]
    return CodedPosterior(loc, scale)


def effective(file):
    """The weights by position, from the decoded network alone."""
    weights, result = decode(file).weights, []
    for name, place in zip(file.names, file.coded, strict=True):
        if place is None:
            continue
        layout = file.groups[place[0]].layout
        value = weights[name].ravel()
        if layout.variables[place[1]].hash_factor > 1:
            index, sign = layout.hashing(place[1])
            value = [(value * sign)[index == i][0] for i in range(index.max() + 1)]
        result.extend(float(v) for v in value)
    return result


@of_each_file
def test_order_by_magnitude(name):
    weights = effective(FILES[name])
    expected = sorted(range(len(weights)), key=lambda i: (abs(weights[i]), i))
    assert pruning_order(FILES[name], "magnitude").tolist() == expected


@of_each_file
def test_order_by_kl_is_that_of_the_density_at_zero(name):
    """Appendix A of the paper: the largest log N(0 | mu, sigma) first."""
    q = random_posterior(SIZES[name])
    loc, scale = (np.concatenate(x).astype(float).tolist() for x in (q.loc, q.scale))

    def log_density(i):
        z = loc[i] / scale[i]
        return -math.log(scale[i]) - z * z / 2 - math.log(2 * math.pi) / 2

    expected = sorted(range(len(loc)), key=lambda i: (-log_density(i), i))
    assert pruning_order(FILES[name], "kl", q).tolist() == expected


def test_equal_weights_go_in_order():
    q = CodedPosterior([np.ones(39, np.float32)], [np.ones(39, np.float32)])
    assert pruning_order(FILES["hashed"], "kl", q).tolist() == list(range(39))


@of_each_file
def test_uniform_orders_are_permutations_by_seed(name):
    file = FILES[name]
    orders = [
        pruning_order(file, "uniform", seed=s).tolist() for s in (0, 1, 2**64 - 1)
    ]
    for order in orders:
        assert sorted(order) == list(range(sum(SIZES[name])))
    assert orders[0] != orders[1] != orders[2]
    assert pruning_order(file, "uniform", seed=1).tolist() == orders[1]
    # Every position has the same chance to be first.
    first = [pruning_order(file, "uniform", seed=s)[0] for s in range(2000)]
    counts = np.bincount(first, minlength=sum(SIZES[name]))
    expected = 2000 / len(counts)
    assert np.sum((counts - expected) ** 2 / expected) < 90


def test_a_path_or_bytes_will_do(tmp_path):
    file, path = FILES["grouped"], tmp_path / "net.miracle"
    file.write(path)
    (expected,) = pruned_networks(file, "magnitude", [0.5])
    for source in (path, str(path), path.read_bytes()):
        (found,) = pruned_networks(source, "magnitude", [0.5])
        for name, value in expected.weights.items():
            np.testing.assert_array_equal(found.weights[name], value)
    with pytest.raises(ValueError, match=r"must be a CodedPosterior.*read it with"):
        next(pruned_networks(path, "kl", [0.5], "net.posterior.npz"))


@CHECKS
@given(
    st.sampled_from(sorted(FILES)),
    st.sampled_from(STRATEGIES),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.integers(0, 2**64 - 1),
)
def test_pruned_networks(name, strategy, fractions, seed):
    file, whole = FILES[name], decode(FILES[name]).weights
    q = random_posterior(SIZES[name], seed % 1000)
    order = pruning_order(file, strategy, q, seed)
    before = effective(file)
    for fraction, pruned in zip(
        fractions, pruned_networks(file, strategy, fractions, q, seed), strict=True
    ):
        count = round(fraction * len(order))
        gone = set(order[:count].tolist())
        assert pruned.architecture == file.architecture
        position = 0
        for variable, place in zip(file.names, file.coded, strict=True):
            value, original = pruned.weights[variable], whole[variable]
            assert value.dtype == original.dtype and value.shape == original.shape
            if place is None:
                np.testing.assert_array_equal(value, original)
                continue
            layout = file.groups[place[0]].layout
            v = layout.variables[place[1]]
            index = np.arange(v.size)
            if v.hash_factor > 1:
                index, _ = layout.hashing(place[1])
            zero = np.isin(position + index, list(gone)).reshape(v.shape)
            np.testing.assert_array_equal(value, np.where(zero, 0, original))
            position += v.effective_size
        assert position == len(before) == len(order)


@of_each_file
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_and_everything(name, strategy):
    file, q = FILES[name], random_posterior(SIZES[name])
    nothing, everything = pruned_networks(file, strategy, [0, 1], q)
    np.testing.assert_equal(nothing.weights, decode(file).weights)
    for variable, place in zip(file.names, file.coded, strict=True):
        if place is not None:
            assert not np.any(everything.weights[variable])


def test_a_file_is_decoded_once_for_all_fractions(monkeypatch):
    groups = []

    def decode_blocks(group):
        groups.append(group)
        return decoder.decode_blocks(group)

    monkeypatch.setattr(pruning, "decode_blocks", decode_blocks)
    networks = list(pruned_networks(FILES["grouped"], "uniform", [0.9, 0.1, 0.0]))
    assert groups == FILES["grouped"].groups
    # What the caller does to a network does not reach the next one.
    for again, expected in zip(
        pruned_networks(FILES["grouped"], "uniform", [0.9, 0.1, 0.0]), networks
    ):
        np.testing.assert_equal(again.weights, expected.weights)
        for value in again.weights.values():
            value.fill(7)


def test_accuracy():
    file = FILES["hashed"]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)).astype(np.float32)
    pruned, whole = pruned_networks(file, "magnitude", [0.5, 0.0])
    net = to_network(pruned)
    y = np.argmax(net.predict(x, verbose=0), -1)
    assert accuracy_of(net, pruned, x, y) == 1
    accuracy = accuracy_of(net, whole, x, y)
    labels = np.argmax(to_network(decode(file)).predict(x, verbose=0), -1)
    assert accuracy == np.mean(labels == y) < 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"strategy": "random"}, "`strategy` must be one of .*'random'"),
        ({"strategy": "kl"}, "`posterior` must be"),
        (
            {"strategy": "kl", "posterior": random_posterior([5])},
            "not that of the file",
        ),
        ({"fractions": [0.5, 1.5]}, "`fractions` must be .*1.5"),
        ({"fractions": [-0.1]}, "`fractions` must be .*-0.1"),
        ({"fractions": [math.nan]}, "`fractions` must be .*nan"),
    ],
)
def test_bad_arguments(options, message):
    options = {"strategy": "magnitude", "fractions": [0.5], **options}
    with pytest.raises(ValueError, match=message):
        list(pruned_networks(FILES["hashed"], **options))
