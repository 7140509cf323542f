"""Signed logs of random schedules, with kills and returns, and all ways in which the syncer may forge one."""

import dataclasses
import hashlib
import json
import pathlib
import random

from ddiloco.protocol import events
from ddiloco.protocol.errors import LocalProtocolError
from ddiloco.protocol.messages import OfferReceipt
from ddiloco.protocol.syncer import SyncerCore
from ddiloco.storage.signing_keys import PublicKeys, Signer, learner_name, syncer_name
from ddiloco.storage.tape import receipts
from ddiloco.storage.tape.entries import (
    Committed,
    End,
    Entry,
    Signed,
    entries_of,
    payload_of,
    record_of,
)
from ddiloco.storage.tape.file import TapeFile, parse
from ddiloco.storage.tape.header import Header, Machine, from_json
from ddiloco.storage.tape.recorder import Notary, SyncerTape, last_head, syncer_tape
from experiments.studies.replay.reading import tape_of
from experiments.studies.replay.verification import LogCheck, check_lines
from experiments.studies.schedules.plans import draw_plan
from experiments.studies.schedules.random_schedule import RandomSchedule

MACHINE = Machine("cpu", ("cpu",), {}, 1, "", {})
LEARNERS = 8


def sha256_of(*about):
    return hashlib.sha256(repr(about).encode()).digest()


class Parties:
    """The keys of all."""

    def __init__(self, folder):
        names = [learner_name(m) for m in range(LEARNERS)] + [syncer_name(s) for s in range(4)]
        self.signers = {name: Signer(folder, name) for name in names}
        self.public = PublicKeys(folder)

    def notary(self, shard):
        return Notary(self.signers[syncer_name(shard)], self.public)

    def signed(self, run, offer, head):
        """The offer with its learner's receipt."""
        c = offer.contribution
        unsigned = OfferReceipt(sha256_of(c.learner, c.fragment, c.upto.bare, c.since.bare), head)
        offer = dataclasses.replace(offer, receipt=unsigned)
        signature = self.signers[learner_name(c.learner)].sign(receipts.signed_offer(run, offer))
        return dataclasses.replace(offer, receipt=dataclasses.replace(unsigned, signature=signature))


class SignedLog:
    """What is public of a run, and what its learners keep."""

    def __init__(self, plan, files, lines):
        self.plan, self.files, self.lines = plan, files, lines

    def check(self, public, files=None):
        """The check of this log, or of forged files in its place."""
        files = self.files if files is None else files
        log = LogCheck(self.plan.policy, self.plan.total_steps, public)
        tapes = [tape_of(path, parse(data, path)) for path, data in files.items()]
        log.history([tape for tape in tapes if tape is not None])
        for learner, lines in self.lines.items():
            check_lines(log, learner_name(learner), lines)
        return log


class SignedSchedule(RandomSchedule):
    """Runs a plan whose syncer signs tapes in a folder, and whose learners sign their offers."""

    def __init__(self, plan, folder, parties):
        self.folder, self.parties = folder, parties
        self.tapes = {}  # by shard: lineage, tape
        self.heads = {}  # by shard and learner: lineage of the process, head
        self.lines = {}  # by learner
        self.known = {}  # by shard and fragment, the version on the tape
        self.cached = {}
        super().__init__(plan, checked=False)

    def _tape(self, shard, now):
        syncer = self.fleet.syncers[shard]
        if self.tapes.get(shard, (None, None))[0] == syncer.lineage:
            return self.tapes[shard][1]
        state, process = syncer.durable, syncer.lineage + 1
        shards = self.plan.shards
        own = [p for p in range(len(state.versions)) if p % shards == shard]
        sha256 = tuple(sha256_of(p, state.versions[p], state.lineages[p]).hex() for p in own)
        which = {"run": "run", "shard": shard, "shards": shards, "previous": last_head(self.folder, shard)}
        begun = {"state": state, "sha256": sha256, "lineage": syncer.lineage}
        about = "remote", "", "", MACHINE, now, now
        header = Header("syncer", None, process, *about, **which, **begun)
        path = syncer_tape(self.folder, process, shard)
        tape = SyncerTape(path, header, notary=self.parties.notary(shard))
        self.known.update({p: state.versions[p] for p in own})
        self.tapes[shard] = syncer.lineage, tape
        return tape

    def syncer_handled(self, event, out, now, shard=0):
        tape, syncer = self._tape(shard, now), self.fleet.syncers[shard]
        if isinstance(event, events.FragmentArrived):
            key = shard, syncer.lineage, event
            if key not in self.cached:
                lineage, head = self.heads.get((shard, event.contribution.learner), (None, b""))
                head = head if lineage == syncer.lineage else b""
                self.cached[key] = self.parties.signed("run", event, head)
            event = self.cached[key]
        tape.heard(event, out, now)
        if isinstance(event, events.MergeFinished):
            p = event.round.fragment
            version = syncer.durable.versions[p]
            if version > self.known[p]:
                self.known[p] = version
                tape.committed(p, version, sha256_of(p, version, syncer.lineage))
        super().syncer_handled(event, out, now, shard)

    def learner_handled(self, learner, event, out, now):
        match event:
            case events.UpdateArrived(fragment=p, version=version):
                versions = {p: version}
            case events.Welcomed(versions=all_versions, fragments=fragments):
                versions = dict(zip(fragments or range(len(all_versions)), all_versions, strict=True))
            case _:
                return
        for p, version in versions.items():
            shard = p % self.plan.shards
            lineage, tape = self.tapes[shard]
            message = tape.statements[p]
            text, signature = receipts.split(message)
            statement = receipts.Statement.from_bytes(text)
            if statement.version == version:
                self.heads[shard, learner.number] = lineage, bytes.fromhex(statement.head)
                line = {"kind": "statement", "signed": text.decode(), "signature": signature.hex()}
                self.lines.setdefault(learner.number, []).append(json.dumps(line))

    def log(self):
        """The log of the run, which is over."""
        for shard, (_, tape) in self.tapes.items():
            state = self.fleet.syncers[shard].durable
            own = [p for p in range(len(state.versions)) if p % self.plan.shards == shard]
            tape.end([state.versions[p] for p in own])
        files = {path: path.read_bytes() for path in sorted(self.folder.glob("*.tape"))}
        return SignedLog(self.plan, files, self.lines)


def honest_log(seed, folder, parties, plan=None):
    """The log of a seed's plan: kills of the syncer and of learners, lost disks of learners."""
    plan = dataclasses.replace(plan or draw_plan(seed), rollbacks=(), snapshots=())
    if len(plan.joins) > LEARNERS:
        plan = dataclasses.replace(plan, joins=plan.joins[:LEARNERS])
    schedule = SignedSchedule(plan, folder, parties)
    schedule.run()
    return schedule.log()


# Forgery.


def records_of(data):
    """The records of a tape's bytes, to be changed."""
    return [record_of(record.payload) for record in parse(data, pathlib.Path("a")).records]


def file_of(records, folder):
    """The bytes of a tape with these records, its chain made anew."""
    path = folder / "forged"
    path.unlink(missing_ok=True)
    file = TapeFile(path)
    for record in records:
        file.append(payload_of(record))
    file.close()
    return path.read_bytes()


class Forger:
    """Forges a log before the last head that any learner has seen, in a way that the random source chooses.

    Attributes:
      kinds: names of the ways.
    """

    def __init__(self, log, folder, parties):
        self.log, self.folder, self.parties = log, folder, parties
        seen = [
            receipts.Statement.from_bytes(json.loads(line)["signed"].encode())
            for lines in log.lines.values()
            for line in lines
        ]
        self.last = {}  # by file, the last record under a head that a learner has
        for statement in seen:
            path = syncer_tape(folder, statement.process, statement.shard)
            self.last[path] = max(self.last.get(path, 0), statement.record)
        self.kinds = {
            "a byte changed": self.byte,
            "a record dropped": self.drop,
            "two records swapped": self.swap,
            "a record doubled": self.double,
            "the end cut": self.cut,
            "a number changed": self.number,
            "a whole process dropped": self.process,
            "an offer signed by another": self.other_signature,
            "an offer dropped, and all signed again": self.again_without,
            "an offer's tokens changed, and all signed again": self.again_with_other_tokens,
            "an offer left out, and all signed again": self.again_left_out,
            "a version changed, and all signed again": self.again_with_another_version,
            "an event's time changed, and all signed again": self.again_later,
        }

    def forged(self, kind, rng):
        """The files with one forgery of the kind; None: there is nothing there to forge like that."""
        paths = [path for path, last in self.last.items() if last > 2]
        if not paths:
            return None
        path = rng.choice(paths)
        changed = self.kinds[kind](path, rng)
        if changed is None or changed == self.log.files[path]:
            return None
        files = {**self.log.files, path: changed}
        return {one: data for one, data in files.items() if data != b""}

    # Without a key.

    def byte(self, path, rng):
        data = bytearray(self.log.files[path])
        at = parse(bytes(data), path).records[self.last[path] - 1].at  # the last record need not be whole
        data[rng.randrange(at)] ^= rng.randrange(1, 256)
        return bytes(data)

    def _records(self, path, rng):
        records = records_of(self.log.files[path])
        return records, rng.randrange(self.last[path])

    def drop(self, path, rng):
        records, at = self._records(path, rng)
        return file_of(records[:at] + records[at + 1 :], self.folder)

    def swap(self, path, rng):
        records, at = self._records(path, rng)
        other = rng.randrange(self.last[path])
        records[at], records[other] = records[other], records[at]
        return file_of(records, self.folder)

    def double(self, path, rng):
        records, at = self._records(path, rng)
        return file_of([*records[:at], records[at], *records[at:]], self.folder)

    def cut(self, path, rng):
        records, at = self._records(path, rng)
        return file_of(records[:at], self.folder)

    def number(self, path, rng):
        records, at = self._records(path, rng)
        numbers = list(numbers_in(records[at]))
        if not numbers:
            return None
        message, name = rng.choice(numbers)
        setattr(message, name, getattr(message, name) + rng.choice([1, 7, 1000]))
        return file_of(records, self.folder)

    def process(self, path, rng):
        return b""

    def other_signature(self, path, rng):
        """A learner's offer under the number of another."""
        records, _ = self._records(path, rng)
        found = [
            entry.event.fragment_arrived
            for record in records[: self.last[path]]
            for entry in record.entries
            if entry.event.HasField("fragment_arrived")
        ]
        if not found:
            return None
        offer = rng.choice(found)
        offer.contribution.learner = (offer.contribution.learner + 1) % LEARNERS
        return file_of(records, self.folder)

    # With the syncer's key: its core decides on other events, and all statements are signed again.

    def again_without(self, path, rng):
        return self._again(path, rng, events.FragmentArrived, lambda event: None)

    def again_with_other_tokens(self, path, rng):
        def change(event):
            c = dataclasses.replace(
                event.contribution, tokens=event.contribution.tokens + rng.randint(1, 100)
            )
            return dataclasses.replace(event, contribution=c)

        return self._again(path, rng, events.FragmentArrived, change)

    def again_left_out(self, path, rng):
        def change(event):
            return dataclasses.replace(event, left_out=(*event.left_out, rng.randrange(LEARNERS)))

        return self._again(path, rng, events.MergeFinished, change)

    def again_with_another_version(self, path, rng):
        return self._again(
            path, rng, Committed, lambda note: dataclasses.replace(note, sha256=rng.randbytes(32))
        )

    def again_later(self, path, rng):
        return self._again(path, rng, events.StepReported, lambda event: event, later=0.001)

    def _again(self, path, rng, kind, change, later=0.0):
        content = parse(self.log.files[path], path)
        header = from_json(record_of(content.records[0].payload).header)
        heard = [
            (number, entry)
            for number, record in enumerate(content.records[1 : self.last[path]], start=1)
            for entry in entries_of(record.payload)
        ]
        found = [n for n, (_, entry) in enumerate(heard) if isinstance(entry.content, kind)]
        if not found:
            return None
        at = rng.choice(found)
        entry = heard[at][1]
        changed = change(entry.content)
        now = None if entry.now is None else entry.now + later
        entries = [entry for _, entry in heard] + [
            entry for record in content.records[self.last[path] :] for entry in entries_of(record.payload)
        ]
        entries[at : at + 1] = [] if changed is None else [Entry(now, changed)]
        return self._signed_again(header, entries)

    def _signed_again(self, header, entries):
        """A tape on which the core has decided on these entries, as far as it can follow them."""
        policy, path = self.log.plan.policy, self.folder / "forged"
        path.unlink(missing_ok=True)
        core = SyncerCore(
            policy, self.log.plan.total_steps, header.state, header.lineage, header.shard, header.shards
        )
        tape = SyncerTape(path, header, notary=self.parties.notary(header.shard))
        now = header.now
        for entry in entries:
            match entry.content:
                case Signed():
                    continue
                case Committed() as note:
                    tape.committed(note.fragment, note.version, note.sha256)
                case End(versions=versions):
                    tape.end(versions)
                case event:
                    now = max(now, entry.now)
                    try:
                        tape.heard(event, core.handle(event, now), now)
                    except (LocalProtocolError, LookupError):
                        continue
        tape.close()
        return path.read_bytes()


def numbers_in(message):
    """The messages in this one, with the names of their whole numbers that are not 0."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.type == field.TYPE_MESSAGE:
            for part in values:
                yield from numbers_in(part)
        elif field.type in (field.TYPE_INT64, field.TYPE_UINT64) and not field.is_repeated:
            yield message, field.name


def small_plan(seed):
    """A plan of two or three learners with few rounds, so that forging it takes milliseconds."""
    rng = random.Random(seed)
    plan = draw_plan(seed)
    learners, shards = rng.choice([2, 3]), rng.choice([1, 2])
    small = {"num_learners": learners, "quorum": 1, "interval": 3, "num_fragments": 2, "max_run_ahead": None}
    return dataclasses.replace(
        plan,
        policy=dataclasses.replace(plan.policy, **small),
        joins=(0.0,) * learners,
        total_steps=18,
        shards=shards,
        weather=dataclasses.replace(plan.weather, refuses_all=False, skipped=0.0, loss=0.0),
        retired=(),
        timings=(),
        faults=tuple(fault for fault in plan.faults if fault[2] < learners),
    )
