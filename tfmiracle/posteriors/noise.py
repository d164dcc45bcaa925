"""The noise of training."""

import keras
import tensorflow as tf

# Between the seeds of two replicas; a prime, far from what users count in.
_APART = 1_640_531_527


class NoiseSeed(keras.random.SeedGenerator):
    """Seeds that differ between the replicas of a strategy, which Keras' do not."""

    def next(self, ordered=True):
        seed = super().next(ordered)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica * _APART, tf.zeros_like(replica)])
