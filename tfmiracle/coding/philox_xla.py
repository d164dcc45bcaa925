"""Philox as XLA compiles it: the words of `tfmiracle.codec.philox`, for encoders."""

import tensorflow as tf

from tfmiracle.codec import philox


def calls(key, domain, stream, index, count):
    """Returns the first `count` calls of Philox for some candidates.

    `index` is uint32 `[..., N]`, the result complex128 `[count, ..., N]`: `philox4x32`.
    """
    return tf.map_fn(
        lambda g: philox4x32((index, tf.cast(g, tf.uint32), stream, domain), key),
        tf.range(count),
        fn_output_signature=tf.complex128,
    )


def philox4x32(counter, key):
    """Returns the four words of `philox.philox4x32` in one complex128.

    As four outputs, XLA would compute all rounds four times over. Words 0 and 1 are
    the bits of the real part, low half first, words 2 and 3 those of the imaginary.
    """
    half, mask = (tf.constant(x, tf.uint64) for x in (32, 0xFFFFFFFF))
    multipliers = [tf.constant(x, tf.uint64) for x in philox.MULTIPLIERS]
    increments = [tf.constant(x, tf.uint32) for x in philox.KEY_INCREMENTS]
    x0, x1, x2, x3 = (tf.cast(x, tf.uint64) for x in counter)
    k0, k1 = tf.unstack(key)
    for _ in range(philox.ROUNDS):
        # The masks change nothing, but say that a 32-bit multiplication will do.
        p0, p1 = (x0 & mask) * multipliers[0], (x2 & mask) * multipliers[1]
        x0 = tf.bitwise.right_shift(p1, half) ^ x1 ^ tf.cast(k0, tf.uint64)
        x2 = tf.bitwise.right_shift(p0, half) ^ x3 ^ tf.cast(k1, tf.uint64)
        x1, x3 = p1 & mask, p0 & mask
        k0, k1 = k0 + increments[0], k1 + increments[1]
    pairs = (
        low | tf.bitwise.left_shift(high, half) for low, high in ((x0, x1), (x2, x3))
    )
    return tf.complex(*(tf.bitcast(pair, tf.float64) for pair in pairs))
