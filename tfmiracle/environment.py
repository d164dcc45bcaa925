"""What the numbers of a run depend on beside its settings."""

import os
import pathlib
import platform

import keras
import numpy as np
import tensorflow as tf

import tfmiracle
from tfmiracle.coder import usable_cores


def environment() -> dict[str, dict]:
    """ "versions" of what computes, and the "machine" that it computes on.

    With another one, sums are rounded otherwise, and results differ in detail.
    """
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
