"""What learners and shards of the syncer sign: offers, and statements on the versions made of them.

A statement follows from the shard's tape: from the head of its hash chain and what its core decided. So
anybody with the tape can compute it again (`Ledger`), and check the signature.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ddiloco.outer.merging import contribution_weight
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, OfferReceipt
from ddiloco.storage.tape.header import Header


def signed_offer(run: str, offer: events.FragmentArrived) -> bytes:
    """What a learner signs of an offer."""
    c, receipt = dataclasses.asdict(offer.contribution), offer.receipt
    told = [run, dataclasses.asdict(offer.round), c, receipt.sha256.hex(), receipt.head.hex()]
    return b"ddiloco offer\n" + json.dumps(told, separators=(",", ":")).encode()


@dataclasses.dataclass(frozen=True)
class MergedOffer:
    """An offer in a version."""

    learner: int
    sha256: str  # of the encoded arrays, hex
    weight: float


@dataclasses.dataclass(frozen=True)
class Statement:
    """What a shard signs on a version of a fragment."""

    run: str
    shard: int
    process: int  # of the syncer, as in its tape's header
    record: int  # of that tape, by which the version is known; from 1
    head: str  # of the chain after that record, hex
    fragment: int
    version: int
    lineage: int
    sha256: str  # of the version's pieces, hex
    # None: the process began with the version
    offers: tuple[MergedOffer, ...] | None = None
    left_out: tuple[int, ...] = ()  # learners whose offers the guard left out
    interval: int | None = None  # steps of an offer beyond it add no weight; None: all do

    @property
    def name(self) -> str:
        """Which version it is on."""
        return f"version {self.version} of fragment {self.fragment}"

    def to_bytes(self) -> bytes:
        """The bytes to sign, one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Statement:
        """From what `to_bytes` gave; raises ValueError if it is something else."""
        try:
            values: dict[str, Any] = json.loads(data)
            if (offers := values["offers"]) is not None:
                values["offers"] = tuple(MergedOffer(**offer) for offer in offers)
            return cls(**{**values, "left_out": tuple(values["left_out"])})
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"no statement: {error}") from None


def join(statement: bytes, signature: bytes) -> bytes:
    """A statement and its signature as one message."""
    return statement + b"\n" + signature


def split(message: bytes) -> tuple[bytes, bytes]:
    """The statement and the signature of a message."""
    statement, _, signature = message.partition(b"\n")
    return statement, signature


@dataclasses.dataclass(frozen=True)
class Made:
    """A version that a shard made, and of what."""

    round: Any
    version: int
    given: Sequence[tuple[Contribution, OfferReceipt]]  # by learner, with those that are left out
    left_out: tuple[int, ...]
    interval: int | None  # as of `actions.Merge`

    @property
    def merged(self) -> list[tuple[Contribution, OfferReceipt]]:
        """Those that are in the version."""
        return [(c, receipt) for c, receipt in self.given if c.learner not in self.left_out]


class Ledger:
    """Follows the decisions of a shard's core, for the statements on its versions."""

    def __init__(self, header: Header) -> None:
        """`header`: of the shard's tape."""
        self._header = header
        self._offers: dict[Contribution, OfferReceipt] = {}  # whose arrays the shard has
        self._merging: dict[int, tuple[actions.Merge, list[tuple[Contribution, OfferReceipt]]]] = {}
        self.made: dict[int, Made] = {}  # by fragment, the newest version that the process made

    def handled(self, event: Any, decided: Sequence[Any]) -> None:
        """The core has decided on an event."""
        match event:
            case events.FragmentArrived(contribution=c, receipt=receipt):
                self._offers.setdefault(c, receipt)
            case events.MergeFinished(round=which, left_out=left_out):
                merge, given = self._merging.pop(which.fragment)
                self.made[which.fragment] = Made(which, merge.version, given, tuple(left_out), merge.interval)
        for action in decided:
            match action:
                case actions.Merge(round=which, contributions=contributions):
                    given = [(c, self._offers.pop(c)) for c in contributions]
                    self._merging[which.fragment] = action, given
                case actions.Release(offer):
                    self._offers.pop(offer, None)

    def begun(self, fragment: int) -> Made:
        """The version of a fragment's merge that has begun and not finished, if nobody is left out."""
        merge, given = self._merging[fragment]
        return Made(merge.round, merge.version, given, (), merge.interval)

    def statement(self, fragment: int, sha256: bytes, record: int, head: bytes) -> Statement:
        """On the newest version of a fragment, whose pieces have this hash.

        `record`, `head`: the record of the tape that has the hash, and the head of the chain after it.
        """
        h, made = self._header, self.made.get(fragment)
        assert h.state is not None, "it is a syncer's"
        version = h.state.versions[fragment] if made is None else made.version
        lineage = h.state.lineages[fragment] if made is None else h.lineage
        where = h.run, h.shard, h.process, record, head.hex()
        which = fragment, version, lineage, sha256.hex()
        if made is None:
            return Statement(*where, *which)
        offers = tuple(
            MergedOffer(
                c.learner, receipt.sha256.hex(), contribution_weight(c.steps, c.tokens, made.interval)
            )
            for c, receipt in made.merged
        )
        return Statement(*where, *which, offers, made.left_out, made.interval)
