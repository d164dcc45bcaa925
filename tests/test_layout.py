"""Where each weight of a network has its place."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.studies.architectures import lenet5

DETERMINISTIC = settings(max_examples=30, deadline=None, derandomize=True)

variables = st.lists(
    st.builds(
        CodedVariable,
        st.lists(st.integers(1, 7), max_size=3).map(tuple),
        st.integers(1, 70),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)
layouts = st.builds(
    WeightLayout, variables, st.integers(1, 60), st.integers(0, 2**64 - 1)
)


def numbered_blocks(layout):
    """1, 2, 3, ... in the slots, 0 where padded."""
    numbers = np.arange(1, layout.mask().size + 1, dtype=np.float32)
    return numbers.reshape(layout.mask().shape) * layout.mask()


@DETERMINISTIC
@given(layouts)
def test_pull_back_is_the_transpose_of_expand(layout):
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=layout.mask().shape) * layout.mask()
    gradients = [rng.normal(size=v.shape) for v in layout.variables]
    values = layout.expand(blocks)
    expected = sum(np.sum(v * g) for v, g in zip(values, gradients, strict=True))
    found = np.sum(blocks * layout.pull_back(gradients))
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4)


@pytest.fixture(scope="module")
def lenet_variables():
    net = lenet5()
    factors = {"conv2/kernel": 2, "dense1/kernel": 64}
    return [
        CodedVariable(
            tuple(v.shape), factors.get("/".join(v.path.split("/")[-2:]), 1), i // 2
        )
        for i, v in enumerate(net.weights)
    ]


@pytest.mark.parametrize(
    "block_size, blocks, index_bytes, ratio",
    [(20, 1242, 3105, 555), (30, 828, 2070, 833), (40, 621, 1553, 1111)],
)
def test_lenet5_has_the_numbers_of_the_paper(
    lenet_variables, block_size, blocks, index_bytes, ratio
):
    layout = WeightLayout(lenet_variables, block_size, seed=0)
    assert layout.num_weights == 431_080
    assert layout.num_effective == 24_830
    assert [v.effective_size for v in layout.variables] == [
        500, 20, 12_500, 50, 6_250, 500, 5_000, 10,
    ]  # fmt: skip
    assert layout.num_blocks == blocks
    bits = 20 * layout.num_blocks
    assert math.ceil(bits / 8) == index_bytes
    assert round(32 * layout.num_weights / bits) == ratio
    assert layout.num_scales == 4


def test_lenet5_blocks_mix_layers_in_proportion(lenet_variables):
    layout = WeightLayout(lenet_variables, 20, seed=3)
    of_slot = layout.scale_index_of_slot()[layout.mask()]
    # Hypergeometric counts in the first tenth of the slots, up to 4 standard errors.
    total = layout.num_effective
    tenth = total // 10
    for scale_index in range(4):
        share = np.mean(of_slot == scale_index)
        error = math.sqrt(tenth * share * (1 - share) * 0.9)
        count = np.sum(of_slot[:tenth] == scale_index)
        assert abs(count - tenth * share) < 4 * error
    # Half of a shuffled vector's neighbours are in order, give or take.
    ascending = np.mean(np.diff(layout.slots) > 0)
    assert abs(ascending - 0.5) < 4 * math.sqrt(1 / 12 / total)


@DETERMINISTIC
@given(layouts)
def test_slots_are_a_permutation_and_padding_ends_the_last_block(layout):
    n = layout.num_effective
    np.testing.assert_array_equal(np.sort(layout.slots), np.arange(n))
    mask = layout.mask()
    assert mask.shape == (layout.num_blocks, layout.block_size)
    assert mask.dtype == bool
    np.testing.assert_array_equal(np.flatnonzero(mask), np.arange(n))
    assert mask.any(axis=1).all()  # no block is all padding


@DETERMINISTIC
@given(layouts)
def test_blocks_and_effective_weights_are_the_same_numbers(layout):
    effective = np.arange(1, layout.num_effective + 1)
    blocks = layout.to_blocks(effective)
    np.testing.assert_array_equal(layout.to_effective(blocks), effective)
    np.testing.assert_array_equal(blocks != 0, layout.mask())
    assert blocks.dtype == effective.dtype


@DETERMINISTIC
@given(layouts)
def test_expand_copies_and_flips_effective_weights(layout):
    effective = layout.to_effective(numbered_blocks(layout))
    values = layout.expand(numbered_blocks(layout))
    start = 0
    for i, (v, value) in enumerate(zip(layout.variables, values, strict=True)):
        own = effective[start : start + v.effective_size]
        start += v.effective_size
        assert value.shape == v.shape
        assert value.dtype == np.float32
        if v.hash_factor == 1:
            np.testing.assert_array_equal(value.ravel(), own)
        else:
            index, sign = layout.hashing(i)
            expected = [s * own[j] for j, s in zip(index, sign, strict=True)]
            np.testing.assert_array_equal(value.ravel(), expected)
    assert start == layout.num_effective


@DETERMINISTIC
@given(layouts)
def test_project_inverts_expand_exactly(layout):
    blocks = np.random.default_rng(1).normal(size=layout.mask().shape)
    blocks = blocks.astype(np.float32) * layout.mask()
    projected = layout.project(layout.expand(blocks))
    assert projected.dtype == np.float32
    np.testing.assert_array_equal(projected, blocks)


@DETERMINISTIC
@given(layouts)
def test_hashing_is_balanced(layout):
    for i, v in enumerate(layout.variables):
        index, sign = layout.hashing(i)
        assert index.shape == sign.shape == (v.size,)
        assert sign.dtype == np.float32
        assert set(np.unique(sign)) <= {-1.0, 1.0}
        count = np.bincount(index, minlength=v.effective_size)
        assert len(count) == v.effective_size
        assert count.max() <= v.hash_factor
        assert count.max() - count.min() <= 1
        assert count.min() >= 1
        assert (np.diff(count) <= 0).all()  # the last ones serve one less


@pytest.mark.parametrize("size", [2, 3, 31, 97, 101, 997, 7919])
@pytest.mark.parametrize("factor", [2, 7, 64])
def test_prime_sizes(size, factor):
    layout = WeightLayout([CodedVariable((size,), factor)], 13, seed=5)
    assert layout.num_effective == math.ceil(size / factor)
    blocks = numbered_blocks(layout)
    (value,) = layout.expand(blocks)
    assert set(np.abs(value)) == set(blocks[layout.mask()])
    np.testing.assert_array_equal(layout.project([value]), blocks)


def test_signs_are_fair_and_independent_of_the_place():
    layout = WeightLayout([CodedVariable((400, 1000), 64)], 20, seed=9)
    index, sign = layout.hashing(0)
    assert abs(sign.mean()) < 4 / math.sqrt(sign.size)
    assert abs(np.mean(sign[1:] * sign[:-1])) < 4 / math.sqrt(sign.size)
    # The sum of the signs of the 64 entries of a weight has variance 64.
    sums = np.bincount(index, sign)
    assert abs(np.mean(sums**2) / 64 - 1) < 4 * math.sqrt(2 / len(sums))


def test_hashes_spread_over_rows_and_columns():
    layout = WeightLayout([CodedVariable((100, 100), 10)], 20, seed=9)
    index, _ = layout.hashing(0)
    index = index.reshape(100, 100)
    for rows in (index, index.T):
        # 100 draws from 1000 hit about 95 different ones.
        distinct = [len(set(row)) for row in rows]
        assert 94 < np.mean(distinct) < 97


@DETERMINISTIC
@given(layouts, st.integers(0, 2**32))
def test_project_is_least_squares_with_the_old_norm(layout, seed):
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=v.shape).astype(np.float32) for v in layout.variables]
    projected = layout.project(values)
    np.testing.assert_array_equal(projected[~layout.mask()], 0)
    expanded = layout.expand(projected)
    effective = layout.to_effective(projected)
    start = 0
    for i, v in enumerate(layout.variables):
        own = effective[start : start + v.effective_size]
        start += v.effective_size
        if v.hash_factor == 1:
            np.testing.assert_array_equal(expanded[i], values[i])
            continue
        index, sign = layout.hashing(i)
        design = np.zeros((v.size, v.effective_size))
        design[np.arange(v.size), index] = sign
        best = np.linalg.lstsq(design, values[i].ravel().astype(float), rcond=None)[0]
        norm = np.linalg.norm(values[i])
        best *= norm / np.linalg.norm(design @ best)
        np.testing.assert_allclose(own, best, rtol=1e-5, atol=1e-6 * norm)
        np.testing.assert_allclose(np.linalg.norm(expanded[i]), norm, rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_project_of_zero_and_of_what_cancels_is_zero():
    layout = WeightLayout([CodedVariable((4,), 4), CodedVariable((3,))], 2, seed=0)
    _, sign = layout.hashing(0)
    cancelling = sign * np.array([1, -1, 2, -2], np.float32)
    for value in (np.zeros(4), cancelling):
        blocks = layout.project([value, np.ones(3)])
        np.testing.assert_array_equal(layout.expand(blocks)[0], 0)
        np.testing.assert_array_equal(layout.expand(blocks)[1], 1)


@DETERMINISTIC
@given(layouts)
def test_scale_index_of_slot_follows_the_weights(layout):
    index = layout.scale_index_of_slot()
    assert index.dtype == np.int32
    np.testing.assert_array_equal(index[~layout.mask()], 0)
    values = layout.expand(index.astype(np.float32))
    for v, value in zip(layout.variables, values, strict=True):
        np.testing.assert_array_equal(np.abs(value), v.scale_index)
    assert layout.num_scales == 1 + max(v.scale_index for v in layout.variables)


@DETERMINISTIC
@given(variables, st.integers(0, 2**64 - 1))
def test_block_size_from_one_to_all_weights(coded, seed):
    one = WeightLayout(coded, 1, seed)
    n = one.num_effective
    assert (one.num_blocks, one.block_size) == (n, 1)
    assert one.mask().all()
    for size in (n, n + 1, 10**9):
        whole = WeightLayout(coded, size, seed)
        assert (whole.num_blocks, whole.block_size) == (1, n)
    # The order of the weights does not depend on the block size.
    np.testing.assert_array_equal(one.slots, whole.slots)


def test_same_seed_same_layout_other_seed_other_layout():
    coded = [CodedVariable((10, 10), 2), CodedVariable((10, 10), 2)]
    seeds = [0, 0, 1, 2**32, 2**64 - 1]
    first, again, *others = (WeightLayout(coded, 7, seed) for seed in seeds)
    np.testing.assert_array_equal(first.slots, again.slots)
    for i in range(2):
        for a, b in zip(first.hashing(i), again.hashing(i), strict=True):
            np.testing.assert_array_equal(a, b)
        for other in others:
            for a, b in zip(first.hashing(i), other.hashing(i), strict=True):
                assert not np.array_equal(a, b)
    for other in others:
        assert not np.array_equal(first.slots, other.slots)
    # Two variables of the same shape are hashed differently.
    for a, b in zip(first.hashing(0), first.hashing(1), strict=True):
        assert not np.array_equal(a, b)


def test_the_layout_is_part_of_the_file_format():
    coded = [CodedVariable((5, 5, 1, 4)), CodedVariable((30, 20), 7), CodedVariable(())]
    layout = WeightLayout(coded, 16, seed=12345678901234567890)
    values = np.concatenate([v.ravel() for v in layout.expand(numbered_blocks(layout))])
    assert layout.num_blocks == 12
    assert values[:5].tolist() == FIRST_VALUES
    assert zlib.crc32(values.astype("<i4").tobytes()) == CHECK_VALUE


# Files are decoded with these; a change here makes every file unreadable.
FIRST_VALUES = [66.0, 170.0, 120.0, 127.0, 57.0]
CHECK_VALUE = 2990501494


@pytest.mark.parametrize("factor", [0, -1, 1.5, "2", None])
def test_bad_hash_factor(factor):
    with pytest.raises(ValueError, match=r"`hash_factor` .* got") as error:
        CodedVariable((3,), factor)
    assert str(factor) in str(error.value)


@pytest.mark.parametrize("block_size", [0, -3, 2.5, None])
def test_bad_block_size(block_size):
    with pytest.raises(ValueError, match=r"`block_size` .* got") as error:
        WeightLayout([CodedVariable((3,))], block_size, 0)
    assert str(block_size) in str(error.value)


def test_numpy_integers_are_integers():
    layout = WeightLayout([CodedVariable((6,), np.int64(2))], np.int32(2), np.uint64(1))
    assert (layout.num_blocks, layout.block_size, layout.seed) == (2, 2, 1)


def test_other_errors():
    with pytest.raises(ValueError, match=r"`scale_index` .* -1"):
        CodedVariable((3,), 1, -1)
    for empty in ([], [CodedVariable((0, 5))]):
        with pytest.raises(ValueError, match="no weight to code"):
            WeightLayout(empty, 5, 0)
    for seed in (-1, 2**64, 1.5):
        with pytest.raises(ValueError, match=f"seed={seed}"):
            WeightLayout([CodedVariable((3,))], 5, seed)


def test_an_empty_variable_among_others_stays_empty():
    coded = [CodedVariable((0, 5)), CodedVariable((4,)), CodedVariable((0,), 3)]
    layout = WeightLayout(coded, 3, 0)
    values = layout.expand(numbered_blocks(layout))
    assert [v.shape for v in values] == [(0, 5), (4,), (0,)]
    np.testing.assert_array_equal(layout.project(values), numbered_blocks(layout))


def test_it_says_what_it_is():
    coded = [CodedVariable((3, 5), 2, 0), CodedVariable((2,), 1, 0)]
    layout = WeightLayout(coded, 4, 0)
    expected = "WeightLayout(10 effective weights of 2 variables, 3 blocks of 4)"
    assert repr(layout) == expected
