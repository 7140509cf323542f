"""A run's public log: honest ones pass, with whatever has failed, and every forgery is found and named."""

import collections
import dataclasses
import json
import random
import re

import pytest

from ddiloco.storage.signing_keys import syncer_name
from ddiloco.storage.tape.file import TapeError
from ddiloco.storage.tape.receipts import Statement
from experiments.studies.replay.verification import check_lines
from tests.long import times
from tests.studies.replay.signed_logs import Forger, Parties, honest_log, small_plan

HONEST = times(12, 1000)
FORGERIES = times(60, 10_000)
EACH = 20  # of one log
NAMED = re.compile(r"(round|version|byte|process|entry) \d+|no log of|does not begin|goes on from")


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    return Parties(tmp_path_factory.mktemp("parties") / "keys")


def test_honest_logs_of_runs_with_kills_returns_and_lost_disks_pass(parties, tmp_path):
    versions = processes = signatures = 0
    for seed in range(HONEST):
        folder = tmp_path / str(seed)
        folder.mkdir()
        log = honest_log(seed, folder, parties)
        check = log.check(parties.public)
        assert check.findings == [], seed
        versions, processes = versions + len(check.versions), processes + len(log.files)
        signatures += check.signatures
    assert min(versions, processes, signatures // 2) > HONEST  # there was something to check


def test_every_forgery_is_found_and_named(parties, tmp_path):
    rng, found, seed, tries = random.Random(66), collections.Counter(), 0, 0
    while found.total() < FORGERIES:
        if tries % EACH == 0:
            folder = tmp_path / str(seed)
            folder.mkdir()
            log = honest_log(seed, folder, parties, small_plan(seed))
            forger, seed = Forger(log, folder, parties), seed + 1
        kind = list(forger.kinds)[tries % len(forger.kinds)]
        tries += 1
        if (files := forger.forged(kind, rng)) is None:
            continue
        found[kind] += 1
        try:
            findings = log.check(parties.public, files).findings
        except TapeError as error:
            findings = [str(error)]
        assert any(map(NAMED.search, findings)), (kind, seed, findings)
    assert set(found) == set(forger.kinds)


def test_a_version_that_only_one_learner_was_told_is_found(parties, tmp_path):
    log = honest_log(3, tmp_path, parties, small_plan(3))
    assert log.check(parties.public).findings == []
    learner, lines = next(iter(log.lines.items()))
    kept = json.loads(lines[-1])
    statement = Statement.from_bytes(kept["signed"].encode())
    shard, another = syncer_name(statement.shard), dataclasses.replace(statement, sha256="ab" * 32)
    for other, signer, finds in (
        (another, shard, True),
        (dataclasses.replace(statement, head="ab" * 32), shard, True),
        (another, "learner-0", False),  # which proves nothing
    ):
        signature = parties.signers[signer].sign(other.to_bytes())
        line = {"kind": "statement", "signed": other.to_bytes().decode(), "signature": signature.hex()}
        log.lines[learner] = [*lines, json.dumps(line)]
        told = f"learner-{learner} was told another history: its signed statement on {statement.name}"
        findings = log.check(parties.public).findings
        assert [bool(re.search(rf"^round \d+: {told}", one)) for one in findings] == [True] * finds


def test_a_learner_s_file_counts_its_offers_and_gives_its_claims(parties, tmp_path):
    log = honest_log(3, tmp_path, parties, small_plan(3))
    check = log.check(parties.public)
    sha256 = next(iter(check.offers))
    offers = [b"ddiloco offer\n" + json.dumps(["run", {}, {}, one, ""]).encode() for one in (sha256, "ab")]
    lines = [json.dumps({"kind": "offer", "signed": one.decode(), "signature": ""}) for one in offers]
    claim = {"kind": "statement", "signed": "", "signature": "", "problem": "came without a signed statement"}
    account = check_lines(check, "learner-1", [*lines, json.dumps(claim)])
    assert (account.sent, account.arrived, account.versions) == (2, 1, 1)
    assert account.claims == ["learner-1: came without a signed statement"]
    assert check.findings == []
    for wrong in ("{", "[]", '{"kind": "statement"}', json.dumps({**claim, "signed": "{}"})):
        with pytest.raises(ValueError, match=r"^line 2: "):
            check_lines(check, "learner-1", [lines[0], wrong])
