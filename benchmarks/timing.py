"""Times, the limits of the machine, and the same work as a plain C loop."""

import concurrent.futures
import ctypes
import functools
import math
import os
import pathlib
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import tfmiracle

CORES = len(os.sched_getaffinity(0))


def best(function: Callable, repeats: int = 5) -> float:
    """Shortest time of a call in ms; see `best_of_each`."""
    return best_of_each({"": function}, repeats)[""]


def best_of_each(functions: dict[str, Callable], repeats: int = 3) -> dict[str, float]:
    """Shortest times of a call in ms, after two to warm up.

    In turns, so that a slow minute of the machine is shared. What takes less than 20 ms
    is called several times in a row, for the mean of these; caches are warm then.
    """
    for function in functions.values():
        function()
    calls = {
        name: math.ceil(20 / milliseconds(function))
        for name, function in functions.items()
    }
    rounds = [
        {name: milliseconds(functions[name], n) for name, n in calls.items()}
        for _ in range(repeats)
    ]
    return {name: min(times[name] for times in rounds) for name in functions}


def milliseconds(function: Callable, calls: int = 1) -> float:
    """Mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return 1e3 * (time.perf_counter() - start) / calls


def peak_mb() -> float:
    """The largest memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@functools.cache
def bytes_per_ms() -> float:
    """Bandwidth of memory: bytes read and written when all cores copy."""
    blocks = np.ones((CORES, 1 << 26), np.float32)
    targets = np.empty_like(blocks)
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        time = best(lambda: list(pool.map(np.copyto, targets, blocks)))
    return 2 * blocks.nbytes / time


@functools.cache
def operations_per_ms() -> float:
    """Multiplications and additions in a large float32 matrix product."""
    import tensorflow as tf

    a = tf.random.stateless_normal([2048, 2048], [0, 0])
    return 2 * 2048**3 / best(lambda: tf.matmul(a, a).numpy())


@functools.cache
def words_per_ms() -> float:
    """Words of Philox that a C loop generates on one core."""
    count = 1 << 20
    return 4 * count / best(lambda: loops().generate(count, 1, 2, 3))


@functools.cache
def loops() -> ctypes.CDLL:
    """`loops.c`, compiled for this machine."""
    source = pathlib.Path(__file__).with_name("loops.c")
    flags = ["-O3", "-march=native", "-ffast-math", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        loops, library = (pathlib.Path(folder, f"loops.{end}") for end in ("o", "so"))
        subprocess.run(["gcc", *flags, "-c", source, "-o", loops], check=True)
        # Linked with -ffast-math, it would change rounding in the whole process.
        subprocess.run(["gcc", "-shared", loops, "-o", library, "-lm"], check=True)
        return ctypes.CDLL(library)


def machine() -> dict:
    """Processor, cores and versions."""
    import keras
    import tensorflow as tf
    import tensorflow_probability as tfp

    info = pathlib.Path("/proc/cpuinfo")
    info = info.read_text() if info.exists() else ""
    found = [
        re.search(rf"^{name}\s*: (.*)", info, re.MULTILINE)
        for name in ("model name", "cpu family", "model")
    ]
    # Servers of several generations have the same name.
    processor = ", ".join(match[0].replace("\t", "") for match in found if match)
    processor = processor or "unknown"
    modules = (tfmiracle, keras, tf, tfp, np)
    versions = {module.__name__: module.__version__ for module in modules}
    return {"processor": processor, "cores": CORES, **versions}
