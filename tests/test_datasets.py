"""Data sets by name and from files."""

import os
import pathlib

import numpy as np
import pytest

from tfmiracle.datasets import Dataset, class_numbers, load_dataset


def good(count=12, shape=(4, 4)):
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (count, *shape), np.uint8),
        "y_train": np.arange(count) % 3,
        "x_test": rng.integers(0, 256, (4, *shape), np.uint8),
        "y_test": np.arange(4)[:, np.newaxis],
    }


def saved(path, **arrays):
    np.savez(path, **{**good(), **arrays})
    return path


def test_digits():
    from sklearn.datasets import load_digits

    digits = load_dataset("digits")
    assert digits.x_train.shape == (1438, 8, 8, 1)
    assert digits.x_test.shape == (359, 8, 8, 1)
    assert digits.num_classes == 10
    for x, y in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test)):
        assert (x.dtype, y.dtype) == (np.float32, np.int64)
        assert (x.min(), x.max()) == (0, 1)
        assert np.bincount(y, minlength=10).min() > 20
    # Together the whole set, every fifth one for testing.
    original = load_digits()
    np.testing.assert_array_equal(digits.y_test, original.target[4::5])
    test = original.images[4::5] / 16
    np.testing.assert_array_equal(digits.x_test[..., 0], test.astype(np.float32))
    train = np.delete(original.target, np.s_[4::5])
    np.testing.assert_array_equal(digits.y_train, train)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.float16, np.float64, np.int16, np.uint16, bool]
)
def test_arrays_are_taken_as_they_are(tmp_path, dtype):
    arrays = good()
    arrays["x_train"] = arrays["x_train"].astype(dtype)
    data = load_dataset(saved(tmp_path / "data.npz", **arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(data, name), array, strict=True)
    assert data.image_shape == (4, 4, 1)
    assert data.num_classes == 4


@pytest.mark.parametrize(
    "y, expected",
    [
        ([0, 2, 1], [0, 2, 1]),
        ([[0], [2], [1]], [0, 2, 1]),
        ([0.0, 2.0, 1.0], [0, 2, 1]),
        ([True, False], [1, 0]),
        ([[0, 1, 0], [1, 0, 0]], [1, 0]),
        ([[0.0, 1.0], [True, 0.0]], [1, 0]),
        ([0.5, 1.0], None),
        ([-1, 1], None),
        ([[0, 1, 1], [1, 0, 0]], None),
        ([[0, 0], [1, 0]], None),
        ([[0, 2], [1, 0]], None),
        ([[[0, 1]]], None),
    ],
)
def test_class_numbers(y, expected):
    found = class_numbers(np.array(y))
    if expected is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, np.array(expected), strict=True)


def test_number_of_classes():
    def classes(y_train, y_test):
        y_train, y_test = np.array(y_train), np.array(y_test)
        return Dataset(np.zeros(3), y_train, np.zeros(3), y_test).num_classes

    assert classes([0, 1, 1], [0, 4, 1]) == 5
    assert classes(np.eye(3), np.eye(3)) == 3
    with pytest.raises(ValueError, match="class numbers from 0 or one-hot rows"):
        classes([0.5, 1, 1], [0, 1, 1])


def with_value(key, index, value):
    array = good()[key].astype(np.float64)
    array[index] = value
    return {key: array}


@pytest.mark.parametrize(
    "arrays, match",
    [
        (with_value("x_train", 5, np.nan), r"x_train\[5\].*finite"),
        (with_value("x_test", (2, 3), np.inf), r"x_test\[2\].*finite"),
        (with_value("x_train", 1, 1e300), r"x_train\[1\].*finite"),
        ({"x_train": np.zeros(12)}, "x_train must be"),
        ({"x_train": np.float32(1)}, "x_train must be"),
        ({"x_train": np.zeros((0, 4, 4))}, "at least one"),
        ({"x_test": np.zeros((0, 4, 4))}, "x_test must be"),
        ({"x_train": np.zeros((12, 4), complex)}, "numeric"),
        ({"x_train": np.full((12, 4), "a")}, "numeric"),
        ({"x_test": np.zeros((4, 5, 4))}, r"x_test have shape \(5, 4\)"),
        ({"x_test": np.zeros((4, 16))}, r"x_test have shape \(16,\)"),
        ({"y_train": np.arange(11)}, "each of the 12"),
        ({"y_train": np.zeros((2, 6), int)}, "each of the 12"),
        ({"y_train": np.zeros((12, 0), int)}, "each of the 12"),
        ({"y_train": np.int64(3)}, "each of the 12"),
        ({"y_train": np.zeros(0, int)}, "each of the 12"),
        ({"y_test": np.zeros(4, complex)}, "each of the 4"),
        ({"y_test": np.full(4, "cat")}, r"y_test holds text.*numpy\.unique"),
        ({"y_test": np.array([0, 1, np.nan, 2])}, r"y_test\[2\].*finite"),
        ({"y_test": np.array([{}] * 4)}, r"no readable \.npz"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arrays_that_do_not_fit(tmp_path, arrays, match):
    with pytest.raises(ValueError, match=match):
        load_dataset(saved(tmp_path / "data.npz", **arrays))


@pytest.mark.parametrize("missing", ["x_train", "y_train", "x_test", "y_test"])
def test_missing_arrays_are_named(tmp_path, missing):
    arrays = good()
    del arrays[missing]
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=f"lacks an array.*{missing}"):
        load_dataset(tmp_path / "data.npz")


def test_files_that_are_no_archives(tmp_path):
    archive = saved(tmp_path / "good.npz").read_bytes()
    np.savez_compressed(tmp_path / "small.npz", **good())
    compressed = bytearray((tmp_path / "small.npz").read_bytes())
    compressed[120:160] = bytes(40)
    array = tmp_path / "array.npy"
    np.save(array, np.zeros(3))
    path = tmp_path / "bad.npz"
    for data in (
        b"",
        b"some text",
        archive[:-30],
        archive[: len(archive) // 2],
        compressed,
        array.read_bytes(),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"bad\.npz is no readable \.npz file"):
            load_dataset(path)


@pytest.mark.parametrize("name", ["none.npz", "minst", "", "."])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="There is no data set"):
        load_dataset(name)


def test_keras_datasets_that_cannot_be_loaded(monkeypatch):
    import keras

    def offline():
        raise OSError("no connection")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", offline)
    with pytest.raises(ValueError, match=r"'mnist': no connection.*\.npz"):
        load_dataset("mnist")


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_keras_datasets(monkeypatch, name):
    import keras

    arrays = good(shape=(4, 4) if name == "mnist" else (4, 4, 3))

    def load():
        return (arrays["x_train"], arrays["y_train"]), (
            arrays["x_test"],
            arrays["y_test"],
        )

    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", load)
    data = load_dataset(name)
    np.testing.assert_array_equal(data.x_train, arrays["x_train"], strict=True)


# Archives are sorted by class, or have classes in turn, or in no order.
ORDERS = {
    "sorted": np.arange(300) // 100,
    "in turn": np.arange(300) % 3,
    "one-hot rows, in turn": np.eye(3)[np.arange(300) % 3],
    "values": np.linspace(0, 1, 300),
}


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 1 / 3, 0.5, 0.99])
@pytest.mark.parametrize("order", ORDERS)
def test_hold_out_takes_the_same_share_of_each_class(order, fraction):
    x, y = np.arange(300, dtype=np.float32)[:, np.newaxis], ORDERS[order]
    data = Dataset(x, y, x[:1], y[:1])
    held = data.hold_out(fraction)
    np.testing.assert_array_equal(held.x_test, data.hold_out(fraction).x_test)
    assert len(held.x_test) == int(np.floor(300 * fraction))
    together = np.concatenate([held.x_train, held.x_test])[:, 0]
    assert sorted(together) == list(range(300))
    np.testing.assert_array_equal(y[held.x_train[:, 0].astype(int)], held.y_train)
    np.testing.assert_array_equal(y[held.x_test[:, 0].astype(int)], held.y_test)
    if order != "values":
        classes = held.y_test.argmax(1) if held.y_test.ndim == 2 else held.y_test
        shares = np.bincount(classes, minlength=3)
        assert shares.max() - shares.min() <= 1
    # Nothing periodic.
    assert len(set(np.diff(held.x_test[:, 0]))) != 1 or len(held.x_test) < 4


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2, 0.01, 0.999, np.nan])
def test_hold_out_leaves_both_sides(fraction):
    x = np.zeros((9, 1), np.float32)
    y = np.zeros(9, int)
    if fraction == 0.999:  # nine examples, of which eight are held out
        assert len(Dataset(x, y, x, y).hold_out(fraction).x_train) == 1
        return
    with pytest.raises(ValueError, match="both sides"):
        Dataset(x, y, x, y).hold_out(fraction)


@pytest.mark.mnist
def test_mnist():
    path = os.environ.get("TFMIRACLE_MNIST")
    if not path or not pathlib.Path(path).is_file():
        pytest.skip("the environment variable TFMIRACLE_MNIST names no file")
    data = load_dataset(path)
    assert data.x_train.shape == (60_000, 28, 28)
    assert data.x_test.shape == (10_000, 28, 28)
    assert (data.x_train.min(), data.x_train.max()) == (0, 255)
    assert np.bincount(data.y_train).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    held = data.hold_out(1 / 12)
    assert len(held.x_test) == 5000
    share = np.bincount(held.y_test) / np.bincount(data.y_train)
    np.testing.assert_allclose(share, 1 / 12, atol=0.01)
