"""A host's connection to the syncer over which it learns with which others it trains, and when to leave."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from ddiloco.config import ConfigError
from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.interfaces import own_address
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError, parse
from ddiloco.settings.remote import RemoteConfig, backoff
from ddiloco.telemetry.waits import waiting

_END_SECONDS = 5.0  # for the thread to end


class HostPresence:
    """This process as one of a learner's hosts, from before it knows the others until it ends."""

    def __init__(
        self,
        learner: int,
        host: int,
        hosts: int,
        address: str,
        security: Security,
        config: RemoteConfig,
        port: int,
        leave: Callable[[], None],
    ) -> None:
        """Connects to the syncer at `address`, HOST:PORT, again and again.

        `host`: which of the learner's `hosts` it is. `port`: at which it coordinates, with the next one, if
        it is the first of its group. `leave` is called once its group is to leave and to come back, as a
        larger one.
        """
        self._present = pb.HostPresent(
            version=wire.VERSION,
            learner=learner,
            host=host,
            hosts=hosts,
            min_hosts=config.min_hosts,
            timeout=config.host_timeout,
            port=port,
            address=own_address(config.interface) if config.interface else "",
        )
        self._address, self._security, self._config, self._leave = address, security, config, leave
        self._changed = threading.Event()
        self._group: pb.HostGroup | None = None
        self._refusal: str | None = None
        self._over = threading.Event()
        self._call: grpc.Call | None = None
        self._lock = threading.Lock()  # of the call
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def group(self, stop: threading.Event) -> pb.HostGroup | None:
        """The hosts with which this one trains; waits for them. None: `stop` was set, or the run is over.

        Raises:
          ConfigError: the syncer refuses the host.
        """
        with waiting("the learner's hosts"):
            while not self._changed.wait(0.2):
                if stop.is_set():
                    return None
        if self._refusal is not None:
            raise ConfigError(f"syncer: {self._address}: {self._refusal}")
        return self._group

    def close(self) -> None:
        """Ends the connection."""
        self._over.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        self._thread.join(_END_SECONDS)  # a thread in gRPC's code would abort the process as it ends

    def _run(self) -> None:
        tries = 0
        while not self._over.is_set():
            try:
                for data in self._answers():
                    tries = 0
                    self._take(parse(pb.HostGroup, data))
            except grpc.RpcError as error:
                if wire.permanent(error.code()) and self._group is None:
                    self._refusal = error.details()
                    self._changed.set()
                    return
            except WireError:
                pass
            tries += 1
            self._over.wait(backoff(tries, self._config.longest_backoff))

    def _answers(self) -> Iterator[bytes]:
        """What the syncer sends over one connection."""
        said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        said.put(self._present.SerializeToString())
        with self._security.channel(self._address, wire.options(self._config.keepalive)) as channel:
            with self._lock:
                if self._over.is_set():
                    return
                self._call = channel.stream_stream(wire.RENDEZVOUS)(
                    iter(said.get, None), metadata=self._security.metadata
                )
            try:
                yield from self._call
            finally:
                said.put(None)
                self._call.cancel()

    def _take(self, group: pb.HostGroup) -> None:
        if group.leave and self._group is None:
            self._changed.set()
        elif group.leave:
            self._leave()
        elif self._group is None:
            self._group = group
            self._present.group.extend(group.hosts)
            self._changed.set()
