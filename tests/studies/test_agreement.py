"""Cosines between learners, from what runs have recorded of their rounds."""

import json
import math

import pytest

from experiments.studies import agreement
from experiments.studies.agreement import ALL

RECORDED = {  # by run: rounds, each with its step, quorum, and cosines of all tensors, of "mlp" and of "head"
    "M=4,-H=6/seed=0": [(6, 4, 0.2, 0.1, 0.6), (12, 4, 0.4, 0.3, None), (13, 1, 1.0, 1.0, 1.0)],
    "M=4,-H=6/seed=1": [(6, 4, 0.6, 0.5, 0.8)],
    "M=2/seed=0": [(6, 2, 0.5, 0.5, None)],
    "M=2/seed=0/previous/1": [(6, 2, 0.9, 0.9, None)],
}


@pytest.fixture
def folder(tmp_path):
    for run, rounds in RECORDED.items():
        (tmp_path / run).mkdir(parents=True)
        lines = []
        for step, quorum, cosine, mlp, head in rounds:
            line = {"step": step, "quorum": quorum, "cosine": cosine, "cosine/mlp": mlp}
            lines.append(json.dumps(line if head is None else {**line, "cosine/head": head}) + "\n")
        (tmp_path / run / "rounds.jsonl").write_text("".join(lines))
    return tmp_path


def test_rounds_of_several_learners_are_told_by_run_kind_and_time(folder):
    frame = agreement.measured(folder)
    assert set(frame.label) == {"M=4, H=6", "M=2"}  # as before they named folders
    first = frame[(frame.label == "M=4, H=6") & (frame.seed == "seed=0")]
    assert first[first.kind == ALL].cosine.tolist() == [0.2, 0.4]  # a round of one learner says nothing
    assert first[first.kind == "head"].cosine.tolist() == [0.6]
    parts = first[first.kind == "mlp"].part.tolist()
    assert parts == sorted(parts) and 0 < parts[0] < parts[1] < 1


def test_the_cosine_to_the_merged_one_is_that_to_the_mean_of_vectors_of_one_length(folder):
    frame = agreement.measured(folder)
    # Two unit vectors with a cosine of 0.5 are 60 degrees apart, so 30 from their mean.
    assert frame[(frame.label == "M=2") & (frame.kind == ALL)].to_merged.item() == pytest.approx(
        math.cos(math.pi / 6)
    )


def test_the_table_has_means_and_spreads_over_seeds_and_leaves_out_what_is_not_there(folder):
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in agreement.table(agreement.measured(folder)).splitlines()
    ]
    assert rows[0] == ["cosine between learners", "M=2", "M=4, H=6"]
    assert [row[0] for row in rows[2:]] == [ALL, f"{ALL}, to the merged one", "head", "mlp"]
    assert rows[2][1:] == ["0.50", "0.45 ± 0.21"]
    assert rows[4][1:] == ["", "0.70 ± 0.14"]


def test_the_program_writes_table_and_picture_and_tells_a_folder_without_rounds(programs, folder, tmp_path):
    done = programs.run("agreement", f"--runs={folder}")
    assert done.returncode == 0, done.stderr
    assert "| M=4, H=6" in done.stdout
    assert (folder / "agreement.png").read_bytes().startswith(b"\x89PNG")
    assert {row["kind"] for row in json.loads((folder / "agreement.json").read_text())} == {
        ALL,
        "mlp",
        "head",
    }
    (tmp_path / "empty").mkdir()
    done = programs.run("agreement", f"--runs={tmp_path / 'empty'}")
    assert done.returncode == 2
    assert "runs: " in done.stderr and "no run below it has a round of several learners" in done.stderr
