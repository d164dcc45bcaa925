"""From a `.miracle` file to weights, with NumPy alone."""

import dataclasses
import os

import numpy as np

from tfmiracle.codec.parts import stored_values
from tfmiracle.codec.prior import weights as weights_of
from tfmiracle.miracle_file import CodedGroup, MiracleFile


@dataclasses.dataclass(frozen=True)
class DecodedNetwork:
    """The weights of a network.

    Attributes:
      weights: name -> array, in the order of `model.weights` in Keras. Coded variables
        are float32, stored ones have the dtype they were stored in.
      architecture: serialized Keras model, as Keras' JSON, or None if the file was
        written without.
      metadata: what the writer of the file recorded.
      fingerprint: of the architecture, where that is None.
    """

    weights: dict[str, np.ndarray]
    architecture: dict | None
    metadata: dict
    fingerprint: int | None = None

    def __repr__(self):
        count = sum(value.size for value in self.weights.values())
        return f"DecodedNetwork({count} weights of {len(self.weights)} variables)"


def decode(
    source: str | os.PathLike | bytes | MiracleFile,
    max_weights: int | str | None = "auto",
) -> DecodedNetwork:
    """Decodes the weights of a file, bit for bit the same on every platform.

    Args:
      source: path of a `.miracle` file, its bytes, or the parsed file.
      max_weights: refuse files that claim more weights than this. "auto": 2^20 and 512
        for each byte of the file, 2^28 at most. None for a file that you trust.

    Raises:
      FileFormatError: if the file is damaged or not of this format.
      OSError: if it cannot be read.
    """
    file = parsed(source, max_weights)
    return decoded_network(file, [decode_blocks(group) for group in file.groups])


def parsed(
    source: str | os.PathLike | bytes | MiracleFile,
    max_weights: int | str | None = "auto",
) -> MiracleFile:
    """The file that a path, bytes or itself stands for, see `decode`."""
    if isinstance(source, MiracleFile):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return MiracleFile.from_bytes(bytes(source), max_weights)
    return MiracleFile.read(source, max_weights)


def decoded_network(file: MiracleFile, blocks: list[np.ndarray]) -> DecodedNetwork:
    """The network of a file, given the weights of the blocks of each group."""
    groups = [
        group.layout.expand(values)
        for group, values in zip(file.groups, blocks, strict=True)
    ]
    stored = iter(file.stored)
    weights = {
        name: stored_values(next(stored))
        if place is None
        else groups[place[0]][place[1]]
        for name, place in zip(file.names, file.coded, strict=True)
    }
    return DecodedNetwork(weights, file.architecture, file.metadata, file.fingerprint)


def decode_blocks(group: CodedGroup) -> np.ndarray:
    """float32[num_blocks, block_size]: the weights of all blocks of a group.

    A weight is rho times a coordinate of the candidate, one float32 product; to which
    a prior may add a mean, one float32 sum.
    """
    layout = group.layout
    candidates = group.code.candidates(
        np.arange(layout.num_blocks), group.codes, layout.block_size
    )
    rho = group.scales[layout.scale_index_of_slot()]
    return weights_of(candidates, rho, group.prior.loc(layout))
