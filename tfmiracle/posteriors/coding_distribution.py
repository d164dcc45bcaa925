"""The coding distribution P, whose scales train until the first block is coded."""

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.layout import WeightLayout
from tfmiracle.codec.prior import Prior
from tfmiracle.posteriors.tensors import float_weight

# exp() of a log scale stays a normal float32, with room for the products it enters.
MAX_LOG_SCALE = 60.0


class CodingDistribution(tf.Module):  # which checkpoints look into
    """P = N(nu, rho**2) of the weights of a layout.

    There is one rho for each group of variables. The trained variable holds log rho /
    log_scale_rate, so that an optimizer that normalizes its steps (Adam) moves log rho
    by log_scale_rate times its learning rate.

    Args:
      owner: the layer that the variables are weights of.
      layout: where each weight has its place.
      prior: gives the means nu.
      log_scale_rate: see `Recipe`.
    """

    def __init__(
        self,
        owner: keras.Layer,
        layout: WeightLayout,
        prior: Prior,
        log_scale_rate: float,
    ):
        super().__init__()
        self.layout, self.prior = layout, prior
        self._rate = float(log_scale_rate)
        self._raw_log_scale = float_weight(
            owner, "log_coding_scale", (layout.num_scales,)
        )
        # rho once it is final, 0 before: what is coded is scaled by it, so it must not
        # move any more when the first block is coded.
        self._final_scale = float_weight(
            owner, "final_scale", (layout.num_scales,), trainable=False
        )
        self.loc = prior.loc(layout)

    def log_scale(self) -> tf.Tensor:
        """log rho, float32[num_scales]."""
        final = tf.convert_to_tensor(self._final_scale)
        is_final = final > 0
        return tf.where(
            is_final,
            tf.math.log(tf.where(is_final, final, 1.0)),
            tf.clip_by_value(
                self._rate * tf.convert_to_tensor(self._raw_log_scale),
                -MAX_LOG_SCALE,
                MAX_LOG_SCALE,
            ),
        )

    def scale(self) -> tf.Tensor:
        """rho, float32[num_scales]."""
        final = tf.convert_to_tensor(self._final_scale)
        return tf.where(final > 0, final, tf.exp(self.log_scale()))

    @property
    def is_final(self) -> bool:
        return bool(np.all(keras.ops.convert_to_numpy(self._final_scale) > 0))

    def finalize(self) -> None:
        """Fixes rho.

        Raises:
          ValueError: if it is not finite.
        """
        scale = keras.ops.convert_to_numpy(self.scale())
        if not np.all(np.isfinite(scale)):
            raise ValueError(
                "A coding scale is not finite; look for divergence in training."
            )
        self._final_scale.assign(scale)

    def start(
        self, values: np.ndarray, warm: bool, log_scale: float, warm_log_scale: float
    ) -> np.ndarray:
        """Starts rho anew, see `BlockPosterior.initialize`.

        Args:
          values: float32[num_blocks, block_size], the weights relative to nu.

        Returns:
          float64[num_scales], rho.
        """
        start = np.full(self.layout.num_scales, log_scale, np.float64)
        if warm:
            index = self.layout.scale_index_of_slot().reshape(-1)
            mask = self.layout.mask().reshape(-1)
            count = np.bincount(index, mask, len(start))
            power = np.bincount(
                index, np.square(values.reshape(-1), dtype=np.float64), len(start)
            )
            some = power > 0
            start[some] = 0.5 * np.log(power[some] / count[some]) + warm_log_scale
        start = np.clip(start, -MAX_LOG_SCALE, MAX_LOG_SCALE)
        self._raw_log_scale.assign(start / self._rate)
        self._final_scale.assign(np.zeros(len(start)))
        return np.exp(start)
