"""The layers of docs/architecture.md: who may import whom, read off every module's imports."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "ddiloco"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
EMPTY_WORDS = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}

RANK = {
    "config": 0,
    "protocol": 0,
    "outer": 1,
    "models": 2,
    "data": 2,
    "training": 2,
    "goodput": 3,
    "observe": 3,
    "scaling": 3,
    "tasks": 3,
    "tape": 3,
    "virtual": 3,
    "chaos": 3,
    "runtime": 4,
}
APART = {("goodput", "runtime"), ("observe", "runtime"), ("chaos", "observe")}


def name_of(path):
    """The package of a module under ddiloco, or the module itself: `runtime`, `config`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path):
    """Every module that the file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import in line {node.lineno}"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def inner_imports(path):
    """The packages and modules of ddiloco, other than its own, that the file imports."""
    parts = [name.split(".") for name in imports_of(path)]
    return {part[1] for part in parts if part[0] == "ddiloco" and len(part) > 1} - {name_of(path)}


def case(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=case)
def test_imports_point_one_way(path):
    own = name_of(path)
    if own == "__init__":
        assert not inner_imports(path)
        return
    assert own in RANK, f"{own} has no place among the layers"
    for other in inner_imports(path):
        assert other in RANK, f"{other} has no place among the layers"
        assert RANK[other] <= RANK[own], f"{own} imports {other}, which is above it"
        assert (own, other) not in APART


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("protocol/*.py")), ids=case)
def test_the_protocol_imports_the_standard_library_only(path):
    for name in imports_of(path):
        top = name.split(".")[0]
        assert name.startswith("ddiloco.protocol") or top in sys.stdlib_module_names, name


def test_the_protocol_reads_no_clock_and_starts_no_thread():
    forbidden = {"time", "threading", "asyncio", "socket", "queue", "random", "os", "concurrent"}
    for path in PACKAGE.glob("protocol/*.py"):
        assert forbidden.isdisjoint(name.split(".")[0] for name in imports_of(path)), path


def test_the_settings_mechanism_imports_nothing_of_the_package():
    assert not inner_imports(PACKAGE / "config.py")


@pytest.mark.parametrize("path", MODULES, ids=case)
def test_the_package_reads_no_flags_and_knows_no_program(path):
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert tops.isdisjoint({"experiments", "configs", "tests", "ml_collections"})
    assert not {name for name in imports_of(path) if name.startswith(("absl.flags", "absl.app"))}


def test_packages_of_one_rank_do_not_import_each_other_in_a_circle():
    seen = {}
    for path in MODULES:
        seen.setdefault(name_of(path), set()).update(inner_imports(path))
    for own, others in seen.items():
        for other in others:
            assert own not in seen[other], f"{own} and {other} import each other"


@pytest.mark.parametrize("path", MODULES, ids=case)
def test_a_module_has_a_name_a_purpose_and_a_bound(path):
    assert path.stem not in EMPTY_WORDS
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    told = ast.get_docstring(ast.parse(text))
    assert told, "a module's first line says what it holds"
    assert told.splitlines()[0].endswith((".", "?", ":")) or "\n\n" not in told
