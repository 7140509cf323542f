"""The settings of the network and of the processes that use it."""

from __future__ import annotations

import dataclasses

from ddiloco.config import setting

HANDSHAKE = 20.0
"""Seconds that joining may take."""


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
    """Connections, and restarts of the processes of learners and syncer."""

    hosts: tuple[int, ...] = setting(
        (),
        "number of processes of each learner, which share its mesh; (): one each",
        at_least=1,
    )
    syncer_shards: int = setting(
        1,
        "S: processes of the syncer; fragment p is merged by process p mod S",
        at_least=1,
        at_most=4096,
    )
    max_learners: int | None = setting(
        None,
        "maximum number of learners, up to twice sync.num_learners; None: sync.num_learners",
        at_least=1,
    )
    min_hosts: int | None = setting(
        None,
        "fewest hosts with which a learner goes on when others are lost; divides their number; None: all",
        at_least=1,
    )
    host_timeout: float = setting(
        30.0,
        "seconds without a message of one of a learner's hosts, to host 0 or to JAX's coordinator, after "
        "which all of them end, to be restarted; with remote.min_hosts also those that they then wait for "
        "each other",
        above=0.0,
    )
    keepalive: float = setting(
        20.0,
        "seconds without traffic on a connection until a ping, and again until it is closed",
        above=0.0,
    )
    longest_backoff: float = setting(
        15.0, "maximum seconds between two tries to reach the syncer, or to restart a process", above=0.0
    )
    gather: float = setting(
        30.0,
        "seconds from the first learner's join that the syncer waits for the others",
        at_least=0.0,
    )
    connections: int = setting(
        1,
        "a learner's connections for fragments, each way; more for high bandwidth with high latency",
        at_least=1,
        at_most=16,
    )
    interface: str = setting(
        "",
        "network (10.1.0.0/16) or interface (eth1) of this machine for fragments and inner states; empty: "
        "that of the syncer's address",
    )
    donor_port: int | None = setting(
        0,
        "port at which a learner gives others its inner optimizer state, one for each learner of a machine; "
        "0: any free one; None: no such transfers",
        at_least=0,
        at_most=65535,
    )
    donation_timeout: float = setting(
        30.0,
        "seconds that a joining learner waits for a peer's inner optimizer state; longer with long steps or "
        "slow welcomes",
        above=0.0,
    )
    spares: int = setting(
        0, "compiled processes that driver=remote keeps ready to take a dead learner's place", at_least=0
    )
    receipts: bool = setting(
        False,
        "whether learners sign offers, and the syncer its log and versions, so that others can check the run",
        may_change="resume",
        both_ends=True,
    )
    keep_offers: float = setting(
        0.0,
        "share of merges whose offers the syncer keeps to be checked, chosen by learners' signatures; 1: all",
        at_least=0.0,
        at_most=1.0,
        may_change="resume",
    )
    restarts: int = setting(
        20,
        "maximum restarts of a process by driver=remote, and of the syncer or all learners by Ray, since the "
        "run last merged",
        at_least=0,
    )


def backoff(tries: int, longest: float) -> float:
    """Seconds to wait after `tries` failures in a row: 0.25, 0.5, 1 and so on up to `longest`."""
    return min(longest, 0.25 * 2 ** min(tries - 1, 20))
