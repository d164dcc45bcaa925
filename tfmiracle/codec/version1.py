"""Version 1 of the file, which is read for ever; `docs/format.md` specifies it."""

import math
import pathlib
import struct
import zlib

import numpy as np

from tfmiracle.codec import strict_json
from tfmiracle.codec.code import MinimalRandomCode
from tfmiracle.codec.codebook import CODEBOOKS, MAX_BLOCK_BITS
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.codec.parts import (
    MAX_DESCRIPTION_BYTES,
    MAX_DIMENSIONS,
    MAX_ENTRIES,
    MAX_GROUPS,
    MAX_SCALE,
    MAX_VARIABLES,
    STORED_DTYPES,
    CodedGroup,
    FileFormatError,
    check_claim,
)

START = b"MRCL\1"
_DESCRIPTION, _LAYOUT, _INDICES, _STORED = 1, 2, 3, 4


def from_bytes(data: bytes, max_weights: int | None) -> dict:
    """The attributes of the `MiracleFile` that `data` holds, of which it trusts none.

    Raises:
      FileFormatError: if it is no file of version 1.
    """
    position = len(START)
    sections = []
    for tag in (_DESCRIPTION, _LAYOUT, _INDICES, _STORED):
        payload, position = _read_section(data, position, tag)
        sections.append(payload)
    if position != len(data):
        raise FileFormatError(
            f"{len(data) - position} bytes too many after the last section."
        )
    description, layout, packed, stored = sections
    try:
        groups, shapes, coded = _parse_layout(layout, packed, max_weights)
        values = _parse_stored(stored, shapes)
        names, architecture, metadata = _parse_description(description, len(coded))
    except FileFormatError:
        raise
    except (ValueError, KeyError, IndexError, OverflowError, zlib.error) as error:
        raise FileFormatError(f"The file is inconsistent: {error}") from error
    return {
        "names": names,
        "coded": coded,
        "groups": groups,
        "stored": values,
        "architecture": architecture,
        "metadata": metadata,
    }


def _description_dictionary() -> bytes:
    """Text that descriptions have in common; part of the format."""
    return (pathlib.Path(__file__).parents[1] / "description_v1.dict").read_bytes()


def _read_section(data: bytes, position: int, tag: int) -> tuple[bytes, int]:
    head = data[position : position + 5]
    if len(head) < 5:
        raise FileFormatError(f"Truncated: section {tag} is missing.")
    found, length = struct.unpack("<BI", head)
    end = position + 5 + length
    check = data[end : end + 4]
    if found != tag or len(check) < 4:
        raise FileFormatError(f"Truncated or damaged in section {tag}.")
    if struct.pack("<I", zlib.crc32(data[position:end])) != check:
        raise FileFormatError(f"Damaged: the check value of section {tag} is wrong.")
    return data[position + 5 : end], end + 4


def _parse_layout(layout: bytes, packed: bytes, max_weights: int | None):
    """Returns the groups, for each variable (stored dtype or None, shape), `coded`."""
    position = 0

    def take(limit):
        nonlocal position
        number = 0
        for shift in range(0, 64, 7):
            byte = layout[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if not byte & 0x80:
                break
        else:
            raise FileFormatError("A number in the layout does not end.")
        if shift and not byte:
            raise FileFormatError("A number in the layout is longer than it need be.")
        if number > limit:
            raise FileFormatError(f"A number in the layout is {number}, over {limit}.")
        return number

    def take_bytes(count):
        nonlocal position
        position += count
        if position > len(layout):
            raise FileFormatError("The layout ends too early.")
        return layout[position - count : position]

    heads = []
    for _ in range(take(MAX_GROUPS)):
        (seed,) = struct.unpack("<Q", take_bytes(8))
        block_size, bits = take(MAX_ENTRIES), take(MAX_BLOCK_BITS)
        codebook = CODEBOOKS[take(len(CODEBOOKS) - 1)]
        scales = np.frombuffer(take_bytes(4 * take(len(layout))), "<f4")
        if not np.all((scales > 0) & (scales <= MAX_SCALE)):
            raise FileFormatError("A coding scale is out of range.")
        heads.append((seed, block_size, bits, codebook, scales.astype(np.float32)))

    members = [[] for _ in heads]
    coded, shapes = [], []
    for _ in range(take(MAX_VARIABLES)):
        group = take(len(heads))
        if group:
            hash_factor = take(MAX_ENTRIES)
            scale_index = take(len(heads[group - 1][4]) - 1)
            dtype = None
        else:
            dtype = STORED_DTYPES[take(len(STORED_DTYPES) - 1)]
        shape = tuple(take(MAX_ENTRIES) for _ in range(take(MAX_DIMENSIONS)))
        shapes.append((dtype, shape))
        if group:
            coded.append((group - 1, len(members[group - 1])))
            members[group - 1].append(CodedVariable(shape, hash_factor, scale_index))
        else:
            coded.append(None)
    if position != len(layout):
        raise FileFormatError("The layout section has bytes too many.")
    check_claim([shape for _, shape in shapes], max_weights)

    groups = []
    start = 0
    for (seed, block_size, bits, codebook, scales), variables in zip(
        heads, members, strict=True
    ):
        place = WeightLayout(variables, block_size, seed)
        if place.block_size != block_size:
            raise FileFormatError(f"A block of {block_size} exceeds its weights.")
        if place.num_scales != len(scales):
            raise FileFormatError("The number of coding scales is wrong.")
        size = -(-place.num_blocks * bits // 8)
        if start + size > len(packed):
            raise FileFormatError("There are fewer indices than blocks.")
        code = MinimalRandomCode(seed, bits, codebook)
        codes = code.unpack(packed[start : start + size], place.num_blocks, block_size)
        groups.append(CodedGroup(place, code, scales, codes))
        start += size
    if start != len(packed):
        raise FileFormatError("There are more indices than blocks.")
    return groups, shapes, coded


def _parse_stored(stored: bytes, shapes) -> list[np.ndarray]:
    todo = [(np.dtype(dtype), shape) for dtype, shape in shapes if dtype]
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in todo)
    raw = b""
    if stored:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(stored, size + 1)
        if not inflate.eof or inflate.unused_data:
            raise FileFormatError("The stored variables have the wrong size.")
    if len(raw) != size:
        raise FileFormatError("The stored variables have the wrong size.")
    values, start = [], 0
    for dtype, shape in todo:
        count = math.prod(shape)
        little = np.frombuffer(raw, dtype.newbyteorder("<"), count, start)
        if dtype.kind == "b" and np.any(little.view(np.uint8) > 1):
            raise FileFormatError("A stored boolean is neither 0 nor 1.")
        values.append(little.astype(dtype).reshape(shape))
        start += count * dtype.itemsize
    return values


def _parse_description(description: bytes, num_variables: int):
    inflate = zlib.decompressobj(wbits=-15, zdict=_description_dictionary())
    raw = inflate.decompress(description, MAX_DESCRIPTION_BYTES + 1)
    if len(raw) > MAX_DESCRIPTION_BYTES or not inflate.eof or inflate.unused_data:
        raise FileFormatError("The description is damaged or too long.")
    content = strict_json.parse(raw)
    names, architecture = content["names"], content["model"]
    metadata = content["metadata"]
    if not (
        isinstance(names, list)
        and len(names) == num_variables
        and all(isinstance(name, str) and name.isprintable() for name in names)
        and len(set(names)) == num_variables
    ):
        raise FileFormatError("The names of the variables do not fit the layout.")
    if not (isinstance(architecture, dict) and isinstance(metadata, dict)):
        raise FileFormatError("The description lacks the model or the metadata.")
    return names, architecture, metadata
