"""Data sets as networks take them, and how networks are judged."""

import keras
import numpy as np
import pytest
from keras import layers

from tfmiracle.datasets import Dataset
from tfmiracle.studies.task import task_of

SPARSE = "sparse_categorical_crossentropy"
RNG = np.random.default_rng(0)
CLASSES = np.arange(12) % 3


def dataset(x, y=CLASSES):
    return Dataset(x, y, x[:6], y[:6])


def network(shape, *before, units=3, activation=None, dtype=None):
    """The layers given, then a dense one."""
    return keras.Sequential(
        [
            layers.Input(shape, dtype=dtype),
            *before,
            layers.Flatten(),
            layers.Dense(units, activation),
        ]
    )


def pixels(*shape):
    return RNG.integers(0, 256, (12, *shape), np.uint8)


def normal(*shape):
    return RNG.normal(size=(12, *shape)).astype(np.float32)


# Shapes.


@pytest.mark.parametrize(
    "taken, given, fitted",
    [
        ((5, 2), (5, 2), (5, 2)),
        ((None, 2), (5, 2), (5, 2)),
        ((5, 1), (5,), (5, 1)),
        ((6, 6, 1), (6, 6), (6, 6, 1)),
        ((6, 6), (6, 6), (6, 6)),
        ((6, 6), (6, 6, 1), (6, 6)),
        ((None, None, 1), (6, 6), (6, 6, 1)),
        ((4, 6, 6, 1), (4, 6, 6), (4, 6, 6, 1)),
    ],
)
def test_examples_get_the_shape_that_the_network_takes(taken, given, fitted):
    inputs = layers.Input(taken)
    largest = keras.ops.max(inputs, axis=range(1, len(taken) + 1))
    net = keras.Model(inputs, keras.ops.reshape(largest, (-1, 1)))
    task = task_of(net, dataset(normal(*given)), "mse")
    assert task.data.x_train.shape == (12, *fitted)
    assert task.data.x_test.shape == (6, *fitted)
    said = [text.partition(": ")[2] for text in task.done]
    if len(fitted) > len(given):
        assert said == ["a channel axis added"] * 2
    elif len(fitted) < len(given):
        assert said == ["the last axis, of size 1, dropped"] * 2
    else:
        assert said == []


@pytest.mark.parametrize("given", [(6,), (6, 5), (6, 6, 3), (36,), (1, 6, 6)])
def test_examples_of_other_shapes_are_refused(given):
    with pytest.raises(ValueError, match=r"takes inputs of shape \(6, 6, 1\), but"):
        task_of(network((6, 6, 1)), dataset(normal(*given)), SPARSE)


# Scales.


def with_operation(make):
    inputs = layers.Input((6, 6, 3))
    outputs = layers.Conv2D(2, 3)(make(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(outputs)))


def adapted():
    layer = layers.Normalization()
    layer.adapt(pixels(6, 6, 3).astype(np.float32))
    return layer


def trained_on(mean):
    layer = layers.BatchNormalization()
    layer.build((None, 6, 6, 3))
    layer.moving_mean.assign([0.1, mean, 0.2])
    return layer


def augmentation(*after):
    return keras.Sequential([layers.Input((6, 6, 3)), layers.RandomFlip(), *after])


THAT_SCALE = {
    "rescaling": lambda: network((6, 6, 3), layers.Rescaling(1 / 255)),
    "rescaling to -1": lambda: network((6, 6, 3), layers.Rescaling(1 / 127.5, -1)),
    "normalization": lambda: network((6, 6, 3), adapted()),
    "in a nested model": lambda: network((6, 6, 3), augmentation(layers.Rescaling(1))),
    "after a nested model": lambda: network(
        (6, 6, 3), augmentation(), layers.Rescaling(1)
    ),
    "an operation": lambda: with_operation(lambda x: x / 255.0),
    "another operation": lambda: with_operation(lambda x: keras.ops.subtract(x, 99.0)),
    "for Keras' ResNet50": lambda: with_operation(
        keras.applications.resnet50.preprocess_input
    ),
    "batch normalization of bytes": lambda: network((6, 6, 3), trained_on(90.0)),
    "layer normalization": lambda: network((6, 6, 3), layers.LayerNormalization()),
    "in frames": lambda: network(
        (6, 6, 3), layers.TimeDistributed(layers.Rescaling(1 / 255))
    ),
}
THAT_DO_NOT = {
    "convolution": lambda: network((6, 6, 3), layers.Conv2D(2, 3)),
    "rescaling of features": lambda: network(
        (6, 6, 3), layers.Conv2D(2, 3), layers.Rescaling(2.0)
    ),
    "only augmentation": lambda: network((6, 6, 3), augmentation()),
    "batch normalization of 0 to 1": lambda: network((6, 6, 3), trained_on(0.6)),
    "activation": lambda: with_operation(layers.ReLU()),
}


@pytest.mark.parametrize("make", THAT_SCALE.values(), ids=THAT_SCALE.keys())
def test_images_are_not_scaled_twice(make):
    x = pixels(6, 6, 3)
    task = task_of(make(), dataset(x), SPARSE)
    np.testing.assert_array_equal(task.data.x_train, x.astype(np.float32), strict=True)
    assert task.done[0] == "x_train: uint8 not scaled, the network does it itself"


@pytest.mark.parametrize("make", THAT_DO_NOT.values(), ids=THAT_DO_NOT.keys())
def test_images_that_nothing_scales(make):
    x = pixels(6, 6, 3)
    task = task_of(make(), dataset(x), SPARSE)
    expected = x.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(task.data.x_train, expected, strict=True)
    np.testing.assert_array_equal(task.data.x_test, expected[:6], strict=True)
    assert task.done == [f"x_{s}: uint8 images scaled to 0 ... 1" for s in SETS]


SETS = ("train", "test")


def test_images_without_a_channel_axis():
    x = pixels(6, 6)
    flat = task_of(network((6, 6)), dataset(x), SPARSE)
    assert flat.data.x_train.max() <= 1 and flat.data.x_train.shape == x.shape
    deep = task_of(network((6, 6, 1), layers.Conv2D(1, 2)), dataset(x), SPARSE)
    assert deep.data.x_train.shape == (12, 6, 6, 1)
    np.testing.assert_array_equal(deep.data.x_train[..., 0], flat.data.x_train)
    assert deep.done[1] == (
        "x_test: a channel axis added, uint8 images scaled to 0 ... 1"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: network((6,)),
        lambda: keras.Sequential(
            [layers.Input((6, 2)), layers.LSTM(2), layers.Dense(3)]
        ),
        lambda: network((6, 2), layers.Conv1D(2, 3)),
    ],
)
def test_bytes_that_are_no_images_are_not_scaled(make):
    net = make()
    x = pixels(*net.input_shape[1:])
    task = task_of(net, dataset(x), SPARSE)
    np.testing.assert_array_equal(task.data.x_train, x.astype(np.float32), strict=True)
    assert task.done[0] == "x_train: uint8 not scaled, these are no images"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("declared", ["int32", None])
def test_token_ids_stay(dtype, declared):
    net = network((6,), layers.Embedding(200, 2), dtype=declared)
    ids = np.arange(72).reshape(12, 6).astype(dtype)
    task = task_of(net, dataset(ids), SPARSE)
    np.testing.assert_array_equal(task.data.x_train, ids.astype(np.int32), strict=True)
    assert task.done == []


def test_ids_of_64_bits_stay_too():
    net = network((6,), layers.Hashing(8), layers.Embedding(8, 2), dtype="int64")
    ids = np.arange(72).reshape(12, 6) + 2**40
    np.testing.assert_array_equal(
        task_of(net, dataset(ids), SPARSE).data.x_train, ids, strict=True
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int16, np.int64, bool])
def test_other_numbers_become_float32(dtype):
    x = np.arange(24).reshape(12, 2).astype(dtype)
    task = task_of(network((2,)), dataset(x), SPARSE)
    np.testing.assert_array_equal(task.data.x_train, x.astype(np.float32), strict=True)
    assert task.done == []


# Labels. Rows: loss, units, labels; the kind, the labels fitted, what is said.

ROWS = np.eye(3)[CLASSES]
YES = (CLASSES > 0).astype(int)
MULTI = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0]])[CLASSES]
TO_NUMBERS = ["y_train, y_test: one-hot rows turned into class numbers"]
TO_ROWS = ["y_train, y_test: class numbers turned into one-hot rows"]
TO_01 = ["y_train, y_test: one-hot rows turned into 0 and 1"]
FITS = {
    "numbers": (SPARSE, 3, CLASSES, "classes", CLASSES, []),
    "a column": (SPARSE, 3, CLASSES[:, None], "classes", CLASSES, []),
    "whole floats": (SPARSE, 3, CLASSES.astype(float), "classes", CLASSES, []),
    "more units": (SPARSE, 5, CLASSES.astype("u1"), "classes", CLASSES, []),
    "rows for numbers": (SPARSE, 3, ROWS, "classes", CLASSES, TO_NUMBERS),
    "rows of bytes": (SPARSE, 3, ROWS.astype("u1"), "classes", CLASSES, TO_NUMBERS),
    "rows": ("categorical_crossentropy", 3, ROWS, "classes", ROWS, []),
    "soft rows": ("categorical_crossentropy", 3, 0.8 * ROWS, "classes", 0.8 * ROWS, []),
    "numbers for rows": (
        "categorical_crossentropy",
        3,
        CLASSES,
        "classes",
        ROWS,
        TO_ROWS,
    ),
    "loss object": (keras.losses.CategoricalHinge(), 3, ROWS, "classes", ROWS, []),
    "KL": (keras.losses.KLDivergence(), 3, CLASSES, "classes", ROWS, TO_ROWS),
    "rows by mse": ("mse", 3, ROWS, "classes", ROWS, []),
    "one unit": ("binary_crossentropy", 1, YES, "yes_or_no", YES[:, None], []),
    "bool": ("binary_crossentropy", 1, YES > 0, "yes_or_no", YES[:, None], []),
    "two columns": (
        "binary_crossentropy",
        1,
        np.eye(2)[YES],
        "yes_or_no",
        YES[:, None],
        TO_01,
    ),
    "-1 and 1": ("hinge", 1, 2 * YES - 1, "yes_or_no", 2 * YES[:, None] - 1, []),
    "many": ("binary_crossentropy", 3, MULTI, "yes_or_no", MULTI, []),
    "soft": ("binary_crossentropy", 1, YES / 2, "values", YES[:, None] / 2, []),
    "values": ("mse", 1, CLASSES / 7, "values", CLASSES[:, None] / 7, []),
    "counts": ("poisson", 1, CLASSES, "values", CLASSES[:, None], []),
    "several values": ("mae", 3, ROWS - 0.3, "values", ROWS - 0.3, []),
    "unknown, numbers": (None, 3, CLASSES, "classes", CLASSES, []),
    "unknown, rows": (None, 3, ROWS, "classes", CLASSES, TO_NUMBERS),
    "unknown, shares": (None, 3, ROWS / 2 + 1 / 6, "classes", ROWS / 2 + 1 / 6, []),
    "unknown, many": (None, 3, MULTI, "yes_or_no", MULTI, None),
    "unknown, one unit": (None, 1, YES, "yes_or_no", YES[:, None], None),
    "unknown, values": (None, 1, CLASSES / 7, "values", CLASSES[:, None] / 7, []),
    "unknown, counts": (None, 1, CLASSES, "values", CLASSES[:, None], []),
    "unknown, several": (None, 3, ROWS - 0.3, "values", ROWS - 0.3, []),
}


@pytest.mark.parametrize("loss, units, y, kind, fitted, said", FITS.values(), ids=FITS)
def test_labels(loss, units, y, kind, fitted, said):
    task = task_of(network((4,), units=units), dataset(normal(4), y), loss)
    assert task.kind == kind
    np.testing.assert_array_equal(task.data.y_train, fitted.astype(np.float32))
    np.testing.assert_array_equal(task.data.y_test, fitted[:6].astype(np.float32))
    assert said is None or task.done == said


def test_values_of_several_axes():
    net = keras.Sequential([layers.Input((5, 2)), layers.Dense(4)])
    y = normal(5, 4).astype(np.float64)
    task = task_of(net, dataset(normal(5, 2), y), "mse")
    assert task.kind == "values" and task.metrics() == []
    np.testing.assert_array_equal(task.data.y_train, y.astype(np.float32), strict=True)


REFUSED = {
    "too many classes": (SPARSE, 3, CLASSES + 1, "cannot tell the 4 classes"),
    "too wide rows": (SPARSE, 3, np.eye(5)[CLASSES], "cannot tell the 5 classes"),
    "values for numbers": (SPARSE, 3, CLASSES / 7, r"class numbers .* loss .*'mse'"),
    "below 0": (SPARSE, 3, CLASSES - 1, "from 0"),
    "multi-hot": (SPARSE, 3, MULTI > 0, "one-hot rows"),
    "three classes, a unit": ("binary_crossentropy", 1, CLASSES, "two classes apart"),
    "values, a unit": ("binary_crossentropy", 1, CLASSES * 1.5, "two classes apart"),
    "too narrow rows": ("categorical_crossentropy", 3, ROWS[:, :2], r"shape \(2,\)"),
    "numbers for mse": ("mse", 3, CLASSES, "mean_squared_error.*sparse_categorical"),
    "unknown, too many": (None, 3, CLASSES + 1, "cannot tell the 4 classes"),
    "unknown, values": (None, 3, CLASSES / 7, "class numbers"),
}


@pytest.mark.parametrize("loss, units, y, match", REFUSED.values(), ids=REFUSED)
def test_labels_that_do_not_fit(loss, units, y, match):
    with pytest.raises(ValueError, match=match):
        task_of(network((4,), units=units), dataset(normal(4), y), loss)


@pytest.mark.parametrize("loss", [SPARSE, "categorical_crossentropy", None])
def test_labels_of_positions_are_refused(loss):
    net = keras.Sequential([layers.Input((5,)), layers.Embedding(9, 3)])
    x = RNG.integers(0, 9, (12, 5))
    with pytest.raises(ValueError, match=r"each position.*tfmiracle\.compress"):
        task_of(net, dataset(x, x % 3), loss)


def test_networks_of_several_inputs_or_outputs_are_refused():
    a, b = layers.Input((4,)), layers.Input((4,))
    out = layers.Dense(3)(a)
    for net in (keras.Model([a, b], layers.Add()([a, b])), keras.Model(a, [out, out])):
        with pytest.raises(ValueError, match=r"one output.*tfmiracle\.compress"):
            task_of(net, dataset(normal(4)), "mse")
    net = keras.Model([a], [out])  # lists of one
    task = task_of(net, dataset(normal(4)), [SPARSE])
    assert 0 <= task.judge(net)["accuracy"] <= 1


def test_sets_of_labels_that_are_not_alike_are_refused():
    x = normal(4)
    with pytest.raises(ValueError, match="make them alike"):
        task_of(network((4,)), Dataset(x, CLASSES, x, ROWS), SPARSE)


# Judging.


def fixed(activation=None, units=1, batch=None):
    """A network that gives its inputs, or their activation."""
    inputs = layers.Input(batch_shape=(batch, units))
    return keras.Model(inputs, layers.Activation(activation or "linear")(inputs))


@pytest.mark.parametrize("activation, threshold", [(None, 0.0), ("sigmoid", 0.5)])
@pytest.mark.parametrize("loss_is_known", [True, False])
def test_one_unit_is_judged_by_its_threshold(activation, threshold, loss_is_known):
    x = np.array([-2, 3, 0.2, -0.1] * 3, np.float32)[:, np.newaxis]
    y = np.array([0, 1, 1, 1] * 3)
    loss = keras.losses.BinaryCrossentropy(from_logits=activation is None)
    net = fixed(activation)
    task = task_of(net, Dataset(x, y, x, y), loss if loss_is_known else None)
    assert task.threshold == threshold
    assert task.judge(net) == {"accuracy": 0.75}
    net.compile(loss=loss, metrics=task.metrics())
    found = net.evaluate(x, task.data.y_test, verbose=0, return_dict=True)
    assert found["accuracy"] == 0.75


@pytest.mark.parametrize("batch", [None, 8])
def test_values_are_judged_by_their_distance(batch):
    x = np.arange(12, dtype=np.float32)[:, np.newaxis]
    y = np.arange(12.0)
    y[3] -= 6
    net = fixed(batch=batch)
    judged = task_of(net, Dataset(x, y, x, y), "mse").judge(net)
    assert judged == {"mean_squared_error": 3.0, "mean_absolute_error": 0.5}


def test_rows_are_judged_by_the_largest_output():
    x = np.eye(3, dtype=np.float32)[CLASSES]
    rows = np.eye(3)[(CLASSES + (np.arange(12) < 3)) % 3]
    net = fixed(units=3)
    for loss in ("categorical_crossentropy", None):
        task = task_of(net, Dataset(x, rows, x, rows), loss)
        assert task.judge(net) == {"accuracy": 0.75}
