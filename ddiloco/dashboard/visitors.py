"""Access to a run's page, and the address where it listens."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import pathlib
import socket
import ssl
import tempfile
from collections.abc import Callable

from ddiloco.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Visitors:
    """The visitors with access to a page that other machines can reach."""

    admits: Callable[[str], bool] | None = None  # judges the token that a visitor shows
    # The authority's certificate, and this end's own and its key, in PEM. Without `admits` visitors show a
    # certificate of that authority.
    tls: tuple[bytes, bytes, bytes] | None = None


SETTING = "config.log.page"
NOBODY = Visitors()
"""What a run without credentials has: only this machine may look."""


def check_page(address: str, visitors: Visitors = NOBODY, setting: str = SETTING) -> None:
    """Raises ConfigError where the address is not HOST:PORT, or others reach it and need no credentials.

    `setting`: where the address was given; an empty one is none.
    """
    if not address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        empty = ", or empty" if setting == SETTING else ""
        raise ConfigError(f"{setting}: is {address!r}, but must be HOST:PORT{empty}")
    if not is_loopback(address) and visitors.admits is None and visitors.tls is None:
        reach = f"{address} can be reached from other machines"
        whose = "a syncer with " if setting == SETTING else ""
        raise ConfigError(f"{setting}: {reach}, which needs {whose}--token_file or --tls")


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is of this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(address: str, setting: str = SETTING) -> socket.socket:
    """A socket at HOST:PORT; on the loopback at another port where that one is taken.

    Raises ConfigError where the address is not available.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = None
    for tried in (int(port), 0) if is_loopback(address) else (int(port),):
        try:
            return socket.create_server((host, tried), family=family, backlog=64)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
    raise ConfigError(f"{setting}: {address}: cannot be listened on: {reason}")


def context_of(visitors: Visitors) -> ssl.SSLContext | None:
    """The TLS context of this side; None: no TLS."""
    if visitors.tls is None:
        return None
    authority, certificate, key = visitors.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="ddiloco-") as folder:  # the library takes them from files alone
        file = pathlib.Path(folder) / "chain.pem"
        file.touch(mode=0o600)
        file.write_bytes(certificate + b"\n" + key)
        context.load_cert_chain(file)
    if visitors.admits is None:
        context.load_verify_locations(cadata=authority.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context
