"""Published formats of traces, on a few lines of our own, and what systems make of outages told by hand."""

import json

import pytest

from ddiloco.goodput.failures import FailureModel
from ddiloco.goodput.jobs import Interruption
from experiments.studies.goodput.systems import system_of
from experiments.studies.goodput.traces import DAY, Outages, goodput, read_outages, replaced

MODEL = FailureModel(
    chips_per_slice=8, detection_seconds=10.0, downscale_seconds=5.0, restart_seconds=30.0, step_seconds=4.0
)


def told(trace):
    return [(one.time, one.slice, one.returns_at) for one in trace.outages]


def test_faults_of_a_node_that_overlap_are_one_outage(tmp_path):
    rows = [("a", 1.0, "start"), ("b", 2.0, "start"), ("a", 2.5, "start"), ("a", 3.0, "end")]
    rows += [("a", 4.0, "end"), ("b", 10.0, "start")]
    events = [{"node_id": n, "event_time": t, "event_type": f"fault_{what}"} for n, t, what in rows]
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(events))
    trace = read_outages(path, servers=10)
    assert (trace.servers, trace.seconds) == (10, 10 * DAY)
    assert told(trace) == [(DAY, 0, 4 * DAY), (2 * DAY, 1, 10 * DAY + 1)]
    assert trace.available == pytest.approx(1 - 11 / 100)


def test_of_counted_instances_the_last_goes_first(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1, 3, 3, 2, 0, 3]}))
    trace = read_outages(path)
    assert (trace.servers, trace.seconds) == (3, 1800)
    assert told(trace) == [(0, 1, 300), (0, 2, 300), (900, 2, 1500), (1200, 0, 1500), (1200, 1, 1500)]


def test_a_node_that_is_added_takes_the_first_free_place(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text(
        "0,add,n1\n60000,add,n2\n90000,remove,n1\n120000,add,n3\n180000,remove,n2\n240000,add,n4\n"
    )
    trace = read_outages(path)
    assert (trace.servers, trace.seconds) == (2, 240)
    assert told(trace) == [(0, 1, 60), (90, 0, 120), (180, 1, 240)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("never_added.csv", "0,add,n1\n60000,remove,n2\n"),
        ("no_gap.json", '{"data": [1, 2]}'),
        ("no_times.json", '[{"node_id": "a"}]'),
        ("no_csv.csv", f"0,add,{'n' * 200_000}\n"),
        ("at_once.csv", "0,add,n1\n0,remove,n1\n"),
        ("no_number.json", '[{"node_id": "a", "event_time": NaN, "event_type": "fault_start"}]'),
        ("other.json", "[]"),
        ("no_json.json", "{"),
        ("no_time.csv", "soon,add,n1\n"),
        ("no_text.csv", b"\xff\xfe"),
    ],
)
def test_a_trace_that_lacks_something_is_told_by_its_name(name, text, tmp_path):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"{name}: cannot be used: "):
        read_outages(tmp_path / name)


def test_a_spare_takes_a_servers_place_long_before_the_repair_until_there_is_none():
    faults = [Interruption(100.0, 0, 900.0), Interruption(200.0, 1, 500.0)]
    slots = replaced(Outages(3, 1000.0, tuple(faults)), spares=1, seconds=50.0)
    assert slots.servers == 2
    assert told(slots) == [(100.0, 0, 150.0), (200.0, 1, 550.0)]  # the second waits for its own repair


def test_a_rigid_job_stands_still_until_all_are_back_and_starts_again():
    trace = Outages(4, 1000.0, (Interruption(100.0, 0, 300.0), Interruption(150.0, 1, 200.0)))
    share, uptime = goodput(system_of("data_parallel"), MODEL, trace, 0, 0.0)
    assert share == uptime == pytest.approx(1 - (300 + 30 + 2 - 100) / 1000)
    share, _ = goodput(system_of("data_parallel"), MODEL, trace, 2, 0.0)  # half of the chips are spares
    assert share == pytest.approx(0.5 * (1 - (150 - 100 + 10 + 30 + 2) / 1000), abs=0.03)


def test_an_elastic_job_goes_on_and_a_learner_troubles_no_other():
    trace = Outages(4, 1000.0, (Interruption(100.0, 0, 2000.0),))
    elastic, _ = goodput(system_of("elastic_data_parallel"), MODEL, trace, 0, 0.0)
    decoupled, uptime = goodput(system_of("decoupled:4"), MODEL, trace, 0, 0.0)
    assert decoupled == pytest.approx(1 - 0.25 * 0.9)
    assert decoupled - 0.02 < elastic < decoupled
    assert uptime == 1.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "faults.json",
            json.dumps([{"node_id": n, "event_time": 1.0, "event_type": "fault_start"} for n in "ab"]),
        ),
        ("counts.json", '{"metadata": {"gap_seconds": 300}, "data": [1, 2]}'),
        ("spot.csv", "0,add,n1\n1000,add,n2\n"),
    ],
)
def test_more_servers_may_have_been_watched_than_a_file_names_but_not_fewer(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert read_outages(tmp_path / name, servers=5).servers == 5
    with pytest.raises(ValueError, match=f"{name}: names 2 servers, more than 1"):
        read_outages(tmp_path / name, servers=1)
