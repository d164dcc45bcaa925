"""The file, version 1: from bytes, and everything that they can do wrong."""

import dataclasses
import json
import math
import os
import random
import struct
import tracemalloc
import zlib

import fuzz
import numpy as np
import pytest
import reference_decoder
import version1
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import DICTIONARY, GOLDEN, join_sections

from tfmiracle import miracle_file
from tfmiracle.codec.code import MinimalRandomCode
from tfmiracle.codec.codebook import CODEBOOKS, normal_quantiles
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.decoder import decode
from tfmiracle.files import beside, check_folder, check_output, write_atomically
from tfmiracle.miracle_file import (
    STORED_DTYPES,
    CodedGroup,
    FileFormatError,
    MiracleFile,
    check_description,
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


@st.composite
def groups(draw):
    variables = draw(
        st.lists(
            st.builds(CodedVariable, shapes, st.integers(1, 9), st.integers(0, 2)),
            min_size=1,
            max_size=3,
        ).filter(lambda vs: sum(v.size for v in vs))
    )
    layout = WeightLayout(
        variables, draw(st.integers(1, 40)), draw(st.integers(0, 2**64 - 1))
    )
    bits = draw(st.integers(0, 28))
    scales = draw(
        st.lists(
            st.floats(2.0**-149, float(np.float32(1e30)), width=32),
            min_size=layout.num_scales,
            max_size=layout.num_scales,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    indices = rng.integers(0, 2**bits, layout.num_blocks)
    codebook = draw(st.sampled_from(CODEBOOKS))
    code = MinimalRandomCode(layout.seed, bits, codebook)
    return CodedGroup(layout, code, np.array(scales, np.float32), indices)


@st.composite
def files(draw):
    coded_groups = draw(st.lists(groups(), max_size=3))
    stored = draw(
        st.lists(
            st.sampled_from(STORED_DTYPES).flatmap(lambda t: hnp.arrays(t, shapes)),
            max_size=4,
        )
    )
    # Variables of all groups and stored ones in any order, as in a network.
    kinds = [None] * len(stored)
    for g, group in enumerate(coded_groups):
        kinds += [g] * len(group.layout.variables)
    kinds = draw(st.permutations(kinds))
    coded, next_of = [], [0] * len(coded_groups)
    for g in kinds:
        coded.append(None if g is None else (g, next_of[g]))
        if g is not None:
            next_of[g] += 1
    texts = st.text(max_size=6).filter(str.isprintable)
    count = len(kinds)
    names = draw(st.lists(texts, min_size=count, max_size=count, unique=True))
    return MiracleFile(
        names, coded, coded_groups, stored, draw(json_objects), draw(json_objects)
    )


def assert_same(file, other):
    assert list(file.names) == list(other.names)
    assert list(file.coded) == list(other.coded)
    for a, b in zip(file.groups, other.groups, strict=True):
        assert a.layout.variables == b.layout.variables
        assert a.layout.block_size == b.layout.block_size
        assert a.layout.seed == b.layout.seed
        assert a.code == b.code
        assert a.scales.dtype == b.scales.dtype == np.float32
        assert a.scales.tobytes() == b.scales.tobytes()
        np.testing.assert_array_equal(a.codes, b.codes, strict=True)
    for a, b in zip(file.stored, other.stored, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    # As text, in which NaN is equal to itself.
    texts = [json.dumps(f.architecture, sort_keys=True) for f in (file, other)]
    assert texts[0] == texts[1]
    assert json.dumps(file.metadata) == json.dumps(other.metadata)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(files())
def test_round_trip_and_what_the_document_says(file):
    data = version1.to_bytes(file)
    parsed = MiracleFile.from_bytes(data)
    assert_same(file, parsed)

    indices = reference_decoder.sections(data)[2]
    assert parsed.payload_bytes == file.payload_bytes == len(indices)
    sizes = [v.size for g in file.groups for v in g.layout.variables]
    assert file.num_weights == sum(sizes) + sum(v.size for v in file.stored)
    assert file.float32_bytes == 4 * file.num_weights

    weights = decode(data).weights
    reference = reference_decoder.decode(data, DICTIONARY)
    assert list(weights) == list(reference) == list(file.names)
    for name, (dtype, shape, values) in reference.items():
        array = weights[name]
        assert (array.dtype.name, array.shape) == (dtype, shape)
        little_endian = array.astype(array.dtype.newbyteorder("<"))
        assert little_endian.tobytes() == values


def small_file():
    """Two groups, hashing, padding, 0 and 13 bits, and stored variables."""
    first = WeightLayout(
        [CodedVariable((3, 4), 2, 0), CodedVariable((5,), 1, 1)], 4, 2**63 + 5
    )
    second = WeightLayout([CodedVariable((2, 2), 1, 0)], 3, 7)
    return MiracleFile(
        names=["a/kernel", "a/count", "a/bias", "b/kernel", "b/flags", "b/mean"],
        coded=[(0, 0), None, (0, 1), (1, 0), None, None],
        groups=[
            CodedGroup(
                first,
                MinimalRandomCode(first.seed, 13, "shared"),
                np.array([0.5, 3e-7], np.float32),
                np.array([8191, 0, 1234]),
            ),
            CodedGroup(
                second,
                MinimalRandomCode(7, 0, "per_block"),
                np.array([2.0], np.float32),
                np.array([0, 0]),
            ),
        ],
        stored=[
            np.array(-3, np.int64),
            np.array([True, False, True]),
            np.array([[1.5, -0.0], [np.nan, np.inf]], np.float32),
        ],
        architecture={"class_name": "Sequential", "config": {"layers": []}},
        metadata={"note": "ä"},
    )


def empty_file():
    return MiracleFile([], [], [], [], {}, {})


def test_what_has_no_size_round_trips():
    assert_same(empty_file(), MiracleFile.from_bytes(version1.to_bytes(empty_file())))
    assert empty_file().payload_bytes == 0
    layout = WeightLayout([CodedVariable((0, 3), 4, 0), CodedVariable((), 1, 0)], 9, 0)
    group = CodedGroup(
        layout, MinimalRandomCode(0, 28), np.ones(1, np.float32), np.array([3])
    )
    nothing = np.zeros((2, 0), np.uint16)
    file = MiracleFile(["x", "y", "z"], [(0, 0), None, (0, 1)], [group], [nothing], {})
    data = version1.to_bytes(file)
    assert reference_decoder.sections(data)[3] == b""
    assert_same(file, MiracleFile.from_bytes(data))
    assert decode(data).weights["x"].shape == (0, 3)


def test_bytes_are_those_of_the_document():
    description, layout, indices, stored = reference_decoder.sections(
        version1.to_bytes(small_file())
    )
    group = struct.pack("<Q", 2**63 + 5) + bytes([4, 13, 1, 2])
    group += struct.pack("<2f", 0.5, 3e-7)
    other = struct.pack("<Q", 7) + bytes([3, 0, 0, 1]) + struct.pack("<f", 2)
    variables = [[1, 2, 0, 2, 3, 4], [0, 6, 0], [1, 1, 1, 1, 5], [2, 1, 0, 2, 2, 2]]
    variables += [[0, 11, 1, 3], [0, 0, 2, 2, 2]]
    assert layout == b"\2" + group + other + b"\6" + b"".join(map(bytes, variables))
    assert int.from_bytes(indices, "little") == 8191 | 1234 << 26
    assert len(indices) == 5  # 3 indices of 13 bits, then none of 0 bits
    values = struct.pack("<q", -3) + b"\1\0\1" + struct.pack("<4f", 1.5, -0.0, 0, 0)
    assert zlib.decompress(stored)[:19] == values[:19]
    inflate = zlib.decompressobj(-15, zdict=DICTIONARY)
    assert json.loads(inflate.decompress(description))["metadata"] == {"note": "ä"}


# Damage.


def dense_scales(file):
    """Whether every coding scale belongs to a variable, as in version 2."""
    return all(
        {v.scale_index for v in g.layout.variables} == {*range(g.layout.num_scales)}
        for g in file.groups
    )


@given(files().filter(dense_scales))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_parts_are_the_whole_file(file):
    sizes = file.part_bytes()
    assert sum(sizes.values()) == len(file.to_bytes())
    assert sizes["indices"] == file.payload_bytes


def test_what_is_printed_holds_no_arrays():
    with np.printoptions(threshold=10**9):
        file = MiracleFile.read(GOLDEN / "shared.miracle")
        decoded = decode(file)
        for value, word in (
            (file, f"{file.num_weights} weights"),
            (file.groups[0], f"{file.groups[0].layout.num_blocks} blocks"),
            (decoded, f"{file.num_weights} weights"),
        ):
            assert word in repr(value) and len(repr(value)) < 120
            assert str(value) == repr(value)


def test_every_flipped_bit_is_detected():
    data = bytearray(version1.to_bytes(small_file()))
    MiracleFile.from_bytes(bytes(data))
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(FileFormatError):
                MiracleFile.from_bytes(bytes(data))
            data[position] ^= 1 << bit


def test_every_truncation_is_detected():
    data = version1.to_bytes(small_file())
    for length in range(len(data)):
        with pytest.raises(FileFormatError):
            MiracleFile.from_bytes(data[:length])


@pytest.mark.parametrize("more", [b"\0", b"MRCL", bytes(1000)])
def test_trailing_bytes_are_refused(more):
    with pytest.raises(FileFormatError, match=f"{len(more)} bytes too many"):
        MiracleFile.from_bytes(version1.to_bytes(small_file()) + more)


@pytest.mark.parametrize("data", [b"", b"MRC", b"PK\3\4" + bytes(99), b"\x93NUMPY"])
def test_foreign_files_are_refused(data):
    with pytest.raises(FileFormatError, match=r"Not a \.miracle file"):
        MiracleFile.from_bytes(data)


@pytest.mark.parametrize("version", [0, 3, 255])
def test_other_versions_are_refused(version):
    data = version1.to_bytes(small_file())
    with pytest.raises(FileFormatError, match=f"version {version} is unknown"):
        MiracleFile.from_bytes(data[:4] + bytes([version]) + data[5:])


def test_sections_in_another_order_are_refused():
    one, two, three, four = reference_decoder.sections(version1.to_bytes(small_file()))
    data = join_sections([one, three, two, four])
    with pytest.raises(FileFormatError):
        MiracleFile.from_bytes(data)


def test_max_weights_is_exact():
    file = small_file()
    data = version1.to_bytes(file)
    assert file.num_weights == 12 + 1 + 5 + 4 + 3 + 4
    MiracleFile.from_bytes(data, max_weights=29)
    with pytest.raises(FileFormatError, match="more than 28 weights"):
        MiracleFile.from_bytes(data, max_weights=28)
    with pytest.raises(FileFormatError, match="more than 28 weights"):
        decode(data, max_weights=28)
    with pytest.raises(FileFormatError, match="more than nan weights"):
        decode(data, max_weights=math.nan)
    for wrong in ("many", -1, [28]):
        with pytest.raises(ValueError, match="`max_weights` must be a number of"):
            decode(data, max_weights=wrong)


# Bytes that are wrong, but whose check values are right.


def varint(number):
    groups_of_seven = [number >> s & 127 for s in range(0, number.bit_length() or 1, 7)]
    return bytes([g | 128 for g in groups_of_seven[:-1]] + groups_of_seven[-1:])


def group_bytes(block_size=2, bits=8, codebook=0, scales=(1.0,), num_scales=None):
    count = len(scales) if num_scales is None else num_scales
    head = b"".join(map(varint, (block_size, bits, codebook, count)))
    return bytes(8) + head + struct.pack(f"<{len(scales)}f", *scales)


def coded_bytes(shape=(4,), group=1, hash_factor=1, scale=0):
    return b"".join(map(varint, (group, hash_factor, scale, len(shape), *shape)))


def stored_bytes(shape=(3,), dtype=0):
    return b"".join(map(varint, (0, dtype, len(shape), *shape)))


def layout_bytes(groups, variables):
    return b"".join([varint(len(groups)), *groups, varint(len(variables)), *variables])


VARIABLES = [coded_bytes(), stored_bytes()]
LAYOUT = layout_bytes([group_bytes()], VARIABLES)
INDICES = b"\x11\x22"
STORED = zlib.compress(struct.pack("<3f", 1, 2, 3))
CONTENT = {"model": {}, "names": ["a", "b"], "metadata": {}}


def deflate(text):
    compressor = zlib.compressobj(9, wbits=-15, zdict=DICTIONARY)
    return compressor.compress(text) + compressor.flush()


def crafted(layout=LAYOUT, indices=INDICES, stored=STORED, content=CONTENT, raw=None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    description = deflate(text) if raw is None else raw
    return join_sections([description, layout, indices, stored])


def assert_refused(data, **options):
    """By the reader and by the reference decoder."""
    with pytest.raises(FileFormatError, **options):
        decode(data)
    assert fuzz.breaks_a_rule(data)


def test_the_crafted_file_is_right_as_it_is():
    assert not fuzz.breaks_a_rule(crafted())
    weights = decode(crafted()).weights
    assert {k: v.shape for k, v in weights.items()} == {"a": (4,), "b": (3,)}


def with_group(*variables, **group):
    return layout_bytes([group_bytes(**group)], variables or VARIABLES)


HUGE = 2**39
SENSELESS = {
    "29 bits": with_group(bits=29),
    "empty blocks": with_group(block_size=0),
    "blocks larger than all weights": with_group(block_size=5, bits=16),
    "blocks of 2^60": with_group(block_size=2**60),
    "codebook 2": with_group(codebook=2),
    "scale 0": with_group(scales=[0.0]),
    "scale below 0": with_group(scales=[-1.0]),
    "scale NaN": with_group(scales=[math.nan]),
    "infinite scale": with_group(scales=[math.inf]),
    "large scale": with_group(scales=[1.001e30]),
    "no scale": with_group(scales=[]),
    "a scale too many": with_group(scales=[1.0, 1.0]),
    "2^62 scales": with_group(num_scales=2**62),
    "an empty group": layout_bytes([group_bytes(), group_bytes()], VARIABLES),
    "no group": layout_bytes([], VARIABLES),
    "unknown group": with_group(coded_bytes(group=2), stored_bytes()),
    "hash factor 0": with_group(coded_bytes(hash_factor=0), stored_bytes()),
    "unknown scale": with_group(coded_bytes(scale=1), stored_bytes()),
    "no weights": with_group(coded_bytes((0,)), stored_bytes(), block_size=1),
    "unknown type": with_group(coded_bytes(), stored_bytes(dtype=12)),
    "33 dimensions": with_group(coded_bytes((4,) + (1,) * 32), stored_bytes()),
    "huge, coded": with_group(coded_bytes((HUGE,) * 32), stored_bytes()),
    "huge, stored": with_group(coded_bytes(), stored_bytes((HUGE,) * 32)),
    "huge but for a 0, coded": with_group(
        coded_bytes((0, HUGE, HUGE)), coded_bytes(), stored_bytes()
    ),
    "huge but for a 0, stored": with_group(*VARIABLES, stored_bytes((0, HUGE, HUGE))),
    "a variable less than names": with_group(coded_bytes()),
    "a byte more": LAYOUT + b"\0",
    "a byte less": LAYOUT[:-1],
    "cut off in a group": LAYOUT[:6],
    "nothing": b"",
    "endless number": b"\xff" * 30,
    "endless zero": b"\x80" * 30,
    "a block size that does not end": LAYOUT[:9] + b"\x82" + b"\x80" * 9 + LAYOUT[10:],
    "a block size in 2 bytes instead of 1": LAYOUT[:9] + b"\x82\0" + LAYOUT[10:],
    "1025 groups": layout_bytes(
        [group_bytes(1)] * 1025, [coded_bytes((1,), i + 1) for i in range(1025)]
    ),
    "2^32 as hash factor": with_group(coded_bytes(hash_factor=2**32), stored_bytes()),
    "2^62 groups": varint(2**62),
    "2^62 variables": b"\0" + varint(2**62),
    "10 variables, all missing": b"\0" + varint(10),
}


@pytest.mark.parametrize("layout", SENSELESS.values(), ids=SENSELESS.keys())
def test_layouts_that_make_no_sense(layout):
    for names in (["a", "b"], ["a", "b", "c"]):
        assert_refused(crafted(layout, content={**CONTENT, "names": names}))


@pytest.mark.parametrize("indices", [b"", b"\x11", b"\x11\x22\x33"])
def test_indices_of_the_wrong_size(indices):
    assert_refused(crafted(indices=indices), match="indices than blocks")


def test_bits_left_over_must_be_zero():
    layout = with_group(bits=3)
    file = MiracleFile.from_bytes(crafted(layout, b"\x3a"))
    np.testing.assert_array_equal(file.groups[0].codes, [2, 7])
    assert_refused(crafted(layout, b"\x7a"), match="not zero")


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\0",
        b"not zlib",
        zlib.compress(bytes(11)),
        zlib.compress(bytes(13)),
        zlib.compress(b""),
        zlib.compress(bytes(10**7)),
        STORED + b"\0",
        STORED[:-1],
        STORED[:-1] + bytes([STORED[-1] ^ 1]),
    ],
    ids=lambda stored: f"{len(stored)} bytes",
)
def test_stored_values_that_do_not_fit(stored):
    assert_refused(crafted(stored=stored))


def test_booleans_are_0_or_1():
    layout = with_group(coded_bytes(), stored_bytes(dtype=11))
    file = MiracleFile.from_bytes(crafted(layout, stored=zlib.compress(b"\1\0\1")))
    assert file.stored[0].tolist() == [True, False, True]
    wrong = crafted(layout, stored=zlib.compress(b"\1\0\2"))
    assert_refused(wrong, match="neither 0 nor 1")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"model":' + b"9" * 10_000 + b"}",
        {**CONTENT, "names": "ab"},
        {**CONTENT, "names": ["a"]},
        {**CONTENT, "names": ["a", "a"]},
        {**CONTENT, "names": ["a", 1]},
        {**CONTENT, "names": ["a", "b\n"]},
        {**CONTENT, "names": ["a", "\x1b[2J"]},
        {**CONTENT, "metadata": {"x": math.nan}},
        {**CONTENT, "names": ["a", ["b"]]},
        {**CONTENT, "names": {"a": 1, "b": 2}},
        {**CONTENT, "model": []},
        {**CONTENT, "model": None},
        {**CONTENT, "metadata": 3},
        {"names": ["a", "b"], "metadata": {}},
        {"model": {}, "metadata": {}},
        {"model": {}, "names": ["a", "b"]},
        {**CONTENT, "names": ["a", "\ud800"]},
        {**CONTENT, "names": ["a", "b\u00a0"]},
        b"\xef\xbb\xbf" + json.dumps(CONTENT).encode(),
        json.dumps(CONTENT).encode() + b"{}",
        json.dumps(CONTENT).encode("utf-16"),
        json.dumps(CONTENT).replace('"model"', '"model": {}, "model"').encode(),
        json.dumps(CONTENT).replace("{}", '{"a": [{"b": 1, "b": 1}]}', 1).encode(),
        json.dumps(CONTENT).replace('"a"', "'a'").encode(),
    ],
    ids=lambda content: str(content)[:30],
)
def test_descriptions_that_make_no_sense(content):
    assert_refused(crafted(content=content))


def nested(depth):
    return {**CONTENT, "model": {"a": json.loads("[" * depth + "]" * depth)}}


def with_number(text):
    filled = json.dumps({**CONTENT, "metadata": {"x": "here"}})
    return filled.replace('"here"', text).encode()


@pytest.mark.parametrize(
    "fits, too_much",
    [
        (nested(126), nested(127)),
        (with_number("9" * 100), with_number("9" * 101)),
        (with_number("-" + "9" * 99), with_number("-" + "9" * 100)),
        (with_number("1.7e308"), with_number("1.8e308")),
        (with_number(f'"{"[" * 131_068}"'), with_number(f'"{"[" * 131_069}"')),
        (
            json.dumps(CONTENT).encode().ljust(1 << 22),
            json.dumps(CONTENT).encode().ljust((1 << 22) + 1),
        ),
    ],
    ids=["depth", "digits", "digits below 0", "binary64", "brackets", "length"],
)
def test_bounds_of_the_description_are_exact(fits, too_much):
    decode(crafted(content=fits))
    assert not fuzz.breaks_a_rule(crafted(content=fits))
    assert_refused(crafted(content=too_much))


def test_descriptions_that_readers_refuse_show_before_they_are_written():
    names = [str(i) for i in range(8193)]
    check_description(nested(126)["model"], names[1:])
    with pytest.raises(ValueError, match="8,193 variables"):
        check_description({}, names)
    for architecture in (nested(127)["model"], {1: 0, "1": 0}, {"x": [[]] * 131_072}):
        with pytest.raises(ValueError, match=r"The description|An object"):
            check_description(architecture, [])
    with pytest.raises(ValueError, match="names"):
        check_description({}, ["a", "a"])


def test_small_files_claim_no_large_networks():
    def claims(count):
        variable = coded_bytes((count,), hash_factor=count)
        layout = layout_bytes([group_bytes(1, 0)], [variable])
        return crafted(layout, b"", b"", content={**CONTENT, "names": ["a"]})

    size = len(claims(2**20 + 2**15))
    most = 2**20 + 512 * size
    assert len(claims(most)) == size
    MiracleFile.from_bytes(claims(most))
    with pytest.raises(FileFormatError, match=r"more than [\d,]+ weights.*max_weights"):
        MiracleFile.from_bytes(claims(most + 1))
    for data in (claims(2**28), claims(2**32 - 1)):
        with pytest.raises(FileFormatError, match="max_weights"):
            decode(data)
        assert not fuzz.breaks_a_rule(data)  # which claims too much only for us
        MiracleFile.from_bytes(data, max_weights=None)
        MiracleFile.from_bytes(data, max_weights=2**32)
    assert_refused(claims(2**32))
    with pytest.raises(FileFormatError):
        MiracleFile.from_bytes(claims(2**32), max_weights=None)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_descriptions_with_numbers_that_json_cannot_say(number):
    text = json.dumps({**CONTENT, "metadata": {"x": "here"}})
    text = text.replace('"here"', number).encode()
    with pytest.raises(FileFormatError, match=number):
        MiracleFile.from_bytes(crafted(content=text))


def test_descriptions_that_do_not_inflate():
    good = deflate(json.dumps(CONTENT).encode())
    for raw in (b"", good[:-1], good + b"\0", zlib.compress(b"{}"), b"\xff" * 50):
        with pytest.raises(FileFormatError):
            MiracleFile.from_bytes(crafted(raw=raw))


@pytest.mark.parametrize(
    "data",
    [
        crafted(with_group(coded_bytes((HUGE,)), bits=0)),
        crafted(layout_bytes([], [stored_bytes((HUGE,), 1)]), b""),
        crafted(content=b" " * 2**27),
        crafted(stored=zlib.compress(bytes(2**27))),
    ],
    ids=["coded", "stored", "spaces", "inflated"],
)
def test_bombs_do_not_explode(data):
    tracemalloc.start()
    with pytest.raises(FileFormatError):
        MiracleFile.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**25 + 2**20


def mutated(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        position = rng.randrange(len(data) + 1)
        some = rng.choice([b"\0", b"\1", b"\x7f", b"\x80", b"\xff", rng.randbytes(1)])
        kind = rng.randrange(4)
        if kind == 0:
            data[position:position] = some * rng.choice([1, 2, 9])
        elif kind == 1:
            del data[position : position + rng.choice([1, 1, 2, 8])]
        elif position < len(data):
            data[position] = some[0]
    return bytes(data)


def mutated_description(rng, data):
    """A valid deflate stream of JSON, most times, that says something else."""
    text = zlib.decompressobj(-15, zdict=DICTIONARY).decompress(data)
    if rng.random() < 0.5:
        return deflate(mutated(rng, text))
    content = json.loads(text)
    odd = [None, 0, -1, 1e308, "", "a/kernel", [], {}, [[]], {"names": []}, True]
    target = rng.choice([content, content["names"]])
    key = rng.choice(list(target) if isinstance(target, dict) else range(len(target)))
    target[key] = rng.choice(odd)
    return deflate(json.dumps(content).encode())


def test_mutations_behind_right_check_values():
    rng = random.Random(0)
    originals = [version1.to_bytes(small_file()), crafted()]
    normal_quantiles()
    outcomes = {"refused": 0, "read": 0}
    tracemalloc.start()
    for turn in range(2500):
        payloads = reference_decoder.sections(rng.choice(originals))
        for number in rng.choice([[0], [1], [1], [1], [1, 2], [2], [3], [1, 3]]):
            payload = payloads[number]
            if number == 0 and turn % 4:
                payload = mutated_description(rng, payload)
            elif number == 3 and turn % 2:
                payload = zlib.compress(mutated(rng, zlib.decompress(payload)))
            else:
                payload = mutated(rng, payload)
            payloads[number] = payload
        data = join_sections(payloads)
        tracemalloc.reset_peak()
        try:
            file = MiracleFile.from_bytes(data, max_weights=500)
            weights = decode(file).weights
        except FileFormatError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert len(weights) == len(file.coded)
            assert_same(file, MiracleFile.from_bytes(version1.to_bytes(file)))
        assert tracemalloc.get_traced_memory()[1] < 2**21
        if turn == 500:
            tracemalloc.stop()  # which is slow
    # The mutations reach beyond the parser, and are not all harmless.
    assert outcomes["refused"] > 700 and outcomes["read"] > 300, outcomes


# Writing.


def test_write_returns_the_size_and_read_gives_the_same(tmp_path):
    path = tmp_path / "small.miracle"
    size = small_file().write(path)
    assert path.stat().st_size == size == len(small_file().to_bytes())
    assert_same(small_file(), MiracleFile.read(path))
    assert_same(small_file(), MiracleFile.read(str(path)))
    assert os.listdir(tmp_path) == ["small.miracle"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    umask = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"1")
    finally:
        os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_read_names_the_path_of_a_bad_file(tmp_path):
    path = tmp_path / "bad.miracle"
    path.write_bytes(b"MRCL\1\1")
    with pytest.raises(FileFormatError, match=r"bad\.miracle: Truncated"):
        MiracleFile.read(path)
    with pytest.raises(FileNotFoundError):
        MiracleFile.read(tmp_path / "none.miracle")


def test_existing_files_are_kept_unless_overwritten(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(FileExistsError, match="overwrit"):
        write_atomically(path, b"new")
    with pytest.raises(FileExistsError):
        small_file().write(path)
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new", overwrite=True)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_regular_file_is_kept(tmp_path, overwrite):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no regular file"):
        write_atomically(tmp_path / "pipe", b"", overwrite)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    if not overwrite:
        with pytest.raises(FileExistsError):
            write_atomically(tmp_path / "link", b"", overwrite)
        assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_are_checked(tmp_path, overwrite):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_atomically(tmp_path / "none" / "file", b"", overwrite)
    with pytest.raises(IsADirectoryError, match="folder"):
        write_atomically(tmp_path, b"", overwrite)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="does not exist"):
        write_atomically(tmp_path / "file" / "inside", b"", overwrite)
    assert os.listdir(tmp_path) == ["file"]


def test_a_read_only_folder_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(PermissionError, match="cannot be written"):
        check_output(tmp_path / "file")
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "file", b"")
    tmp_path.chmod(0o700)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_crash_in_the_middle_leaves_nothing(
    tmp_path, monkeypatch, function, error, before
):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)

    def crash(*args, **kwargs):
        assert before is None or path.read_bytes() == before
        raise error

    monkeypatch.setattr(miracle_file.os, function, crash)
    with pytest.raises(type(error)):
        write_atomically(path, b"new" * 10_000, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ([] if before is None else ["file"])
    assert before is None or path.read_bytes() == before


def test_long_names_are_no_problem(tmp_path):
    path = tmp_path / ("x" * 251 + ".npz")
    write_atomically(path, b"1")
    assert path.read_bytes() == b"1"


def test_what_json_cannot_say_is_not_written():
    for metadata in ({"x": math.nan}, {"x": math.inf}):
        with pytest.raises(ValueError, match="JSON"):
            dataclasses.replace(small_file(), metadata=metadata).to_bytes()


@pytest.mark.parametrize("below", ["", "run", "run/deep"])
def test_a_file_is_no_folder(below, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is no folder"):
        check_folder(tmp_path / "file" / below)
    check_folder(tmp_path / "new" / below)  # it can be made
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match=r"link is no folder"):
        check_folder(tmp_path / "link" / below)


def test_folders_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may always
    with pytest.raises(PermissionError, match="cannot be written to"):
        check_folder(tmp_path / "new")
    with pytest.raises(PermissionError, match="cannot be written to"):
        check_output(tmp_path / "new")


def test_what_is_beside_a_file_is_of_that_file_alone():
    names = ["net-0.1", "net-0.2", "net-0.3.miracle", "run.miracle.old", "net.h5"]
    found = {beside(f"a.b/{name}", ".record.json").as_posix() for name in names}
    assert len(found) == len(names)
    assert {"a.b/net-0.1.record.json", "a.b/net-0.3.record.json"} < found
