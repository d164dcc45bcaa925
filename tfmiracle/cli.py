"""The command line: `tfmiracle COMMAND`, see `COMMANDS` at the end.

Every command has its own absl flags, so that a flag of another command is an error;
`--flagfile=FILE` reads flags from a file. Results go to standard output, everything
else to standard error. Exit status: 0 done, 2 bad input, 1 a defect, 130, 141 or 143
ended by Ctrl-C, a reader that closed the pipe, or SIGTERM.
"""

import collections
import contextlib
import dataclasses
import importlib
import io
import json
import logging
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
import typing
import warnings
import zipfile
from collections.abc import Callable

import numpy as np
from absl import flags

from tfmiracle import __version__
from tfmiracle.codec.coded_posterior import CodedPosterior
from tfmiracle.codec.pruning import STRATEGIES, pruned_networks, pruning_order
from tfmiracle.codec.rules import Treatment, match_path
from tfmiracle.datasets import load_dataset
from tfmiracle.decoder import decode
from tfmiracle.environment import configure
from tfmiracle.files import check_folder, check_output, write_atomically
from tfmiracle.miracle_file import Levels, MiracleFile
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS
from tfmiracle.recipe import Recipe
from tfmiracle.studies.report import write_report
from tfmiracle.training.progress import one_line, warnings_on_one_line
from tfmiracle.training.summary import compression, show_compression, show_sizes, sizes

# Written out: whoever asks for help does not wait for Keras.
_BUILT_IN = (
    "'lenet5', 'digits_cnn', 'resnet8', 'resnet20', 'mobilenet_v2' or "
    "'vision_transformer'"
)
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
    keeps_state: bool = False


class _Ended(BaseException):
    """The process was told to end; no handler of errors should stop that."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with _ended_by_sigterm(), warnings_on_one_line():
            return _run(argv)
    except KeyboardInterrupt as end:
        _complain(f"interrupted{end}")
        return 130
    except _Ended as end:
        _complain(f"ended by SIGTERM{end}")
        return 143
    except BrokenPipeError:  # whoever reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("TFMIRACLE_TRACEBACK"):
            raise
        if isinstance(error, ValueError | OSError | flags.Error):
            _complain(error)
            return 2
        _complain(
            f"unexpected {type(error).__name__}: {error} "
            "(set TFMIRACLE_TRACEBACK=1 to see where)"
        )
        return 1


def _complain(text):
    text = re.sub(r"\[Errno \d+\] ", "", one_line(text))
    print(f"tfmiracle: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ended_by_sigterm():
    """SIGTERM unwinds the stack, so that nothing half-written is left."""

    def end(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise _Ended

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    modules = _import_modules(rest)
    values = flags.FlagValues()
    flags.DEFINE_multi_string(
        "import",
        [],
        "Module of your own to import first, from the current folder or where Python "
        "looks, which registers coders, layers, ...; may be given several times.",
        flag_values=values,
    )
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)
    flags.DEFINE_bool(
        "help", False, "Show this help.", short_name="h", flag_values=values
    )
    command.define(values)
    if command.argument:
        flags.DEFINE_integer(
            "max_weights",
            None,
            "Refuse a file that claims more weights than this. By default, it depends "
            "on the size of the file.",
            lower_bound=1,
            flag_values=values,
        )
    positional = values(["tfmiracle", *rest])[1:]
    if values.help:
        argument = f" {command.argument}" if command.argument else ""
        print(f"tfmiracle {name}{argument} [flags]: {command.help}\n")
        text = values.main_module_help() or values.module_help(__name__)
        print(text.partition(":\n")[2])  # without the name of this module
        return 0
    if values["import"].value != modules:
        raise flags.Error(
            "--import=MODULE must be written so, in the command line itself; a file of "
            "flags imports nothing"
        )
    if len(positional) != bool(command.argument):
        raise ValueError(
            f"{name} takes {f'one {command.argument}' if command.argument else 'flags'}"
            f" and no more; received {positional}"
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = command.run(values, *positional)
    except (KeyboardInterrupt, _Ended) as end:
        raise type(end)(_how_to_go_on(command, values)) from None
    if values.json:
        print(json.dumps(_finite(result), allow_nan=False), flush=True)
    else:
        print(command.show(result), flush=True)
    return 0


def _import_modules(arguments):
    """Imports what `--import=MODULE` names, before its flags are asked for.

    Returns:
      The names of the modules.
    """
    names = [a.partition("=")[2] for a in arguments if re.match("--?import=", a)]
    if names:
        configure()
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(
                f"--import={name} fails: {type(error).__name__}: {error}"
            ) from error
    return names


def _how_to_go_on(command, values):
    if not command.keeps_state:
        return ""
    if not values.workdir:
        return (
            "; nothing is kept. With --workdir=FOLDER the same command would go on "
            "where it was"
        )
    return f"; the same command goes on with what {values.workdir} keeps"


def _finite(value):
    """A result as JSON can say it: null stands for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _import_tensorflow():
    """Imports TensorFlow without what it says about the GPUs that are not there."""
    configure()
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
    lines += [
        "",
        "`tfmiracle COMMAND --help` lists the flags of a command; --flagfile=FILE "
        "reads them from a file.",
    ]
    return "\n".join(lines)


# compress


def _define_compress(values):
    string, floating = _definers(values)
    string("data", None, _DATA_HELP)
    string("output", None, "The .miracle file to write.")
    string(
        "model",
        "lenet5",
        f"{_BUILT_IN}, trained from scratch, or the path of a compiled, trained "
        ".keras file.",
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
    for name, default, text in (
        (
            "keep_posterior",
            False,
            "Also write the posterior as .posterior.npz beside the file.",
        ),
        (
            "architecture",
            True,
            "Let the file say how the network is built. Without it, it is smaller, and "
            "loaded in Python by load(path, model=network).",
        ),
        (
            "record",
            False,
            "Also write how the file was made as .record.json beside it.",
        ),
    ):
        flags.DEFINE_bool(name, default, text, flag_values=values)
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
    _define_options(values, Recipe, without)
    for name in PARAMETERIZATIONS.names():
        _define_options(values, PARAMETERIZATIONS.find(name), prefix=f"{name}: ")


def _define_options(values, cls, without=(), prefix=""):
    """A flag for each option of a class, with its default and help."""
    for field in _fields(cls):
        if field.name in without:
            continue
        types = typing.get_args(field.type) or (field.type,)
        define = {
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            bool: flags.DEFINE_bool,
            str: flags.DEFINE_string,
        }[types[0]]
        default = getattr(field.default, "identifier", field.default)
        text = prefix + field.metadata["help"]
        if field.name in values:  # two parameterizations have an option of this name
            values[field.name].help += f" {text}"
        else:
            define(field.name, default, text, flag_values=values)


def _compress(values):
    for name in ("data", "output"):
        if not values[name].value:
            raise flags.Error(f"--{name} is missing")
    if values.workdir:
        check_folder(values.workdir)
    else:
        check_output(values.output, values.overwrite)
    recipe = recipe_of(values)
    data = load_dataset(values.data)
    if values.validation_fraction:
        data = data.hold_out(values.validation_fraction)
    _import_tensorflow()
    from tfmiracle.studies.task import task_of
    from tfmiracle.training.compression import compress

    built_in = values.model in _architectures()
    trains = recipe.warmup_steps or recipe.train_steps or recipe.finetune_steps
    if built_in and not trains:
        raise flags.Error(
            f"--model={values.model} starts from random weights, and the recipe trains "
            "none: give a .keras file of a trained network, or --train_steps"
        )
    net = _network(values.model, data, values.dtype_policy, recipe.seed)
    task = task_of(net, data, net.loss)
    _say(task.done)
    data = task.data
    result = compress(
        net,
        (data.x_train, data.y_train),
        values.target,
        values.output,
        recipe,
        rules=rules_of(values),
        metrics=task.metrics(),
        validation_data=(data.x_test, data.y_test),
        workdir=values.workdir,
        keep_posterior=values.keep_posterior,
        architecture=values.architecture,
        record=values.record,
        overwrite=values.overwrite,
    )
    from_scratch = built_in and not recipe.warmup_steps
    return {
        **compression(
            result.stages,
            result.file,
            result.file_bytes,
            values.output,
            result.seconds,
            "validation" if values.validation_fraction else "test",
            # There was no trained network.
            before="posterior_mean" if from_scratch else None,
        ),
        "history": result.history,
    }


def _say(done, sets=("train", "test")):
    """Says what was done to the arrays of the data sets that are used."""
    for text in done:
        if any(f"_{name}" in text.partition(":")[0] for name in sets):
            print(text, flush=True)


def recipe_of(values):
    """The recipe that flags say."""
    given = _options(values, Recipe)
    if "parameterization" in values:
        name = values.parameterization
        given["parameterization"] = _parameterization(values, name)
        _warn_of_idle(values, name)
    return Recipe(**given)


def _warn_of_idle(values, name):
    """Warns of options that were given, but are those of another parameterization."""
    used = {field.name for field in _fields(PARAMETERIZATIONS.find(name))}
    for other in PARAMETERIZATIONS.names():
        for field in _fields(PARAMETERIZATIONS.find(other)):
            if field.name not in used and values[field.name].present:
                warnings.warn(
                    f"--{field.name} is an option of {other} and does nothing: "
                    f"--parameterization is {name}",
                    stacklevel=2,
                )


def _parameterization(values, name):
    cls = PARAMETERIZATIONS.find(name, codable=True)
    return cls(**_options(values, cls))


def _options(values, cls):
    """The options of a class that were given; the class has the defaults of others."""
    names = [field.name for field in _fields(cls) if field.name in values]
    return {name: values[name].value for name in names if values[name].present}


def _fields(cls):
    """The options of a class that are flags: those that `option` made."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return [field for field in fields if "help" in field.metadata]


def _network(name, data, dtype_policy, seed):
    import keras

    from tfmiracle.studies.architectures import new_network

    architectures = _architectures()
    if name in architectures:
        net = new_network(
            name,
            data.image_shape,
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
                text = one_line(error)
                raise ValueError(f"{name} cannot be loaded: {text:.300}") from error
        if getattr(net, "loss", None) is None:
            raise ValueError(
                f"{name} is not compiled, so its loss is unknown; compile it with a "
                "loss before saving it"
            )
    else:
        raise ValueError(
            f"there is no model {name!r}: use {', '.join(architectures)} or the path "
            "of a .keras file"
        )
    return net


def _architectures():
    from tfmiracle.studies.architectures import ARCHITECTURES

    return ARCHITECTURES


def rules_of(values):
    """The rules that flags say."""
    rules = {}
    for item in values.rules:
        pattern, separator, treatment = item.rpartition(":")
        if not separator:
            raise ValueError(
                f"--rules has {item!r}; write PATTERN:TREATMENT, as in "
                "dense1/kernel:hash=64"
            )
        Treatment.parse(treatment)
        rules[pattern] = treatment
    return rules


# study


def _define_study(values):
    string, floating = _definers(values)
    string("data", None, _DATA_HELP)
    string("workdir", None, "Folder of the study; started again, it goes on.")
    string("model", "lenet5", f"{_BUILT_IN}.")
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
    check_folder(values.workdir)
    load_dataset(values.data)  # errors should come before TensorFlow does
    _import_tensorflow()
    from tfmiracle.studies.study import run_study

    return run_study(study_of(values), values.jobs, imports=values["import"].value)


def study_of(values):
    """The study that flags say."""
    from tfmiracle.studies.study import Study

    return Study(
        workdir=values.workdir,
        data=values.data,
        recipe=recipe_of(values),
        parameterizations=tuple(
            _parameterization(values, name) for name in values.parameterizations
        ),
        block_sizes=tuple(_integers("block_sizes", values.block_sizes)),
        seeds=tuple(_integers("seeds", values.seeds)),
        model=values.model,
        rules=rules_of(values),
        mean_var_train_steps=values.mean_var_train_steps,
        dtype_policy=values.dtype_policy or "float32",
        scale=values.scale,
        name=pathlib.Path(values.data).stem,
    )


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
    if values.strategy == "kl" and not values.posterior:
        raise flags.Error(
            "--posterior is missing: --strategy=kl ranks weights by it. `compress "
            "--keep_posterior` writes it"
        )
    file = MiracleFile.read(path, values.max_weights or "auto")
    posterior = values.posterior and CodedPosterior.read(values.posterior)
    pruning_order(file, values.strategy, posterior)  # errors come before TensorFlow
    data = load_dataset(values.data)

    _import_tensorflow()
    from tfmiracle.hosts.loading import set_weights

    net, task = _decoded(file, data)
    seeds = range(values.seeds if values.strategy == "uniform" else 1)
    found = []
    for seed in seeds:
        for pruned in pruned_networks(
            file, values.strategy, fractions, posterior, seed
        ):
            set_weights(net, list(pruned.weights.values()))
            found.append(task.judge(net))
    means = {
        name: [_short(mean) for mean in _by_fraction(found, name, seeds).mean(0)]
        for name in found[0]
    }
    errors = [None] * len(fractions)
    if len(seeds) > 1:
        scores = _by_fraction(found, next(iter(means)), seeds)
        errors = [_short(e) for e in scores.std(0, ddof=1) / len(seeds) ** 0.5]
    return {
        "strategy": values.strategy,
        "fractions": fractions,
        "accuracy": None,
        **means,
        "standard_error": errors,
        "seeds": len(seeds),
        "examples": len(data.y_test),
    }


def _short(number):
    return float(f"{number:.6g}")


def _by_fraction(found, name, seeds):
    return np.reshape([judged[name] for judged in found], (len(seeds), -1))


def _show_prune(r):
    name = "accuracy" if r["accuracy"] else "mean_squared_error"
    form = "{:.2%}" if r["accuracy"] else "{:.4g}"
    return "\n".join(
        f"{fraction:7.1%} pruned: {name.replace('_', ' ')} {form.format(score)}"
        + ("" if error is None else f" ± {form.format(error)}")
        for fraction, score, error in zip(
            r["fractions"], r[name], r["standard_error"], strict=True
        )
    )


# evaluate, info, decode, export


def _define_evaluate(values):
    _definers(values)[0]("data", None, _DATA_HELP)


def _evaluate(values, path):
    if not values.data:
        raise flags.Error("--data is missing")
    file = MiracleFile.read(path, values.max_weights or "auto")
    data = load_dataset(values.data)

    _import_tensorflow()
    net, task = _decoded(file, data)
    judged = task.judge(net)
    accuracy = judged.pop("accuracy", None)
    return {
        "error": None if accuracy is None else round(1 - accuracy, 6),
        **{name: _short(value) for name, value in judged.items()},
        "examples": len(data.y_test),
        **sizes(file, os.path.getsize(path)),
    }


def _decoded(file, data):
    """The network of a file, and its task on a data set."""
    from tfmiracle.hosts.loading import to_network
    from tfmiracle.studies.task import task_of

    net = to_network(decode(file))
    task = task_of(net, data)
    _say(task.done, ["test"])
    return net, task


def _show_evaluate(r):
    if r["error"] is None:
        error = (
            f"mean squared error {r['mean_squared_error']:g}, "
            f"mean absolute error {r['mean_absolute_error']:g}"
        )
    else:
        error = f"error {r['error']:.2%}"
    return f"{error} of {r['examples']:,}\n{show_sizes(r)}"


def _info(values, path):
    file = MiracleFile.read(path, values.max_weights or "auto")
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
        **sizes(file, size),
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
    # A stranger's pattern could move the cursor.
    fitting = [p for p in patterns if p.isprintable() and match_path(name, p)]
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
    parts = [show_sizes(r), table]
    parts += [json.dumps(r["metadata"])] if r["metadata"] else []
    return "\n\n".join(parts)


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
    weights = decode(path, values.max_weights or "auto").weights
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
        raise ValueError(
            f"--output is {str(output)!r}; Keras wants a name that ends in {suffix}"
        )
    if values.format == "saved_model" and output.is_dir():
        if not values.overwrite:
            raise FileExistsError(f"{output} exists; choose another or --overwrite it")
        if not (output / "saved_model.pb").is_file():
            raise FileExistsError(f"{output} is no SavedModel; it is not overwritten")
    else:
        check_output(output, values.overwrite)

    _import_tensorflow()
    from tfmiracle.hosts.loading import load

    model = load(path, max_weights=values.max_weights or "auto")
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
        lambda r: show_compression({**r, "evaluated_on": f"{r['evaluated_on']} set"}),
        keeps_state=True,
    ),
    "study": Command(
        "Run a grid of parameterizations, block sizes and seeds, resuming it.",
        None,
        _define_study,
        _study,
        lambda r: f"{r['done']} of {r['total']} runs are done",
        keeps_state=True,
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
        _show_evaluate,
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
