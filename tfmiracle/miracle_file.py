"""The `.miracle` file: what it holds, to bytes and back. Needs NumPy only.

`docs/format.md` specifies the bytes.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import struct
import uuid
import zlib
from collections.abc import Sequence

import numpy as np

from tfmiracle.codebook import CODEBOOKS, MAX_BLOCK_BITS
from tfmiracle.codec.code import MinimalRandomCode, RandomCode
from tfmiracle.layout import CodedVariable, WeightLayout

MAGIC = b"MRCL"
VERSION = 1
STORED_DTYPES = (
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
# What a file may claim by default: so many weights, and more for each of its bytes.
FREE_WEIGHTS = 1 << 20
WEIGHTS_PER_BYTE = 512
DEFAULT_MAX_WEIGHTS = 1 << 28  # however large the file is
MAX_SCALE = np.float32(1e30)  # times any candidate, it is finite
_DESCRIPTION, _LAYOUT, _INDICES, _STORED = 1, 2, 3, 4
MAX_DESCRIPTION_BYTES = 1 << 22
MAX_METADATA_BYTES = 1 << 20  # of these
# Bounds of version 1, in `docs/format.md`.
MAX_GROUPS = 1 << 10
MAX_VARIABLES = 1 << 13
_MAX_DIMENSIONS = 32  # of arrays in NumPy 1
_MAX_ENTRIES = (1 << 32) - 1  # of all variables: positions are 32-bit words of Philox
_MAX_BRACKETS = 1 << 17
_MAX_DEPTH = 128
_MAX_DIGITS = 100


class FileFormatError(ValueError):
    """The bytes are no `.miracle` file that this version can read."""


@dataclasses.dataclass(frozen=True)
class CodedGroup:
    """Variables that share blocks, and the random code that gives their weights.

    Attributes:
      layout: where each weight has its place.
      code: the random code of its blocks.
      scales: float32[layout.num_scales], the coding scales rho.
      codes: integers [layout.num_blocks, ...], the code of each block.
    """

    layout: WeightLayout
    code: RandomCode
    scales: np.ndarray
    codes: np.ndarray

    @functools.cached_property
    def packed(self) -> bytes:
        """The codes as a file holds them."""
        return self.code.pack(self.codes, self.layout.block_size)

    def __repr__(self):
        return (
            f"CodedGroup({self.layout.num_blocks} blocks of {self.layout.block_size} "
            f"weights, {self.code})"
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the packed codes."""
        return len(self.packed)


@dataclasses.dataclass(frozen=True)
class MiracleFile:
    """Everything a `.miracle` file holds.

    Attributes:
      names: of all variables of the network, in its order.
      coded: for each variable, the group that codes it and its position in there, or
        None for a variable that is stored.
      groups: the coded groups.
      stored: arrays of the stored variables, in the order of the network.
      architecture: serialized Keras model, as Keras' JSON.
      metadata: settings of the run and whatever else is worth knowing, as JSON.
    """

    names: Sequence[str]
    coded: Sequence[tuple[int, int] | None]
    groups: Sequence[CodedGroup]
    stored: Sequence[np.ndarray]
    architecture: dict
    metadata: dict = dataclasses.field(default_factory=dict)

    def __repr__(self):
        return (
            f"MiracleFile({self.num_weights} weights of {len(self.names)} variables, "
            f"{len(self.groups)} groups, {self.payload_bytes} bytes of indices)"
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the indices alone, the size that the paper counts."""
        return sum(g.payload_bytes for g in self.groups)

    @property
    def num_weights(self) -> int:
        """Number of all weights of the network, coded and stored."""
        coded = sum(g.layout.num_weights for g in self.groups)
        return coded + sum(value.size for value in self.stored)

    @property
    def float32_bytes(self) -> int:
        """Size of the network's weights as float32."""
        return 4 * self.num_weights

    def to_bytes(self) -> bytes:
        """Serializes the file.

        Raises:
          ValueError: if architecture, names and metadata take more than readers accept.
        """
        description = json.dumps(
            {
                "model": self.architecture,
                "names": list(self.names),
                "metadata": self.metadata,
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode()
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise ValueError(
                f"The description (architecture, names and metadata) takes "
                f"{len(description):,} bytes as JSON; a file has room for "
                f"{MAX_DESCRIPTION_BYTES:,}."
            )
        deflate = zlib.compressobj(9, wbits=-15, zdict=_description_dictionary())
        stored = b"".join(_little_endian(value).tobytes() for value in self.stored)
        return b"".join(
            [
                MAGIC,
                bytes([VERSION]),
                _section(_DESCRIPTION, deflate.compress(description) + deflate.flush()),
                _section(_LAYOUT, self._layout_bytes()),
                _section(_INDICES, b"".join(g.packed for g in self.groups)),
                _section(_STORED, zlib.compress(stored, 9) if stored else b""),
            ]
        )

    def _layout_bytes(self) -> bytes:
        out = bytearray()

        def put(*numbers):
            for number in numbers:
                while number >= 0x80:
                    out.append(number & 0x7F | 0x80)
                    number >>= 7
                out.append(number)

        put(len(self.groups))
        for group in self.groups:
            out.extend(struct.pack("<Q", group.layout.seed))
            put(group.layout.block_size, *group.code.parameters(), len(group.scales))
            out.extend(np.asarray(group.scales, "<f4").tobytes())
        put(len(self.coded))
        stored = iter(self.stored)
        for place in self.coded:
            if place is None:
                value = next(stored)
                put(0, STORED_DTYPES.index(value.dtype.name))
                shape = value.shape
            else:
                variable = self.groups[place[0]].layout.variables[place[1]]
                put(1 + place[0], variable.hash_factor, variable.scale_index)
                shape = variable.shape
            put(len(shape), *shape)
        return bytes(out)

    @classmethod
    def from_bytes(
        cls, data: bytes, max_weights: int | str | None = "auto"
    ) -> "MiracleFile":
        """Parses a file, trusting nothing in it.

        Args:
          data: the whole file.
          max_weights: refuse files that claim more weights than this, before anything
            of that size is allocated. "auto": 2^20 and 512 for each byte of the file,
            2^28 at most, so that a small file cannot cost much. None for a file that
            you trust.

        Raises:
          FileFormatError: if the bytes are damaged, truncated, from another format or
            version, or claim more than `max_weights` weights.
        """
        if max_weights == "auto":
            by_size = FREE_WEIGHTS + WEIGHTS_PER_BYTE * len(data)
            max_weights = min(by_size, DEFAULT_MAX_WEIGHTS)
        if data[: len(MAGIC)] != MAGIC:
            raise FileFormatError(
                "Not a .miracle file: it does not start with the bytes 'MRCL'."
            )
        version = data[len(MAGIC) : len(MAGIC) + 1]
        if version != bytes([VERSION]):
            raise FileFormatError(
                f"Format version {version[0] if version else 'missing'} is unknown; "
                f"this package reads version {VERSION}. Install a newer tfmiracle."
            )
        position = len(MAGIC) + 1
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
        return cls(names, coded, groups, values, architecture, metadata)

    def write(self, path: str | os.PathLike, overwrite: bool = False) -> int:
        """Writes the file under its final name only when it is complete.

        Returns:
          The number of bytes.

        Raises:
          FileExistsError: if `path` exists and `overwrite` is false.
        """
        data = self.to_bytes()
        write_atomically(path, data, overwrite)
        return len(data)

    @classmethod
    def read(
        cls, path: str | os.PathLike, max_weights: int | str | None = "auto"
    ) -> "MiracleFile":
        """Reads and parses a file, see `from_bytes`; the error names the path."""
        data = pathlib.Path(path).read_bytes()
        try:
            return cls.from_bytes(data, max_weights)
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from None


def check_description(architecture: dict, names: Sequence[str]) -> None:
    """Checks what will be written of a network, before hours are spent on its weights.

    Raises:
      FileFormatError: if readers would refuse it.
    """
    if len(names) > MAX_VARIABLES:
        raise FileFormatError(
            f"The network has {len(names):,} variables; a file has room for "
            f"{MAX_VARIABLES:,}."
        )
    content = {"model": architecture, "names": [*names], "metadata": {}}
    _parse_text(json.dumps(content).encode(), len(names))


def check_output(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Checks that `path` can be written, before hours are spent on its content.

    Raises:
      FileExistsError: if `path` exists and `overwrite` is false.
      FileNotFoundError: if its folder does not exist.
      NotADirectoryError: if what should be its folder is a file.
      IsADirectoryError: if it is a folder.
      PermissionError: if its folder cannot be written to.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file.")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no regular file; it is not overwritten.")
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(
            f"{path} exists. Choose another name, or allow overwriting (`overwrite`)."
        )
    check_folder(path.parent)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} does not exist; create it.")


def check_folder(path: str | os.PathLike) -> None:
    """Checks that `path` is, or can become, a folder to write to.

    Raises:
      NotADirectoryError: if it, or what it is in, is a file.
      PermissionError: if it cannot be written to or made.
    """
    path = pathlib.Path(path)
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not there.is_dir():
        raise NotADirectoryError(
            f"{there} is no folder: the folder {path} does not exist and cannot be "
            "made. Choose another one."
        )
    if not os.access(there, os.W_OK):
        raise PermissionError(f"The folder {there} cannot be written to.")


def write_atomically(
    path: str | os.PathLike, data: bytes, overwrite: bool = False
) -> None:
    """Writes `data` so that `path` never shows a part of it.

    Raises:
      FileExistsError, FileNotFoundError, ...: see `check_output`.
    """
    check_output(path, overwrite)
    path = pathlib.Path(path)
    temporary = path.with_name(f".miracle-{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def section_bytes(data: bytes) -> dict[str, int]:
    """What the sections of a whole file take, the first with the start of the file."""
    sizes, position = {}, 0
    for tag, name in (
        (_DESCRIPTION, "description"),
        (_LAYOUT, "layout"),
        (_INDICES, "indices"),
        (_STORED, "stored"),
    ):
        _, end = _read_section(data, position or len(MAGIC) + 1, tag)
        sizes[name], position = end - position, end
    return sizes


def _description_dictionary() -> bytes:
    """Text that descriptions have in common; part of the format."""
    return (pathlib.Path(__file__).parent / "description_v1.dict").read_bytes()


def _section(tag: int, payload: bytes) -> bytes:
    if len(payload) >> 32:
        raise ValueError(
            f"Section {tag} takes {len(payload):,} bytes; a file has room for "
            f"{2**32 - 1:,}. Store less."
        )
    head = struct.pack("<BI", tag, len(payload)) + payload
    return head + struct.pack("<I", zlib.crc32(head))


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
        block_size, bits = take(_MAX_ENTRIES), take(MAX_BLOCK_BITS)
        codebook = CODEBOOKS[take(len(CODEBOOKS) - 1)]
        scales = np.frombuffer(take_bytes(4 * take(len(layout))), "<f4")
        if not np.all((scales > 0) & (scales <= MAX_SCALE)):
            raise FileFormatError("A coding scale is out of range.")
        heads.append((seed, block_size, bits, codebook, scales.astype(np.float32)))

    total = 0
    members = [[] for _ in heads]
    coded, shapes = [], []
    for _ in range(take(MAX_VARIABLES)):
        group = take(len(heads))
        if group:
            hash_factor = take(_MAX_ENTRIES)
            scale_index = take(len(heads[group - 1][4]) - 1)
            dtype = None
        else:
            dtype = STORED_DTYPES[take(len(STORED_DTYPES) - 1)]
        shape = tuple(take(_MAX_ENTRIES) for _ in range(take(_MAX_DIMENSIONS)))
        # A length of 0 does not excuse others that no array can have.
        total += math.prod(max(length, 1) for length in shape)
        if total > _MAX_ENTRIES:
            raise FileFormatError("The file claims 2^32 weights or more.")
        if max_weights is not None and not total <= max_weights:  # NaN refuses
            raise FileFormatError(
                f"The file claims more than {max_weights:,} weights. If you trust "
                "where it comes from, raise `max_weights`."
            )
        shapes.append((dtype, shape))
        if group:
            coded.append((group - 1, len(members[group - 1])))
            members[group - 1].append(CodedVariable(shape, hash_factor, scale_index))
        else:
            coded.append(None)
    if position != len(layout):
        raise FileFormatError("The layout section has bytes too many.")

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
    return _parse_text(raw, num_variables)


def _parse_text(raw: bytes, num_variables: int):
    """Returns names, architecture and metadata of a description."""
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        raise FileFormatError("The description has too many lists and objects.")
    try:
        content = json.loads(
            raw.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise FileFormatError("The description is nested too deeply.") from None
    if not isinstance(content, dict):
        raise FileFormatError("The description is no JSON object.")
    _check_depth(content)
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


def _check_depth(content):
    level, depth = [content], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise FileFormatError("The description is nested too deeply.")
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]


def _object(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        raise FileFormatError("An object of the description has a key twice.")
    return content


def _integer(text):
    if len(text) > _MAX_DIGITS:
        raise FileFormatError("A number of the description has too many digits.")
    return int(text)


def _finite(text):
    number = float(text)
    if math.isinf(number):
        raise FileFormatError(f"The description holds {text}, which is out of range.")
    return number


def _refuse_constant(name: str):
    raise FileFormatError(f"The description holds {name}, which is not JSON.")


def _little_endian(value: np.ndarray) -> np.ndarray:
    return np.asarray(value, value.dtype.newbyteorder("<"))
