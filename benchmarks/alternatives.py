"""Ways of training and coding that the package does not have, for `recipes.py`.

    python benchmarks/alternatives.py NAME FLAGS...

is `tfmiracle compress FLAGS...` with one thing done differently.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from tfmiracle import cli
from tfmiracle.codec.layout import WeightLayout
from tfmiracle.coding.minimal_random import EncodedBlocks, MinimalRandomCoder
from tfmiracle.hosts.models import VariationalModel
from tfmiracle.posteriors.block_posterior import BlockPosterior
from tfmiracle.training.callbacks import CompressionCallback

CANDIDATES = 4
JUDGES = 1000  # training images


def two_samples():
    """Each half of a batch sees a sample of the weights of its own."""
    whole = VariationalModel.call

    def call(self, inputs, training=None):
        if not training:
            return whole(self, inputs, training)
        halves = tf.split(inputs, 2)
        return tf.concat([whole(self, half, training) for half in halves], 0)

    VariationalModel.call = call


def flipout():
    """Each image has random signs of its own for the noise of unhashed kernels.

    Wen et al. 2018. Entries that share a weight have to share its noise as well, so
    that this is not possible for hashed kernels.
    """
    whole, draw = VariationalModel.call, BlockPosterior.values
    seeds = keras.random.SeedGenerator(0)
    unhashed, drawn = [], {}

    def call(self, inputs, training=None):
        if training:
            variables = zip(self.coded_variables, self.block_posterior.layout.variables)
            unhashed[:] = [
                id(v) if v.path.endswith("kernel") and coded.hash_factor == 1 else None
                for v, coded in variables
            ]
        try:
            return whole(self, inputs, training)
        finally:
            unhashed.clear()
            drawn.clear()

    def values(self, sample=False):
        found = draw(self, sample)
        if unhashed and sample:
            for name, mean, value in zip(unhashed, draw(self), found, strict=True):
                drawn[name] = mean, value - mean
        return found

    def signs(x):
        shape = tf.concat([tf.shape(x)[:1], [1] * (len(x.shape) - 2), x.shape[-1:]], 0)
        noise = keras.random.uniform(shape, -1, 1, dtype="float32", seed=seeds)
        return tf.cast(tf.sign(noise), x.dtype)

    def perturbed(cls, product):
        plain = cls.call

        def call(self, inputs, training=None):
            if id(self._kernel) not in drawn:
                return plain(self, inputs)
            mean, noise = (tf.cast(x, inputs.dtype) for x in drawn[id(self._kernel)])
            y = product(self, inputs * signs(inputs), noise)
            y = product(self, inputs, mean) + y * signs(y) + self.bias
            return self.activation(y)

        cls.call = call

    VariationalModel.call, BlockPosterior.values = call, values
    perturbed(keras.layers.Dense, lambda self, x, kernel: tf.matmul(x, kernel))
    perturbed(keras.layers.Conv2D, keras.layers.Conv2D.convolution_op)


def largest_kl_first():
    """Each round codes the blocks that then have the largest KL."""
    code = CompressionCallback._round

    def ordered(self, logs):
        kl = [posterior.block_kl().numpy() for posterior in self._posteriors]
        self._todo.sort(key=lambda place: -kl[place[0]][place[1]])
        code(self, logs)

    CompressionCallback._round = ordered


def layer_order():
    """Blocks hold neighbouring effective weights, coded from the first layer on.

    What it writes decodes rightly only where this has been called.
    """
    WeightLayout.slots = property(lambda self: np.arange(self.num_effective))


def best_on_a_batch():
    """Of the four candidates of largest weight, a block takes that of least loss.

    More precisely, of the best ones of four leaves. The loss is that of training
    images under the means of the blocks not coded yet; rounds have images of their own.
    """
    fit, encode = VariationalModel.fit, MinimalRandomCoder.encode
    model = batches = loss = rank = None

    def remembered(self, x, **kwargs):
        nonlocal model, batches, loss
        model, batches = self, iter(x.unbatch().batch(JUDGES))
        loss = tf.function(
            lambda x, y: self.compute_loss(x, y, self(x, training=False), None, False)
        )
        return fit(self, x, **kwargs)

    def select(self, means, maxima, uniforms):
        of_leaves = means is not maxima
        return np.argsort(-maxima, axis=1)[:, rank if of_leaves else 0]

    def best(self, blocks, loc, log_scale):
        nonlocal rank
        found = []
        for place in range(CANDIDATES):
            rank = place
            found.append(encode(self, blocks, loc, log_scale))
        x, y = next(batches)
        chosen = []
        for row, block in enumerate(blocks):
            losses = []
            for candidates in found:
                model.block_posterior.fix([block], candidates.codes[[row]])
                losses.append(float(loss(x, y)))
            best = found[int(np.argmin(losses))]
            model.block_posterior.fix([block], best.codes[[row]])
            chosen.append([values[row] for values in best])
        return EncodedBlocks(*map(np.array, zip(*chosen, strict=True)))

    VariationalModel.fit = remembered
    MinimalRandomCoder._select = select
    MinimalRandomCoder.encode = best


ALTERNATIVES = {
    f.__name__: f
    for f in (two_samples, flipout, largest_kl_first, layer_order, best_on_a_batch)
}


if __name__ == "__main__":
    ALTERNATIVES[sys.argv[1]]()
    sys.exit(cli.main(["compress", *sys.argv[2:]]))
