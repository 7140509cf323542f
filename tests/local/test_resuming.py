"""Threads go on from a snapshot: where they were, with nothing merged twice, in other numbers too."""

import itertools
import shutil
from unittest import mock

import numpy as np
import pytest

from ddiloco.arrays.blocks import Cut
from ddiloco.protocol.work import FragmentWork
from ddiloco.run.recipes import assembly_of
from ddiloco.storage.array_names import of_kind
from ddiloco.storage.snapshots.parts import is_syncers
from ddiloco.storage.snapshots.store import PartWriter, SnapshotError, SnapshotPart, SnapshotStore
from ddiloco.telemetry import records
from ddiloco.workers import learner_worker as learner_module
from ddiloco.workers import resuming
from ddiloco.workers.learner_arrays import TrainingArrays
from tests.local.stopped_runs import LIMIT, completed, newest, part_of, run, settings
from tests.workbench import assert_equal


class Watched:
    """Batches, with all that were drawn."""

    def __init__(self, batches, drawn):
        self._batches, self._drawn = batches, drawn

    def __next__(self):
        self._drawn.append(next(self._batches))
        return self._drawn[-1]

    def __getattr__(self, name):
        return getattr(self._batches, name)


@pytest.fixture(scope="module")
def resumed(interrupted, data_dir, tmp_path_factory):
    """What follows from the interrupted run's newest snapshot, that one, and the batches that were drawn."""
    folder = shutil.copytree(interrupted[1], tmp_path_factory.mktemp("resumed") / "run")
    snapshot, drawn = newest(folder), {0: [], 1: []}
    more = {"train": {"steps": snapshot.header["step"] + 32}, "eval": {"every": 16}}
    e = settings(data_dir, **more, snapshot={"keep": 99})
    return run(e, folder, snapshot, around=lambda m, b: Watched(b, drawn[m])), snapshot, drawn, folder


def test_a_resumed_run_goes_on_with_the_counters_of_the_snapshot_and_merges_no_work_twice(
    interrupted, resumed
):
    before, (after, snapshot, *_) = interrupted[0], resumed
    versions = snapshot.header["versions"]
    assert (after.outcome.finished, after.outcome.failure) == (True, None)
    parts = {m: part_of(snapshot, m).state for m in (0, 1)}
    firsts = {}
    for p, m, incarnation, version, step, steps, tokens in after.contributions:
        assert incarnation == 2
        firsts.setdefault((m, p), (version, step, steps, tokens))
    assert len(firsts) == 6
    for (m, p), (version, step, steps, tokens) in firsts.items():
        told = FragmentWork(*parts[m]["fragments"][p])
        if told.version < versions[p] or version > versions[p]:
            continue
        begun = [r for r in after.steps(m) if r.step <= step]
        assert steps == told.steps + len(begun)
        assert tokens == told.tokens + sum(r.tokens for r in begun)
    merged = [c for c in before.contributions if c[3] < versions[c[0]]] + after.contributions
    bases = [(p, m, version) for p, m, _, version, *_ in merged]
    assert len(set(bases)) == len(bases)


def test_a_resumed_run_is_scored_when_the_next_score_is_due(resumed):
    ran, snapshot, *_ = resumed
    scored = [r.step for r in ran.records if isinstance(r, records.Evaluated)]
    assert scored[-1] == snapshot.header["step"] + 32
    assert min(scored) >= 16 * (snapshot.header["step"] // 16 + 1)


def test_a_resumed_learner_draws_the_rows_that_follow_those_of_the_snapshot(resumed, data_dir):
    _, snapshot, drawn, _ = resumed
    e = settings(data_dir)
    for m in (0, 1):
        fresh = assembly_of(e).batches((m,))
        for _ in range(part_of(snapshot, m).state["steps"]):
            next(fresh)
        assert drawn[m]
        for batch in drawn[m]:
            assert_equal(batch, next(fresh))


def test_a_resumed_run_leaves_snapshots_from_which_it_can_be_resumed_in_turn(resumed):
    _, first, _, folder = resumed
    second = newest(folder)
    assert second.number > first.number
    assert second.header["step"] > first.header["step"]
    for m in (0, 1):
        before, after = (part_of(snapshot, m).state for snapshot in (first, second))
        assert (before["incarnation"], after["incarnation"]) == (1, 2)
        assert after["tokens"] > before["tokens"]
        assert after["steps"] == after["position"]["batches"] > before["steps"]


@pytest.mark.parametrize(
    ("learners", "mesh"), [(3, {}), (1, {}), pytest.param(1, {"data": 1, "fsdp": 2}, marks=pytest.mark.slow)]
)
def test_another_number_of_learners_with_another_codec_and_mesh_goes_on(learners, mesh, folder, data_dir):
    """Nor does it wait for those that the run has no longer."""
    snapshot = newest(folder)
    e = settings(
        data_dir,
        learners,
        sync={"silence_timeout": 10 * LIMIT},
        train={"steps": snapshot.header["step"] + 24},
        outer={"codec": "int4", "error_feedback": True},
        mesh=mesh,
    )
    ran = run(e, folder, snapshot, count=2 if mesh else 1)
    assert (ran.outcome.finished, ran.outcome.failure) == (True, None)
    assert {m for _, m, *_ in ran.contributions} == set(range(learners))
    assert np.isfinite(ran.outcome.eval_loss)
    reasons = [values["reason"] for values in ran.noted("drop")]
    assert set(reasons) <= {"unexpected fragment"}  # one that came too late, on a busy machine


def test_a_learner_that_was_absent_joins_anew_with_the_inner_state_of_one_that_was_there(data_dir, tmp_path):
    def dies(learner, batches):
        return itertools.islice(batches, 2) if learner == 0 else batches

    e = settings(data_dir)
    ran = run(e, tmp_path, until=completed(1), around=dies)
    snapshot = newest(tmp_path)
    assert (ran.noted("snapshot")[0]["learners"], snapshot.parts) == ([1], ("learner_001", "syncer"))
    given = []
    adopt = TrainingArrays.adopt

    def watched(self, fragments, inner=None):
        given.append(inner)
        return adopt(self, fragments, inner)

    with mock.patch.object(learner_module.TrainingArrays, "adopt", watched):
        after = run(settings(data_dir, train={"steps": snapshot.header["step"] + 8}), tmp_path, snapshot)
    assert after.outcome.finished
    [inner] = given
    part = part_of(snapshot, 1)
    for i, leaf in enumerate(inner):
        np.testing.assert_array_equal(leaf, part.arrays[f"inner/{i}"])
    assert {m for _, m, *_ in after.contributions} == {0, 1}


def rewritten(taken, folder, arrays=(), outer=(), **state) -> SnapshotStore:
    """A store whose snapshot 1 is this one, but for arrays and state of learner 0, and outer settings."""
    store, writer = SnapshotStore(folder, 1), PartWriter(folder)
    parts = {name: taken.part(name) for name in taken.parts}
    old = parts["learner_000"]
    parts["learner_000"] = SnapshotPart({**old.arrays, **dict(arrays)}, {**old.state, **state})
    files = {name: writer.write(1, name, part).result(LIMIT) for name, part in parts.items()}
    before = taken.header["experiment"]
    experiment = {**before, "outer": {**before["outer"], **dict(outer)}}
    store.complete(1, {**taken.header, "experiment": experiment}, files)
    return store


def damage(part, *but):
    """Changes the last byte of every file in the folder of a part, but for those with these names."""
    for path in part.rglob("*"):
        if path.is_file() and path.name not in but:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 255]))


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_a_learner_reads_its_own_part_alone(codec, interrupted, data_dir, tmp_path, one_device):
    """Of a snapshot in which it has all updates; the anchors of a new codec are the syncer's fragments."""
    taken = newest(interrupted[1])
    rows = [[version, 1, 0, 0, False] for version in taken.header["versions"]]
    store = rewritten(taken, tmp_path / "snapshots", fragments=rows)
    e = settings(data_dir, outer={"codec": codec})
    assembly = assembly_of(e)
    equipment = assembly.equipment()[0]
    position, params = taken.state("learner_000")["position"], part_of(taken, 0).arrays
    for name in ("learner_001", "syncer"):
        damage(store.folder / "000001" / name)
        origin = resuming.Origin(store.open(1, own=lambda name: False), e, assembly.layout)
        if codec == "int8" and name == "syncer":
            with pytest.raises(SnapshotError, match="syncer"):
                origin.learner(0, position, equipment.transfer)
            continue
        arrays = TrainingArrays(equipment)
        origin.learner(0, position, equipment.transfer).load(arrays, mixing=0.0)
        for key, array in of_kind("params", params).items():
            np.testing.assert_array_equal(arrays.params[key], array)
    with pytest.raises(SnapshotError, match="learner_001"):
        origin.learner(1, position, equipment.transfer)
    with pytest.raises(SnapshotError, match="syncer"):
        _ = origin.start
    for own in (None, is_syncers, lambda name: name == "learner_001"):
        with pytest.raises(SnapshotError, match="is damaged"):
            store.open(1, own)
    assert (
        store.newest(lambda line: None, own=lambda name: name == "learner_000") is None
    )  # it reads the state of all


@pytest.mark.parametrize("lag", [0, 1], ids=["within the band", "beyond it"])
def test_an_update_that_was_on_its_way_is_applied_before_the_learner_resumes(
    interrupted, data_dir, tmp_path, one_device, lag
):
    """Learner 0 lacks the newest version of fragment 1; only one far ahead sets its clock."""
    taken = newest(interrupted[1])
    old = taken.state("learner_000")["fragments"]
    versions = taken.header["versions"]
    rows = [[versions[p] - (p == 1), *row[1:]] for p, row in enumerate(old)]
    outer = {"codec": "int8", "error_feedback": True}
    e = settings(data_dir, outer=outer)
    assembly = assembly_of(e)
    kept = {
        f"{kind}/{p}/{i}": np.ones(shape, np.float32)
        for kind in ("anchor", "residual")
        for p in range(assembly.layout.num_fragments)
        for i, shape in enumerate(assembly.layout.piece_shapes(p))
    }
    clock = taken.state("syncer")["merged_steps"][1] - e.sync.band - lag
    store = rewritten(taken, tmp_path / "snapshots", kept, outer, fragments=rows, clock=clock)
    origin = resuming.Origin(store.open(1), e, assembly.layout)
    equipment = assembly.equipment()[0]
    back = origin.learner(0, origin.positions(e)[0], equipment.transfer)
    merged = origin.start.state.merged_steps[1]
    mark, lineage = origin.start.state.watermarks[1][0].bare, origin.start.state.lineages[1]
    assert back.begins_with.work.fragments[1] == FragmentWork(
        versions[1], merged, lineage=lineage, watermark=mark
    )
    assert back.begins_with.work.clock == (merged if lag else clock)
    arrays = TrainingArrays(equipment)
    back.load(arrays, mixing=0.0)
    held = arrays.state()[0]
    for i, piece in enumerate(origin.start.fragments[1].pieces):
        np.testing.assert_array_equal(held[f"anchor/1/{i}"], piece)
        assert not np.asarray(held[f"residual/1/{i}"]).any(), "it may have been sent, in an offer merged"
    assert np.asarray(held["residual/0/0"]).all() and np.asarray(held["residual/2/0"]).all()
    whole = equipment.transfer.whole([f.pieces for f in origin.start.fragments.values()])
    names = assembly.layout.names(1)
    for name in names:
        if all(piece.name != name for p in (0, 2) for piece in assembly.layout.fragments[p]):
            np.testing.assert_array_equal(held[f"params/{name}"], whole[name])


@pytest.mark.parametrize("needs", [None, lambda name, shape: Cut.whole(shape)], ids=["alone", "one of hosts"])
def test_of_the_syncers_arrays_a_learner_reads_the_fragment_alone_that_it_lacks(
    interrupted, data_dir, tmp_path, one_device, needs
):
    taken, e = newest(interrupted[1]), settings(data_dir)
    rows = [[version - (p == 1), 1, 0, 0, False] for p, version in enumerate(taken.header["versions"])]
    store = rewritten(taken, tmp_path / "snapshots", fragments=rows)
    assembly = assembly_of(e)
    pieces = resuming.Origin(store.open(1), e, assembly.layout).start.fragments[1].pieces
    damage(store.folder / "000001" / "syncer", "state.json", "fragment_001")
    origin = resuming.Origin(store.open(1, own=lambda name: False), e, assembly.layout, needs)
    back = origin.learner(0, None, assembly.equipment()[0].transfer)
    assert list(back.updates) == [1]
    for piece, read in zip(pieces, back.updates[1], strict=True):
        np.testing.assert_array_equal(piece, read if needs is None else read.all)
