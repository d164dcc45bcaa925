"""Decodes mutated files: all but success and FileFormatError is a finding.

    python tests/fuzz.py [--files=N] [--seconds=S] [--seed=K] [--findings=FOLDER]
    python tests/fuzz.py --flips          # each bit of each golden file, flipped
    python tests/fuzz.py --replay FILE... # what became of a finding
    python tests/fuzz.py --coverage       # guided by coverage; needs `atheris`

File i of a seed is always the same one. Most mutations are made behind the check
values. A file that decodes must also

- give finite weights, as many as it claims, and be written again as the same layout
  and indices;
- decode to the same bits with `reference_decoder` (a sample of small files),

and one that is refused must be refused by the reference decoder, too (a sample).

No file may take more than `CPU_SECONDS`; the address space of the process is limited
to `HEADROOM` bytes over what it has at the start; and a sample of files is held to
what its own bytes justify, see `justified_bytes`.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import random
import resource
import signal
import struct
import sys
import time
import tracemalloc
import zlib

import numpy as np
import reference_decoder
import reference_decoder2
import version1
from support import DEFAULTS, DICTIONARY, DICTIONARY2, GOLDEN, join_sections

from tfmiracle.codec.code import MinimalRandomCode
from tfmiracle.codec.codebook import CODEBOOKS, normal_quantiles
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.codec.parts import Levels
from tfmiracle.codec.trellis import TrellisCode
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import (
    STORED_DTYPES,
    CodedGroup,
    FileFormatError,
    MiracleFile,
)

CPU_SECONDS = 20.0
HEADROOM = 1 << 30
MAX_WEIGHTS = 1 << 14
TRACED = 64  # one file in this many is traced, which is slow
KEPT = 50  # findings of a kind that are written down; the rest is counted
COMPARED = 16  # one small file in this many that decode is compared

NUMBERS = [*range(10), 12, 15, 16, 28, 29, 31, 32, 33, 63, 64, 127, 128, 255, 256]
NUMBERS += [1000, 2**14, 2**14 + 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**39]
NUMBERS += [2**40, 2**40 + 1, 2**62, 2**63, 2**64 - 1]
SCALES = [b"\0\0\0\0", b"\1\0\0\0", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff"]
SCALES += [struct.pack("<f", x) for x in (1, -1, 1e-45, 1e30, 1.001e30, 3e38, -0.0)]
JSON = ["null", "true", "0", "-1", "1e308", "1e999", "-1e999", "9" * 99, '""', '"a"']
JSON += ["NaN", "Infinity", "[]", "{}", "[[]]", '"\\ud800"', '"\\u001b"', '"a/b"']
JSON += ['{"names":[]}', "[" * 3000, '"\ud7ff"', "1" * 5000, "1.", "0x1"]


# Valid files to start from.


def originals(seed: int, count: int = 40) -> list[bytes]:
    """The golden files and `count` small random ones, of both versions."""
    golden = [path.read_bytes() for path in sorted(GOLDEN.rglob("*.miracle"))]
    some = [random_file(random.Random(f"{seed}/original/{i}")) for i in range(count)]
    later = [
        rounded(file, random.Random(f"{seed}/later/{i}")) for i, file in enumerate(some)
    ]
    return [*golden, *map(version1.to_bytes, some), *later]


def rounded(file: MiracleFile, rng: random.Random) -> bytes:
    """Version 2 of a file: levels instead of float32, and some groups as a trellis."""
    stored = [
        Levels.of(abs(value), 6, bool(i % 2)) if value.dtype == np.float32 else value
        for i, value in enumerate(file.stored)
    ]
    groups = [trellis(g, rng) if rng.random() < 0.5 else g for g in file.groups]
    return dataclasses.replace(file, groups=groups, stored=stored).to_bytes()


def trellis(group: CodedGroup, rng: random.Random) -> CodedGroup:
    """A group as a trellis of random bytes."""
    layout, state_bits = group.layout, rng.randint(8, 20)
    most = state_bits // 4 * layout.num_effective // 2
    packed = rng.randbytes(rng.randint(0, min(most, 30)))
    code = TrellisCode(layout.seed, layout.num_effective, state_bits, len(packed))
    codes = code.unpack(packed, layout.num_blocks, layout.block_size)
    return dataclasses.replace(group, code=code, codes=codes)


def random_file(rng: random.Random) -> MiracleFile:
    """A valid file of 0 to 3 groups, of any layout that is small."""
    noise = np.random.default_rng(rng.getrandbits(64))

    def shape():
        return tuple(
            rng.choice([0, 1, 2, 3, 5, 7]) for _ in range(rng.choice(range(5)))
        )

    groups, kinds = [], []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        count = rng.randint(1, 3)
        scales = [min(i, rng.randrange(count)) for i in range(count)]
        scales = [sorted({*scales}).index(scale) for scale in scales]
        variables = [
            CodedVariable(shape(), rng.choice([1, 1, 2, 5]), s) for s in scales
        ]
        if not sum(v.size for v in variables):
            variables[0] = CodedVariable((3,), 1, scales[0])
        layout = WeightLayout(variables, rng.randint(1, 12), rng.getrandbits(64))
        bits = rng.randint(0, 28)
        kinds += [len(groups)] * count
        groups.append(
            CodedGroup(
                layout,
                MinimalRandomCode(layout.seed, bits, rng.choice(CODEBOOKS)),
                noise.lognormal(size=layout.num_scales).astype(np.float32),
                noise.integers(0, 1 << bits, layout.num_blocks),
            )
        )
    stored = []
    for _ in range(rng.randint(0, 3)):
        value = noise.normal(0, 50, shape())
        dtype = rng.choice(STORED_DTYPES)
        stored.append((np.abs(value) if dtype[0] == "u" else value).astype(dtype))
    kinds += [None] * len(stored)
    rng.shuffle(kinds)
    coded, seen = [], collections.Counter()
    for g in kinds:
        coded.append(None if g is None else (g, seen[g]))
        seen[g] += 1
    names = [f"layer{i}/kernel" for i in range(len(kinds))]
    return MiracleFile(names, coded, groups, stored, {"class_name": "Sequential"}, {})


# Mutations of bytes.


def random_bytes(rng, data):
    """One to four edits of single bytes or bits, runs of them, or of the length."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        position = rng.randrange(len(data) + 1)
        some = rng.choice([b"\0", b"\1", b"\x7f", b"\x80", b"\xff", rng.randbytes(1)])
        run = rng.choice([1, 1, 2, 8])
        kind = rng.randrange(6)
        if kind == 0:
            data[position:position] = some * run
        elif kind == 1:
            del data[position : position + run]
        elif kind == 2:
            del data[position:]
        elif position < len(data):
            if kind == 3:
                data[position] ^= 1 << rng.randrange(8)
            elif kind == 4:
                data[position] = some[0]
            else:
                other = rng.randrange(len(data))
                data[position : position + run] = data[other : other + run]
    return bytes(data)


def spliced(rng, files):
    """The start of one file, then the end of another."""
    one, two = rng.choice(files), rng.choice(files)
    return one[: rng.randrange(len(one) + 1)] + two[rng.randrange(len(two) + 1) :]


def random_header(rng, files):
    """Sections of any number, length and check value behind a start of any kind."""
    data = rng.choice(
        [b"MRCL\1"] * 6 + [b"MRCL\0", b"MRCL\2", b"MRCL\3", b"MRCL", b"", b"mrcl\1"]
    )
    for number in rng.choice(
        [[1, 2, 3, 4]] * 4 + [[1, 2, 3], [4, 3, 2, 1], [0], [1] * 9]
    ):
        payload = rng.randbytes(rng.choice([0, 0, 1, 2, 4, 9, 30]))
        length = rng.choice([len(payload)] * 9 + NUMBERS) % 2**32
        section = struct.pack("<BI", number, length) + payload
        check = zlib.crc32(section) if rng.random() < 0.95 else rng.getrandbits(32)
        data += section + struct.pack("<I", check)
    return data


# Mutations behind right check values.


def varint(number, padding=0):
    groups = [number >> s & 127 for s in range(0, max(number.bit_length(), 1), 7)]
    groups += [0] * padding
    return bytes([g | 128 for g in groups[:-1]] + groups[-1:])


def take_layout(layout):
    """A layout section as numbers: `(groups, variables)` of `put_layout`."""
    groups, variables = reference_decoder.parse_layout(layout)
    return (
        [
            [
                struct.pack("<Q", g["seed"]),
                [g["D"], g["bits"], int(g["shared"])],
                [struct.pack("<f", scale) for scale in g["scales"]],
            ]
            for g in groups
        ],
        [
            (
                [1 + v["group"], v["hash"], v["scale"]]
                if "group" in v
                else [0, STORED_DTYPES.index(v["type"])]
            )
            + [len(v["shape"]), *v["shape"]]
            for v in variables
        ],
    )


def put_layout(groups, variables, rng=None):
    """The bytes of a layout; with `rng`, its numbers may be longer than need be."""

    def put(numbers):
        return b"".join(
            varint(n, 1 if rng and rng.random() < 0.02 else 0) for n in numbers
        )

    out = put([len(groups)])
    for seed, numbers, scales in groups:
        out += seed + put([*numbers, len(scales)]) + b"".join(scales)
    return out + put([len(variables)]) + b"".join(map(put, variables))


def sizes(groups, variables):
    """Bytes that the indices and the stored values of a layout should have, or None."""
    total, stored = [0] * len(groups), 0
    for kind, what, *shape in variables:
        shape = shape[2:] if kind else shape[1:]
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if count > MAX_WEIGHTS:
            return None
        if not kind:
            if what >= len(STORED_DTYPES):
                return None
            stored += count * np.dtype(STORED_DTYPES[what]).itemsize
        elif kind > len(groups) or not what:
            return None
        else:
            total[kind - 1] += -(-count // what)
    indices = 0
    for (_, (block_size, bits, _), _), n in zip(groups, total):
        if not block_size or bits > 64:
            return None
        num_blocks = -(-n // block_size)
        indices += -(-num_blocks * bits // 8)
    return indices, stored


def mutated_layout(rng, payloads):
    """Another layout, and half of the time indices and stored values of its size."""
    groups, variables = take_layout(payloads[1])
    for _ in range(rng.choice([1, 1, 2, 3])):
        number = rng.choice([rng.choice(NUMBERS), rng.randrange(20)])
        kind = rng.randrange(8)
        if kind == 0 and groups:
            group = rng.choice(groups)
            group[0] = rng.randbytes(8)
            group[1][rng.randrange(3)] = number
        elif kind == 1 and groups:
            scales = rng.choice(groups)[2]
            scales.insert(rng.randrange(len(scales) + 1), rng.choice(SCALES))
        elif kind == 2 and groups:
            scales = rng.choice(groups)[2]
            scales[rng.randrange(len(scales)) :] = [rng.choice(SCALES)]
        elif kind == 3:
            groups.append(
                [rng.randbytes(8), [number, rng.randrange(30), 0], [SCALES[5]]]
            )
            variables.append([len(groups), 1, 0, 1, rng.randrange(40)])
        elif kind == 4:
            shape = [
                rng.choice([number, 0, 1, 2, 9])
                for _ in range(rng.choice([0, 1, 2, 31, 32, 33]))
            ]
            start = [0, rng.choice([0, 1, 11, 12, number])]
            if groups and rng.random() < 0.5:
                start = [rng.randint(1, len(groups)), rng.choice([1, 2, number]), 0]
            variables.append([*start, len(shape), *shape])
        elif variables:
            variable = rng.choice(variables)
            place = rng.randrange(len(variable))
            if kind == 5:
                variables.remove(variable)
            elif kind == 6:
                variable[place] = number
            else:
                rng.shuffle(variables)
    payloads[1] = put_layout(groups, variables, rng)
    # Where numbers were changed, lists need not be what they say.
    right = None
    if all(len(v) > 3 for v in variables):
        right = sizes(groups, variables)
    if right and rng.random() < 0.7:
        payloads[2] = rng.randbytes(right[0])
        if rng.random() < 0.5 and payloads[2]:
            payloads[2] = payloads[2][:-1] + b"\0"
        payloads[3] = zlib.compress(rng.choice([bytes, rng.randbytes])(right[1]))
    return payloads


def deflate(text):
    compressor = zlib.compressobj(1, wbits=-15, zdict=DICTIONARY)
    return compressor.compress(text) + compressor.flush()


def inflate(description, limit=1 << 22):
    return zlib.decompressobj(-15, zdict=DICTIONARY).decompress(description, limit)


def mutated_description(rng, payloads):
    """Another text, mostly still JSON, in a stream that mostly inflates."""
    text = inflate(payloads[0])
    kind = rng.randrange(6)
    if kind == 0:
        payloads[0] = random_bytes(rng, payloads[0])
        return payloads
    if kind == 1:
        text = random_bytes(rng, text)
    elif kind == 2:
        content = json.loads(text)
        names = content["names"]
        if names:
            names[rng.randrange(len(names))] = rng.choice(names + ["", "\x1b", "ä", 1])
        text = json.dumps(content).encode()
    else:
        # MARK, which no file holds, stands for what JSON's own writer would not write.
        content = json.loads(text)
        target = rng.choice([content, content["metadata"], content["model"]])
        target[rng.choice([*target, "x"])] = "MARK"
        odd = rng.choice(JSON).encode("utf-8", "surrogatepass")
        text = json.dumps(content).encode().replace(b'"MARK"', odd)
    payloads[0] = deflate(text)
    if rng.random() < 0.05:
        payloads[0] += rng.randbytes(1)
    return payloads


def mutated_stored(rng, payloads):
    """Other stored values, in a stream that mostly inflates."""
    if not payloads[3] or rng.random() < 0.3:
        payloads[3] = random_bytes(rng, payloads[3])
    else:
        payloads[3] = zlib.compress(random_bytes(rng, zlib.decompress(payloads[3])))
    return payloads


def mutated_sections(rng, payloads):
    """One or two payloads with other bytes."""
    for number in rng.choice([[0], [1], [1], [1, 2], [2], [2], [3], [1, 3]]):
        payloads[number] = random_bytes(rng, payloads[number])
    return payloads


def bomb(rng, payloads):
    """What inflates to much more than there is."""
    size = rng.choice([2**16, 2**20, 2**22 - 200, 2**25])
    unit = rng.choice([b"[],", b"{},", b" ", b"[[]],", b'"a",', b"1e9,", b"["])
    if rng.random() < 0.5:
        text = b'{"model":{},"names":[],"metadata":{"a":[' + unit * (size // len(unit))
        payloads[0] = deflate(text.rstrip(b",") + b"]}}")
        payloads[1:] = [b"\0\0", b"", b""]
    else:
        payloads[3] = zlib.compress(bytes(size))
    return payloads


def seal(body):
    """A file of version 2 of a description and codes, with what is around them."""
    length = len(body) + 9
    length += next(n for n in range(1, 10) if len(varint(length + n)) == n)
    data = b"MRCL\2" + varint(length) + body
    return data + struct.pack("<I", zlib.crc32(data))


def mutated_version2(rng, data):
    """A file of version 2 with another text, layout, values, or codes."""
    inflated, codes = reference_decoder2.parts(data, DICTIONARY2)
    end = inflated.index(0)
    text, rest = inflated[:end], inflated[end:]
    kind = rng.randrange(8)
    if kind == 0:
        text = random_bytes(rng, text)
    elif kind == 1:
        content = json.loads(text or b"{}")
        places = [content, content.get("model", content)]
        places += places[-1].get("config", {}).get("layers", [])
        place = rng.choice([p for p in places if isinstance(p, dict)])
        place[rng.choice([*place, "config", "-", "inbound_nodes", "name"])] = "MARK"
        odd = rng.choice([*JSON, '{"t":1}', '[[{"t":9}]]', '{"class_name":"LSTM"}'])
        text = json.dumps(content).encode()
        text = text.replace(b'"MARK"', odd.encode("utf-8", "surrogatepass"))
    elif kind == 2:
        codes = random_bytes(rng, codes)
    elif kind == 3 and rng.random() < 0.02:
        size = rng.choice([2**16, 2**20, 2**22, 2**25])
        unit = rng.choice([b"\0", b"a", b'{"class_name":"LSTM"},'])
        text, rest = b'{"model":{"a":[', unit * (size // len(unit))
    else:
        place = rng.randrange(len(rest))
        number = varint(rng.choice([rng.choice(NUMBERS), rng.randrange(20)]))
        rest = rest[:place] + number + rest[place + rng.randrange(2) :]
        if rng.random() < 0.3:
            rest = random_bytes(rng, rest)
    stream = zlib.compressobj(1, wbits=-15, zdict=DICTIONARY2)
    return seal(stream.compress(text + rest) + stream.flush() + codes)


def mutation(seed: int, number: int, files: list[bytes]) -> tuple[str, bytes]:
    """What kind of mutation file `number` of a seed has, and its bytes."""
    rng = random.Random(f"{seed}/{number}")
    share = rng.random()
    if share < 0.15:
        return "bytes", random_bytes(rng, rng.choice(files))
    if share < 0.20:
        return "splice", spliced(rng, files)
    if share < 0.25:
        return "header", random_header(rng, files)
    if share < 0.55:
        return "version 2", mutated_version2(
            rng, rng.choice([file for file in files if file[4] == 2])
        )
    files = [file for file in files if file[4] == 1]
    payloads = reference_decoder.sections(rng.choice(files))
    if share < 0.58:
        other = reference_decoder.sections(rng.choice(files))
        return "mixed sections", join_sections(
            [rng.choice(pair) for pair in zip(payloads, other)]
        )
    kinds = {
        0.75: ("layout", mutated_layout),
        0.85: ("description", mutated_description),
        0.92: ("stored", mutated_stored),
        0.9999: ("sections", mutated_sections),
        1.0: ("bomb", bomb),
    }
    name, mutate = next(kind for limit, kind in kinds.items() if share <= limit)
    return name, join_sections(mutate(rng, payloads))


# What must hold.


class Finding(Exception):
    """What a file did that it must not."""


class TooSlow(BaseException):
    pass


def justified_bytes(data: bytes) -> int:
    """Memory that decoding a file may take.

    Some 30 bytes for each weight that the caller allows, some 40 for each byte of the
    description (lists of lists take most), and what NumPy and Python need for anything.
    """
    description = 0
    if data[:5] == b"MRCL\2":
        objects = 0
        with contextlib.suppress(StopIteration, zlib.error):
            start = reference_decoder2.varint_at(data, 5)[1]
            stream = zlib.decompressobj(-15, zdict=DICTIONARY2)
            inflated = stream.decompress(data[start:], 1 << 23)
            text = inflated.partition(b"\0")[0]
            description = len(inflated)
            # A short object stands for a long one.
            objects = min(text.count(b"class_name"), 1 << 16)
        # JSON, and what is made of it.
        description = 2 * description + 200 * objects
    elif data[:6] == b"MRCL\1\1":
        (length,) = struct.unpack("<I", data[6:10].ljust(4, b"\0"))
        try:
            description = len(inflate(data[10 : 10 + length]))
        except zlib.error:
            description = 1 << 16  # inflated up to the damage
    return (4 << 20) + 64 * MAX_WEIGHTS + 48 * description + 16 * len(data)


def check(data: bytes, compare: bool = True) -> bool:
    """Decodes a file. Returns whether it could be.

    Raises:
      Finding: it decodes to something that cannot be right.
    """
    try:
        file = MiracleFile.from_bytes(data, MAX_WEIGHTS)
        weights = decode(file, MAX_WEIGHTS).weights
    except FileFormatError as error:
        if not str(error):
            raise Finding("refused without a word") from None
        # What is claimed is no rule of the format.
        if compare and "max_weights" not in str(error) and not breaks_a_rule(data):
            raise Finding(f"the reference decoder takes it: {error}") from None
        return False
    if list(weights) != list(file.names):
        raise Finding("other names than the file's")
    if sum(value.size for value in weights.values()) != file.num_weights:
        raise Finding("more or less weights than claimed")
    for place, value in zip(file.coded, weights.values(), strict=True):
        if place is not None and not np.isfinite(value).all():
            raise Finding("coded weights that are not finite")
    if written(version1.to_bytes(file) if data[4] == 1 else file.to_bytes()) != written(
        data
    ):
        raise Finding("written again, it is another file")
    if compare and file.num_weights <= 400:
        if data[4] == 1:
            reference = reference_decoder.decode(data, DICTIONARY)
        else:
            reference = reference_decoder2.decode(data, DICTIONARY2, DEFAULTS)
        for name, (dtype, shape, values) in reference.items():
            value = weights[name]
            little_endian = value.astype(value.dtype.newbyteorder("<")).tobytes()
            if (value.dtype.name, value.shape, little_endian) != (dtype, shape, values):
                raise Finding("the reference decoder has other weights")
    return True


def breaks_a_rule(data: bytes) -> bool:
    """Whether the reference decoder refuses a file."""
    try:
        reference_decoder.parse(data, DICTIONARY)
    except (AssertionError, ValueError, LookupError, RecursionError, struct.error):
        return True
    except zlib.error:
        return True
    return False


def written(data):
    """What of a file has only one way to be written."""
    if data[4] == 1:
        return reference_decoder.sections(data)[1:3]
    inflated, codes = reference_decoder2.parts(data, DICTIONARY2)
    # Another text may name layers by which names of variables are shorter.
    source = iter(inflated[reference_decoder2.section(inflated)[1] :])
    groups, variables = reference_decoder2.parse_layout(source)
    list(reference_decoder2.parse_names(source, [""] * 1000, len(variables)))
    return groups, variables, bytes(source), codes


def guarded(data: bytes, compare: bool, traced: bool) -> tuple[bool, float, int]:
    """`check` under its bounds: whether it decodes, CPU seconds, bytes if traced."""
    peak = 0
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS * (20 if traced else 1))
    try:
        if traced:
            tracemalloc.start()
            # Not the comparison, which inflates and lists what it likes.
            accepted = check(data, compare=False)
            _, peak = tracemalloc.get_traced_memory()
        else:
            accepted = check(data, compare)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        tracemalloc.stop()
    if peak > justified_bytes(data):
        raise Finding(f"{peak:,} bytes of memory, {justified_bytes(data):,} justified")
    return accepted, 0.0 if traced else time.process_time() - start, peak


def _too_slow(*_):
    raise TooSlow(f"more than {CPU_SECONDS} s")


def fuzz(
    seed: int, files: int, seconds: float, findings: pathlib.Path, first: int = 0
) -> dict:
    """Decodes files `first`, ... of a seed, until `files` or `seconds` are used up.

    Returns:
      Counts and extremes, as JSON can say them.
    """
    normal_quantiles()
    previous = signal.signal(signal.SIGPROF, _too_slow)
    begin = time.monotonic()
    start_from = originals(seed)
    outcomes = collections.defaultdict(collections.Counter)
    found = collections.Counter()
    slowest, largest, done, digest = 0.0, 0, 0, hashlib.sha256()
    for number in range(first, first + files):
        if time.monotonic() - begin > seconds:
            break
        kind, data = mutation(seed, number, start_from)
        digest.update(data)
        done += 1
        traced = number % TRACED == 0 or kind == "bomb"
        # Tracing takes memory, too.
        traced = traced and justified_bytes(data) < HEADROOM // 8
        try:
            accepted, took, peak = guarded(data, number % COMPARED == 0, traced)
        except (Exception, TooSlow) as error:
            found[type(error).__name__] += 1
            outcomes[kind]["found"] += 1
            if outcomes[kind]["found"] <= KEPT:
                findings.mkdir(parents=True, exist_ok=True)
                path = findings / f"{seed}-{number}.miracle"
                path.write_bytes(data)
                print(f"{path} ({kind}): {type(error).__name__}: {error}", flush=True)
            continue
        outcomes[kind]["accepted" if accepted else "rejected"] += 1
        slowest, largest = max(slowest, took), max(largest, peak)
    signal.signal(signal.SIGPROF, previous)
    elapsed = time.monotonic() - begin
    return {
        "seed": seed,
        "files": done,
        "rejected": sum(c["rejected"] for c in outcomes.values()),
        "accepted": sum(c["accepted"] for c in outcomes.values()),
        "findings": dict(found),
        "kinds": {kind: dict(c) for kind, c in sorted(outcomes.items())},
        "max_cpu_seconds": slowest,
        "max_traced_bytes": largest,
        "files_per_second": done / max(elapsed, 1e-9),
        "sha256": digest.hexdigest(),
    }


def flips() -> dict[str, tuple[int, int]]:
    """Golden file -> how many of its bits, flipped alone, are detected, and how many
    there are."""
    result = {}
    for path in sorted(GOLDEN.rglob("*.miracle")):
        data = bytearray(path.read_bytes())
        detected = 0
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            try:
                MiracleFile.from_bytes(bytes(data))
            except FileFormatError:
                detected += 1
            data[bit // 8] ^= 1 << bit % 8
        result[str(path.relative_to(GOLDEN))] = detected, 8 * len(data)
    return result


def guided(arguments: list[str]) -> None:
    """Has atheris look for inputs that reach new code, until a check fails.

    An input is the four payloads before they are compressed, each but the last behind
    its length (2 bytes), so that mutations need not get past deflate and check values.
    """
    import atheris

    with atheris.instrument_imports():
        for name in [m for m in sys.modules if m.startswith("tfmiracle")]:
            del sys.modules[name]
        from tfmiracle import decoder, miracle_file
        from tfmiracle.codec import codebook
    globals().update(
        decode=decoder.decode,
        MiracleFile=miracle_file.MiracleFile,
        FileFormatError=miracle_file.FileFormatError,
    )
    codebook.normal_quantiles()

    def one(data):
        payloads = []
        for _ in range(3):
            (length,) = struct.unpack("<H", data[:2].ljust(2, b"\0"))
            payloads.append(data[2 : 2 + length])
            data = data[2 + length :]
        stored = zlib.compress(data, 1) if data else b""
        check(join_sections([deflate(payloads[0]), *payloads[1:], stored]))

    corpus = pathlib.Path(arguments.pop(1) if len(arguments) > 1 else "corpus")
    corpus.mkdir(parents=True, exist_ok=True)
    for i, file in enumerate(f for f in originals(0) if f[4] == 1):
        payloads = reference_decoder.sections(file)
        payloads[0] = inflate(payloads[0])
        if payloads[3]:
            payloads[3] = zlib.decompress(payloads[3])
        parts = [struct.pack("<H", len(p)) + p for p in payloads[:3]] + payloads[3:]
        (corpus / f"original{i}").write_bytes(b"".join(parts))
    atheris.Setup([*arguments, str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--findings", type=pathlib.Path, default="findings")
    parser.add_argument("--flips", action="store_true", help="flip every golden bit")
    parser.add_argument("--replay", nargs="+", type=pathlib.Path, metavar="FILE")
    parser.add_argument(
        "--coverage",
        nargs=argparse.REMAINDER,
        help="use atheris: a folder for its corpus, then flags of libFuzzer",
    )
    arguments = parser.parse_args()
    if arguments.coverage is not None:
        guided([sys.argv[0], *arguments.coverage])
        return 0
    if arguments.flips:
        counts = flips()
        for name, (detected, bits) in counts.items():
            print(f"{name}: {detected:,} of {bits:,} flips detected")
        return int(any(detected < bits for detected, bits in counts.values()))
    in_use = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = in_use * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if arguments.replay:
        signal.signal(signal.SIGPROF, _too_slow)
        for path in arguments.replay:
            accepted, _, peak = guarded(path.read_bytes(), True, True)
            print(f"{path}: {'accepted' if accepted else 'rejected'}, {peak:,} bytes")
        return 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = fuzz(
        arguments.seed,
        arguments.files,
        arguments.seconds,
        arguments.findings,
        arguments.first,
    )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**result, "resident_growth_kib": after - before}, indent=1))
    return int(bool(result["findings"]))


if __name__ == "__main__":
    sys.exit(main())
