import collections

import numpy as np
import pytest
import tensorflow as tf

from tfmiracle.training.augmentation import check_shift, random_shift

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
    shifted = random_shift(IMAGES, 1, [3, 4]).numpy()
    for image, one in zip(IMAGES, shifted, strict=True):
        fitting = [s for s, e in expected(image, 1).items() if (one == e).all()]
        assert len(fitting) == 1
        found.update(fitting)
    assert len(found) == 9
    # Within five standard deviations of 1000 / 9.
    assert all(abs(count - 1000 / 9) < 50 for count in found.values())


def test_the_seed_decides():
    first, again = (random_shift(IMAGES, 2, [1, 2]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    for seed in ([1, 3], [2, 2]):
        assert (random_shift(IMAGES, 2, seed) != first).numpy().any()


def test_no_shift():
    np.testing.assert_array_equal(random_shift(IMAGES, 0, [0, 0]), IMAGES)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_in_a_graph_of_unknown_sizes(dtype):
    images = (100 * np.abs(IMAGES)).astype(dtype)
    shape = tf.TensorSpec((None, None, None, 2), dtype)
    shift = tf.function(lambda x: random_shift(x, 3, [1, 2]), input_signature=[shape])
    assert shift(images).dtype == dtype
    np.testing.assert_array_equal(shift(images), random_shift(images, 3, [1, 2]))


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
        check_shift(1, inputs)


@pytest.mark.parametrize(
    "inputs",
    [IMAGES, tf.TensorSpec((None, None, None, 3)), tf.TensorSpec([4, 4, 4, 1])],
)
def test_what_can_be_shifted(inputs):
    check_shift(3, inputs)
