"""Credentials: a token or mutual TLS, shared or one for each learner; required beyond the loopback."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from ddiloco.config import ConfigError
from ddiloco.dashboard.visitors import is_loopback
from ddiloco.remote.wire.validation import metadata_value

TOKEN_KEY = "authorization"
COMMON_NAME = "x509_common_name"  # by gRPC's name for it: the name in the certificate of the other end
OWN_NAME = re.compile(r"ddiloco learner (0|[1-9][0-9]{0,6})")  # of a certificate that is one learner's
PEER_NAME = "ddiloco-learner"  # in every learner's certificate, whatever its host


NOBODY = -1  # in a learner's place: the token is of one and the certificate of another
OPERATOR = -2  # likewise: the operator, who is no learner
SHARD = -3  # likewise: a shard of the syncer


class Caller(NamedTuple):
    """The caller of an rpc: the learner of its own credentials, None if they are shared; and its host."""

    learner: int | None
    host: str


UNKNOWN = Caller(None, "an unknown host")


@dataclasses.dataclass(frozen=True)
class Security:
    """Credentials that one side presents and requires."""

    # Sent with every call, in the clear unless there is TLS; None: none is asked for
    token: str | None = dataclasses.field(default=None, repr=False)
    # The authority's certificate, and this end's own certificate and key, in PEM; None: no TLS
    tls: tuple[bytes, bytes, bytes] | None = dataclasses.field(default=None, repr=False)
    # By learner, the token of its own, which the syncer asks for in place of `token`
    tokens: Mapping[int, str] = dataclasses.field(default_factory=dict, repr=False)
    # The operator's token, if learners have tokens of their own; None: no operator
    operator: str | None = dataclasses.field(default=None, repr=False)

    def of(self, learner: int) -> Security:
        """The credentials of this learner.

        Raises:
          ConfigError: there are tokens, but none is this learner's.
        """
        if not self.tokens:
            return self
        if learner not in self.tokens:
            raise ConfigError(f"token_file: has no token of learner {learner}")
        return Security(self.tokens[learner], self.tls)

    def of_shards(self) -> Security:
        """The credentials of a shard at the first one: all tokens, which no learner knows."""
        return Security(self._shard_token, self.tls)

    @property
    def _shard_token(self) -> str | None:
        known = [token for token in (self.token, *self.tokens.values()) if token is not None]
        digest = hashlib.sha256("\n".join(["ddiloco shard", *sorted(known)]).encode())
        return digest.hexdigest() if known else None

    def among_peers(self, token: str) -> Security:
        """The credentials between learners, with the token that the syncer gave them."""
        return Security(token, self.tls)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """A learner's credentials as metadata of each call."""
        return () if self.token is None else ((TOKEN_KEY, f"Bearer {self.token}"),)

    def admits(self, metadata: tuple | None) -> bool:
        """Whether a call with this metadata has the token; its time reveals nothing of the token."""
        return not self.asks or self._shows(metadata) is not None

    @property
    def asks(self) -> bool:
        """Whether a token is asked for at all."""
        return self.token is not None or bool(self.tokens)

    def admits_token(self, token: str) -> bool:
        """Whether this is the token of all, or that of any learner."""
        return self.admits(((TOKEN_KEY, f"Bearer {token}"),))

    def caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """The caller of an admitted call: the token's learner, or else the certificate's."""
        shown = self._shows(context.invocation_metadata()) if self.asks else None
        if shown in (OPERATOR, SHARD):
            return Caller(shown, host_of(context.peer()))
        named = [OWN_NAME.fullmatch(name.decode(errors="replace")) for name in _names(context)]
        certified = next((int(found[1]) for found in named if found), None)
        own = {learner for learner in (shown, certified) if learner is not None and learner >= 0}
        return Caller(min(own, default=None) if len(own) < 2 else NOBODY, host_of(context.peer()))

    def _shows(self, metadata: tuple | None) -> int | None:
        """The learner whose token is shown, -1 for the token of all, or OPERATOR; None: it is none."""
        given = metadata_value(metadata, TOKEN_KEY).encode()
        known = {-1: self.token, OPERATOR: self.operator, SHARD: self._shard_token, **self.tokens}
        fit = [
            m
            for m, token in known.items()
            if token is not None and hmac.compare_digest(given, f"Bearer {token}".encode())
        ]
        return fit[0] if fit else None

    def listen(self, server: grpc.Server | grpc.aio.Server, address: str) -> int:
        """Binds the server to HOST:PORT; returns the port.

        Raises:
          ConfigError: the address is not available.
        """
        try:
            if self.tls is None:
                port = server.add_insecure_port(address)
            else:
                authority, certificate, key = self.tls
                credentials = grpc.ssl_server_credentials(
                    [(key, certificate)], root_certificates=authority, require_client_auth=True
                )
                port = server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(f"listen: {address}: cannot be listened on; is it free, and of this machine?")
        return port

    def channel(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """A channel to the syncer at HOST:PORT; it connects when it is used."""
        if self.tls is None:
            return grpc.insecure_channel(address, options)
        authority, certificate, key = self.tls
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(address, credentials, options)

    def peer_channel(self, address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """A channel to another learner: its certificate must be a learner's, its host may be any."""
        named = [] if self.tls is None else [("grpc.ssl_target_name_override", PEER_NAME)]
        return self.channel(address, [*options, *named])


def check_reach(address: str, security: Security) -> None:
    """Checks that no process beyond this machine can join without credentials.

    Raises:
      ConfigError: the address is not of the loopback, and there is neither token nor TLS.
    """
    if not is_loopback(address) and not security.asks and security.tls is None:
        raise ConfigError(
            f"listen: {address} can be reached from other machines, which needs --token_file or --tls"
        )


def host_of(peer: str) -> str:
    """The host of what gRPC calls a peer, such as `ipv4:10.0.0.7:4321`."""
    kind, _, rest = peer.partition(":")
    return urllib.parse.unquote(rest).rpartition(":")[0] if kind in ("ipv4", "ipv6") else kind


def donor_address(peer: str, port: int) -> str | None:
    """HOST:PORT of the donor at `port` of the host that gRPC calls `peer`; None if there is none."""
    known = peer.startswith(("ipv4:", "ipv6:")) and host_of(peer)
    return f"{host_of(peer)}:{port}" if known and 0 < port < 65536 else None


def is_address(text: str) -> bool:
    """Whether it is such a HOST:PORT.

    >>> is_address("10.0.0.7:4321"), is_address("[::1]:80"), is_address("unix:/tmp/x"), is_address("a:0")
    (True, True, False, False)
    """
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        return 0 < int(port) < 65536
    except ValueError:
        return False


def _names(context: grpc.aio.ServicerContext) -> Sequence[bytes]:
    return context.auth_context().get(COMMON_NAME, ())


class Gate(grpc.ServerInterceptor):
    """Ends calls without credentials before they have a thread that waits, or anything else."""

    def __init__(self, admits: Callable[[tuple], bool], refusal: str) -> None:
        """`admits`: judges a call's metadata. `refusal`: a line for the other end."""
        self.refused: Callable[[str], None] = lambda host: None  # called for each, with its host
        self._admits, self._refusal = admits, refusal
        self._ends = grpc.stream_stream_rpc_method_handler(self._end)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """As gRPC calls it."""
        admitted = self._admits(handler_call_details.invocation_metadata)
        return continuation(handler_call_details) if admitted else self._ends

    def _end(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.refused(host_of(context.peer()))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, self._refusal)
        yield from requests  # it is a stream, though it never comes to this
