"""Manages a run that goes on: `python -m experiments.control --syncer=HOST:PORT status`.

    status       the global step, and which learners are there; of each shard of the syncer, if it has several
    drain 3      learner 3 ends after its step, with exit code 0, and is sent away when it comes again
    evict 3      learner 3 is dropped at once, as one whose process does not react; it may come back
    add [3]      learner 3, or the first that is not there, may come (again); prints its number
    snapshot     takes a snapshot now
    stop         ends the run for all, with everything saved

It shows the token that all share, or the operator's where learners have tokens of their own
(experiments.make_tokens); with TLS a certificate that is no learner's, such as the syncer's.
"""

from __future__ import annotations

import sys

from absl import flags

from experiments.cli import program, roles

_SYNCER = roles.define(flags.DEFINE_string, "syncer", "127.0.0.1:7070", "HOST:PORT of the syncer.")
_TIMEOUT = flags.DEFINE_float("timeout", 20.0, "Seconds for the syncer to answer.", lower_bound=0.1)
roles.define_security()


def main(argv) -> int:
    from ddiloco.remote.wire.management import VERBS, Command
    from experiments.cli.credentials import check_address

    verb, *rest = argv[1:] or [""]
    numbered = rest and rest[0].isdecimal() and len(rest) == 1
    if verb not in VERBS or not (numbered if verb in ("drain", "evict") else numbered or not rest):
        raise program.UsageError(
            "give one of: status, drain NUMBER, evict NUMBER, add [NUMBER], snapshot, stop"
        )
    if rest and verb not in ("drain", "evict", "add"):
        raise program.UsageError(f"{verb}: takes no number")
    address = check_address(_SYNCER.value, "syncer")
    answer = _answer(address, Command(verb, int(rest[0]) if rest else None))
    if isinstance(answer, str):
        print(f"error: syncer: {address}: {answer}", file=sys.stderr)
        return 1
    if not answer.done:
        print(f"error: {answer.line}", file=sys.stderr)
        return 1
    print(answer.facts["learner"] if verb == "add" else answer.line)
    shards = answer.facts.get("shards", []) if verb == "status" else []
    for number, where in enumerate(shards if len(shards) > 1 else ()):
        of_shard = _answer(where, Command("status")) if where else "it has not been there"
        line = of_shard if isinstance(of_shard, str) else of_shard.line
        print(f"shard {number}  {where or 'nowhere'}: {line}")
    return 0


def _answer(address: str, command):
    """What a process of the syncer answers, or, as a text, why it does not."""
    import grpc

    from ddiloco.remote.wire.management import ask
    from ddiloco.remote.wire.validation import WireError

    try:
        return ask(address, roles.security(), command, _TIMEOUT.value)
    except grpc.RpcError as error:
        return str(error.details() or error.code().name)
    except WireError as error:
        return str(error)


if __name__ == "__main__":
    program.run(main, positional=True)
