"""Manages a run in progress: `python -m experiments.control --syncer=HOST:PORT status`.

    status       the global step, and which learners are there; of each shard of the syncer, if it has several
    drain 3      learner 3 ends after its step, with exit code 0, and is sent away when it comes again
    evict 3      learner 3 is dropped at once, as one whose process does not react; it may come back
    add [3]      learner 3, or the first that is not there, may come (again); prints its number
    set sync.interval=12 [sync.quorum=2 ...]
                 changes the timing from the next rounds on: interval, overlap, quorum, gamma, max_grace.
                 With --workdir=DIR in place of --syncer also in a run of threads
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
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of threads, to set its timing.")
_REASON = flags.DEFINE_string("reason", "operator", "Why the timing is set, for page and tape.")
roles.define_security()


def main(argv) -> int:
    from ddiloco.remote.wire.management import VERBS, Command

    verb, *rest = argv[1:] or [""]
    if verb == "set":
        command = Command(verb, settings=_timing(rest), reason=_REASON.value)
        return _set_in(_WORKDIR.value, command) if _WORKDIR.value else _send(command)
    program.refuse_flags(["workdir", "reason"], "is for set alone")
    numbered = rest and rest[0].isdecimal() and len(rest) == 1
    known = verb in VERBS and verb != "limit"  # which experiments.links orders
    if not known or not (numbered if verb in ("drain", "evict") else numbered or not rest):
        raise program.UsageError(
            "give one of: status, drain NUMBER, evict NUMBER, add [NUMBER], set SETTING=VALUE, snapshot, stop"
        )
    if rest and verb not in ("drain", "evict", "add"):
        raise program.UsageError(f"{verb}: takes no number")
    return _send(Command(verb, int(rest[0]) if rest else None))


def _timing(words) -> dict:
    """The settings in words such as sync.interval=12, by name; raises UsageError."""
    pairs = [word.partition("=") for word in words]
    known = {
        path.removeprefix("config.").removeprefix("sync."): program.parse_literal(v) for path, _, v in pairs
    }
    wrong = [word for word, (path, *_) in zip(words, pairs, strict=True) if "sync." not in path]
    if wrong or not known or any(not isinstance(v, int | float | None) for v in known.values()):
        raise program.UsageError(
            f"set: needs SETTING=NUMBER, such as sync.interval=12; has {' '.join(words)!r}"
        )
    return known


def _set_in(workdir: str, command) -> int:
    """Orders the timing in the folder of a run of threads."""
    import pathlib

    from ddiloco.settings.timing import timing_of
    from ddiloco.storage import durable, operator_orders
    from ddiloco.storage.run_mark import RunMarkError
    from experiments.studies.replay.recorded import experiment_of

    experiment, folder = experiment_of(workdir), pathlib.Path(workdir) / durable.FOLDER
    if experiment.driver != "local":
        how = "config.virtual.timings" if experiment.driver == "virtual" else "--syncer=HOST:PORT"
        raise program.UsageError(f"workdir: {workdir}: its driver is {experiment.driver}; give {how}")
    try:
        timing_of(experiment.sync, {**operator_orders.load(folder).timing, **command.settings})
        operator_orders.change(folder, lambda orders: orders.set_timing(command.settings, command.reason))
    except (OSError, RunMarkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"from now on {operator_orders.shown_timing(command.settings)}")
    return 0


def _send(command) -> int:
    """Sends the command to the syncer, and prints its answer."""
    from ddiloco.remote.wire.management import Command
    from experiments.cli.credentials import check_address

    verb, address = command.verb, check_address(_SYNCER.value, "syncer")
    answer = roles.manage(address, command, _TIMEOUT.value)
    if isinstance(answer, str):
        print(f"error: syncer: {address}: {answer}", file=sys.stderr)
        return 1
    if not answer.done:
        print(f"error: {answer.line}", file=sys.stderr)
        return 1
    print(answer.facts["learner"] if verb == "add" else answer.line)
    shards = answer.facts.get("shards", []) if verb == "status" else []
    for number, where in enumerate(shards if len(shards) > 1 else ()):
        of_shard = (
            roles.manage(where, Command("status"), _TIMEOUT.value) if where else "it has not been there"
        )
        line = of_shard if isinstance(of_shard, str) else of_shard.line
        print(f"shard {number}  {where or 'nowhere'}: {line}")
    return 0


if __name__ == "__main__":
    program.run(main, positional=True)
