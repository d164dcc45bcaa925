"""What a posterior says about the network, before it is compressed."""

import math
import operator
from collections.abc import Callable

import keras
import numpy as np

from tfmiracle.hosts.models import fixed_batch, in_whole_batches, posteriors
from tfmiracle.hosts.scope import SubstitutionScope
from tfmiracle.posteriors.mean_kl import kl_from_standardized
from tfmiracle.structures import as_arrays


def variable_summary(model: keras.Model) -> list[dict]:
    """How the information is spread over the variables of a model.

    Args:
      model: a `VariationalModel`, or a model with variational layers.

    Returns:
      One dict for each coded variable: its "path", "shape" and number of "weights"
      (effective ones: a hashed variable has fewer than entries), their "kl_bits" in
      all, "bits_per_weight", "share" of the KL of the model, coding scale "rho", and
      the median and 90 % quantile of the signal-to-noise ratio |mean| / standard
      deviation, "snr_median" and "snr_90".

    Raises:
      ValueError: if the KL is infinite, as that of a deterministic model is.
    """
    rows = []
    for posterior, variables in posteriors(model):
        layout = posterior.layout
        kl = kl_from_standardized(*posterior.standardized()).numpy()
        kl = layout.to_effective(kl).astype(np.float64) / math.log(2)
        if not np.all(np.isfinite(kl)):
            raise ValueError(
                f"The KL of `model` ({model.name!r}) is not finite. Use a posterior "
                "that has a variance: 'mean_kl' or 'mean_var'."
            )
        loc, scale = (x.numpy().astype(np.float64) for x in posterior.loc_and_scale())
        with np.errstate(divide="ignore"):
            snr = np.abs(loc) / scale
        start = 0
        for coded, variable in zip(layout.variables, variables, strict=True):
            part = slice(start, start + coded.effective_size)
            start = part.stop
            kl_bits = float(kl[part].sum())
            rows.append(
                {
                    "path": variable.path,
                    "shape": tuple(variable.shape),
                    "weights": coded.effective_size,
                    "kl_bits": kl_bits,
                    "bits_per_weight": kl_bits / coded.effective_size,
                    "rho": float(posterior.coding_scale[coded.scale_index]),
                    "snr_median": float(np.median(snr[part])),
                    "snr_90": float(np.quantile(snr[part], 0.9)),
                }
            )
    total = sum(row["kl_bits"] for row in rows)
    return [{**row, "share": row["kl_bits"] / total if total else 0.0} for row in rows]


def predict_ensemble(
    model: keras.Model,
    x,
    samples: int = 10,
    batch_size: int = 256,
    transform: Callable = lambda outputs: outputs,
) -> np.ndarray:
    """Mean prediction over samples of the posterior.

    Each sample of the weights is used for all of `x`. No variable of the model changes
    but the noise seeds of its posteriors, so that another call draws other samples.

    Args:
      model: a `VariationalModel`, or a model with variational layers.
      x: inputs, an array or a structure of arrays.
      samples: number of samples of the weights.
      batch_size: examples in a forward pass; a network of a fixed batch has its own.
      transform: what is averaged, a function of the outputs. Of a network that returns
        logits it should be probabilities, `keras.ops.softmax`.

    Returns:
      Array of the shape of the outputs.

    Raises:
      ValueError: if `samples` or `batch_size` is not positive, there are no inputs,
        the model has no posterior, or `transform` does not give one array.
    """
    x = as_arrays(x)
    count = len(keras.tree.flatten(x)[0])
    batch_size = fixed_batch(model) or batch_size
    if batch_size < 1 or not count:
        raise ValueError(
            "An ensemble needs `batch_size` of at least 1 and at least one input. "
            f"Received: batch_size={batch_size}, {count} inputs"
        )
    parts = posteriors(model)
    if samples < 1 or not parts:
        raise ValueError(
            "An ensemble needs `samples` of at least 1 and a model with posteriors. "
            f"Received: samples={samples}, {len(parts)} posteriors"
        )

    def predict(batch, variables, values):
        outputs = transform(_call(model, batch, variables, values))
        if not hasattr(outputs, "shape"):
            raise ValueError(
                "An ensemble averages one array. Let `transform` choose one of the "
                "outputs."
            )
        return keras.ops.convert_to_numpy(outputs)

    total = 0.0
    for _ in range(samples):
        values, variables = [], []
        for posterior, coded in parts:
            variables += coded
            values += posterior.values(sample=True)
        outputs = [
            predict(batch, variables, values)
            for batch in _batches(x, count, batch_size)
        ]
        total = total + np.concatenate(outputs).astype(np.float64)
    return (total / samples).astype(np.float32)


def _call(model, batch, variables, values):
    with SubstitutionScope(variables, values):
        return in_whole_batches(model, batch, training=False)


def _batches(x, count, size):
    for start in range(0, count, size):
        part = operator.itemgetter(slice(start, start + size))
        yield keras.tree.map_structure(part, x)
