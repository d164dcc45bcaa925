"""Philox-4x32-10 and what is built on it, in NumPy."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tfmiracle.codec import philox
from tfmiracle.codec.philox import Domain

# Random123's kat_vectors: counter, key, expected words.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def parse(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    result = philox.philox4x32(np.array(parse(counter), np.uint32), parse(key))
    assert result.dtype == np.uint32
    assert result.tolist() == parse(expected)


def test_each_counter_counts_for_itself():
    counter = np.arange(2 * 3 * 4, dtype=np.uint32).reshape(2, 3, 4)
    result = philox.philox4x32(counter, (5, 6))
    assert result.shape == (2, 3, 4)
    for index in np.ndindex(2, 3):
        one = philox.philox4x32(counter[index], (5, 6))
        np.testing.assert_array_equal(result[index], one)


def test_words_are_addressed_by_seed_domain_stream_and_position(monkeypatch):
    seed, streams, count = 0xFEDCBA9876543210, np.array([[3, 0], [2**32 - 1, 7]]), 11
    monkeypatch.setattr(philox, "_CHUNK", 5)  # chunks that end within a stream
    result = philox.words(seed, Domain.HASH, streams, count)
    assert result.shape == (2, 2, 11)
    for index in np.ndindex(2, 2):
        for word in range(count):
            counter = np.array([word // 4, 0, streams[index], Domain.HASH], np.uint32)
            call = philox.philox4x32(counter, (0x76543210, 0xFEDCBA98))
            assert result[index][word] == call[word % 4]


def test_words_of_a_single_stream():
    one = philox.words(1, Domain.SIGN, 9, 6)
    assert one.shape == (6,)
    np.testing.assert_array_equal(one, philox.words(1, Domain.SIGN, [9], 6)[0])
    np.testing.assert_array_equal(one[:5], philox.words(1, Domain.SIGN, 9, 5))
    assert philox.words(1, Domain.SIGN, 9, 0).shape == (0,)


def test_words_differ_between_seeds_domains_and_streams():
    drawn = {
        tuple(philox.words(seed, domain, stream, 4))
        for seed in (0, 1, 2**32, 2**63)
        for domain in Domain
        for stream in (0, 1, 2**31)
    }
    assert len(drawn) == 4 * len(Domain) * 3


def test_bits_of_words_are_fair():
    words = philox.words(11, Domain.CODEBOOK, np.arange(100), 1000)
    share = [(words >> np.uint32(bit) & np.uint32(1)).mean() for bit in range(32)]
    assert np.abs(np.array(share) - 0.5).max() < 5 * 0.5 / np.sqrt(words.size)


@hypothesis.given(
    seed=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    n=st.integers(0, 99),
)
@hypothesis.settings(derandomize=True, deadline=None)
def test_permutation_sorts_the_words(seed, stream, n):
    result = philox.permutation(seed, Domain.PERMUTATION, stream, n)
    words = philox.words(seed, Domain.PERMUTATION, stream, n)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(result, np.argsort(words, kind="stable"))


def test_permutation_orders_equal_words_by_position(monkeypatch):
    monkeypatch.setattr(
        philox, "words", lambda *_: np.array([7, 3, 7, 3, 2**32 - 1], np.uint32)
    )
    assert philox.permutation(0, 0, 0, 5).tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("shape", [(4095,), (4096,), (3, 5000), ((1 << 21) + 1,)])
def test_permutations_of_any_length_sort_alike(monkeypatch, shape):
    # Few values in either half, so that many words are equal in one or in both.
    rng = np.random.default_rng(0)
    values = np.uint32([0, 1, 0x7FFF, 0x8000, 0xFFFF, *rng.integers(0, 1 << 16, 60)])
    high, low = rng.choice(values, (2, *shape))
    words = high << np.uint32(16) | low
    monkeypatch.setattr(philox, "words", lambda *_: words)
    result = philox.permutation(0, 0, np.arange(3), shape[-1])
    assert result.dtype == np.int64
    np.testing.assert_array_equal(result, np.argsort(words, kind="stable"))


def test_permutations_are_uniform():
    drawn = philox.permutation(3, Domain.SHUFFLE, np.arange(24_000), 4)
    _, counts = np.unique(drawn @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 53  # 23 degrees of freedom, p = 4e-4


def test_signs_are_bits_of_the_words():
    result = philox.signs(3, Domain.FLIP, np.arange(6).reshape(2, 3), 70)
    words = philox.words(3, Domain.FLIP, np.arange(6).reshape(2, 3), 3)
    assert result.dtype == np.float32 and result.shape == (2, 3, 70)
    for i in (0, 1, 31, 32, 63, 69):
        bit = words[..., i // 32] >> np.uint32(i % 32) & np.uint32(1)
        np.testing.assert_array_equal(result[..., i], np.where(bit, -1, 1))


def test_a_permutation_of_a_million_is_one():
    result = philox.permutation(0, Domain.PERMUTATION, 0, 1_000_000)
    assert (np.bincount(result, minlength=1_000_000) == 1).all()
    # Position and value are uncorrelated.
    assert abs(np.corrcoef(result, np.arange(1_000_000))[0, 1]) < 0.005


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1"])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=r"`seed` .* integer from 0 to 2\*\*64 - 1"):
        philox.words(seed, Domain.SIGN, 0, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: philox.philox4x32(np.zeros(3), (0, 0)), r"counter has shape \(3,\)"),
        (
            lambda: philox.philox4x32(np.zeros(4), (0, 2**32)),
            "key = .* pass two integers",
        ),
        (lambda: philox.words(0, 0, -1, 4), "stream holds -1; pass integers from 0"),
        (lambda: philox.words(0, 0, [0, 2**32], 4), "stream holds 4294967296"),
        (lambda: philox.words(0, 0, 0.5, 4), "stream has dtype float64; pass integers"),
        (lambda: philox.words(0, 0, 0, -4), "count = -4; pass an integer from 0"),
        (lambda: philox.permutation(0, 0, 0, -1), "n = -1; pass an integer from 0"),
        (lambda: philox.permutation(0, 0, 0, 2**32), "n = 4294967296"),
        (lambda: philox.signs(0, 0, 0, -1), "n = -1; pass an integer of at least 0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
