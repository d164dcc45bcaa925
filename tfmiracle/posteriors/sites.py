"""The sites parameterization of Gaussians: the mathematics, in TensorFlow only.

A weight has a site, a pseudo-observation of it at `m` with precision `e`, both relative
to its coding distribution P = N(0, 1). With the temperature `a` of its block,

    Q is proportional to P times Normal(m, 1 / (a e)),

which has the precision `1 + a e` and the mean `share m`, `share = a e / (1 + a e)`.
(The word is that of expectation propagation, Minka 2001.) The KL of the block,

    sum of (log(1 + a e) - share + share^2 m^2) / 2,

grows with `a` from 0 without bound, so that for any sites there is one temperature at
which it is the budget.
"""

import math

import tensorflow as tf

from tfmiracle.posteriors.mean_kl import polynomial

_MAX_STEPS = 60
_SMALL, _ROUNDING = 3e-4, 1e-6  # steps in log a, the second relative to it
_FAR = -1e30  # log precision of what has no site
# log(1 + t) - t / (1 + t) is t^2 times this, up to t = 1 / 8.
_SERIES = tuple((-1) ** k * (1 - 1 / k) for k in range(2, 12))
_LOG_SMALL = -math.log(8)


def sites_standardized(
    m: tf.Tensor, log_precision: tf.Tensor, kappa: tf.Tensor, mask: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Maps sites to the standardized mean and log scale of Q.

    Gradients are those of the solution of the equation, by implicit differentiation.

    Args:
      m: float32 `[..., size]`, (site - nu) / rho, up to 1e12 in magnitude.
      log_precision: float32 `[..., size]`, log e, finite. What all of a block have in
        common cancels.
      kappa: float32 `[..., 1]`, positive, the budget of a block in nats.
      mask: bool `[..., size]`: False has no site, and Q = P.

    Returns:
      m_q: `(loc - nu) / rho`, like `m`.
      log_ratio: `log(scale / rho)`, at most zero. The KL of each block is `kappa`, but
        for rounding: a few 1e-6 of it.
    """
    m = tf.where(mask, m, 0.0)
    log_e = tf.where(mask, log_precision, _FAR)
    log_e -= tf.stop_gradient(tf.reduce_max(log_e, -1, keepdims=True))
    log_ae = _log_temperature(m, log_e, kappa) + log_e
    return m * tf.sigmoid(log_ae), -0.5 * tf.nn.softplus(log_ae)


def _kl_and_slope(log_ae, m):
    """The KL of each weight, its derivative by log a, and share."""
    t = tf.exp(-tf.abs(log_ae))
    near, far = 1 / (1 + t), t / (1 + t)
    share = tf.where(log_ae > 0, near, far)
    rest = tf.where(log_ae > 0, far, near)
    entropy = tf.maximum(log_ae, 0.0) + tf.math.log1p(t) - share
    # Both terms are about t for a small t = a e, and cancel.
    entropy = tf.where(log_ae > _LOG_SMALL, entropy, t * t * polynomial(t, _SERIES))
    square, mean_square = tf.square(share), tf.square(m)
    kl = 0.5 * (entropy + square * mean_square)
    return kl, square * (0.5 + mean_square * rest), share


@tf.custom_gradient
def _log_temperature(m, log_e, kappa):
    """Solves KL = kappa for log a."""
    log_a = _solve(m, log_e, kappa)

    def gradient(upstream):
        _, slope, share = _kl_and_slope(log_a + log_e, m)
        by_kappa = upstream / _sum(slope)
        return -by_kappa * tf.square(share) * m, -by_kappa * slope, by_kappa

    return log_a, gradient


def _sum(x):
    """Of a block. As a product, which XLA does not fuse: terms stay vectorized."""
    return tf.tensordot(x, tf.ones([x.shape[-1], 1]), 1)


def _solve(m, log_e, kappa):
    """Newton's method between bounds.

    In log KL over log a, which is a power law for small a and bends down only.
    """
    log_kappa = tf.math.log(kappa)
    # The power law is above the KL, and the site of the largest precision below.
    power = tf.square(tf.exp(log_e)) * (0.25 + 0.5 * tf.square(m))
    low = 0.5 * (log_kappa - tf.math.log(_sum(power)))
    high = tf.maximum(low, 2.0 * kappa + math.log(4.0))

    def unsolved(step, low, high, log_a, solved):
        return (step < _MAX_STEPS) & ~tf.reduce_all(solved)

    def newton(step, low, high, log_a, solved):
        kl, slope = map(_sum, _kl_and_slope(log_a + log_e, m)[:2])
        below = kl < kappa
        low, high = tf.where(below, log_a, low), tf.where(below, high, log_a)
        found = log_a + (log_kappa - tf.math.log(kl)) * kl / slope
        inside = (found >= low) & (found <= high)
        found = tf.where(inside, found, 0.5 * (low + high))
        change = tf.abs(found - log_a)
        # What a small step of Newton's leaves is about its square.
        solved = inside & (change < _SMALL) | (change < _ROUNDING * tf.abs(log_a))
        return step + 1, low, high, found, solved

    start = tf.constant(0), low, high, low, tf.zeros_like(low, bool)
    return tf.while_loop(unsolved, newton, start)[3]
