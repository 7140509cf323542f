"""Measures the links between the machines of a run, and limits them for a rehearsal.

    python -m experiments.links --listen=0.0.0.0:7070         on the syncer's machine, before a run: answers
    python -m experiments.links --syncer=HOST:7070            on a learner's machine: measures
    python -m experiments.links --syncer=HOST:7070 --limit=200Mbit [--learner_id=3]
                                                              limits links of a running run

A running syncer answers too; what is measured then shares the links with the run, but not its limits. It
shows the credentials of `experiments.learner`.

A limit is of each learner's link, or of one, each way, for updates, offers and inner states, from now on and
after restarts; `--limit=none` ends it. It delays what the processes themselves send: no root is needed. It
takes the credentials of `experiments.control`.
"""

from __future__ import annotations

import json
import re
import sys

from absl import flags

from experiments.cli import exit_handling, program, roles

_LISTEN = flags.DEFINE_string("listen", None, "HOST:PORT at which to answer who measures, until Ctrl-C.")
_SYNCER = roles.define(flags.DEFINE_string, "syncer", None, "HOST:PORT of what answers.")
_LIMIT = flags.DEFINE_string("limit", None, "Rate each way, such as 200Mbit or 1.5Gbit; none: no limit.")
_LEARNER = flags.DEFINE_integer(
    "learner_id", None, "The learner with whose token to measure, or whose link to limit.", lower_bound=0
)
_MEBIBYTES = flags.DEFINE_integer("mib", 256, "MiB to send each way.", lower_bound=2, upper_bound=16384)
_CONNECTIONS = flags.DEFINE_integer(
    "connections", 1, "Connections at the same time (remote.connections).", lower_bound=1, upper_bound=16
)
_OUTPUT = flags.DEFINE_string("output", None, "Also write what was measured to this JSON file.")
roles.define_security()

_TIMEOUT = 20.0  # seconds for the first answer
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def main(_) -> int:
    from experiments.cli.credentials import check_address

    if _LISTEN.value:
        program.refuse_flags(["limit", "learner_id", "output"], "has no use with --listen")
        return _answer_probes(check_address(_LISTEN.value, "listen"))
    if not _SYNCER.value:
        raise program.UsageError("syncer: is missing; give --syncer=HOST:PORT, or --listen=HOST:PORT")
    address = check_address(_SYNCER.value, "syncer")
    if _LIMIT.value:
        program.refuse_flags(["output"], "has no use with --limit, which measures nothing")
        return _limit(address, _rate(_LIMIT.value))
    return _measure(address)


def _rate(text: str) -> float | None:
    """Bytes a second; raises UsageError."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?)bit", text)
    if found is None or not float(found[1]):
        raise program.UsageError(f"limit: is {text!r}, but must be a rate such as 200Mbit, or none")
    return float(found[1]) * _UNITS[found[2]] / 8


def _answer_probes(address: str) -> int:
    from ddiloco.remote.wire import validation as wire
    from ddiloco.remote.wire.calls import CallServer
    from ddiloco.remote.wire.measuring import AT_ONCE, Probes
    from ddiloco.remote.wire.security import check_reach

    security = roles.security()
    check_reach(address, security)
    refusal = "another join token is needed here"
    server = CallServer(security, refusal, AT_ONCE + 4, wire.options(_TIMEOUT))
    port = server.listen(address)
    stop, _ = exit_handling.stop_on_signals()
    server.serve(wire.MEASURE, {"Measure": Probes().answer})
    program.print_err(f"answers at {address.rpartition(':')[0]}:{port}; Ctrl-C ends it")
    stop.wait()
    server.stop(None)
    return 0


def _measure(address: str) -> int:
    import grpc

    from ddiloco.remote.wire.measuring import measure
    from ddiloco.remote.wire.validation import WireError, cause

    security, output = roles.security(), program.writable_file(_OUTPUT)
    if _LEARNER.value is not None:
        security = security.of(_LEARNER.value)
    try:
        link = measure(address, security, _MEBIBYTES.value << 20, _CONNECTIONS.value, _TIMEOUT)
    except (grpc.RpcError, WireError) as error:
        why = cause(error) if isinstance(error, grpc.RpcError) else error
        print(f"error: syncer: {address}: {why}", file=sys.stderr)
        return 1
    print(f"round trip  {1000 * link.round_trip:10.3f} ms")
    print(f"up          {8e-6 * link.up:10.1f} Mbit/s")
    print(f"down        {8e-6 * link.down:10.1f} Mbit/s")
    if output:
        found = {"address": address, "connections": _CONNECTIONS.value, "bytes": _MEBIBYTES.value << 20}
        rates = {"up_bytes_per_second": link.up, "down_bytes_per_second": link.down}
        output.write_text(
            json.dumps(found | {"round_trip_seconds": link.round_trip} | rates, indent=2) + "\n"
        )
    return 0


def _limit(address: str, rate: float | None) -> int:
    from ddiloco.remote.wire.management import Command

    command = Command("limit", _LEARNER.value, {"bytes_per_second": rate})
    answer = roles.manage(address, command, _TIMEOUT)
    if isinstance(answer, str) or not answer.done:
        why = f"syncer: {address}: {answer}" if isinstance(answer, str) else answer.line
        print(f"error: {why}", file=sys.stderr)
        return 1
    print(answer.line)
    return 0


if __name__ == "__main__":
    program.run(main)
