"""Trellis coding: one code for all weights, found among all of its length.

The candidates of a weight depend on the last `state_bits` bits of the code
(`tfmiracle.codec.trellis`). So all 2**bits codes share their computation, and dynamic
programming over the states finds the one of largest importance weight q(z) / p(z)
(Viterbi 1967), or draws one with probability proportional to it (forward filtering,
backward sampling), in time linear in the number of weights.

Work: to each weight and state a log weight, about ten operations; to each symbol and
state a comparison. Both are vectors in caches. Memory: one byte for each sixteenth of
the states and each of the symbols between two looks back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tfmiracle.codec import philox
from tfmiracle.codec.philox import Domain
from tfmiracle.codec.trellis import SYMBOL_BITS, TrellisCode, check_state_bits
from tfmiracle.coding.coder import (
    CODERS,
    LOWEST,
    Coder,
    EncodedBlocks,
    check_posterior,
    check_selection,
)
from tfmiracle.coding.philox_xla import philox4x32
from tfmiracle.coding.workers import pool, workers
from tfmiracle.options import check_argument, number

_BRANCHES = 1 << SYMBOL_BITS
_CHUNK = 1024  # symbols between two looks back; paths meet long before
_PART = 32 * _CHUNK  # symbols that one core chooses
_LOOKAHEAD = 48  # symbols that follow and matter
_UNROLLED = 8  # weights of a symbol that are added up at once
_UNREACHED = -1e30
# Beyond these a log weight says no more, and its square would leave float32.
_MAX_PRECISION, _MAX_LOC = 1e12, 100.0
_MAX_CANDIDATE = 4.35  # no normal of a table is larger
_ENDS = (-_MAX_CANDIDATE, _MAX_CANDIDATE)


@CODERS.register
@dataclasses.dataclass(frozen=True)
class TrellisCoder(Coder):
    """Chooses one code for all weights, by dynamic programming over its last bits.

    Attributes:
      state_bits: how many bits of the code a candidate depends on, 8 to 20. Time grows
        as 2**state_bits.
      block_bits: bits for each block on average, any number up to what the states
        hold; the whole code takes the nearest number of bytes, at least one unless it
        is 0.
      selection: "largest_weight" finds the code of largest importance weight, "sample"
        draws one with probability proportional to it.
      seed, num_weights, block_size: of the layout, see `Coder`.

    Raises:
      ValueError: an attribute is out of range or an unknown name.
    """

    identifier: ClassVar[str] = "trellis"
    any_rate: ClassVar[bool] = True
    state_bits: int = TrellisCode.state_bits
    block_bits: float = 20.0
    selection: str = "largest_weight"
    seed: int = 0
    num_weights: int = 1
    block_size: int = 1

    def __post_init__(self) -> None:
        check_selection(self.selection)
        check_state_bits(self.state_bits)
        check_argument("block_bits", self.block_bits, number(0))

    @property
    def code(self) -> TrellisCode:
        code = TrellisCode(self.seed, self.num_weights, self.state_bits)
        num_bytes = self.block_bits * self.num_weights / self.block_size / 8
        if num_bytes > code.max_bytes + 0.5:
            most = 8 * code.max_bytes * self.block_size // self.num_weights
            raise ValueError(
                f"`block_bits` must be at most {most:,} for {self.num_weights:,} "
                f"weights in blocks of {self.block_size:,}, since a state of "
                f"{self.state_bits} bits holds no more. Lower it, or raise "
                f"`state_bits`. Received: block_bits={self.block_bits!r}"
            )
        # No bytes at all, and weights that the seed decides, only where that is said.
        least = 1 if self.block_bits else 0
        num_bytes = min(max(round(num_bytes), least), code.max_bytes)
        return dataclasses.replace(code, num_bytes=num_bytes)

    def lookahead(self, block_size: int) -> int:
        symbols = max(self.code.num_symbols, 1)
        return -(-_LOOKAHEAD * self.num_weights // (symbols * block_size))

    def encode(
        self,
        blocks: np.ndarray,
        loc: np.ndarray,
        log_scale: np.ndarray,
        before: np.ndarray | None = None,
    ) -> EncodedBlocks:
        """Chooses the states of consecutive blocks, see `Coder.encode`.

        Raises:
          ValueError: also if `blocks` are none, not consecutive or not of the layout,
            or the one before them is not coded.
        """
        code, block_size = self.code, np.shape(loc)[-1]
        ahead = self.lookahead(block_size)
        blocks, loc, log_scale = check_posterior(blocks, loc, log_scale, ahead)
        count = -(-code.num_weights // block_size)
        if not len(blocks) or blocks[-1] >= count:
            raise ValueError(
                f"`blocks` must be of the {count:,} that {code.num_weights:,} weights "
                f"make, which `for_layout` says. Received: blocks={blocks}"
            )
        if np.any(np.diff(blocks.astype(np.int64)) != 1) or (
            blocks[0] and before is None
        ):
            raise ValueError(
                "A trellis is coded in order: `blocks` must be consecutive, and the "
                f"one before them coded. Received: blocks={blocks}"
            )
        start = int(before[-1]) if blocks[0] else 0
        first = int(blocks[0]) * block_size
        weights = np.arange(first, min(first + loc.size, code.num_weights))
        loc, log_scale = (x.reshape(-1)[: len(weights)] for x in (loc, log_scale))
        entered = code.entered(weights) - code.entered(first - 1)
        symbols, evidence = self._search(weights, loc, log_scale, entered, start)

        states = np.append(start, code.states(symbols, start))[entered]
        size = len(blocks) * block_size
        states = np.pad(states[:size], (0, max(0, size - len(states))), "edge")
        codes = states.astype(np.int32).reshape(len(blocks), block_size)
        z = code.candidates(blocks, codes, block_size).reshape(-1)[: len(weights)]
        log_weight = np.zeros(size)
        log_weight[: len(z)] = _log_weight(z, loc[: len(z)], log_scale[: len(z)])
        log_weight = log_weight.reshape(codes.shape).sum(1)
        if evidence is None:
            log_evidence = log_weight - code.bits(block_size) * np.log(2)
        else:
            ends = np.minimum(block_size * np.arange(len(blocks) + 1), len(weights))
            log_evidence = evidence / len(weights) * np.diff(ends)  # none for padding
        log_weight, log_evidence = (
            np.maximum(x, LOWEST).astype(np.float32) for x in (log_weight, log_evidence)
        )
        return EncodedBlocks(codes, log_weight, log_evidence)

    def _search(self, weights, loc, log_scale, entered, start):
        """The symbols that enter at `weights`; the log evidence, if it is known."""
        count = int(entered[-1])
        if not count:
            return np.zeros(0, np.uint8), None
        offsets = self.code.offsets(weights)
        rows, constant = _by_symbol(offsets, loc, log_scale, entered)
        first = int(self.code.entered(weights[0] - 1))
        # Made here, once, since its parts would make it side by side.
        forward = _forward_pass(
            self.state_bits, rows[0].shape[1], self.selection == "sample"
        )
        backward = _backward_pass(self.state_bits)
        search = functools.partial(self._search_part, forward, backward, rows, first)
        # Parts are searched side by side: what was before them is soon forgotten. Where
        # two do not meet all the same, the second is searched again.
        begins = range(0, count, _PART)
        starts = [start] + [None] * (len(begins) - 1)
        parts = list(pool(workers()).map(search, begins, starts))
        for i, begin in enumerate(begins[1:], 1):
            if parts[i].start != parts[i - 1].end:
                parts[i] = search(begin, parts[i - 1].end)
        evidence = None
        if self.selection == "sample":
            sums = sum(part.log_sum for part in parts)
            evidence = constant + sums - count * np.log(_BRANCHES)
        return np.concatenate([part.symbols for part in parts]), evidence

    def _search_part(self, forward, backward, rows, first, begin, start):
        """Chooses up to `_PART` symbols.

        Args:
          forward, backward: the compiled passes.
          rows: what `_by_symbol` found.
          first: number of the symbol that has the first row.
          begin: the row to begin with.
          start: the state before it. If None, the chunk before shows what is likely.
        """
        count = len(rows[0])
        key = tf.constant(philox.split_seed(self.seed), tf.uint32)
        score = np.zeros(1 << self.state_bits, np.float32)
        if start is not None:
            score[:] = _UNREACHED
            score[start] = 0.0
        score, choices, traced = tf.constant(score), None, []
        taken_off, levels = 0.0, {}
        end = min(begin + _PART, count)
        warm_up = 0 if start is not None else _CHUNK
        chunks = range(begin - warm_up, min(end + _CHUNK, count), _CHUNK)
        for at in chunks:
            if at in (begin, end):
                levels[at] = taken_off + _log_sum(score)
            earlier, length = choices, tf.constant(min(_CHUNK, count - at))
            score, choices, tops = forward(
                _doubled_table(self.code),
                key,
                tf.constant(first + at),
                length,
                *(_chunk(x, at) for x in rows),
                score,
            )
            taken_off += float(tops.numpy().sum(dtype=np.float64))
            last = self._end(score, first + at)
            found, before = backward(last, length, choices)
            if earlier is not None:  # in there all good paths have met
                traced.append(backward(before, tf.constant(_CHUNK), earlier))
        traced.append((found[:length], before))
        levels[count] = taken_off + _log_sum(score)

        ours = {at: x for at, x in zip(chunks, traced) if begin <= at < end}
        after = dict(zip(chunks, traced))[end][1] if end in chunks else last
        return _Part(
            np.concatenate([symbols.numpy() for symbols, _ in ours.values()]),
            int(ours[begin][1]),
            int(after),
            levels[end] - levels[begin],
        )

    def _end(self, score, symbol):
        """The state to look back from."""
        score = score.numpy().astype(np.float64)
        if self.selection == "largest_weight":
            return tf.constant(score.argmax(), tf.int32)
        high, low = philox.words(self.seed, Domain.TRELLIS_SELECTION, symbol, 2)
        share = (int(high) << 21 | int(low) >> 11) * 2.0**-53
        sums = np.cumsum(np.exp(score - score.max()))
        state = np.searchsorted(sums, share * sums[-1], "right")
        return tf.constant(state, tf.int32)


class _Part(NamedTuple):
    """What was chosen of a part of the symbols.

    `start` and `end` are the states before and after them, `log_sum` how much the log
    of the sum of the weights of all paths has grown.
    """

    symbols: np.ndarray
    start: int
    end: int
    log_sum: float


def _log_sum(score):
    return float(np.logaddexp.reduce(score.numpy().astype(np.float64)))


def _log_weight(z, loc, log_scale):
    """log q(z) / p(z) in nats, float64."""
    z, loc, log_scale = (x.astype(np.float64) for x in (z, loc, log_scale))
    t = (z - loc) * np.exp(-log_scale)
    return 0.5 * (z - t) * (z + t) - log_scale


def _by_symbol(offsets, loc, log_scale, entered):
    """The weights that follow each symbol, in rows of equal length.

    Returns:
      A list of arrays with a row for each symbol: int32 offsets, loc and 1 / scale,
      padded with weights that any candidate suits, and the largest log weight that the
      row can have, but for its volume; and a constant: what the log weights of all rows
      are larger than the sum of what is compared.
    """
    ours = entered > 0  # the others belong to a symbol that is chosen already
    offsets, loc, log_scale, entered = (
        x[ours] for x in (offsets, loc, log_scale, entered)
    )
    rows, first = entered - 1, np.searchsorted(entered, np.arange(entered[-1]) + 1)
    column = np.arange(len(rows)) - first[rows]
    width = int(column.max()) + 1
    if width > _UNROLLED:
        width = -(-width // _UNROLLED) * _UNROLLED
    loc = np.clip(loc.astype(np.float64), -_MAX_LOC, _MAX_LOC)
    inverse_scale = np.minimum(np.exp(-log_scale.astype(np.float64)), _MAX_PRECISION)
    # Where the log weight, a parabola, is largest: at its top or at an end.
    top = loc / np.maximum(1 - inverse_scale**-2.0, 1e-9)
    best = np.full(len(loc), -np.inf)
    for z in (np.clip(top, -_MAX_CANDIDATE, _MAX_CANDIDATE), *_ENDS):
        t = (z - loc) * inverse_scale
        best = np.maximum(best, 0.5 * (z - t) * (z + t))
    padded = []
    for values, fill in ((offsets, 0), (loc, 0), (inverse_scale, 1)):
        dtype = np.int32 if values is offsets else np.float32
        array = np.full((entered[-1], width), fill, dtype)
        array[rows, column] = values
        padded.append(array)
    largest = np.bincount(rows, best, entered[-1])
    padded.append(largest.astype(np.float32))
    return padded, largest.sum() - log_scale.astype(np.float64).sum()


def _chunk(array, at):
    """Some rows from `at` on, filled up to what is compiled."""
    rows = array[at : at + _CHUNK]
    return tf.constant(
        np.pad(rows, [(0, _CHUNK - len(rows))] + [(0, 0)] * (rows.ndim - 1))
    )


@functools.lru_cache(2)
def _doubled_table(code: TrellisCode) -> tf.Tensor:
    """The table with its beginning once more, so that all windows are slices."""
    table = code.table()
    return tf.constant(np.append(table, table[: 1 << code.state_bits]))


@functools.cache
def _forward_pass(state_bits: int, width: int, sampled: bool) -> Callable:
    """Returns the pass over up to `_CHUNK` symbols, from scores to scores.

    A score is the log weight of the best path to a state, or of all of them. The
    arguments are the doubled table, the key, the number of the first symbol and how
    many there are, the arrays of `_by_symbol` and the scores `[2**state_bits]`. It
    returns the scores, uint8 `[_CHUNK, 2**(state_bits - 4)]`, the oldest symbol on the
    chosen path to each state before its last symbol, and float32 `[_CHUNK]`, what was
    taken off the scores.
    """
    states = 1 << state_bits
    stems = states // _BRANCHES  # states but for their last symbol
    inner = min(width, _UNROLLED)

    def survivors(score, uniforms):
        paths = tf.unstack(tf.reshape(score, [_BRANCHES, stems]))
        best, choice = paths[0], tf.zeros([stems], tf.uint8)
        for j, path in enumerate(paths[1:], 1):
            better = path > best
            best = tf.where(better, path, best)
            choice = tf.where(better, tf.constant(j, tf.uint8), choice)
        if not sampled:
            return best, choice
        # The sum over the paths, and one of them in proportion to its share.
        shares = [tf.exp(path - best) for path in paths]
        total = tf.add_n(shares)
        below, choice = tf.zeros([stems]), tf.zeros([stems], tf.uint8)
        for share in shares[:-1]:
            below += share
            choice += tf.cast(below <= uniforms * total, tf.uint8)
        return best + tf.math.log(total), choice

    def weigh(offsets, loc, inverse_scale, table):
        total = tf.zeros([states])
        for k in range(inner):
            z = tf.slice(table, offsets[k : k + 1], [states])
            t = (z - loc[k]) * inverse_scale[k]
            total += (z - t) * (z + t)
        return total

    @tf.function(jit_compile=True, autograph=False)
    def run(table, key, first, length, offsets, loc, inverse_scale, largest, score):
        offsets, loc, inverse_scale = (
            tf.reshape(x, [_CHUNK, width // inner, inner])
            for x in (offsets, loc, inverse_scale)
        )

        # A variable of the loop: as an input it would be a constant for TensorFlow, and
        # the loop compiled anew for each.
        def step(g, offsets, score, choices, tops):
            uniforms = _uniforms(key, first + g, stems) if sampled else score[:1]
            # What `map_fn` returns is stored, not computed anew for each branch.
            best, choice = tf.map_fn(
                lambda x: survivors(x, uniforms),
                score[tf.newaxis],
                fn_output_signature=(tf.float32, tf.uint8),
            )
            top = tf.reduce_max(best)
            rows = offsets[0], loc[g], inverse_scale[g]
            if width == inner:
                total = weigh(*(x[0] for x in rows), table)
            else:
                total = tf.foldl(
                    lambda total, row: total + weigh(*row, table),
                    rows,
                    tf.zeros([states]),
                )
            total = tf.reshape(0.5 * total - largest[g], [stems, _BRANCHES])
            score = tf.maximum(total + (best[0] - top)[:, tf.newaxis], _UNREACHED)
            choices, tops = choices.write(g, choice[0]), tops.write(g, top)
            offsets = tf.roll(offsets, -1, axis=0)
            return g + 1, offsets, tf.reshape(score, [states]), choices, tops

        choices = tf.TensorArray(tf.uint8, _CHUNK, element_shape=[stems])
        tops = tf.TensorArray(tf.float32, _CHUNK, element_shape=[])
        _, _, score, choices, tops = tf.while_loop(
            lambda g, *_: g < length,
            step,
            (0, offsets, score, choices, tops),
            maximum_iterations=_CHUNK,
        )
        return score, choices.stack(), tops.stack()

    matrix, vector, scalar = [_CHUNK, width], [_CHUNK], []
    return _traced(
        run,
        ([None], tf.float32),
        ([2], tf.uint32),
        (scalar, tf.int32),
        (scalar, tf.int32),
        (matrix, tf.int32),
        (matrix, tf.float32),
        (matrix, tf.float32),
        (vector, tf.float32),
        ([states], tf.float32),
    )


def _traced(function, *arguments):
    """A `tf.function` for arguments of some shapes and dtypes.

    TensorFlow counts the tracings of all that come from the same line, and would warn
    of widths and states in turn as if one were traced again and again.
    """
    return function.get_concrete_function(*(tf.TensorSpec(*x) for x in arguments))


def _uniforms(key, symbol, count):
    """Random numbers of 24 bits in [0, 1), float32 `[count]`."""
    index = tf.cast(tf.range(count // 4), tf.uint32)
    counter = index, tf.cast(symbol, tf.uint32), tf.constant(1 << 31, tf.uint32)
    words = philox4x32(
        (*counter, tf.constant(Domain.TRELLIS_SELECTION, tf.uint32)), key
    )
    result = []
    for part in (tf.math.real(words), tf.math.imag(words)):
        bits = tf.bitcast(part, tf.uint64)
        for shift in (8, 40):
            word = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64))
            word = tf.bitwise.bitwise_and(word, tf.constant(0xFFFFFF, tf.uint64))
            result.append(tf.cast(word, tf.float32) * 2.0**-24)
    return tf.concat(result, 0)


@functools.cache
def _backward_pass(state_bits: int) -> Callable:
    """Returns the look back: last state, number of symbols, choices of a forward pass.

    It returns uint8 `[_CHUNK]`, the symbols, and the state before them.
    """

    @tf.function(jit_compile=True, autograph=False)
    def run(state, length, choices):
        def step(g, state, symbols):
            stem = state // _BRANCHES
            symbols = symbols.write(g, tf.cast(state % _BRANCHES, tf.uint8))
            oldest = tf.cast(choices[g, stem], tf.int32)
            return g - 1, oldest * (1 << state_bits - SYMBOL_BITS) + stem, symbols

        symbols = tf.TensorArray(tf.uint8, _CHUNK, element_shape=[])
        _, state, symbols = tf.while_loop(
            lambda g, *_: g >= 0,
            step,
            (length - 1, state, symbols),
            maximum_iterations=_CHUNK,
        )
        return symbols.stack(), state

    choices = [_CHUNK, 1 << state_bits - SYMBOL_BITS], tf.uint8
    return _traced(run, ([], tf.int32), ([], tf.int32), choices)
