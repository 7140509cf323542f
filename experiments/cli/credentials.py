"""Credentials and addresses of a process, from flags and files."""

from __future__ import annotations

import os
import pathlib

from ddiloco.config import ConfigError
from ddiloco.remote.wire.security import Security

FILES = ("ca.pem", "cert.pem", "key.pem")
MIN_TOKEN_LENGTH = 16  # characters


def load_security(token_file: str | None, tls: str | None, text: str | None = None) -> Security:
    """Reads the token or tokens, and the folder with ca.pem, cert.pem and key.pem (scripts/make_certs.sh).

    `text` is the content of a token file, instead of one.

    A file with one token holds it in a line. One with a token of each learner's own has a line
    `NUMBER TOKEN` for each, and may have a line `operator TOKEN` (experiments.make_tokens).

    Raises:
      ConfigError: a file cannot be read, or can by others than its owner, or a token is short.
    """
    token, tokens, operator, files = None, {}, None, None
    if token_file is not None:
        text = _read_secret(token_file, "token_file").decode(errors="replace")
    if text is not None:
        rows = [line.split() for line in text.split("\n") if line.strip()]
        operators = [row[1] for row in rows if len(row) == 2 and row[0] == "operator"]
        if len(operators) == 1 and len(rows) > 1:
            operator = operators[0]
            rows = [row for row in rows if row[0] != "operator"]
        own = [row for row in rows if len(row) == 2 and row[0].isdecimal() and len(row[0]) < 10]
        tokens = {int(row[0]): row[1] for row in own}
        if not own and len(rows) == 1:
            token = " ".join(rows[0])
        known = list(tokens.values()) if token is None else [token]
        secret = known if operator is None else [*known, operator]
        mixed = len(own) not in (0, len(rows)) or len({*known}) < len(rows)
        if not known or mixed or len({*secret}) < len(secret) or any(map(_weak, secret)):
            line = f"one line of at least {MIN_TOKEN_LENGTH} ASCII characters"
            where = "DDILOCO_TOKEN" if token_file is None else f"token_file: {token_file}"
            raise ConfigError(f"{where}: must hold {line}, or NUMBER TOKEN for each learner")
    if tls is not None:
        authority, certificate = (_read(str(pathlib.Path(tls) / name), "tls") for name in FILES[:2])
        files = (authority, certificate, _read_secret(str(pathlib.Path(tls) / FILES[2]), "tls"))
    return Security(token, files, tokens, operator)


def _weak(token: str) -> bool:
    return len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()


def _read_secret(path: str, flag: str) -> bytes:
    content = _read(path, flag)
    if os.stat(path).st_mode & 0o077:
        raise ConfigError(f"{flag}: {path}: others can read or change it; use `chmod 600`")
    return content


def check_address(address: str, flag: str) -> str:
    """The address; raises ConfigError if that is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag}: is {address!r}, but must be HOST:PORT")
    return address


def _read(path: str, flag: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: cannot be read: {error.strerror}") from None
