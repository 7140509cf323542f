"""The layers of docs/architecture.md: who may import whom, read off every module's imports."""

import ast
import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "ddiloco"
MODULES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "experiments").rglob("*.py"))]
KNOWN = frozenset(MODULES)
MAX_LINES = 800
EMPTY_WORDS = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}

# Every folder imports from those before it only.
RANKS = (
    "ddiloco/config",
    "ddiloco/protocol",
    "ddiloco/schema",
    "ddiloco/arrays",
    "ddiloco/outer",
    "ddiloco/goodput",
    "ddiloco/telemetry",
    "ddiloco/models",
    "ddiloco/data",
    "ddiloco/training",
    "ddiloco/tasks",
    "ddiloco/dashboard",
    "ddiloco/settings",
    "ddiloco/storage",
    "ddiloco/weights",
    "ddiloco/storage/tape",
    "ddiloco/workers",
    "ddiloco/local",
    "ddiloco/remote",
    "ddiloco/remote/wire",
    "ddiloco/remote/learner",
    "ddiloco/remote/syncer",
    "ddiloco/virtual",
    "ddiloco/baselines",
    "ddiloco/run",
    "ddiloco/launch",
    "ddiloco",
    "experiments/examples",
    "experiments/cli",
    "experiments/studies/goodput",
    "experiments/studies/replay",
    "experiments/studies/planning",
    "experiments/studies/schedules",
    "experiments/studies/chaos",
    "experiments/studies/compiling",
    "experiments/studies",
    "experiments/studies/scaling",
    "experiments/bench",
    "experiments",
)
APART = (
    {"ddiloco/remote/learner", "ddiloco/remote/syncer"},
    {"ddiloco/local", "ddiloco/remote/learner"},
    {"ddiloco/local", "ddiloco/remote/syncer"},
    {"ddiloco/local", "ddiloco/virtual"},
    {"ddiloco/remote/syncer", "ddiloco/virtual"},
    {"ddiloco/remote/learner", "ddiloco/virtual"},
    {"ddiloco/launch", "ddiloco/run"},
)


def folder(path):
    """Of a module: its folder, or the module itself where it stands alone at the top of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "ddiloco/config" if parts == ("ddiloco", "config") else "/".join(parts[:-1])


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path):
    """Every module that the file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import in line {node.lineno}"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@functools.cache
def inner_imports(path):
    """The modules of this repository that the file imports."""
    files = (ROOT / (name.replace(".", "/") + ".py") for name in imports_of(path))
    return {file for file in files if file in KNOWN}


def case(path):
    return str(path.relative_to(ROOT))


def test_every_folder_has_a_rank():
    assert {folder(path) for path in MODULES} == set(RANKS)


def test_imports_point_one_way():
    late = [
        f"{case(path)} imports {case(other)}, which is above it"
        for path in MODULES
        for other in inner_imports(path)
        if RANKS.index(folder(other)) > RANKS.index(folder(path))
    ]
    assert not late, "\n".join(late)


def test_what_stands_apart_stays_apart():
    met = [
        f"{case(path)} imports {case(other)}"
        for path in MODULES
        for other in inner_imports(path)
        if {folder(path), folder(other)} in APART
    ]
    assert not met, "\n".join(met)


def test_the_protocol_is_pure():
    """It imports the standard library only, reads no clock and starts no thread."""
    forbidden = {"time", "threading", "asyncio", "socket", "queue", "random", "os", "concurrent"}
    allowed = (set(sys.stdlib_module_names) - forbidden) | {"ddiloco"}
    for path in PACKAGE.glob("protocol/*.py"):
        for name in imports_of(path):
            assert name.split(".")[0] in allowed, f"{case(path)} imports {name}"
            assert not name.startswith("ddiloco") or name.startswith("ddiloco.protocol"), name


def test_the_package_reads_no_flags_and_knows_no_program():
    for path in MODULES:
        if path.is_relative_to(PACKAGE):
            tops = {name.split(".")[0] for name in imports_of(path)}
            assert tops.isdisjoint({"experiments", "configs", "tests", "ml_collections"}), case(path)
            flags = [name for name in imports_of(path) if name.startswith(("absl.flags", "absl.app"))]
            assert not flags, case(path)


def test_a_module_has_a_name_a_purpose_and_a_bound():
    for path in MODULES:
        assert path.stem not in EMPTY_WORDS, case(path)
        assert path.read_text().count("\n") <= MAX_LINES, case(path)
        bare = path.name in ("learner.py", "syncer.py") and path.is_relative_to(PACKAGE)
        assert not bare or folder(path) == "ddiloco/protocol", f"{case(path)}: which of them?"
        told = ast.get_docstring(tree(path))
        assert told, f"{case(path)}: a module's first line says what it holds"
        assert told.splitlines()[0].endswith((".", "?", ":")) or "\n\n" not in told, case(path)
