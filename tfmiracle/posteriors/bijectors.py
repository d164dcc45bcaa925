"""Mean-KL parameterization as a TensorFlow Probability bijector."""

import math

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

from tfmiracle.posteriors.mean_kl import (
    kl_from_standardized,
    log_scale_ratio,
    log_scale_slope,
    mean_kl_standardized,
)

__all__ = ["MeanKLBijector"]

tfb = tfp.bijectors


class MeanKLBijector(tfb.AutoCompositeTensorBijector):
    """Maps `(tau, kappa)` to the `(loc, scale)` of a Gaussian of KL `kappa`.

    The bijector acts on *parameters*: the last axis, of size 2, holds `tau` and the
    budget `kappa` in nats on one side, `loc` and `scale` on the other, with

        kappa = KL(Normal(loc, scale) || Normal(nu, rho)),
        loc = nu + rho sqrt(2 kappa) tanh(tau),    0 < scale < rho,

    eq. (2), (3) and (6) of Lin, Flamich and Hernandez-Lobato (2023), after Flamich,
    Markou and Hernandez-Lobato (2022). `nu` and `rho` are the constructor's `loc` and
    `scale`. A budget and a mean leave two Gaussians, one narrower and one wider than
    the coding distribution; this is the narrower one, so the domain is
    `kappa > 0` and the image `scale < rho`.

    ```python
    mean_kl = MeanKLBijector(loc=0.0, scale=0.1)
    loc, scale = tf.unstack(mean_kl.forward([[0.5, 2.0], [-1.0, 0.7]]), axis=-1)
    tfd.Normal(loc, scale).kl_divergence(tfd.Normal(0.0, 0.1))  # [2.0, 0.7]
    ```

    In float32, `scale` rounds to `rho` for `kappa sech(tau)^2` under about 1e-15 nats
    and the pair is no longer invertible; the relative error of an inverted `kappa` is
    about 5e-7 / sqrt(kappa) below one nat. `tfmiracle.posteriors.mean_kl` has the same
    map on `log(scale / rho)`, without this loss.
    """

    def __init__(
        self,
        loc=0.0,
        scale=1.0,
        validate_args: bool = False,
        name: str = "mean_kl",
    ):
        """Creates the bijector for the coding distribution `Normal(loc, scale)`.

        Args:
          loc: Mean `nu` of the coding distribution: floating-point tensor, variable
            or number. Numbers are float32, and `forward` takes the same dtype.
          scale: Standard deviation `rho` of the coding distribution, positive. `loc`
            and `scale` broadcast against each other and against `tau`.
          validate_args: Whether to check `scale` and the arguments of the methods, at
            some cost. Without it, invalid arguments give NaN or wrong values.
          name: Name of the operations.
        """
        parameters = dict(locals())
        with tf.name_scope(name) as scope:
            typed = [x.dtype for x in (loc, scale) if hasattr(x, "dtype")]
            dtype = tf.as_dtype(typed[0]) if typed else tf.float32
            self._loc = _tensor_or_variable(loc, dtype, "loc")
            self._scale = _tensor_or_variable(scale, dtype, "scale")
            super().__init__(
                forward_min_event_ndims=1,
                dtype=dtype,
                validate_args=validate_args,
                parameters=parameters,
                name=scope,
            )

    @classmethod
    def _parameter_properties(cls, dtype):
        return {
            "loc": tfp.util.ParameterProperties(),
            "scale": tfp.util.ParameterProperties(
                default_constraining_bijector_fn=lambda: tfb.Softplus(
                    low=np.finfo(tf.as_dtype(dtype).as_numpy_dtype).eps
                )
            ),
        }

    @property
    def loc(self):
        """Mean `nu` of the coding distribution."""
        return self._loc

    @property
    def scale(self):
        """Standard deviation `rho` of the coding distribution."""
        return self._scale

    def _forward(self, x):
        tau, kappa = self._split(x)
        rho = tf.convert_to_tensor(self.scale)
        m, log_ratio = mean_kl_standardized(tau, tf.sqrt(kappa))
        loc = self.loc + rho * m
        scale = tf.broadcast_to(rho * tf.exp(log_ratio), tf.shape(loc))
        return tf.stack([loc, scale], axis=-1)

    def _inverse(self, y):
        rho = tf.convert_to_tensor(self.scale)
        loc, scale = tf.unstack(y, num=2, axis=-1)
        with tf.control_dependencies(self._image_assertions(scale, rho)):
            m = (loc - self.loc) / rho
            log_ratio = tf.math.log(scale / rho)
        # At m = 0 the KL is kappa sech(tau)^2, and asinh of the ratio is tau. The usual
        # atanh(m / sqrt(2 kappa)) is infinite where its argument rounds to one.
        central = kl_from_standardized(tf.zeros_like(m), log_ratio)
        tau = tf.asinh(m * tf.math.rsqrt(2.0 * central))
        return tf.stack([tau, central + 0.5 * tf.square(m)], axis=-1)

    def _forward_log_det_jacobian(self, x):
        # The determinant is rho^2 sqrt(v) sech(tau)^2 sqrt(2 kappa) / (1 - v), with
        # v = exp(2 log_ratio). As 1 - v = -s / (2 slope(s)) and s = 2 sqrt(kappa)
        # sech(tau), kappa cancels, and with it the singularities at kappa = 0.
        tau, kappa = self._split(x)
        log_sech = -tfp.math.log_cosh(tau)
        s = 2.0 * tf.sqrt(kappa) * tf.exp(log_sech)
        return (
            2.0 * tf.math.log(self.scale)
            + log_scale_ratio(s)
            + tf.math.log(-log_scale_slope(s))
            + log_sech
            + 0.5 * math.log(2.0)
        )

    def _split(self, x):
        tau, kappa = tf.unstack(x, num=2, axis=-1)
        if self.validate_args:
            positive = tf.debugging.assert_positive(
                kappa, message="`kappa`, a KL divergence in nats, must be positive"
            )
            with tf.control_dependencies([positive]):
                kappa = tf.identity(kappa)
        return tau, kappa

    def _image_assertions(self, scale, rho):
        if not self.validate_args:
            return []
        return [
            tf.debugging.assert_positive(scale, message="`scale` must be positive"),
            tf.debugging.assert_less(
                scale,
                rho,
                message=(
                    "`scale` must be less than that of the coding distribution: the "
                    "wider Gaussian of the same mean and KL is not parameterized"
                ),
            ),
        ]

    def _parameter_control_dependencies(self, is_init):
        if not self.validate_args or is_init == _is_variable(self.scale):
            return []
        return [
            tf.debugging.assert_positive(
                self.scale,
                message="Argument `scale` of the coding distribution must be positive",
            )
        ]


def _is_variable(value) -> bool:
    """Whether a parameter is read anew in each call."""
    return isinstance(value, tf.Variable | tfp.util.DeferredTensor)


def _tensor_or_variable(value, dtype, name):
    if not _is_variable(value):
        return tf.convert_to_tensor(value, dtype=dtype, name=name)
    if value.dtype != dtype:
        raise TypeError(f"`{name}` has dtype {value.dtype}, not {dtype} as the other.")
    return value
