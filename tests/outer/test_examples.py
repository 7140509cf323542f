"""Every example in a docstring of `ddiloco.outer` prints what stands below it."""

import doctest
import importlib
import pkgutil

import pytest

from ddiloco import outer

MODULES = [file.name for file in pkgutil.iter_modules(outer.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    module = importlib.import_module(f"{outer.__name__}.{name}")
    failed, _ = doctest.testmod(module)
    assert not failed
