"""Figures of a run's merges, by hand."""

import json

import pytest

from experiments.studies import merges

PARTS = {"quorum_seconds": 1.0, "grace_seconds": 0.5, "sync_seconds": 0.25}
# By learner, the times and clocks of its steps. The second is set forward from 3 to 7.
STEPS = {"0": [(n, n) for n in range(1, 13)], "1": [(2, 1), (4, 2), (6, 3), (8, 7), (10, 8), (12, 9)]}
MERGES = [  # when, of which fragment, and of each learner the clock of its offer
    (5.5, 0, {0: 4, 1: 2}),
    (6.5, 1, {0: 4}),
    (10.5, 0, {0: 8, 1: 3}),
]


@pytest.fixture
def workdir(tmp_path):
    """What a finished run of two learners and twelve steps leaves."""
    rounds = [
        {"time": t, "fragment": p, "contributions": [[m, 1, 0, c, 4, 40] for m, c in given.items()], **PARTS}
        for t, p, given in MERGES
    ]
    summary = {"total_steps": 12, "merged_shares": {"0": 0.9, "1": 0.4}, "inner_steps": {"0": 12, "1": 6}}
    lines = {"rounds.jsonl": rounds}
    for m, steps in STEPS.items():
        lines[f"learners/{m}/steps.jsonl"] = [{"time": t, "step": clock} for t, clock in steps]
    for name, values in lines.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in values))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.json").write_text(json.dumps({"sync": {"interval": 4}}))
    return tmp_path


def test_figures_of_a_runs_merges(workdir):
    ages = [1, 0, 2, 2, 2]  # 5; none; 5 and 6; 9 and 10; 7 and 8
    assert merges.figures(workdir) == {
        "worst_share": 0.4,
        "real_steps": 18 / 24,
        "age": sum(ages) / 5,
        "late_age": 2.0,
        "round_seconds": 1.75,
        "largest_gap": 6 / 4,  # of fragment 1, from step 0 to 6, and from 6 to the end
    }


def test_one_offer_in_twenty_is_as_old_as_the_late_age_or_older(workdir):
    clocks = [5, 9, *[12] * 38]
    line = {"time": 12.5, "fragment": 0, "contributions": [[0, 1, 0, c, 4, 40] for c in clocks], **PARTS}
    (workdir / "rounds.jsonl").write_text(json.dumps(line))
    assert merges.figures(workdir)["late_age"] == 3.0


def test_a_killed_learners_steps_count_again(workdir):
    """It comes back to a clock before that of its offer."""
    steps = [(1, 1), (2, 2), (3, 3), (5, 2), (6, 3), (7, 4), (8, 5)]
    (workdir / "learners/0/steps.jsonl").write_text(
        "".join(json.dumps({"time": t, "step": clock}) + "\n" for t, clock in steps)
    )
    line = {"time": 8.5, "fragment": 0, "contributions": [[0, 2, 0, 3, 1, 10]], **PARTS}
    (workdir / "rounds.jsonl").write_text(json.dumps(line))
    assert merges.figures(workdir)["age"] == 2.0


def test_a_round_of_no_offers_is_no_merge(workdir):
    with (workdir / "rounds.jsonl").open("a") as rounds:
        rounds.write(json.dumps({"time": 1.5, "fragment": 2, "contributions": [], **PARTS}))
    assert merges.figures(workdir)["largest_gap"] == 6 / 4


@pytest.mark.parametrize("name", ["rounds.jsonl", "config.json", "summary.json"])
def test_a_run_without_lines_of_merges_has_no_figures(name, workdir):
    (workdir / name).write_text("")
    assert merges.figures(workdir) == {}
