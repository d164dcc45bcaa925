"""The architecture: which folder may import which, and what needs which package."""

import ast
import pkgutil

import pytest
from support import PACKAGE, run_python

# Data flows down; a module imports only what is in its own line or above.
LINES = [
    ["environment", "files", "keras_internals", "options", "registry", "structures"],
    ["codec", "decoder", "miracle_file"],
    ["coding"],
    ["posteriors", "recipe"],
    ["hosts"],
    ["training"],
    ["datasets", "studies"],
    ["__main__", "cli"],
]
LINE_OF = {room: line for line, rooms in enumerate(LINES) for room in rooms}
MODULES = sorted(
    name.removeprefix("tfmiracle.")
    for _, name, _ in pkgutil.walk_packages([str(PACKAGE)], "tfmiracle.")
)


def imports(module):
    """Modules of the package that a module imports, wherever in it."""
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            first, _, rest = node.module.partition(".")
            if first == "tfmiracle":
                yield from [rest] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tfmiracle."):
                    yield alias.name.removeprefix("tfmiracle.")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_is_above_it(module):
    line = LINE_OF[module.partition(".")[0]]
    for other in imports(module):
        room = other.partition(".")[0]
        if room != "__version__":
            assert LINE_OF[room] <= line, f"{module} imports {other}"


def test_the_codec_needs_numpy_alone():
    names = [m for m in MODULES if LINE_OF[m.partition(".")[0]] == 1]
    assert "decoder" in names and "codec.version2" in names
    script = "".join(f"import tfmiracle.{name}\n" for name in names)
    script += "import tfmiracle; tfmiracle.decode, tfmiracle.MiracleFile\n"
    script += "print(sorted({m.partition('.')[0] for m in sys.modules}))\n"
    heavy = ["keras", "tensorflow", "tensorflow_probability", "scipy", "sklearn"]
    process = run_python(script, without=[*heavy, "absl", "filelock", "matplotlib"])
    assert process.returncode == 0, process.stderr


def test_the_command_line_starts_without_tensorflow():
    script = "import tfmiracle.cli\nassert 'TF_ENABLE_ONEDNN_OPTS' not in os.environ\n"
    script = "import os\nos.environ.pop('TF_ENABLE_ONEDNN_OPTS', None)\n" + script
    process = run_python(script, without=["keras", "tensorflow"])
    assert process.returncode == 0, process.stderr
