"""The command line: `tfmiracle COMMAND`, see `COMMANDS` at the end.

Every command has its own absl flags, so that a flag of another command is an error;
`--flagfile=FILE` reads flags from a file. Results go to standard output, everything
else to standard error. Exit status: 0 done, 2 bad input, 1 a defect.
"""

import collections
import contextlib
import dataclasses
import inspect
import io
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable

import numpy as np
from absl import flags

from tfmiracle import __version__
from tfmiracle.coded_posterior import CodedPosterior
from tfmiracle.datasets import Dataset, load_dataset
from tfmiracle.decoder import decode
from tfmiracle.miracle_file import (
    DEFAULT_MAX_WEIGHTS,
    Levels,
    MiracleFile,
    check_output,
    write_atomically,
)
from tfmiracle.pruning import STRATEGIES, pruned_networks, pruning_order
from tfmiracle.recipe import Recipe
from tfmiracle.report import write_report
from tfmiracle.rules import Treatment, match_path

# TensorFlow, which is loaded later, takes oneDNN by itself only on processors with
# instructions for neural networks; on others it halves the time of a step all the same.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# With AVX-512, XLA by itself uses vectors of half its width, and coding takes up to a
# quarter longer. All versions of TensorFlow that are supported know this flag.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_prefer_vector_width=512")

_DATA_HELP = (
    "'digits', a data set of Keras ('mnist', ...), or the path of an .npz file with "
    "x_train, y_train, x_test and y_test."
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A sub-command: what it does, its positional argument, flags and function."""

    help: str
    argument: str | None
    define: Callable[[flags.FlagValues], None]
    run: Callable[..., dict]
    show: Callable[[dict], str]


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("tfmiracle: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("TFMIRACLE_TRACEBACK"):
            raise
        text = " ".join(str(error).split())
        if isinstance(error, ValueError | OSError | flags.Error):
            print(f"tfmiracle: {text}", file=sys.stderr)
            return 2
        print(
            f"tfmiracle: unexpected {type(error).__name__}: {text} "
            "(set TFMIRACLE_TRACEBACK=1 to see where)",
            file=sys.stderr,
        )
        return 1


def _run(argv):
    if argv in (["--version"], ["version"]):
        print(__version__)
        return 0
    if not argv or argv[0] in ("help", "-h", "--help"):
        print(_usage())
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise ValueError(
            f"there is no command {name!r}; use one of {', '.join(COMMANDS)}"
        )
    command = COMMANDS[name]
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)
    flags.DEFINE_bool(
        "help", False, "Show this help.", short_name="h", flag_values=values
    )
    command.define(values)
    if command.argument:
        flags.DEFINE_integer(
            "max_weights",
            DEFAULT_MAX_WEIGHTS,
            "Refuse a file that claims more weights than this.",
            lower_bound=1,
            flag_values=values,
        )
    positional = values(["tfmiracle", *rest])[1:]
    if values.help:
        argument = f" {command.argument}" if command.argument else ""
        print(f"tfmiracle {name}{argument} [flags]: {command.help}\n")
        print(values.main_module_help() or values.get_help())
        return 0
    if len(positional) != bool(command.argument):
        raise ValueError(
            f"{name} takes {f'one {command.argument}' if command.argument else 'flags'}"
            f" and no more; received {positional}"
        )
    with contextlib.redirect_stdout(sys.stderr):
        result = command.run(values, *positional)
    if values.json:
        print(json.dumps(_finite(result), allow_nan=False))
    else:
        print(command.show(result))
    return 0


def _finite(value):
    """A result as JSON can say it: null stands for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _import_tensorflow():
    """Imports TensorFlow without what it says about the GPUs that are not there."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Each phase compiles steps of its own, of which TensorFlow warns.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        import tensorflow as tf

        tf.config.list_logical_devices()
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _usage():
    lines = ["tfmiracle: compress neural networks by minimal random code learning", ""]
    for name, command in COMMANDS.items():
        argument = command.argument or ""
        lines.append(f"  tfmiracle {name} {argument}".ljust(30) + command.help)
    lines += ["", "`tfmiracle COMMAND --help` lists the flags of a command."]
    return "\n".join(lines)


# compress


def _define_compress(values):
    string, floating = _definers(values)
    string("data", None, _DATA_HELP)
    string("output", None, "The .miracle file to write.")
    string(
        "model",
        "lenet5",
        "'lenet5' or 'digits_cnn', trained from scratch, or the path of a compiled, "
        "trained .keras file.",
    )
    string("target", None, "Size of the file: '3.3 kB', '500x' or '0.06 bits'.")
    floating(
        "validation_fraction",
        0.0,
        "Hold out this part of the training set and report errors on it instead of the "
        "test set, for choosing settings.",
    )
    _define_dtype_policy(values)
    _define_rules(values)
    string(
        "workdir",
        None,
        "Folder that keeps the state of the run: killed and started again, it goes on.",
    )
    flags.DEFINE_bool(
        "keep_posterior",
        False,
        "Also write the posterior as .posterior.npz beside the file.",
        flag_values=values,
    )
    _define_overwrite(values)
    _define_recipe(values)


def _define_dtype_policy(values):
    flags.DEFINE_string(
        "dtype_policy",
        None,
        "Keras dtype policy of a built-in network, by default float32. With "
        "mixed_bfloat16, which is faster on some processors, posteriors and coding are "
        "float32 all the same.",
        flag_values=values,
    )


def _define_rules(values):
    flags.DEFINE_list(
        "rules",
        [],
        "How variables are treated, PATTERN:TREATMENT, as in conv2/kernel:hash=2, "
        "conv1/kernel:own_scale, */bias:store, */bias:store=float16 or "
        "moving_*:store=6bit.",
        flag_values=values,
    )


def _define_recipe(values, without=()):
    # Python 3.13 takes the indentation off by itself.
    text = inspect.cleandoc(Recipe.__doc__)
    helps = dict(re.findall(r"^  (\w+): ((?:.|\n {4})*)", text, re.M))
    for field in dataclasses.fields(Recipe):
        if field.name in without:
            continue
        define = {
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            float | None: flags.DEFINE_float,
            bool: flags.DEFINE_bool,
            str: flags.DEFINE_string,
        }[field.type]
        text = " ".join(helps[field.name].split())
        define(field.name, field.default, text, flag_values=values)


def _compress(values):
    for name in ("data", "output"):
        if not values[name].value:
            raise flags.Error(f"--{name} is missing")
    if not values.workdir:
        check_output(values.output, values.overwrite)
    recipe = _recipe(values)
    data = load_dataset(values.data)
    if values.validation_fraction:
        data = data.hold_out(values.validation_fraction)
    _import_tensorflow()
    from tfmiracle.compression import compress

    net = _network(values.model, data, values.dtype_policy, recipe.seed)
    result = compress(
        net,
        (data.x_train, data.y_train),
        values.target,
        values.output,
        recipe,
        rules=_rules(values.rules),
        metrics=["accuracy"],
        validation_data=(data.x_test, data.y_test),
        workdir=values.workdir,
        keep_posterior=values.keep_posterior,
        overwrite=values.overwrite,
    )
    errors = {stage: _error(m) for stage, m in result.stages.items()}
    before = "warmup" if recipe.warmup_steps else "original"
    if before == "original" and values.model in _architectures():
        before = "posterior_mean"  # there was no trained network
    return {
        "error": errors["decoded"],
        "error_before": errors[before],
        "errors": errors,
        "losses": {stage: m.get("loss") for stage, m in result.stages.items()},
        "evaluated_on": "validation" if values.validation_fraction else "test",
        **_sizes(result.file, result.file_bytes),
        "seconds": round(result.seconds, 1),
        "output": values.output,
        "history": result.history,
    }


def _recipe(values):
    names = [f.name for f in dataclasses.fields(Recipe) if f.name in values]
    return Recipe(**{name: values[name].value for name in names})


def _network(name, data, dtype_policy, seed):
    import keras

    from tfmiracle.architectures import new_network

    architectures = _architectures()
    if name in architectures:
        net = new_network(
            name,
            data.x_train.shape[1:],
            data.num_classes,
            dtype_policy or "float32",
            seed,
        )
        net.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    elif os.path.exists(name):
        if dtype_policy:
            raise ValueError(
                f"--dtype_policy is for built-in networks; {name} has a policy of its "
                "own"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the optimizer, which is not used
            try:
                net = keras.saving.load_model(name)
            except (TypeError, ValueError) as error:
                first = str(error).strip().partition("\n")[0]
                raise ValueError(f"{name} cannot be loaded: {first:.300}") from error
        if getattr(net, "loss", None) is None:
            raise ValueError(
                f"{name} is not compiled, so its loss is unknown; compile it with a "
                "loss for integer labels before saving it"
            )
    else:
        raise ValueError(
            f"there is no model {name!r}: use {', '.join(architectures)} or the path "
            "of a .keras file"
        )
    _check_fit(net, data)
    return net


def _architectures():
    from tfmiracle.architectures import ARCHITECTURES

    return ARCHITECTURES


def _check_fit(net, data: Dataset):
    shapes = getattr(net, "input_shape", None), getattr(net, "output_shape", None)
    if not all(
        isinstance(shape, tuple) and all(isinstance(n, int | None) for n in shape)
        for shape in shapes
    ):
        raise ValueError(
            "the network must have one input and one output of known shape; use "
            "`tfmiracle.compress` in Python for others"
        )
    expected, found = tuple(net.input_shape[1:]), data.x_test.shape[1:]
    if len(expected) != len(found) or any(
        e not in (None, f) for e, f in zip(expected, found)
    ):
        raise ValueError(
            f"the network takes inputs of shape {expected}, but the data set has "
            f"{found}"
        )
    outputs = net.output_shape[-1]
    if len(net.output_shape) != 2 or outputs < data.num_classes:
        raise ValueError(
            f"the network's output of shape {net.output_shape} cannot tell the "
            f"{data.num_classes} classes of the data set apart"
        )


def _rules(items):
    rules = {}
    for item in items:
        pattern, separator, treatment = item.rpartition(":")
        if not separator:
            raise ValueError(
                f"--rules has {item!r}; write PATTERN:TREATMENT, as in "
                "dense1/kernel:hash=64"
            )
        Treatment.parse(treatment)
        rules[pattern] = treatment
    return rules


def _error(metrics):
    accuracy = metrics.get("accuracy")
    return None if accuracy is None else round(1 - float(accuracy), 6)


def _sizes(file: MiracleFile, file_bytes):
    groups = file.groups

    def common(values):
        values = list(values)
        return (
            values[0] if values and values.count(values[0]) == len(values) else values
        )

    return {
        "file_bytes": file_bytes,
        "payload_bytes": file.payload_bytes,
        "float32_bytes": file.float32_bytes,
        "ratio": round(file.float32_bytes / file_bytes, 1),
        "payload_ratio": round(file.float32_bytes / max(file.payload_bytes, 1), 1),
        "weights": file.num_weights,
        "effective_weights": sum(g.layout.num_effective for g in groups),
        "blocks": sum(g.layout.num_blocks for g in groups),
        "block_size": common(g.layout.block_size for g in groups),
        "block_bits": common(g.code.bits(g.layout.block_size) for g in groups),
        "code": common(g.code.identifier for g in groups),
        "codebook": common(getattr(g.code, "codebook", None) for g in groups),
    }


def _show_sizes(r):
    return (
        f"{r['file_bytes']:,} bytes, of which {r['payload_bytes']:,} are indices: "
        f"{r['ratio']:g}x smaller than {r['weights']:,} float32 weights "
        f"({r['payload_ratio']:g}x counting indices only)\n"
        f"{r['blocks']:,} blocks of {r['block_size']} weights, "
        f"{r['block_bits']} bits each"
    )


def _show_compress(r):
    return (
        f"error before {r['error_before']:.2%}, after {r['error']:.2%} "
        f"({r['evaluated_on']} set)\n{r['output']}: {_show_sizes(r)}\n"
        f"{r['seconds']:.0f} seconds"
    )


# study


def _define_study(values):
    string, floating = _definers(values)
    string("data", None, _DATA_HELP)
    string("workdir", None, "Folder of the study; started again, it goes on.")
    string("model", "lenet5", "'lenet5' or 'digits_cnn'.")
    _define_dtype_policy(values)
    _define_rules(values)
    for name, default, text in (
        ("parameterizations", ["mean_kl", "mean_var"], "Parameterizations to run."),
        ("block_sizes", ["20", "30", "40"], "Block sizes to run."),
        ("seeds", [str(seed) for seed in range(10)], "Seeds to run."),
    ):
        flags.DEFINE_list(name, default, text, flag_values=values)
    flags.DEFINE_integer(
        "mean_var_train_steps",
        None,
        "Steps of variational training for mean_var, if not --train_steps.",
        flag_values=values,
    )
    floating("scale", 1.0, "Fraction of all steps, to make the study small.")
    flags.DEFINE_integer(
        "jobs", 1, "Runs side by side.", lower_bound=1, flag_values=values
    )
    _define_recipe(values, without=("parameterization", "block_size", "seed"))


def _study(values):
    for name in ("data", "workdir"):
        if not values[name].value:
            raise flags.Error(f"--{name} is missing")
    load_dataset(values.data)  # errors should come before TensorFlow does
    _import_tensorflow()
    from tfmiracle.study import Study, run_study

    study = Study(
        workdir=values.workdir,
        data=values.data,
        recipe=_recipe(values),
        parameterizations=tuple(values.parameterizations),
        block_sizes=tuple(_integers("block_sizes", values.block_sizes)),
        seeds=tuple(_integers("seeds", values.seeds)),
        model=values.model,
        rules=_rules(values.rules),
        mean_var_train_steps=values.mean_var_train_steps,
        dtype_policy=values.dtype_policy or "float32",
        scale=values.scale,
        name=pathlib.Path(values.data).stem,
    )
    return run_study(study, values.jobs)


def _integers(name, texts):
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise ValueError(f"--{name} must list integers; received {texts}") from None


# report


def _define_report(values):
    string, _ = _definers(values)
    string("workdir", None, "Folder of a study.")
    string("output", None, "Folder to write to; by default WORKDIR/report.")


def _report(values):
    if not values.workdir:
        raise flags.Error("--workdir is missing")
    return write_report(values.workdir, values.output)


def _show_report(r):
    tables = ("table1", "convergence", "statements")
    texts = [(pathlib.Path(r["output"]) / f"{name}.md").read_text() for name in tables]
    return "\n".join([*texts, f"wrote {r['report']}"])


# prune


def _define_prune(values):
    string, _ = _definers(values)
    string("data", None, _DATA_HELP)
    string("posterior", None, "Its .posterior.npz, for the strategy 'kl'.")
    flags.DEFINE_enum(
        "strategy",
        "magnitude",
        STRATEGIES,
        "Which weights become zero first: random ones, small ones, or those whose "
        "posterior is nearest to zero.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "fractions",
        [f"{i / 10:g}" for i in range(10)],
        "Parts of the weights to set to zero.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seeds",
        10,
        "Number of random orders for the strategy 'uniform'.",
        lower_bound=1,
        flag_values=values,
    )


def _prune(values, path):
    if not values.data:
        raise flags.Error("--data is missing")
    try:
        fractions = [float(text) for text in values.fractions]
    except ValueError:
        raise ValueError(
            f"--fractions must list numbers; received {values.fractions}"
        ) from None
    file = MiracleFile.read(path, values.max_weights)
    posterior = values.posterior and CodedPosterior.read(values.posterior)
    pruning_order(file, values.strategy, posterior)  # errors come before TensorFlow
    data = load_dataset(values.data)

    _import_tensorflow()
    from tfmiracle.network import accuracy_of, to_network

    net = to_network(decode(file))
    _check_fit(net, data)
    seeds = range(values.seeds if values.strategy == "uniform" else 1)
    accuracies = np.array(
        [
            [
                accuracy_of(net, pruned, data.x_test, data.y_test)
                for pruned in pruned_networks(
                    file, values.strategy, fractions, posterior, seed
                )
            ]
            for seed in seeds
        ]
    )
    errors = [None] * len(fractions)
    if len(seeds) > 1:
        errors = (accuracies.std(0, ddof=1) / len(seeds) ** 0.5).round(6).tolist()
    return {
        "strategy": values.strategy,
        "fractions": fractions,
        "accuracy": accuracies.mean(0).round(6).tolist(),
        "standard_error": errors,
        "seeds": len(seeds),
        "examples": len(data.y_test),
    }


def _show_prune(r):
    rows = zip(r["fractions"], r["accuracy"], r["standard_error"], strict=True)
    return "\n".join(
        f"{fraction:7.1%} pruned: accuracy {accuracy:.2%}"
        + ("" if error is None else f" ± {error:.2%}")
        for fraction, accuracy, error in rows
    )


# evaluate, info, decode, export


def _define_evaluate(values):
    _definers(values)[0]("data", None, _DATA_HELP)


def _evaluate(values, path):
    if not values.data:
        raise flags.Error("--data is missing")
    file = MiracleFile.read(path, values.max_weights)
    data = load_dataset(values.data)

    _import_tensorflow()
    from tfmiracle.network import accuracy_of, to_network

    decoded = decode(file)
    net = to_network(decoded)
    _check_fit(net, data)
    return {
        "error": round(1 - accuracy_of(net, decoded, data.x_test, data.y_test), 6),
        "examples": len(data.y_test),
        **_sizes(file, os.path.getsize(path)),
    }


def _info(values, path):
    file = MiracleFile.read(path, values.max_weights)
    size = os.path.getsize(path)
    variables = []
    stored = iter(file.stored)
    places = [(name, place) for name, place in zip(file.names, file.coded) if place]
    in_layer = collections.Counter(_layer(name) for name, _ in places)
    in_scale = collections.Counter(_scale(file, place) for _, place in places)
    for name, place in zip(file.names, file.coded, strict=True):
        if place is None:
            value = next(stored)
            shape = value.shape
            if isinstance(value, Levels):
                bits, treatment = 8 * value.size, "stored in levels"
            else:
                bits, treatment = 8 * value.nbytes, f"stored as {value.dtype.name}"
            reason = _reason(name, file.metadata.get("rules"))
        else:
            group = file.groups[place[0]]
            v = group.layout.variables[place[1]]
            shape = v.shape
            in_block = group.layout.block_size
            bits = v.effective_size * group.code.bits(in_block) / in_block
            treatment = "coded"
            if v.hash_factor > 1:
                treatment += f", hashed x{v.hash_factor}"
            reason = "it trains" if treatment == "coded" else "a rule"
            if in_scale[_scale(file, place)] < min(2, in_layer[_layer(name)]):
                treatment += ", own scale"
                if v.hash_factor == 1:  # the rule may name the rest of the layer
                    reason = "a rule in its layer"
        variables.append(
            {
                "name": name,
                "shape": list(shape),
                "treatment": treatment,
                "reason": reason,
                "bits": round(bits, 1),
                "share": round(bits / (8 * size), 4),
            }
        )
    return {
        **_sizes(file, size),
        "variables": variables,
        "metadata": file.metadata,
    }


def _layer(name):
    return name.rpartition("/")[0]


def _scale(file, place):
    """Which coding scale a coded variable has."""
    group, index = place
    return group, file.groups[group].layout.variables[index].scale_index


def _reason(name, rules):
    """Why a variable is stored."""
    patterns = rules if isinstance(rules, dict) else ()
    fitting = [pattern for pattern in patterns if match_path(name, pattern)]
    return f"rule {fitting[-1]}" if fitting else "it does not train"


def _show_info(r):
    rows = [("variable", "shape", "treatment", "reason", "bits", "share")] + [
        (
            v["name"],
            "x".join(map(str, v["shape"])),
            v["treatment"],
            v["reason"],
            f"{v['bits']:,.0f}",
            f"{v['share']:.1%}",
        )
        for v in r["variables"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in rows
    )
    return f"{_show_sizes(r)}\n\n{table}\n\n{json.dumps(r['metadata'])}"


def _define_output(values):
    _definers(values)[0]("output", None, "What to write.")
    _define_overwrite(values)


def _define_overwrite(values):
    flags.DEFINE_bool(
        "overwrite", False, "Replace what exists under that name.", flag_values=values
    )


def _output(values):
    if not values.output:
        raise flags.Error("--output is missing")
    return values.output


def _decode(values, path):
    output = _output(values)
    check_output(output, values.overwrite)
    weights = decode(path, values.max_weights).weights
    buffer = io.BytesIO()
    # Not np.savez, whose own arguments clash with variables of their names.
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, value in weights.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, value)
    write_atomically(output, buffer.getvalue(), values.overwrite)
    return {
        "output": output,
        "variables": len(weights),
        "weights": sum(w.size for w in weights.values()),
    }


def _define_export(values):
    _define_output(values)
    flags.DEFINE_enum(
        "format",
        "saved_model",
        ["saved_model", "keras", "litert"],
        "What to export to.",
        flag_values=values,
    )


def _export(values, path):
    output = pathlib.Path(_output(values))
    suffix = {"keras": ".keras", "litert": ".tflite"}.get(values.format)
    if suffix and output.suffix != suffix:
        raise ValueError(f"--output is {str(output)!r}; Keras wants a name in {suffix}")
    if values.format == "saved_model" and output.is_dir():
        if not values.overwrite:
            raise FileExistsError(f"{output} exists; choose another or --overwrite it")
        if not (output / "saved_model.pb").is_file():
            raise FileExistsError(f"{output} is no SavedModel; it is not overwritten")
    else:
        check_output(output, values.overwrite)

    _import_tensorflow()
    from tfmiracle.network import load

    model = load(path, max_weights=values.max_weights)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as folder:
        made = pathlib.Path(folder) / output.name
        if values.format == "keras":
            model.save(made)
        elif values.format == "litert":
            model.export(made, format="litert", verbose=False)
        else:
            model.export(made, format="tf_saved_model", verbose=False)
        if output.is_dir():
            shutil.rmtree(output)
        elif made.is_dir():
            output.unlink(missing_ok=True)
        os.replace(made, output)
    size = sum(f.stat().st_size for f in [output, *output.rglob("*")] if f.is_file())
    return {"output": str(output), "format": values.format, "bytes": size}


def _show_written(r):
    return f"wrote {r['output']}"


def _definers(values):
    def string(name, default, text):
        flags.DEFINE_string(name, default, text, flag_values=values)

    def floating(name, default, text):
        flags.DEFINE_float(name, default, text, flag_values=values)

    return string, floating


COMMANDS = {
    "compress": Command(
        "Train a network under a budget, code it and write its file.",
        None,
        _define_compress,
        _compress,
        _show_compress,
    ),
    "study": Command(
        "Run a grid of parameterizations, block sizes and seeds, resuming it.",
        None,
        _define_study,
        _study,
        lambda r: f"{r['done']} of {r['total']} runs are done",
    ),
    "report": Command(
        "Make tables and figures of the records of a study.",
        None,
        _define_report,
        _report,
        _show_report,
    ),
    "evaluate": Command(
        "Decode a file and report its error on a test set.",
        "FILE",
        _define_evaluate,
        _evaluate,
        lambda r: f"error {r['error']:.2%} of {r['examples']:,}\n{_show_sizes(r)}",
    ),
    "prune": Command(
        "Report the accuracy of a file with a part of its weights set to zero.",
        "FILE",
        _define_prune,
        _prune,
        _show_prune,
    ),
    "info": Command(
        "Tell what a file holds.", "FILE", lambda values: None, _info, _show_info
    ),
    "decode": Command(
        "Write the decoded weights as an .npz file.",
        "FILE",
        _define_output,
        _decode,
        _show_written,
    ),
    "export": Command(
        "Export the decoded network as a SavedModel, .keras or LiteRT file.",
        "FILE",
        _define_export,
        _export,
        _show_written,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
