"""Fixtures that several test modules share."""

import pytest


@pytest.fixture
def eager():
    """Without tracing and XLA, which cost seconds a model."""
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)
