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

# s / (1 - v) = s + exp(-s^2 / 2) q(s). q is smooth, from q(0) = 1 to s / e far out, and
# the factor before it lets one fit serve the whole range, up to an s where nothing is
# left of it beside s: in float32 a polynomial (8e-8 of s / (1 - v)) with the exact
# q'(0) = -2/3, in float64 a rational function without poles (7e-17), both minimax.
_RATE_FLOAT32 = (
    6.0,
    (
        1.0,
        -0.6666666865348816,
        0.583304762840271,
        -0.3181871473789215,
        0.16633720695972443,
        -0.07275818288326263,
        0.02663605287671089,
        -0.007629065308719873,
        0.0014825493562966585,
        -0.00016624524141661823,
        8.014986633497756e-06,
    ),
    None,
)
_RATE_FLOAT64 = (
    8.5,
    (
        1.0,
        -0.5709030307603632,
        0.394342089609884,
        -0.13672002021004817,
        0.05092541814270888,
        -0.01032387092959753,
        0.0020095767758584932,
        0.00012175993668331649,
        -0.00012534264843845118,
        6.077189269771934e-05,
        -1.4276634414111504e-05,
        2.988936469025746e-06,
        -3.5704764988396716e-07,
        3.372554620764359e-08,
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
        rate = log_variance_rate(s)
        # -(s^2 / 2 + 1 - v) / 2, arranged so that s^2 overflows last.
        half = -0.5 * s
        value = tf.maximum(half * (1.0 / rate - half), lowest)
        return value, lambda dy: -0.5 * dy * rate

    if s.dtype.size < 4:
        return tf.cast(evaluate(tf.cast(s, tf.float32)), s.dtype)
    return evaluate(s)


def log_variance_rate(s: tf.Tensor) -> tf.Tensor:
    """Returns `s / (1 - v) = -d log(v) / ds`, in float32 or float64; 1 at `s = 0`."""
    double = s.dtype == tf.float64
    end, numerator, denominator = _RATE_FLOAT64 if double else _RATE_FLOAT32
    near = tf.minimum(s, end)
    q = _horner(near, numerator)
    if denominator:
        q /= _horner(near, denominator)
    return s + tf.exp(-0.5 * s * near) * q


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
    one_minus_v = t * _horner(t, _PADE[0]) / _horner(t, _PADE[1])
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
    near = 0.5 * near * near * _horner(near, terms)
    y = tf.where(tf.abs(x) < 1.0, near, tf.math.expm1(x) - x)
    return y, lambda dy: dy * tf.math.expm1(x)


def _horner(x: tf.Tensor, coefficients: Sequence[float]) -> tf.Tensor:
    """Evaluates a polynomial given constant term first."""
    y = coefficients[-1]
    for c in coefficients[-2::-1]:
        y = c + x * y
    return y
