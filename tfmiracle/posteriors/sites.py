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

from tfmiracle.posteriors.mean_kl import kl_from_standardized

_MAX_STEPS = 60
_PRECISE = 1e-6  # of log a, beside its rounding
_FAR = -1e30  # log precision of what has no site


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
    return _standardized(log_ae, m)


def _standardized(log_ae, m):
    return m * tf.sigmoid(log_ae), -0.5 * tf.nn.softplus(log_ae)


def _kl(log_ae, m):
    kl = kl_from_standardized(*_standardized(log_ae, m))
    return tf.reduce_sum(kl, -1, keepdims=True)


def _slope(log_ae, m):
    """Derivative of the KL of each weight by log a."""
    share, rest = tf.sigmoid(log_ae), tf.sigmoid(-log_ae)
    return tf.square(share) * (0.5 + tf.square(m) * rest)


@tf.custom_gradient
def _log_temperature(m, log_e, kappa):
    """Solves KL = kappa for log a."""
    log_a = _solve(m, log_e, kappa)

    def gradient(upstream):
        share, slope = tf.sigmoid(log_a + log_e), _slope(log_a + log_e, m)
        by_kappa = upstream / tf.reduce_sum(slope, -1, keepdims=True)
        return -by_kappa * tf.square(share) * m, -by_kappa * slope, by_kappa

    return log_a, gradient


def _solve(m, log_e, kappa):
    """Newton's method between bounds.

    In log KL over log a, which is a power law for small a and bends down only.
    """
    log_kappa = tf.math.log(kappa)
    # The power law is above the KL, and the site of the largest precision below.
    power = tf.square(tf.exp(log_e)) * (0.25 + 0.5 * tf.square(m))
    low = 0.5 * (log_kappa - tf.math.log(tf.reduce_sum(power, -1, keepdims=True)))
    high = tf.maximum(low, 2.0 * kappa + math.log(4.0))

    def unsolved(step, low, high, log_a, change):
        del low, high
        near = _PRECISE * tf.maximum(1.0, tf.abs(log_a))
        return (step < _MAX_STEPS) & tf.reduce_any(tf.abs(change) > near)

    def newton(step, low, high, log_a, change):
        kl = _kl(log_a + log_e, m)
        slope = tf.reduce_sum(_slope(log_a + log_e, m), -1, keepdims=True)
        below = kl < kappa
        low, high = tf.where(below, log_a, low), tf.where(below, high, log_a)
        found = log_a + (log_kappa - tf.math.log(kl)) * kl / slope
        inside = (found >= low) & (found <= high)
        found = tf.where(inside, found, 0.5 * (low + high))
        return step + 1, low, high, found, found - log_a

    start = tf.constant(0), low, high, low, tf.ones_like(low)
    return tf.while_loop(unsolved, newton, start)[3]
