"""What the numbers of a run depend on beside its settings.

This module imports neither TensorFlow nor Keras by itself.
"""

import os
import pathlib
import platform

import numpy as np

import tfmiracle


def configure() -> None:
    """Sets what makes TensorFlow faster on a CPU, where nothing else is set.

    It has to be called before TensorFlow is imported. The command line does so.
    """
    # By itself TensorFlow takes oneDNN only on processors with instructions for neural
    # networks; on others it halves the time of a step all the same.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    # With AVX-512, XLA by itself uses vectors of half its width, and coding takes up to
    # a quarter longer. All versions of TensorFlow that are supported know this flag.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_prefer_vector_width=512")


def usable_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment() -> dict[str, dict]:
    """ "versions" of what computes, and the "machine" that it computes on.

    With another one, sums are rounded otherwise, and results differ in detail.
    """
    import keras
    import tensorflow as tf

    threads = tf.config.threading.get_intra_op_parallelism_threads()
    devices = [
        tf.config.experimental.get_device_details(device).get("device_name", "")
        for device in tf.config.list_physical_devices("GPU")
    ]
    return {
        "versions": {
            "tfmiracle": tfmiracle.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": _processor(),
            "cores": usable_cores(),
            "threads": threads or usable_cores(),
            "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "not set"),
            "xla_flags": os.environ.get("XLA_FLAGS", "not set"),
            **({"accelerators": devices} if devices else {}),
        },
    }


def _processor():
    """Model of the processor, where the system tells it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(": ")[1] for x in lines if x.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()
