"""JAX as programs set it up, with compiled programs kept between the tests of this folder."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ddiloco.runtime import platform
from tests.runtime import workbench

platform.prepare(cache=False)  # while tests are collected, since it must be before the first array


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return workbench.data_folder(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="package", autouse=True)
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
