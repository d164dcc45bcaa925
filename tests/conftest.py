"""Fixtures that several test modules share."""

import pytest

from tfmiracle.environment import configure

configure()  # before TensorFlow is imported


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
