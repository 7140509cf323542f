"""What receipts cost: processor time of a learner beside a step, and of a syncer in a large round."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable

import numpy as np

from ddiloco.outer.global_model import pieces_sha256
from ddiloco.protocol import actions, events
from ddiloco.protocol.messages import Contribution, RoundId, Watermark
from ddiloco.protocol.state import SyncerState
from ddiloco.remote.learner.receipts import LearnerReceipts
from ddiloco.storage.signing_keys import FOLDER, PublicKeys, Signer
from ddiloco.storage.tape.header import Header
from ddiloco.storage.tape.recorder import Notary, SyncerTape
from ddiloco.workers.tapes import machine_of
from experiments.bench.learner import assembly_of, initial_fragments, training_arrays
from experiments.bench.measuring import medians, row

ALLOWED_SHARE = 0.01  # of a step
SCALE = 16  # a fragment is this many times smaller than one of 24 of a model with 9B parameters
LEARNERS, FRAGMENTS, PARAMETERS = 8, 24, 9e9
_ROUND = RoundId(24, 0)


def run(quick: bool = False) -> list[dict]:
    """Measures processor time of one thread, in a temporary folder.

    Returns:
      Two rows. `receipts_learner`, milliseconds for the receipt of an offer and the check of an update, both
      in float32, once a step, which other threads than the step's do; reference: a step of the model of
      `bench learner`; limit: a hundredth of it. `receipts_syncer`, core-seconds that the receipts of a round
      take beside its tape, with 8 learners and int4, for one of 24 fragments of 9B parameters, measured
      on a sixteenth of it; reference and limit: a core-second.
    """
    assembly = assembly_of(8 if quick else 96, quick)
    arrays = training_arrays(assembly.own_equipment(0), fragments := initial_fragments(assembly))
    step = medians({"step": lambda: arrays.step(0)[1]}, 4 if quick else 24)["step"]
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        own = _learner(pathlib.Path(folder), fragments[0], 5 if quick else 100)
    size = int(PARAMETERS / FRAGMENTS / SCALE / (64 if quick else 1))
    with tempfile.TemporaryDirectory(prefix="ddiloco-bench-") as folder:
        whole = SCALE * _syncer(pathlib.Path(folder), size, 2 if quick else 9)
    return [
        row("receipts_learner", 1e3 * own, 1e3 * step, 1e3 * step * ALLOWED_SHARE, "ms a step"),
        row("receipts_syncer", whole, 1.0, 1.0, "core-seconds a round"),
    ]


def _tape(folder: pathlib.Path, sha256: bytes) -> SyncerTape:
    header = Header(
        *("syncer", None, 1, "remote", "", "", machine_of(None), 0.0, 0.0),
        state=SyncerState.initial(1),
        sha256=(sha256.hex(),),
    )
    notary = Notary(Signer(folder / FOLDER, "syncer"), PublicKeys(folder / FOLDER))
    return SyncerTape(folder / "a.tape", header, notary=notary)


def _seconds(call: Callable[[], object], count: int) -> float:
    """Processor seconds of this thread, the median of so many calls."""
    taken = []
    for _ in range(count):
        begun = time.thread_time()
        call()
        taken.append(time.thread_time() - begun)
    return float(np.median(taken))


def _offer(learner: int) -> Contribution:
    return Contribution(learner, 1, 0, 0, 24, 24, 24 * 1024, upto=Watermark(1, 24))


def _learner(folder: pathlib.Path, pieces: list[np.ndarray], count: int) -> float:
    receipts = LearnerReceipts(folder, 0, lambda line: None)
    receipts.connected(0, "")
    tape = _tape(folder, pieces_sha256(pieces))

    def both() -> None:
        receipts.sign(0, _ROUND, _offer(0), pieces)
        receipts.check(0, events.UpdateArrived(0, 0, 0), tape.statements[0], pieces)

    return _seconds(both, count)


def _syncer(folder: pathlib.Path, size: int, count: int) -> float:
    """Of a round with offers of so many parameters in int4; hashes of the versions are on every tape."""
    arrays = [np.zeros(size // 2, np.uint8), np.zeros(size // 128, np.float32)]
    learners = [LearnerReceipts(folder, m, lambda line: None) for m in range(LEARNERS)]
    for one in learners:
        one.connected(0, "")
    made = [one.sign(0, _ROUND, _offer(m), arrays) for m, one in enumerate(learners)]
    tape = _tape(folder, bytes(32))

    def a_round() -> None:
        came = [events.FragmentArrived(_ROUND, _offer(m), made[m]) for m in range(LEARNERS)]
        for event in came:
            assert tape.problem(event, lambda: pieces_sha256(arrays)) is None
            tape.heard(event, [], 1.0)
        tape.heard(events.Timeout(), [actions.Merge(_ROUND, 1, tuple(e.contribution for e in came))], 1.0)
        tape.heard(events.MergeFinished(_ROUND), [], 1.0)
        tape.committed(0, 1, bytes(32))

    return _seconds(a_round, count)
