"""Data sets for classification, by name or from an `.npz` file."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import numpy as np

KERAS_DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Inputs and labels.

    Attributes:
      x_train, x_test: float32 `[n, ...]`; images are `[n, height, width, channels]`.
      y_train, y_test: int64 `[n]`, class numbers from 0.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def num_classes(self) -> int:
        return 1 + int(max(self.y_train.max(), self.y_test.max()))

    def hold_out(self, fraction: float) -> "Dataset":
        """Replaces the test set by a part of the training set.

        For choosing settings, so that the test set stays unseen. The examples are
        taken at even distances: archives are often sorted by class.

        Raises:
          ValueError: if no example would be left on one side.
        """
        position = np.arange(len(self.x_train) + 1) * fraction
        held = np.floor(position[1:]) > np.floor(position[:-1])
        if not 0 < fraction < 1 or not held.any() or held.all():
            raise ValueError(
                "The fraction held out must leave examples on both sides. "
                f"Received: {fraction} of {len(self.x_train)} examples"
            )
        return Dataset(
            self.x_train[~held],
            self.y_train[~held],
            self.x_train[held],
            self.y_train[held],
        )


def load_dataset(name: str | os.PathLike) -> Dataset:
    """Loads a data set.

    Args:
      name: "digits" (1,797 images of 8x8 from scikit-learn, no download; every fifth
        one is for testing), one of `KERAS_DATASETS` (downloaded by Keras at first
        use), or the path of an `.npz` file with arrays x_train, y_train, x_test and
        y_test. Images of unsigned bytes are scaled to 0 ... 1, other inputs are taken
        as they are; images without channels get one.

    Raises:
      ValueError: if the data set is unknown or cannot be had, or its arrays do not fit
        together, or it has values that are not finite.
    """
    if os.fspath(name) == "digits":
        arrays = _digits()
    elif name in KERAS_DATASETS:
        arrays = _keras_dataset(name)
    else:
        arrays = _npz(pathlib.Path(name))
    x_train, y_train, x_test, y_test = arrays
    return Dataset(
        _inputs(name, "x_train", x_train),
        _labels(name, "y_train", y_train, len(x_train)),
        _inputs(name, "x_test", x_test, x_train.shape[1:]),
        _labels(name, "y_test", y_test, len(x_test)),
    )


def _digits():
    from sklearn.datasets import load_digits  # takes a second to import

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) / 16).astype(np.float32)
    test = np.arange(len(x)) % 5 == 4
    return x[~test], y[~test], x[test], y[test]


def _keras_dataset(name):
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:
        raise ValueError(
            f"Keras could not load the data set {name!r}: {error} Without a "
            "connection, give the path of an .npz file instead."
        ) from error
    return x_train, y_train, x_test, y_test


def _npz(path):
    if not path.is_file():
        raise ValueError(
            f"There is no data set {str(path)!r}. Use 'digits', one of "
            f"{', '.join(KERAS_DATASETS)}, or the path of an .npz file."
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [archive[key] for key in _ARRAYS]
    except KeyError as error:
        raise ValueError(
            f"{path} lacks an array: {error}. It needs {', '.join(_ARRAYS)}."
        ) from error
    except Exception as error:  # zipfile and zlib have many of their own
        raise ValueError(f"{path} is no readable .npz file: {error}") from error


def _inputs(name, key, x, shape=None):
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "fiub":
        raise ValueError(
            f"{name}: {key} must be a numeric array of examples, at least one, but is "
            f"{x.dtype} of shape {x.shape}."
        )
    if shape is not None and x.shape[1:] != shape:
        raise ValueError(
            f"{name}: examples in {key} have shape {x.shape[1:]}, but those in x_train "
            f"have {shape}."
        )
    x = x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x
    with np.errstate(over="ignore"):  # to infinity, which is refused below
        x = x.astype(np.float32, copy=False)
    if not np.isfinite(x).all():
        row = np.argwhere(~np.isfinite(x))[0][0]
        raise ValueError(
            f"{name}: {key}[{row}] holds values that are not finite. Remove them first."
        )
    return x[..., np.newaxis] if x.ndim == 3 else x


def _labels(name, key, y, count):
    if y.shape not in ((count,), (count, 1)) or y.dtype.kind not in "iu" or y.min() < 0:
        raise ValueError(
            f"{name}: {key} must hold one class number (an integer from 0) for each of "
            f"the {count} examples, but is {y.dtype} of shape {y.shape}."
        )
    return y.reshape(count).astype(np.int64)


def as_arrays(data):
    """Structures of arrays as tf.data understands them.

    Lists of arrays become tuples, and lists of numbers arrays.
    """
    if isinstance(data, Mapping):
        return {key: as_arrays(part) for key, part in data.items()}
    if isinstance(data, list | tuple) and any(
        isinstance(part, Mapping) or len(getattr(part, "shape", ())) for part in data
    ):
        return tuple(as_arrays(part) for part in data)
    return np.asarray(data)
