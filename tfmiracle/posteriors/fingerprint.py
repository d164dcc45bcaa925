"""A weight that stands for what the values of other weights depend on."""

import hashlib
import json

import numpy as np
import tensorflow as tf

from tfmiracle.keras_internals import CheckedVariable

# Between the numbers that bytes of a fingerprint become.
_APART = 256


class Fingerprint(CheckedVariable):
    """Refuses weights of a posterior with another layout or other options.

    It is checked in every way that weights come in: `set_weights`, files of weights,
    checkpoints of TensorFlow.

    Args:
      meaning: all that the weights depend on, as JSON can say it.
    """

    def __init__(self, meaning):
        digest = hashlib.sha256(json.dumps(meaning).encode()).digest()
        # In the middle between two bytes, so that means of equal ones may be rounded.
        self._own = np.frombuffer(digest, np.uint8, 8) * np.int32(_APART) + _APART // 2
        super().__init__(
            self._own,
            name="fingerprint",
            dtype="int32",
            trainable=False,
            check=self.check,
        )

    def check(self, value) -> None:
        """Raises a ValueError if `value` is the fingerprint of something else."""
        # Values inside of a compiled function are not known.
        known = not tf.is_tensor(value) or hasattr(value, "numpy")
        if known and np.any(np.asarray(value) // _APART != self._own // _APART):
            owner = self.path.rpartition("/")[0]
            raise ValueError(
                f"The weights given to {owner!r} are of another posterior: its "
                "layout or options (`seed`, `block_size`, `kl_bits`, `parameterization`"
                ", `coder`, `prior`, `rules`, rates) are not those of this one, in "
                "which the weights would mean other values. Build both with the same "
                "arguments."
            )
