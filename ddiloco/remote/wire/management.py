"""Commands of an operator to a running syncer, and its answers: a call of its own, in JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ddiloco.remote.wire import validation as wire
from ddiloco.remote.wire.security import Security
from ddiloco.remote.wire.validation import WireError

MANAGE = "/ddiloco.wire.Syncer/Manage"
VERBS = ("status", "drain", "evict", "add", "set", "limit", "snapshot", "stop")

_SETTING = int | float | None


@dataclasses.dataclass(frozen=True)
class Command:
    """One of VERBS; `learner`: which one is meant, None where the verb is of no one learner.

    `settings`: of config.sync, by name, to be set, for this `reason`; or the `bytes_per_second` of a limit.
    """

    verb: str
    learner: int | None = None
    settings: Mapping[str, int | float | None] = dataclasses.field(default_factory=dict)
    reason: str = ""

    def __bytes__(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, data: bytes) -> Command:
        """The command in the bytes; raises WireError if there is none."""
        values = _read(data)
        verb, learner = values.get("verb"), values.get("learner")
        whole = isinstance(learner, int) and not isinstance(learner, bool) and 0 <= learner <= wire.LARGEST
        settings, reason = values.get("settings", {}), values.get("reason", "")
        plain = isinstance(settings, dict) and all(isinstance(v, _SETTING) for v in settings.values())
        if verb not in VERBS or not (learner is None or whole) or not plain or not isinstance(reason, str):
            raise WireError("malformed message", "no command")
        return cls(verb, learner, settings, reason[: wire.MAX_TEXT])


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a command, or the reason of a refusal, in a line; `facts` are for programs."""

    done: bool
    line: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __bytes__(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def read(cls, data: bytes) -> Answer:
        """The answer in the bytes; raises WireError if there is none."""
        values = _read(data)
        facts = values.get("facts")
        if not isinstance(facts, dict):
            raise WireError("malformed message", "no answer")
        return cls(bool(values.get("done")), str(values.get("line"))[: wire.MAX_TEXT], facts)


def ask(address: str, security: Security, command: Command, timeout: float) -> Answer:
    """Sends a command to the syncer at HOST:PORT; `timeout` is in seconds.

    Raises:
      grpc.RpcError: it cannot be reached, or refuses the caller.
      WireError: its answer cannot be read.
    """
    with security.channel(address, wire.options(timeout)) as channel:
        call = channel.unary_unary(MANAGE)
        return Answer.read(call(bytes(command), metadata=security.metadata, timeout=timeout))


def _read(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise WireError("malformed message", "no JSON object")
    return values
