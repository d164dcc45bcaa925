"""The variational step against the deterministic one, and `fit` against a bare loop."""

import functools

import keras
import numpy as np
import tensorflow as tf
from timing import best_of_each

import tfmiracle
from tfmiracle.studies.architectures import lenet5
from tfmiracle.training.data import training_batches
from tfmiracle.training.run import STEPS_PER_EXECUTION

BATCH_SIZE = 200
STEPS = 160
WARM_UP = 40  # which do not count: a call of `fit` takes a moment to start
RULES = {"conv2/kernel": "hash=2", "dense1/kernel": "hash=64"}  # the paper's


def images() -> tuple[np.ndarray, np.ndarray]:
    """Noise: the time does not depend on what the images show."""
    rng = np.random.default_rng(0)
    count = 40 * BATCH_SIZE
    x = rng.random((count, 28, 28, 1), np.float32)
    return x, rng.integers(0, 10, count)


def compiled(model: keras.Model) -> keras.Model:
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    return model


def fitted(model, data):
    """As `tfmiracle.compress` does it."""
    model = compiled(model)
    batches = training_batches(data, tfmiracle.Recipe(batch_size=BATCH_SIZE))
    return lambda steps: model.fit(
        batches("coding", 0), steps_per_epoch=steps, shuffle=False, verbose=0
    )


def looped(model, data):
    """The same work in one compiled loop, with nothing of `fit`."""
    model = compiled(model)
    model.optimizer.build(model.trainable_variables)
    x, y = (tf.constant(a) for a in data)

    @tf.function
    def run(steps):
        for _ in tf.range(steps):
            rows = tf.random.uniform([BATCH_SIZE], 0, len(x), tf.int32, seed=0)
            with tf.GradientTape() as tape:
                outputs = model(tf.gather(x, rows), training=True)
                losses = [model.loss(tf.gather(y, rows), outputs), *model.losses]
                loss = tf.add_n(losses)
            variables = [v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, variables)
            model.optimizer.apply(gradients, model.trainable_variables)

    return lambda steps: run(tf.constant(steps))


def variational(parameterization):
    return tfmiracle.VariationalModel(lenet5(), parameterization, rules=RULES)


def step(parameterization: str) -> dict:
    """A training step of LeNet-5 with the paper's hashing, under `fit`."""
    data = images()
    plain, bare = "the network itself", "bare loop of the same step"
    runs = {
        "ours": fitted(variational(parameterization), data),
        plain: fitted(lenet5(), data),
        "hashed, deterministic": fitted(variational("deterministic"), data),
        bare: looped(variational(parameterization), data),
    }
    times = best_of_each(
        {
            (name, steps): functools.partial(run, steps)
            for name, run in runs.items()
            for steps in (WARM_UP, WARM_UP + STEPS)
        }
    )
    times = {
        name: (times[name, WARM_UP + STEPS] - times[name, WARM_UP]) / STEPS
        for name in runs
    }
    return {
        "ours": times.pop("ours"),
        "peers": times,
        "targets": {plain: 1 / 1.2, bare: 1 / 1.1},
    }


ROWS = {
    "training step of LeNet-5, batch 200, Mean-KL": lambda: step("mean_kl"),
    "the same, Mean-Var": lambda: step("mean_var"),
}
