"""The variational step against the deterministic one, and `fit` against a bare loop."""

import functools

import keras
import numpy as np
import tensorflow as tf
from timing import best_of_each

import tfmiracle
from tfmiracle.architectures import lenet5

BATCH_SIZE = 200
STEPS = 40  # in an epoch
EPOCHS = 4
STEPS_PER_EXECUTION = 20
RULES = {"conv2/kernel": "hash=2", "dense1/kernel": "hash=64"}  # the paper's


def images() -> tuple[np.ndarray, np.ndarray]:
    """Noise: the time does not depend on what the images show."""
    rng = np.random.default_rng(0)
    count = BATCH_SIZE * STEPS
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
    model = compiled(model)
    return lambda epochs: model.fit(
        *data, batch_size=BATCH_SIZE, epochs=epochs, verbose=0
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

    return lambda epochs: run(tf.constant(epochs * STEPS))


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
    # What a call of `fit` takes to start does not count.
    times = best_of_each(
        {
            (name, epochs): functools.partial(run, epochs)
            for name, run in runs.items()
            for epochs in (1, 1 + EPOCHS)
        }
    )
    times = {
        name: (times[name, 1 + EPOCHS] - times[name, 1]) / (EPOCHS * STEPS)
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
