"""Decoding: golden files, an independent decoder, and NumPy as the only dependency."""

import hashlib
import io
import json

import numpy as np
import pytest
import reference_decoder
from support import DICTIONARY, GOLDEN, run_python

from tfmiracle import decoder
from tfmiracle.miracle_file import (
    FileFormatError,
    MiracleFile,
)

# SHA-256 of the values of all variables, in the order of the file, little-endian. They
# will never change: see section 9 of docs/format.md.
#   per_block: one hashed variable, a padded block, a seed above 2**63
#   shared: two groups, each with a codebook of its own; BatchNormalization and
#     Normalization stored, the latter with an integer
#   types: stored variables of all types, 0 and 28 bits, empty and scalar variables, a
#     coding scale below the normal numbers
DIGESTS = {
    "per_block": "e697b26d9d3842f19d22aa86496b31c2a57bd383da2630d054fe62290db88bfb",
    "shared": "92c156823d628218de665a8b34e7656e28e32664fce73a58e70b36a764f5758d",
    "types": "7ebd2e6c54db2264842ea751436f72bbbbf8aa790b2382fb0bf4eafca2626dbe",
}


def digest(arrays):
    result = hashlib.sha256()
    for array in arrays:
        result.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return result.hexdigest()


@pytest.mark.parametrize("name", DIGESTS)
def test_golden_files_decode_to_the_same_bits_for_ever(name):
    data = (GOLDEN / f"{name}.miracle").read_bytes()
    assert digest(decoder.decode(data).weights.values()) == DIGESTS[name]


@pytest.mark.parametrize("name", DIGESTS)
def test_the_document_suffices_to_decode_golden_files(name):
    data = (GOLDEN / f"{name}.miracle").read_bytes()
    reference = reference_decoder.decode(data, DICTIONARY)
    values = b"".join(values for _, _, values in reference.values())
    assert hashlib.sha256(values).hexdigest() == DIGESTS[name]
    decoded = decoder.decode(data).weights
    assert {k: (t, s) for k, (t, s, _) in reference.items()} == {
        k: (v.dtype.name, v.shape) for k, v in decoded.items()
    }


def test_golden_files_have_what_they_are_there_for():
    per_block, shared, types = (
        MiracleFile.read(GOLDEN / f"{name}.miracle") for name in DIGESTS
    )
    (group,) = per_block.groups
    assert group.code.codebook == "per_block" and group.layout.seed >= 2**63
    assert group.layout.num_effective % group.layout.block_size
    assert max(v.hash_factor for v in group.layout.variables) == 7
    assert [g.code.codebook for g in shared.groups] == ["shared", "shared"]
    assert {v.dtype.name for v in shared.stored} == {"float32", "int64"}
    assert len({v.dtype for v in types.stored}) == 12
    assert [g.code.block_bits for g in types.groups] == [28, 0]
    for name in DIGESTS:
        assert (GOLDEN / f"{name}.miracle").stat().st_size < 3000


def test_sources_are_paths_bytes_and_parsed_files():
    path = GOLDEN / "shared.miracle"
    file = MiracleFile.read(path)
    data = path.read_bytes()
    for source in (path, str(path), data, bytearray(data), memoryview(data), file):
        decoded = decoder.decode(source)
        assert digest(decoded.weights.values()) == DIGESTS["shared"]
        assert list(decoded.weights) == list(file.names)
        assert decoded.metadata == file.metadata
        assert decoded.architecture == file.architecture


def test_max_weights_counts_all_weights():
    path = GOLDEN / "shared.miracle"
    count = MiracleFile.read(path).num_weights
    decoder.decode(path, max_weights=count)
    for source in (path, path.read_bytes()):
        with pytest.raises(FileFormatError, match="max_weights"):
            decoder.decode(source, max_weights=count - 1)


def test_a_changed_index_changes_its_block_only():
    file = MiracleFile.read(GOLDEN / "per_block.miracle")
    (group,) = file.groups
    before = decoder.decode_blocks(group)
    group.codes[3] ^= 1
    changed = (decoder.decode_blocks(group) != before).any(1)
    assert np.flatnonzero(changed).tolist() == [3]


PURE = """
import io, json, numpy

before = {name.partition(".")[0] for name in sys.modules}
from tfmiracle.decoder import decode
weights = decode(sys.argv[1]).weights
buffer = io.BytesIO()
numpy.savez(buffer, **weights)
found = {name.partition(".")[0] for name in sys.modules}
new = found - before - sys.stdlib_module_names
print(json.dumps([buffer.getvalue().hex(), sorted(new)]))
"""


def test_decoding_imports_numpy_and_nothing_else():
    others = ["tensorflow", "keras", "tensorflow_probability", "sklearn", "absl"]
    process = run_python(PURE, GOLDEN / "shared.miracle", without=others)
    assert process.returncode == 0, process.stderr
    data, modules = json.loads(process.stdout)
    assert modules == ["tfmiracle"]
    with np.load(io.BytesIO(bytes.fromhex(data))) as archive:
        assert digest(archive.values()) == DIGESTS["shared"]
