"""The settings of the network and of the processes that use it."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting

HANDSHAKE = 20.0
"""Seconds that joining may take."""


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
    """How the processes of learners and syncer stay connected and are restarted."""

    hosts: tuple[int, ...] = setting(
        (),
        "by learner, processes that driver=remote starts for it, which share its mesh; (): one each",
        at_least=1,
    )
    syncer_shards: int = setting(
        1,
        "processes of the syncer, S; fragment p is merged by process p mod S",
        at_least=1,
        at_most=4096,
    )
    max_learners: int | None = setting(
        None,
        "learners that a run may have at most, up to twice sync.num_learners; None: no more than those",
        at_least=1,
    )
    host_timeout: float = setting(
        30.0,
        "seconds without a sign of one of a learner's hosts, or of a step of more than ten times the median, "
        "after which all of them end, to be started again",
        above=0.0,
    )
    keepalive: float = setting(
        20.0,
        "seconds without a sign of the other end until it is asked for one, and again to answer",
        above=0.0,
    )
    longest_backoff: float = setting(
        15.0, "seconds between two tries to reach the syncer, or to restart a process, at most", above=0.0
    )
    gather: float = setting(
        30.0,
        "seconds from the first learner's join that the syncer waits for the others to begin",
        at_least=0.0,
    )
    connections: int = setting(
        1, "of a learner for fragments each way; more on long fat networks", at_least=1, at_most=16
    )
    donor_host: str = setting(
        "127.0.0.1", "address at which learners give each other inner optimizer states; empty: they do not"
    )
    donor_port: int = setting(
        0, "at donor_host; 0: any that is free. Learners of one host need one each", at_least=0, at_most=65535
    )
    donation_timeout: float = setting(
        30.0,
        "seconds that a joining learner waits for a peer's inner optimizer state; more if steps are long or "
        "welcomes slow",
        above=0.0,
    )
    spares: int = setting(
        0, "compiled processes that driver=remote keeps ready to take a dead learner's place", at_least=0
    )
    restarts: int = setting(
        20,
        "times that driver=remote restarts one process before it gives it up, and Ray the syncer or all "
        "learners; those before are forgotten where the run has merged since",
        at_least=0,
    )


def backoff(tries: int, longest: float) -> float:
    """Seconds to wait after `tries` failures in a row: 0.25, 0.5, 1 and so on up to `longest`."""
    return min(longest, 0.25 * 2 ** min(tries - 1, 20))
