"""What options must be, wherever they are given."""

import math

import keras
import numpy as np
import pytest

import tfmiracle
from tfmiracle import CompressionCallback, MinimalRandomCoder, Recipe
from tfmiracle.codec.layout import CodedVariable, WeightLayout
from tfmiracle.posteriors.parameterization import MeanKL, MeanVar

BAD = {
    "block_size": [0, -3],
    "batch_size": [0],
    "max_shift": [-1, 1.0],
    "flip": [1, None, "yes"],
    "blocks_per_round": [0, 1.5],
    "warmup_steps": [-1],
    "train_steps": [-1],
    "finetune_steps": [-1],
    "learning_rate": [0.0, -1.0, np.nan, np.inf],
    "warmup_learning_rate": [0.0, np.nan],
    "finetune_learning_rate": [0.0, np.nan],
    "log_scale_rate": [0.0, -1, np.inf],
    "log_scale": [np.nan, np.inf],
    "warm_log_scale": [np.nan, np.inf],
    "l2": [-1.0, np.nan, np.inf],
    "parameterization": ["mean_std", None, "deterministic"],
    "kl_bits": [-1.0, np.nan, np.inf],
    "block_bits": [-1, 29, 8.5, True],
    "codebook": ["sobol", None],
    "selection": ["best", None],
    "decay": ["linear"],
    "coder": ["huffman", None, 3],
    "prior": ["laplace"],
    "seed": [-1, 2**64, 0.5],
}


def layer(**options):
    return tfmiracle.MeanKLDense(2, **options)  # as Keras does, before it is built


def whole(**options):
    net = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    return tfmiracle.VariationalModel(net, **options)


def posterior(**options):
    return MeanVar().posterior(WeightLayout([CodedVariable((4,))], 2, 0), **options)


def callback(**options):
    return CompressionCallback("net.miracle", **options)


OF_BLOCKS = ("block_size", "block_bits", "codebook", "coder", "prior")
OF_HOSTS = (*OF_BLOCKS, "parameterization", "log_scale", "seed")
OF_Q = ("kl_bits", "log_scale_rate")
TAKES = {
    Recipe: BAD,
    layer: (*OF_HOSTS, *OF_Q),
    whole: (*OF_HOSTS, *OF_Q, "l2"),
    posterior: OF_Q,
    MinimalRandomCoder: ("block_bits", "codebook", "selection", "seed"),
    callback: ("blocks_per_round", "finetune_steps", "train_steps"),
}


@pytest.mark.parametrize(
    "make, name", [(make, name) for make, names in TAKES.items() for name in names]
)
def test_options_out_of_range(make, name):
    values = BAD[name] if make is Recipe else BAD[name][:1]
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}`.*{value}"):
            make(**{name: value})


@pytest.mark.parametrize(
    "make, options",
    [
        (MeanKL, {"quota_rate": 0.0}),
        (MeanKL, {"quota_rate": math.nan}),
        (MeanKL, {"initial_budget": 0.5}),
        (MeanKL, {"initial_budget": math.nan}),
        (MeanKL, {"annealing_steps": 0}),
        (MeanVar, {"log_stddev": math.nan}),
        (MeanVar, {"log_stddev_rate": 0.0}),
        (MeanVar, {"beta": 0.0}),
        (MeanVar, {"beta": math.inf}),
        (MeanVar, {"beta_rate": -1.0}),
    ],
)
def test_options_of_a_parameterization(make, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}` must be.*{name}={value}"):
        make(**options)
