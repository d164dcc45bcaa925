"""Fixtures that several test modules share."""

import sys

import pytest

from tfmiracle.environment import configure

configure()  # before TensorFlow is imported


@pytest.fixture(scope="session", autouse=True)
def untuned():
    """Whoever deletes an iterator waits up to a minute for the thread that tunes it."""
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        iterate, options = tf.data.Dataset.__iter__, tf.data.Options()
        options.autotune.enabled = False
        tf.data.Dataset.__iter__ = lambda data: iterate(data.with_options(options))


@pytest.fixture
def eager():
    """Without tracing and XLA, which cost seconds a model."""
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def quick(eager, monkeypatch):
    """As `eager`, but the coder is compiled, which pays from the second block."""
    import tensorflow as tf

    from tfmiracle.coding.minimal_random import MinimalRandomCoder
    from tfmiracle.coding.trellis import TrellisCoder

    def compiled(encode):
        def run(*arguments):
            tf.config.run_functions_eagerly(False)
            try:
                return encode(*arguments)
            finally:
                tf.config.run_functions_eagerly(True)

        return run

    for coder in (MinimalRandomCoder, TrellisCoder):
        monkeypatch.setattr(coder, "encode", compiled(coder.encode))


@pytest.fixture
def few_steps(quick, monkeypatch):
    """As `quick`, and `compress` takes no more steps than it is told."""
    from tfmiracle.training import run

    monkeypatch.setattr(run, "STEPS_PER_EXECUTION", 1)


@pytest.fixture
def seeded():
    """Random numbers of Keras that are the same in each test."""
    import keras

    keras.utils.set_random_seed(1)


@pytest.fixture
def kept_policy():
    """The dtype policy is afterwards what it was."""
    import keras

    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
