"""Two machines without a shared disk: two folders that no role of the other reads, and real sockets."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.programs import ROOT


@pytest.mark.slow
def test_the_west_trains_with_a_token_and_an_address_alone(tmp_path):
    command = [sys.executable, "-m", "experiments.examples.two_machines", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "east/run/summary.json").read_text())
    assert summary["inner_steps"] == {"0": 120, "1": 120}
    assert "% of their work merged" in done.stdout
    west = {path.relative_to(tmp_path / "west").parts[0] for path in (tmp_path / "west").rglob("*")}
    assert west <= {"token", "learner"}
    for line in done.stdout.splitlines():
        if "--learner_id=1" in line:
            assert "/east" not in line
