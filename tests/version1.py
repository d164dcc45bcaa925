"""Writes version 1 of the file, which the package only reads now."""

import json
import struct
import zlib

import numpy as np
from support import DICTIONARY

from tfmiracle.miracle_file import (
    STORED_DTYPES,
    MiracleFile,
)


def to_bytes(file: MiracleFile) -> bytes:
    """The bytes that tfmiracle 0.1 wrote."""
    description = json.dumps(
        {
            "model": file.architecture,
            "names": list(file.names),
            "metadata": file.metadata,
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    deflate = zlib.compressobj(9, wbits=-15, zdict=DICTIONARY)
    stored = b"".join(_little_endian(value) for value in file.stored)
    return b"".join(
        [
            b"MRCL",
            b"\1",
            _section(1, deflate.compress(description) + deflate.flush()),
            _section(2, _layout(file)),
            _section(3, b"".join(g.packed for g in file.groups)),
            _section(4, zlib.compress(stored, 9) if stored else b""),
        ]
    )


def _layout(file):
    out = bytearray()

    def put(*numbers):
        for number in numbers:
            while number >= 0x80:
                out.append(number & 0x7F | 0x80)
                number >>= 7
            out.append(number)

    put(len(file.groups))
    for group in file.groups:
        out.extend(struct.pack("<Q", group.layout.seed))
        put(group.layout.block_size, *group.code.parameters(), len(group.scales))
        out.extend(np.asarray(group.scales, "<f4").tobytes())
    put(len(file.coded))
    stored = iter(file.stored)
    for place in file.coded:
        if place is None:
            value = next(stored)
            put(0, STORED_DTYPES.index(value.dtype.name))
            shape = value.shape
        else:
            variable = file.groups[place[0]].layout.variables[place[1]]
            put(1 + place[0], variable.hash_factor, variable.scale_index)
            shape = variable.shape
        put(len(shape), *shape)
    return bytes(out)


def _section(tag: int, payload: bytes) -> bytes:
    head = struct.pack("<BI", tag, len(payload)) + payload
    return head + struct.pack("<I", zlib.crc32(head))


def _little_endian(value):
    return np.asarray(value, value.dtype.newbyteorder("<")).tobytes()
