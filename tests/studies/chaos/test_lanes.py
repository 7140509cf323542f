"""Lanes, gaps and recoveries of a run that was made up, whose answers are known."""

import json

import pytest

from experiments.studies.chaos import checks_after
from experiments.studies.chaos.lanes import (
    StateSpan,
    gaps_of,
    lane,
    recoveries,
    timelines,
)
from experiments.studies.chaos.run_files import Blow, read_trace
from experiments.studies.figures import draw_lanes

T0 = 1_000_000.0


class Made:
    """Files of a run of two learners that step every 0.5 s from T0 + 1 to T0 + 60, and are left there."""

    def __init__(self, folder):
        self.folder = folder
        self.faults, self.rounds = [], []
        self.steps = {0: {}, 1: {}}
        for target in ("syncer", "learner 0", "learner 1"):
            self.fault(0.0, "start", target, pid=1)
        for m in (0, 1):
            self.step(m, 1.0, 60.0)

    def fault(self, time, event, target, **more):
        self.faults.append({"time": T0 + time, "event": event, "target": target, **more})

    def step(self, learner, first, last, every=0.5):
        count = round((last - first) / every) + 1
        self.steps[learner] |= {first + i * every: 10 for i in range(count)}

    def no_step(self, learner, after, before):
        self.steps[learner] = {t: n for t, n in self.steps[learner].items() if not after < t < before}

    def restart(self, target, death, start):
        self.fault(death, "kill", target, pid=1)
        self.fault(
            death + 0.1, "end", target, pid=1, code=-9, **({"versions": [0]} if target == "syncer" else {})
        )
        self.fault(start, "start", target, pid=2)

    def round(self, time, *contributions):
        self.rounds.append({"time": T0 + time, "fragment": 0, "version": 1, "contributions": contributions})

    def trace(self):
        for m, steps in self.steps.items():
            folder = self.folder / "learners" / str(m)
            folder.mkdir(parents=True, exist_ok=True)
            lines = [
                {"time": T0 + time, "step": round(2 * time), "tokens": tokens}
                for time, tokens in sorted(steps.items())
            ]
            (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (self.folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in self.rounds))
        ordered = sorted(self.faults, key=lambda line: line["time"])
        (self.folder / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ordered))
        return read_trace(self.folder, self.folder / "faults.jsonl", 2)


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def told(spans):
    return [(span.state, span.start - T0, span.end - T0) for span in spans]


def test_a_killed_learner_is_dead_then_recovers_then_steps(made):
    made.restart("learner 0", 20.0, 22.0)
    made.no_step(0, 20.0, 30.0)
    made.round(35.0, [1, int((T0 + 0.5) * 1e6), 0, 1, 1, 1])
    made.round(36.0, [0, int((T0 + 23.0) * 1e6), 0, 1, 1, 1])
    trace = made.trace()
    assert told(lane(trace, "learner 0")) == [
        ("recovering", 0.0, 1.0),
        ("stepping", 1.0, 20.0),
        ("dead", 20.0, 22.0),
        ("recovering", 22.0, 30.0),
        ("stepping", 30.0, 60.0),
    ]
    (back,) = recoveries(trace)
    assert (back.target, back.first_step, back.first_contribution) == ("learner 0", 8.0, 14.0)
    lines = timelines(trace)
    assert lines.goodput(T0 + 60) == pytest.approx(1 - 10 / (2 * 59))
    assert lines.lost(T0 + 60)["failed"] == pytest.approx(2 / (2 * 59))
    assert lines.uptime(T0 + 60) == 1.0


def test_a_hang_is_a_hang_and_no_stall(made):
    made.fault(20.1, "hang", "learner 0", pid=1)
    made.fault(25.0, "resume", "learner 0", pid=1)
    made.no_step(0, 20.1, 25.1)
    trace = made.trace()
    assert trace.blows == [Blow(T0 + 20.1, "learner 0", "hang", T0 + 25.0)]
    assert [span.state for span in lane(trace, "learner 0")] == ["recovering", "stepping", "hung", "stepping"]
    assert StateSpan("hung", T0 + 20.1, T0 + 25.0) in lane(trace, "learner 0")
    assert max(gap.seconds for gap in gaps_of(trace, "learner 0")) == pytest.approx(0.6)


def test_the_syncer_merges_between_its_first_round_and_its_death(made):
    made.restart("syncer", 20.0, 21.0)
    made.round(10.0)
    made.round(26.0)
    trace = made.trace()
    assert told(lane(trace, "syncer")) == [
        ("recovering", 0.0, 10.0),
        ("merging", 10.0, 20.0),
        ("dead", 20.0, 21.0),
        ("recovering", 21.0, 26.0),
    ]
    assert [(b.target, b.first_step) for b in recoveries(trace)] == [("syncer", 5.0)]
    assert trace.durable == [(T0 + 20.1, [0])]


def test_the_report_tells_all_of_it_and_the_figure_is_drawn(made, tmp_path):
    made.fault(10.0, "storm", None)
    made.restart("learner 0", 20.0, 22.0)
    made.no_step(0, 20.0, 30.0)
    made.fault(40.0, "partition", "learner 1")
    made.fault(42.0, "heal", "learner 1")
    made.fault(45.0, "missed", "learner 1", fault="kill")
    made.round(35.0, [0, int((T0 + 0.5) * 1e6), 0, 30, 30, 300])
    made.fault(61.0, "end", "syncer", pid=1, code=0, versions=[1])
    trace = made.trace()
    report = checks_after.report(trace, loss=2.0, num_fragments=1)
    assert report["faults"] == {"kills of learners": 1, "partitions of learners": 1}
    assert report["missed"] == 1
    assert (report["tokens"], report["merged_tokens"]) == (10 * (119 + 100), 300)
    assert report["gaps"]["kill of a learner"]["stalls"] == 0
    assert report["recovery"]["a learner's first contribution"]["died_before"] == 1
    assert checks_after.problems(report) == []
    both = checks_after.compared(report, {**report, "loss": 1.9})
    assert both["loss_ratio"] == pytest.approx(2.0 / 1.9)
    assert "| loss against undisturbed | +5.26% |" in checks_after.table(both)
    assert json.loads(json.dumps(both, allow_nan=False)) == both
    draw_lanes(tmp_path / "chaos.png", trace)
    assert (tmp_path / "chaos.png").stat().st_size > 10_000


def test_what_must_not_be_is_among_the_problems(made):
    for m in (0, 1):
        made.restart(f"learner {m}", 20.0, 21.0)
        made.no_step(m, 20.0, 25.0)
    made.round(30.0)
    made.fault(55.0, "end", "learner 1", pid=2, code=1)
    made.fault(61.0, "end", "syncer", pid=1, code=0, versions=[0])
    problems = checks_after.problems(checks_after.report(made.trace(), None, 1))
    assert "fragment 0: was at version 1, and after a death at 0" in problems
    assert "learner 1 ended with exit code 1 by itself" in problems
    assert problems[-1] == "uptime is 91.53%: at times no learner stepped"
