"""A learner's copies of its inner state on a disk and in a bucket: the newest, whole, of all hosts."""

import errno
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from ddiloco.arrays.blocks import Cut
from ddiloco.remote.learner import own_copies
from ddiloco.remote.learner.inner_format import InnerFormat
from ddiloco.remote.learner.own_copies import KEPT, OfAllHosts, OwnCopies, new_number
from ddiloco.storage import array_file
from ddiloco.workers.exchange import InnerState
from tests.bucket import Bucket, in_memory

LEAVES = (jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((5, 7), jnp.bfloat16))
FORMAT = InnerFormat(LEAVES)
HALF = Cut((5, 7), (((0, 5), (0, 3)),))
OF_A_HOST = InnerFormat(LEAVES, FORMAT.needs)  # of several, which happens to need all


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, monkeypatch):
    """Where copies go."""
    if request.param == "disk":
        return tmp_path / "copies"
    return in_memory(monkeypatch) / "run/0"


def arrays(value):
    return [jnp.full(leaf.shape, value, leaf.dtype) for leaf in LEAVES]


def test_the_only_host_s_copy_is_its_newest(folder):
    copies = OwnCopies(folder, FORMAT)
    assert copies.newest("run") is None
    for value in (1, 2):
        copies.keep(InnerState(value, (3, 4), arrays(value), trained=9), "run")
    assert len(list(folder.glob("inner_state*"))) == 1
    state = OwnCopies(folder, FORMAT).newest("run")
    assert (state.step, state.versions, state.trained) == (2, (3, 4), 9)
    for own, leaf in zip(arrays(2), state.arrays, strict=True):
        np.testing.assert_array_equal(own, leaf)


def test_a_folder_s_name_is_no_pattern(tmp_path):
    folder = epath.Path(tmp_path) / "copies [1]" / "0"
    OwnCopies(folder, FORMAT).keep(InnerState(7, (3, 4), arrays(1), trained=9), "run")
    assert OwnCopies(folder, FORMAT).newest("run").step == 7


@pytest.mark.parametrize(
    ("run", "inner", "why"),
    [
        ("another", FORMAT, "is of another run"),
        ("run", InnerFormat(LEAVES[:1]), "is of another inner optimizer"),
        (
            "run",
            InnerFormat(LEAVES, [FORMAT.needs[0], Cut((5, 7), (((0, 5), (0, 3)),))]),
            "is of another mesh",
        ),
    ],
)
def test_a_copy_that_is_not_the_learner_s_is_refused_in_a_line(run, inner, why, folder):
    OwnCopies(folder, FORMAT).keep(InnerState(7, (3, 4), arrays(1)), "run")
    with pytest.raises(ValueError, match=f"inner_state.0.[0-9]+: {why}: no own copy") as refused:
        OwnCopies(folder, inner).newest(run)
    assert "\n" not in str(refused.value)


def test_a_copy_that_is_not_finite_is_refused_and_the_older_one_serves(folder):
    copies = OwnCopies(folder, OF_A_HOST)
    for number, value in ((70, 1.0), (77, np.nan)):
        state = OfAllHosts([arrays(1)[0], jnp.full((5, 7), value, jnp.bfloat16)], number)
        copies.keep(InnerState(number, (3, 4), state), "run")
    assert OwnCopies(folder, OF_A_HOST).newest("run").step == 70
    with pytest.raises(ValueError, match=r"inner_state.0.77: array 1 of the inner optimizer holds numbers"):
        OwnCopies(folder, OF_A_HOST).newest("run", {77})


def test_a_single_number_of_an_optimizer_may_be_anything(folder):
    best = InnerFormat([jax.ShapeDtypeStruct((), np.float32)])
    OwnCopies(folder, best).keep(InnerState(7, (3, 4), [jnp.float32(np.inf)]), "run")
    assert OwnCopies(folder, best).newest("run").arrays[0] == np.inf


def test_hosts_that_have_no_copy_in_common_have_none(folder):
    copies = OwnCopies(folder, OF_A_HOST)
    for number in (70, 77):
        copies.keep(InnerState(number, (3, 4), OfAllHosts(arrays(number), number)), "run")
    assert copies.newest("run", {70}).step == 70
    assert copies.newest("run", set()) is None
    with pytest.raises(ValueError, match="have no copy in common"):
        copies.newest("run", {71})


def test_of_a_host_s_copies_the_two_newest_stay_and_what_is_damaged_does_not_count(folder, monkeypatch):
    copies = OwnCopies(folder, OF_A_HOST, 1)
    assert copies.numbers() == []
    numbers = []
    for _ in range(4):
        numbers.append(new_number())
        now = time.time_ns()
        while time.time_ns() // 1000 == now // 1000:  # a microsecond
            pass
    assert numbers == sorted(set(numbers))
    for value, number in enumerate(numbers):
        copies.keep(InnerState(value, (3, 4), OfAllHosts(arrays(value), number)), "run")
    assert copies.numbers() == numbers[: -KEPT - 1 : -1]
    header, blocks = copies.load(numbers[-1])
    assert (header["run"], blocks[0].all) == ("run", 3)
    read: list[str] = []
    load = array_file.load
    monkeypatch.setattr(array_file, "load", lambda path, magic: read.append(path.suffix) or load(path, magic))
    assert copies.load(numbers[-1])[1][0].all == 3
    assert not read, "the newest was read to see whether it can be"
    copies.forget()
    found = copies.newest("run", numbers[1:-1])
    assert (found.step, found.arrays.number, found.arrays[0].all) == (2, numbers[-2], 2)
    assert read == [f".{numbers[-2]}"], "of copies that large none is read but the one that is wanted"
    copies.load(numbers[-1])
    assert read[1:] == [f".{numbers[-1]}"]
    path = folder / f"inner_state.1.{numbers[-1]}"
    path.write_bytes(path.read_bytes()[:-9])
    assert OwnCopies(folder, OF_A_HOST, 1).numbers() == [numbers[-2]]
    assert OwnCopies(folder, OF_A_HOST).numbers() == []


def test_where_the_clock_was_set_back_the_newest_copies_stay_all_the_same(folder, monkeypatch):
    OwnCopies(folder, OF_A_HOST).save(later := new_number(), arrays(0))
    monkeypatch.setattr(own_copies.time, "time_ns", lambda: 3_600_000_000_000)
    copies = OwnCopies(folder, OF_A_HOST)
    first, second = new_number(), new_number() + 4
    copies.save(first, arrays(1))
    assert copies.numbers() == [later, first]
    copies.save(second, arrays(2))
    assert copies.numbers() == [second, first]


def test_what_a_killed_process_has_left_of_a_copy_goes_with_the_next(folder):
    if isinstance(folder, epath.gpath.PosixGPath) and "://" in str(folder):
        pytest.skip("an object in a bucket is there whole, or not at all")
    OwnCopies(folder, OF_A_HOST, 1).save(new_number(), arrays(1))
    (kept,) = folder.glob("inner_state*")
    unfinished = [folder / f".inner_state.{host}.77.abcd.new" for host in (0, 1)]
    for path in unfinished:
        path.write_bytes(bytes(100))
    assert len(OwnCopies(folder, OF_A_HOST, 1).numbers()) == 1
    assert set(folder.iterdir()) == {kept, unfinished[0]}, "what another host writes now stays"


def test_a_folder_that_cannot_be_listed_has_no_copies_for_a_while_and_says_so(folder, monkeypatch):
    copies = OwnCopies(folder, FORMAT)
    copies.keep(InnerState(7, (3, 4), arrays(1)), "run")

    def iterdir(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as stale:
        stale.setattr(type(folder), "iterdir", iterdir)
        stale.setattr(type(copies.folder), "iterdir", iterdir)
        assert OwnCopies(folder, FORMAT).numbers() == []
        with pytest.raises(ValueError, match="cannot be listed: Stale file handle: no own copy"):
            copies.newest("run")
    assert copies.newest("run").step == 7


def test_a_bucket_that_refuses_is_a_disk_that_does(folder, monkeypatch):
    if not isinstance(folder, epath.gpath.PosixGPath):
        pytest.skip("a bucket's")
    copies = OwnCopies(folder, FORMAT)
    copies.keep(InnerState(1, (3, 4), arrays(1)), "run")
    monkeypatch.setattr(Bucket, "refuses", True)
    with pytest.raises(OSError, match=r"403, no such luck$"):
        copies.keep(InnerState(2, (3, 4), arrays(2)), "run")
    with pytest.raises(ValueError, match="cannot be read: 403"):
        copies.newest("run")
    monkeypatch.setattr(Bucket, "refuses", False)
    assert copies.newest("run").step == 1
