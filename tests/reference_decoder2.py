"""A second decoder, written from docs/format_v2.md alone: a check of the document.

Plain Python, without NumPy and without anything of tfmiracle; what version 2 shares
with version 1 is that of `reference_decoder`. Slow, and of no use but to be read beside
the document and to be compared with `tfmiracle.decoder`.
"""

import functools
import json
import math
import re
import struct
import zlib

from reference_decoder import TYPES, binary32, expand, philox, quantiles, vectors

KINDS = [*TYPES, "levels", "squares"]


def decode(data, dictionary, table) -> dict[str, tuple[str, tuple, bytes]]:
    """Returns name -> (type, shape, values as little-endian bytes)."""
    inflated, codes = parts(data, dictionary)
    text, position = section(inflated)
    known = lengthen(text["model"], table)[1] if "model" in text else []
    source = iter(inflated[position:])
    groups, variables = parse_layout(source)
    names = parse_names(source, known, len(variables))
    parse_values(source, groups, variables)
    assert next(source, None) is None

    coded = []
    for number, group in enumerate(groups):
        members = [v for v in variables if v.get("group") == number]
        group["N"] = sum(-(-math.prod(v["shape"]) // v["hash"]) for v in members)
        group["B"] = -(-group["N"] // group["D"])
        size = group["bytes"] if number + 1 < len(groups) else len(codes)
        own, codes = codes[:size], codes[size:]
        if group["kind"] == "trellis":
            candidates = trellis(group, own)
        else:
            assert size == -(-group["B"] * group["bits"] // 8)
            group["string"] = int.from_bytes(own, "little")
            candidates = vectors(group)
        coded.append(iter(expand(group, members, candidates)))
    assert not codes

    result = {}
    for name, v in zip(names, variables, strict=True):
        if "group" in v:
            floats = next(coded[v["group"]])
        elif v["type"] in ("levels", "squares"):
            floats = [binary32(k * v["scale"]) for k in v["levels"]]
            if v["type"] == "squares":
                floats = [binary32(x * x) for x in floats]
        else:
            result[name] = v["type"], v["shape"], v["values"]
            continue
        values = struct.pack(f"<{len(floats)}f", *floats)
        result[name] = "float32", v["shape"], values
    return result


def parts(data, dictionary):  # section 1
    assert data[:5] == b"MRCL\2"
    length, position = varint_at(data, 5)
    assert length == len(data)
    assert zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
    inflate = zlib.decompressobj(-15, zdict=dictionary)
    inflated = inflate.decompress(data[position:-4])
    assert inflate.eof
    return inflated, inflate.unused_data


def varint_at(data, position):
    source = iter(data[position:])
    number = varint(source)
    return number, len(data) - len(bytes(source))


def section(inflated):  # section 2
    """The text, and where the layout starts."""
    end = inflated.index(0)
    text = json.loads(inflated[:end]) if end else {}
    described = "model" in text or "verbatim" in text
    return text, end + (1 if described else 5)


def varint(source):
    number = shift = 0
    while True:
        byte = next(source)
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number


def step(source):
    number = varint(source)
    return -(number + 1) // 2 if number % 2 else number // 2


def take(source, count):
    return bytes(next(source) for _ in range(count))


def parse_layout(source):  # section 3
    groups = []
    count = varint(source)
    for g in range(count):
        group = {"kind": {0: "mrc", 65: "trellis"}[varint(source)]}
        group["seed"] = varint(source)
        assert varint(source) == 2
        if group["kind"] == "mrc":
            group |= {"bits": varint(source), "shared": varint(source) == 1}
        else:
            group |= {"state_bits": varint(source), "length": varint(source)}
        group["D"] = varint(source)
        assert varint(source) == 0  # mean zero
        if g + 1 < count:
            group["bytes"] = varint(source)
        groups.append(group | {"S": 0, "last": 0})
    variables = []
    for _ in range(varint(source)):
        kind = varint(source)
        variables.append(
            {"group": kind} if kind < count else {"type": KINDS[kind - count]}
        )
    coded = [v for v in variables if "group" in v]
    for v in coded:
        v["hash"] = varint(source)
    for v in coded:
        group = groups[v["group"]]
        group["last"] += step(source)
        v["scale"] = group["last"]
        group["S"] = max(group["S"], 1 + v["scale"])
    ranks = [varint(source) for _ in variables]
    last = None
    for v, rank in zip(variables, ranks):
        v["shape"] = tuple(varint(source) for _ in range(rank - 1)) if rank else last
        last = v["shape"][-1:]
    return groups, variables


def parse_names(source, known, count):  # section 4
    names, place = [], 0
    for difference in [step(source) for _ in range(count)]:
        place += difference
        rest = b"".join(iter(lambda: take(source, 1), b"\n")).decode()
        layer = names[-1].rpartition("/")[0] if place == -1 else [*known, ""][place - 1]
        names.append(f"{layer}/{rest}" if place else rest)
    return names


def parse_values(source, groups, variables):  # section 5
    rounded = [v for v in variables if v.get("type") in ("levels", "squares")]
    counts = [group["S"] for group in groups]
    total = sum(counts) + len(rounded)
    columns = [take(source, total) for _ in range(4)]
    scales = [struct.unpack(">f", bytes(column))[0] for column in zip(*columns)]
    for group in groups:
        group["scales"], scales = scales[: group["S"]], scales[group["S"] :]
    for v, scale in zip(rounded, scales, strict=True):
        v["scale"] = scale
    for turn in ("levels",), ("squares",), TYPES:
        for v in variables:
            if v.get("type") in turn:
                raw = take(source, TYPES.get(v["type"], 1) * math.prod(v["shape"]))
                v["values"] = raw
                v["levels"] = struct.unpack(f"{len(raw)}b", raw)


def trellis(group, codes):  # section 6
    """The candidates of all blocks, the last of which may be short."""
    bits, count = group["state_bits"], group["N"]
    assert 8 <= bits <= 20 and len(codes) == group["length"]
    symbols = [half for byte in codes for half in (byte % 16, byte // 16)]
    assert len(symbols) <= bits // 4 * count
    entering = [[] for _ in range(count)]
    for i, symbol in enumerate(symbols):
        entering[i * count // len(symbols)].append(symbol)
    table_bits = max(16, bits)
    state, flat = 0, []
    for t in range(count):
        for symbol in entering[t]:
            state = (16 * state + symbol) % 2**bits
        offset = t * 0x9E3779B1 % 2**32 // 2 ** (32 - table_bits)
        entry = (state + offset) % 2**table_bits
        flat.append(eight_normals(group["seed"], entry // 8)[entry % 8])
    return [flat[b : b + group["D"]] for b in range(0, count, group["D"])]


@functools.lru_cache(1 << 12)
def eight_normals(seed, g):
    words = philox((0, g, 0, 9), seed)
    return [quantiles()[half] for w in words for half in (w % 65536, w // 65536)]


def lengthen(short, table):  # section 7
    """The architecture, and the names in it."""
    names, last = [], {}

    def default(node):
        name = node.get("class_name")
        known = isinstance(name, str) and "module" not in node
        return table.get(name) if known else None

    def visit(node):
        if isinstance(node, list):
            return [visit(item) for item in node]
        if not isinstance(node, dict):
            return node
        common = default(node)
        if common is None:
            config = node.get("config")
            has_name = "class_name" in node and isinstance(config, dict)
            if has_name and isinstance(config.get("name"), str):
                names.append(config["name"])
            return {key: visit(value) for key, value in node.items()}
        own = dict(node.get("config", {}))
        absent = own.pop("-", [])
        automatic = common.get("name")
        if automatic and "name" not in absent:
            if "name" not in own:
                i = last.get(automatic)
                own["name"] = automatic if i is None else f"{automatic}_{i + 1}"
            names.append(own["name"])
            pattern = re.escape(automatic) + "(_([1-9][0-9]{0,8}))?"
            if match := re.fullmatch(pattern, own["name"]):
                last[automatic] = int(match[2] or 0)
        config = {key: visit(value) for key, value in own.items()}
        for key, value in common["config"].items():
            if key not in config and key not in absent:
                config[key] = visit(value)
        rest = {key: visit(value) for key, value in node.items() if key != "config"}
        more = {}
        if node["class_name"] == "Sequential" and config["layers"]:
            first = config["layers"][0]["config"]
            if "batch_shape" in first:
                more = {"build_input_shape": first["batch_shape"]}
        if node["class_name"] == "Functional":
            layers = config["layers"]
            ends = [[layers[i]["config"]["name"], 0, 0] for i in (0, -1)]
            more = dict(zip(("input_layers", "output_layers"), ends))
            connect(layers)
        for key, value in more.items():
            if key not in absent:
                config.setdefault(key, value)
        return {**common["head"], **rest, "config": config}

    return visit(short), names


def connect(layers):
    def tensor(i, place=(0, 0)):
        history = [layers[i]["config"]["name"], *place]
        config = {"shape": [], "dtype": "float32", "keras_history": history}
        return {"class_name": "__keras_tensor__", "config": config}

    def revive(value, i):
        if isinstance(value, list):
            return [revive(item, i) for item in value]
        if isinstance(value, dict) and [*value] == ["t"]:
            if isinstance(value["t"], list):
                return tensor(i - value["t"][0], value["t"][1:])
            return tensor(i - value["t"])
        if isinstance(value, dict):
            return {key: revive(item, i) for key, item in value.items()}
        return value

    for i, layer in enumerate(layers):
        layer.setdefault("name", layer["config"]["name"])
        if "inbound_nodes" in layer:
            layer["inbound_nodes"] = [
                {"args": revive(call, i), "kwargs": {}}
                if isinstance(call, list)
                else revive(call, i)
                for call in layer["inbound_nodes"]
            ]
        elif i and layer["class_name"] != "InputLayer":
            masked = layer["class_name"] == "BatchNormalization"
            kwargs = {"mask": None} if masked else {}
            layer["inbound_nodes"] = [{"args": [tensor(i - 1)], "kwargs": kwargs}]
        else:
            layer["inbound_nodes"] = []
