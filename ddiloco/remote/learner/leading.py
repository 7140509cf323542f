"""Host 0 of a learner of several: its parts beyond those of a single process."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ddiloco.protocol.learner import LearnerCore
from ddiloco.remote.learner.client import SyncerClients
from ddiloco.remote.learner.donation import Donation
from ddiloco.remote.learner.followers import Followers
from ddiloco.remote.learner.host_arrays import JointBatches, LeadingArrays, dropped_with
from ddiloco.remote.learner.hosts import HostPlace, end_at_once
from ddiloco.remote.learner.likeness import MEANINGFUL_STEPS
from ddiloco.remote.learner.recovery import ProcessRecovery
from ddiloco.remote.learner.streams import Host
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import Terms
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError
from ddiloco.schema import codec
from ddiloco.settings.remote import RemoteConfig
from ddiloco.storage import bounded_reads
from ddiloco.storage.learner_state import LearnerState, OfAllHosts
from ddiloco.telemetry import records
from ddiloco.workers.exchange import InnerState
from ddiloco.workers.learner_arrays import Equipment, Erred, TrainingArrays


class Lead:
    """Leads the other hosts, from before this one compiles until it has them leave."""

    def __init__(
        self,
        place: HostPlace,
        learner: int,
        terms: Terms,
        security: Security,
        config: RemoteConfig,
        stop: threading.Event,
    ) -> None:
        """`stop` is set where another host was asked to end; raises ConfigError if its port is taken."""
        self.preempted = False  # whether that was so
        self.left = threading.Event()  # set once the others have the order to leave
        self._learner, self._terms, self._stop = learner, terms, stop
        self.followers = Followers(
            place.count - 1, learner, terms, security, config.host_timeout, end_at_once, self._leaving
        )
        self.followers.start(place.leader)

    def connect(
        self,
        make_clients: Callable[..., SyncerClients],
        equipment: Equipment,
        note: Callable[[str], None],
    ) -> SyncerClients | None:
        """The clients of all hosts, once these have compiled, too; None: `stop` was set first."""
        if not self.followers.gather(self._stop, note):
            self.leave()
            return None
        host = Host(0, [equipment.transfer.needs(p) for p in range(self._terms.num_fragments)])
        clients = make_clients(self.followers, host)
        self.followers.deliver = clients.put
        self.followers.told = functools.partial(self._told, clients)
        return clients

    def equipped(self, equipment: Equipment) -> Equipment:
        """The equipment with the tokens and the position of all hosts."""
        return dataclasses.replace(equipment, batches=JointBatches(equipment.batches, self.followers))

    def make_arrays(self, core: LearnerCore) -> Callable[[Equipment, Erred], TrainingArrays]:
        """Makes this host's arrays, whose calls the other hosts repeat."""
        return functools.partial(LeadingArrays, core=core, followers=self.followers)

    def go_on(self, number: int) -> None:
        """Has the others load their blocks of the learner's state under this number, and waits for them.

        Raises:
          WireError: one of them cannot, or its disk hangs; the learner must not resume from this state.
        """
        with self.followers.doing(number, pb.Order(go_on=number)):
            self.followers.done(number, time.monotonic() + bounded_reads.LONGEST)

    def recovery(self, *parts: Any) -> ProcessRecovery:
        """The learner's recovery, of whose copies on disk each host has its blocks."""
        return HostRecovery(self.followers, *parts)

    def leave(self, failure: str | None = None, code: int = 1) -> None:
        """Has the other hosts end; to be started again if this one was asked to end.

        Ends this process at once where there is a failure, with this exit code: all are to be started again.
        """
        self.left.set()
        if failure is not None:
            end_at_once(f"learner {self._learner}: {failure}", code)
        self.followers.order(pb.Order(leave=self._stop.is_set()))
        self.followers.stop()

    def _leaving(self) -> None:
        self.preempted = True
        self._stop.set()

    def _told(self, clients: SyncerClients, message: pb.FromHost) -> None:
        client = clients.first
        match message.WhichOneof("kind"):
            case "failed":
                failed = codec.told_by(message.failed)
                clients.say(failed, failed.round.fragment % len(clients.all))
            case "erred":
                step, devices = json.loads(message.erred)
                for found in records.corruption(self._learner, step, devices, time.time()):
                    client.outbox.record(found)
            case "alarm":
                sentence = f"learner {self._learner}, {message.alarm}"
                client.outbox.record(records.Alarm(sentence, time.time()))


class HostRecovery(ProcessRecovery):
    """The recovery of host 0: from peers, and on disk, what all hosts can have."""

    def __init__(self, followers: Followers, *parts: Any) -> None:
        super().__init__(*parts)
        self._followers = followers
        self._like = 0  # the own copy, if others must be like it

    def keep(self, state: LearnerState, snapshot: int = 0) -> None:
        """As a ProcessRecovery's; the other hosts keep theirs. One for a snapshot is there once all have."""
        copy = state.arrays.number
        order = pb.Order(save=pb.Order.Save(copy=copy, snapshot=snapshot))
        if not snapshot:
            self._followers.order(order)
            super().keep(state)
            return
        with self._followers.doing(copy, order):
            super().keep(state, snapshot)
            self._followers.done(copy, time.monotonic() + bounded_reads.LONGEST)

    def _taken(self, donation: Donation) -> InnerState:
        """Lets all hosts fetch their blocks; raises WireError if any of them fails."""
        copy, addresses = donation.rest
        if not copy:
            raise WireError("donation to one host")
        arrays = dropped_with(OfAllHosts((), copy), self._followers.order)  # also where it does not come
        left = donation.until - time.monotonic()
        order = pb.Order.Fetch(copy=copy, addresses=addresses, like=self._like, seconds=left)
        with self._followers.doing(copy, pb.Order(fetch=order)):
            state = super()._taken(donation)
            self._followers.done(copy, donation.until)
        arrays += state.arrays
        return dataclasses.replace(state, arrays=arrays)

    def _from_disk(self, versions: Sequence[int]) -> InnerState | None:
        state, self._like = super()._from_disk(versions), 0
        if state is not None and state.trained >= MEANINGFUL_STEPS:
            self._like = state.arrays.number
        return state

    def _shared(self) -> Collection[int]:
        return self._followers.copies()
