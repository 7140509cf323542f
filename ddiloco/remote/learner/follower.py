"""A follower: a further host of a learner, which obeys host 0, and exchanges its own blocks of fragments."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc
import jax
from etils import epath

from ddiloco.arrays.blocks import Blocks
from ddiloco.data.host_batches import HostBatch, HostBatches
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId
from ddiloco.remote.learner.donation import Recipient, fetch_copy
from ddiloco.remote.learner.donor import Donor
from ddiloco.remote.learner.followers import Key, forget_older, here_message, key_in, key_of
from ddiloco.remote.learner.host_arrays import HostArrays, inner_of, needs_of
from ddiloco.remote.learner.hosts import STARTING_SECONDS, HostPlace, end_at_once, stacks_file
from ddiloco.remote.learner.likeness import check_alike
from ddiloco.remote.learner.streams import Collector, Host, HostWire, Streams
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.token_bucket import TokenBucket
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.schema import codec
from ddiloco.storage.bounded_reads import bounded
from ddiloco.storage.learner_state import LearnerStates, is_of_group, numbered
from ddiloco.telemetry.records import reason
from ddiloco.telemetry.throughput import Throughput
from ddiloco.telemetry.watches import write_stacks
from ddiloco.workers.assembly import Assembly
from ddiloco.workers.exchange import EventDelivery, Pieces


class ReportingBatches(Iterator[HostBatch]):
    """Prefetches a host's part of each batch, and sends host 0 the number of tokens."""

    def __init__(self, own: HostBatches, say: queue.SimpleQueue[pb.FromHost]) -> None:
        self._own, self._say = own, say
        self._ready: queue.Queue[HostBatch | Exception] = queue.Queue(1)

    def get_state(self) -> dict[str, Any]:
        """Empty: host 0 knows every host's position."""
        return {}

    def begin(self, position: str) -> None:
        """Begins where the learner's batches stand; empty: at their start. Raises DataError."""
        if position:
            self._own.set_state(json.loads(position))
        threading.Thread(target=self._draw, name="batches", daemon=True).start()

    def __next__(self) -> HostBatch:
        """Raises what drawing it has raised: host 0 waits for every host's part of a batch."""
        ready = self._ready.get()
        if isinstance(ready, Exception):
            raise ready
        return ready

    def _draw(self) -> None:
        try:
            for number, batch in enumerate(self._own, start=1):
                position = json.dumps(self._own.get_state())
                drawn = pb.Drawn(number=number, position=position)
                drawn.shards.extend(batch.tokens)
                drawn.tokens.extend(batch.tokens.values())
                self._say.put(pb.FromHost(drawn=drawn))
                self._ready.put(batch)
        except Exception as error:
            self._ready.put(error)


class Follower:
    """Hosts 1 and up. It ends with the process of host 0, and with every other host's."""

    def __init__(
        self,
        place: HostPlace,
        assembly: Assembly,
        security: Security,
        learner: int,
        address: str,
        folder: epath.Path | None = None,
        workdir: pathlib.Path | None = None,
    ) -> None:
        """Compiles, together with the other hosts.

        `address`: HOST:PORT of the syncer's first shard. `folder`: of its copies of the inner state,
        `workdir`: of the run; None: none are kept, and it is in no snapshot.
        """
        e = assembly.experiment
        self._assembly, self._workdir = assembly, workdir
        self._place, self._security, self._config = place, security.of(learner), e.remote
        self._learner, self._address = learner, address
        self._terms = terms_of(e, assembly.layout)
        assembly.check_learner(learner)
        self._say: queue.SimpleQueue[pb.FromHost | None] = queue.SimpleQueue()
        equipment = assembly.own_equipment(learner, place.count)
        self._batches = ReportingBatches(equipment.batches, self._say)
        self._equipment = dataclasses.replace(equipment, batches=self._batches)
        self._arrays = HostArrays(self._equipment, self._erred)
        fragments = range(assembly.layout.num_fragments)
        self._host = Host(place.number, [equipment.transfer.needs(p) for p in fragments])
        self._decode = assembly.decoder()
        if self._decode is not None:
            self._decode.compile()
        self._inner = inner_of(equipment)
        self._kept = LearnerStates(folder, needs_of(equipment), place.number)
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._held: dict[int, Sequence[jax.Array]] = {}  # copies of the inner state, by their numbers
        self._states: dict[int, Mapping[str, jax.Array] | Exception] = {}  # of all arrays, likewise
        self._limit = TokenBucket()  # of what this host sends
        self._donor = Donor(self._security, e.remote.keepalive, self._held, limit=self._limit)
        self._fetched: dict[int, Sequence[Blocks]] = {}  # of peers, likewise, until one is adopted
        self._throughput, self._token = Throughput(), ""
        self._streams: dict[int, Streams] = {}  # by shard of the syncer
        self._left, self._ending = False, threading.Lock()
        self._change = threading.Condition()
        self._here: dict[Key, Pieces] = {}  # of each fragment, what is not used yet

    def run(self, stop: threading.Event) -> bool:
        """Follows until host 0 orders it to leave; returns whether one of the hosts was asked to end.

        The process ends at once if host 0 is lost.
        """
        threading.Thread(target=self._pass_on, args=(stop,), name="leaving", daemon=True).start()
        keepalive, c = self._config.host_timeout / 2, self._config
        gives_at = self._donor.open(c, self._place.leader)
        copies = self._numbers()  # reads them whole, for which host 0 would not wait
        with self._security.peer_channel(self._place.leader, wire.options(keepalive)) as channel:
            try:
                grpc.channel_ready_future(channel).result(STARTING_SECONDS)
            except grpc.FutureTimeoutError:
                why = f"host 0 of the learner cannot be reached at {self._place.leader}"
                end_at_once(f"host {self._place.number}: {why}")
            self._check_shared()
            follow = channel.stream_stream(wire.FOLLOW)
            orders = follow(self._said(gives_at, copies), metadata=self._security.metadata)
            # In another thread: this one may wait for a step that ends no more.
            orders.add_callback(lambda: self._left or self._end_without_host_0("its stream has ended"))
            try:
                for data in orders:
                    order = parse(pb.Order, data)
                    if order.HasField("leave"):
                        self._left = True
                        return order.leave
                    self._do(order)
            except grpc.RpcError as error:
                self._end_without_host_0(wire.cause(error))
            except Exception as error:
                end_at_once(f"host {self._place.number}: {type(error).__name__}: {error}")
            finally:
                self._donor.stop()
                self._close_streams(list(self._streams))
                self._say.put(None)
        return False

    def _check_shared(self) -> None:
        """Ends this process where hosts that read each other's checkpoints have no folder in common."""
        folder, group = self._kept.folder, self._place.group
        if group and not (folder and bounded(lambda: is_of_group(folder, group), folder)):
            why = "needs a folder that all hosts of a learner share (workdir, recovery.checkpoint_folder)"
            end_at_once(f"config.remote.min_hosts: {why}, but {folder} is not host 0's", self._place.refused)

    def _end_without_host_0(self, why: str) -> None:
        with self._ending:  # until the process has ended
            write_stacks(stacks_file(self._workdir, self._learner, self._place.number))
            end_at_once(f"host {self._place.number}: host 0 of the learner is gone: {why}")

    def _numbers(self) -> Sequence[int]:
        try:
            return bounded(self._kept.numbers, self._kept.folder)
        except TimeoutError as error:
            self.alarm(f"{error}: no checkpoint of the learner is used")
            return ()

    def _said(self, gives_at: tuple[str, int], copies: Collection[int]) -> Iterator[bytes]:
        following = pb.FromHost.Following(
            host=self._place.number,
            learner=self._learner,
            fingerprint=self._terms.fingerprint,
            rules=self._terms.rules,
            copies=copies,
            donor_host=gives_at[0],
            donor_port=gives_at[1],
        )
        yield pb.FromHost(following=following).SerializeToString()
        while (message := self._say.get()) is not None:
            yield message.SerializeToString()

    def _pass_on(self, stop: threading.Event) -> None:
        stop.wait()
        self._say.put(pb.FromHost(leaving=True))

    def _do(self, order: pb.Order) -> None:
        match order.WhichOneof("kind"):
            case "streams":
                self._connect(order.streams)
            case "begin":
                self._batches.begin(order.begin)
            case "step":
                self._arrays.step(order.step)
            case "offer":
                self._arrays.offer(order.offer.fragment, order.offer.steps)
            case "send":
                self._send(codec.read(order.send.round), codec.read(order.send.contribution))
            case "adopt":
                self._arrays.adopt(self._welcomed(order.adopt), self._taken(order.adopt.copy))
                self._donor.attach(None, self._inner, self._donation_timeout())
            case "copy":
                try:
                    self._held[order.copy] = self._arrays.inner()
                except Exception as error:  # such as no memory for it: only the copy is given up
                    self.alarm(f"no copy of the inner optimizer state: {reason(error)}")
            case "save":
                self._save(order.save, self._states.get(order.save.copy))
            case "drop":
                for copies in (self._held, self._states, self._fetched):
                    copies.pop(order.drop, None)
            case "copy_all":
                try:
                    self._states[order.copy_all] = self._arrays.state()[0]
                except Exception as error:  # such as no memory: only this copy is given up
                    self._states[order.copy_all] = error
            case "go_on":
                try:
                    self._go_on(order.go_on)
                    self._done(order.go_on)
                except (OSError, ValueError, TimeoutError) as error:  # host 0 then orders another start
                    self._done(order.go_on, f"{error}")
                self._donor.attach(None, self._inner, self._donation_timeout())
            case "fetch":
                self._fetched[order.fetch.copy] = ()  # until it has come, or is dropped
                threading.Thread(
                    target=self._fetch, args=(order.fetch,), name="donation", daemon=True
                ).start()
            case "limit":
                self._limit.set_rate(order.limit or None)
            case "forget":
                with self._change:
                    self._here.pop(key_in(order.forget), None)
            case "apply":
                a = order.apply
                pieces = self._taken_here(self._came_with(a.fragment, a.version, a.lineage))
                merged = a.merged if a.HasField("merged") else None
                self._arrays.apply(a.fragment, a.mixing, pieces, merged, a.rebase)

    def _donation_timeout(self) -> float:
        """Seconds for a donation."""
        return self._throughput.limit(self._config.donation_timeout, self._inner.bytes)

    def _taken(self, copy: int) -> Sequence[Blocks] | None:
        """This host's blocks of a copy that was fetched or is on disk; None: there is none."""
        found, self._fetched = self._fetched, {}
        if copy and copy not in found:
            found[copy] = self._inner_on_disk(copy)
        self._kept.forget()
        return found.get(copy)

    def _inner_on_disk(self, number: int) -> Sequence[Blocks]:
        """This host's blocks of the inner state in a checkpoint; raises as `LearnerStates.load`."""
        return numbered("inner", self._kept.load(number)[1])

    def _go_on(self, number: int) -> None:
        """Loads this host's blocks of the state that the learner resumes."""
        arrays = bounded(lambda: self._kept.load(number)[1], self._kept.folder)
        self._kept.forget()
        self._arrays.restore(arrays, {"position": None, "steps": 0})

    def _fetch(self, order: pb.Order.Fetch) -> None:
        """Fetches this host's blocks of a peer's inner state, which must be like the copy on disk."""
        recipient = Recipient(self._inner, self._security.among_peers(self._token), self._config.keepalive)
        problem = ""
        try:
            addresses = [*order.addresses]
            if addresses:  # its counterpart, then host 0, which alone has what all hold
                addresses.insert(0, addresses.pop(self._place.number % len(addresses)))
            blocks = fetch_copy(recipient, addresses, order.copy, order.seconds)
            if order.like:
                check_alike(self._inner_on_disk(order.like), blocks)
            if order.copy in self._fetched:
                self._fetched[order.copy] = blocks
        except grpc.RpcError as error:
            problem = wire.cause(error)
        except OSError as error:
            problem = f"the own copy cannot be read: {reason(error)}"
        except (WireError, ValueError) as error:
            problem = f"{error}"
        self._done(order.copy, problem)

    def _done(self, copy: int, problem: str = "") -> None:
        told = problem and f"host {self._place.number}: {problem}"
        self._say.put(pb.FromHost(done=pb.FromHost.Done(copy=copy, problem=told)))

    def _save(self, order: pb.Order.Save, arrays: Mapping[str, jax.Array] | Exception | None) -> None:
        """Writes the copy after the one before; where it could not be made this host lacks it."""
        if arrays is not None:
            self._writer.submit(self._write, order.copy, order.snapshot, arrays)

    def _write(self, number: int, snapshot: int, arrays: Mapping[str, jax.Array] | Exception) -> None:
        try:
            if isinstance(arrays, Exception):
                raise arrays
            (self._kept.of_snapshot(snapshot) if snapshot else self._kept).save(number, arrays)
        except Exception as error:
            self.alarm(f"a checkpoint is not kept: {reason(error)}")
            if snapshot:
                self._done(number, reason(error))
            return
        if snapshot:
            self._done(number)
        else:
            self._say.put(pb.FromHost(kept=number))

    def alarm(self, problem: str) -> None:
        """Has host 0 raise an alarm."""
        self._say.put(pb.FromHost(alarm=f"host {self._place.number}: {problem}"))

    def _send(self, round_id: RoundId, contribution: Contribution) -> None:
        streams = self._streams.get(contribution.fragment % self._terms.shards)
        if streams is not None:
            made = self._arrays.offered(contribution.fragment, contribution.upto.steps)
            streams.send(round_id, contribution, made)

    def _welcomed(self, order: pb.Order.Adopt) -> Sequence[Pieces]:
        """The fragments of all shards' welcomes; raises WireError if host 0 received other versions."""
        welcomes = order.welcomes
        with self._change:
            here = {(w, p, version): key for key in self._here for w, p, version, _ in [key]}
        keys = [here.get((welcomes[p % len(welcomes)], p, v)) for p, v in enumerate(order.versions)]
        if None in keys:
            raise WireError("not the versions that host 0 has", f"{list(here)}")
        return list(map(self._taken_here, keys))

    def _came_with(self, fragment: int, version: int, lineage: int) -> Key:
        """By which name a version is here: as an update, else as part of a welcome."""
        version_of = (fragment, version, lineage)
        with self._change:
            return min((key for key in self._here if key[1:] == version_of), default=(0, *version_of))

    def _taken_here(self, key: Key) -> Pieces:
        """Notifies host 0 of a fragment that this host has, and drops older ones."""
        with self._change:
            pieces = self._here.pop(key)
            forget_older(self._here, key)
        return pieces

    def _connect(self, order: pb.Order.Streams) -> None:
        """Joins the learner's new connection to a shard of the syncer."""
        if not order.shard:
            self._token = order.peers_token
            self._donor.admit(self._security.among_peers(self._token))
        self._close_streams([order.shard])
        address = order.address or self._address
        own = HostWire(self._terms, self._security, self._config, self._decode, self._host, limit=self._limit)
        streams = Streams(
            own,
            [own.channel(address) for _ in range(self._config.connections)],
            order.session,
            Collector(self._terms.fragments(order.shard), self._deliver, order.shard),
            self._failed,
            lambda error: self._say.put(pb.FromHost(broken=order.number)),
            self._throughput,
        )
        self._streams[order.shard] = streams
        streams.start()

    def _close_streams(self, shards: Sequence[int]) -> None:
        for streams in filter(None, (self._streams.pop(shard, None) for shard in shards)):
            with contextlib.suppress(Exception):
                streams.close()

    def _deliver(self, told: EventDelivery) -> None:
        with self._change:
            match told.event:
                case events.Welcomed(incarnation=w, fragments=own, versions=versions, lineages=lineages):
                    for p, *which, pieces in zip(own, versions, lineages, told.fragments, strict=True):
                        self._here[w, p, *which] = pieces
                case _:
                    self._here[key_of(told)] = told.fragments[0]
        self._say.put(pb.FromHost(here=here_message(key_of(told))))

    def _failed(self, event: events.OfferFailed) -> None:
        self._say.put(pb.FromHost(failed=codec.message_of(event)))

    def _erred(self, step: int, devices: list[str]) -> None:
        if devices:
            self._say.put(pb.FromHost(erred=json.dumps([step, devices])))
