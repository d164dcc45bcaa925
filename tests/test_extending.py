"""An own coder, prior and parameterization, as `docs/extending.md` shows them."""

import dataclasses
import json
import re
from typing import ClassVar

import keras
import numpy as np
import pytest
from absl import flags
from support import ROOT, own_classes, run_python

import tfmiracle
from tfmiracle import cli
from tfmiracle.decoder import decode
from tfmiracle.options import option, options
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS, Parameterization

PAGE = (ROOT / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def page():
    """What the code of the page defines."""
    names = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block, "docs/extending.md", "exec"), names)
    return names


def net():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(2)]
    )


def data():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return x, x[:, :2] - x[:, 2:]


def compressed(path, **options):
    model = net()
    model.compile("adam", "mse")
    recipe = tfmiracle.Recipe(
        train_steps=30, finetune_steps=10, blocks_per_round=3, block_size=5, **options
    )
    return tfmiracle.compress(model, data(), path=path, recipe=recipe, verbose=0)


def test_an_own_coder(page, tmp_path, eager):
    coder = page["ScalarCoder"](weight_bits=3)
    result = compressed(tmp_path / "net.miracle", coder=coder)
    (group,) = result.file.groups
    assert group.code == page["ScalarCode"](0, 3)
    assert group.payload_bytes == -(-group.layout.num_blocks * 5 * 3 // 8)
    loaded = tfmiracle.load(tmp_path / "net.miracle")
    np.testing.assert_array_equal(loaded(data()[0]), result.model(data()[0]))
    # Among so few candidates each weight has the one of largest importance weight.
    rng = np.random.default_rng(1)
    loc, log_scale = rng.normal(size=(2, 5)), rng.uniform(-1, 0, size=(2, 5))
    encoded = coder.encode([3, 8], loc.astype("float32"), log_scale.astype("float32"))
    z = coder.code.candidates([3, 8], encoded.codes, 5)
    for k in range(8):
        other = coder.code.candidates([3, 8], np.full((2, 5), k), 5)
        best, weight = (x**2 - ((x - loc) / np.exp(log_scale)) ** 2 for x in (z, other))
        assert np.all(best >= weight - 1e-5)


def test_a_coder_sees_what_is_around_its_blocks(page, eager):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Around(page["ScalarCoder"]):
        num_weights: int = 0
        block_size: int = 0

        def lookahead(self, block_size):
            return 2

        def encode(self, blocks, loc, log_scale, before=None):
            seen.append((list(blocks), loc, before))
            count = len(blocks)
            return super().encode(blocks, loc[:count], log_scale[:count])

    model = tfmiracle.VariationalModel(net(), coder=Around(weight_bits=2), block_size=5)
    posterior = model.block_posterior  # of 44 weights in 9 blocks
    assert posterior.coder == Around(0, 2, 44, 5)
    assert posterior.coder.get_config() == {"weight_bits": 2}
    loc = posterior.standardized()[0].numpy()
    posterior.finalize_coding_scale()
    first = posterior.encode([0, 1, 2])
    posterior.fix([0, 1, 2], first.codes)
    posterior.encode([3])
    posterior.encode([7, 8])  # 6 is not coded
    for (blocks, rows, before), expected, code in zip(
        seen,
        ([0, 1, 2, 3, 4], [3, 4, 5], [7, 8]),
        (None, first.codes[2], None),
        strict=True,
    ):
        assert blocks == expected[: len(blocks)]
        np.testing.assert_array_equal(rows, loc[expected])
        np.testing.assert_array_equal(before, code)


def test_a_file_of_a_code_that_is_not_registered_says_so(page, tmp_path, eager):
    path = tmp_path / "net.miracle"
    compressed(path, coder=page["ScalarCoder"]())
    script = (
        "import sys, tfmiracle.decoder as d\n"
        "try: d.decode(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
    )
    found = run_python(script, path).stdout
    assert "scalar" in found and "registered" in found


def test_an_own_prior(page, tmp_path, eager):
    model = page["with_prior"](net())
    nu = np.float32(20) / np.float32(1000)
    np.testing.assert_allclose(model.prior.mean(), nu)
    model.compile("adam", "mse")
    path = tmp_path / "net.miracle"
    coding = tfmiracle.CompressionCallback(path, 100, 0, verbose=0)
    model.fit(*data(), verbose=0, callbacks=[coding])
    check_means(coding.file, nu)
    np.testing.assert_array_equal(tfmiracle.load(path)(data()[0]), model(data()[0]))


def check_means(file, nu):
    """Whether the weights of a file are nu + rho z."""
    (group,) = file.groups
    blocks = np.arange(group.layout.num_blocks)
    z = group.code.candidates(blocks, group.codes, group.layout.block_size)
    expected = z * group.scales[group.layout.scale_index_of_slot()] + nu
    found = decode(file).weights.values()
    for a, b in zip(found, group.layout.expand(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_compress_takes_an_own_prior(page, tmp_path, eager):
    path = tmp_path / "net.miracle"
    prior = page["ConstantMean"](2000)
    result = compressed(path, prior=prior, block_bits=8)
    assert result.file.groups[0].prior == prior
    check_means(result.file, np.float32(2))
    np.testing.assert_array_equal(
        tfmiracle.load(path)(data()[0]), result.model(data()[0])
    )
    settings = json.loads(json.dumps(tfmiracle.Recipe(prior=prior).settings()))
    assert tfmiracle.Recipe(prior=settings["prior"]).prior == prior
    assert tfmiracle.Recipe(prior="zero") == tfmiracle.Recipe()


def test_an_own_parameterization(page, tmp_path, eager):
    chosen = page["FixedRatio"](log_ratio=-2.0)
    path = tmp_path / "net.miracle"
    result = compressed(path, parameterization=chosen, block_bits=8)
    assert min(row["loss"] for row in result.curve[1:]) < result.curve[0]["loss"]
    np.testing.assert_array_equal(
        tfmiracle.load(path)(data()[0]), result.model(data()[0])
    )
    model = tfmiracle.VariationalModel(net(), "fixed_ratio")
    scale = model.posterior.stddev() / model.prior.stddev()
    np.testing.assert_allclose(scale, np.exp(-1.5), rtol=1e-5)
    config = json.loads(json.dumps(model.get_config()))
    copy = tfmiracle.VariationalModel.from_config(config)
    assert copy.block_posterior.parameterization == page["FixedRatio"]()
    layer = tfmiracle.MeanKLDense(3, parameterization=chosen)
    layer.build((None, 2))
    assert layer.block_posterior.parameterization == chosen


def test_bad_options_of_an_own_parameterization(page):
    with pytest.raises(ValueError, match="`log_ratio` must be a finite number"):
        page["FixedRatio"](log_ratio=np.inf)


@pytest.fixture
def parameterizations():
    with own_classes(PARAMETERIZATIONS):
        yield


def test_flags_of_own_parameterizations(parameterizations, capsys):
    """Also of plain classes, and of two that call their options alike."""

    @PARAMETERIZATIONS.register
    class Plain(Parameterization):
        identifier = "plain"
        posterior = None

    @PARAMETERIZATIONS.register
    @options
    class Other(Parameterization):
        identifier: ClassVar[str] = "other"
        beta: float = option(0.5, "another beta.")
        gain: float = option(2.0, "how much.")
        posterior = None

    assert cli.main(["compress", "--help"]) == 0
    help = " ".join(capsys.readouterr().out.split())
    assert "mean_var: initial weight of the KL of a block (nats) in the loss." in help
    assert "other: another beta." in help and "--gain: other: how much." in help
    values = flags.FlagValues()
    cli.COMMANDS["compress"].define(values)
    values(["tfmiracle", "--parameterization=other", "--gain=3"])
    assert cli.recipe_of(values).parameterization == Other(beta=0.5, gain=3.0)


MAIN = """
sys.path[:] = [folder for folder in sys.path if folder]  # as for a script elsewhere
from tfmiracle.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_module_on_the_command_line(page, tmp_path, eager, monkeypatch):
    path = tmp_path / "net.miracle"
    compressed(path, coder=page["ScalarCoder"]())
    coder, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "mine.py").write_text(coder + "print('mine')\n")
    (tmp_path / "other.py").write_text(OTHER)
    monkeypatch.chdir(tmp_path)
    without = ["keras", "tensorflow"]
    alone = run_python(MAIN, "info", path, without=without)
    assert alone.returncode == 2 and "'scalar', which is not registered" in alone.stderr
    modules = "--import=mine", "--import=other"
    process = run_python(MAIN, "info", path, "--json", *modules, without=without)
    assert process.stderr == "mine\n"
    assert json.loads(process.stdout)["code"] == "scalar"
    process = run_python(MAIN, "compress", "--help", *modules, without=without)
    assert "--gain" in process.stdout


OTHER = """
from tfmiracle.options import option, options
from tfmiracle.posteriors.parameterization import PARAMETERIZATIONS, Parameterization

@PARAMETERIZATIONS.register
@options
class Other(Parameterization):
    identifier = "other"
    gain: float = option(2.0, "how much.")
    posterior = None
"""
