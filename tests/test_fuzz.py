"""The fuzzer in small: a run of it, and that it finds what is wrong."""

import json
import pathlib
import re

import fuzz
import pytest
from support import GOLDEN

from tfmiracle.codec import codebook
from tfmiracle.codec.code import MinimalRandomCode


def test_every_flipped_bit_of_golden_files_is_detected():
    counts = fuzz.flips()
    assert {n: bits for n, (_, bits) in counts.items()} == {
        str(path.relative_to(GOLDEN)): 8 * path.stat().st_size
        for path in GOLDEN.rglob("*.miracle")
    }
    assert all(detected == bits for detected, bits in counts.values())


def test_mutated_files_are_decoded_or_refused(tmp_path):
    result = fuzz.fuzz(seed=3, files=1500, seconds=600, findings=tmp_path)
    assert result["findings"] == {} and not list(tmp_path.iterdir())
    json.dumps(result)
    # Mutations of most kinds may be harmless.
    for kind in (
        "version 2",
        "layout",
        "description",
        "stored",
        "sections",
        "mixed sections",
    ):
        assert min(result["kinds"][kind].values()) > 5, result["kinds"]


def test_files_are_functions_of_seed_and_number():
    files = fuzz.originals(3)
    some = [fuzz.mutation(3, number, files) for number in range(50)]
    assert some == [fuzz.mutation(3, n, fuzz.originals(3)) for n in range(50)]
    assert some != [fuzz.mutation(4, n, files) for n in range(50)]
    assert len(set(some)) > 45


def wrong_error(monkeypatch):
    monkeypatch.setattr(fuzz, "FileFormatError", KeyError)


def endless(monkeypatch):
    def loop(*_):
        while True:
            pass

    monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.01)
    monkeypatch.setattr(fuzz, "check", loop)


def greedy(monkeypatch):
    unpack = MinimalRandomCode.unpack
    monkeypatch.setattr(
        MinimalRandomCode,
        "unpack",
        lambda *args: (bytes(1 << 23), unpack(*args))[1],
    )


def other_weights(monkeypatch):
    normals = codebook.normals
    monkeypatch.setattr(codebook, "normals", lambda *args: -normals(*args))


@pytest.mark.parametrize("defect", [wrong_error, endless, greedy, other_weights])
def test_defects_are_found_and_kept(defect, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        defect(patch)
        patch.setattr(fuzz, "TRACED", 4)
        patch.setattr(fuzz, "COMPARED", 1)
        result = fuzz.fuzz(seed=0, files=40, seconds=60, findings=tmp_path)
    assert sum(result["findings"].values()) > 0
    assert result["files"] == 40
    for line in capsys.readouterr().out.splitlines():
        path = pathlib.Path(re.match(r"(.*) \(.*\): \w+", line)[1])
        seed, number = map(int, path.stem.split("-"))
        again = fuzz.mutation(seed, number, fuzz.originals(seed))[1]
        assert path.read_bytes() == again
    assert len(list(tmp_path.iterdir())) == sum(result["findings"].values())
