"""The trellis code and its coder, against enumeration and dynamic programming."""

import dataclasses
import json
import logging
import re
import warnings

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support import HOST

import tfmiracle
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.codec.trellis import TrellisCode
from tfmiracle.coding import trellis
from tfmiracle.coding.coder import CODERS, SELECTIONS
from tfmiracle.coding.trellis import TrellisCoder
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import MiracleFile
from tfmiracle.training.size import recipe_for

SEED = 0xFEDCBA9876543210
STATE_BITS = 8
SELECTIONS = pytest.mark.parametrize("selection", SELECTIONS)


def coder_of(num_bytes, num_weights, block_size=None, seed=SEED, selection=None):
    """A coder of a code of some bytes; all weights are one block by default."""
    block_size = block_size or num_weights
    return TrellisCoder(
        STATE_BITS,
        8 * num_bytes * block_size / num_weights,
        selection or "largest_weight",
        seed,
        num_weights,
        block_size,
    )


def posterior(num_weights, block_size=None, seed=0):
    """Loc and log scale of blocks, of about 0.8 bits a weight; 0 where padded."""
    block_size = block_size or num_weights
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_weights // block_size)
    loc, log_scale = np.zeros((2, num_blocks * block_size), np.float32)
    loc[:num_weights] = rng.normal(0, 0.8, num_weights)
    log_scale[:num_weights] = rng.uniform(-1.2, 0.1, num_weights)
    return loc.reshape(num_blocks, -1), log_scale.reshape(num_blocks, -1)


def entered(num_symbols, num_weights):
    """How many symbols have entered at each weight, as the document says."""
    before = np.arange(num_symbols) * num_weights // max(num_symbols, 1)
    return np.searchsorted(before, np.arange(num_weights), "right")


def log_weights(z, loc, log_scale):
    """Log importance weights, float64 of the shape of `z`."""
    z, loc, log_scale = (np.asarray(x, np.float64) for x in (z, loc, log_scale))
    return 0.5 * z**2 - 0.5 * ((z - loc) * np.exp(-log_scale)) ** 2 - log_scale


def enumerated(code, loc, log_scale):
    """Log importance weights of all codes, float64; a code is its bytes as a number."""
    count, num_weights = 16**code.num_symbols, len(loc)
    symbols = np.arange(count)[:, np.newaxis] >> 4 * np.arange(code.num_symbols) & 15
    states, total = [np.zeros(count, int)], np.zeros(count)
    for symbol in symbols.T:
        states.append((states[-1] << 4 | symbol) & (1 << code.state_bits) - 1)
    for t, number in enumerate(entered(code.num_symbols, num_weights)):
        z = candidates_of_weight(code, t, states[number])
        total += log_weights(z, loc[t], log_scale[t])
    return total


def candidates_of_weight(code, t, states):
    """The candidates of one weight for some states."""
    blocks = np.full(len(states), t)
    return code.candidates(blocks, states[:, np.newaxis], 1)[:, 0]


def number_of(code, codes):
    return int.from_bytes(code.pack(codes, codes.shape[1]), "little")


def forward(code, loc, log_scale, combine):
    """Dynamic programming over all states, float64 `[2**state_bits]`.

    `combine` is `max` over the paths to a state, or the log of their sum. What comes is
    that of all weights for each last state.
    """
    size = 1 << code.state_bits
    states = np.arange(size)
    score = np.where(states == 0, 0.0, -np.inf)
    # Of the symbols that a state forgets, all stand before the same state.
    before = (states >> 4)[:, np.newaxis] | np.arange(16) << code.state_bits - 4
    last = 0
    for t, number in enumerate(entered(code.num_symbols, len(loc))):
        for _ in range(number - last):
            score = combine(score[before], axis=1)
        last = number
        score = score + log_weights(
            candidates_of_weight(code, t, states), loc[t], log_scale[t]
        )
    return score


def best_log_weight(code, loc, log_scale):
    return forward(code, loc.ravel(), log_scale.ravel(), np.max).max()


def assert_consistent(code, encoded, loc, log_scale):
    """Whether codes can be packed, and their log weights are those of what decodes."""
    blocks, block_size = np.arange(len(loc)), loc.shape[1]
    code.check(encoded.codes)
    assert encoded.codes.shape == loc.shape and encoded.codes.dtype == np.int32
    assert encoded.log_weight.dtype == encoded.log_evidence.dtype == np.float32
    unpacked = code.unpack(code.pack(encoded.codes, block_size), len(loc), block_size)
    np.testing.assert_array_equal(unpacked, encoded.codes)
    z = code.candidates(blocks, encoded.codes, block_size)
    mask = np.arange(loc.size).reshape(loc.shape) < code.num_weights
    weights = (log_weights(z, loc, log_scale) * mask).sum(1)
    np.testing.assert_allclose(encoded.log_weight, weights, rtol=1e-5, atol=1e-4)


# The choice, against the enumeration of all codes.


# From a bit for each 20 weights to as many as a state of 8 bits can hold.
@pytest.mark.parametrize(
    "num_bytes, num_weights",
    [(1, 40), (2, 32), (2, 16), (2, 11), (2, 5), (2, 4), (2, 3), (2, 2), (1, 1)],
)
def test_largest_weight_is_that_of_all_codes(num_bytes, num_weights):
    coder = coder_of(num_bytes, num_weights)
    loc, log_scale = posterior(num_weights, seed=num_weights)
    encoded = coder.encode([0], loc, log_scale)
    assert_consistent(coder.code, encoded, loc, log_scale)
    weights = enumerated(coder.code, loc[0], log_scale[0])
    assert number_of(coder.code, encoded.codes) == weights.argmax()
    assert encoded.log_weight[0] == pytest.approx(weights.max(), abs=1e-4)
    # A bound: the mean is no less than what the largest alone gives.
    bound = weights.max() - np.log(len(weights))
    assert encoded.log_evidence[0] == pytest.approx(bound, abs=1e-4)
    assert best_log_weight(coder.code, loc, log_scale) == pytest.approx(weights.max())


@pytest.mark.parametrize("num_bytes, num_weights", [(2, 16), (2, 5), (2, 2)])
def test_sample_knows_the_evidence_of_all_codes(num_bytes, num_weights):
    coder = coder_of(num_bytes, num_weights, selection="sample")
    loc, log_scale = posterior(num_weights, seed=num_weights)
    encoded = coder.encode([0], loc, log_scale)
    assert_consistent(coder.code, encoded, loc, log_scale)
    weights = enumerated(coder.code, loc[0], log_scale[0])
    chosen = weights[number_of(coder.code, encoded.codes)]
    assert encoded.log_weight[0] == pytest.approx(chosen, abs=1e-4)
    evidence = np.logaddexp.reduce(weights) - np.log(len(weights))
    assert encoded.log_evidence[0] == pytest.approx(evidence, abs=1e-4)


def test_samples_follow_the_weights():
    """By where the chosen code lies in the cumulative weights, in three orders."""
    num_weights, count = 6, 240
    rng, places = np.random.default_rng(1), []
    for seed in range(count):
        coder = coder_of(2, num_weights, seed=seed, selection="sample")
        loc, log_scale = posterior(num_weights, seed=seed)
        number = number_of(coder.code, coder.encode([0], loc, log_scale).codes)
        weights = enumerated(coder.code, loc[0], log_scale[0])
        weights = np.exp(weights - weights.max())
        all_codes = np.arange(len(weights))
        swapped = all_codes.reshape(16, 16, 16, 16).transpose().ravel()
        places.append([])
        for order in (all_codes, swapped, np.argsort(weights)):
            at = np.flatnonzero(order == number)[0]
            share = weights[order] / weights.sum()
            places[-1].append(share[:at].sum() + rng.uniform() * share[at])
    for column in np.transpose(places):
        observed = np.histogram(column, 20, (0, 1))[0]
        assert scipy.stats.chisquare(observed).pvalue > 1e-7
    # As far from the best as chance has it.
    assert scipy.stats.kstest(np.transpose(places)[2], "uniform").pvalue > 1e-7


# Long sequences, against dynamic programming in NumPy.


def test_long_sequences_are_as_good_as_can_be():
    for num_bytes, num_weights in ((800, 4800), (9000, 9001)):
        coder = coder_of(num_bytes, num_weights, 100)
        loc, log_scale = posterior(num_weights, 100)
        encoded = coder.encode(np.arange(len(loc)), loc, log_scale)
        assert_consistent(coder.code, encoded, loc, log_scale)
        loc, log_scale = (x.ravel()[:num_weights] for x in (loc, log_scale))
        best = best_log_weight(coder.code, loc, log_scale)
        assert encoded.log_weight.sum() == pytest.approx(best, rel=1e-5)
        bits = 8 * num_bytes * np.log(2)
        assert encoded.log_evidence.sum() < best - bits + 8 * 100 * np.log(2)


def test_long_samples_are_of_the_posterior():
    num_weights = 1810  # the last block is short
    coder = coder_of(600, num_weights, 100, selection="sample")
    loc, log_scale = posterior(num_weights, 100)
    encoded = coder.encode(np.arange(len(loc)), loc, log_scale)
    assert_consistent(coder.code, encoded, loc, log_scale)
    score = forward(
        coder.code,
        loc.ravel()[:num_weights],
        log_scale.ravel()[:num_weights],
        np.logaddexp.reduce,
    )
    evidence = np.logaddexp.reduce(score) - 4800 * np.log(2)
    assert encoded.log_evidence.sum() == pytest.approx(evidence, abs=0.05)
    assert encoded.log_evidence[-1] == pytest.approx(evidence * 10 / 1810, abs=1e-3)
    # With more bits than KL, what is chosen is a sample of Q.
    z = coder.code.candidates(np.arange(len(loc)), encoded.codes, 100)
    standard = ((z - loc) / np.exp(log_scale)).ravel()[:num_weights]
    assert scipy.stats.kstest(standard, "norm").pvalue > 1e-7


def test_codes_of_nothing_to_say_are_random():
    """Under Q = P all codes are equally good, and each half byte is as likely."""
    coder = coder_of(9000, 9000, selection="sample")
    encoded = coder.encode([0], *np.zeros((2, 1, 9000), np.float32))
    assert not encoded.log_weight.any()
    assert encoded.log_evidence[0] == pytest.approx(0, abs=2e-3)
    packed = np.frombuffer(coder.code.pack(encoded.codes, 9000), np.uint8)
    symbols = np.stack([packed & 15, packed >> 4], 1).ravel()
    for pair in (symbols, symbols[:-1:2] * 16 + symbols[1::2]):
        observed = np.bincount(pair)
        assert len(observed) in (16, 256)
        assert scipy.stats.chisquare(observed).pvalue > 1e-7


# Rounds.


def in_rounds(coder, loc, log_scale, per_round, ahead):
    found, before = [], None
    for start in range(0, len(loc), per_round):
        blocks = np.arange(start, min(start + per_round, len(loc)))
        rows = slice(start, start + per_round + ahead)
        some = coder.encode(blocks, loc[rows], log_scale[rows], before)
        before = some.codes[-1]
        found.append(some)
    return type(found[0])(*map(np.concatenate, zip(*found)))


# Symbols of less than a block, of a block, of blocks and a half; padding at the end.
@pytest.mark.parametrize(
    "num_bytes, num_weights, block_size, per_round",
    [(100, 400, 10, 7), (40, 637, 8, 5), (150, 599, 2, 1), (20, 237, 4, 3)],
)
def test_rounds_with_a_look_ahead_lose_nothing(
    num_bytes, num_weights, block_size, per_round
):
    coder = coder_of(num_bytes, num_weights, block_size)
    loc, log_scale = posterior(num_weights, block_size)
    whole = coder.encode(np.arange(len(loc)), loc, log_scale)
    ahead = coder.lookahead(block_size)
    assert ahead > 1
    rounds = in_rounds(coder, loc, log_scale, per_round, ahead)
    assert_consistent(coder.code, rounds, loc, log_scale)
    total = whole.log_weight.sum()
    assert rounds.log_weight.sum() == pytest.approx(total, abs=1e-3)
    np.testing.assert_array_equal(rounds.codes, whole.codes)
    blind = in_rounds(coder, loc, log_scale, per_round, 0)
    assert_consistent(coder.code, blind, loc, log_scale)
    assert blind.log_weight.sum() < total


def test_samples_in_rounds():
    coder = coder_of(150, 397, 4, selection="sample")
    loc, log_scale = posterior(397, 4)
    rounds = in_rounds(coder, loc, log_scale, 9, coder.lookahead(4))
    assert_consistent(coder.code, rounds, loc, log_scale)
    assert np.isfinite(rounds.log_evidence).all()
    z = coder.code.candidates(np.arange(len(loc)), rounds.codes, 4)
    standard = ((z - loc) / np.exp(log_scale)).ravel()[:397]
    assert scipy.stats.kstest(standard, "norm").pvalue > 1e-7


def test_blocks_are_coded_in_order():
    coder = coder_of(10, 40, 5)
    loc, log_scale = posterior(40, 5)
    before = np.zeros(5, np.int32)
    for blocks in ([1, 2], [3]):
        rows = loc[blocks], log_scale[blocks]
        with pytest.raises(ValueError, match=r"coded in order.*one before them c"):
            coder.encode(blocks, *rows)
        coder.encode(blocks, *rows, before)
    for blocks in ([0, 2], [1, 0], [2, 2]):
        with pytest.raises(ValueError, match="must be consecutive"):
            coder.encode(blocks, loc[blocks], log_scale[blocks], before)
    for blocks in ([], [7, 8], [8]):
        rows = np.zeros((2, len(blocks), 5))
        with pytest.raises(ValueError, match="of the 8 that 40 weights make"):
            coder.encode(blocks, *rows, before)
    with pytest.raises(ValueError, match=r"loc has shape \(9, 5\)"):
        coder_of(40, 40, 5).encode([0, 1, 2], *np.zeros((2, 9, 5)))  # 3 + 5 at most


def test_the_same_call_gives_the_same_codes_and_seeds_matter():
    loc, log_scale = posterior(60, 6)
    codes = {}
    for selection in ("sample", "largest_weight"):
        for seed in (1, 2, 2**32 + 1):
            coder = coder_of(7, 60, 6, seed, selection)
            found = [coder.encode(np.arange(10), loc, log_scale) for _ in range(2)]
            for first, second in zip(*found):
                np.testing.assert_array_equal(first, second)
            codes[selection, seed] = found[0].codes.tobytes()
    assert len(set(codes.values())) == 6


# Extremes.


@SELECTIONS
@pytest.mark.parametrize("log_scale", [np.log(1e-6), -1.0, 0.0, np.log(1e6)])
@pytest.mark.parametrize("loc", [0.0, 1.0, -30.0, 1e4])
def test_extreme_posteriors(selection, log_scale, loc):
    coder = coder_of(2, 16, 4, selection=selection)
    loc, log_scale = (np.full((4, 4), x, np.float32) for x in (loc, log_scale))
    loc[1::2] *= -1
    encoded = coder.encode(np.arange(4), loc, log_scale)
    assert_consistent(coder.code, encoded, loc, log_scale)
    assert np.isfinite(encoded.log_evidence).all()
    weights = enumerated(coder.code, loc.ravel(), log_scale.ravel())
    total = encoded.log_weight.sum(dtype=np.float64)
    if selection == "largest_weight":
        assert total == pytest.approx(weights.max(), rel=1e-5, abs=1e-3)
    elif np.abs(weights).max() < 1e3:
        evidence = np.logaddexp.reduce(weights) - 16 * np.log(2)
        found = encoded.log_evidence.sum()
        assert found == pytest.approx(evidence, rel=1e-5, abs=1e-3)


@SELECTIONS
def test_out_of_all_bounds(selection):
    """What float32 cannot weigh is coded somehow, and decodes."""
    rng = np.random.default_rng(0)
    loc = rng.choice([-1e30, -1e3, 0, 1e3, 1e30], (8, 16)).astype(np.float32)
    log_scale = rng.choice([-80, -9, 0, 80], (8, 16)).astype(np.float32)
    coder = coder_of(2, 128, 16, selection=selection)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        encoded = coder.encode(np.arange(8), loc, log_scale)
    codes = coder.code.unpack(coder.code.pack(encoded.codes, 16), 8, 16)
    np.testing.assert_array_equal(codes, encoded.codes)
    assert np.isfinite(encoded.log_weight).all()
    assert np.isfinite(encoded.log_evidence).all()


@SELECTIONS
def test_zero_bytes_leave_no_choice(selection):
    coder = coder_of(0, 7, 3, selection=selection)
    loc, log_scale = posterior(7, 3)
    encoded = in_rounds(coder, loc, log_scale, 2, 1)
    assert_consistent(coder.code, encoded, loc, log_scale)
    assert not encoded.codes.any() and coder.code.pack(encoded.codes, 3) == b""
    np.testing.assert_array_equal(encoded.log_evidence, encoded.log_weight)


def test_padding_counts_for_nothing():
    coder = coder_of(5, 13, 5)
    loc, log_scale = posterior(13, 5)
    encoded = coder.encode([0, 1, 2], loc, log_scale)
    loc[2, 3:], log_scale[2, 3:] = 7, -3
    for before, after in zip(encoded, coder.encode([0, 1, 2], loc, log_scale)):
        np.testing.assert_array_equal(before, after)
    assert (encoded.codes[2, 3:] == encoded.codes[2, 2]).all()


def test_coders_that_cannot_be():
    for options, message in (
        ({"state_bits": 7}, "`state_bits` must be an integer from 8 to 20"),
        ({"state_bits": 21}, "`state_bits` must be an integer from 8 to 20"),
        ({"state_bits": 8.5}, "`state_bits` must be an integer"),
        ({"block_bits": -1}, "`block_bits` must be a finite number of at least 0"),
        ({"block_bits": np.nan}, "`block_bits` must be a finite number"),
        ({"block_bits": np.inf}, "`block_bits` must be a finite number"),
        ({"selection": "best"}, "`selection` must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            TrellisCoder(**options)
    layout = WeightLayout([CodedVariable((12,))], 4, 0)
    coder = TrellisCoder(state_bits=11, block_bits=8.0)
    coder = coder.for_layout(layout)
    assert coder.code == TrellisCode(0, 12, 11, 3)
    assert dataclasses.replace(coder, block_bits=32).code.num_bytes == 12
    message = "`block_bits` must be at most 32 for 12 weights in blocks of 4.*state_bi"
    for block_bits in (34, 1e308):
        received = re.escape(f"block_bits={block_bits}")
        with pytest.raises(ValueError, match=f"{message}.*{received}"):
            _ = dataclasses.replace(coder, block_bits=block_bits).code
    with pytest.raises(ValueError, match=message):
        tfmiracle.MeanKL().posterior(layout, coder=TrellisCoder(11, 99))


def test_few_bits_are_a_byte_and_none_are_none():
    coder = TrellisCoder(8, num_weights=60, block_size=20)
    for block_bits, num_bytes in ((0, 0), (1e-9, 1), (1, 1), (4, 2)):
        code = dataclasses.replace(coder, block_bits=block_bits).code
        assert code.num_bytes == num_bytes


def test_trellises_of_many_widths_are_no_retracing(caplog):
    tensorflow = logging.getLogger("tensorflow")
    tensorflow.addHandler(caplog.handler)
    for num_bytes in (90, 45, 30, 22, 18, 15):  # 1 to 6 weights a symbol
        coder_of(num_bytes, 180).encode([0], *posterior(180))
    tensorflow.removeHandler(caplog.handler)
    assert "retracing" not in caplog.text


def test_a_coder_is_what_its_options_say():
    coder = TrellisCoder(12, 3.5, "sample")
    made = CODERS.serialize(coder)
    assert made["config"] == {
        "state_bits": 12,
        "block_bits": 3.5,
        "selection": "sample",
    }
    assert CODERS.get(json.loads(json.dumps(made))) == coder
    layout = WeightLayout([CodedVariable((5, 4), 2)], 3, 9)
    placed = coder.for_layout(layout)
    assert (placed.seed, placed.num_weights, placed.block_size) == (9, 10, 3)
    assert CODERS.serialize(placed) == made
    assert placed.code.bits(3) == 8 * placed.code.num_bytes * 3 / 10


# The code.


@st.composite
def sequences(draw):
    """A code, its bytes, and a block size."""
    num_weights, state_bits = draw(st.integers(1, 60)), draw(st.integers(8, 20))
    most = state_bits // 4 * num_weights // 2
    packed = draw(st.binary(max_size=most))
    seed = draw(st.integers(0, 2**64 - 1))
    code = TrellisCode(seed, num_weights, state_bits, len(packed))
    return code, packed, draw(st.integers(1, num_weights))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sequences(), st.data())
def test_pack_reverses_unpack(sequence, data):
    code, packed, block_size = sequence
    num_blocks = -(-code.num_weights // block_size)
    codes = code.unpack(packed, num_blocks, block_size)
    assert codes.shape == (num_blocks, *code.shape(block_size))
    code.check(codes)
    assert code.pack(codes, block_size) == packed
    parameters = code.parameters()
    assert parameters == (code.state_bits, len(packed))
    layout = WeightLayout([CodedVariable((code.num_weights,))], block_size, code.seed)
    assert TrellisCode.from_parameters(parameters, layout) == code
    # A weight is decoded by its own block, and by a part of the sequence.
    block = data.draw(st.integers(0, num_blocks - 1))
    z = code.candidates(np.arange(num_blocks), codes, block_size)
    alone = code.candidates([block], codes[block : block + 1], block_size)
    np.testing.assert_array_equal(alone[0], z[block])
    assert z.dtype == np.float32 and np.abs(z).max() < 4.4
    t = data.draw(st.integers(0, code.num_weights - 1))
    place = np.unravel_index(t, codes.shape)
    assert candidates_of_weight(code, t, codes[place][np.newaxis]) == z[place]
    number = entered(2 * len(packed), code.num_weights)[t]
    symbols = [half for byte in packed for half in (byte & 15, byte >> 4)][:number]
    state = 0
    for symbol in symbols[-5:]:  # no more are in a state
        state = (16 * state + symbol) % 2**code.state_bits
    assert codes[place] == state
    # Other bytes, or other states.
    with pytest.raises(ValueError, match=f"takes {len(packed)} bytes"):
        code.unpack(packed + b"\0", num_blocks, block_size)
    changed = codes.copy()
    changed[place] ^= 1 << data.draw(st.integers(0, code.state_bits - 1))
    try:
        other = code.pack(changed, block_size)
    except ValueError as error:
        assert "not those of one sequence" in str(error)
    else:
        again = code.unpack(other, num_blocks, block_size)
        np.testing.assert_array_equal(
            again.ravel()[: code.num_weights], changed.ravel()[: code.num_weights]
        )


def test_many_candidates_are_as_few():
    """From the whole table, or each by itself."""
    rng = np.random.default_rng(0)
    for state_bits in (8, 17):
        code = TrellisCode(SEED, 10**5, state_bits, 100)
        codes = rng.integers(0, 1 << state_bits, (4000, 7)).astype(np.int32)
        blocks = rng.integers(0, 2**32, 4000)
        many = code.candidates(blocks, codes, 7)
        few = [code.candidates(blocks[i::20], codes[i::20], 7) for i in range(20)]
        for i, some in enumerate(few):
            np.testing.assert_array_equal(some, many[i::20], strict=True)
        assert abs(many.mean()) < 0.05 and abs(many.std() - 1) < 0.02


def test_candidates_of_neighbours_are_independent():
    """Weights of the same state have candidates apart in the table."""
    code = TrellisCode(SEED, 4000, 16, 100)
    z = code.candidates([0], np.full((1, 4000), 77), 4000)[0]
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-7
    for lag in (1, 2, 3, 5, 8):
        assert abs(np.corrcoef(z[:-lag], z[lag:])[0, 1]) < 0.1


@pytest.mark.parametrize(
    "bad", [[[-1, 0]], [[0, 256]], [[0.0, 1.0]], [[True, False]], [[2**40, 0]]]
)
def test_states_out_of_range(bad):
    with pytest.raises(ValueError, match="must be states, integers of 8 bits"):
        TrellisCode(0, 2, 8, 1).check(np.array(bad))


@pytest.mark.parametrize(
    "arguments", [(0, 2, 7, 1), (0, 2, 21, 1), (0, 2, 8, 3), (0, 2, 8, -1), (-1, 2, 8)]
)
def test_codes_that_cannot_be(arguments):
    with pytest.raises(ValueError, match="must be"):
        TrellisCode(*arguments)


# From training to a file.


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 5)).astype(np.float32)
    return x, np.argmax(x[:, :3] ** 2, axis=1)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
OPTIONS = {"coder": "trellis", "state_bits": STATE_BITS, "block_bits": 7.3}


def small_net():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.layers.Input((5,), name="x"),
            keras.layers.Dense(6, "relu", name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3, name="two"),
        ],
        name="net",
    )


def of_layers():
    options = {"block_size": 8, **OPTIONS}
    net = keras.Sequential(
        [
            keras.layers.Input((5,), name="x"),
            tfmiracle.MeanKLDense(6, activation="relu", name="one", **options),
            tfmiracle.MeanKLDense(3, name="two", **options),
        ],
        name="net",
    )
    return net


def wrapped():
    return tfmiracle.VariationalModel(small_net(), block_size=8, **OPTIONS)


def fit(model, path, steps=12):
    model.compile(keras.optimizers.SGD(0.01), LOSS)
    coding = tfmiracle.CompressionCallback(path, 2, 1, train_steps=2, verbose=0)
    model.fit(
        *data(), batch_size=8, epochs=-(-steps // 6), verbose=0, callbacks=[coding]
    )
    return coding


def assert_decodes(path, model):
    x = data()[0]
    np.testing.assert_allclose(tfmiracle.load(path)(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make, sizes", [(wrapped, [69]), (of_layers, [36, 21])], ids=["model", "layers"]
)
def test_fit_codes_a_trellis(make, sizes, tmp_path, quick):
    model, path = make(), tmp_path / "net.miracle"
    coding = fit(model, path)
    assert coding.history[-1]["blocks"] == sum(-(-n // 8) for n in sizes)
    file = MiracleFile.read(path)
    for group, num_weights in zip(file.groups, sizes, strict=True):
        num_bytes = round(7.3 * num_weights / 8 / 8)
        assert group.code == TrellisCode(
            group.layout.seed, num_weights, STATE_BITS, num_bytes
        )
        assert group.payload_bytes == num_bytes
    assert_decodes(path, model)
    # A saved model has its codes, and writes the same file.
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(data()[0]), model(data()[0]))
    again = tfmiracle.training.coding_loop.CodingLoop(tmp_path / "b", verbose=0)
    again.start(loaded)
    again.finish()
    assert (tmp_path / "b").read_bytes() == path.read_bytes()


def test_a_posterior_is_coded_in_order(quick):
    model = wrapped()
    posterior = model.block_posterior
    bits = 8 * round(7.3 * 69 / 8 / 8) * 8 / 69
    assert posterior.kl_bits == pytest.approx(bits)
    posterior.finalize_coding_scale()
    with pytest.raises(ValueError, match="coded in order"):
        posterior.encode([1, 2])
    first = posterior.encode([0, 1])
    posterior.fix([0, 1], first.codes)
    second = posterior.encode(np.arange(2, 9))
    posterior.fix(np.arange(2, 9), second.codes)
    found = np.concatenate([first.codes, second.codes])
    assert posterior.code.pack(found, 8) == posterior.code.pack(posterior.codes, 8)
    # All at once, with all to look ahead at, is the same.
    loc, log_scale = (x.numpy() for x in posterior.standardized())
    whole = posterior.coder.encode(np.arange(9), loc, log_scale)
    np.testing.assert_array_equal(whole.codes, found)


def compressed(path, coder, **options):
    net = small_net()
    net.compile(loss=LOSS)
    recipe = tfmiracle.Recipe(
        coder=coder, block_size=9, train_steps=2, finetune_steps=1, blocks_per_round=5,
        **options,
    )  # fmt: skip
    return tfmiracle.compress(net, data(), path=path, recipe=recipe, verbose=0)


def test_compress_by_name_and_by_object(tmp_path, quick):
    options = {"state_bits": STATE_BITS, "block_bits": 5.5}
    named = compressed(tmp_path / "a.miracle", "trellis", **options)
    coder = TrellisCoder(**options)
    made = compressed(tmp_path / "b.miracle", coder)
    data_of = [(tmp_path / f"{name}.miracle").read_bytes() for name in "ab"]
    assert data_of[0] == data_of[1]
    assert_decodes(named.path, made.model)
    (group,) = named.file.groups
    assert group.code == TrellisCode(0, 69, STATE_BITS, round(5.5 * 69 / 9 / 8))
    settings = json.loads(json.dumps(tfmiracle.Recipe(coder=coder).settings()))
    assert tfmiracle.Recipe(coder=settings["coder"]).coder == coder
    weights = decode(data_of[0]).weights
    assert sum(value.size for value in weights.values()) == 81


def test_recipes_say_what_a_coder_takes():
    tfmiracle.Recipe(coder="trellis", block_bits=3.5)
    with pytest.raises(ValueError, match="`block_bits` must be an integer"):
        tfmiracle.Recipe(block_bits=3.5)
    for state_bits in (7, 21, 9.5):
        with pytest.raises(ValueError, match="`state_bits` must be an integer from 8"):
            tfmiracle.Recipe(coder="trellis", state_bits=state_bits)


def test_a_short_last_block_has_more_kl_than_it_can_use():
    net = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(7)])
    model = tfmiracle.VariationalModel(
        net, coder="trellis", state_bits=8, block_size=9, block_bits=36, kl_bits=300
    )
    posterior = model.block_posterior  # 28 weights: one in the last block
    posterior.finalize_coding_scale()
    coded = posterior.encode(range(4))
    assert np.all(np.isfinite(coded.log_weight))
    posterior.fix(range(4), coded.codes)


@pytest.mark.parametrize("block_bits", ["abc", None, [1], True])
def test_bits_of_a_block_are_a_number(block_bits):
    with pytest.raises(ValueError, match="`block_bits` must be"):
        TrellisCoder(block_bits=block_bits)


def test_targets_need_codes_of_known_size():
    net = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(70)])
    with pytest.raises(ValueError, match="`target` needs a coder"):
        recipe_for(net, 400, tfmiracle.Recipe(coder="orc", block_bits=6))
    recipe = recipe_for(net, 400, tfmiracle.Recipe(coder="trellis"))
    assert 8 < recipe.block_bits * 280 / 20 / 8 < 400
    # Whatever bits it had, and whoever said them.
    for bits in (0.0, 300, 1e300):
        named = tfmiracle.Recipe(coder="trellis", block_bits=bits)
        assert recipe_for(net, 400, named) == recipe
        same = dataclasses.replace(named, coder=TrellisCoder(block_bits=bits))
        found = recipe_for(net, 400, same)
        assert found.block_bits == found.coder.block_bits == recipe.block_bits
        with pytest.raises(ValueError, match=", 1 for the shortest code, "):
            recipe_for(net, 9, named)


def test_a_target_for_one_weight():
    net = keras.Sequential([keras.layers.Input((1,))])
    net.add(keras.layers.Dense(1, use_bias=False))
    recipe = tfmiracle.Recipe(coder="trellis", block_bits=40)
    assert recipe_for(net, 4000, recipe).block_bits == 16


def test_a_target_is_read_first():
    with pytest.raises(ValueError, match="`target` must be a number of bytes"):
        recipe_for(small_net(), "soon", tfmiracle.Recipe(coder="orc"))


@pytest.mark.parametrize("sampled", [False, True])
def test_passes_are_bounded_and_do_not_wait_for_the_host(sampled):
    """Nothing in the compiled programs is larger than the choices of a chunk."""
    chunk, states = trellis._CHUNK, 1 << 9

    def program(run, *shapes):
        inputs = [tf.zeros(shape, dtype) for dtype, *shape in shapes]
        around = tf.function(lambda *inputs: run(*inputs), jit_compile=True)
        return around.experimental_get_compiler_ir(*inputs)(stage="hlo")

    forward = program(
        trellis._forward_pass(9, 2, sampled),
        (tf.float32, (1 << 16) + states),
        (tf.uint32, 2),
        *[(tf.int32,)] * 2,
        (tf.int32, chunk, 2),
        *[(tf.float32, chunk, 2)] * 2,
        (tf.float32, chunk),
        (tf.float32, states),
    )
    backward = program(
        trellis._backward_pass(9),
        *[(tf.int32,)] * 2,
        (tf.uint8, chunk, states // 16),
    )
    for text in (forward, backward):
        assert "while(" in text
        assert not re.search(HOST, text)
        shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
        sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
        assert max(sizes) <= max(chunk * states // 16, (1 << 16) + states)
