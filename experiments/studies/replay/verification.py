"""Whether a run's public log is what its learners signed and its rules decide, and the only one there is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.outer.encoding import InvalidContribution
from ddiloco.outer.global_model import GlobalModel, pieces_sha256
from ddiloco.outer.guards import Guard, Verdict
from ddiloco.protocol import events
from ddiloco.protocol.messages import NOTHING_MERGED
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.protocol.state import SyncerState
from ddiloco.storage.kept_offers import KeptOffers, is_kept
from ddiloco.storage.signing_keys import PublicKeys, learner_name, syncer_name
from ddiloco.storage.tape import receipts
from ddiloco.storage.tape.entries import Committed, End, Signed
from ddiloco.storage.tape.header import Machine
from ddiloco.storage.tape.receipts import Ledger, Made, Statement
from experiments.studies.replay.plan import SyncerProcess
from experiments.studies.replay.reading import Tape

TOLERANCE = 1e-5
"""Of a merge made again on another processor: its error over the change to the version, as norms."""


class Process(NamedTuple):
    """A process of the syncer, of all in a log."""

    history: int  # a rollback begins another
    shard: int
    number: int


@dataclasses.dataclass(frozen=True)
class CheckedVersion:
    """A version in the log, and the offers in it."""

    process: Process
    made: Made
    sha256: bytes | None  # of its pieces; None: the process was killed before it had noted them
    state: bytes = b""  # SHA-256 of the outer optimizer's; empty: not known
    number: int = 0  # of the merge, in the order in which the process made them

    @property
    def name(self) -> str:
        """Its round and fragment, as findings name them."""
        which = self.made.round
        return f"round {which.step}, fragment {which.fragment}, version {self.made.version}"


class LogCheck:
    """Checks the tapes of a run's syncer, process by process.

    Attributes:
      findings: a sentence on each thing that is not as it must be.
      versions: by fragment and version, those that were made; of a history that was set back, the newest.
    """

    def __init__(self, policy: SyncPolicy, total_steps: int | None, keys: PublicKeys) -> None:
        self.policy, self.total_steps, self.keys = policy, total_steps, keys
        self.findings: list[str] = []
        self.versions: dict[tuple[int, int], CheckedVersion] = {}
        self.statements: dict[str, Statement] = {}  # by the head that is in it, hex
        self.records: dict[Process, int] = {}  # how many the tape of each has
        self.empty: dict[Process, int] = {}  # by process, its first merge that made no version
        self.histories = 0
        self.offers: set[str] = set()  # SHA-256 (hex) of those that came
        self.signatures = 0  # that were checked
        self.machines: list[Machine] = []  # on which the syncer's processes were

    def history(self, tapes: Sequence[Tape], set_back: bool = False) -> None:
        """Checks the tapes of one history; `set_back`: it continues from a rollback."""
        self.histories += 1
        here = {tape.header.shard for tape in tapes}
        for shard in sorted(set(range(max((tape.header.shards for tape in tapes), default=1))) - here):
            self.findings.append(f"there is no log of {syncer_name(shard)}")
        for shard in sorted(here):
            own = sorted((t for t in tapes if t.header.shard == shard), key=lambda t: t.header.process)
            self._begins(own[0], set_back)
            self.machines += [tape.header.machine for tape in own]
            for number in range(len(own)):
                self._process(own, number)

    def _begins(self, tape: Tape, set_back: bool) -> None:
        header = tape.header
        state, initial = header.state, SyncerState.initial(self.policy.num_fragments)
        if state is None:
            return
        if set_back:
            for p, sha256 in zip(header.fragments, header.sha256, strict=True):
                version = self.versions.get((p, state.versions[p]))
                if version is not None and version.sha256 not in (None, bytes.fromhex(sha256)):
                    self._find(tape, f"goes on from {version.name} with other parameters")
        elif dataclasses.replace(state, incarnations=(), delays={}) != initial or header.previous:
            self._find(tape, "does not begin with the run: a log before it is missing")

    def _process(self, tapes: Sequence[Tape], number: int) -> None:
        check = _ProcessCheck(self, tapes, number)
        try:
            check.actor()
            check.ends()
        except Exception as error:  # what is forged may break the core anywhere
            problem = str(error).removeprefix(f"{tapes[number].path}: ")
            self._find(tapes[number], f"{check.place}the log contradicts itself: {problem}")

    def _find(self, tape: Tape, problem: str) -> None:
        self.findings.append(f"{tape.header.actor}, {tape.path.name}: {problem}")


class _ProcessCheck(SyncerProcess):
    """Follows one tape, and checks what was signed and what the process left to the next one."""

    def __init__(self, log: LogCheck, tapes: Sequence[Tape], number: int) -> None:
        super().__init__(tapes, number, log.policy, log.total_steps, None)
        header = self.tape.header
        self._log, self._following = log, tapes[number + 1] if number + 1 < len(tapes) else None
        self._ledger = Ledger(header)
        self._id = Process(log.histories, header.shard, header.process)
        self._sha256 = dict(zip(header.fragments, map(bytes.fromhex, header.sha256), strict=True))
        self._to_sign = list(header.fragments)  # fragments of which a statement must follow
        self._heads = {b""}
        self._ends = [end for end, _ in self.tape.records]
        self._record = 1
        self._now = header.now
        self._over = False
        self.place = ""
        log.records[self._id] = len(self.tape.records)

    def handled(self, event: Any, decided: Sequence[Any], now: float | None) -> None:
        """Checks the entry that the actor has taken."""
        super().handled(event, decided, now)
        while self._ends[self._record - 1] <= self.entry:
            self._record += 1
        if self._over:
            self._find("goes on after its end")
        if now is not None and now < self._now:
            self._find(f"time falls by {self._now - now:g} s")
        self._now = self._now if now is None else now
        if self._to_sign and not isinstance(event, Signed):
            self._find(f"has no signature under the newest version of fragment {self._to_sign[0]}")
            self._to_sign.clear()
        self._ledger.handled(event, decided)
        match event:
            case events.FragmentArrived():
                self._check_offer(event)
            case Committed(fragment=p, version=version, sha256=sha256, state=state):
                made, merge = self._ledger.made[p], self._merges[-1]
                self.place = f"round {made.round.step}, fragment {p}, version {version}: "
                self._log.versions[p, version] = CheckedVersion(self._id, made, sha256, state, merge.number)
                self._sha256[p] = sha256
                self._to_sign = [p]
            case Signed(fragment=p, signature=signature):
                self._check_signature(p, signature)
            case events.MergeFinished() if self._merges[-1].empty:
                self._log.empty.setdefault(self._id, self._merges[-1].number)
            case End():
                self._over = True

    def _check_offer(self, offer: events.FragmentArrived) -> None:
        learner, receipt = offer.contribution.learner, offer.receipt
        self._log.signatures += 1
        self._log.offers.add(receipt.sha256.hex())
        signed = receipts.signed_offer(self.tape.header.run, offer)
        problem = self._log.keys.problem(learner_name(learner), receipt.signature, signed)
        if problem is None and receipt.head not in self._heads:
            problem = "names a head that this log never had: the learner was told another history"
        if problem is not None:
            which = offer.round
            self.place = f"round {which.step}, fragment {which.fragment}: "
            self._find(f"the offer of learner {learner} {problem}")

    def _check_signature(self, p: int, signature: bytes) -> None:
        if self._to_sign[:1] != [p]:
            self._find(f"signs fragment {p}, of which there is no new version")
            return
        self._to_sign.pop(0)
        record = self._record - 1  # the signature has a record of its own
        head = self.tape.records[record - 1][1]
        statement = self._ledger.statement(p, self._sha256[p], record, head)
        problem = self._log.keys.problem(syncer_name(self._id.shard), signature, statement.to_bytes())
        self._log.signatures += 1
        if problem is not None:
            made = self._ledger.made.get(p)
            self.place = "" if made is None else f"round {made.round.step}, fragment {p}: "
            self._find(f"{statement.name} {problem} under what the log decides")
        self._heads.add(head)
        self._log.statements[statement.head] = statement

    def ends(self) -> None:
        """Checks what the next process of the shard, if any, began with."""
        if self.tape.torn and self._over:
            self._find(f"{self.tape.torn} bytes follow its end")
        for merge in self.unnoted():
            p = merge.round.fragment
            made = self._ledger.begun(p)
            self._log.versions[p, merge.version] = CheckedVersion(self._id, made, None, b"", merge.number)
        if self._following is None:
            return
        header = self._following.header
        if header.previous != self.tape.records[-1][1].hex():
            self._find(f"its last records are not those that {self._following.path.name} goes on from")
        for p in self.tape.header.fragments:
            self._check_next(p)
        known = dict(header.state.incarnations)
        for learner, incarnation in self.core.state().incarnations:
            if known.get(learner, 0) < incarnation:
                self._find(f"the next process does not know incarnation {incarnation} of learner {learner}")

    def _check_next(self, p: int) -> None:
        here, then = self.core.state(), self._following.header.state
        sha256 = bytes.fromhex(self._following.header.sha256[self._following.header.fragments.index(p)])
        marks = {learner: {mark} for learner, mark in here.watermarks[p].items()}
        round_step, lineage = here.merged_steps[p], here.lineages[p]
        known = self._log.versions.get((p, then.versions[p]))
        if then.versions[p] != here.versions[p]:  # `unnoted` has checked that it was being merged
            made = known.made
            round_step, lineage = made.round.step, self.tape.header.lineage
            for c, _ in made.given:  # the guard may have left some out
                marks.setdefault(c.learner, {NOTHING_MERGED}).add(c.upto)
        elif known is not None and known.sha256 not in (None, sha256):
            self._find(f"fragment {p} is another one in {self._following.path.name}")
        if (then.merged_steps[p], then.lineages[p]) != (round_step, lineage):
            self._find(f"fragment {p} is of another round or lineage in {self._following.path.name}")
        for learner in sorted(marks.keys() | then.watermarks[p].keys()):
            mark = then.watermarks[p].get(learner, NOTHING_MERGED)
            if mark not in marks.get(learner, {NOTHING_MERGED}):
                self._find(
                    f"learner {learner} has another watermark of fragment {p} in {self._following.path.name}"
                )

    def _find(self, problem: str) -> None:
        self._log._find(self.tape, self.place + problem)


@dataclasses.dataclass
class LearnerAccount:
    """A learner's own file, compared with the log.

    Attributes:
      sent: offers that it signed.
      arrived: those of them that the log has.
      versions: statements that it has.
      claims: its unproved statements.
    """

    learner: str
    sent: int = 0
    arrived: int = 0
    versions: int = 0
    claims: list[str] = dataclasses.field(default_factory=list)


def check_heads(log: LogCheck, path: pathlib.Path) -> LearnerAccount:
    """Like `check_lines`, from a file."""
    try:
        return check_lines(log, path.stem, path.read_text().splitlines())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def check_lines(log: LogCheck, learner: str, lines: Sequence[str]) -> LearnerAccount:
    """Compares a learner's receipts with the log, and adds what contradicts it to the findings.

    Raises:
      ValueError: a line is something else; the message names it.
    """
    account = LearnerAccount(learner)
    for number, line in enumerate(lines, start=1):
        try:
            kept = json.loads(line)
            signed, signature = kept["signed"].encode(), bytes.fromhex(kept["signature"])
            _check_line(log, account, kept["kind"], signed, signature, kept.get("problem"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number}: {error}") from None
    return account


def _check_line(
    log: LogCheck, account: LearnerAccount, kind: str, signed: bytes, signature: bytes, claim: str | None
) -> None:
    if kind == "offer":
        account.sent += 1
        account.arrived += json.loads(signed.partition(b"\n")[2])[3] in log.offers
        return
    account.versions += 1
    if claim is not None:
        account.claims.append(f"{account.learner}: {claim}")
    if not signed:
        return
    statement = Statement.from_bytes(signed)
    log.signatures += 1
    if log.keys.problem(syncer_name(statement.shard), signature, signed) is not None:
        return  # anybody can have written it
    if log.statements.get(statement.head) == statement:
        return
    name, process = statement.name, (statement.shard, statement.process)
    known = max((count for of, count in log.records.items() if of[1:] == process), default=None)
    of = log.versions.get((statement.fragment, statement.version))
    where = "" if of is None else f"round {of.made.round.step}: "
    if known is None or statement.record >= known:
        lost = f"no process {statement.process}" if known is None else f"{known} records"
        problem = f"has a signed statement on {name} after record {statement.record}, but the log has {lost}"
    else:
        problem = f"was told another history: its signed statement on {name} is not in the log"
    log.findings.append(f"{where}{account.learner} {problem}")


class _LoggedGuard(Guard):
    """Leaves out those whom the log does, and keeps what the run's guard says of them."""

    def __init__(self, left_out: Sequence[int], guard: Guard | None) -> None:
        """`guard`: has judged all earlier merges of the process; None: that cannot be done again."""
        self._left_out, self._guard = frozenset(left_out), guard
        self.found = self._left_out

    def judge(self, *offers: Any) -> Verdict:
        """The log's verdict."""
        if self._guard is not None:
            self.found = self._guard.judge(*offers).left_out
        return Verdict(self._left_out, ())


@dataclasses.dataclass
class MergesAgain:
    """Makes kept merges again.

    Attributes:
      made: their number.
      close: how many of them are equal within TOLERANCE, not to the bit, as on another processor.
      open: how many could not be compared, since the process was killed before it had noted them.
    """

    log: LogCheck
    model: GlobalModel
    kept: KeptOffers
    share: float
    same_machine: bool
    made: int = 0
    close: int = 0
    open: int = 0

    def run(self) -> None:
        """Makes all again, in order; adds findings to the log's."""
        self._fresh = {p: self.model.state(p).optimizer for p in self.model.fragments}
        # By process, its guard, as long as all merges that it has judged are made again
        self._guards = {process: self.model.new_guard() for process in self.log.records}
        for version in sorted(
            self.log.versions.values(), key=lambda version: (version.process, version.number)
        ):
            made = self.made
            self._check(version)
            if self.made == made or version.number >= self.log.empty.get(version.process, version.number + 1):
                self._guards[version.process] = None

    def _check(self, version: CheckedVersion) -> None:
        p, number = version.made.round.fragment, version.made.version
        following = self.log.versions.get((p, number + 1))
        if following is None and self.share < 1:  # not chosen yet
            chosen = False
        else:
            signatures = [] if following is None else [r.signature for _, r in following.made.given]
            chosen = is_kept(self.share, signatures)
        try:
            before, offers = self.kept.load(p, number)
        except FileNotFoundError:
            if chosen and version.made.given:
                self._find(version, "its offers had to be kept, but are gone")
            return
        except (ValueError, OSError) as error:
            self._find(version, f"its offers cannot be read: {error}")
            return
        if (problem := self._problem(version, before, offers)) is not None:
            self._find(version, problem)

    def _problem(self, version: CheckedVersion, before: Any, offers: Sequence[Any]) -> str | None:
        p, number, given = version.made.round.fragment, version.made.version, version.made.given
        last = self.log.versions.get((p, number - 1))
        if version.sha256 is None or (last is None and number > 1) or (last and not last.sha256):
            self.open += 1
            return None
        if last is not None:
            known = last.sha256, last.state
            if known != (pieces_sha256(before.pieces), pieces_sha256(before.optimizer)):
                return "the kept state before it is not that of the version before"
        elif pieces_sha256(before.optimizer) != pieces_sha256(self._fresh[p]):
            return "its outer optimizer does not begin afresh"
        if [pieces_sha256(arrays) for arrays in offers] != [receipt.sha256 for _, receipt in given]:
            return "its kept offers are not those that learners signed"
        try:
            self.model.restore(p, before)
            read = [
                self.model.read(p, arrays, c.learner) for arrays, (c, _) in zip(offers, given, strict=True)
            ]
        except (ValueError, InvalidContribution) as error:
            return f"its kept offers cannot be merged: {error}"
        reliable = version.number < self.log.empty.get(version.process, version.number + 1)
        guard = _LoggedGuard(version.made.left_out, self._guards[version.process] if reliable else None)
        self.model.guard = guard
        counts, learners = [(c.steps, c.tokens) for c, _ in given], [c.learner for c, _ in given]
        self.model.merge(p, read, counts, learners, version.made.interval)
        self.made += 1
        if guard.found != frozenset(version.made.left_out):
            own, logged = (
                ", ".join(map(str, sorted(m))) or "nobody" for m in (guard.found, version.made.left_out)
            )
            return f"the guard leaves out {own} of the learners in it, the log {logged}"
        state = self.model.state(p)
        if (pieces_sha256(state.pieces), pieces_sha256(state.optimizer)) == (version.sha256, version.state):
            return None
        if not self.same_machine and self._is_close(p, number, before.pieces, state.pieces):
            self.close += 1
            return None
        who = ", ".join(map(str, learners))
        return f"merging the offers of learners {who} by the log's weights gives another version"

    def _is_close(self, p: int, number: int, before: Sequence[Any], made: Sequence[Any]) -> bool:
        """Whether a version is, within TOLERANCE, the one that the next merge began with, if that is kept."""
        try:
            then, _ = self.kept.load(p, number + 1)
        except (OSError, ValueError):
            return False
        if pieces_sha256(then.pieces) != self.log.versions[p, number].sha256:
            return False
        error = sum(float(np.sum((a - b) ** 2)) for a, b in zip(made, then.pieces, strict=True))
        change = sum(float(np.sum((a - b) ** 2)) for a, b in zip(then.pieces, before, strict=True))
        return error <= TOLERANCE**2 * change

    def _find(self, version: CheckedVersion, problem: str) -> None:
        self.log.findings.append(f"{version.name}: {problem}")
