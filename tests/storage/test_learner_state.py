"""A learner's states on a disk and in a bucket: the newest, whole, of all hosts."""

import dataclasses
import errno
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from ddiloco.arrays.blocks import Blocks, Cut
from ddiloco.protocol.messages import Watermark
from ddiloco.protocol.work import FragmentWork, LearnerWork
from ddiloco.storage import array_file, learner_state
from ddiloco.storage.learner_state import (
    KEPT,
    LearnerState,
    LearnerStates,
    OfAllHosts,
    StateHeader,
    new_number,
)
from ddiloco.workers.exchange import InnerState
from tests.bucket import Bucket, in_memory
from tests.learner_states import needs_all, state_with

LEAVES = (jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((5, 7), jnp.bfloat16))
HALF = Cut((5, 7), (((0, 5), (0, 3)),))


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, monkeypatch):
    """Where copies go."""
    if request.param == "disk":
        return tmp_path / "copies"
    return in_memory(monkeypatch) / "run/0"


def arrays(value):
    return [jnp.full(leaf.shape, value, leaf.dtype) for leaf in LEAVES]


def made(number, value):
    """A state that holds the value, of a host of several under this number; its clock is the number, too."""
    inner = InnerState(number, (3, 4), OfAllHosts(arrays(value), number), trained=9)
    return state_with(inner, "run")


def test_the_only_host_s_copy_is_its_newest(folder):
    copies = LearnerStates(folder)
    assert copies.newest("run") is None
    for value in (1, 2):
        copies.keep(made(value, value))
    assert len(list(folder.glob("state*"))) == 1
    state = LearnerStates(folder).newest("run")
    assert (state.header.work.clock, state.header.trained) == (2, 9)
    for own, leaf in zip(arrays(2), state.inner, strict=True):
        np.testing.assert_array_equal(own, leaf)


def test_a_folder_s_name_is_no_pattern(tmp_path):
    folder = epath.Path(tmp_path) / "copies [1]" / "0"
    LearnerStates(folder).keep(made(7, 1))
    assert LearnerStates(folder).newest("run").header.work.clock == 7


def test_a_state_of_another_run_is_refused_in_a_line(folder):
    LearnerStates(folder).keep(made(7, 1))
    with pytest.raises(ValueError, match=r"state.0.[0-9]+: is of another run: no checkpoint") as refused:
        LearnerStates(folder).newest("another")
    assert "\n" not in str(refused.value)


def test_a_host_that_needs_more_than_the_file_has_is_refused_and_one_that_needs_less_gets_that(folder):
    half = lambda name, shape: HALF if name == "inner/1" else Cut.whole(shape)  # noqa: E731
    LearnerStates(folder, needs_all).keep(made(7, 1))
    found = LearnerStates(folder, half).newest("run")
    assert found.inner[1].blocks.keys() == {HALF.boxes[0]} and found.inner.number == 7
    blocks = {"inner/0": np.ones((), np.int32), "inner/1": Blocks((5, 7), {HALF.boxes[0]: np.ones((5, 3))})}
    LearnerStates(folder, half).save(8, blocks)
    with pytest.raises(ValueError, match=r"state\.0\.8: is of another mesh, model or codec"):
        LearnerStates(folder, needs_all).load(8)


WHOLE = {"params/w": np.arange(48.0).reshape(8, 6), "params/b": np.arange(6.0), "inner/0": np.array(3)}


def cut_of(hosts, host, columns=1):
    """What a host of several needs: its rows, of each in so many blocks, and all of what every host has."""

    def needs(name, shape):
        if name != "params/w":
            return Cut.whole(shape)
        rows, width = 8 // hosts, 6 // columns
        own = (host * rows, (host + 1) * rows)
        return Cut(shape, tuple((own, (at * width, (at + 1) * width)) for at in range(columns)))

    return needs


def written(folder, number, hosts, columns=1, missing=()):
    """Has each host write its blocks; returns the newest state's header, which host 0 has."""
    state = made(number, 1)
    for host in set(range(hosts)) - set(missing):
        needs = cut_of(hosts, host, columns)
        blocks = {}
        for name, array in WHOLE.items():
            cut = needs(name, array.shape)
            blocks[name] = Blocks(array.shape, dict(zip(cut.boxes, cut.of(array), strict=True)))
        about = {} if host else dataclasses.asdict(state.header)
        own = None if hosts == 1 else needs
        LearnerStates(folder, own, host).save(number, blocks, about)
    return state.header


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("columns", [(1, 1), (3, 2)])
def test_a_checkpoint_of_any_number_of_hosts_is_read_by_any_other(folder, before, after, columns):
    header = written(folder, 70, before, columns[0])
    for host in range(after):
        needs = cut_of(after, host, columns[1])
        states = LearnerStates(folder, None if after == 1 else needs, host)
        assert states.numbers() == [70], f"host {host}"
        about, blocks = states.load(70)
        for name, array in WHOLE.items():
            cut = Cut.whole(array.shape) if after == 1 else needs(name, array.shape)
            assert tuple(blocks[name].blocks) == cut.boxes
            for found, right in zip(blocks[name].blocks.values(), cut.of(array), strict=True):
                np.testing.assert_array_equal(found, right)
    found = LearnerStates(folder, None if after == 1 else cut_of(after, 0, columns[1])).newest("run")
    assert found.header == header and about is not None


@pytest.mark.parametrize("missing", [0, 1])
def test_a_checkpoint_of_which_a_host_s_file_is_missing_is_no_other_number_of_hosts_s(folder, missing):
    written(folder, 70, 2)
    written(folder, 77, 2, missing=[missing])
    states = LearnerStates(folder)
    assert states.numbers() == [70]
    assert states.newest("run").header.work.clock == 70
    assert LearnerStates(folder, cut_of(4, 3), 3).numbers() == ([77, 70] if missing == 0 else [70])


def test_what_hosts_have_left_that_are_no_more_goes_once_it_serves_nobody(folder):
    for number in (70, 77):
        written(folder, number, 2)
    written(folder, 84, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["state.0.84"]


def test_all_that_a_learner_knows_comes_back_as_it_was(tmp_path):
    work = LearnerWork(7, 9, 8, (FragmentWork(2, 5, 3, 30, 4, Watermark(9, 5, "[1]"), {7: (2, 20)}),), {3: 6})
    header = StateHeader("run", "ab", ("int8", True, True), work, {"batches": 3}, 2, 9, 90, 8, (0, 9, 4))
    arrays = {"params/w": np.ones((2, 3)), "own/0/7/0": np.zeros(4, np.float32)}
    LearnerStates(epath.Path(tmp_path)).keep(LearnerState(header, arrays))
    found = LearnerStates(epath.Path(tmp_path)).newest("run")
    assert found.header == header
    assert found.header.work.fragments[0].watermark.position == "[1]"
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def test_a_copy_that_is_not_finite_is_refused_and_the_older_one_serves(folder):
    copies = LearnerStates(folder, needs_all)
    for number, value in ((70, 1.0), (77, np.nan)):
        state = OfAllHosts([arrays(1)[0], jnp.full((5, 7), value, jnp.bfloat16)], number)
        copies.keep(state_with(InnerState(number, (3, 4), state), "run"))
    assert LearnerStates(folder, needs_all).newest("run").header.work.clock == 70
    with pytest.raises(ValueError, match=r"state.0.77: inner/1 holds numbers"):
        LearnerStates(folder, needs_all).newest("run", {77})


def test_a_single_number_of_an_optimizer_may_be_anything(folder):
    LearnerStates(folder).keep(state_with(InnerState(7, (3, 4), [jnp.float32(np.inf)]), "run"))
    assert LearnerStates(folder).newest("run").inner[0] == np.inf


def test_hosts_that_have_no_copy_in_common_have_none(folder):
    copies = LearnerStates(folder, needs_all)
    for number in (70, 77):
        copies.keep(made(number, number))
    assert copies.newest("run", {70}).header.work.clock == 70
    assert copies.newest("run", set()) is None
    with pytest.raises(ValueError, match="have no checkpoint in common"):
        copies.newest("run", {71})


def test_of_a_host_s_copies_the_two_newest_stay_and_what_is_damaged_does_not_count(folder, monkeypatch):
    copies = LearnerStates(folder, needs_all, 1)
    assert copies.numbers() == []
    numbers = []
    for _ in range(4):
        numbers.append(new_number())
        now = time.time_ns()
        while time.time_ns() // 1000 == now // 1000:  # a microsecond
            pass
    assert numbers == sorted(set(numbers))
    for value, number in enumerate(numbers):
        copies.keep(made(number, value))
    assert copies.numbers() == numbers[: -KEPT - 1 : -1]
    header, blocks = copies.load(numbers[-1])
    assert (header["run"], blocks["inner/0"].all) == ("run", 3)
    read: list[str] = []
    load = array_file.load
    monkeypatch.setattr(array_file, "load", lambda path, magic: read.append(path.suffix) or load(path, magic))
    assert copies.load(numbers[-1])[1]["inner/0"].all == 3
    assert not read, "the newest was read to see whether it can be"
    copies.forget()
    found = copies.newest("run", numbers[1:-1])
    assert (found.inner.number, found.inner[0].all) == (numbers[-2], 2)
    assert read == [f".{numbers[-2]}"], "of copies that large none is read but the one that is wanted"
    copies.load(numbers[-1])
    assert read[1:] == [f".{numbers[-1]}"]
    path = folder / f"state.1.{numbers[-1]}"
    path.write_bytes(path.read_bytes()[:-9])
    assert LearnerStates(folder, needs_all, 1).numbers() == [numbers[-2]]
    assert LearnerStates(folder, needs_all).numbers() == []


def test_where_the_clock_was_set_back_the_newest_copies_stay_all_the_same(folder, monkeypatch):
    LearnerStates(folder, needs_all).save(later := new_number(), made(1, 0).arrays)
    monkeypatch.setattr(learner_state.time, "time_ns", lambda: 3_600_000_000_000)
    copies = LearnerStates(folder, needs_all)
    first, second = new_number(), new_number() + 4
    copies.save(first, made(1, 1).arrays)
    assert copies.numbers() == [later, first]
    copies.save(second, made(1, 2).arrays)
    assert copies.numbers() == [second, first]


def test_what_a_killed_process_has_left_of_a_copy_goes_with_the_next(folder):
    if isinstance(folder, epath.gpath.PosixGPath) and "://" in str(folder):
        pytest.skip("an object in a bucket is there whole, or not at all")
    LearnerStates(folder, needs_all, 1).save(new_number(), made(1, 1).arrays)
    (kept,) = folder.glob("state*")
    unfinished = [folder / f".state.{host}.77.abcd.new" for host in (0, 1)]
    for path in unfinished:
        path.write_bytes(bytes(100))
    assert len(LearnerStates(folder, needs_all, 1).numbers()) == 1
    assert set(folder.iterdir()) == {kept, unfinished[0]}, "what another host writes now stays"


def test_a_folder_that_cannot_be_listed_has_no_copies_for_a_while_and_says_so(folder, monkeypatch):
    copies = LearnerStates(folder)
    copies.keep(made(7, 1))

    def iterdir(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as stale:
        stale.setattr(type(folder), "iterdir", iterdir)
        stale.setattr(type(copies.folder), "iterdir", iterdir)
        assert LearnerStates(folder).numbers() == []
        with pytest.raises(ValueError, match="cannot be listed: Stale file handle: no checkpoint"):
            copies.newest("run")
    assert copies.newest("run").header.work.clock == 7


def test_a_bucket_that_refuses_is_a_disk_that_does(folder, monkeypatch):
    if not isinstance(folder, epath.gpath.PosixGPath):
        pytest.skip("a bucket's")
    copies = LearnerStates(folder)
    copies.keep(made(1, 1))
    monkeypatch.setattr(Bucket, "refuses", True)
    with pytest.raises(OSError, match=r"403, no such luck$"):
        copies.keep(made(2, 2))
    with pytest.raises(ValueError, match="cannot be read: 403"):
        copies.newest("run")
    monkeypatch.setattr(Bucket, "refuses", False)
    assert copies.newest("run").header.work.clock == 1
