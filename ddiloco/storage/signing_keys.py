"""The signing keys of a run's parties: each one's private key, and the public keys of all.

A party is "syncer", "shard-S" for a further shard, or "learner-M". Its private key is WORKDIR/keys/NAME.key
in PEM: Ed25519, made at its first start, or of an elliptic curve, as of `scripts/make_certs.sh`. Imported
only where something is signed, since `cryptography` is an optional package.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from ddiloco.config import ConfigError

FOLDER = "keys"
PRIVATE, PUBLIC = ".key", ".pub"
_PRIVATE = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
_FIELD = "config.remote.receipts"


def learner_name(learner: int) -> str:
    """The name of a learner's key."""
    return f"learner-{learner}"


def syncer_name(shard: int) -> str:
    """The name of the key of a shard of the syncer."""
    return f"shard-{shard}" if shard else "syncer"


class Signer:
    """A party's private key."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        """Loads the key, or makes one; its public half goes beside it.

        Raises:
          ConfigError: the file holds no such key, or others can read it; or the disk refuses.
        """
        path = folder / f"{name}{PRIVATE}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = ed25519.Ed25519PrivateKey.generate()
            coding = pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
            _write(path, new.private_bytes(*coding), 0o600)
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{_FIELD}: {path}: others can read or change it; use `chmod 600`")
            self._key: Any = pem.load_pem_private_key(path.read_bytes(), None)
            if not isinstance(self._key, _PRIVATE):
                raise ValueError("a key of another kind")
            public = self._key.public_key()
            coding = pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo
            _write(path.with_suffix(PUBLIC), public.public_bytes(*coding), 0o644)
        except OSError as error:
            raise ConfigError(f"{_FIELD}: {path}: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            wanted = "of Ed25519 or an elliptic curve, without a password"
            raise ConfigError(f"{_FIELD}: {path}: is no private key in PEM {wanted}") from None

    def sign(self, data: bytes) -> bytes:
        """The signature under these bytes."""
        signature: bytes = self._key.sign(data, *_scheme(self._key))
        return signature


class PublicKeys:
    """The public keys in a folder; each is read when it is first needed. For several threads."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._known: dict[str, Any] = {}

    def problem(self, name: str, signature: bytes, data: bytes) -> str | None:
        """Why this is no signature of the party under these bytes, in one line; None: it is."""
        path = self.folder / f"{name}{PUBLIC}"
        try:
            if name not in self._known:
                self._known[name] = pem.load_pem_public_key(path.read_bytes())
            key = self._known[name]
            key.verify(signature, data, *_scheme(key))
        except OSError as error:
            return f"{path}: {error.strerror}"
        except InvalidSignature:
            return f"has no valid signature of {name}"
        except (ValueError, TypeError, AttributeError):
            return f"{path}: is no public key in PEM"
        return None


def _scheme(key: Any) -> tuple[Any, ...]:
    """What a key's `sign` and `verify` take beside the data."""
    on_curve = isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey)
    return (ec.ECDSA(hashes.SHA256()),) if on_curve else ()


def _write(path: pathlib.Path, data: bytes, mode: int) -> None:
    """Writes a file as a whole, unless there is one, as another process of the party may have written."""
    if path.exists():
        return
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
