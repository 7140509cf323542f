"""Who may join: a token that both ends know, or mutual TLS; beyond loopback one of them is needed."""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress

import grpc

from ddiloco.config import ConfigError
from ddiloco.remote.wire.agreement import metadata_value

TOKEN_KEY = "authorization"
PEER_NAME = "ddiloco-learner"  # in every learner's certificate, whatever its host


@dataclasses.dataclass(frozen=True)
class Security:
    """What one end presents and requires.

    Attributes:
      token: sent with every call, in the clear unless there is TLS; None: none is asked for.
      tls: the authority's certificate, and this end's own certificate and key, in PEM; None: no TLS.
    """

    token: str | None = dataclasses.field(default=None, repr=False)
    tls: tuple[bytes, bytes, bytes] | None = dataclasses.field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a learner sends with each call."""
        return () if self.token is None else ((TOKEN_KEY, f"Bearer {self.token}"),)

    def admits(self, metadata: tuple | None) -> bool:
        """Whether a call with this metadata has the token; its time reveals nothing of the token."""
        if self.token is None:
            return True
        given = metadata_value(metadata, TOKEN_KEY)
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    def listen(self, server: grpc.Server, address: str) -> int:
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
    host = address.rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and security.token is None and security.tls is None:
        raise ConfigError(
            f"listen: {address} can be reached from other machines, which needs --token_file or --tls"
        )
