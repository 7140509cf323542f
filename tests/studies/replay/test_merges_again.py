"""Kept merges, made again: what a syncer merged otherwise than its log says is found."""

import dataclasses

import numpy as np
import pytest

from ddiloco.outer.fragments import fragment
from ddiloco.outer.global_model import GlobalModel, pieces_sha256
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.protocol.messages import Contribution, OfferReceipt, RoundId
from ddiloco.protocol.policy import SyncPolicy
from ddiloco.storage.kept_offers import FOLDER, KeptOffers, is_kept
from ddiloco.storage.signing_keys import PublicKeys
from ddiloco.storage.tape.receipts import Made
from experiments.studies.replay.verification import CheckedVersion, LogCheck, MergesAgain, Process

LEARNERS = 4
PROCESS = Process(1, 0, 1)


def new_model():
    return GlobalModel(fragment({"a": (64,)}, 1), {"a": np.zeros(64, np.float32)}, OuterConfig(), LEARNERS)


class Run:
    """Merges of a syncer that keeps their offers, and logs what it is asked to."""

    def __init__(self, folder, share=1.0):
        self.log = LogCheck(SyncPolicy(LEARNERS), None, PublicKeys(folder))
        self.log.records[PROCESS] = 1
        self.kept, self.share, self.model = KeptOffers(folder, share), share, new_model()
        self.rng = np.random.default_rng(1)

    def merge(self, steps=(4,) * LEARNERS, logged_steps=None, left_out=None, liar=None):
        """One merge, with these steps of each; by the log with others, or without some learners."""
        number = self.model.fragment(0)[0] + 1
        common = self.rng.normal(size=64).astype(np.float32)
        offers = [(common + 0.1 * self.rng.normal(size=64).astype(np.float32),) for _ in range(len(steps))]
        if liar is not None:
            offers[liar] = (1000 * offers[liar][0],)
        before = self.model.state(0)
        read = [self.model.read(0, arrays) for arrays in offers]
        made = self.model.merge(0, read, [(n, 10 * n) for n in steps], range(len(steps)))
        self.kept.save(0, number, before, offers)
        signatures = [bytes([number, m]) for m in range(len(steps))]
        self.kept.choose(0, number - 1, signatures)
        given = [
            (
                Contribution(m, 1, 0, number - 1, number, n, 10 * n),
                OfferReceipt(pieces_sha256(arrays), b"", s),
            )
            for m, (n, arrays, s) in enumerate(zip(logged_steps or steps, offers, signatures, strict=True))
        ]
        out = made.left_out if left_out is None else left_out
        state = self.model.state(0)
        hashes = pieces_sha256(state.pieces), pieces_sha256(state.optimizer)
        record = Made(RoundId(number, 0), number, given, tuple(out), None)
        self.log.versions[0, number] = CheckedVersion(PROCESS, record, *hashes, number)

    def check(self, **more):
        again = MergesAgain(self.log, new_model(), self.kept, self.share, **{"same_machine": True, **more})
        again.run()
        return again


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_honest_merges_come_to_the_same_bits(run):
    for steps in ((4,) * LEARNERS, (4, 1, 2, 8)):
        run.merge(steps)
    run.merge(liar=2)
    assert run.log.versions[0, 3].made.left_out == (2,)
    again = run.check()
    assert (run.log.findings, again.made, again.close) == ([], 3, 0)


def test_a_learner_that_is_weighed_twice_is_found(run):
    run.merge()
    run.merge(steps=(4, 8, 4, 4), logged_steps=(4,) * LEARNERS)
    run.check()
    told = "merging the offers of learners 0, 1, 2, 3 by the log's weights gives another version"
    assert run.log.findings == [f"round 2, fragment 0, version 2: {told}"]


def test_a_learner_that_the_guard_would_not_leave_out_is_found(run):
    run.merge()
    run.merge(left_out=(1,))
    run.check()
    told = "the guard leaves out nobody of the learners in it, the log 1"
    assert run.log.findings == [f"round 2, fragment 0, version 2: {told}"]


def test_offers_that_nobody_signed_and_a_state_that_was_never_there_are_found(run):
    run.merge()
    run.merge()
    before, offers = run.kept.load(0, 2)
    run.kept.save(0, 2, before, [offers[1], *offers[1:]])
    run.check()
    found = "round 2, fragment 0, version 2: its kept offers are not those that learners signed"
    assert run.log.findings.pop() == found
    run.kept.save(0, 2, before._replace(optimizer=tuple(x + 1 for x in before.optimizer)), offers)
    run.check()
    found = "round 2, fragment 0, version 2: the kept state before it is not that of the version before"
    assert run.log.findings == [found]


def test_a_share_of_the_merges_is_kept_and_a_missing_one_is_found(tmp_path):
    run = Run(tmp_path, share=0.5)
    for _ in range(12):
        run.merge()
    here = {int(path.name) for path in (tmp_path / FOLDER / "fragment-0000").iterdir()}
    signatures = {n: [r.signature for _, r in run.log.versions[0, n].made.given] for n in range(1, 13)}
    assert here == {n for n in range(1, 12) if is_kept(0.5, signatures[n + 1])} | {12}
    assert 2 < len(here) < 12
    assert run.check().made == len(here)
    assert run.log.findings == []
    gone = min(here)
    run.kept.choose(0, gone, [])
    while (tmp_path / FOLDER / "fragment-0000" / str(gone)).exists():
        run.kept.choose(0, gone, [np.random.default_rng().bytes(8)])
    run.check()
    assert run.log.findings == [
        f"round {gone}, fragment 0, version {gone}: its offers had to be kept, but are gone"
    ]


def test_another_processor_may_differ_by_the_tolerance(run):
    run.merge()
    run.merge()
    first = run.log.versions[0, 1]
    before, offers = run.kept.load(0, 2)
    near = tuple((x * np.float32(1 + 1e-6)) for x in before.pieces)
    run.kept.save(0, 2, before._replace(pieces=near), offers)
    run.log.versions[0, 1] = dataclasses.replace(first, sha256=pieces_sha256(near))
    del run.log.versions[0, 2]
    again = run.check(same_machine=False)
    assert (run.log.findings, again.close) == ([], 1)
    run.check(same_machine=True)
    assert len(run.log.findings) == 1
