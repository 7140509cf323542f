"""Who may look at a run's page, and where it listens."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import socket
import ssl
import tempfile
from collections.abc import Callable

from ddiloco.config import ConfigError
from ddiloco.page.actions import Actions


@dataclasses.dataclass(frozen=True)
class Visitors:
    """Who may look at a page that can be reached from other machines.

    Attributes:
      admits: judges the token that a visitor shows; None: there is none.
      tls: the authority's certificate, and this end's own certificate and key, in PEM; None: no TLS. Without
        `admits` visitors show a certificate of that authority.
      actions: what they may have the run do, with credentials of their own; None: nothing.
    """

    admits: Callable[[str], bool] | None = None
    tls: tuple[bytes, bytes, bytes] | None = None
    actions: Actions | None = None


SETTING = "config.log.page"
NOBODY = Visitors()
"""What a run without credentials has: only this machine may look."""


def check_page(address: str, visitors: Visitors = NOBODY, setting: str = SETTING) -> None:
    """Checks that nobody beyond this machine can look without credentials; an empty address is none.

    `setting`: where the address was given.

    Raises:
      ConfigError: it is not HOST:PORT, or not of the loopback, and there is neither token nor TLS.
    """
    if not address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{setting}: is {address!r}, but must be HOST:PORT, or empty")
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

    Raises:
      ConfigError: the address is not available.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = None
    for tried in (int(port), 0) if is_loopback(address) else (int(port),):
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, tried))
            made.listen(64)
            return made
        except OSError as error:
            made.close()
            reason = error.strerror
    raise ConfigError(f"{setting}: {address}: cannot be listened on: {reason}")


def context_of(visitors: Visitors) -> ssl.SSLContext | None:
    """This end of TLS; None: there is none."""
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
