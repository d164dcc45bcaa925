"""The records of a study and what is counted from them."""

import json
import re

import numpy as np
import pytest
from study_records import FALLING, curve, loaded, record, saved

from tfmiracle.studies.records import (
    iterations_to_converge,
    mean_and_error,
    read_records,
)

# Reading


def test_order_of_records(tmp_path):
    records = loaded(
        tmp_path,
        record("mean_kl", 30, 0),
        record("mean_kl", 20, 10),
        record("mean_kl", 20, 9),
        record("mean_var", 20, 0),
    )
    assert [r["file"].rpartition("/")[2] for r in records] == [
        "mean_var_b20_s0.json",
        "mean_kl_b20_s9.json",
        "mean_kl_b20_s10.json",
        "mean_kl_b30_s0.json",
    ]


def test_no_records(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"records holds no records.*study"):
            read_records(folder)


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "no readable JSON"),
        ('{"format": 1', "no readable JSON"),
        ('{"format": NaN}', "format must be 1"),
        ("[" * 100_000, "no readable JSON"),
        ("[]", "record must be an object"),
        ("{}", "lacks 'format'"),
    ],
)
def test_files_that_are_no_records(tmp_path, text, match):
    folder = saved(tmp_path, record())
    (folder / "records" / "odd.json").write_text(text)
    with pytest.raises(ValueError, match=rf"odd\.json.*{match}"):
        read_records(folder)


BAD = [
    ("format", 2, "format must be 1"),
    ("parameterization", "mean", "parameterization must be one of mean_var, mean_kl"),
    ("block_size", 0, "block_size must be an integer of at least 1"),
    ("seed", True, "seed must be an integer"),
    ("sizes.blocks", None, "sizes.blocks must be an integer of at least 1"),
    ("scale", "1", "scale must be a positive number"),
    ("scale", 0, "scale must be a positive number"),
    ("scale", np.nan, "scale must be a positive number"),
    ("seconds", np.inf, "seconds must be a number"),
    ("settings", [], "settings must be an object"),
    ("settings.block_bits", None, "settings.block_bits must be a positive number"),
    ("settings.kl_bits", -1, "settings.kl_bits must be a number of at least 0 or null"),
    ("sizes", {}, "sizes lacks 'payload_ratio'"),
    ("sizes.payload_ratio", 0, "payload_ratio must be a positive number"),
    ("sizes", 3, "sizes must be an object"),
    ("errors.decoded", 0.9, None),
    ("errors.decoded", 1.5, "errors.decoded must be a number from 0 to 1"),
    ("errors.posterior_mean", None, "errors.posterior_mean must be a number"),
    ("curve.step", [6, 5, 4, 3, 2, 1], "curve.step must be a list of numbers in order"),
    ("curve.cross_entropy", [1, None], "curve.cross_entropy must be a list of numbers"),
    ("curve.kl_bits", [1, None], "curve must be an object with lists of one length"),
    ("curve.phase", [1, 1], "curve.phase must be a list of texts"),
    ("coding.over_budget", [None], "coding.over_budget must be a list of numbers"),
    ("histograms", 5, "histograms must be an object"),
    ("histograms.a/kernel", {}, "histograms.a/kernel lacks 'loc'"),
    (
        "histograms.a/kernel",
        {
            "loc": {"edges": [0, 1], "counts": [1, 2]},
            "log_scale": {"edges": [0, 1], "counts": [1]},
        },
        "histograms.a/kernel.loc must be an object with one edge more than counts",
    ),
    (
        "histograms.a/kernel",
        {"loc": {"edges": [1, 0], "counts": [1]}},
        "histograms.a/kernel.loc.edges must be a list of numbers in order",
    ),
    ("pruning", [1], "pruning must be an object"),
    ("pruning.other", {}, "pruning must be an object by uniform, magnitude, kl"),
    ("pruning.kl", {"fractions": [0, 1]}, "pruning.kl lacks 'accuracy'"),
    (
        "pruning.kl",
        {"fractions": [0, 100], "accuracy": [1, 0]},
        "pruning.kl.fractions must be a list of increasing numbers from 0 to 1",
    ),
    (
        "pruning.kl",
        {"fractions": [0, 1], "accuracy": [1]},
        "pruning.kl must be an object with lists of one length",
    ),
    (
        "pruning.kl",
        {"fractions": [0.5, 0.5], "accuracy": [1, 0]},
        "pruning.kl.fractions must be a list of increasing numbers from 0 to 1",
    ),
    (
        "pruning.kl",
        {"fractions": [0, 1], "accuracy": [1, 2]},
        "pruning.kl.accuracy must be a list of numbers from 0 to 1",
    ),
]


@pytest.mark.parametrize("key, value, match", BAD)
def test_bad_records(tmp_path, key, value, match):
    made = record(histograms={}, pruning={})
    *path, last = key.split(".")
    place = made
    for part in path:
        place = place[part]
    place[last] = value
    folder = saved(tmp_path, record(seed=1))
    (folder / "records" / "bad.json").write_text(json.dumps(made))
    if match is None:
        assert len(read_records(folder)) == 2
        return
    with pytest.raises(ValueError, match=re.escape(match)) as caught:
        read_records(folder)
    assert str(folder / "records" / "bad.json") in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        *("scale", "model", "settings", "versions", "seconds", "errors", "steps"),
        *("curve", "coding"),
    ],
)
def test_every_key_is_needed(tmp_path, key):
    made = record()
    del made[key]
    with pytest.raises(ValueError, match=rf"b20_s0\.json: record lacks '{key}'"):
        loaded(tmp_path, made)


def test_records_of_before_dtype_policies(tmp_path):
    made = record(seed=1)
    del made["dtype_policy"]
    assert [r["dtype_policy"] for r in loaded(tmp_path, record(), made)] == [
        "float32"
    ] * 2


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"scale": 1.0}, r"differ in scale \(0.5 and 1.0\).*one study"),
        ({"model": "digits_cnn"}, "differ in model"),
        ({"dtype_policy": "mixed_bfloat16"}, "differ in dtype_policy"),
        ({"data": "fashion_mnist"}, r"differ in data \("),
        ({"data_crc32": [1, 2]}, "differ in data_crc32"),
        (
            {"settings": {**record()["settings"], "block_bits": 16}},
            r"differ in settings\.block_bits",
        ),
        (
            {"steps": {"train": 7, "total": 7}},
            r"differ in steps\.train \(50000 and 7\)",
        ),
    ],
)
def test_records_that_do_not_belong_together(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match) as caught:
        loaded(tmp_path, record(seed=0), record(seed=1, **changes))
    for name in ("mean_kl_b20_s0.json", "mean_kl_b20_s1.json"):
        assert name in str(caught.value)


def test_records_of_the_same_run(tmp_path):
    folder = saved(tmp_path, record())
    (folder / "records" / "copy.json").write_text(json.dumps(record()))
    with pytest.raises(
        ValueError, match=r"copy\.json and .*are records of the same run"
    ):
        read_records(folder)


# Numbers


def test_mean_and_error():
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([3]) == (3, None)
    assert mean_and_error([1, 2, 3, 4, 5]) == (3, pytest.approx((2.5 / 5) ** 0.5))


@pytest.mark.parametrize(
    "cross_entropy, kl_bits, expected",
    [
        (FALLING, None, 600),
        (FALLING, [20.2] * 10, 600),  # 1 % over the budget is at it
        (FALLING, [20.21] * 10, None),
        (FALLING, [5.0] * 10, 600),
        (FALLING, [300] * 8 + [20] * 2, 900),
        (FALLING, [300] * 2 + [20] * 8, 600),
        (FALLING, [20] * 9 + [21], None),
        (FALLING, [None] * 7 + [20] * 3, 800),
        (FALLING, [None] * 10, None),
        ([1.0] * 10, None, 100),
        ([1.0] * 6 + [1.5] + [1.0] * 3, None, 800),  # from which on, not at which
        ([3.0] * 9 + [1.0], None, 1000),  # the last window is the measure
        ([1.0], None, 100),
        ([], None, None),
    ],
)
def test_iterations_to_converge(cross_entropy, kl_bits, expected):
    assert iterations_to_converge(curve(cross_entropy, kl_bits), 20) == expected


def test_final_value_is_the_mean_over_the_last_windows():
    # Of 40 windows the last two: (0.8 + 1.2) / 2 = 1; smoothed over one on each side.
    values = [1.2] * 20 + [1.1] * 18 + [0.8, 1.2]
    assert iterations_to_converge(curve(values), 20) == 2100
    values = [1.2] * 20 + [1.11] * 18 + [0.8, 1.2]
    assert iterations_to_converge(curve(values), 20) == 3900


def test_single_windows_do_not_count():
    values = [2.0] * 30 + [1.0] * 70
    assert iterations_to_converge(curve(values), 20) == 3100
    values[80] = 9.0
    kl_bits = [20.0] * 100
    kl_bits[60] = 400.0
    assert iterations_to_converge(curve(values, kl_bits), 20) == 3100
    values[80:86] = [9.0] * 6
    assert iterations_to_converge(curve(values, kl_bits), 20) == 8700


def test_only_variational_training_counts():
    phases = [
        curve([9, 9], [None, None], "warmup"),
        curve(FALLING),
        curve([3, 3, 3], [400, None, 400], "coding"),
    ]
    joined = {key: [v for p in phases for v in p[key]] for key in phases[0]}
    joined["step"] = [100 * (i + 1) for i in range(15)]
    assert iterations_to_converge(joined, 20) == 800
    assert iterations_to_converge(phases[2], 500) is None
