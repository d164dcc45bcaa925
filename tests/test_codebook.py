"""The quantile table and the candidates."""

import hashlib
import statistics
import subprocess
import sys

import mpmath
import numpy as np
import pytest

from tfmiracle.codec import codebook, philox
from tfmiracle.codec.philox import Domain

SEED = 0x0123456789ABCDEF


def test_table_is_what_files_were_written_with():
    table = codebook.normal_quantiles()
    assert table.dtype == np.float32 and table.shape == (65536,)
    assert hashlib.sha256(table.astype("<f4").tobytes()).hexdigest() == (
        "c626a2537fccfd81f85b4169ad6b24e695a0fac237e8139a7bd694436252de76"
    )


def test_table_is_symmetric_increasing_and_read_only():
    table = codebook.normal_quantiles()
    np.testing.assert_array_equal(table, -table[::-1])
    assert (np.diff(table) > 0).all()
    np.testing.assert_array_equal(table * 2.0**20, np.rint(table * 2.0**20))
    assert table is codebook.normal_quantiles()
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0


def test_table_is_standard_normal():
    table = codebook.normal_quantiles().astype(np.float64)
    assert abs((table**2).mean() - 1) < 3e-5
    assert abs((table**4).mean() - 3) < 2e-3


def test_no_entry_is_near_a_rounding_boundary():
    """Any routine accurate to 1e-12 rounds every quantile as the table does."""
    inv_cdf = statistics.NormalDist().inv_cdf
    steps = np.array([inv_cdf((i + 0.5) / 65536) for i in range(32768)]) * 2.0**20
    distance = np.abs(steps - np.floor(steps) - 0.5) / 2.0**20
    nearest = np.argsort(distance)[:20]
    table = codebook.normal_quantiles()
    with mpmath.workdps(30):
        for i in [*nearest, 0, 1, 32767]:  # double precision orders the others safely
            p = mpmath.mpf(2 * int(i) + 1) / 131072
            x = mpmath.mpf(steps[i]) / 2**20
            for _ in range(2):  # Newton, from double to 30 digits
                x -= (mpmath.ncdf(x) - p) / mpmath.npdf(x)
            assert abs(x * 2**20 - mpmath.floor(x * 2**20) - 0.5) > 1e-12 * 2**20
            assert mpmath.nint(x * 2**20) == float(table[i]) * 2**20
            assert abs(x * 2**20 - steps[i]) < 1e-13 * 2**20


def test_quantiles_of_all_magnitudes():
    p = np.append(np.exp(-np.linspace(0.7, 25, 60)), 0.5)
    with mpmath.workdps(30):
        expected = [mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(x) - 1) for x in p]
    np.testing.assert_allclose(
        codebook._inverse_cdf(p), np.array(expected, np.float64), rtol=2e-15
    )


def direct(domain, stream, index, block_size):
    """Candidate, one dimension at a time."""
    z = []
    for d in range(block_size):
        counter = np.array([index, d // 8, stream, domain], np.uint32)
        words = philox.philox4x32(counter, philox.split_seed(SEED))
        word = int(words[d % 8 // 2])
        half = word >> 16 if d % 2 else word & 0xFFFF
        z.append(codebook.normal_quantiles()[half])
    return np.array(z)


@pytest.mark.parametrize("block_size", [1, 7, 8, 20])
def test_candidates_of_a_block(block_size):
    blocks = np.array([0, 5, 5, 2**32 - 1])
    indices = np.array([1, 0, 2**28 - 1, 77])
    z = codebook.candidates(SEED, blocks, indices, block_size, shared=False)
    assert z.dtype == np.float32 and z.shape == (4, block_size)
    for row, block, index in zip(z, blocks, indices, strict=True):
        expected = direct(Domain.CODEBOOK, block, index, block_size)
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("block_size", [1, 7, 20])
def test_candidates_of_the_shared_codebook(block_size):
    blocks, indices = np.array([0, 5, 2**32 - 1]), np.array([1, 2**28 - 1, 77])
    z = codebook.candidates(SEED, blocks, indices, block_size, shared=True)
    assert z.dtype == np.float32 and z.shape == (3, block_size)
    for row, block, index in zip(z, blocks, indices, strict=True):
        y = direct(Domain.SHARED_CODEBOOK, 0, index, block_size)
        shuffle = philox.permutation(SEED, Domain.SHUFFLE, block, block_size)
        flip = philox.signs(SEED, Domain.FLIP, block, block_size)
        np.testing.assert_array_equal(row, flip * y[shuffle])


def test_candidates_do_not_change():
    """Files hold indices: these values must be the same for ever."""
    own = codebook.candidates(42, [3], [1_000_000], 3, shared=False)
    shared = codebook.candidates(42, [3], [1_000_000], 3, shared=True)
    assert (own * 2**20).tolist() == [[359599, -421594, -888732]]
    assert (shared * 2**20).tolist() == [[652346, 622099, -1286658]]


@pytest.mark.parametrize("shared", [False, True])
def test_chunks_do_not_show(shared, monkeypatch):
    rng = np.random.default_rng(0)
    blocks, indices = rng.integers(0, 2**20, (2, 100))
    whole = codebook.candidates(SEED, blocks, indices, 20, shared)
    monkeypatch.setattr(codebook, "_CHUNK", 17)
    pieces = codebook.candidates(SEED, blocks, indices, 20, shared)
    np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("shared", [False, True])
def test_candidates_are_standard_normal(shared):
    n, block_size = 20_000, 20
    z = codebook.candidates(1, np.arange(n), np.arange(n) % 999, block_size, shared)
    assert np.abs(z.mean(0)).max() < 4.5 / np.sqrt(n)
    covariance = z.T @ z / n - np.eye(block_size)
    assert np.abs(covariance).max() < 4.5 * np.sqrt(2 / n)


def test_no_blocks():
    for shared in (False, True):
        assert codebook.candidates(0, [], [], 5, shared).shape == (0, 5)


def test_decoding_needs_no_tensorflow():
    code = (
        "import sys, tfmiracle.codec.codebook as c\n"
        "c.candidates(0, [0], [0], 2, True)\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((-1, [0], [0], 4), r"`seed` .* from 0 to 2\*\*64 - 1.* seed=-1"),
        ((0, [-1], [0], 4), "blocks holds -1; pass integers from 0"),
        ((0, [0], [2**32], 4), "indices holds 4294967296; pass integers"),
        ((0, [0], [0.5], 4), "indices has dtype float64; pass integers"),
        ((0, [0, 1], [0], 4), r"shapes \(2,\) and \(1,\); pass two vectors"),
        ((0, 0, 0, 4), r"shapes \(\) and \(\); pass two vectors"),
        ((0, [0], [0], 0), "block_size = 0; pass an integer of at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        codebook.candidates(*arguments, shared=False)
