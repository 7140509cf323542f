"""Figures that are read off a run's files: what it moved, and its merges, by hand."""

import json

import pandas as pd
import pytest

from experiments.studies import results


def test_means_and_deviations_are_over_the_runs_that_have_the_figure():
    runs = pd.DataFrame(
        {"rule": [*"ppqqs"], "loss": [2.0, 4.0, 0.1, 0.1, None], "rounds": [1, None, 3, 4, 5]}
    )
    means, deviations = results.over_seeds(runs, ["rule"], ["loss", "rounds"])
    assert means.index.tolist() == ["p", "q", "s"]
    assert [results.or_none(x) for x in means.loss] == [3.0, 0.1, None]
    assert [results.or_none(x) for x in deviations.loss] == [pytest.approx(2**0.5), 0.0, None]
    assert [results.or_none(x) for x in deviations.rounds] == [None, pytest.approx(0.5**0.5), None]


def test_a_figure_is_held_against_its_only_baseline():
    figures, own = [2.0, 3.0, None, 4.0, 5.0, 0.0], ["a", "b", "c", "d", "d", "e"]
    over = results.over_baseline(figures, own, ["a", "a", "a", "b", "d", "e"])
    assert [results.or_none(x) for x in over] == [1.0, 1.5, None, pytest.approx(4 / 3), None, None]


def summary(workdir, learners=4, **figures):
    """The summary of a run, whose settings are in the folder."""
    (workdir / "config.json").write_text(json.dumps({"sync": {"num_learners": learners}}))
    history = [{"step": step, "loss": 2.0} for step in (0, 4, 8)]
    return {"eval_history": history, "num_params": 1000, "step": 8, **figures}


def test_data_parallel_moves_what_a_ring_of_bfloat16_gradients_does(tmp_path):
    a_step = 4 * (2 * 3 / 4 * 2 * 1000)  # each of four learners passes on 3/4 of 2 bytes an element, twice
    for algorithm in ("data_parallel", "elastic_data_parallel"):
        total, by_score = results.bytes_moved(
            tmp_path, summary(tmp_path, algorithm=algorithm, bytes_sent=0, bytes_received=0)
        )
        assert total == 8 * a_step
        assert by_score == [0, 4 * a_step, 8 * a_step]


def test_the_wires_bytes_are_shared_out_by_merges_after_the_welcomes(tmp_path):
    lines = [
        {"step": 2, "quorum": 1, "live": 4},
        {"step": 4, "quorum": 3, "live": 4},
        {"step": 6, "quorum": 4, "live": 2},
    ]
    (tmp_path / "rounds.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "qu'
    )
    welcomes = 4 * 4 * 1000
    counted = summary(tmp_path, algorithm="decoupled", bytes_sent=800, bytes_received=welcomes + 1000)
    total, by_score = results.bytes_moved(tmp_path, counted)
    assert total == 800 + welcomes + 1000
    assert by_score == pytest.approx([welcomes, welcomes + 800 * 4 / 8 + 1000 * 8 / 10, total])


def test_a_run_that_has_left_nothing_has_moved_nothing_that_is_known(tmp_path):
    assert results.bytes_moved(tmp_path, {}) == (None, [])
    assert results.bytes_moved(tmp_path, {"algorithm": "data_parallel", "num_params": 9}) == (None, [])
    assert results.bytes_moved(tmp_path, summary(tmp_path, algorithm="data_parallel", num_params=None)) == (
        None,
        [None] * 3,
    )
    assert results.bytes_moved(tmp_path, summary(tmp_path, algorithm="decoupled")) == (None, [None] * 3)


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


def merged(workdir):
    return results.merge_figures(workdir, json.loads((workdir / "summary.json").read_text()))


def test_figures_of_a_runs_merges(workdir):
    ages = [1, 0, 2, 2, 2]  # 5; none; 5 and 6; 9 and 10; 7 and 8
    assert merged(workdir) == {
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
    assert merged(workdir)["late_age"] == 3.0


def test_a_killed_learners_steps_count_again(workdir):
    """It comes back to a clock before that of its offer."""
    steps = [(1, 1), (2, 2), (3, 3), (5, 2), (6, 3), (7, 4), (8, 5)]
    (workdir / "learners/0/steps.jsonl").write_text(
        "".join(json.dumps({"time": t, "step": clock}) + "\n" for t, clock in steps)
    )
    line = {"time": 8.5, "fragment": 0, "contributions": [[0, 2, 0, 3, 1, 10]], **PARTS}
    (workdir / "rounds.jsonl").write_text(json.dumps(line))
    assert merged(workdir)["age"] == 2.0


@pytest.mark.parametrize("name", ["rounds.jsonl", "config.json"])
def test_a_run_without_lines_of_merges_has_no_figures(name, workdir):
    (workdir / name).write_text("")
    assert merged(workdir) == {}
