"""A learner's side of receipts: signed offers, and versions that must be as the shard has stated."""

from __future__ import annotations

import collections
import json
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from ddiloco.outer.global_model import pieces_sha256
from ddiloco.outer.merging import contribution_weight
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, OfferReceipt, RoundId, Watermark
from ddiloco.storage import signing_keys as keys
from ddiloco.storage.tape import receipts
from ddiloco.storage.tape.receipts import Statement

FOLDER = "receipts"  # in the workdir
_KEPT = 32  # offers of a fragment that a version may yet name


class _Sent(NamedTuple):
    """An offer that was sent."""

    sha256: str
    contribution: Contribution


class LearnerReceipts:
    """For several threads. What is signed and received goes to `receipts/learner-M.jsonl`, a line each."""

    def __init__(self, workdir: pathlib.Path, learner: int, alarm: Callable[[str], None]) -> None:
        """`alarm` takes a line on each wrong version.

        Raises:
          ConfigError: the learner's key cannot be used.
        """
        self._signer = keys.Signer(workdir / keys.FOLDER, keys.learner_name(learner))
        self._keys = keys.PublicKeys(workdir / keys.FOLDER)
        self._learner, self._alarm = learner, alarm
        self._path = workdir / FOLDER / f"learner-{learner}.jsonl"
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._run = ""
        self._heads: dict[int, bytes] = {}  # by shard, of its newest statement over this connection
        # By fragment; of this process alone
        self._sent: dict[int, collections.deque[_Sent]] = {}
        self._versions: dict[int, tuple[int, Watermark]] = {}  # the newest, and the learner's watermark in it

    def connected(self, shard: int, run: str) -> None:
        """A shard has accepted the learner; it may have been set back since."""
        with self._lock:
            self._run = run
            self._heads.pop(shard, None)

    def sign(
        self, shard: int, round_id: RoundId, contribution: Contribution, arrays: Sequence[np.ndarray]
    ) -> OfferReceipt:
        """The receipt of an offer of these encoded arrays."""
        sha256, c = pieces_sha256(arrays), contribution
        with self._lock:
            unsigned = OfferReceipt(sha256, self._heads.get(shard, b""))
            sent = self._sent.setdefault(c.fragment, collections.deque(maxlen=_KEPT))
            sent.append(_Sent(sha256.hex(), c))
        signed = receipts.signed_offer(self._run, events.FragmentArrived(round_id, c, unsigned))
        signature = self._signer.sign(signed)
        self._log("offer", signed, signature)
        return OfferReceipt(sha256, unsigned.head, signature)

    def check(
        self, shard: int, update: events.UpdateArrived, message: bytes, pieces: Sequence[np.ndarray]
    ) -> None:
        """Checks a version that came with this signed statement."""
        text, signature = receipts.split(message)
        problem, statement = self._problem(shard, update, text, signature, pieces)
        if statement is not None:
            problem = self._own(update, statement)
            with self._lock:
                self._heads[shard] = bytes.fromhex(statement.head)
        self._log("statement", text, signature, problem)
        if problem is not None:
            name = f"version {update.version} of fragment {update.fragment}"
            self._alarm(f"receipts: {name}: {problem}")

    def _problem(
        self,
        shard: int,
        update: events.UpdateArrived,
        text: bytes,
        signature: bytes,
        pieces: Sequence[np.ndarray],
    ) -> tuple[str | None, Statement | None]:
        """The statement; or why it is not on this version."""
        if not text:
            return "came without a signed statement", None
        problem = self._keys.problem(keys.syncer_name(shard), signature, text)
        if problem is not None:
            return problem, None
        try:
            statement = Statement.from_bytes(text)
        except ValueError as error:
            return str(error), None
        told = statement.run, statement.shard, statement.fragment, statement.version, statement.lineage
        if told != (self._run, shard, update.fragment, update.version, update.lineage):
            return f"its statement is on {statement.name} of another lineage or run", None
        if statement.sha256 != pieces_sha256(pieces).hex():
            return "is not the version that the shard signed", None
        return None, statement

    def _own(self, update: events.UpdateArrived, statement: Statement) -> str | None:
        """Whether the learner's own work is in a version as its watermark says; the difference, if not."""
        p, mark = update.fragment, update.watermark.bare
        with self._lock:
            version, before = self._versions.get(p, (-1, mark))
            self._versions[p] = update.version, mark
            sent = {one.sha256: one.contribution for one in self._sent.get(p, ())}
        if statement.offers is None:
            return None
        own = next((offer for offer in statement.offers if offer.learner == self._learner), None)
        if own is None:
            moved = version + 1 == statement.version and mark != before
            return "has the learner's work by its watermark, but not by its statement" if moved else None
        offer = sent.get(own.sha256)
        if offer is None:  # of an earlier process of the learner, which has its own lines in the file
            alive = any(c.upto.life == mark.life for c in sent.values())
            return "has an offer that the learner never made" if alive else None
        if offer.upto.bare != mark:
            return "has an offer of the learner, but another watermark"
        weight = contribution_weight(offer.steps, offer.tokens, statement.interval)
        if weight != own.weight:
            return f"weighs the learner's offer by {own.weight:g}, not {weight:g}"
        return None

    def _log(self, kind: str, signed: bytes, signature: bytes, problem: str | None = None) -> None:
        line = {"kind": kind, "signed": signed.decode(errors="replace"), "signature": signature.hex()}
        if problem is not None:
            line["problem"] = problem
        try:
            with self._lock:
                if self._file is None:  # only now: the syncer may have set aside an earlier run's
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self._path.open("a", buffering=1)
                self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # which must cost no update
            self._alarm(f"receipts: {self._path}: {error.strerror}")
