"""Threads that coders share: XLA runs the loops of a pass on one core."""

import concurrent.futures
import functools
import os

import tensorflow as tf

from tfmiracle.environment import usable_cores


def on_gpu() -> bool:
    """Whether passes run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def workers() -> int:
    """How many passes run side by side."""
    return 1 if on_gpu() else usable_cores()


@functools.cache
def pool(workers: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads for all calls: to start them takes longer than to encode small blocks."""
    return concurrent.futures.ThreadPoolExecutor(workers)


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=pool.cache_clear)
