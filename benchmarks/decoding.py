"""Decoding against reading the plain weights, and what an import costs."""

import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from timing import best_of_each

from tfmiracle.codec.code import MinimalRandomCode
from tfmiracle.codec.codebook import CODEBOOKS
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import (
    CodedGroup,
    MiracleFile,
)

LENET5 = [
    CodedVariable((5, 5, 1, 20)),
    CodedVariable((20,)),
    CodedVariable((5, 5, 20, 50), hash_factor=2),
    CodedVariable((50,)),
    CodedVariable((800, 500), hash_factor=64),
    CodedVariable((500,)),
    CodedVariable((500, 10)),
    CodedVariable((10,)),
]
TEN_MILLION = [CodedVariable((1000, 1000))] * 10


def file_of(variables, codebook) -> MiracleFile:
    """Blocks of 20 weights and 20 bits; any indices will do."""
    layout = WeightLayout(variables, 20, seed=0)
    indices = np.random.default_rng(0).integers(0, 1 << 20, layout.num_blocks)
    scales = np.ones(layout.num_scales, np.float32)
    code = MinimalRandomCode(0, 20, codebook)
    return MiracleFile(
        names=[f"variable{i}" for i in range(len(variables))],
        coded=[(0, i) for i in range(len(variables))],
        groups=[CodedGroup(layout, code, scales, indices)],
        stored=[],
        architecture={},
    )


def decoding(variables, codebook: str, target_ms: float) -> dict:
    """A file to arrays, in NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        file, plain = pathlib.Path(folder, "file"), pathlib.Path(folder, "weights.npz")
        file_of(variables, codebook).write(file)
        np.savez(plain, *decode(file).weights.values())

        def read():
            with np.load(plain) as arrays:
                return [arrays[name] for name in arrays]

        peer = "reading the float32 .npz"
        times = best_of_each({"ours": lambda: decode(file), peer: read})
    limit = f"{target_ms:,} ms"
    return {
        "ours": times["ours"],
        "peers": {peer: times[peer], limit: target_ms},
        "targets": {limit: 1},
    }


def in_new_processes(setup: str, statement: str) -> float:
    """Shortest time of a statement after another one, ms."""
    code = (
        f"import time; {setup}; start = time.perf_counter(); {statement}; "
        "print(1e3 * (time.perf_counter() - start))"
    )
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command)) for _ in range(5))


def first_decode() -> dict:
    """Of LeNet-5 in a new process, after the import."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "file")
        file_of(LENET5, "per_block").write(file)
        setup = "from tfmiracle.decoder import decode"
        time = in_new_processes(setup, f"decode({str(file)!r})")
    return {"ours": time, "peers": {"20 ms": 20}, "targets": {"20 ms": 1}}


def importing(statement: str, base: str, target_ms: float) -> dict:
    """How long Python takes for a statement after another one."""
    limit = f"{target_ms} ms"
    return {
        "ours": in_new_processes(base, statement),
        "peers": {f"`{base}`": in_new_processes("pass", base), limit: target_ms},
        "targets": {limit: 1},
    }


ROWS = {
    f"decode {name}, {codebook} codebook": (
        lambda variables=variables, codebook=codebook, target=target: decoding(
            variables, codebook, target
        )
    )
    for name, variables, target in (
        ("LeNet-5", LENET5, 20),
        ("10 M weights", TEN_MILLION, 2000),
    )
    for codebook in CODEBOOKS
} | {
    "first decoding of LeNet-5 in a process": first_decode,
    "import of the decoder, above NumPy": lambda: importing(
        "import tfmiracle.decoder", "import numpy", 50
    ),
    "import of all of tfmiracle, above TensorFlow and TFP": lambda: importing(
        "import tfmiracle; [getattr(tfmiracle, name) for name in tfmiracle.__all__]",
        "import keras, tensorflow, tensorflow_probability",
        300,
    ),
}
