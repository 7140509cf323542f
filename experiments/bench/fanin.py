"""How many learners one process of the syncer serves: processor time of a learner's step, and of idle ones.

The syncer is a real process on one core: gRPC, protocol, merges and disk. Learners, on the other cores, step
at a given rate, send real reports and offers and take updates, by `raw_learners`.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import tempfile
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import grpc

from ddiloco.protocol.events import StepReported
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.event_messages import from_learner, up_header
from experiments.bench.measuring import another_process, receive_from, row
from experiments.bench.raw_learners import RawEcho, RawLearner, play
from experiments.bench.syncer_processes import PlayedTraffic, answer, asked, assembly_of, pin, serve

STEPS = 1 << 20  # of a run, which none reaches


def run(
    quick: bool = False, learners: int = 1000, hosts: int = 1, fragments: int = 24, rate: float = 0.5
) -> list[dict]:
    """Measures fragments of 4 kB, one due at each step.

    Args:
      quick: 8 learners, for a second.
      learners, hosts: how many there are, and of how many hosts each is.
      fragments: P.
      rate: steps a second of each learner.

    Returns:
      A row in learners' steps a second of the syncer's core, at all of it; `reference` and `limit` a server
      that sends the same messages back to as many. `kept_up`: updates that learners got over their steps;
      `core`: the share of it that was used; `late_s`: by how much learners' own steps were late at most. And
      of the process with all learners idle before the first step: `threads`, `idle_mb`.
    """
    if quick:
        learners, rate = 8, 4.0
    seconds, warm_up = (1.0, 2.0) if quick else (15.0, 10.0 + learners / 100)
    core = min(os.sched_getaffinity(0))
    played = {"learners": learners, "fragments": fragments, "hosts": hosts, "preset": "decoupled"}
    traffic = PlayedTraffic(1, 1, "f32", "f32", 2, STEPS, core, **played)
    timing = (1 / rate, warm_up, seconds)
    with (
        tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder,
        another_process(serve, traffic, pathlib.Path(folder) / "syncer") as syncer,
    ):
        steps, spent, threads, size, updates, late = _play(syncer, RawLearner, traffic, timing)
    with another_process(_echo, traffic) as echo:
        echoed = _play(echo, RawEcho, traffic, timing)
    speed, limit = steps / spent, echoed[0] / echoed[1]
    more = {"core": spent / seconds, "kept_up": updates / steps, "late_s": late}
    more |= {"echo_core": echoed[1] / seconds, "threads": threads, "idle_mb": size / 1e6}
    name = f"fanin M={learners} hosts={hosts} P={fragments}"
    return [row(name, speed, limit, limit, "steps/s", **more)]


def _play(
    server: Connection, kind: type, traffic: PlayedTraffic, timing: tuple[float, float, float]
) -> tuple[int, float, int, int, int, float]:
    """Steps, processor seconds of the server, its threads and bytes, updates, and delay of the learners."""
    address = receive_from(server)
    with another_process(_learners, kind, traffic, address, timing) as learners:
        assert receive_from(learners) == "connected"
        process, _ = asked(server)
        status = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
        fields = {name: rest for name, _, rest in (line.partition(":") for line in status)}
        threads, size = int(fields["Threads"]), 1024 * int(fields["VmRSS"].split()[0])
        assert receive_from(learners) == "warm"
        begun = sum(asked(server)[1].values())
        assert receive_from(learners) == "over"
        spent = sum(asked(server)[1].values()) - begun
        steps, updates, late = receive_from(learners)
    return steps, spent, threads, size, updates, late


def _learners(
    pipe: Connection, kind: type, traffic: PlayedTraffic, address: str, timing: tuple[float, float, float]
) -> None:
    """All learners, in one thread."""
    pin(traffic, merges=False)
    host, _, port = address.rpartition(":")
    assembly = assembly_of(traffic)
    e, terms = assembly.experiment, terms_of(assembly.experiment, assembly.layout)

    def learner(number: int) -> RawLearner | RawEcho:
        if kind is RawEcho:
            return RawEcho((host, int(port)), _sizes(traffic), traffic.hosts)
        return RawLearner(number, (host, int(port)), traffic.hosts, terms, e.sync, e.train.steps)

    pipe.send(play(pipe, list(map(learner, range(traffic.learners))), *timing))


def _sizes(traffic: PlayedTraffic) -> tuple[int, int, int]:
    """Bytes of a learner's report, and of the header and payload of a host's offer."""
    bases = (FragmentCounters(1000, -1000, -1000),) * traffic.fragments
    earlier = Report(1000, 1, 1000, bases, True, (0,), 1000, 1000)
    report = Report(1000, 1, 1001, (*bases[1:], FragmentCounters(1001, -1000, -1000)), True, (0,), 1001, 1001)
    contribution = Contribution(1000, 1, 1, 1000, 1000, 24, 24)
    size = traffic.fragment_bytes // traffic.hosts
    header = up_header(RoundId(1000, 1), contribution, size)
    return from_learner(StepReported(report), earlier).ByteSize(), header.ByteSize(), size


def _echo(pipe: Connection, traffic: PlayedTraffic) -> None:
    """A server that sends back each message of each call."""
    pin(traffic, merges=True)

    async def echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(echo)

    async def run() -> None:
        server = grpc.aio.server(handlers=[Handler()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(f"127.0.0.1:{port}")
        answer(pipe)
        await server.wait_for_termination()

    asyncio.run(run())
