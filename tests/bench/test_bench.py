"""The benchmarks run and write their JSON; what it says is for the full run."""

import json

import pytest

from tests.integration.programs import LIMIT

NAMES = ("protocol",)
SLOW = (
    "merge",
    "snapshot",
    "learner",
    "syncer",
    "hosts",
    "elastic",
    "fanin",
    "memory",
    "accelerator",
    "donation",
    "tape",
    "receipts",
    "guard",
)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_quick_benchmark_writes_its_rows(name, programs, tmp_path):
    path = tmp_path / "bench.json"
    bench = programs.start("bench", name, "--quick", f"--output={path}")
    done = programs.finish(bench, limit=5 * LIMIT)  # the slow ones take two minutes
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["rows"][0] == {key: value for key, value in result.items() if key != "rows"}
    for row in result["rows"]:
        assert row["name"] in done.stdout
        assert row["unit"]
        assert row["ratio"] == pytest.approx(row["measured"] / row["reference"], rel=1e-6)
        assert min(row["measured"], row["reference"], row["limit"]) > 0
    if name == "syncer":  # of each codec and S
        assert all(row["bytes_moved"] == row["bytes_planned"] for row in result["rows"])
    if name == "learner":
        assert result["name"] == "learner"
    if name == "merge":  # every rule with the same plain average
        rules = {"rda", "direct", "global_model_rda"}
        assert rules <= {row["name"] for row in result["rows"]}
        assert len({(row["reference"], row["limit"], row["unit"]) for row in result["rows"]}) == 1
