"""What several test modules need."""

import contextlib
import dataclasses
import json
import os
import pathlib
import struct
import subprocess
import sys
import zlib

import numpy as np

import tfmiracle

GOLDEN = pathlib.Path(__file__).parent / "golden"
ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
PACKAGE = pathlib.Path(tfmiracle.__file__).parent
# Instructions of XLA that talk to the host or leave the program.
HOST = r"\b(infeed|outfeed|send|recv|custom-call)\b"
DICTIONARY = (PACKAGE / "description_v1.dict").read_bytes()
DICTIONARY2 = (PACKAGE / "codec" / "description_v2.dict").read_bytes()
DEFAULTS = json.loads((PACKAGE / "codec" / "defaults_v2.json").read_text())


def join_sections(payloads, start=b"MRCL\x01"):
    """A file of four payloads, with check values that are right."""
    data = start
    for number, payload in enumerate(payloads, 1):
        section = struct.pack("<BI", number, len(payload)) + payload
        data += section + struct.pack("<I", zlib.crc32(section))
    return data


def batch(shape, seed=0):
    """Four random examples."""
    return np.random.default_rng(seed).normal(size=(4, *shape)).astype(np.float32)


def posterior_of(specification, layout, **options):
    """A posterior, given options of it, of its specification and of its coder."""
    from tfmiracle.coding.minimal_random import MinimalRandomCoder

    def take(cls):
        names = {field.name for field in dataclasses.fields(cls)} & options.keys()
        return {name: options.pop(name) for name in names}

    made = specification(**take(specification))
    coder = MinimalRandomCoder(**take(MinimalRandomCoder))
    return made.posterior(layout, coder=coder, **options)


@contextlib.contextmanager
def own_classes(registry):
    """What is registered meanwhile is forgotten in the end."""
    before = dict(registry._classes)
    try:
        yield
    finally:
        registry._classes = before


BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is not there")

sys.meta_path.insert(0, Block())
"""


def run_python(code, *arguments, without=()):
    """Runs code in a new interpreter, which does not find some packages."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.getenv("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=list(without)) + code]
        + [str(argument) for argument in arguments],
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )


COUNT_COMPILED = """
import os, pathlib, sys, tempfile

dump = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1]))
os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"


def compiled():
    '''How many programs XLA has compiled so far.'''
    return len(list(dump.glob("*before_optimizations.txt")))
"""


def fix_all(model, seed=0):
    """Fixes every block of a model to a random candidate, as if it had been coded."""
    from tfmiracle.hosts.models import posteriors

    rng = np.random.default_rng(seed)
    for posterior, _ in posteriors(model):
        blocks = np.arange(posterior.layout.num_blocks)
        posterior.finalize_coding_scale()
        posterior.fix(
            blocks, rng.integers(0, 2**posterior.code.block_bits, len(blocks))
        )
    return model
