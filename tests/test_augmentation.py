import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from tfmiracle.recipe import Recipe
from tfmiracle.training.augmentation import augment, check_augmentation

IMAGES = np.random.default_rng(0).normal(size=(1000, 4, 6, 2)).astype(np.float32)


def expected(image, max_shift):
    """Every shift of an image, by its numbers of rows and columns."""
    height, width, _ = image.shape
    edge = [(max_shift, max_shift)] * 2 + [(0, 0)]
    padded = np.pad(image, edge, mode="edge")
    shifts = range(-max_shift, max_shift + 1)
    return {
        (down, right): padded[
            max_shift - down : max_shift - down + height,
            max_shift - right : max_shift - right + width,
        ]
        for down in shifts
        for right in shifts
    }


def test_each_image_has_a_shift_of_its_own_and_all_are_equally_likely():
    found = collections.Counter()
    shifted = augment(IMAGES, 1, False, [3, 4]).numpy()
    for image, one in zip(IMAGES, shifted, strict=True):
        fitting = [s for s, e in expected(image, 1).items() if (one == e).all()]
        assert len(fitting) == 1
        found.update(fitting)
    assert len(found) == 9
    # Within five standard deviations of 1000 / 9.
    assert all(abs(count - 1000 / 9) < 50 for count in found.values())


def test_each_image_is_mirrored_or_not():
    flipped = augment(IMAGES, 0, True, [3, 4]).numpy()
    mirrored = [(f == i[:, ::-1]).all() for f, i in zip(flipped, IMAGES, strict=True)]
    same = [(f == i).all() for f, i in zip(flipped, IMAGES, strict=True)]
    np.testing.assert_array_equal(mirrored, np.logical_not(same))
    assert abs(sum(mirrored) - 500) < 80  # five standard deviations


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_both_are_a_flip_and_then_a_shift(dtype):
    images = (100 * np.abs(IMAGES)).astype(dtype)
    flipped = augment(images, 0, True, [5, 6])
    both = augment(images, 2, True, [5, 6])
    assert both.dtype == flipped.dtype == dtype
    np.testing.assert_array_equal(both, augment(flipped, 2, False, [5, 6]))
    assert (both != flipped).numpy().any()


@pytest.mark.parametrize("max_shift, flip", [(2, False), (0, True), (2, True)])
def test_the_seed_decides(max_shift, flip):
    first, again = (augment(IMAGES, max_shift, flip, [1, 2]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    for seed in ([1, 3], [2, 2]):
        assert (augment(IMAGES, max_shift, flip, seed) != first).numpy().any()


def test_flips_and_shifts_are_independent():
    """Of images whose pixels are the numbers of their columns."""
    columns = np.tile(np.arange(5, dtype=np.float32), (4000, 5, 1))[..., np.newaxis]
    found = collections.Counter(
        image[2, :, 0].tobytes() for image in augment(columns, 1, True, [1, 2]).numpy()
    )
    assert len(found) == 6
    assert all(abs(count - 4000 / 6) < 120 for count in found.values())


def test_nothing_to_do():
    np.testing.assert_array_equal(augment(IMAGES, 0, False, [0, 0]), IMAGES)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_in_a_graph_of_unknown_sizes(dtype):
    images = (100 * np.abs(IMAGES)).astype(dtype)
    shape = tf.TensorSpec((None, None, None, 2), dtype)
    both = functools.partial(augment, max_shift=3, flip=True, seed=[1, 2])
    in_graph = tf.function(lambda x: both(x), input_signature=[shape])
    assert in_graph(images).dtype == dtype
    np.testing.assert_array_equal(in_graph(images), both(images))


@pytest.mark.parametrize(
    "inputs",
    [
        IMAGES[:, :1],
        IMAGES[:, :, :1],
        IMAGES[..., 0],
        IMAGES[..., np.newaxis],
        {"image": IMAGES},
        tf.TensorSpec(None),
        tf.TensorSpec((None, 1, None, 3)),
        tf.RaggedTensorSpec((None, 4, None, 2)),
    ],
    ids=["rows", "columns", "3d", "5d", "dict", "rank", "spec", "ragged"],
)
def test_what_cannot_be_shifted(inputs):
    with pytest.raises(ValueError, match=r"`max_shift` needs .*max_shift=1"):
        check_augmentation(Recipe(max_shift=1), inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        IMAGES[..., 0],
        IMAGES[..., np.newaxis],
        {"image": IMAGES},
        tf.TensorSpec(None),
        tf.RaggedTensorSpec((None, 4, None, 2)),
    ],
    ids=["3d", "5d", "dict", "rank", "ragged"],
)
def test_what_cannot_be_mirrored(inputs):
    with pytest.raises(ValueError, match=r"`flip` needs one input .*flip=True"):
        check_augmentation(Recipe(flip=True), inputs)
    check_augmentation(Recipe(), inputs)


@pytest.mark.parametrize(
    "inputs",
    [IMAGES, tf.TensorSpec((None, None, None, 3)), tf.TensorSpec([4, 4, 4, 1])],
)
def test_what_can_be_augmented(inputs):
    check_augmentation(Recipe(max_shift=3, flip=True), inputs)
