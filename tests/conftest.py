"""Tests see eight simulated CPU devices, compile quickly rather than well, and keep what they compile.

Compiled programs and prepared data sets lie in build/tests, for all workers, for the processes that tests
start, and for the next run. Removing the folder costs time, nothing else.
"""

import gc
import importlib.metadata
import os
import pathlib
import signal
import time
from unittest import mock

import hypothesis

from tests.long import times

KEPT = pathlib.Path(__file__).parents[1] / "build" / "tests"
OLD = 14 * 24 * 3600  # seconds after which a program that is kept is thrown away

# How long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, max_examples=int(os.environ.get("EXAMPLES", times(40, 100)))
)
hypothesis.settings.load_profile("unhurried")

# What a shell runs in the background ignores it, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if tuple(int(n) for n in importlib.metadata.version("jaxlib").split(".")[:2]) < (0, 11):
    # They take two thirds of the time that is then left. Later ones end at once at a flag that they lack.
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
# Each once: a worker inherits them, and what is compiled is kept by the flags as they stand.
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *FLAGS]))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(KEPT / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["TFDS_DATA_DIR"] = str(KEPT / "tfds")

import pytest  # noqa: E402

from ddiloco.telemetry import monitor  # noqa: E402
from ddiloco.training import platform  # noqa: E402
from tests import workbench  # noqa: E402
from tests.integration.programs import Programs  # noqa: E402

platform.prepare()  # while tests are collected, since it must be before the first array


LONG = ("tests/integration/", "tests/launch/", "tests/bench/")  # they start processes
LONGEST = (
    "timing",
    "engines",
    "remote",
    "killed_local",
    "train",
    "hosts",
    "resume",
    "hostile",
    "killed_processes",
)


@pytest.hookimpl(trylast=True)  # once it is known which are left out
def pytest_collection_modifyitems(items):
    """Deals modules that start processes over the workers, so that none is left with a long one at the end.

    A worker begins with its part of the list, of which all have equal ones, in a row.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    names = [f"tests/integration/test_{name}.py" for name in LONGEST]
    modules, others = {name: [] for name in names}, []
    for item in items:
        name = item.nodeid.partition("::")[0]
        (modules.setdefault(name, []) if name.startswith(LONG) else others).append(item)
    dealt, long = [], [module for module in modules.values() if module]
    for worker in range(workers):
        part = (len(items) - len(dealt)) // (workers - worker)
        begins = [item for module in long[worker::workers] for item in module]
        more = max(0, part - len(begins))
        dealt += [*begins, *others[:more]]
        del others[:more]
    items[:] = [*dealt, *others]


def pytest_collection_finish(session):
    """Leaves what was imported out of garbage collections, which took a tenth of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_sessionstart(session):
    """Throws away what is old, before any worker begins."""
    if not hasattr(session.config, "workerinput"):
        for path in (KEPT / "jax").glob("*"):
            if path.is_file() and path.stat().st_mtime < time.time() - OLD:
                path.unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def without_loss_png():
    """Runs in the process that tests leave `loss.png` out, which takes longer than they do."""
    with mock.patch.object(monitor, "plot_loss"):
        yield


@pytest.fixture(scope="session")
def data_dir():
    return workbench.data_folder()


@pytest.fixture(scope="session")
def programs():
    """The programs, with the data and the compiled programs of all tests."""
    made = Programs(workbench.data_folder())
    yield made
    made.kill_all()


@pytest.fixture
def one_device():
    with workbench.devices(1):
        yield
