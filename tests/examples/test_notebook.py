"""The notebook runs as it stands, and was committed with what its cells gave."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.programs import ROOT

NOTEBOOK = ROOT / "experiments/examples/four_learners.ipynb"


def outputs(notebook):
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    return [output for cell in cells for output in cell["outputs"]]


def check(notebook):
    """All learners went on, the killed one too, and the page shows its death."""
    assert notebook["nbformat"] == 4
    printed = "".join("".join(output.get("text", ())) for output in outputs(notebook))
    assert "killed learner 2" in printed and "held-out loss 0.0" in printed
    (page,) = ("".join(o["data"]["text/html"]) for o in outputs(notebook) if "data" in o)
    assert page.startswith("<iframe srcdoc=") and "learner 2" in page and "is dead" not in page
    assert "&lt;svg" in page and "http://" not in page.replace("http://www.w3.org", "")


def test_it_is_committed_with_its_outputs():
    check(json.loads(NOTEBOOK.read_text()))
    assert NOTEBOOK.stat().st_size < 1e6


@pytest.mark.slow
def test_it_runs_as_it_stands(tmp_path):
    copy = tmp_path / NOTEBOOK.name
    copy.write_text(NOTEBOOK.read_text())
    command = [sys.executable, "-m", "tests.examples.notebook", copy]
    paths = {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, check=True, timeout=300)
    check(json.loads(copy.read_text()))
