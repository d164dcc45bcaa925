"""What a network is for: its inputs, its labels, and how it is judged."""

import dataclasses
import re

import keras
import numpy as np

from tfmiracle.datasets import Dataset, class_numbers

_TAKE_IDS = (
    keras.layers.Embedding,
    keras.layers.CategoryEncoding,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
)
_SCALE = (
    *_TAKE_IDS,
    keras.layers.Discretization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.Normalization,
    keras.layers.RMSNormalization,
    keras.layers.Rescaling,
    keras.layers.UnitNormalization,
)
# As in `x / 255`.
_ARITHMETIC = ("Add", "Divide", "Multiply", "Subtract", "TrueDivide")
# Losses of classes -> the labels they take.
_ONE_OF_MANY = {
    "sparse_categorical_crossentropy": "numbers",
    "categorical_crossentropy": "rows",
    "categorical_focal_crossentropy": "rows",
    "categorical_hinge": "rows",
    "kl_divergence": "rows",
}
# Losses of yes or no for each output -> the output above which it is yes.
_YES_OR_NO = {
    "binary_crossentropy": 0.5,
    "binary_focal_crossentropy": 0.5,
    "hinge": 0.0,
    "squared_hinge": 0.0,
}
_IN_PYTHON = "For others use `tfmiracle.compress` in Python"


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set as a network takes it, and how the network is judged on it.

    Attributes:
      data: the arrays to train and evaluate with.
      kind: "classes" (one of many: the largest output counts), "yes_or_no" (for each
        output), or "values" (regression).
      threshold: for "yes_or_no" the output above which it is yes.
      done: what was done to an array so that it fits, as "array: what".
    """

    data: Dataset
    kind: str
    threshold: float
    done: list[str]

    def metrics(self) -> list:
        """Metrics for `compile`, beside the loss: "accuracy", except for values."""
        if self.kind == "classes":
            return ["accuracy"]
        return [self._accuracy] if self.kind == "yes_or_no" else []

    @property
    def _accuracy(self):
        def accuracy(y, scores):
            right = keras.ops.equal(scores > self.threshold, y > 0.5)
            return keras.ops.mean(keras.ops.cast(right, "float32"), axis=-1)

        return accuracy

    def judge(self, net: keras.Model) -> dict[str, float]:
        """The "accuracy" of a network on the test set.

        For values, "mean_squared_error" and "mean_absolute_error".
        """
        y, scores = self.data.y_test, _predict(net, self.data.x_test)
        if self.kind == "classes":
            y = y if y.ndim == 1 else np.argmax(y, -1)
            return {"accuracy": float(np.mean(np.argmax(scores, -1) == y))}
        if self.kind == "yes_or_no":
            right = (scores > self.threshold) == (y > 0.5)
            return {"accuracy": float(np.mean(right))}
        difference = scores.astype(np.float64) - y
        return {
            "mean_squared_error": float(np.mean(difference**2)),
            "mean_absolute_error": float(np.mean(np.abs(difference))),
        }


def task_of(net: keras.Model, data: Dataset, loss=None) -> Task:
    """Fits a data set to a network.

    Inputs get, or lose, axes of size 1 as the network takes them. Images of unsigned
    bytes are scaled to 0 ... 1 if the network has nothing that does so. Token ids stay
    integers. Labels are class numbers or one-hot rows, as the loss takes them; 0 and 1
    for one unit; or values.

    Args:
      net: the network, of one input and one output.
      data: the arrays of an archive.
      loss: what it is trained with. If it is not known, labels and the shape of the
        output tell what the network is for.

    Raises:
      ValueError: if the data set does not fit the network.
    """
    takes, gives = _shape_of(net, "input_shape"), _shape_of(net, "output_shape")
    if takes is None or gives is None:
        raise ValueError(
            "the network must have one input and one output of known shape. "
            f"{_IN_PYTHON}"
        )
    done = []
    x_train, x_test = (
        _inputs(key, getattr(data, key), net, takes[1:], done)
        for key in ("x_train", "x_test")
    )
    y, kind, threshold = _labels(data, gives, loss, done)
    y_train, y_test = np.split(y, [len(x_train)])
    data = Dataset(x_train, y_train, x_test, y_test)
    if kind == "yes_or_no" and loss is None:
        scores = _predict(net, x_test)
        threshold = 0.5 if scores.min() >= 0 and scores.max() <= 1 else 0.0
        done.append(f"y_test: outputs above {threshold:g} count as class 1")
    return Task(data, kind, threshold, done)


def _shape_of(net, name):
    """Shape of the only input or output, or None if there are more."""
    shape = getattr(net, name, None)
    if isinstance(shape, list) and len(shape) == 1:
        (shape,) = shape
    known = isinstance(shape, tuple) and all(isinstance(n, int | None) for n in shape)
    return shape if known else None


def _predict(net, x):
    """Outputs, also of a network of a fixed batch size."""
    size = _shape_of(net, "input_shape")[0]
    padding = np.repeat(x[:1], -len(x) % (size or 1), axis=0)
    x_padded = np.concatenate([x, padding]) if len(padding) else x
    outputs = net.predict(x_padded, batch_size=size or 500, verbose=0)
    return (outputs[0] if isinstance(outputs, list) else outputs)[: len(x)]


# Inputs.


def _inputs(key, x, net, shape, done):
    what = []
    x = _shaped(x, shape, what)
    path = list(_until_weights(net))
    whole = x.dtype.kind in "iub"
    into = (getattr(net, "inputs", None) or [None])[0]
    if whole and (
        any(isinstance(step, _TAKE_IDS) for step in path)
        or (into is not None and not keras.backend.is_float_dtype(into.dtype))
    ):
        fits = x.min() >= -(2**31) and x.max() < 2**31
        x = x.astype(np.int32 if fits else np.int64)
    elif x.dtype != np.uint8:
        x = x.astype(np.float32, copy=False)
    elif any(_scales(step) for step in path):
        x = x.astype(np.float32)
        what.append("uint8 not scaled, the network does it itself")
    elif not _takes_images(shape, path):
        x = x.astype(np.float32)
        what.append("uint8 not scaled, these are no images")
    else:
        x = x.astype(np.float32) / np.float32(255)
        what.append("uint8 images scaled to 0 ... 1")
    if what:
        done.append(f"{key}: {', '.join(what)}")
    return x


def _shaped(x, expected, what):
    """Adds or drops an axis of size 1 if that makes the examples fit."""

    def fits(shape):
        return len(shape) == len(expected) and all(
            e in (None, n) for e, n in zip(expected, shape)
        )

    found = x.shape[1:]
    if fits(found):
        return x
    if fits((*found, 1)):
        what.append("a channel axis added")
        return x[..., np.newaxis]
    if found[-1:] == (1,) and fits(found[:-1]):
        what.append("the last axis, of size 1, dropped")
        return x[..., 0]
    raise ValueError(
        f"the network takes inputs of shape {tuple(expected)}, but the data set has "
        f"{found}"
    )


def _operations(net):
    """In the order of computation, those of nested models in their place."""
    for step in getattr(net, "operations", None) or net.layers:
        while isinstance(step, keras.layers.TimeDistributed):
            step = step.layer
        if isinstance(step, keras.Model):
            yield from _operations(step)
        else:
            yield step


def _until_weights(net):
    """What the input meets, up to the first layer with weights."""
    for step in _operations(net):
        yield step
        if getattr(step, "weights", None):
            return


def _scales(step):
    if isinstance(step, keras.layers.BatchNormalization):
        # Its statistics tell: means above 1 are not those of images of 0 ... 1.
        return np.max(keras.ops.convert_to_numpy(step.moving_mean)) > 1
    if isinstance(step, keras.Layer):
        return isinstance(step, _SCALE)
    return type(step).__name__ in _ARITHMETIC


def _takes_images(shape, path):
    """Whether it takes [height, width, channels], or [height, width] to flatten."""
    first = next((s for s in path if not isinstance(s, keras.layers.InputLayer)), None)
    flattens = isinstance(first, keras.layers.Flatten | keras.layers.Reshape)
    return len(shape) > 2 or (len(shape) == 2 and flattens)


# Labels.


def _labels(data, output_shape, loss, done):
    """Returns labels of both sets, the kind of the task and its threshold."""
    y_train, y_test = (
        y[:, 0] if y.shape[1:] == (1,) else y for y in (data.y_train, data.y_test)
    )
    if y_train.shape[1:] != y_test.shape[1:]:
        raise ValueError(
            f"y_train has labels of shape {y_train.shape[1:]}, y_test of "
            f"{y_test.shape[1:]}; make them alike"
        )
    y, shape = np.concatenate([y_train, y_test]), output_shape[1:]
    name, threshold = _name_and_threshold(loss)
    kind, form = _kind(y, shape, name)
    if kind == "values":
        return _as_values(y, shape, name), kind, threshold
    if len(shape) != 1:
        raise ValueError(
            f"the network's output of shape {output_shape} needs a label for each "
            f"position, and the command line takes one for each example. {_IN_PYTHON}"
        )
    numbers, units = class_numbers(y), shape[0]
    if kind == "yes_or_no" and units == 1:
        if numbers is not None and y.ndim == 2 and y.shape[1] == 2:
            done.append("y_train, y_test: one-hot rows turned into 0 and 1")
            y = numbers
        if y.ndim != 1 or not _are_binary(y):
            raise ValueError(
                "one unit tells two classes apart, and its labels must be 0 and 1, but "
                f"are {_description(y)}. For more classes take a unit for each and "
                "sparse_categorical_crossentropy"
            )
        return y.astype(np.float32)[:, np.newaxis], kind, threshold
    if form == "numbers":
        if numbers is None:
            raise ValueError(
                "the labels must be class numbers (integers from 0) or one-hot rows"
                f"{f' for the loss {name}' if name else ''}, but are "
                f"{_description(y)}. To predict values, compile the network with a "
                "loss such as 'mse'"
            )
        if y.ndim > 1:
            done.append("y_train, y_test: one-hot rows turned into class numbers")
        _check_classes(y.shape[1] if y.ndim > 1 else numbers.max() + 1, output_shape)
        return numbers, kind, threshold
    if y.ndim == 1 and numbers is not None:
        _check_classes(numbers.max() + 1, output_shape)
        done.append("y_train, y_test: class numbers turned into one-hot rows")
        y = np.eye(units, dtype=np.float32)[numbers]
    return _as_values(y, shape, name), kind, threshold


def _kind(y, shape, name):
    """The kind of the task, and for classes the form of labels."""
    if name in _ONE_OF_MANY:
        return "classes", _ONE_OF_MANY[name]
    units = shape[0] if len(shape) == 1 else None
    rows = y.ndim == 2 and y.shape[1] == units and units > 1
    if rows and class_numbers(y) is not None:
        return "classes", "numbers" if name is None else "rows"
    if name in _YES_OR_NO:
        soft = np.all((y >= 0) & (y <= 1)) and not _are_binary(y)
        return "values" if soft or units is None else "yes_or_no", "rows"
    if name is not None:
        return "values", None
    # What a file is for can be seen from the labels alone.
    if units == 1:
        two = y.ndim == 2 and y.shape[1] == 2 and class_numbers(y) is not None
        return "yes_or_no" if two or (y.ndim == 1 and _are_binary(y)) else "values", ""
    if rows:
        if _are_binary(y):
            return "yes_or_no", "rows"
        shares = np.all(y >= 0) and np.allclose(y.sum(1), 1, atol=1e-3)
        return ("classes", "rows") if shares else ("values", None)
    if units is not None or y.shape[1:] != shape:
        return "classes", "numbers"
    return "values", None


def _name_and_threshold(loss):
    """The name of a loss as a function, and its threshold for yes."""
    if isinstance(loss, dict):
        loss = list(loss.values())
    if isinstance(loss, list | tuple):
        (loss,) = loss
    if loss is None:
        return None, 0.5
    loss = keras.losses.get(loss)
    is_object = isinstance(loss, keras.losses.Loss)
    name = type(loss).__name__ if is_object else getattr(loss, "__name__", "loss")
    name = name.replace("KLD", "KL_D")
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if is_object and loss.get_config().get("from_logits"):
        return name, 0.0
    return name, _YES_OR_NO.get(name, 0.5)


def _description(y):
    least, most = float(y.min()), float(y.max())
    return f"{y.dtype} of shape {y.shape[1:]}, from {least:g} to {most:g}"


def _are_binary(y):
    return np.all((y == 0) | (y == 1)) or np.all((y == -1) | (y == 1))


def _as_values(y, shape, name):
    """Labels as float32 of the shape of the output."""
    if y.ndim == 1 and shape == (1,):
        y = y[:, np.newaxis]
    if len(y.shape) != len(shape) + 1 or any(
        n not in (None, found) for n, found in zip(shape, y.shape[1:])
    ):
        raise ValueError(
            f"the network's outputs have shape {tuple(shape)}"
            f"{f', and the loss {name} wants labels like them' if name else ''}, but "
            f"the labels have shape {y.shape[1:]}. For class numbers compile it with "
            f"sparse_categorical_crossentropy. {_IN_PYTHON}"
        )
    return y.astype(np.float32)


def _check_classes(count, output_shape):
    if count > output_shape[-1]:
        raise ValueError(
            f"the network's output of shape {output_shape} cannot tell the {count} "
            "classes of the data set apart"
        )
