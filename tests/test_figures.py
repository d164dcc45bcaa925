"""The figures of a study."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from study_records import curve, loaded, record, sparse, with_all

from tfmiracle.studies import figures
from tfmiracle.studies.figures import FIGURES, captions, draw_figures

figure = pytest.importorskip("matplotlib.figure")


@pytest.mark.filterwarnings("error")
def test_pictures(tmp_path):
    """Nothing that a study may leave makes the figures fail or complain."""
    records = loaded(tmp_path, *sparse())
    pictures = draw_figures(records)
    assert tuple(pictures) == FIGURES == tuple(captions(records))
    for formats in pictures.values():
        assert list(formats) == ["png", "svg"]
        assert formats["png"].startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(formats["png"][16:20], "big") > 600  # pixels
        root = ElementTree.fromstring(formats["svg"])
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert b"<dc:date>" not in formats["svg"]


def test_histograms_are_of_a_block_size_that_both_have(tmp_path):
    lacking = with_all("mean_kl", 20)
    del lacking["histograms"]
    records = loaded(
        tmp_path,
        with_all("mean_var", 20),
        lacking,
        *(with_all(p, 30, s) for p in ("mean_var", "mean_kl") for s in (1, 2)),
    )
    shown = figures.shown_histograms(records)
    assert {p: (r["block_size"], r["seed"]) for p, r in shown.items()} == {
        "mean_var": (30, 1),
        "mean_kl": (30, 1),
    }
    shown = figures.shown_histograms(records[:2])
    assert {p: r["block_size"] for p, r in shown.items()} == {"mean_var": 20}


def test_bins_without_width():
    axis = figure.Figure().subplots()
    histogram = {"edges": [0, 0, 1, 1, 3, 3], "counts": [1, 2, 3, 4, 10]}
    density = figures.draw_histogram(axis, "mean_kl", histogram)
    np.testing.assert_allclose(density, [3 / 20, 17 / 20 / 2])
    histogram = {"edges": [2, 2], "counts": [5]}
    assert not len(figures.draw_histogram(axis, "mean_kl", histogram))


def test_curvesover_seeds():
    runs = [
        record(curve=curve([1, 2, 3], [None, 20, 20])),
        record(curve=curve([3, 4, 5, 6], [None, 30, 40, 50])),
    ]
    step, mean, low, high = figures.over_seeds(runs, "cross_entropy")
    np.testing.assert_array_equal(step, [100, 200, 300, 400])
    np.testing.assert_array_equal(mean, [2, 3, 4, 6])
    np.testing.assert_array_equal(low, [1, 2, 3, 6])
    np.testing.assert_array_equal(high, [3, 4, 5, 6])
    mean = figures.over_seeds(runs, "kl_bits")[1]
    np.testing.assert_array_equal(mean, [np.nan, 25, 30, 50])
