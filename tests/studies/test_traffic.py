"""What a run moved: closed forms for the ring, and bytes shared out by the merges for the wire."""

import json

import pytest

from experiments.studies import traffic


def summary(workdir, learners=4, **figures):
    """The summary of a run, whose settings are in the folder."""
    (workdir / "config.json").write_text(json.dumps({"sync": {"num_learners": learners}}))
    history = [{"step": step, "loss": 2.0} for step in (0, 4, 8)]
    return {"eval_history": history, "num_params": 1000, "step": 8, **figures}


def test_data_parallel_moves_what_a_ring_of_bfloat16_gradients_does(tmp_path):
    a_step = 4 * (2 * 3 / 4 * 2 * 1000)  # each of four learners passes on 3/4 of 2 bytes an element, twice
    for algorithm in ("data_parallel", "elastic_data_parallel"):
        total, by_score = traffic.moved(
            tmp_path, summary(tmp_path, algorithm=algorithm, bytes_sent=0, bytes_received=0)
        )
        assert total == 8 * a_step
        assert by_score == [0, 4 * a_step, 8 * a_step]


def test_one_learner_has_nobody_to_exchange_gradients_with(tmp_path):
    total, _ = traffic.moved(tmp_path, summary(tmp_path, algorithm="data_parallel", learners=1))
    assert total == 0


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
    total, by_score = traffic.moved(tmp_path, counted)
    assert total == 800 + welcomes + 1000
    assert by_score == pytest.approx([welcomes, welcomes + 800 * 4 / 8 + 1000 * 8 / 10, total])


def test_a_run_that_has_left_nothing_has_moved_nothing_that_is_known(tmp_path):
    assert traffic.moved(tmp_path, {}) == (None, [])
    assert traffic.moved(tmp_path, {"algorithm": "data_parallel", "num_params": 9}) == (None, [])
    assert traffic.moved(tmp_path, summary(tmp_path, algorithm="data_parallel", num_params=None)) == (
        None,
        [None] * 3,
    )
    assert traffic.moved(tmp_path, summary(tmp_path, algorithm="decoupled")) == (None, [None] * 3)


def test_without_rounds_all_but_the_welcomes_comes_at_a_time_unknown(tmp_path):
    counted = summary(tmp_path, algorithm="decoupled", bytes_sent=800, bytes_received=16_000)
    assert traffic.moved(tmp_path, counted) == (16_800, [16_000] * 3)
