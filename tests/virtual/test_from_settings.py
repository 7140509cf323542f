"""Fleets as experiments ask for them: sampled changes, runs without arrays, what cannot be."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.goodput.accounting import State
from ddiloco.goodput.jobs import JobChange
from ddiloco.run.job import with_steps
from ddiloco.run.recipes import assembly_of
from ddiloco.telemetry import records
from ddiloco.virtual import from_settings as virtual_fleet
from ddiloco.virtual.availability import Change, check_changes, write_trace
from ddiloco.virtual.from_settings import changes_of, check_fleet, chips_by_learner, horizon
from tests.refusals import refusal
from tests.virtual_runs import run_job, run_timed, run_virtual, virtual
from tests.workbench import experiment

FAILURES = {
    "availability": "failures",
    "num_chips": 64,
    "recovery_seconds": 3.0,
    "failures": {
        "mtbi_years": 64 * 15 / 31557600,  # of a chip: the fleet has an interruption every 15 s
        "chips_per_slice": 16,
        "return_seconds": 20.0,
        "restart_seconds": 5.0,
        "detection_seconds": 1.0,
        "downscale_seconds": 1.0,
        "upscale_seconds": 1.0,
        "upscale_wait_seconds": 2.0,
        "step_seconds": 1.0,
    },
}
SCAVENGING = {
    "availability": "spare_capacity",
    "recovery_seconds": 2.0,
    "spare_capacity": {"extra_learners": 2, "dwell_seconds": 10.0, "mean_size": 1.0},
}


@pytest.fixture
def made(data_dir):
    return lambda algorithm="decoupled", **groups: virtual(data_dir, algorithm, **groups)


def refused(call):
    return refusal(ConfigError, call)


# What cannot be.

VIRTUAL = {
    "num_chips": ({"num_chips": 1}, "is 1, but must be at least 2: one a learner"),
    "trace": ({"availability": "trace"}, "is None, but must name a file; availability is trace"),
}


@pytest.mark.parametrize("field", VIRTUAL)
def test_an_impossible_setting_is_told_in_one_line_by_its_name(field, made):
    values, told = VIRTUAL[field]
    assert refused(lambda: made(virtual=values)) == f"config.virtual.{field}: {told}"


@pytest.mark.parametrize("lives", ["steady", "failures"])
def test_a_trace_needs_lives_of_a_trace(lives, made):
    told = f"config.virtual.trace: is trace.csv, but needs availability to be trace; availability is {lives}"
    assert refused(lambda: made(virtual={"availability": lives, "trace": "trace.csv"})) == told


@pytest.mark.parametrize("field", ["step_seconds", "bandwidth"])
def test_a_tuple_has_an_entry_for_all_learners_or_for_each(field, made):
    told = f"config.virtual.{field}: has 3 entries, but must have 1, or 2, one a learner"
    assert refused(lambda: made(virtual={field: (0.5, 0.5, 0.5)})) == told
    for count in (1, 2):
        made(virtual={field: (0.5,) * count})
    if field != "bandwidth":
        told = f"config.virtual.{field}: has 0 entries, but must have 1, or 2, one a learner"
        assert refused(lambda: made(virtual={field: ()})) == told


def test_elastic_data_parallel_needs_virtual_time(data_dir):
    told = "config.driver: is local, but elastic_data_parallel needs virtual"
    assert refused(lambda: experiment(data_dir, "elastic_data_parallel")) == told


@pytest.mark.parametrize("extra", [2, 3])
def test_of_the_learners_one_at_least_must_stay(extra, made):
    spare = {"availability": "spare_capacity", "spare_capacity": {"extra_learners": extra}}
    told = (
        f"config.virtual.spare_capacity.extra_learners: is {extra}, "
        "but of config.sync.num_learners, 2, one at least must stay"
    )
    assert refused(lambda: check_fleet(made(virtual=spare))) == told


@pytest.mark.parametrize(
    ("algorithm", "chips", "told"),
    [
        ("decoupled", 511, "511 chips are 1 slices of 256, but 2 learners need at least one each"),
        (
            "elastic_data_parallel",
            255,
            "255 chips are 0 slices of 256, but 1 learner needs at least one each",
        ),
        ("data_parallel", 255, "255 chips are 0 slices of 256, but 1 learner needs at least one each"),
    ],
)
def test_where_slices_fail_every_job_needs_one(algorithm, chips, told, made):
    failing = {"availability": "failures", "num_chips": chips}
    assert (
        refused(lambda: check_fleet(made(algorithm, virtual=failing))) == f"config.virtual.num_chips: {told}"
    )


@pytest.mark.parametrize(("done_again", "fits"), [(1.0, True), (3.0, True), (0.0, True), (5.0, False)])
def test_a_step_that_is_done_again_takes_as_long_as_one(done_again, fits, made):
    failures = {**FAILURES["failures"], "step_seconds": done_again}
    e = made(virtual={**FAILURES, "failures": failures, "step_seconds": (1.0, 3.0)})
    told = "config.virtual.failures.step_seconds: is 5, but must be among config.virtual.step_seconds"
    if fits:
        check_fleet(e)
    else:
        assert refused(lambda: check_fleet(e)).startswith(told)


@pytest.mark.parametrize("algorithm", ["decoupled", "data_parallel"])
def test_chips_of_several_speeds_are_for_the_simulator_alone(algorithm, made):
    failures = {**FAILURES["failures"], "chip_speed_variation": 0.02}
    told = refused(lambda: check_fleet(made(algorithm, virtual={**FAILURES, "failures": failures})))
    assert told.startswith("config.virtual.failures.chip_speed_variation: is 0.02, but must be 0: ")


@pytest.mark.parametrize("lives", ["failures", "spare_capacity"])
def test_a_lone_learner_has_neither_the_fleets_failures_nor_its_chips(lives, made):
    assert chips_by_learner(made("lone_learner", virtual={"num_chips": 8})) == {0: 4}
    told = refused(lambda: check_fleet(made("lone_learner", virtual={"availability": lives})))
    assert told.startswith(f"config.virtual.availability: is {lives}, but must be steady for lone_learner")


@pytest.mark.parametrize(("algorithm", "field"), [("data_parallel", "jitter"), ("lone_learner", "loss")])
def test_a_job_without_a_syncer_has_no_messages_to_delay_or_lose(algorithm, field, made):
    check_fleet(made("decoupled", virtual={field: (0.0, 0.1)}))
    told = refused(lambda: check_fleet(made(algorithm, virtual={field: (0.0, 0.1)})))
    assert told.startswith(f"config.virtual.{field}: is (0.0, 0.1), but must be 0 for {algorithm}, ")


@pytest.mark.parametrize("algorithm", ["decoupled", "data_parallel"])
def test_no_step_waits_for_a_wall_clock_in_virtual_time(algorithm, made):
    told = refused(lambda: check_fleet(made(algorithm, train={"min_step_seconds": (0.0, 0.1)})))
    assert told.startswith(
        "config.train.min_step_seconds: is (0.0, 0.1), but must be () where driver is virtual: "
    )


def test_a_job_without_elasticity_has_no_use_for_spare_chips(made):
    check_fleet(made("elastic_data_parallel", virtual={"availability": "spare_capacity"}))
    told = refused(lambda: check_fleet(made("data_parallel", virtual={"availability": "spare_capacity"})))
    assert told.startswith(
        "config.virtual.availability: is spare_capacity, but data_parallel takes in no chips"
    )


@pytest.mark.parametrize("algorithm", ["data_parallel", "elastic_data_parallel"])
def test_a_trace_tells_nothing_of_a_baseline(algorithm, made, tmp_path):
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    told = refused(lambda: check_fleet(made(algorithm, virtual=trace)))
    assert told.startswith(f"config.virtual.trace: tells of learners, but {algorithm} has none; ")


def test_a_bad_trace_is_told_before_anything_is_compiled(made, tmp_path):
    (tmp_path / "availability.csv").write_text("time,learner,event\n1,7,fail\n")
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    told = refused(lambda: run_job(made(virtual=trace), tmp_path / "run"))
    place = f"config.virtual.trace: {tmp_path / 'availability.csv'}: line 2: change.learner: "
    assert told == place + "is 7, but must be below 2"
    assert not (tmp_path / "run").exists()


def test_a_token_budget_beyond_the_life_of_the_fleet_is_told(made, tmp_path):
    write_trace(tmp_path / "availability.csv", [Change(4.5, m, "fail") for m in range(2)])
    trace = {"availability": "trace", "trace": str(tmp_path / "availability.csv")}
    e = made(virtual=trace, train={"tokens": 1000})
    told = refused(lambda: with_steps(e, lambda: assembly_of(e)))
    assert told.startswith("config.train.tokens: is 1000, but the fleet of config.virtual comes to 512 in ")


# Lives.


def test_the_chips_of_a_fleet_are_divided_evenly_and_a_baseline_has_them_all(made):
    assert chips_by_learner(made(virtual={"num_chips": 9})) == {0: 4, 1: 4}
    assert chips_by_learner(made(virtual=FAILURES)) == {0: 32, 1: 32}
    assert chips_by_learner(made("data_parallel", virtual={"num_chips": 9})) == {0: 9}
    spare = {"availability": "spare_capacity", "spare_capacity": {"extra_learners": 1}}
    assert chips_by_learner(made("elastic_data_parallel", virtual=spare)) == {0: 2, 1: 1}
    spare["num_chips"] = 8
    assert chips_by_learner(made("elastic_data_parallel", virtual=spare)) == {0: 8, 1: 4}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("values", "learners"), [(FAILURES, 2), (SCAVENGING, 4)], ids=["failures", "spare"])
def test_drawn_lives_are_possible_and_a_function_of_the_seed(values, learners, seed, made):
    groups = {"virtual": values, "sync": {"num_learners": learners}}
    drawn = changes_of(made(seed=seed, **groups))
    assert [change.time for change in drawn] == sorted(change.time for change in drawn)
    check_changes([("drawn", change) for change in drawn], learners)
    assert drawn == changes_of(made(seed=seed, **groups))
    assert drawn != changes_of(made(seed=seed + 5, **groups))


def test_a_learner_dies_only_with_its_last_slice_and_starts_on_those_that_are_back(made, monkeypatch):
    told = [
        JobChange(0.0, 1, State.STEPPING, 32),
        JobChange(2.0, 1, State.DETECTING, 16),
        JobChange(3.0, 1, State.STEPPING, 16),
        JobChange(5.0, 1, State.FAILED, 0),
        JobChange(9.0, 1, State.RECONFIGURING, 16),
        JobChange(14.0, 1, State.STEPPING, 16),
        JobChange(20.0, 1, State.RECONFIGURING, 16),
        JobChange(21.0, 1, State.STEPPING, 32),
    ]
    monkeypatch.setattr(virtual_fleet, "fleet_changes", lambda experiment, until: told)
    assert changes_of(made(virtual=FAILURES)) == [
        Change(2.0, 1, "detect"),
        Change(3.0, 1, "step", 0.5),
        Change(5.0, 1, "fail"),
        Change(9.0, 1, "recover"),
        Change(9.0, 1, "reconfigure"),
        Change(14.0, 1, "step", 0.5),
        Change(20.0, 1, "reconfigure"),
        Change(21.0, 1, "step", 1.0),
    ]


def test_the_last_learners_come_and_go_with_the_spare_capacity(made, monkeypatch):
    monkeypatch.setattr(virtual_fleet, "draw_extra", lambda *drawn: [(0.0, 1), (4.0, 2), (6.0, 0)])
    e = made(virtual=SCAVENGING, sync={"num_learners": 4})
    assert changes_of(e) == [
        Change(0.0, 2, "join"),
        Change(4.0, 3, "join"),
        Change(6.0, 3, "leave"),
        Change(6.0, 2, "leave"),
    ]


def test_one_that_never_comes_is_not_there_from_the_start(made, monkeypatch):
    monkeypatch.setattr(virtual_fleet, "draw_extra", lambda *drawn: [(0.0, 0)])
    e = made(virtual=SCAVENGING, sync={"num_learners": 4})
    assert changes_of(e) == [Change(horizon(e), m, "join") for m in (2, 3)]
    run = run_timed(e)
    assert run.outcome.finished
    assert set(run.tokens) == {0, 1}
    assert run.states(2) == run.states(3) == []


# Runs without arrays.


@pytest.mark.parametrize(
    ("algorithm", "groups"),
    [
        ("decoupled", {"virtual": FAILURES}),
        ("decoupled", {"virtual": {"step_variation": 0.3, "latency": (0.2,), "loss": (0.1,)}}),
        pytest.param(
            "streaming",
            {"virtual": {"step_seconds": (1.0, 1.7), "bandwidth": (1e5,)}},
            marks=pytest.mark.slow,
        ),
        pytest.param("data_parallel", {"virtual": FAILURES}, marks=pytest.mark.slow),
    ],
    ids=["failures", "noise", "streaming", "data_parallel"],
)
def test_a_run_without_arrays_takes_the_same_time_and_merges_the_same(algorithm, groups, made):
    e = made(algorithm, **groups)
    timed, trained = run_timed(e), run_virtual(e)
    for kind in (records.StateChanged, records.Transferred):
        assert timed.of(kind) == trained.of(kind)
    assert timed.merges("step", "fragment", "version", "learners") == trained.merges(
        "step", "fragment", "version", "learners"
    )
    steps = [[(r.learner, r.step, r.time) for r in run.of(records.StepDone)] for run in (timed, trained)]
    assert steps[0] == steps[1]


def test_a_job_without_arrays_leaves_a_summary_without_losses(made, tmp_path):
    result = run_job(made(virtual={"arrays": False}), tmp_path)
    assert (result.summary["finished"], result.summary["step"]) == (True, 12)
    assert result.summary["eval_loss"] is None
    assert result.summary["params_sha256"] is None
    assert sum(result.summary["tokens"].values()) == 2 * 12 * 2 * 32
    assert not (tmp_path / "checkpoints").exists()
