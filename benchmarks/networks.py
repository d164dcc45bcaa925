"""Compresses a ResNet-20 and a vision transformer, beside what else makes them small.

    python benchmarks/networks.py --data=MNIST.npz --output=FOLDER
        [--networks=resnet20,transformer] [--seeds=0]

Writes one JSON file per network and seed, and a table of them all. Started again, it
goes on after the last step done. A step has a process of its own, for its peak memory.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import pathlib
import time
import zlib

from tfmiracle.environment import configure

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
configure()
# ruff: noqa: E402, what follows imports TensorFlow

import keras
import numpy as np
from sklearn.cluster import KMeans
from tables import markdown, mean
from timing import machine, peak_mb

import tfmiracle
from tfmiracle.files import write_atomically
from tfmiracle.hosts.network import plain_architecture
from tfmiracle.hosts.recalibration import recalibrate
from tfmiracle.miracle_file import MiracleFile
from tfmiracle.studies import deep_networks

VALIDATION = 5000  # images of the training set, by which settings are chosen
BATCH_SIZE = 64
KEPT = (1.0, 0.6, 0.4, 0.3, 0.2)  # shares of the weights, without retraining
# One after the other, each trained on: in the end for about as long as we train.
KEPT_FINETUNED = (0.5, 0.3, 0.2, 0.1, 0.05, 0.035, 0.025)
FINETUNE_STEPS = 1000
CLUSTERS = (4, 8, 16, 32)


def resnet20():
    """With a stem of stride 2, for speed."""
    return deep_networks.resnet20((28, 28, 1), strides=2)


def transformer():
    """Four blocks over 16 patches of 7x7."""
    return deep_networks.vision_transformer((28, 28, 1), patch=7, width=64)


EPOCHS = {"resnet20": 2, "transformer": 5}
# Chosen on the validation images. Without hashing, ResNet-20 was still at chance after
# 700 variational steps. Stage 3 is that of 64 channels.
HASHING = {"stage*/kernel": "hash=4", "stage3_*/kernel": "hash=8"}
COMPRESS = {
    "resnet20": {"target": "100x", "rules": HASHING},
    "transformer": {"target": "50x", "rules": {"kernel": "hash=4"}},
}
# On validation images Mean-Var took ResNet-20 to 1.06 %, Mean-KL to 1.88 % and, with
# 480 steps of fine-tuning instead of 3,100, to 2.88 % (one seed).
RECIPES = {
    "resnet20": {
        "parameterization": "mean_var",
        "warmup_steps": 800,
        "train_steps": 3000,
        "blocks_per_round": 70,
        "finetune_steps": 100,
    },
    "transformer": {
        "parameterization": "mean_var",
        "warmup_steps": 1500,
        "train_steps": 4000,
        "blocks_per_round": 120,
        "finetune_steps": 100,
    },
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A network and a seed, with their data and files."""

    data: str
    output: pathlib.Path
    network: str
    seed: int

    @property
    def recipe(self):
        return tfmiracle.Recipe(**RECIPES[self.network], block_bits=18, seed=self.seed)

    def path(self, name):
        folder = self.output / "models" / f"{self.network}-{self.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def trained(self, **options):
        return keras.models.load_model(self.path("trained.keras"), **options)

    @functools.cached_property
    def images(self):
        """(x, y) for "train", "validation" and "test"."""
        with np.load(self.data) as data:
            names = ("x_train", "y_train", "x_test", "y_test")
            x, y, x_test, y_test = (data[name] for name in names)
        x, x_test = (a[..., None] / np.float32(255) for a in (x, x_test))
        order = np.random.default_rng(0).permutation(len(x))  # some files are sorted
        x, y = x[order], y[order]
        return {
            "train": (x[:-VALIDATION], y[:-VALIDATION]),
            "validation": (x[-VALIDATION:], y[-VALIDATION:]),
            "test": (x_test, y_test),
        }

    def calibration(self):
        """Batches from which statistics of BatchNormalization are taken anew."""
        steps = self.recipe.recalibration_steps
        return np.split(self.images["train"][0][: steps * BATCH_SIZE], steps)

    def errors(self, model):
        """Shares of wrong answers in %."""
        found = {}
        for part in ("validation", "test"):
            x, y = self.images[part]
            answers = model.predict(x, batch_size=500, verbose=0).argmax(-1)
            found[f"{part}_error"] = 100 * float(np.mean(answers != y))
        return found


def clock():
    """Minutes on the wall, and those of the processor over all threads."""
    return np.array([time.monotonic(), time.process_time()]) / 60


def since(start):
    return dict(zip(("minutes", "core_minutes"), (clock() - start).tolist()))


def fit(model, images, learning_rate, epochs=1, steps_per_epoch=None):
    steps = epochs * (steps_per_epoch or len(images[0]) // BATCH_SIZE)
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(learning_rate, steps)
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=10,
    )
    options = {"epochs": epochs, "steps_per_epoch": steps_per_epoch, "verbose": 0}
    model.fit(*images, batch_size=BATCH_SIZE, **options)


def train(job):
    model = {"resnet20": resnet20, "transformer": transformer}[job.network]()
    start = clock()
    fit(model, job.images["train"], 2e-3, EPOCHS[job.network])
    minutes = since(start)
    model.save(job.path("trained.keras"))
    return {"bytes": 4 * model.count_params(), **minutes, **job.errors(model)}


class KeepPosterior(keras.callbacks.Callback):
    """Saves a posterior after its first `fit`, when nothing is coded yet."""

    def __init__(self, path):
        super().__init__()
        self.path, self.end = path, None

    def on_train_end(self, logs=None):
        warmup = self.model.get_config()["parameterization"] == "deterministic"
        if self.end is None and not warmup:
            self.end = clock()
            self.model.save(self.path)


def compress(job):
    keep, start = KeepPosterior(job.path("posterior.keras")), clock()
    result = tfmiracle.compress(
        job.trained(),
        job.images["train"],
        path=job.path("rounds.miracle"),
        recipe=job.recipe,
        **COMPRESS[job.network],
        metrics=["accuracy"],
        validation_data=job.images["test"],
        callbacks=[keep],
        overwrite=True,
    )
    coding = since(keep.end)
    variational = dict(zip(coding, (keep.end - start).tolist()))
    accuracy = result.stages["posterior_mean"]["accuracy"]
    return {
        "bytes": result.file_bytes,
        "payload_bytes": result.file.payload_bytes,
        "posterior": {"test_error": 100 * (1 - accuracy), **variational},
        **coding,
        **job.errors(result.model),
    }


def architecture_bytes(model):
    """What our file would spend on the architecture alone."""
    return len(MiracleFile([], [], [], [], plain_architecture(model)).to_bytes())


def one_shot(job):
    """All blocks coded at once, from the same posterior, without fine-tuning."""
    model = keras.models.load_model(job.path("posterior.keras"), compile=False)
    coding = tfmiracle.CompressionCallback(
        job.path("one_shot.miracle"),
        blocks_per_round=2**31,
        recalibration_data=job.calibration(),
        overwrite=True,
    )
    start = clock()
    callbacks = keras.callbacks.CallbackList([coding], model=model, verbose=0)
    callbacks.on_train_begin()
    callbacks.on_train_end()
    minutes = since(start)
    weights = model.block_posterior.layout.num_effective
    return {
        "bytes": coding.file_bytes,
        "note": f"{weights:,} effective weights",
        **minutes,
        **job.errors(tfmiracle.load(job.path("one_shot.miracle"))),
    }


def float16(job):
    model, file = job.trained(), io.BytesIO()
    weights = [w.astype(np.float16) for w in model.get_weights()]
    np.savez_compressed(file, *weights)
    model.set_weights(weights)
    size = len(file.getvalue()) + architecture_bytes(model)
    return {"bytes": size, **job.errors(model)}


def keras_int8(job):
    model, path = job.trained(compile=False), job.path("int8.keras")
    model.quantize("int8")
    model.save(path)
    sizes = [(int(np.prod(v.shape)), v.dtype) for v in model.weights]
    left = sum(size for size, dtype in sizes if dtype == "float32")
    note = f"{left / sum(size for size, _ in sizes):.1%} of the entries stay float32"
    size = len(zlib.compress(path.read_bytes(), 9))
    return {"bytes": size, "note": note, **job.errors(model)}


def int8(job):
    """Kernels rounded to 255 levels, with a scale for each output channel."""
    model, parts, weights = job.trained(), [], []
    for variable, is_kernel in zip(model.weights, kernels(model)):
        value = variable.numpy()
        if is_kernel:
            axes = tuple(range(value.ndim - 1))
            scale = np.abs(value).max(axes, keepdims=True).astype(np.float16) / 127
            rounded = np.rint(value / np.maximum(scale, 1e-8)).astype(np.int8)
            parts += [rounded, scale]
            weights.append(rounded * scale.astype(np.float32))
        else:
            parts.append(value.astype(np.float16))
            weights.append(parts[-1])
    model.set_weights(weights)
    data = zlib.compress(b"".join(part.tobytes() for part in parts), 9)
    return {"bytes": len(data) + architecture_bytes(model), **job.errors(model)}


def kernels(model):
    """Which variables are kernels; all others stay float16 in what we compare with."""
    return [variable.path.endswith("kernel") for variable in model.weights]


def magnitude_masks(model, kept):
    """Of each kernel, which entries are among the largest; None for the rest."""
    values = [
        np.abs(variable.numpy()) if is_kernel else None
        for variable, is_kernel in zip(model.weights, kernels(model))
    ]
    every = np.concatenate([v.ravel() for v in values if v is not None])
    least = np.quantile(every, 1 - kept)
    return [None if v is None else v >= least for v in values]


def entropy_bits(labels):
    """Of all labels together, if each is coded by its frequency."""
    counts = np.unique(labels, return_counts=True)[1]
    return float(np.sum(counts * np.log2(labels.size / counts)))


def clustered(weights, masks, clusters):
    """Weights with k means for each kernel, and the bits of an ideal entropy coder.

    Of a kernel it counts the entropies of its mask and of the numbers of its clusters,
    as if its entries were independent, and a float16 for each mean; of anything else a
    float16 for each entry.
    """
    values = [w.astype(np.float16).astype(np.float32) for w in weights]
    bits = []
    for value, mask in zip(values, masks):
        if mask is None:
            bits.append(16 * value.size)
            continue
        value[~mask] = 0
        bits.append(entropy_bits(mask))
        points = value[mask][:, None]
        if k := min(clusters, len(np.unique(points))):
            means = KMeans(k, n_init=1, max_iter=30, random_state=0).fit(points)
            value[mask] = means.cluster_centers_.astype(np.float16)[means.labels_, 0]
            bits[-1] += 16 * k + entropy_bits(means.labels_)
    return values, bits


def try_clusters(job, model, kept, masks):
    weights, rows = model.get_weights(), []
    for clusters in CLUSTERS:
        values, bits = clustered(weights, masks, clusters)
        model.set_weights(values)
        recalibrate(model, job.calibration())
        # Statistics of normalizations can be merged into their scales and shifts.
        stored = [b for b, v in zip(bits, model.weights) if "moving" not in v.path]
        size = int(np.ceil(sum(stored) / 8)) + architecture_bytes(model)
        row = {"kept": kept, "clusters": clusters, "bytes": size}
        rows.append({**row, **job.errors(model)})
    model.set_weights(weights)
    return rows


def pruned(job):
    """Without retraining."""
    model, tried = job.trained(), []
    for kept in KEPT:
        tried += try_clusters(job, model, kept, magnitude_masks(model, kept))
    return {"tried": tried}


def pruned_finetuned(job):
    """Pruned more and more, and trained on for a little each time."""
    model, tried = job.trained(), []
    for kept in KEPT_FINETUNED:
        masks = magnitude_masks(model, kept)
        for variable, mask in zip(model.weights, masks):
            if mask is not None:
                variable.assign(variable * mask)
                variable.constraint = functools.partial(keras.ops.multiply, mask)
        fit(model, job.images["train"], 1e-3, steps_per_epoch=FINETUNE_STEPS)
        tried += try_clusters(job, model, kept, masks)
    return {"tried": tried}


STEPS = (
    *(train, compress, one_shot),
    *(float16, keras_int8, int8, pruned, pruned_finetuned),
)
SPAWN = multiprocessing.get_context("spawn")


def measured(step, job):
    """What a step returns, with the minutes and the peak memory of this process."""
    keras.utils.set_random_seed(job.seed)
    start = clock()
    result = step(job)
    return {**since(start), **result, "peak_mb": peak_mb()}


def run(job):
    """All steps that are not in the job's file yet."""
    file = job.output / f"{job.network}-{job.seed}.json"
    made_with = {"machine": machine(), "settings": settings(job.network)}
    record = json.loads(file.read_text()) if file.exists() else made_with
    if {key: record[key] for key in made_with} != made_with:
        raise SystemExit(f"{file} is of other settings, or of another machine.")
    for step in (s for s in STEPS if s.__name__ not in record):
        print(f"{job.network}, seed {job.seed}: {step.__name__}", flush=True)
        with concurrent.futures.ProcessPoolExecutor(1, SPAWN) as pool:
            record[step.__name__] = pool.submit(measured, step, job).result()
        text = json.dumps(record, indent=1) + "\n"
        write_atomically(file, text.encode(), overwrite=True)
    return record


def settings(network):
    """All that the result depends on, but for seed and data, as JSON has it."""
    own = {"epochs": EPOCHS, "compress": COMPRESS, "recipe": RECIPES}
    shared = {"kept": KEPT, "kept_finetuned": KEPT_FINETUNED, "clusters": CLUSTERS}
    shared |= {"finetune_steps": FINETUNE_STEPS, "batch_size": BATCH_SIZE}
    found = {name: values[network] for name, values in own.items()} | shared
    return json.loads(json.dumps(found))


def closest(record, step):
    """Of the settings tried the one of fewest bytes at our validation error."""
    ours, tried = record["compress"]["validation_error"], record[step]["tried"]
    reaching = [row for row in tried if row["validation_error"] <= ours]
    best = min(tried, key=lambda row: row["validation_error"])
    best = min(reaching, key=lambda row: row["bytes"], default=best)
    note = f"{best['kept']:.1%} kept, {best['clusters']} clusters"
    return {**best, "note": note if reaching else f"{note}, never at our error"}


ROWS = {
    "trained, float32": lambda r: r["train"],
    "mean of the posterior": lambda r: r["compress"]["posterior"],
    "**tfmiracle**": lambda r: r["compress"],
    "tfmiracle, one shot": lambda r: r["one_shot"],
    "float16 `.npz`, deflated": lambda r: r["float16"],
    "Keras' int8 `.keras`, deflated": lambda r: r["keras_int8"],
    "int8 by channel, deflated": lambda r: r["int8"],
    "pruned, k-means, entropy": lambda r: closest(r, "pruned"),
    "the same, fine-tuned": lambda r: closest(r, "pruned_finetuned"),
}
COLUMNS = {  # with the number of digits
    "validation_error": ("validation error, %", 2),
    "test_error": ("test error, %", 2),
    "bytes": ("bytes", 0),
    "ratio": ("ratio", 1),
    "minutes": ("minutes", 1),
    "core_minutes": ("minutes of all cores", 1),
    "peak_mb": ("peak MiB", 0),
}
NOTES = f"""
Bytes are those of whole files for tfmiracle and Keras. For the others they are the
weights and what our file spends on the architecture: kernels as described, all else
float16. Pruning is by magnitude over all kernels, with k means for each kernel; its
bytes are those of an ideal entropy coder, without its tables, and without the
statistics of normalizations, which can be merged into their scales. It is shown at the
fewest bytes that reach our error on the validation images. Shares of the weights tried:
{KEPT}; fine-tuned, with {FINETUNE_STEPS} steps after each: {KEPT_FINETUNED}; clusters:
{CLUSTERS}. The means are not trained.

Minutes are those of the row's own step: training, variational training (with the
deterministic one before it), coding with fine-tuning and two evaluations, coding alone.
"""


def table(records):
    """Markdown of the records of a network, one for each seed."""
    titles = ["", *(title for title, _ in COLUMNS.values()), ""]
    rows = []
    for label, outcome in ROWS.items():
        parts = [outcome(record) for record in records]
        for part, record in zip(parts, records):
            if "bytes" in part:
                part["ratio"] = record["train"]["bytes"] / part["bytes"]
        cells = [
            mean([part[key] for part in parts], digits) if key in parts[0] else ""
            for key, (_, digits) in COLUMNS.items()
        ]
        notes = dict.fromkeys(part.get("note", "") for part in parts)
        rows.append([label, *cells, "; ".join(notes)])
    return markdown(titles, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="MNIST as Keras' .npz file")
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--networks", default="resnet20,transformer")
    parser.add_argument("--seeds", default="0")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    records = {network: [] for network in flags.networks.split(",")}
    for seed in flags.seeds.split(","):
        for network, runs in records.items():
            runs.append(run(Job(flags.data, flags.output, network, int(seed))))
    command = "python benchmarks/networks.py --data=MNIST.npz --output=FOLDER"
    text = f"    {command} --networks={flags.networks} --seeds={flags.seeds}\n\n"
    text += NOTES
    for network, runs in records.items():
        of = ", ".join(f"{key} {value}" for key, value in runs[0]["machine"].items())
        text += f"\n## {network}\n\n{of}.\n\n{table(runs)}"
    (flags.output / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
