"""Mean-KL parameterization of a Gaussian: the mathematics, in TensorFlow only.

A coding distribution `P = Normal(nu, rho)` and a variational distribution
`Q = Normal(loc, scale)` enter only through the standardized pair

    m = (loc - nu) / rho,    log_ratio = log(scale / rho).

Mean-KL gives the pair as a function of an unconstrained `tau` and of the budget
`kappa = KL(Q || P)` in nats:

    m = sqrt(2 kappa) tanh(tau),
    v - log(v) = 1 + delta,    v = (scale / rho)^2 <= 1,    delta = 2 kappa sech(tau)^2.

The second line is the paper's `v = -W(-exp(m^2 - 2 kappa - 1))` without its
cancellation. As a function of `delta` (or `kappa`) it has a square-root singularity
at the prior, `delta = 0`; as a function of `s = sqrt(2 delta)` it is analytic there.
Hence everything below works with `s` and `log_ratio`, never with `delta` and `v`.

References:
  Lin, Flamich and Hernandez-Lobato (2023), "Minimal Random Code Learning with
    Mean-KL Parameterization", eq. (2)-(3), (6) and appendix B.
  Flamich, Markou and Hernandez-Lobato (2022), "Fast Relative Entropy Coding with
    A* Coding".
"""

import math
from collections.abc import Sequence

import tensorflow as tf

__all__ = [
    "kl_from_standardized",
    "log_scale_ratio",
    "log_scale_ratio_pade",
    "mean_kl_standardized",
]

TensorLike = tf.types.experimental.TensorLike

# d log(scale / rho) / ds = -s / (2 (1 - v)) = -s / 2 + exp(-s^2 / 2) q(s). q is smooth,
# from q(0) = -1/2 to -s / 2e far out, and the factor before it lets one fit serve the
# whole range, up to an s where nothing is left of it beside s: in float32 a polynomial
# (8e-8 of the derivative) with the exact q'(0) = 1/3, in float64 a rational function
# without poles (7e-17), both minimax.
_SLOPE_FLOAT32 = (
    6.0,
    (
        -0.5,
        0.3333333432674408,
        -0.2916523814201355,
        0.15909357368946075,
        -0.08316860347986221,
        0.03637909144163132,
        -0.013318026438355446,
        0.0038145326543599367,
        -0.0007412746781483293,
        8.312262070830911e-05,
        -4.007493316748878e-06,
    ),
    None,
)
_SLOPE_FLOAT64 = (
    8.5,
    (
        -0.5,
        0.2854515153801816,
        -0.197171044804942,
        0.06836001010502409,
        -0.02546270907135444,
        0.005161935464798765,
        -0.0010047883879292466,
        -6.0879968341658246e-05,
        6.267132421922559e-05,
        -3.038594634885967e-05,
        7.138317207055752e-06,
        -1.494468234512873e-06,
        1.7852382494198358e-07,
        -1.6862773103821795e-08,
    ),
    (
        1.0,
        0.09576363590630824,
        -0.12514881978623876,
        0.04250383084691711,
        0.014943200847541936,
        -0.004810638224556702,
        0.00028162923902694443,
        0.00041774842535760896,
        -6.82108359989695e-05,
        -1.5104131085834152e-06,
        4.626992084466407e-06,
        -7.873959031487155e-07,
        8.751358532444536e-08,
    ),
)
# 1 + W = t (1 + t / 2 + ...) / (1 + 5 t / 6 + ...), numerator and denominator.
_PADE = ((1.0, 1.0 / 2.0, 13.0 / 720.0), (1.0, 5.0 / 6.0, 103.0 / 720.0))
# exp(x) - 1 - x = x^2 / 2 * sum_n 2 x^n / (n + 2)!
_EXPM1_MINUS = tuple(2.0 / math.factorial(n + 2) for n in range(18))


def log_scale_ratio(s: TensorLike) -> tf.Tensor:
    """Returns `log(scale / rho)` as a function of `s = 2 sqrt(kappa) sech(tau)`.

    This is half of the solution `u <= 0` of `exp(u) - 1 - u = s^2 / 2`, that is eq.
    (3) of Lin et al. (2023) on the principal branch of Lambert's W. One exponential
    and one polynomial (in float64, two), no iteration. The gradient is that of the
    equation, `-s / (2 (1 - v))` with `v = (scale / rho)^2`, and is -1/2 at `s = 0`;
    higher derivatives are those of the approximant of this expression (relative error
    of the second: 4e-6 in float32, 2e-14 in float64).

    Relative error: of the value at most 4e-7 in float32, of the gradient 2.5e-7, of
    either 6e-16 in float64.
    bfloat16 and float16 are computed in float32. The absolute error of the value is
    the relative error of `scale`: 2e-6 for `kappa = 20` nats in float32.

    Args:
      s: Floating-point tensor of any shape, non-negative, in sqrt(nats).

    Returns:
      Tensor of the shape and dtype of `s`, at most zero, and finite for every
      finite `s`: where the true value, about `-s^2 / 4`, is not representable it is
      the lowest finite number (the gradient stays the true one).

    Raises:
      TypeError: If `s` is not floating-point.
    """
    s = tf.convert_to_tensor(s, name="s")
    if not s.dtype.is_floating:
        raise TypeError(f"s must be floating-point, got {s.dtype.name}")
    lowest = s.dtype.min

    @tf.custom_gradient
    def evaluate(s):
        slope = log_scale_slope(s)
        # -(s^2 / 2 + 1 - v) / 2, arranged so that s^2 overflows last.
        half = -0.5 * s
        value = tf.maximum(half * (-0.5 / slope - half), lowest)
        return value, lambda dy: dy * slope

    if s.dtype.size < 4:
        return tf.cast(evaluate(tf.cast(s, tf.float32)), s.dtype)
    return evaluate(s)


def log_scale_slope(s: tf.Tensor) -> tf.Tensor:
    """Returns the derivative of `log_scale_ratio`, `-s / (2 (1 - v))`; -1/2 at `s = 0`.

    In float32 or float64.
    """
    double = s.dtype == tf.float64
    end, numerator, denominator = _SLOPE_FLOAT64 if double else _SLOPE_FLOAT32
    near = tf.minimum(s, end)
    q = polynomial(near, numerator)
    if denominator:
        q /= polynomial(near, denominator)
    half = -0.5 * s
    return half + tf.exp(half * near) * q


def log_scale_ratio_pade(s: TensorLike) -> tf.Tensor:
    """The paper's [3/2] Pade approximation of `log_scale_ratio`, for comparison.

    Lin et al. (2023), appendix B, approximate W as a rational function of
    `t = sqrt(2 e x + 2)`. With `x = -exp(-1 - s^2 / 2)` both `t` and `1 + W` can be
    written without cancellation, which is all this function changes. The gradient
    is that of the approximation.

    Exact to rounding near `s = 0`, but the relative error of `v` passes 1e-6 at
    `delta = s^2 / 2 = 0.09` nats, 1e-3 at 1.2 and 6 % at 4.5; from `delta = 7.23`
    (`s = 3.802`) the approximation of `v` is negative and the result is NaN. A weight
    with a budget of `kappa` nats reaches up to `delta = 2 kappa`.

    Args:
      s: float32 or float64 tensor of any shape, non-negative, in sqrt(nats).

    Returns:
      Tensor of the shape and dtype of `s`.
    """
    s = tf.convert_to_tensor(s, name="s")
    # t = s sqrt((1 - exp(-delta)) / delta) is smooth at zero and does not underflow
    # with delta. From s = 3.802 on the result is NaN: the bound only prevents overflow.
    s = tf.minimum(s, 8.0)
    delta = 0.5 * s * s
    tiny = delta < 1e-30
    one = tf.ones_like(delta)
    delta = tf.where(tiny, one, delta)
    t = s * tf.sqrt(tf.where(tiny, one, -tf.math.expm1(-delta) / delta))
    one_minus_v = t * polynomial(t, _PADE[0]) / polynomial(t, _PADE[1])
    return 0.5 * tf.math.log1p(-one_minus_v)


def mean_kl_standardized(
    tau: TensorLike, sqrt_kappa: TensorLike
) -> tuple[tf.Tensor, tf.Tensor]:
    """Maps Mean-KL parameters to standardized mean and log scale.

    Eq. (6) and (3) of Lin et al. (2023): the Gaussian `Q` with

        loc = nu + rho m,    scale = rho exp(log_ratio)

    has `KL(Q || Normal(nu, rho)) = kappa`. It takes the square root of the budget
    because the map is smooth in it, also at zero; `kappa` itself has an infinite
    derivative there. From a log budget, `sqrt_kappa = exp(0.5 * log_kappa)`.

    Args:
      tau: Floating-point tensor. Any finite value.
      sqrt_kappa: Square root of the KL budget in nats, non-negative, of the dtype of
        `tau` and broadcastable with it.

    Returns:
      m: `(loc - nu) / rho`, of the broadcast shape.
      log_ratio: `log(scale / rho)`, at most zero, of the broadcast shape. Values and
        gradients of both are finite as long as `4 kappa` is representable.
    """
    tau = tf.convert_to_tensor(tau, name="tau")
    sqrt_kappa = tf.convert_to_tensor(
        sqrt_kappa, dtype_hint=tau.dtype, name="sqrt_kappa"
    )
    tanh, sech = _tanh_sech(tau)
    return math.sqrt(2.0) * sqrt_kappa * tanh, log_scale_ratio(2.0 * sqrt_kappa * sech)


def kl_from_standardized(m: TensorLike, log_ratio: TensorLike) -> tf.Tensor:
    """Returns `KL(Normal(loc, scale) || Normal(nu, rho))` in nats, elementwise.

    `(m^2 + exp(2 log_ratio) - 1 - 2 log_ratio) / 2`, accurate to a few ulp of its
    arguments also near zero, for either sign of `log_ratio`: what `float32` pairs
    from `mean_kl_standardized` lose is 1e-6 of the budget, down to 1e-30 nats. (With
    float32 `scale`s it would be their rounding, 6e-8, over `log_ratio`, some 1e-3 for
    a budget of 1e-8 nats. Hence the pair.)

    Args:
      m: `(loc - nu) / rho`, floating-point tensor.
      log_ratio: `log(scale / rho)`, of the dtype of `m` and broadcastable with it.

    Returns:
      Non-negative tensor of the broadcast shape.
    """
    m = tf.convert_to_tensor(m, name="m")
    log_ratio = tf.convert_to_tensor(log_ratio, dtype_hint=m.dtype, name="log_ratio")
    return 0.5 * (m * m + _expm1_minus(2.0 * log_ratio))


@tf.custom_gradient
def _tanh_sech(x):
    """Returns `tanh(x), sech(x)`, with no overflow and exact gradients for any `x`."""
    e = tf.exp(-tf.abs(x))
    tanh, sech = tf.tanh(x), 2.0 * e / (1.0 + e * e)
    # Not 1 - tanh^2, which has lost half of its digits at |x| = 4.
    return (tanh, sech), lambda dt, ds: sech * (dt * sech - ds * tanh)


@tf.custom_gradient
def _expm1_minus(x):
    """Returns `exp(x) - 1 - x`, which cancels near zero where it is `x^2 / 2`."""
    near = tf.clip_by_value(x, -1.0, 1.0)
    terms = _EXPM1_MINUS if x.dtype == tf.float64 else _EXPM1_MINUS[:11]
    near = 0.5 * near * near * polynomial(near, terms)
    y = tf.where(tf.abs(x) < 1.0, near, tf.math.expm1(x) - x)
    return y, lambda dy: dy * tf.math.expm1(x)


def polynomial(x: tf.Tensor, coefficients: Sequence[float]) -> tf.Tensor:
    """Evaluates a polynomial given constant term first."""
    y = coefficients[-1]
    for c in coefficients[-2::-1]:
        y = c + x * y
    return y
