"""A platform that JAX does not find here is named in one line, wherever a program first asks for devices."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.integration.programs import ROOT

PROGRAM = """
from experiments.cli import program

def main(_):
    import jax
    {does}

program.run(main)
"""
ASKS = "jax.numpy.zeros(2)"
NO_GPU = not pathlib.Path("/proc/driver/nvidia").exists()


def run(does, **environment):
    command = [sys.executable, "-c", PROGRAM.format(does=does)]
    told = {name: value for name, value in os.environ.items() if not name.startswith("JAX_PLATFORM")}
    return subprocess.run(
        command, cwd=ROOT, env=told | environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("variable", "value", "does"),
    [
        ("JAX_PLATFORMS", "cdua", ASKS),
        pytest.param("JAX_PLATFORM_NAME", "cdua", "jax.devices()", marks=pytest.mark.slow),
        pytest.param(
            *("JAX_PLATFORMS", "cuda", ASKS),
            marks=[pytest.mark.slow, pytest.mark.skipif(not NO_GPU, reason="has a GPU")],
        ),
    ],
)
def test_a_platform_that_is_not_there_is_refused_by_the_name_of_its_variable(variable, value, does):
    done = run(does, **{variable: value})
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {variable}: is {value!r}, but the platforms that JAX finds here are: ")
    assert "cpu" in line.partition("here are: ")[2]
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("does", "told"),
    [
        pytest.param(
            'raise RuntimeError("not about devices")',
            "RuntimeError: not about devices\n",
            marks=pytest.mark.slow,
        ),
        ("jax.config.update('jax_platforms', 'cpu'); jax.devices('cdua')", "Unknown backend cdua"),
    ],
)
def test_an_error_of_the_program_itself_is_none_of_its_settings(does, told):
    done = run(does, JAX_PLATFORMS="cdua")
    assert done.returncode == 1 and told in done.stderr
