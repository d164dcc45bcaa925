"""Version 2 of the file, to bytes and back; `docs/format_v2.md` specifies it."""

import functools
import json
import math
import pathlib
import zlib
from collections.abc import Sequence

import numpy as np

from tfmiracle.codec import keras_json, strict_json
from tfmiracle.codec.code import CODES
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.codec.parts import (
    MAX_DESCRIPTION_BYTES,
    MAX_DIMENSIONS,
    MAX_ENTRIES,
    MAX_GROUPS,
    MAX_LEVEL_SCALE,
    MAX_SCALE,
    MAX_VARIABLES,
    STORED_DTYPES,
    CodedGroup,
    FileFormatError,
    Levels,
    check_claim,
)
from tfmiracle.codec.prior import PRIORS

START = b"MRCL\2"
# Kinds of stored variables: the types, and two kinds of levels.
_LEVELS = ("levels", "squares")
_KINDS = (*STORED_DTYPES, *_LEVELS)
# Identifiers that a number says; between 0 and 65 it is the length of another one. A
# prior that is numbered has no parameters.
_MAX_IDENTIFIER = 64
_CODES = {0: "mrc", 65: "trellis"}
_PRIORS = {0: "zero"}
_MAX_PARAMETERS = 16
_SAME = -1  # place of a variable in the layer of the one before, which has no place


# Writing.


def to_bytes(file) -> bytes:
    """Serializes a `MiracleFile`.

    Raises:
      ValueError: if architecture and metadata take more than readers accept.
    """
    text, names = _text(file)
    size = max(len(text), sum(len(name.encode()) + 1 for name in file.names))
    if size > MAX_DESCRIPTION_BYTES:
        raise ValueError(
            f"The description (architecture and metadata, or names) takes {size:,} "
            f"bytes; a file has room for {MAX_DESCRIPTION_BYTES:,}."
        )
    fingerprint = b""
    if file.architecture is None:
        fingerprint = file.fingerprint.to_bytes(4, "little")
    parts = text + b"\0" + fingerprint, _layout(file, names), *_values(file)
    body = _deflate(parts) + b"".join(group.packed for group in file.groups)
    # The length counts its own bytes.
    length = len(START) + len(body) + 4
    length += next(n for n in range(1, 10) if len(_varint(length + n)) == n)
    data = START + _varint(length) + body
    return data + zlib.crc32(data).to_bytes(4, "little")


def part_bytes(file) -> dict[str, int]:
    """What takes the bytes of a file: the sum is its size.

    Parts are compressed together: what one of them takes is what it adds to the others.
    """
    text, names = _text(file)
    scales, *_ = _values(file)
    described = len(_deflate((text + b"\0",)))
    laid_out = len(_deflate((text + b"\0", _layout(file, names), scales)))
    codes = file.payload_bytes
    rest = len(to_bytes(file)) - codes
    return {
        "description": described,
        "layout": laid_out - described,
        "stored": rest - laid_out,
        "indices": codes,
    }


def fingerprint(architecture: dict) -> int:
    """What a file without its architecture holds instead: a CRC-32 of its JSON."""
    architecture = nameless(architecture)
    short = keras_json.shorten(architecture)
    return zlib.crc32(_json(architecture if short is None else short, sort_keys=True))


def nameless(architecture: dict) -> dict:
    """An architecture without the name of the network itself, which is for people."""
    config = architecture.get("config")
    if not isinstance(config, dict):
        return architecture
    config = {k: v for k, v in config.items() if k != "name"}
    return {**architecture, "config": config}


def _json(value, **options):
    options |= {"separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}
    try:
        return json.dumps(value, **options).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, **options | {"ensure_ascii": True}).encode()


def _text(file):
    """The JSON of a file, and the names that its variables may refer to."""
    content, names = {}, []
    if file.architecture is not None:
        short = keras_json.shorten(file.architecture)
        if short is None:
            content["verbatim"] = file.architecture
        else:
            content["model"] = short
            names = keras_json.lengthen(short)[1]
    if file.metadata:
        content["metadata"] = file.metadata
    return _json(content) if content else b"", names


def _varint(number):
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _step(number):
    """A difference, by its sign and size, as a varint."""
    return _varint(2 * number if number >= 0 else -2 * number - 1)


def _layout(file, names):
    out = bytearray(_varint(len(file.groups)))
    for i, group in enumerate(file.groups):
        code, prior = group.code, group.prior
        out += _identifier(code, _CODES) + _varint(code.seed) + _parameters(code)
        out += _varint(group.layout.block_size) + _identifier(prior, _PRIORS)
        if prior.identifier not in _PRIORS.values():
            out += _parameters(prior)
        if i + 1 < len(file.groups):
            out += _varint(group.payload_bytes)
        if group.layout.seed != group.code.seed:
            raise ValueError("The seeds of a group's layout and code must be equal.")
        used = {v.scale_index for v in group.layout.variables}
        if len(used) != group.layout.num_scales:
            raise ValueError("A coding scale belongs to no variable.")
    kinds, hashes, scales, ranks, lengths = [], [], [], [], []
    stored, last, previous = iter(file.stored), [0] * len(file.groups), None
    for place in file.coded:
        if place is None:
            variable = next(stored)
            kinds.append(len(file.groups) + _KINDS.index(_kind(variable)))
        else:
            g = place[0]
            variable = file.groups[g].layout.variables[place[1]]
            kinds.append(g)
            hashes.append(_varint(variable.hash_factor))
            scales.append(_step(variable.scale_index - last[g]))
            last[g] = variable.scale_index
        shape = tuple(variable.shape)
        if previous and shape == previous[-1:]:
            ranks.append(0)
        else:
            ranks.append(1 + len(shape))
            lengths += shape
        previous = shape
    out += b"".join(map(_varint, (len(kinds), *kinds)))
    out += b"".join(hashes) + b"".join(scales)
    out += b"".join(map(_varint, (*ranks, *lengths)))
    steps, rest = _split_names(file.names, names)
    return bytes(out + b"".join(map(_step, steps)) + rest)


def _identifier(thing, numbered):
    name = thing.identifier
    for number, known in numbered.items():
        if name == known:
            return _varint(number)
    return _varint(len(name)) + name.encode()


def _parameters(thing):
    numbers = thing.parameters()
    return b"".join(map(_varint, (len(numbers), *numbers)))


def _kind(stored):
    if isinstance(stored, Levels):
        return "squares" if stored.squared else "levels"
    return stored.dtype.name


def _split_names(names, known):
    """Names of variables as steps through the names of layers, and what is left."""
    place_of = {name: i + 1 for i, name in reversed(list(enumerate(known)))}
    steps, rest, last, before = [], bytearray(), 0, None
    for name in names:
        layer, slash, part = name.partition("/")
        place = place_of.get(layer, 0) if slash else 0
        head, slash, tail = name.rpartition("/")
        if not place and slash and head == before:
            place, part = _SAME, tail
        before = head if slash else None
        steps.append(place - last)
        last = place
        rest += (part if place else name).encode() + b"\n"
    return steps, bytes(rest)


def _columns(scales):
    """binary32 by column: all highest bytes, then all second ones, ..."""
    return np.asarray(scales, ">f4").reshape(-1, 1).view(np.uint8).T.tobytes()


def _values(file):
    levels = [value for value in file.stored if isinstance(value, Levels)]
    scales = [group.scales for group in file.groups]
    scales.append(np.array([value.scale for value in levels], np.float32))
    plain = [
        np.asarray(value, value.dtype.newbyteorder("<")).tobytes()
        for value in file.stored
        if not isinstance(value, Levels)
    ]
    return (
        _columns(np.concatenate(scales)),
        b"".join(value.levels.tobytes() for value in levels if not value.squared),
        b"".join(value.levels.tobytes() for value in levels if value.squared),
        b"".join(plain),
    )


def _deflate(parts):
    """The shortest of some ways to compress; large parts have symbols of their own."""
    strategies, sizes = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED), (16, 64, 256)
    ways = [(strategy, large) for strategy in strategies for large in sizes]
    if sum(map(len, parts)) > 1 << 20:
        ways = ways[:1]  # where it takes time, there is little to gain
    tried = []
    for strategy, large in ways:
        stream = zlib.compressobj(
            9, wbits=-15, memLevel=9, strategy=strategy, zdict=_dictionary()
        )
        out = []
        for part in parts:
            if len(part) >= large:
                out.append(stream.flush(zlib.Z_BLOCK))
            out.append(stream.compress(part))
        tried.append(b"".join([*out, stream.flush()]))
    return min(tried, key=len)


@functools.cache
def _dictionary() -> bytes:
    """Text that descriptions have in common; part of the format."""
    return (pathlib.Path(__file__).parent / "description_v2.dict").read_bytes()


# Reading.


def check_envelope(data: bytes) -> int:
    """Checks length and check value of a file.

    Returns:
      Where its compressed part starts.

    Raises:
      FileFormatError: if it is truncated, too long or damaged.
    """
    length = 0
    for i, byte in enumerate(data[len(START) : len(START) + 9]):
        length |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            break
    else:
        raise FileFormatError(
            f"Truncated: there are {len(data):,} bytes, fewer than say how many there "
            "should be."
            if len(data) < len(START) + 9
            else "The length of the file does not end."
        )
    start = len(START) + i + 1
    if i and not byte:
        raise FileFormatError("The length of the file is longer than it need be.")
    if len(data) < length:
        raise FileFormatError(
            f"Truncated: the file has {len(data):,} of {length:,} bytes."
        )
    if len(data) > length:
        raise FileFormatError(f"The file has {len(data) - length:,} bytes too many.")
    if length < start + 4 or zlib.crc32(data[:-4]) != int.from_bytes(
        data[-4:], "little"
    ):
        raise FileFormatError("Damaged: the check value is wrong.")
    return start


def from_bytes(data: bytes, max_weights: int | None) -> dict:
    """The attributes of the `MiracleFile` that `data` holds, of which it trusts none.

    Raises:
      FileFormatError: if it is no file of version 2.
    """
    start = check_envelope(data)
    source = _Source(data[start:-4])
    try:
        text = source.text()
        content = _parse_json(text) if text else {}
        architecture, fingerprint, known = content.get("verbatim"), None, []
        if "model" in content:
            architecture, known = keras_json.lengthen(content["model"])
        if architecture is None:
            fingerprint = int.from_bytes(source.take(4), "little")
        file = _parse_layout(source, max_weights)
        names = _parse_names(source, len(file["coded"]), known)
        scales, stored = _parse_values(source, file)
        groups = _parse_codes(source.rest(), file["heads"], scales)
    except FileFormatError:
        raise
    except (ValueError, OverflowError, RecursionError, zlib.error) as error:
        raise FileFormatError(f"The file is inconsistent: {error}") from error
    return {
        "names": names,
        "coded": file["coded"],
        "groups": groups,
        "stored": stored,
        "architecture": architecture,
        "metadata": content.get("metadata", {}),
        "fingerprint": fingerprint,
    }


class _Source:
    """Bytes of a deflate stream, inflated only as they are asked for."""

    def __init__(self, data):
        self._inflate = zlib.decompressobj(wbits=-15, zdict=_dictionary())
        self._data = data
        self._buffer = bytearray()
        self._position = 0
        self._inflated = 0

    def _more(self, count=0):
        """Inflates `count` bytes, by default some; False if the stream has ended."""
        if self._inflate.eof:
            return False
        # Each call copies what is not inflated yet: so there must be few.
        count = count or max(1 << 12, self._inflated)
        got = self._inflate.decompress(self._data, count)
        self._data = self._inflate.unconsumed_tail
        del self._buffer[: self._position]
        self._position = 0
        self._buffer += got
        self._inflated += len(got)
        return bool(got)

    def take(self, count):
        """The next `count` bytes."""
        while (lacking := count - (len(self._buffer) - self._position)) > 0:
            if not self._more(lacking):
                raise FileFormatError("The description ends too early.")
        start = self._position
        self._position += count
        return bytes(self._buffer[start : self._position])

    def until(self, end, limit):
        """The bytes before the byte `end`, which is passed over."""
        while (found := self._buffer.find(end, self._position)) < 0:
            size = len(self._buffer) - self._position
            if size > limit or not self._more():
                raise FileFormatError("The description does not end, or is too long.")
        start, self._position = self._position, found + 1
        if found - start > limit:
            raise FileFormatError("The description is too long.")
        return bytes(self._buffer[start:found])

    def text(self):
        return self.until(b"\0", MAX_DESCRIPTION_BYTES)

    def varint(self, limit):
        """The next number, at most `limit`."""
        number = 0
        for shift in range(0, 70, 7):
            if self._position == len(self._buffer) and not self._more():
                raise FileFormatError("The layout ends too early.")
            byte = self._buffer[self._position]
            self._position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise FileFormatError("A number in the layout does not end.")
        if shift and not byte:
            raise FileFormatError("A number in the layout is longer than it need be.")
        if number > limit:
            raise FileFormatError(f"A number in the layout is {number}, over {limit}.")
        return number

    def step(self, limit):
        number = self.varint(2 * limit + 1)
        return -(number + 1 >> 1) if number & 1 else number >> 1

    def rest(self):
        """What follows the stream, which must have been read to its end."""
        if self._position < len(self._buffer) or self._more(1):
            raise FileFormatError("The description has bytes too many.")
        if not self._inflate.eof:
            raise FileFormatError("The description does not end.")
        return self._inflate.unused_data


def _parse_json(text):
    content = strict_json.parse(text)
    if not (
        content
        and content.keys() <= {"model", "verbatim", "metadata"}
        and not {"model", "verbatim"} <= content.keys()
        and all(isinstance(value, dict) for value in content.values())
    ):
        raise FileFormatError("The description holds something else than it should.")
    return content


def _parse_layout(source, max_weights):
    heads = []
    num_groups = source.varint(MAX_GROUPS)
    for i in range(num_groups):
        cls = _parse_class(source, _CODES, CODES)
        seed = source.varint(2**64 - 1)
        code = cls, _parse_parameters(source), seed
        block_size = source.varint(MAX_ENTRIES)
        cls = _parse_class(source, _PRIORS, PRIORS)
        numbered = cls.identifier in _PRIORS.values()
        numbers = () if numbered else _parse_parameters(source)
        size = source.varint(2**62) if i + 1 < num_groups else None
        heads.append((code, block_size, cls.from_parameters(numbers), size, []))

    count = source.varint(MAX_VARIABLES)
    kinds = [source.varint(num_groups + len(_KINDS) - 1) for _ in range(count)]
    hashes = [
        source.varint(MAX_ENTRIES) if kind < num_groups else None for kind in kinds
    ]
    last = [0] * num_groups
    scale_indices = []
    for kind in kinds:
        if kind < num_groups:
            last[kind] += source.step(count)
            if not 0 <= last[kind] < count:
                raise FileFormatError("A variable has an unknown coding scale.")
            scale_indices.append(last[kind])
        else:
            scale_indices.append(None)
    ranks = [source.varint(1 + MAX_DIMENSIONS) for _ in range(count)]
    previous, coded, stored, shapes = (), [], [], []
    for kind, hash_factor, scale_index, rank in zip(
        kinds, hashes, scale_indices, ranks
    ):
        if rank:
            shape = tuple(source.varint(MAX_ENTRIES) for _ in range(rank - 1))
            if previous and shape == previous[-1:]:
                raise FileFormatError("A shape is longer than it need be.")
        elif previous:
            shape = previous[-1:]
        else:
            raise FileFormatError("A shape refers to one that is not there.")
        previous = shape
        shapes.append(shape)
        if kind < num_groups:
            variables = heads[kind][-1]
            coded.append((kind, len(variables)))
            variables.append(CodedVariable(shape, hash_factor, scale_index))
        else:
            coded.append(None)
            stored.append((_KINDS[kind - num_groups], shape))
    check_claim(shapes, max_weights)
    return {"heads": heads, "coded": coded, "stored": stored}


def _parse_class(source, numbered, registry):
    kind = source.varint(max(_MAX_IDENTIFIER, *numbered))
    if kind in numbered:
        return registry.find(numbered[kind])
    identifier = source.take(kind).decode("ascii")
    if identifier in numbered.values():
        raise FileFormatError(f"{identifier!r} has a number, not a name.")
    if identifier not in registry.names():
        raise FileFormatError(
            f"The file needs {identifier!r}, which is not registered here, only "
            f"{', '.join(registry.names())}. Import the module that registers it, or "
            "install a newer tfmiracle."
        )
    return registry.find(identifier)


def _parse_parameters(source):
    return tuple(source.varint(2**32) for _ in range(source.varint(_MAX_PARAMETERS)))


def _parse_names(source, count, known):
    names, place, room = [], 0, MAX_DESCRIPTION_BYTES
    steps = [source.step(len(known) + 1) for _ in range(count)]
    for step in steps:
        place += step
        same = place == _SAME and names and "/" in names[-1]
        if not (same or 0 <= place <= len(known)):
            raise FileFormatError("A variable belongs to a layer that is not there.")
        rest = source.until(b"\n", room).decode()
        layer = (
            names[-1].rpartition("/")[0] if same else known[place - 1] if place else ""
        )
        room -= len(layer) + len(rest) + 1
        if room < 0:
            raise FileFormatError("The names of the variables are too long.")
        names.append(f"{layer}/{rest}" if place else rest)
    if not (all(map(str.isprintable, names)) and len(set(names)) == count):
        raise FileFormatError("Names of variables are equal, or not printable.")
    return names


def _take_scales(source, count, largest):
    columns = np.frombuffer(source.take(4 * count), np.uint8).reshape(4, count)
    scales = np.ascontiguousarray(columns.T).view(">f4").reshape(-1)
    if not np.all((scales > 0) & (scales <= largest)):
        raise FileFormatError("A scale is out of range.")
    return scales.astype(np.float32)


def _parse_values(source, file):
    counts = [
        1 + max((v.scale_index for v in vs), default=-1) for *_, vs in file["heads"]
    ]
    for number, (*_, variables) in zip(counts, file["heads"]):
        if len({v.scale_index for v in variables}) != number:
            raise FileFormatError("A coding scale belongs to no variable.")
    variables = file["stored"]
    rounded = [i for i, (kind, _) in enumerate(variables) if kind in _LEVELS]
    scales = _take_scales(source, sum(counts) + len(rounded), MAX_SCALE)
    *scales, of_levels = np.split(scales, np.cumsum(counts, dtype=int))
    if not np.all(of_levels <= MAX_LEVEL_SCALE):
        raise FileFormatError("A scale of levels is out of range.")
    scale_of = dict(zip(rounded, of_levels))
    dtypes = [np.dtype("int8" if kind in _LEVELS else kind) for kind, _ in variables]
    counts = [math.prod(shape) for _, shape in variables]
    raw = source.take(sum(n * dtype.itemsize for n, dtype in zip(counts, dtypes)))
    values, start = [None] * len(variables), 0
    # All levels, then all squares, then the rest, each in the order of the network.
    for i in sorted(range(len(variables)), key=lambda i: _turn(variables[i][0])):
        (kind, shape), dtype, count = variables[i], dtypes[i], counts[i]
        little = np.frombuffer(raw, dtype.newbyteorder("<"), count, start)
        little = little.reshape(shape)
        start += count * dtype.itemsize
        if kind in _LEVELS:
            if np.any(little < (0 if kind == "squares" else -127)):
                raise FileFormatError("A level is out of range.")
            values[i] = Levels(little, scale_of[i], kind == "squares")
        else:
            if dtype.kind == "b" and np.any(little.view(np.uint8) > 1):
                raise FileFormatError("A stored boolean is neither 0 nor 1.")
            values[i] = little.astype(dtype)
    return scales, values


def _turn(kind):
    return _LEVELS.index(kind) if kind in _LEVELS else len(_LEVELS)


def _parse_codes(
    packed: bytes, heads, scales: Sequence[np.ndarray]
) -> list[CodedGroup]:
    groups, start = [], 0
    for (code, block_size, prior, size, variables), rho in zip(
        heads, scales, strict=True
    ):
        cls, parameters, seed = code
        layout = WeightLayout(variables, block_size, seed)
        if layout.block_size != block_size:
            raise FileFormatError(f"A block of {block_size} exceeds its weights.")
        code = cls.from_parameters(parameters, layout)
        end = len(packed) if size is None else start + size
        if end > len(packed):
            raise FileFormatError("There are fewer codes than blocks.")
        unpacked = code.unpack(packed[start:end], layout.num_blocks, block_size)
        groups.append(CodedGroup(layout, code, rho, unpacked, prior))
        start = end
    if start != len(packed):
        raise FileFormatError("There are bytes after the last code.")
    return groups
