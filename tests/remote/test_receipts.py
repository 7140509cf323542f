"""What a learner signs, and what it finds in versions that are not as the syncer has stated."""

import dataclasses
import json

import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.outer.global_model import pieces_sha256
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.protocol.state import SyncerState
from ddiloco.remote.learner.receipts import LearnerReceipts
from ddiloco.storage.signing_keys import FOLDER, PublicKeys, Signer
from ddiloco.storage.tape import receipts
from ddiloco.storage.tape.header import Header, Machine
from ddiloco.storage.tape.receipts import MergedOffer, Statement
from ddiloco.storage.tape.recorder import Notary, SyncerTape

ROUND = RoundId(4, 0)
OFFER = Contribution(2, 7, 0, 0, 4, 4, 40, upto=Watermark(7, 4, '{"at": 4}'))
ARRAYS = (np.arange(6, dtype=np.float32),)
VERSION = (np.ones(6, np.float32),)
OF_ANOTHER = "of another lineage or run"
UPDATE = events.UpdateArrived(0, 1, 4, OFFER.upto.bare, lineage=9)


@pytest.fixture
def alarms():
    return []


@pytest.fixture
def syncer(tmp_path):
    return Signer(tmp_path / FOLDER, "syncer")


@pytest.fixture
def learner(tmp_path, alarms):
    made = LearnerReceipts(tmp_path, 2, alarms.append)
    made.connected(0, "run")
    return made


@pytest.fixture
def tape(tmp_path, syncer):
    state, machine = SyncerState.initial(1), Machine("cpu", ("cpu",), {}, 1, "", {})
    about = "syncer", None, 1, "remote", "", "", machine, 0.0, 0.0
    header = Header(*about, run="run", state=state, sha256=(pieces_sha256(VERSION).hex(),))
    notary = Notary(syncer, PublicKeys(tmp_path / FOLDER))
    return SyncerTape(tmp_path / "a.tape", header, notary=notary)


def problem(tape, offer, arrays=ARRAYS):
    return tape.problem(offer, lambda: pieces_sha256(arrays))


def test_a_syncer_takes_only_the_offer_that_its_learner_signed(tape, learner, tmp_path):
    receipt = learner.sign(0, ROUND, OFFER, ARRAYS)
    offer = events.FragmentArrived(ROUND, OFFER, receipt)
    assert problem(tape, offer) is None
    assert problem(tape, offer, VERSION) == "its arrays are not those that were signed"
    for other in (
        dataclasses.replace(offer, contribution=dataclasses.replace(OFFER, tokens=41)),
        dataclasses.replace(offer, round=RoundId(8, 0)),
        dataclasses.replace(offer, receipt=dataclasses.replace(receipt, signature=b"")),
    ):
        assert problem(tape, other) == "has no valid signature of learner-2"
    stranger = dataclasses.replace(offer, contribution=dataclasses.replace(OFFER, learner=5))
    assert problem(tape, stranger) == f"{tmp_path}/keys/learner-5.pub: No such file or directory"
    headed = dataclasses.replace(offer, receipt=dataclasses.replace(receipt, head=b"another"))
    assert problem(tape, headed) == "it names a head of another log"
    unsigned = events.FragmentArrived(ROUND, OFFER)
    assert problem(tape, unsigned) == "its arrays are not those that were signed"
    assert SyncerTape().problem(unsigned, lambda: b"") is None


def test_an_offer_names_the_head_of_the_newest_statement(tape, learner, alarms):
    begun = events.UpdateArrived(0, 0, 0)
    learner.check(0, begun, tape.statements[0], VERSION)
    receipt = learner.sign(0, ROUND, OFFER, ARRAYS)
    assert receipt.head.hex() == Statement.from_bytes(receipts.split(tape.statements[0])[0]).head
    assert problem(tape, events.FragmentArrived(ROUND, OFFER, receipt)) is None
    learner.connected(0, "run")
    assert learner.sign(0, ROUND, OFFER, ARRAYS).head == b""
    assert alarms == []


def stated(**changes):
    """The statement of a version with the learner's offer, as the syncer should make it."""
    own = MergedOffer(2, pieces_sha256(ARRAYS).hex(), 400.0)
    about = ("run", 0, 1, 3, "ab", 0, 1, 9, pieces_sha256(VERSION).hex(), (own,), ())
    return dataclasses.replace(Statement(*about), **changes)


def of_others(**changes):
    return (MergedOffer(**{**dataclasses.asdict(stated().offers[0]), **changes}),)


@pytest.mark.parametrize(
    ("statement", "pieces", "told"),
    [
        (stated(), VERSION, None),
        (stated(offers=None), VERSION, None),
        (stated(), ARRAYS, "is not the version that the shard signed"),
        (stated(version=2), VERSION, "its statement is on version 2 of fragment 0 of another lineage or run"),
        (
            stated(run="another"),
            VERSION,
            "its statement is on version 1 of fragment 0 of another lineage or run",
        ),
        (stated(offers=of_others(weight=200.0), interval=2), VERSION, None),
        (stated(interval=2), VERSION, "weighs the learner's offer by 400, not 200"),
        (stated(offers=of_others(weight=800.0)), VERSION, "weighs the learner's offer by 800, not 400"),
        (stated(offers=of_others(sha256="ab")), VERSION, "has an offer that the learner never made"),
        (
            stated(offers=(), left_out=(2,)),
            VERSION,
            "has the learner's work by its watermark, but not by its statement",
        ),
    ],
)
def test_a_learner_finds_a_version_that_is_not_as_stated(
    learner, syncer, alarms, tmp_path, statement, pieces, told
):
    learner.check(0, events.UpdateArrived(0, 0, 0), receipts.join(b"", b""), VERSION)  # with watermark 0
    alarms.clear()
    learner.sign(0, ROUND, OFFER, ARRAYS)
    text = statement.to_bytes()
    # The version before was not stated, but its watermark is known from one that is.
    before = stated(version=0, lineage=0, offers=None)
    signed = receipts.join(before.to_bytes(), syncer.sign(before.to_bytes()))
    learner.check(0, events.UpdateArrived(0, 0, 0), signed, VERSION)
    learner.check(0, UPDATE, receipts.join(text, syncer.sign(text)), pieces)
    assert alarms == ([] if told is None else [f"receipts: version 1 of fragment 0: {told}"])
    lines = [
        json.loads(line) for line in (tmp_path / "receipts" / "learner-2.jsonl").read_text().splitlines()
    ]
    assert [line["kind"] for line in lines] == ["statement", "offer", "statement", "statement"]
    assert lines[-1].get("problem") == told
    assert lines[-1]["signed"].encode() == text


def test_a_learner_finds_a_version_without_its_syncers_signature(learner, syncer, alarms):
    text = stated().to_bytes()
    learner.check(0, UPDATE, b"", VERSION)
    learner.check(0, UPDATE, receipts.join(text, syncer.sign(text + b" ")), VERSION)
    assert [line.partition("fragment 0: ")[2] for line in alarms] == [
        "came without a signed statement",
        "has no valid signature of syncer",
    ]


def test_a_key_may_be_a_certificates_and_must_be_kept_secret(tmp_path):
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    path = tmp_path / "syncer.key"

    def put(key):
        coding = pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
        path.write_bytes(key.private_bytes(*coding))
        path.chmod(0o600)

    put(ec.generate_private_key(ec.SECP256R1()))
    signature = Signer(tmp_path, "syncer").sign(b"data")
    public = PublicKeys(tmp_path)
    assert public.problem("syncer", signature, b"data") is None
    assert public.problem("syncer", signature, b"other") == "has no valid signature of syncer"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^config.remote.receipts: .*syncer.key: others can read"):
        Signer(tmp_path, "syncer")
    put(rsa.generate_private_key(65537, 2048))
    with pytest.raises(ConfigError, match=r"syncer.key: is no private key in PEM of Ed25519 or an elliptic"):
        Signer(tmp_path, "syncer")
    (tmp_path / "syncer.pub").write_text("none")
    assert (
        PublicKeys(tmp_path).problem("syncer", b"", b"") == f"{tmp_path}/syncer.pub: is no public key in PEM"
    )
