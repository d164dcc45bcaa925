"""A second decoder, written from docs/format.md alone: a check of the document.

Plain Python, without NumPy and without anything of tfmiracle. Slow, and of no use but
to be read beside the document and to be compared with `tfmiracle.decoder`.
"""

import functools
import json
import math
import statistics
import struct
import unicodedata
import zlib

TYPES = {"float32": 4, "float64": 8, "float16": 2, "int8": 1, "int16": 2, "int32": 4}
TYPES |= {"int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1}


def decode(data: bytes, dictionary: bytes) -> dict[str, tuple[str, tuple, bytes]]:
    """Returns name -> (type, shape, values as little-endian bytes)."""
    names, groups, variables, stored = parse(data, dictionary)
    coded = [iter(expand(group, group["members"], vectors(group))) for group in groups]
    result = {}
    for name, v in zip(names, variables, strict=True):
        if "type" in v:
            size = TYPES[v["type"]] * math.prod(v["shape"])
            result[name] = v["type"], v["shape"], stored[:size]
            stored = stored[size:]
        else:
            values = next(coded[v["group"]])
            result[name] = (
                "float32",
                v["shape"],
                struct.pack(f"<{len(values)}f", *values),
            )
    return result


def parse(data, dictionary):
    """Refuses files that break a rule, by an error of whatever kind."""
    description, layout, indices, stored = sections(data)
    names = parse_description(inflated(description, 2**22, -15, zdict=dictionary))
    groups, variables = parse_layout(layout)
    assert len(names) == len(variables)
    for number, group in enumerate(groups):
        group["members"] = [v for v in variables if v.get("group") == number]
        counts = [-(-math.prod(v["shape"]) // v["hash"]) for v in group["members"]]
        group["N"] = sum(counts)
        assert 1 <= group["D"] <= group["N"]
        assert len(group["scales"]) == 1 + max(v["scale"] for v in group["members"])
        group["B"] = -(-group["N"] // group["D"])
        size = -(-group["B"] * group["bits"] // 8)
        assert len(indices) >= size
        group["string"] = int.from_bytes(indices[:size], "little")
        assert group["string"] >> group["B"] * group["bits"] == 0
        indices = indices[size:]
    assert not indices

    kept = [(v, TYPES[v["type"]]) for v in variables if "type" in v]
    room = sum(size * math.prod(v["shape"]) for v, size in kept)
    values = inflated(stored, room, 15) if stored else b""
    assert len(values) == room
    position = 0
    for v, size in kept:
        end = position + size * math.prod(v["shape"])
        assert v["type"] != "bool" or set(values[position:end]) <= {0, 1}
        position = end
    return names, groups, variables, values


def sections(data):  # section 1
    assert data[:5] == b"MRCL\x01"
    position, payloads = 5, []
    for number in (1, 2, 3, 4):
        found, length = struct.unpack_from("<BI", data, position)
        end = position + 5 + length
        (check,) = struct.unpack_from("<I", data, end)
        assert found == number and zlib.crc32(data[position:end]) == check
        payloads.append(data[position + 5 : end])
        position = end + 4
    assert position == len(data)
    return payloads


def inflated(data, room, bits, **options):
    inflate = zlib.decompressobj(bits, **options)
    content = inflate.decompress(data, room + 1)
    assert len(content) <= room and inflate.eof and not inflate.unused_data
    return content


def parse_description(text):  # section 2
    def unique(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def finite(number):
        assert math.isfinite(float(number))

    def short(number):
        assert len(number) <= 100

    assert text.count(b"[") + text.count(b"{") <= 131072
    content = json.loads(
        text.decode("utf-8"),
        object_pairs_hook=unique,
        parse_float=finite,
        parse_int=short,
        parse_constant=finite,
    )
    assert isinstance(content, dict) and depth(content) <= 128
    names = content["names"]
    assert isinstance(content["model"], dict) and isinstance(content["metadata"], dict)
    assert isinstance(names, list) and all(isinstance(name, str) for name in names)
    assert len(set(names)) == len(names)
    for character in "".join(names):
        assert character == " " or unicodedata.category(character)[0] not in "CZ"
    return names


def depth(value):
    if not isinstance(value, dict | list):
        return 0
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, parts), default=0)


def parse_layout(layout):  # section 3
    source = iter(layout)

    def byte():
        value = next(source, None)
        assert value is not None
        return value

    def varint(limit):
        number = shift = 0
        while True:
            part = byte()
            number |= (part & 127) << shift
            shift += 7
            if part < 128:
                assert (part or shift == 7) and number <= limit
                return number

    def take(form, count):
        return struct.unpack(form, bytes(byte() for _ in range(count)))

    groups, variables = [], []
    for _ in range(varint(1024)):
        group = {"seed": take("<Q", 8)[0], "D": varint(2**32 - 1), "bits": varint(28)}
        group["shared"] = varint(1) == 1
        count = varint(len(layout))
        scales = take(f"<{count}f", 4 * count)
        assert all(0 < scale <= binary32(1e30) for scale in scales)
        groups.append(group | {"scales": scales})
    entries = 0
    for _ in range(varint(8192)):
        kind = varint(len(groups))
        if kind:
            variable = {"group": kind - 1, "hash": varint(2**32 - 1)}
            variable["scale"] = varint(len(groups[kind - 1]["scales"]) - 1)
            assert variable["hash"] >= 1
        else:
            variable = {"type": list(TYPES)[varint(len(TYPES) - 1)]}
        shape = tuple(varint(2**32 - 1) for _ in range(varint(32)))
        entries += math.prod(max(length, 1) for length in shape)
        assert entries < 2**32
        variables.append(variable | {"shape": shape})
    assert next(source, None) is None
    return groups, variables


def philox(counter, seed):  # section 6
    c0, c1, c2, c3 = counter
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 % 2**32,
            (p0 >> 32) ^ c3 ^ k1,
            p0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words(seed, domain, stream, count):
    calls = range(-(-count // 4))
    return [w for i in calls for w in philox((i, 0, stream, domain), seed)][:count]


def permutation(seed, domain, stream, n):
    word = words(seed, domain, stream, n)
    return sorted(range(n), key=lambda i: (word[i], i))


def signs(seed, domain, stream, n):
    word = words(seed, domain, stream, -(-n // 32))
    return [-1 if word[i // 32] >> i % 32 & 1 else 1 for i in range(n)]


@functools.cache
def quantiles():  # section 7
    inverse = statistics.NormalDist().inv_cdf
    return [round(inverse((i + 0.5) / 65536) * 2**20) / 2**20 for i in range(65536)]


def vector(seed, k, block, domain, size):
    result = []
    for g in range(-(-size // 8)):
        for word in philox((k, g, block, domain), seed):
            result += [quantiles()[word % 65536], quantiles()[word >> 16]]
    return result[:size]


def candidate(group, block):
    seed, size, bits = group["seed"], group["D"], group["bits"]
    k = group["string"] >> block * bits & (1 << bits) - 1
    if not group["shared"]:
        return vector(seed, k, block, 0, size)
    y = vector(seed, k, 0, 1, size)
    shuffle, flip = permutation(seed, 2, block, size), signs(seed, 3, block, size)
    return [flip[d] * y[shuffle[d]] for d in range(size)]


def vectors(group):
    return [candidate(group, b) for b in range(group["B"])]


def expand(group, members, candidates):  # section 8
    slot = permutation(group["seed"], 5, 0, group["N"])
    first = 0
    for position, v in enumerate(members):
        n = math.prod(v["shape"])
        m = -(-n // v["hash"])
        scale = group["scales"][v["scale"]]
        effective = []
        for e in range(first, first + m):
            z = candidates[slot[e] // group["D"]][slot[e] % group["D"]]
            effective.append(binary32(scale * z))  # exact in binary64, rounded once
        first += m
        if v["hash"] == 1:
            yield effective
        else:
            order = permutation(group["seed"], 6, position, n)
            sign = signs(group["seed"], 7, position, n)
            yield [sign[i] * effective[order[i] % m] for i in range(n)]


def binary32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]
