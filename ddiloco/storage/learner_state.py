"""A learner's whole state on disk, or in a bucket: each host's blocks, of the same step boundary.

A checkpoint has a number. Where a learner is several hosts, host 0 draws it; one that died may lack the
newest, so each keeps two, and the learner goes on from the newest of which all its hosts find what they need:
in their own files or, where they share the folder, in those of other hosts. So it may have another number of
hosts than the learner that wrote it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath

from ddiloco.arrays.blocks import Blocks, Cut, Gathered, held
from ddiloco.arrays.finite import NotFiniteError, check_finite, check_state
from ddiloco.config import build
from ddiloco.protocol.work import LearnerWork
from ddiloco.storage import array_file
from ddiloco.telemetry.records import reason

KEPT = 2  # by each of several hosts
SNAPSHOTS = "snapshots"
"""The folder of a run's snapshots, beside that in which each learner has its folder of checkpoints."""

MAGIC = b"ddiloco learner state of a host 1\n"
_GROUP = "hosts"  # file with the name of the hosts that train together
_PREFIX = "state"
_FILE = re.compile(rf"{_PREFIX}\.([0-9]+)\.([0-9]+)")  # of a host, under a number

Needs = Callable[[str, tuple[int, ...]], Cut]
"""Which blocks of an array a host needs, by its name and shape."""

Array = np.ndarray | jax.Array | Blocks
"""What a process has of an array; `Blocks`: as one host of several."""


class OfAllHosts(list[Any]):
    """One host's part of the inner state's arrays, of which each other host has its own under this number."""

    def __init__(self, arrays: Sequence[Any], number: int) -> None:
        super().__init__(arrays)
        self.number = number


class StateOfAllHosts(dict[str, Any]):
    """One host's part of a learner's arrays, likewise."""

    def __init__(self, arrays: Mapping[str, Any], number: int) -> None:
        super().__init__(arrays)
        self.number = number


@dataclasses.dataclass(frozen=True)
class StateHeader:
    """The header of a learner's state, in JSON.

    Attributes:
      run: the run's id, hex.
      layout: fingerprint of the fragments.
      codec: the settings on which anchors, residuals and kept offers depend.
      gradients: whether outer gradients are sent for others' sake, not because of these settings.
      work: of the learner's core.
      position: where its batches stand, as `Batches.get_state` gives it.
      num_shards: of the data, to which the position belongs.
      trained: inner steps in the inner state.
      tokens: that the learner has trained on.
      steps: that its arrays have counted.
      origin: learner, process and number by which its tape names this state; None: no tape does.
      time: when it was taken, unix seconds.
    """

    run: str
    layout: str
    codec: tuple[str, bool, bool]
    work: LearnerWork
    position: Any
    num_shards: int
    trained: int
    tokens: int
    steps: int
    origin: tuple[int, int, int] | None = None
    time: float = 0.0
    gradients: bool = False


@dataclasses.dataclass(frozen=True)
class LearnerState:
    """A learner's state at a step boundary; arrays are named as `TrainingArrays.state` does."""

    header: StateHeader
    arrays: Mapping[str, Array]

    @property
    def inner(self) -> Sequence[Any]:
        """The arrays of the inner optimizer state; of one host of several, `OfAllHosts`."""
        inner = numbered("inner", self.arrays)
        arrays = self.arrays
        return OfAllHosts(inner, arrays.number) if isinstance(arrays, StateOfAllHosts) else inner


def checkpoint_root(workdir: pathlib.Path, elsewhere: str) -> epath.Path:
    """The folder in which learners/<m> has the checkpoints of a learner with this workdir.

    `elsewhere`: config.recovery.checkpoint_folder.
    """
    return epath.Path(elsewhere).expanduser() if elsewhere else epath.Path(workdir)


def mark_group(folder: epath.Path, name: str) -> None:
    """Names the hosts that train together in the folder of their checkpoints; raises OSError."""
    with array_file.as_os_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    array_file.replace(folder / _GROUP, [name.encode()])


def is_of_group(folder: epath.Path, name: str) -> bool:
    """Whether the folder is that which the first of these hosts has marked."""
    try:
        with array_file.as_os_error(folder):
            return (folder / _GROUP).read_bytes() == name.encode()
    except OSError:
        return False


def new_number() -> int:
    """A number for a checkpoint that no other has; later ones are larger, unless the clock was set back."""
    return time.time_ns() // 1000 * 4 + secrets.randbelow(4)


class LearnerStates:
    """The checkpoints of one host in a folder; None: none are kept. For one thread at a time."""

    def __init__(self, folder: epath.Path | None, needs: Needs | None = None, host: int = 0) -> None:
        """`needs`: what this host needs of each array, as one of several; None: it is the only one."""
        self.folder = folder
        self._host, self._needs = host, needs
        self._last: int | None = None  # of those saved
        self._at_hand: dict[int, tuple[dict[str, Any], dict[str, Blocks]]] = {}  # what `load` need not read
        self._swept = folder is None or array_file.in_bucket(folder)

    def of_snapshot(self, number: int) -> LearnerStates:
        """The checkpoints for the snapshot with this number."""
        assert self.folder is not None
        learners, learner = self.folder.parent, self.folder.name
        place = learners.parent / SNAPSHOTS / f"{number:06d}" / learners.name / learner
        return LearnerStates(place, self._needs, self._host)

    def numbers(self) -> list[int]:
        """The checkpoints that can be read, newest first; the first one stays at hand until `forget`."""
        numbers = []
        for number, found in self._read():
            if not isinstance(found, Exception):
                numbers.append(number)
                self._at_hand = self._at_hand or {number: found}
        return numbers

    def forget(self) -> None:
        """Releases the open checkpoint."""
        self._at_hand = {}

    def newest(self, run: str, among: Collection[int] | None = None) -> LearnerState | None:
        """The newest state of this run that can be read, of those with these numbers; None: of all.

        Where this is one of several hosts its arrays are `StateOfAllHosts`. Without any checkpoint there is
        none.

        Raises:
          ValueError: there are checkpoints, and none can be used; the message is one line.
        """
        problem = "the learner's hosts have no checkpoint in common" if among else ""
        for number, found in self._read(among):
            if isinstance(found, Exception):
                problem = f"{found}"
                continue
            values, blocks = found
            try:
                header = build(StateHeader, values, "state")
            except ValueError as error:
                problem = f"{self._path(number)}: is damaged: {error}"
                continue
            if header.run != run:
                problem = f"{self._path(number)}: is of another run"
                continue
            if self._needs is not None:
                return LearnerState(header, StateOfAllHosts(blocks, number))
            return LearnerState(header, {name: one.all for name, one in blocks.items()})
        if problem:
            raise ValueError(f"{problem}: no checkpoint of the learner is used")
        return None

    def keep(self, state: LearnerState) -> None:
        """Keeps a state; returns once it is durable. Raises OSError."""
        arrays = state.arrays
        number = arrays.number if isinstance(arrays, StateOfAllHosts) else new_number()
        self.save(number, arrays, dataclasses.asdict(state.header))

    def save(self, number: int, arrays: Mapping[str, Array], about: Mapping[str, Any] | None = None) -> None:
        """Keeps this host's blocks of the arrays in place of older ones; raises OSError.

        `about`: what host 0 keeps with them.
        """
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {name: _own_blocks(array) for name, array in arrays.items()}
        listed = [(name, one.shape, box) for name, one in own.items() for box in one.blocks]
        blocks = [block for one in own.values() for block in one.blocks.values()]
        header = {**(about or {}), "number": number, "blocks": listed}
        array_file.save(self._path(number), MAGIC, header, blocks)
        found = self._found()
        others = [old for old in found if old != number and self._path(old) in found[old]]
        others.sort(key=lambda old: old != self._last)  # else the newest of another process
        kept = {number, *others[: 0 if self._needs is None else KEPT - 1]}
        for old, paths in found.items():
            for path in paths if old not in kept else ():
                if not self._host or path == self._path(old):  # host 0 alone knows which serve nobody
                    path.unlink(missing_ok=True)
        self._last = number

    def load(self, number: int) -> tuple[dict[str, Any], dict[str, Blocks]]:
        """What was kept with the arrays, and of each what this host needs.

        Raises ValueError where these cannot be used, or FileNotFoundError.
        """
        if number in self._at_hand:
            return self._at_hand[number]
        return _gathered(self._found().get(number) or [self._path(number)], self._needs)

    def _read(
        self, among: Collection[int] | None = None
    ) -> Iterator[tuple[int, tuple[dict[str, Any], dict[str, Blocks]] | Exception]]:
        """Each checkpoint, newest first: its number, and what `load` gives or raises; 0: of all of them."""
        try:
            found = self._found()
        except OSError as error:
            yield 0, OSError(f"{self.folder}: cannot be listed: {reason(error)}")
            return
        for number, paths in found.items():
            headed = self._host or paths[0] == self._path(number)  # host 0's own file alone has the header
            if headed and (among is None or number in among):
                try:
                    yield number, self.load(number)
                except (OSError, ValueError) as error:
                    yield number, error

    def _path(self, number: int) -> epath.Path:
        assert self.folder is not None
        return self.folder / f"{_PREFIX}.{self._host}.{number}"

    def _found(self) -> dict[int, list[epath.Path]]:
        """All hosts' files of each checkpoint, newest first, this host's own in front; raises OSError."""
        if self.folder is None:
            return {}
        if not self._swept:  # of what a kill has left; not before, as the disk may hang
            self._swept = True
            array_file.sweep(pathlib.Path(self.folder), f"{_PREFIX}.{self._host}.")
        found: dict[int, list[tuple[bool, int, epath.Path]]] = {}
        with array_file.as_os_error(self.folder), contextlib.suppress(FileNotFoundError):
            # Not by a pattern, which the folder's own name would be part of.
            for path in self.folder.iterdir():
                if (match := _FILE.fullmatch(path.name)) is not None:
                    host, number = map(int, match.groups())
                    found.setdefault(number, []).append((host != self._host, host, path))
        newest_first = sorted(found.items(), reverse=True)
        return {number: [path for *_, path in sorted(files)] for number, files in newest_first}


def _own_blocks(array: Array) -> Blocks:
    """The blocks of an array that this host has, in host memory."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return held(array)
    return array if isinstance(array, Blocks) else Blocks.whole(np.asarray(array))


def of_all_hosts(folder: pathlib.Path) -> LearnerState:
    """The one checkpoint in a folder, assembled from its hosts' files.

    Raises ValueError where it cannot be used, or FileNotFoundError.
    """
    paths = sorted(folder.glob(f"{_PREFIX}.*.*"), key=lambda path: int(path.name.split(".")[1]))
    if not paths:
        raise FileNotFoundError(folder)
    header, blocks = _gathered(paths, None)
    return LearnerState(build(StateHeader, header, "state"), {name: one.all for name, one in blocks.items()})


def _gathered(paths: Sequence[epath.Path], needs: Needs | None) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """The first file's header, and what is needed of each array; raises as `LearnerStates.load`.

    Reads no more files than it needs.
    """
    gathered: dict[str, Gathered] = {}
    about: dict[str, Any] = {}
    taken = set()  # names and boxes of blocks, of which several hosts may have one
    for path in paths:
        header, parts = array_file.load(path, MAGIC)
        try:
            for (name, shape, bounds), part in zip(header.pop("blocks"), parts, strict=True):
                box = tuple((int(start), int(stop)) for start, stop in bounds)
                if name not in gathered:
                    cut = Cut.whole(shape) if needs is None else needs(name, tuple(shape))
                    gathered[name] = Gathered(cut, part.dtype)
                if (name, box) not in taken:
                    gathered[name].add(Blocks(shape, {box: part}))
                    taken.add((name, box))
                check = check_state if is_kind("inner", name) else check_finite
                check([(name, part)])
            del header["number"]
        except NotFiniteError as error:
            raise ValueError(f"{path}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{path}: is of another mesh, model or codec") from None
        about = about or header
        if all(one.complete for one in gathered.values()):
            break
    try:
        return about, {name: one.blocks() for name, one in gathered.items()}
    except (ValueError, LookupError):
        raise ValueError(
            f"{paths[0]}: is of another mesh, model or codec, or lacks other hosts' files"
        ) from None


T = TypeVar("T")


def named(kind: str, arrays: Mapping[str, T] | Sequence[T]) -> dict[str, T]:
    """The arrays as `<kind>/<name>`, or as `<kind>/<i>` from 0; for a fragment p, `kind` ends in `/<p>`."""
    pairs = arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays)
    return {f"{kind}/{name}": array for name, array in pairs}


def is_kind(kind: str, name: str) -> bool:
    """Whether an array of this name is of the kind."""
    return name.startswith(f"{kind}/")


def of_kind(kind: str, arrays: Mapping[str, T]) -> dict[str, T]:
    """The arrays of one kind by name, as `named` took them; empty if there are none."""
    prefix = f"{kind}/"
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def numbered(kind: str, arrays: Mapping[str, T]) -> tuple[T, ...]:
    """The arrays of one kind in order, as `named` took them; empty if there are none."""
    return tuple(x for _, x in sorted(of_kind(kind, arrays).items(), key=lambda item: int(item[0])))
