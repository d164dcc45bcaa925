"""What a posterior says about a network."""

import math

import keras
import numpy as np
import pytest
import tensorflow_probability as tfp

import tfmiracle
from tfmiracle import predict_ensemble, variable_summary
from tfmiracle.hosts.models import posteriors
from tfmiracle.posteriors.block_posterior import BlockPosterior


def whole(parameterization="mean_kl"):
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(6, "relu", name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3, name="two"),
        ]
    )
    return tfmiracle.VariationalModel(
        net,
        parameterization,
        block_size=9,
        rules={"one/kernel": "hash=2"},
        log_scale=-0.5,
    )


def of_layers(parameterization="mean_kl"):
    keras.utils.set_random_seed(0)
    dense = {"mean_kl": tfmiracle.MeanKLDense, "mean_var": tfmiracle.MeanVarDense}
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            dense[parameterization](6, activation="relu", block_size=9, log_scale=-0.5),
            dense[parameterization](3, block_size=9, log_scale=-0.5),
        ]
    )


def spread(model):
    """Parameters away from their start."""
    rng = np.random.default_rng(0)
    for posterior, _ in posteriors(model):
        for v in posterior.trainable_variables:
            v.assign(v + rng.normal(0, 0.5, v.shape))
    return model


def of_both_kinds(function):
    function = pytest.mark.parametrize("make", [whole, of_layers])(function)
    return pytest.mark.parametrize("kind", ["mean_kl", "mean_var"])(function)


@of_both_kinds
def test_summary(make, kind, eager):
    model = spread(make(kind))
    rows = variable_summary(model)
    parts = posteriors(model)
    variables = [v for _, variables in parts for v in variables]
    assert [row["path"] for row in rows] == [v.path for v in variables]
    assert [row["shape"] for row in rows] == [tuple(v.shape) for v in variables]
    total = sum(float(np.sum(p.block_kl())) for p, _ in parts) / math.log(2)
    assert sum(row["kl_bits"] for row in rows) == pytest.approx(total, rel=1e-5)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    row = iter(rows)
    for posterior, _ in parts:
        q, p = posterior.distribution, posterior.coding_distribution
        kl = tfp.distributions.kl_divergence(q.distribution, p.distribution)
        snr = np.abs(q.mean()) / q.stddev()
        ends = np.cumsum([v.effective_size for v in posterior.layout.variables])
        for coded, kl_part, snr_part, rho in zip(
            posterior.layout.variables,
            np.split(kl / math.log(2), ends[:-1]),
            np.split(snr, ends[:-1]),
            np.split(p.stddev(), ends[:-1]),
        ):
            expected = {
                "weights": coded.effective_size,
                "kl_bits": kl_part.sum(),
                "bits_per_weight": kl_part.mean(),
                "share": kl_part.sum() / total,
                "rho": rho[0],
                "snr_median": np.median(snr_part),
                "snr_90": np.quantile(snr_part, 0.9),
            }
            actual = next(row)
            assert {k: actual[k] for k in expected} == pytest.approx(expected, rel=1e-4)


@of_both_kinds
def test_ensemble(make, kind, eager, monkeypatch):
    model = spread(make(kind))
    x = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    state = [v.numpy() for v in model.variables]
    seeds = {id(p.noise_seed.state) for p, _ in posteriors(model)}
    # By hand: draw all weights, run the network on them.
    draws = []
    values = BlockPosterior.values

    def draw(self, sample=False):
        draws.append(values(self, sample))
        return draws[-1]

    monkeypatch.setattr(BlockPosterior, "values", draw)
    actual = predict_ensemble(model, x, 3, batch_size=3, transform=keras.ops.softmax)
    monkeypatch.undo()
    assert len(draws) == 3 * len(posteriors(model))
    for v, before in zip(model.variables, state, strict=True):
        assert id(v) in seeds or np.array_equal(v, before)

    def dense(x, kernel, bias):
        return x @ kernel.numpy() + bias.numpy()

    expected = 0
    per_sample = len(draws) // 3
    for i in range(3):
        drawn = [v for d in draws[i * per_sample :][:per_sample] for v in d]
        hidden = np.maximum(dense(x, *drawn[:2]), 0)
        if len(drawn) == 6:  # the normalization has mean 0 and variance 1 so far
            hidden = drawn[2] * hidden / np.sqrt(1 + 1e-3) + drawn[3]
        logits = dense(np.asarray(hidden), *drawn[-2:])
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        expected = expected + odds / odds.sum(-1, keepdims=True) / 3
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(actual.sum(-1), 1, rtol=1e-5)
    again = predict_ensemble(model, x, 3, transform=keras.ops.softmax)
    assert not np.allclose(again, actual)


def test_an_ensemble_needs_samples_and_posteriors():
    with pytest.raises(ValueError, match=r"`samples` of at least 1.*samples=0"):
        predict_ensemble(of_layers(), np.zeros((1, 4)), samples=0)
    with pytest.raises(ValueError, match=r"`batch_size` of at least 1.*batch_size=0"):
        predict_ensemble(of_layers(), np.zeros((1, 4)), batch_size=0)
    with pytest.raises(ValueError, match=r"at least one input.* 0 inputs"):
        predict_ensemble(of_layers(), np.zeros((0, 4)))
    plain = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="0 posteriors"):
        predict_ensemble(plain, np.zeros((1, 4)))
    assert variable_summary(plain) == []


def test_a_deterministic_model_has_no_summary(eager):
    with pytest.raises(ValueError, match=r"KL of `model` .* is not finite"):
        variable_summary(whole("deterministic"))
