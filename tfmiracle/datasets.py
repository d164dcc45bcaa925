"""Data sets, by name or from an `.npz` file."""

import dataclasses
import os
import pathlib

import numpy as np

KERAS_DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Inputs and labels, as they are in an archive.

    Attributes:
      x_train, x_test: `[n, ...]`, numbers of any dtype.
      y_train, y_test: `[n, ...]`, likewise: class numbers from 0, one-hot rows, or
        values to predict.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of an example; images of height and width have one channel."""
        shape = self.x_train.shape[1:]
        return (*shape, 1) if len(shape) == 2 else shape

    @property
    def num_classes(self) -> int:
        """Number of classes; a ValueError if the labels are not of classes."""
        if self.y_train.ndim == 2 and self.y_train.shape[1] > 1:
            return self.y_train.shape[1]
        numbers = class_numbers(self.y_train), class_numbers(self.y_test)
        if any(found is None for found in numbers):
            raise ValueError(
                "Built-in networks tell classes apart: labels must be class numbers "
                "from 0 or one-hot rows. To predict values, pass a network of your own."
            )
        return 1 + int(max(found.max() for found in numbers))

    def hold_out(self, fraction: float) -> "Dataset":
        """Replaces the test set by a part of the training set.

        For choosing settings, so that the test set stays unseen. The examples are
        taken at random, always the same, the same share of each class.

        Raises:
          ValueError: if no example would be left on one side.
        """
        position = np.arange(len(self.x_train) + 1) * fraction
        chosen = np.floor(position[1:]) > np.floor(position[:-1])
        if not 0 < fraction < 1 or not chosen.any() or chosen.all():
            raise ValueError(
                "The fraction held out must leave examples on both sides. "
                f"Received: {fraction} of {len(self.x_train)} examples"
            )
        order = np.random.default_rng(0).permutation(len(self.x_train))
        classes = class_numbers(self.y_train)
        if classes is not None:
            order = order[np.argsort(classes[order], kind="stable")]
        held = np.empty(len(order), bool)
        held[order] = chosen  # at even distances, where examples are sorted by class
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
        y_test. Arrays are taken as they are; `task_of` fits them to a network.

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
    x = (x.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
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
    return _finite(name, key, x)


def _labels(name, key, y, count):
    if y.dtype.kind in "USO":
        raise ValueError(
            f"{name}: {key} holds text. Give class numbers from 0, as "
            "`numpy.unique(labels, return_inverse=True)[1]` makes them."
        )
    if y.shape[:1] != (count,) or y.dtype.kind not in "fiub" or not y.size:
        raise ValueError(
            f"{name}: {key} must hold a class number (an integer from 0), a one-hot "
            f"row or values for each of the {count} examples, but is {y.dtype} of "
            f"shape {y.shape}."
        )
    return _finite(name, key, y)


def _finite(name, key, array):
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):  # to infinity
        wrong = ~np.isfinite(array.astype(np.float32, copy=False))
    if wrong.any():
        raise ValueError(
            f"{name}: {key}[{np.argwhere(wrong)[0][0]}] holds values that are not "
            "finite. Remove them first."
        )
    return array


def class_numbers(y: np.ndarray) -> np.ndarray | None:
    """Class numbers of labels that are such, or one-hot rows; None of others.

    Args:
      y: `[n]`, `[n, 1]` or `[n, classes]` of any dtype.

    Returns:
      int64 `[n]`, from 0, or None.
    """
    if y.dtype.kind not in "fiub":
        return None
    if y.ndim == 2 and y.shape[1] > 1:
        one_hot = np.all((y == 0) | (y == 1)) and np.all(np.sum(y, 1) == 1)
        return np.argmax(y, 1) if one_hot else None
    y = y[:, 0] if y.shape[1:] == (1,) else y
    if y.ndim != 1 or np.any(y < 0) or np.any(y != np.floor(y)):
        return None
    return y.astype(np.int64)
