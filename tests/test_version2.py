"""The file, version 2: to bytes and back, and everything that bytes can do wrong."""

import dataclasses
import hashlib
import json
import math
import random
import tracemalloc
import zlib

import numpy as np
import pytest
import reference_decoder2
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEFAULTS, DICTIONARY2, GOLDEN, PACKAGE, own_classes
from test_decoder import DIGESTS, digest
from test_miracle_file import (
    assert_same,
    dense_scales,
    empty_file,
    files,
    mutated,
    small_file,
    varint,
)

from tfmiracle.codec import keras_json, version2
from tfmiracle.codec.code import CODES, MinimalRandomCode, RandomCode
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.codec.parts import Levels
from tfmiracle.codec.trellis import TrellisCode
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import (
    CodedGroup,
    FileFormatError,
    MiracleFile,
)


def network(*layers, name="net", kind="Sequential"):
    """A network in the short form, lengthened."""
    short = {"class_name": kind, "config": {"name": name, "layers": list(layers)}}
    return keras_json.lengthen(short)[0]


NET = network(
    {"class_name": "InputLayer", "config": {"batch_shape": [None, 4]}},
    {"class_name": "Dense", "config": {"units": 3, "activation": "relu"}},
    {"class_name": "BatchNormalization", "config": {"name": "norm"}},
    {"class_name": "Dense", "config": {"units": 2, "bias_initializer": {
        "class_name": "Constant", "config": {"value": 0.5}}}},
)  # fmt: skip


def net_file():
    """What a small network gives: one group, statistics, names that follow."""
    layout = WeightLayout(
        [
            CodedVariable((4, 3), 2, 0),
            CodedVariable((3,), 1, 0),
            CodedVariable((3, 2), 1, 1),
            CodedVariable((2,), 1, 1),
        ],
        4,
        0,
    )
    statistics = np.array([[0.5, -1.25, 3.0], [0.01, 1.7, 0.4]], np.float32)
    return MiracleFile(
        ["dense/kernel", "dense/bias", "norm/moving_mean", "norm/moving_variance",
         "dense_1/kernel", "dense_1/bias"],
        [(0, 0), (0, 1), None, None, (0, 2), (0, 3)],
        [
            CodedGroup(
                layout,
                MinimalRandomCode(0, 12, "shared"),
                np.array([0.3, 0.05], np.float32),
                np.array([4095, 1, 2, 3, 77]),
            )
        ],
        [Levels.of(statistics[0], 8, False), Levels.of(statistics[1], 6, True)],
        NET,
    )  # fmt: skip


def trellis_group(layout, state_bits, packed, scales):
    """A group of a trellis whose codes are some bytes."""
    code = TrellisCode(layout.seed, layout.num_effective, state_bits, len(packed))
    codes = code.unpack(packed, layout.num_blocks, layout.block_size)
    return CodedGroup(layout, code, np.array(scales, np.float32), codes)


def trellis_file():
    """`net_file` in two groups: many weights a symbol, and several symbols a weight."""
    first = WeightLayout(
        [CodedVariable((4, 3), 2, 0), CodedVariable((3,), 1, 1)], 4, 2**63 + 5
    )
    second = WeightLayout([CodedVariable((3, 2)), CodedVariable((2,))], 3, 7)
    return dataclasses.replace(
        net_file(),
        coded=[(0, 0), (0, 1), None, None, (1, 0), (1, 1)],
        groups=[
            trellis_group(first, 10, bytes.fromhex("2f81"), [0.3, 0.05]),
            trellis_group(second, 17, bytes.fromhex("fedcba98765432"), [0.25]),
        ],
    )


def without_architecture(file):
    fingerprint = version2.fingerprint(file.architecture)
    return dataclasses.replace(file, architecture=None, fingerprint=fingerprint)


@st.composite
def files2(draw):
    """As `files`, with levels, trellises, networks in the short form, and none."""
    file = draw(files().filter(dense_scales))
    groups = []
    for group in file.groups:
        if draw(st.booleans()):
            state_bits = draw(st.integers(8, 20))
            most = state_bits // 4 * group.layout.num_effective // 2
            packed = draw(st.binary(max_size=min(most, 40)))
            group = trellis_group(group.layout, state_bits, packed, group.scales)
        groups.append(group)
    stored = []
    for value in file.stored:
        if value.dtype == np.float32 and draw(st.booleans()):
            value = np.nan_to_num(value, posinf=9, neginf=-9).clip(-1e14, 1e14)
            squared = draw(st.booleans())
            value = np.abs(value) if squared else value
            value = Levels.of(value, draw(st.integers(2, 8)), squared)
        stored.append(value)
    architecture = draw(st.sampled_from([file.architecture, NET, None]))
    fingerprint = draw(st.integers(0, 2**32 - 1)) if architecture is None else None
    return dataclasses.replace(
        file,
        groups=groups,
        stored=stored,
        architecture=architecture,
        fingerprint=fingerprint,
    )


def assert_same2(file, other):
    def plain(f):
        stored = [s.levels if isinstance(s, Levels) else s for s in f.stored]
        return dataclasses.replace(f, stored=stored)

    assert_same(plain(file), plain(other))
    assert file.fingerprint == other.fingerprint
    for a, b in zip(file.stored, other.stored, strict=True):
        assert isinstance(a, Levels) is isinstance(b, Levels)
        if isinstance(a, Levels):
            assert (a.scale, a.squared) == (b.scale, b.squared)


def compare_with_reference(data):
    weights = decode(data).weights
    reference = reference_decoder2.decode(data, DICTIONARY2, DEFAULTS)
    assert list(weights) == list(reference)
    for name, (dtype, shape, values) in reference.items():
        array = weights[name]
        assert (array.dtype.name, array.shape) == (dtype, shape)
        little_endian = array.astype(array.dtype.newbyteorder("<"))
        assert little_endian.tobytes() == values


@settings(max_examples=60, deadline=None, derandomize=True)
@given(files2())
def test_round_trip_and_what_the_document_says(file):
    data = file.to_bytes()
    parsed = MiracleFile.from_bytes(data)
    assert_same2(file, parsed)
    assert list(parsed.names) == list(file.names)
    assert parsed.to_bytes() == data
    codes = reference_decoder2.parts(data, DICTIONARY2)[1]
    assert file.payload_bytes == len(codes)
    compare_with_reference(data)


@pytest.mark.parametrize("make", [net_file, small_file, empty_file, trellis_file])
def test_files_with_and_without_their_architecture(make):
    file = make()
    assert_same2(file, MiracleFile.from_bytes(file.to_bytes()))
    compare_with_reference(file.to_bytes())
    if make is net_file:
        short = without_architecture(file)
        parsed = MiracleFile.from_bytes(short.to_bytes())
        assert parsed.architecture is None
        assert parsed.fingerprint == short.fingerprint
        assert list(parsed.names) == list(file.names)
        compare_with_reference(short.to_bytes())


def test_bytes_are_those_of_the_document():
    file = net_file()
    data = file.to_bytes()
    assert data[:6] == b"MRCL\2" + bytes([len(data)])
    inflated, codes = reference_decoder2.parts(data, DICTIONARY2)
    assert codes == file.groups[0].packed and len(codes) == 8
    text, rest = inflated.split(b"\0", 1)
    assert text.decode() == (
        '{"model":{"class_name":"Sequential","config":{"name":"net","layers":['
        '{"class_name":"InputLayer","config":{"batch_shape":[null,4]}},'
        '{"class_name":"Dense","config":{"units":3,"activation":"relu"}},'
        '{"class_name":"BatchNormalization","config":{"name":"norm"}},'
        '{"class_name":"Dense","config":{"units":2,"bias_initializer":'
        '{"class_name":"Constant","config":{"value":0.5}}}}]}}}'
    )
    layout = [1, 0, 0, 2, 12, 1, 4, 0, 6, 0, 0, 13, 14, 0, 0, 2, 1, 1, 1, 0, 0, 2, 0]
    layout += [3, 0, 0, 0, 3, 0, 4, 3, 3, 2]  # shapes
    layout += [6, 0, 2, 0, 2, 0]  # names: net, input_layer, dense, norm, dense_1
    names = b"kernel\nbias\nmoving_mean\nmoving_variance\nkernel\nbias\n"
    scales = [*file.groups[0].scales]
    scales += [value.scale for value in file.stored]
    columns = np.array(scales, ">f4").view(np.uint8).reshape(4, 4).T.tobytes()
    levels = b"".join(value.levels.tobytes() for value in file.stored)
    assert rest == bytes(layout) + names + columns + levels


def test_groups_say_how_long_their_codes_are():
    file = small_file()
    inflated, codes = reference_decoder2.parts(file.to_bytes(), DICTIONARY2)
    assert codes == file.groups[0].packed + file.groups[1].packed
    layout = inflated[inflated.index(0) + 1 :]
    seed = varint(2**63 + 5)
    head = b"\2\0" + seed + bytes([2, 13, 1, 4, 0, 5]) + bytes([0, 7, 2, 0, 0, 3, 0])
    assert layout.startswith(head)


def test_a_trellis_is_numbered():
    inflated, codes = reference_decoder2.parts(trellis_file().to_bytes(), DICTIONARY2)
    layout = inflated[inflated.index(0) + 1 :]
    head = b"\2\x41" + varint(2**63 + 5) + bytes([2, 10, 2, 4, 0, 2])
    assert layout.startswith(head + bytes([65, 7, 2, 17, 7, 3, 0]))
    assert codes.hex() == "2f81" + "fedcba98765432"


# Levels.


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-(2.0**49), 2.0**49, width=32), max_size=20),
    st.integers(2, 8),
    st.booleans(),
)
def test_levels_are_near_and_stay(values, bits, squared):
    values = np.array(values, np.float32)
    values = np.abs(values) if squared else values
    levels = Levels.of(values, bits, squared)
    found = levels.values()
    most = min(2 ** (bits - (not squared)) - 1, 127)
    assert np.max(np.abs(levels.levels.astype(int)), initial=0) <= most
    assert found.dtype == np.float32 and np.all(np.isfinite(found))
    roots, near = (np.sqrt(values), np.sqrt(found)) if squared else (values, found)
    largest = np.max(np.abs(roots), initial=0)
    step = max(largest / most, 2.0**-60) * (1 + 2.0**-7)
    assert np.all(np.abs(roots - near) <= 0.51 * step)
    again = Levels.of(found, bits, squared)
    assert again.values().tobytes() == found.tobytes()


@pytest.mark.parametrize(
    "values, squared",
    [([np.nan], False), ([np.inf], True), ([-1], True), ([1e18], False)],
)
def test_what_levels_cannot_say(values, squared):
    with pytest.raises(ValueError, match="not finite, too large, or below 0"):
        Levels.of(np.array(values, np.float32), 6, squared)


def test_what_is_rounded_stays():
    rng = np.random.default_rng(0)
    for size in 2.0 ** rng.uniform(-30, 30, 2000):
        for bits, squared in ((8, False), (8, True), (6, False), (6, True), (2, True)):
            values = np.array([0.3, 1, 0.999], np.float32) * np.float32(size)
            levels = Levels.of(values, bits, squared)
            assert levels.scale.view(np.uint32) & 0xFFFF == 0
            again = Levels.of(levels.values(), bits, squared)
            assert again.scale == levels.scale
            np.testing.assert_array_equal(again.levels, levels.levels)


# Networks.


def test_what_follows_is_left_out():
    assert keras_json.shorten(NET)["config"]["layers"][1] == {
        "class_name": "Dense",
        "config": {"units": 3, "activation": "relu"},
    }
    architecture, names = keras_json.lengthen(keras_json.shorten(NET))
    assert architecture == NET
    assert names == ["net", "input_layer", "dense", "norm", "dense_1"]
    assert NET["config"]["build_input_shape"] == [None, 4]
    assert NET["config"]["layers"][3]["config"]["kernel_initializer"] == {
        "module": "keras.initializers",
        "class_name": "GlorotUniform",
        "config": {"seed": None, "input_axes": None, "output_axes": None},
        "registered_name": None,
    }
    assert reference_decoder2.lengthen(keras_json.shorten(NET), DEFAULTS) == (
        NET,
        names,
    )


def test_calls_on_the_layer_before_are_left_out():
    short = {
        "class_name": "Functional",
        "config": {
            "layers": [
                {"class_name": "InputLayer", "config": {"batch_shape": [None, 3]}},
                {"class_name": "Dense", "config": {"units": 3}},
                {"class_name": "BatchNormalization"},
                {
                    "class_name": "Add",
                    "inbound_nodes": [[[{"t": 2}, {"t": [1, 0, 1]}]]],
                },
                {"class_name": "Dense", "config": {"units": 3, "name": "dense_7"}},
                {"class_name": "Dense", "config": {"units": 3}},
            ]
        },
    }
    architecture, names = keras_json.lengthen(short)
    assert names == ["functional", "input_layer", "dense", "batch_normalization",
                     "add", "dense_7", "dense_8"]  # fmt: skip
    assert keras_json.shorten(architecture) == short
    assert reference_decoder2.lengthen(short, DEFAULTS) == (architecture, names)
    config = architecture["config"]
    assert config["input_layers"] == ["input_layer", 0, 0]
    assert config["output_layers"] == ["dense_8", 0, 0]
    nodes = [layer["inbound_nodes"] for layer in config["layers"]]
    assert nodes[0] == [] and nodes[2][0]["kwargs"] == {"mask": None}
    (pair,) = nodes[3][0]["args"]
    histories = [tensor["config"]["keras_history"] for tensor in pair]
    assert histories == [["dense", 0, 0], ["batch_normalization", 0, 1]]


def edited(edit):
    net = json.loads(json.dumps(NET))
    edit(net["config"]["layers"])
    return net


@pytest.mark.parametrize(
    "edit",
    [
        lambda layers: layers[1]["config"].update(new_argument=True),
        lambda layers: layers[1]["config"].pop("use_bias"),
        lambda layers: layers[1]["config"].pop("name"),
        lambda layers: layers[1]["config"].update(use_bias=1),
        lambda layers: layers[1]["config"].update(name="dense_3"),
        lambda layers: layers[1].update(module="mine", registered_name="mine>Dense"),
        lambda layers: layers[1].update(build_config={"input_shape": [None, 4]}),
        lambda layers: layers[1]["config"].update({"-": 1}),
        lambda layers: layers[1].pop("registered_name"),
        lambda layers: layers.clear(),
    ],
)
def test_networks_that_differ_survive(edit):
    file = dataclasses.replace(net_file(), architecture=edited(edit))
    parsed = MiracleFile.from_bytes(file.to_bytes())
    text = json.dumps(file.architecture, sort_keys=True)
    assert json.dumps(parsed.architecture, sort_keys=True) == text
    assert list(parsed.names) == list(file.names)
    compare_with_reference(file.to_bytes())


def test_a_fingerprint_tells_networks_apart():
    same = [NET, edited(lambda layers: None)]
    same[1]["config"]["name"] = "another_name"
    assert len({version2.fingerprint(net) for net in same}) == 1
    for edit in (
        lambda layers: layers[1]["config"].update(activation="tanh"),
        lambda layers: layers[1]["config"].update(name="other"),
        lambda layers: layers.pop(),
    ):
        assert version2.fingerprint(edited(edit)) != version2.fingerprint(NET)


# Codes of others.


def register_signs():
    @CODES.register
    @dataclasses.dataclass(frozen=True)
    class Signs(RandomCode):
        """A bit for each weight."""

        identifier = "signs"
        seed: int = 0
        factor: int = 1

        def shape(self, block_size):
            return (block_size,)

        def bits(self, block_size):
            return block_size

        def check(self, codes):
            pass

        def candidates(self, blocks, codes, block_size):
            return (np.asarray(codes) * 2.0 - 1.0).astype(np.float32) * self.factor

        def pack(self, codes, block_size):
            return np.packbits(codes.astype(np.uint8).ravel()).tobytes()

        def unpack(self, packed, num_blocks, block_size):
            bits = np.unpackbits(np.frombuffer(packed, np.uint8))
            if len(packed) != -(-num_blocks * block_size // 8):
                raise ValueError("of another length")
            return bits[: num_blocks * block_size].reshape(num_blocks, block_size)

    return Signs


@pytest.fixture
def signs():
    with own_classes(CODES):
        yield register_signs()


def of_signs(cls):
    layout = WeightLayout([CodedVariable((5,))], 2, 3)
    codes = np.array([[0, 1], [1, 1], [0, 0]], np.uint8)
    group = CodedGroup(layout, cls(3, 7), np.array([0.5], np.float32), codes)
    return MiracleFile(["x"], [(0, 0)], [group], [], NET)


def test_a_registered_code_decodes(signs):
    data = of_signs(signs).to_bytes()
    parsed = MiracleFile.from_bytes(data)
    assert parsed.groups[0].code == signs(3, 7)
    assert sorted({*np.abs(decode(data).weights["x"])}) == [3.5]


def test_an_unknown_code_is_named():
    with own_classes(CODES):
        data = of_signs(register_signs()).to_bytes()
    with pytest.raises(
        FileFormatError, match=r"needs 'signs', which is not registered here, only mrc"
    ):
        MiracleFile.from_bytes(data)


# Damage.


def test_every_truncation_says_how_much_there_is():
    data = net_file().to_bytes()
    for length in range(len(data)):
        with pytest.raises(FileFormatError) as error:
            MiracleFile.from_bytes(data[:length])
        if length >= 6:
            said = f"Truncated: the file has {length} of {len(data)} bytes."
            assert str(error.value) == said
    noise = {"x": random.Random(0).randbytes(2000).hex()}
    data = dataclasses.replace(net_file(), metadata=noise).to_bytes()
    with pytest.raises(FileFormatError, match=r"has 1,200 of 2,[0-9]{3} bytes"):
        MiracleFile.from_bytes(data[:1200])


def test_every_flipped_bit_is_detected():
    for file in (net_file(), without_architecture(net_file()), small_file()):
        data = bytearray(file.to_bytes())
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FileFormatError):
                MiracleFile.from_bytes(bytes(data))
            data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("more", [b"\0", b"MRCL", bytes(1000)])
def test_trailing_bytes_are_refused(more):
    with pytest.raises(FileFormatError, match=f"{len(more):,} bytes too many"):
        MiracleFile.from_bytes(net_file().to_bytes() + more)


def test_max_weights_is_exact():
    data = net_file().to_bytes()
    assert net_file().num_weights == 29
    MiracleFile.from_bytes(data, max_weights=29)
    for least in (28, math.nan):
        with pytest.raises(FileFormatError, match=f"more than {least} weights"):
            MiracleFile.from_bytes(data, max_weights=least)


# Bytes that are wrong, but whose check value is right.


def seal(body, length=None):
    """A file of a compressed description and codes."""
    data = b"MRCL\2" + varint(length or len(body) + 11) + body
    if length is None:
        for digits in range(1, 10):
            length = varint(len(body) + 9 + digits)
            if len(length) == digits:
                data = b"MRCL\2" + length + body
                break
    return data + zlib.crc32(data).to_bytes(4, "little")


def deflate(inflated):
    stream = zlib.compressobj(9, wbits=-15, zdict=DICTIONARY2)
    return stream.compress(inflated) + stream.flush()


HEAD = [0, 0, 2, 8, 0, 2, 0]  # mrc, seed 0, 8 bits, per block, blocks of 2
LAYOUT = [1, *HEAD, 2, 0, 1, 1, 0, 2, 0, 4]  # float32 as long as what is coded
SCALE, PLAIN = b"\x3f\x80\0\0", b"abcdefghabcdefgh"
TEXT = b'{"model":{}}'


def crafted(layout=LAYOUT, text=TEXT, values=SCALE + PLAIN, codes=b"\1\2",
            names=b"\0\0a\nb\n"):  # fmt: skip
    return seal(deflate(text + b"\0" + bytes(layout) + names + values) + codes)


def test_the_crafted_file_is_right_as_it_is():
    weights = decode(crafted()).weights
    assert {k: v.shape for k, v in weights.items()} == {"a": (4,), "b": (4,)}


def replaced(index, *numbers):
    numbers = b"".join(map(varint, numbers))
    return bytes(LAYOUT[:index]) + numbers + bytes(LAYOUT[index + 1 :])


SENSELESS = {
    "29 bits": replaced(4, 29),
    "codebook 2": replaced(5, 2),
    "3 parameters": [1, 0, 0, 3, 8, 0, 0, *LAYOUT[6:]],
    "17 parameters": replaced(3, 17),
    "empty blocks": replaced(6, 0),
    "blocks larger than all weights": replaced(6, 5),
    "a prior by name that has a number": replaced(7, 4, *b"zero"),
    "an unknown prior": replaced(7, 1, ord("x"), 0),
    "an unknown code": [1, 2, *b"ab", *LAYOUT[2:]],
    "a code by name that has a number": [1, 3, *b"mrc", *LAYOUT[2:]],
    "a code that is no ASCII": [1, 2, 200, 200, *LAYOUT[2:]],
    "a name of 66 bytes": [1, 66, *66 * b"a", *LAYOUT[2:]],
    "a trellis by name": [1, 7, *b"trellis", 0, 2, 8, 2, *LAYOUT[6:]],
    "a trellis without bytes of its own": [1, 65, 0, 1, 8, *LAYOUT[6:]],
    "a trellis of 3 parameters": [1, 65, 0, 3, 8, 2, 0, *LAYOUT[6:]],
    "a state of 7 bits": [1, 65, 0, 2, 7, 2, *LAYOUT[6:]],
    "a state of 21 bits": [1, 65, 0, 2, 21, 2, *LAYOUT[6:]],
    "a trellis longer than its codes": [1, 65, 0, 2, 8, 3, *LAYOUT[6:]],
    "a trellis shorter than its codes": [1, 65, 0, 2, 8, 1, *LAYOUT[6:]],
    "a trellis of 4 GiB": [1, 65, 0, 2, 20, *varint(2**32 - 1), *LAYOUT[6:]],
    "a trellis of large blocks": [1, 65, 0, 2, 8, 2, 5, *LAYOUT[7:]],
    "2^12 + 1 groups": replaced(0, 2**12 + 1),
    "an empty group": [2, *HEAD, 2, *HEAD, 2, 0, 2, *LAYOUT[11:]],
    "no group": [0, *LAYOUT[8:]],
    "2^16 + 1 variables": replaced(8, 2**16 + 1),
    "a variable more": replaced(8, 3),
    "an unknown kind": replaced(10, 1 + 14),
    "hash factor 0": replaced(11, 0),
    "an unknown scale": replaced(12, 2),
    "a scale below 0": replaced(12, 1),
    "a shape longer than it need be": [*LAYOUT[:14], 2, 4, 4],
    "a shape that refers to nothing": [*LAYOUT[:13], 0, 2, 4],
    "33 dimensions": [*LAYOUT[:13], 34, 2, *33 * [1], 4],
    "huge": replaced(15, 2**39),
    "huge but for a 0": [*LAYOUT[:13], 4, 2, 0, *varint(2**39), *varint(2**39), 4],
    "a number in 2 bytes instead of 1": replaced(15)[:15] + b"\x84\0",
    "a number that does not end": replaced(15)[:15] + b"\xff" * 30,
    "a seed of 65 bits": replaced(2, 2**64),
}


@pytest.mark.parametrize("layout", SENSELESS.values(), ids=SENSELESS.keys())
def test_layouts_that_make_no_sense(layout):
    for values in (SCALE + PLAIN, SCALE, SCALE + SCALE + PLAIN):
        with pytest.raises(FileFormatError):
            decode(crafted(layout, values=values))


def test_a_trellis_holds_as_many_bytes_as_its_states_can_say():
    def of(num_bytes):
        return crafted(
            [1, 65, 0, 2, 11, num_bytes, *LAYOUT[6:]], codes=bytes(num_bytes)
        )

    assert decode(of(4)).weights["a"].shape == (4,)  # 8 symbols
    with pytest.raises(
        FileFormatError, match="from 0 to 4: a state of 11 bits holds 2"
    ):
        decode(of(5))


def test_an_unknown_prior_is_named():
    with pytest.raises(FileFormatError, match="'x', which is not registered here"):
        MiracleFile.from_bytes(crafted(replaced(7, 1, ord("x"), 0)))


@pytest.mark.parametrize("codes", [b"", b"\1", b"\1\2\3"])
def test_codes_of_the_wrong_size(codes):
    with pytest.raises(FileFormatError, match="2 indices of 8 bits take 2 bytes"):
        MiracleFile.from_bytes(crafted(codes=codes))


def test_bits_left_over_must_be_zero():
    layout = replaced(4, 3)
    MiracleFile.from_bytes(crafted(layout, codes=b"\x3a"))
    with pytest.raises(FileFormatError, match="not zero"):
        MiracleFile.from_bytes(crafted(layout, codes=b"\x7a"))


@pytest.mark.parametrize(
    "scale",
    [b"\0\0\0\0", b"\xbf\x80\0\0", b"\x7f\x80\0\0", b"\x7f\xc0\0\0", b"\x71\x50\0\0"],
)
def test_scales_out_of_range(scale):
    with pytest.raises(FileFormatError, match="out of range"):
        MiracleFile.from_bytes(crafted(values=scale + PLAIN))


@pytest.mark.parametrize("kind, wrong", [(13, b"\x80"), (14, b"\x80"), (14, b"\xff")])
def test_levels_out_of_range(kind, wrong):
    scales = bytes(4 * [0x3F, 0x80, 0, 0])[:8]
    scales = b"\x3f\x3f\x80\x80\0\0\0\0"
    layout = replaced(10, kind)
    MiracleFile.from_bytes(crafted(layout, values=scales + b"\0\1\2\x7f"))
    with pytest.raises(FileFormatError, match="level is out of range"):
        MiracleFile.from_bytes(crafted(layout, values=scales + b"\0\1\2" + wrong))
    large = b"\x3f\x58\x80\x80\0\0\0\0"  # 1.1e15
    with pytest.raises(FileFormatError, match="scale of levels is out of range"):
        MiracleFile.from_bytes(crafted(layout, values=large + b"\0\1\2\x7f"))


def test_booleans_are_0_or_1():
    layout = replaced(10, 12)
    MiracleFile.from_bytes(crafted(layout, values=SCALE + b"\0\1\1\0"))
    with pytest.raises(FileFormatError, match="neither 0 nor 1"):
        MiracleFile.from_bytes(crafted(layout, values=SCALE + b"\0\1\2\0"))


@pytest.mark.parametrize(
    "values", [b"", SCALE, SCALE + PLAIN[1:], SCALE + PLAIN + b"a"]
)
def test_values_of_the_wrong_size(values):
    with pytest.raises(FileFormatError, match=r"too early|too many"):
        MiracleFile.from_bytes(crafted(values=values))


@pytest.mark.parametrize(
    "names",
    [b"\0\0a\na\n", b"\0\0a\nb\x1b\n", b"\0\0a\n\xff\n", b"\0\0a\n", b"\2\0a\nb\n",
     b"\1\0a\nb\n", b"\0\0a\nb\nc\n", b"\0\0ab"],
)  # fmt: skip
def test_names_that_make_no_sense(names):
    with pytest.raises(FileFormatError):
        MiracleFile.from_bytes(crafted(names=names))


LAYER = b'{"class_name":"Dense","config":%s}'


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"model":' * 200_000,
        b'{"model":{"x":' + b"9" * 10_000 + b"}}",
        b'{"model":[]}',
        b'{"model":null}',
        b'{"model":{},"verbatim":{}}',
        b'{"model":{},"model":{}}',
        b'{"model":{"a":{"b":1,"b":1}}}',
        b'{"model":{},"metadata":3}',
        b'{"model":{},"names":{}}',
        b'{"model":{"x":1e999}}',
        b'{"model":{"x":NaN}}',
        b'{"model":{"x":-Infinity}}',
        b'{"model":%s}' % (LAYER % b"3"),
        b'{"model":%s}' % (LAYER % b'{"-":3}'),
        b'{"model":{"class_name":"Functional"}}',
        b'{"model":{"class_name":"Functional","config":{"layers":[]}}}',
        b'{"model":{"class_name":"Functional","config":{"layers":[3]}}}',
        b'{"model":{"class_name":"Functional","config":{"layers":[{"class_name":"Add",'
        b'"inbound_nodes":[[{"t":1}]]}]}}}',
        b'{"model":{"class_name":"Sequential"}}',
        b" " * (2**22 + 1),
    ],
    ids=lambda text: str(text)[:40],
)
def test_texts_that_make_no_sense(text):
    with pytest.raises(FileFormatError):
        MiracleFile.from_bytes(crafted(text=text))


def test_descriptions_that_do_not_inflate():
    inner = TEXT + b"\0" + bytes(LAYOUT) + b"\0\0a\nb\n" + SCALE + PLAIN
    good = deflate(inner)
    MiracleFile.from_bytes(seal(good + b"\1\2"))
    for body in (b"", good[:-1], zlib.compress(inner), b"\xff" * 50, good[:9]):
        with pytest.raises(FileFormatError):
            MiracleFile.from_bytes(seal(body))


def test_lengths_that_make_no_sense():
    data = crafted()
    for start in (b"\x80\0", b"\x80" * 9, b"\xff" * 20, varint(2**62), b"\0", b"\6"):
        body = b"MRCL\2" + start + data[6:-4]
        with pytest.raises(FileFormatError):
            MiracleFile.from_bytes(body + zlib.crc32(body).to_bytes(4, "little"))


BOMBS = {
    "text": deflate(b" " * 2**27),
    "layout": deflate(b'{"model":{}}\0\0\x80\x80\4' + bytes(2**27)),
    "names": deflate(b'{"model":{}}\0\0\0' + b"a" * 2**27),
    "objects": deflate(
        b'{"model":{"class_name":"Sequential","config":{"layers":['
        + b'{"class_name":"LSTM"},' * 180_000
        + b"3]}}}\0"
    ),
    "tensors": deflate(
        b'{"model":{"class_name":"Functional","config":{"layers":['
        + b'{"class_name":"InputLayer","config":{"batch_shape":[]}},'
        + b'{"class_name":"Add","inbound_nodes":[['
        + b'{"t":1},' * 500_000
        + b'{"t":1}]]}]}}}\0\0\0'
    ),
    "one long name, often": deflate(
        b'{"model":{"class_name":"A","config":{"name":"'
        + b"a" * 2**21
        + b'"}}}\0\0'
        + varint(1000)
        + bytes(1000)
        + b"\1" * 1000
        + b"\2"
        + bytes(999)
        + b"".join(b"%d\n" % i for i in range(1000))
    ),
    "after the end": deflate(b'{"model":{}}\0\0\0' + bytes(2**27)),
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_do_not_explode(body):
    data = seal(body)
    keras_json.defaults()
    tracemalloc.start()
    with pytest.raises(FileFormatError):
        MiracleFile.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**28  # 64 bytes for each that a text may have


def test_names_that_no_reader_takes_are_not_written():
    names = ["x" * 2**22, *net_file().names[1:]]
    with pytest.raises(ValueError, match=r"description .* has room for 4,194,304"):
        dataclasses.replace(net_file(), names=names).to_bytes()


def test_a_file_has_an_architecture_or_a_fingerprint():
    for fingerprint, architecture in ((None, None), (3, NET)):
        with pytest.raises(ValueError, match="either an architecture or its finger"):
            MiracleFile([], [], [], [], architecture, {}, fingerprint)


def test_mutations_behind_a_right_check_value():
    rng = random.Random(0)
    files = [net_file(), small_file(), trellis_file()]
    files.append(without_architecture(net_file()))
    originals = [
        reference_decoder2.parts(data, DICTIONARY2)
        for data in [crafted(), *(file.to_bytes() for file in files)]
    ]
    outcomes = {"refused": 0, "read": 0}
    for _ in range(2500):
        inflated, codes = rng.choice(originals)
        end = inflated.index(0)
        text, rest = inflated[:end], inflated[end:]
        kind = rng.randrange(5)
        if kind == 0:
            text = mutated(rng, text)
        elif kind < 4:
            rest = mutated(rng, rest)
        else:
            codes = mutated(rng, codes)
        data = seal(deflate(text + rest) + codes)
        try:
            file = MiracleFile.from_bytes(data, max_weights=500)
            weights = decode(file).weights
        except FileFormatError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert len(weights) == len(file.coded)
            again = MiracleFile.from_bytes(file.to_bytes())
            assert_same2(file, again)
            found = reference_decoder2.parts(again.to_bytes(), DICTIONARY2)
            assert found[1] == codes
            layout = rest if b"verbatim" not in found[0] else None
            if layout is not None and b"\n" in layout:
                assert len(found[0][found[0].index(0) :]) == len(layout)
    assert outcomes["refused"] > 700 and outcomes["read"] > 300, outcomes


# Golden files.

# SHA-256 of the values of all variables, as in `test_decoder`. The first three were
# files of version 1.
#   levels: `net_file`; weights_alone: the same, without its architecture
#   trellis: `trellis_file`
LEVELS = "73285f47a46a2809174b1fee0d8a388c6ef38f192782cd1d6cdc8039b639a666"
TRELLIS = "4d54515c220ab9bef24748df929aa2360c1345914169f14083b38b9f5e57e33a"
GOLDEN2 = {**DIGESTS, "levels": LEVELS, "weights_alone": LEVELS, "trellis": TRELLIS}


@pytest.mark.parametrize("name", GOLDEN2)
def test_golden_files_decode_to_the_same_bits_for_ever(name):
    data = (GOLDEN / "version2" / f"{name}.miracle").read_bytes()
    assert digest(decode(data).weights.values()) == GOLDEN2[name]
    reference = reference_decoder2.decode(data, DICTIONARY2, DEFAULTS)
    values = b"".join(values for _, _, values in reference.values())
    assert hashlib.sha256(values).hexdigest() == GOLDEN2[name]


def test_golden_files_hold_the_same_networks_for_ever():
    read = {
        name: MiracleFile.read(GOLDEN / "version2" / f"{name}.miracle")
        for name in GOLDEN2
    }
    for name in DIGESTS:
        assert_same(read[name], MiracleFile.read(GOLDEN / f"{name}.miracle"))
    assert_same2(read["levels"], net_file())
    assert_same2(read["trellis"], trellis_file())
    assert_same2(read["weights_alone"], without_architecture(net_file()))


def test_files_beside_the_document_never_change():
    assert (len(DICTIONARY2), zlib.crc32(DICTIONARY2)) == (32567, 621560021)
    table = (PACKAGE / "codec" / "defaults_v2.json").read_bytes()
    assert zlib.crc32(table) == 2403143859
