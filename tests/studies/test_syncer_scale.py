"""The model of a syncer on paper: its closed forms by hand, and that they agree with what is played."""

import dataclasses

import pytest

from experiments.bench import syncer_processes
from experiments.bench.syncer_processes import PlayedTraffic
from experiments.studies.syncer_scale import RUNS, LargeRun, Rates, SyncerHost, needs, table

RUN = LargeRun("hundred", 2.4e9, step_seconds=2.0, up="f32", down="f32")  # fragments of 400 MB
HOST = SyncerHost(cores=10, network=1e9, disk=2e8, memory=1e10)
RATES = Rates(exchange=2e-9, merge=1e-9, disk=5e-9)
ROW = {
    "name": "f32/f32 merge",
    "fragment_bytes": 1e6,
    "syncer_exchange_ms_a_round": 16.0,
    "syncer_merge_ms_a_round": 8.0,
    "syncer_disk_ms_a_round": 5.0,
}


def test_a_step_moves_merges_and_writes_what_its_rounds_have():
    found = needs(RUN, RATES, HOST)
    assert (found.bytes_in, found.bytes_out, found.durable) == (3.2e9, 3.2e9, 0.8e9)
    assert found.processor == pytest.approx(6.4 + 3.2 + 2.0)
    assert found.memory == pytest.approx(3 * 9.6e9 + 3 * (3.2e9 + 0.4e9))
    assert found.hosts == {"cores": 1, "network": 2, "disk": 2, "memory": 4}
    assert found.parts == 4
    assert found.round_seconds == pytest.approx(6.4 + 6.4 / 8 + 3.2 / 10 + 4.0)
    assert found.fragments == 70, "11.52 s are 5.76 steps, where a round may take two"
    often = needs(dataclasses.replace(RUN, interval=12), RATES, HOST)
    assert (often.bytes_in, often.hosts["network"], often.memory) == (6.4e9, 4, found.memory)


def test_codecs_take_from_the_wire_and_add_to_memory_and_disk():
    plain, lossy = (
        needs(RUN, RATES, HOST),
        needs(dataclasses.replace(RUN, up="int4", down="int8"), RATES, HOST),
    )
    assert lossy.bytes_in / plain.bytes_in == pytest.approx(4.25 / 32)
    assert lossy.bytes_out / plain.bytes_out == pytest.approx(8.25 / 32)
    assert lossy.durable == 1.5 * plain.durable
    assert lossy.memory > plain.memory


def test_rates_are_those_of_a_row():
    assert Rates.of(ROW) == pytest.approx((2e-9, 1e-9, 5e-9))


def test_the_table_has_a_line_for_each_run_and_pair_of_codecs():
    lines = table(
        [ROW, {**ROW, "name": "f32/f32 disk"}, {**ROW, "name": "int4/int8 merge"}], SyncerHost()
    ).splitlines()
    assert len(lines) == 2 + len(RUNS) * 2
    assert {line.count("|") for line in lines} == {12}


@pytest.mark.parametrize(("up", "down"), [("f32", "f32"), ("int4", "int8")])
def test_what_is_played_is_what_the_model_has(up, down):
    traffic = PlayedTraffic(1, 64, up, down, overlap=0, steps=10, core=0, learners=3, fragments=5)
    assembly = syncer_processes.assembly_of(traffic)
    assert assembly.layout.bytes == (traffic.fragment_bytes,) * 5
    sent, received = traffic.planned(assembly)
    run = LargeRun("played", 5 * 64 * 1024, 1.0, up, down, learners=3, fragments=5, interval=5)
    found = needs(run, RATES, HOST)
    assert sent == 10 * found.bytes_in
    assert received == 10 * found.bytes_out + 3 * sum(assembly.layout.bytes)
    assert traffic.durable_bytes == found.durable
