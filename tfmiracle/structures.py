"""Structures of arrays, as Keras and tf.data take them."""

from collections.abc import Mapping

import numpy as np


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
