"""Where a process listens or connects to, and what it shows there: read from the flags and their files."""

from __future__ import annotations

import pathlib

from ddiloco.config import ConfigError
from ddiloco.remote.wire.security import Security

FILES = ("ca.pem", "cert.pem", "key.pem")
LEAST_TOKEN = 16  # characters


def load_security(token_file: str | None, tls: str | None) -> Security:
    """Reads the token and the folder with ca.pem, cert.pem and key.pem (see scripts/make_certs.sh).

    Raises:
      ConfigError: a file cannot be read, or the token is short.
    """
    token = None
    if token_file is not None:
        token = _read(token_file, "token_file").decode(errors="replace").strip()
        if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"token_file: {token_file}: must hold one line of at least {LEAST_TOKEN} ASCII characters"
            )
    files = None
    if tls is not None:
        authority, certificate, key = (_read(str(pathlib.Path(tls) / name), "tls") for name in FILES)
        files = (authority, certificate, key)
    return Security(token, files)


def check_address(address: str, flag: str) -> str:
    """The address, checked to be HOST:PORT.

    Raises:
      ConfigError: it is not.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag}: is {address!r}, but must be HOST:PORT")
    return address


def _read(path: str, flag: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: cannot be read: {error.strerror}") from None
