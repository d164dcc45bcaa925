"""Times the kernels against the naive way and against the limits of the machine.

    python benchmarks/kernels.py [--json=FILE]

Every figure is a ratio within this one run; single times depend on the machine. The
limits are measured on the spot: a large matrix product and a large copy.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tfmiracle
from tfmiracle import codebook
from tfmiracle.coder import MinimalRandomCoder
from tfmiracle.mean_kl import log_scale_ratio

tfd = tfp.distributions
BITS = 20


def best(function, repeats=5):
    """Shortest time of a call in seconds, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def limits():
    a = tf.random.normal([2048, 2048])
    seconds = best(lambda: tf.matmul(a, a).numpy())
    block = np.ones(1 << 27, np.float32)
    target = np.empty_like(block)
    copy = best(lambda: np.copyto(target, block))
    return {
        "matmul_gflops": 2 * 2048**3 / seconds / 1e9,
        "copy_gbytes_per_s": 2 * block.nbytes / copy / 1e9,
    }


def variance(jit):
    """Log sigma of a million weights and its gradient, against TFP's Lambert W."""
    s = tf.constant(np.geomspace(1e-3, 8, 1 << 20), tf.float32)

    def printed(s):
        x = -tf.exp(-0.5 * s * s - 1.0)
        return 0.5 * tf.math.log(-tfp.math.lambertw(x))

    def timed(kernel):
        @tf.function(jit_compile=jit)
        def run(s):
            with tf.GradientTape() as tape:
                tape.watch(s)
                y = kernel(s)
            return tape.gradient(y, s)

        return best(lambda: run(s).numpy())

    ours, peer = timed(log_scale_ratio), timed(printed)
    return {"ms": 1e3 * ours, "peer_ms": 1e3 * peer, "times_faster": peer / ours}


def naive_encode(loc, scale, seed):
    p = tfd.MultivariateNormalDiag(tf.zeros_like(loc), tf.ones_like(scale))
    q = tfd.MultivariateNormalDiag(loc, scale)
    z = p.sample(1 << BITS, seed=seed)
    return tfd.Categorical(q.log_prob(z) - p.log_prob(z)).sample(seed=seed)


def encode(block_size, codebook_name, blocks):
    rng = np.random.default_rng(0)
    loc = rng.normal(0, 0.8, (blocks, block_size)).astype(np.float32)
    log_scale = -np.abs(rng.normal(0, 0.5, loc.shape)).astype(np.float32)
    coder = MinimalRandomCoder(BITS, 1, codebook_name, "sample")
    ours = best(lambda: coder.encode(np.arange(blocks), loc, log_scale), 3) / blocks
    naive = tf.function(naive_encode)
    inputs = tf.constant(loc[0]), tf.constant(np.exp(log_scale[0]))
    peer = best(lambda: naive(*inputs, tf.constant([1, 2])).numpy(), 3)
    result = {"ms": 1e3 * ours, "peer_ms": 1e3 * peer, "times_faster": peer / ours}
    if codebook_name == "shared":
        # z^2 and z, multiplied and added, for every candidate and dimension
        operations = 2 * 2 * block_size * 2**BITS
        result["gflops"] = operations / ours / 1e9
    return result


def decode(num_weights):
    blocks = -(-num_weights // 20)
    indices = np.arange(blocks) * 7919 % (1 << BITS)
    seconds = best(
        lambda: codebook.candidates(1, np.arange(blocks), indices, 20, False)
    )
    return {"ms": 1e3 * seconds, "weights_per_s": num_weights / seconds}


def import_time(statement):
    command = [sys.executable, "-c", statement]
    return best(lambda: subprocess.run(command, check=True, capture_output=True), 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "tfmiracle": tfmiracle.__version__,
            **limits(),
        },
        "log sigma of 1 M weights, graph": variance(False),
        "log sigma of 1 M weights, XLA": variance(True),
        "encode a block, own codebook, D = 20": encode(20, "per_block", 4),
        "encode a block, own codebook, D = 32": encode(32, "per_block", 4),
        "encode a block of 64, shared codebook, D = 20": encode(20, "shared", 64),
        "decode 24,830 weights": decode(24_830),
        "decode 10 M weights": decode(10_000_000),
        "import numpy": {"ms": 1e3 * import_time("import numpy")},
        "import tfmiracle.decoder": {
            "ms": 1e3 * import_time("import tfmiracle.decoder")
        },
    }
    for name, figure in figures.items():
        text = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in figure.items()
        )
        print(f"{name}: {text}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
