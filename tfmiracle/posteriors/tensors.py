"""The layout as tensors, and what is compiled of the posterior."""

import weakref

import keras
import numpy as np
import tensorflow as tf

from tfmiracle.codec.layout import WeightLayout


def float_weight(
    layer: keras.Layer, name: str, shape, trainable: bool = True, value: float = 0.0
) -> keras.Variable:
    """Adds a float32 weight that no dtype policy of a network casts."""
    return layer.add_weight(
        name=name,
        shape=shape,
        initializer=keras.initializers.Constant(value),
        trainable=trainable,
        autocast=False,
    )


def compiled(method):
    """Compiles `method(trained, state)` with XLA, and its gradient by `trained`.

    Sampling and hashing are many small element-wise operations, which XLA fuses. The
    network around them stays outside: on a CPU, XLA slows convolutions down.

    The gradient computes the method anew. Differentiated by TensorFlow, the compiled
    function would return a copy of all that the gradient needs, its own arguments and
    constants included, and that takes longer. There is no gradient by `state`.
    """
    method = weakref.WeakMethod(method)  # TensorFlow never forgets a custom gradient

    @tf.function(jit_compile=True)
    def forward(trained, state):
        return method()(trained, state)

    @tf.function(jit_compile=True)
    def backward(trained, state, upstream):
        with tf.GradientTape() as tape:
            tape.watch(trained)
            result = method()(trained, state)
        return tape.gradient(result, trained, upstream)

    def call(trained, state):
        @tf.custom_gradient
        def differentiable(*trained):  # these, or there are no second derivatives
            def gradient(*upstream):
                # What a network gathers from, as an Embedding does, has a sparse
                # gradient, for each size of which XLA would compile.
                upstream = [tf.convert_to_tensor(u) for u in upstream]
                return backward(trained, state, upstream)

            return forward(trained, state), gradient

        return differentiable(*trained)

    return call


# The gradients that tf.gather and tf.split have inside a function make XLA compile a
# training step anew each time. Those written here do not.


def of_slot(scale: tf.Tensor, scale_index: tf.Tensor) -> tf.Tensor:
    """[num_scales] -> the scale of each slot."""

    @tf.custom_gradient
    def gather(scale):
        def gradient(upstream):
            return tf.math.unsorted_segment_sum(upstream, scale_index, scale.shape[0])

        return tf.gather(scale, scale_index), gradient

    return gather(scale)


def signed_gather(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """[n] -> x[index] where the index is not negative, -x[-1 - index] elsewhere."""
    minus = index < 0
    place = tf.where(minus, -1 - index, index)

    @tf.custom_gradient
    def gather(x):
        def gradient(upstream):
            signed = tf.where(minus, -upstream, upstream)
            return tf.math.unsorted_segment_sum(signed, place, x.shape[0])

        values = tf.gather(x, place)
        return tf.where(minus, -values, values), gradient

    return gather(x)


class LayoutTensors:
    """The layout as tensors, with gradients that need no scatter where none is due."""

    def __init__(self, layout: WeightLayout, nu: np.ndarray | None = None):
        self._nu = None if nu is None else tf.constant(nu)
        self.mask = tf.constant(layout.mask())
        self.scale_index = tf.constant(layout.scale_index_of_slot())
        self._slots = tf.constant(layout.slots, tf.int32)
        of_slot = np.full(layout.num_blocks * layout.block_size, layout.num_effective)
        of_slot[layout.slots] = np.arange(layout.num_effective)
        self._weight_of_slot = tf.constant(of_slot, tf.int32)
        self._variables = layout.variables
        # Sign and place of each entry in one number, see `signed_gather`.
        self._hashing = {
            i: tf.constant(np.where(sign > 0, index, -1 - index), tf.int32)
            for i, v in enumerate(layout.variables)
            if v.hash_factor > 1
            for index, sign in [layout.hashing(i)]
        }

    def weights(self, z: tf.Tensor, rho: tf.Tensor) -> tf.Tensor:
        """nu + rho z, `[num_blocks, block_size]`."""
        return rho * z if self._nu is None else self._nu + rho * z

    def to_effective(self, blocks: tf.Tensor) -> tf.Tensor:
        # An argument, although only the gradient needs it: SavedModel refuses gradients
        # that capture what the forward pass does not have.
        @tf.custom_gradient
        def permute(flat, weight_of_slot):
            def gradient(upstream):
                padded = tf.concat([upstream, tf.zeros([1], upstream.dtype)], 0)
                return tf.gather(padded, weight_of_slot), None

            return tf.gather(flat, self._slots), gradient

        return permute(tf.reshape(blocks, [-1]), self._weight_of_slot)

    def expand(self, blocks: tf.Tensor) -> list[tf.Tensor]:
        sizes = [v.effective_size for v in self._variables]

        @tf.custom_gradient
        def split(flat):
            return tf.split(flat, sizes), lambda *upstream: tf.concat(upstream, 0)

        parts = split(self.to_effective(blocks))
        for i, index in self._hashing.items():
            parts[i] = signed_gather(parts[i], index)
        return [
            tf.reshape(part, v.shape)
            for part, v in zip(parts, self._variables, strict=True)
        ]
