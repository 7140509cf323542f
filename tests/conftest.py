"""Tests see eight simulated CPU devices, compile quickly rather than well, and share compiled programs."""

import os

import hypothesis

# How long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from ddiloco.training import platform  # noqa: E402
from tests import workbench  # noqa: E402

platform.prepare(cache=False)  # while tests are collected, since it must be before the first array


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return workbench.data_folder(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def compiled_programs_are_kept(tmp_path_factory):
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def one_device():
    with workbench.devices(1):
        yield
