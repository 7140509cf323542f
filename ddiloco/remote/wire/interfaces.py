"""Addresses of this machine, by network interface or network."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from ddiloco.config import ConfigError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_FIELD = "config.remote.interface"
ANY = ("", "0.0.0.0", "::", "[::]")


def own_address(interface: str) -> str:
    """This machine's address on an interface (`eth1`) or in a network (`10.1.0.0/16`), as in HOST:PORT.

    Raises:
      ConfigError: there is none.
    """
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        return _address_of(interface)
    one = network.num_addresses == 1
    towards = str(network.network_address if one else next(iter(network.hosts())))
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Towards any address of a network the system chooses the own one in it; nothing is sent.
        (probe.bind if one else probe.connect)((towards, 0 if one else 9))
        found = probe.getsockname()[0]
        if ipaddress.ip_address(found) in network:
            return found if network.version == 4 else f"[{found}]"
    raise ConfigError(f"{_FIELD}: {interface}: no address of this machine is in that network")


def _address_of(name: str) -> str:
    known = sorted(known for _, known in socket.if_nameindex())
    if name not in known:
        raise ConfigError(
            f"{_FIELD}: {name}: is no network, and no interface of this machine ({', '.join(known)})"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)[20:24])
        except OSError:
            raise ConfigError(
                f"{_FIELD}: {name}: the interface has no IPv4 address; name its network"
            ) from None
