"""Networks that the command line knows by name."""

import math
import re

import keras
import numpy as np
import pytest

import tfmiracle
from tfmiracle import cli
from tfmiracle.studies.architectures import ARCHITECTURES, new_network

# Shape of images, all weights, those that are trained, all for images of 8x8.
WEIGHTS = {
    "lenet5": ((28, 28, 1), 431_080, 431_080, None),
    "digits_cnn": ((8, 8, 1), 151_306, 151_306, 151_306),
    # As MLPerf Tiny says, and by Keras' count of ResNet-20 with option B.
    "resnet8": ((32, 32, 3), 78_666, 78_186, 78_378),
    "resnet20": ((32, 32, 3), 274_042, 272_474, 273_754),
    "mobilenet_v2": ((32, 32, 3), 423_018, 408_938, 422_730),
    "vision_transformer": ((32, 32, 3), 311_050, 311_050, 302_218),
}
DEEP = list(WEIGHTS)[2:]


def count(variables):
    return sum(math.prod(v.shape) for v in variables)


def new(name, shape=(32, 32, 3), policy="float32", seed=0):
    return new_network(name, shape, 10, policy, seed)


def test_all_are_here_and_in_the_help():
    assert ARCHITECTURES.keys() == WEIGHTS.keys()
    assert re.findall("'(.*?)'", cli._BUILT_IN) == list(ARCHITECTURES)
    with pytest.raises(ValueError, match="no model 'lenet6': use lenet5, digits_cnn,"):
        cli._network("lenet6", None, "", 0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_number_of_weights(name):
    shape, every, trained, small = WEIGHTS[name]
    net = new(name, shape)
    assert net.name == name and net.output_shape == (None, 10)
    assert (count(net.variables), count(net.trainable_variables)) == (every, trained)
    assert f"{every:,}" in ARCHITECTURES[name].__doc__
    if small:
        net = new(name, (8, 8, 1))
        assert count(net.variables) == small


def test_mobilenet_has_the_weights_of_keras():
    theirs = keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, weights=None, classes=10
    )
    shapes = [[w.shape for w in n.weights] for n in (theirs, new("mobilenet_v2"))]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "name, end",
    {
        "resnet8": (8, 8, 64),
        "resnet20": (8, 8, 64),
        "mobilenet_v2": (4, 4, 1280),
        "vision_transformer": (64, 96),
    }.items(),
)
def test_what_is_averaged(name, end):
    assert new(name).layers[-2].input.shape == (None, *end)


@pytest.mark.parametrize("name", DEEP)
def test_the_way_through_a_file(name, tmp_path, few_steps):
    net = new(name, (8, 8, 1))
    net.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).random((4, 8, 8, 1)).astype(np.float32)
    recipe = tfmiracle.Recipe(
        block_size=60_000,
        block_bits=4,
        batch_size=4,
        train_steps=1,
        finetune_steps=0,
        recalibration_steps=1,
        max_shift=1,
        flip=True,
    )
    result = tfmiracle.compress(
        net, (x, np.arange(4)), path=tmp_path / "net.miracle", recipe=recipe, verbose=0
    )
    loaded = tfmiracle.load(tmp_path / "net.miracle")
    assert [v.path for v in loaded.weights] == [v.path for v in net.weights]
    np.testing.assert_array_equal(loaded(x), result.model(x))
    assert np.ptp(loaded(x)) > 0


@pytest.mark.parametrize("name", ["resnet8", "vision_transformer"])
def test_names_are_the_same_each_time_and_the_seed_decides(name):
    first, again, other = (new(name, (8, 8, 1), seed=seed) for seed in (1, 1, 2))
    assert [v.path for v in first.weights] == [v.path for v in other.weights]
    for a, b in zip(first.weights, again.weights):
        np.testing.assert_array_equal(a, b)
    assert any(
        (a.numpy() != b.numpy()).any() for a, b in zip(first.weights, other.weights)
    )


@pytest.mark.parametrize("name", ["resnet8", "vision_transformer"])
def test_other_precision(name):
    net = new(name, (8, 8, 1), "mixed_bfloat16")
    assert {w.dtype for w in net.weights} == {"float32"}
    assert {layer.compute_dtype for layer in net.layers[1:]} == {"bfloat16"}


def test_images_of_another_size():
    with pytest.raises(ValueError, match=r"multiples of 4, not \(10, 8, 1\)"):
        new("vision_transformer", (10, 8, 1))
    with pytest.raises(ValueError, match=r"Built-in .* shape \(7,\)"):
        new("resnet8", (7,))
    assert new("mobilenet_v2", (13, 5, 2)).output_shape == (None, 10)
