"""A learner's own copy of its inner optimizer state on disk: one file, the newest."""

from __future__ import annotations

import dataclasses

from etils import epath

from ddiloco.disk import array_file
from ddiloco.disk.tape.entries import InnerOrigin
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.roles.exchange import InnerState
from ddiloco.roles.transfer import host_arrays

_MAGIC = b"ddiloco inner state 1\n"
_NAME = "inner_state"


class InnerFileError(Exception):
    """The copy cannot be used; the message is one line and names the file."""


def save(folder: epath.Path, inner: InnerFormat, state: InnerState, run: str = "") -> None:
    """Keeps the state of this run in place of the one before; returns once it is durable. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = None if state.origin is None else dataclasses.astuple(state.origin)
    header = {
        "format": inner.fingerprint,
        "run": run,
        "step": state.step,
        "trained": state.trained,
        "versions": list(state.versions),
        "origin": origin,
    }
    array_file.save(folder / _NAME, _MAGIC, header, host_arrays(state.arrays))


def load(folder: epath.Path, inner: InnerFormat, run: str = "") -> InnerState | None:
    """The last state kept; None if none was.

    Raises:
      InnerFileError: it cannot be read, is damaged, or is another optimizer's or another run's.
    """
    path = folder / _NAME
    try:
        header, arrays = array_file.load(path, _MAGIC)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InnerFileError(str(error)) from None
    if header.get("format") != inner.fingerprint:
        raise InnerFileError(f"{path}: is of another inner optimizer")
    if header.get("run", "") != run:
        raise InnerFileError(f"{path}: is of another run")
    origin = header.get("origin")
    known = None if origin is None else InnerOrigin(*origin)
    return InnerState(header["step"], tuple(header["versions"]), arrays, known, header.get("trained", 0))
