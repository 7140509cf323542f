"""The syncer's state on disk: one file for each fragment, and one for the learners' incarnations.

A fragment's file holds Theta_p, its outer optimizer's state, its version, the step at which it was merged,
how late each learner's offers were, and the learners' watermarks, with the positions in their data that
belong to these. It is written before the update is broadcast, so no learner ever has a version that a crash
can undo.
"""

from __future__ import annotations

import dataclasses
import errno
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ddiloco.arrays.finite import NotFiniteError, check_finite
from ddiloco.outer.fragments import FragmentLayout
from ddiloco.outer.global_model import FragmentState, GlobalModel
from ddiloco.protocol.estimates import OfferDelay
from ddiloco.protocol.messages import RoundId, Watermark
from ddiloco.protocol.state import (
    NO_DELAYS,
    NO_WATERMARKS,
    SyncerState,
    Watermarks,
    newest_incarnations,
)
from ddiloco.storage import array_file, checksummed_json, fragment_history
from ddiloco.storage.run_mark import FRAGMENT, RunMark
from ddiloco.storage.workdir import Owner
from ddiloco.telemetry import records
from ddiloco.telemetry.throughput import Throughput

FOLDER = "syncer"  # of a run, in its workdir

RETRY_SECONDS = 1.0  # between attempts to write what was merged
SHOWN_SECONDS = 90.0  # for a shared disk to show what others wrote; NFS may show what was there a minute ago

_INCARNATIONS = "incarnations"
MIN_APPENDED = 64  # incarnations that are appended to their file before it is written anew

Found = TypeVar("Found")


class DurableStateError(Exception):
    """The state on disk cannot be used; the message is one line and names the file."""


class _Superseded(OSError):
    """The state to write is of an earlier start."""


class _Made(NamedTuple):
    """The origin of a fragment's version."""

    round: RoundId
    version: int
    lineage: int
    watermarks: Watermarks
    delays: Mapping[int, OfferDelay] = NO_DELAYS

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> _Made:
        """As the header of its file says; raises as a damaged one makes it."""
        merged = RoundId(int(header["merged_step"]), int(header["fragment"]))
        marks = {
            int(m): Watermark(int(life), int(steps), str(at))
            for m, (life, steps, at) in header["watermarks"].items()
        }
        delays = {int(m): OfferDelay(*map(float, delay)) for m, delay in header["delays"].items()}
        return cls(merged, int(header["version"]), int(header["lineage"]), marks, delays)

    def after(self, state: SyncerState) -> SyncerState:
        """The state with this version."""
        return state.with_version(self.round, self.version, self.lineage, self.watermarks, self.delays)


class DurableState:
    """The folder of one run. A thread for each fragment calls `commit`, the syncer's thread `remember`."""

    def __init__(
        self,
        folder: pathlib.Path,
        layout: FragmentLayout,
        record: Callable[[Any], None],
        stop: threading.Event,
        run: str = "",
        keep: int = 1,
        shard: int = 0,
    ) -> None:
        """`stop` ends the wait for a disk that refuses to write.

        `run`: id of the run. `keep`: how many versions of each fragment stay. `shard`: of the syncer, which
        writes its own fragments and whom it knows.
        """
        self.folder = folder
        self.run = run
        self._shard = shard
        self.lineage = secrets.randbits(52)  # of what this process commits: no other start draws the same
        self.throughput = Throughput()  # of what was made durable
        self._layout = layout
        self._record = record
        self._stop = stop
        self._keep = keep
        self._owner = Owner(folder.parent)
        self._found: tuple[int, int] | None = None  # which folder it is, once something was read or written
        self._known: dict[int, int] = {}  # incarnations, by learner
        self._appendable = 0  # that may still be added to their file; 0: it is to be written anew

    def begin(self, model: GlobalModel) -> None:
        """Writes the initial fragments of a run; raises OSError if the disk refuses."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._found = self._which()
        for p in model.fragments:  # copies of one at a time
            self._save(model.state(p), _Made(RoundId(0, p), 0, 0, NO_WATERMARKS))
        self._save_incarnations()

    def complete(self) -> None:
        """Marks that the folder has all that a restart needs; raises OSError."""
        RunMark(self.run, secrets.token_hex(8)).save(self.folder)

    def sweep(self, fragments: Sequence[int] | None = None) -> None:
        """Removes unfinished files that killed syncers left of these fragments; None: of incarnations."""
        own = [self._incarnations()] if fragments is None else map(self._path, fragments)
        for path in own:
            array_file.sweep(self.folder, path.name)

    def commit(
        self,
        merged: RoundId,
        model: GlobalModel,
        watermarks: Watermarks = NO_WATERMARKS,
        delays: Mapping[int, OfferDelay] = NO_DELAYS,
    ) -> bool:
        """Makes a merged fragment durable; if the disk refuses, raises an alarm and tries until it succeeds.

        `watermarks` say by learner how much of its work is in it, `delays` how late its offers are.

        Returns:
          Whether it is durable; False only if the run is stopped first, or its folder is another start's.
        """
        state = model.state(merged.fragment)
        made = _Made(merged, state.version, self.lineage, watermarks, delays)
        while True:
            try:
                self._save(state, made)
                return True
            except _Superseded as error:
                self._alarm(error, f"version {state.version} of fragment {merged.fragment} is not written")
                return False
            except OSError as error:
                # Named: an alarm of the same words is shown once, and the disk may be full again weeks later.
                what = f"version {state.version} of fragment {merged.fragment}"
                self._alarm(error, f"merges wait until {what} can be written")
            if self._stop.wait(RETRY_SECONDS):
                return False

    def remember(self, incarnations: Sequence[tuple[int, int]]) -> bool:
        """Makes learners' newest incarnations durable; an alarm, and False, if the disk refuses."""
        self._known.update(incarnations)
        try:
            self._owner.check()
            if len(incarnations) > self._appendable:
                self._save_incarnations()
            else:
                left, self._appendable = self._appendable - len(incarnations), 0
                checksummed_json.append(self._incarnations(), {str(m): n for m, n in incarnations})
                self._appendable = left
        except OSError as error:
            self._alarm(error, "incarnations are not durable")
            return False
        return True

    def pin(self, fragments: Iterable[int], folder: pathlib.Path, versions: Sequence[int] = ()) -> int:
        """Links a version of each of these fragments, and the learners' incarnations, into another folder.

        It is the one in `versions`, by fragment, if that is still kept, else the newest durable one. Returns
        the newest global step of the linked versions. Raises OSError.
        """
        self._owner.check()
        folder.mkdir(parents=True, exist_ok=True)
        kept, newest = fragment_history.versions(self.folder), 0
        for p in fragments:
            path = self._path(p)
            found = [one.path for one in kept.get(path.name, ()) if versions and one.version == versions[p]]
            fragment_history.linked_or_copied(*found[:1] or [path], folder / path.name)
            newest = max(newest, int(array_file.load_header(folder / path.name, FRAGMENT)["merged_step"]))
        for path in self._all_incarnations():  # copied: links would change when more learners join
            known = {str(m): number for m, number in self._known_to(path)}
            checksummed_json.save(folder / path.name, known)
        RunMark(self.run, secrets.token_hex(8)).save(folder)
        return newest

    def await_shown(self, fragments: Iterable[int], versions: Sequence[int]) -> None:
        """Waits until the files of these fragments have versions as new, for as long as a disk may need.

        Learners say which, and need not be right. Raises OSError, or ValueError: a file is damaged.
        """
        until = time.monotonic() + SHOWN_SECONDS
        for p in fragments:
            while int(array_file.load_header(self._path(p), FRAGMENT)["version"]) < versions[p]:
                if time.monotonic() >= until or self._stop.wait(RETRY_SECONDS):
                    return

    def restore(self, model: GlobalModel) -> SyncerState:
        """Loads a model's fragments, one after the other; the state is of these, with whom any shard knew.

        Their versions are kept, before which a syncer may have been killed. Raises DurableStateError as
        `fragment` does, OSError if there is no folder, ValueError if they are of another model.
        """
        self._found = self._which()
        state = SyncerState.initial(self._layout.num_fragments)
        for p in model.fragments:
            fragment, made = self._load(p)
            model.restore(p, fragment)
            state = made.after(state)
        for p in model.fragments:
            self._keep_version(p, state.versions[p], state.merged_steps[p])
        known = self._load_incarnations()
        self._known = dict(known)
        return state.with_incarnations(known)

    def state(self) -> SyncerState:
        """The state that an earlier syncer left, by the headers of the fragments alone.

        The rest of a file is checked when the fragment is read. Raises DurableStateError as `fragment` does.
        """
        state = SyncerState.initial(self._layout.num_fragments)
        for p in range(self._layout.num_fragments):
            header = self._read(p, array_file.load_header)
            try:
                self._check(p, header)
                state = _Made.of(header).after(state)
            except (LookupError, TypeError, AttributeError, ValueError):
                raise DurableStateError(f"{self._path(p)}: is damaged: its header has no version") from None
        return state.with_incarnations(self._load_incarnations())

    def fragment(self, p: int) -> tuple[FragmentState, int, int]:
        """A fragment, the step at which it was merged, and its lineage; raises DurableStateError."""
        fragment, made = self._load(p)
        return fragment, made.round.step, made.lineage

    def _load(self, p: int) -> tuple[FragmentState, _Made]:
        """A fragment, and how its version was made.

        Raises:
          DurableStateError: its file is missing or damaged, belongs to another model or another run, or
            holds numbers that are not finite.
        """
        header, arrays = self._read(p, array_file.load)
        self._check(p, header)
        names = [piece.name for piece in self._layout.fragments[p]]
        names += [f"array {i} of the outer optimizer" for i in range(len(arrays) - len(names))]
        try:
            check_finite(zip(names, arrays, strict=False))
        except NotFiniteError as error:
            raise DurableStateError(f"{self._path(p)}: {error}") from None
        pieces = map(np.array, arrays[: header["pieces"]])  # copied: some keep these alone
        state = FragmentState(header["version"], tuple(pieces), tuple(arrays[header["pieces"] :]))
        return state, _Made.of(header)

    def _read(self, p: int, read: Callable[[pathlib.Path, bytes], Found]) -> Found:
        path = self._path(p)
        try:
            return read(path, FRAGMENT)
        except FileNotFoundError:
            raise DurableStateError(f"{path}: is missing; the run cannot continue without it") from None
        except OSError as error:
            raise DurableStateError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DurableStateError(str(error)) from None

    def _check(self, p: int, header: Mapping[str, Any]) -> None:
        path = self._path(p)
        if (header.get("fragment"), header.get("layout")) != (p, self._layout.fingerprint):
            raise DurableStateError(f"{path}: is of another fragment or another model")
        if header.get("run", "") != self.run:
            raise DurableStateError(f"{path}: is of another run than the files beside it")

    def changed_at(self, p: int) -> tuple[int, int]:
        """Numbers that change whenever a fragment's file has another version; raises OSError."""
        found = self._path(p).stat()
        return found.st_ino, found.st_mtime_ns

    def _save(self, state: FragmentState, made: _Made) -> None:
        p = made.round.fragment
        header = {
            "fragment": p,
            "run": self.run,
            "layout": self._layout.fingerprint,
            "version": made.version,
            "merged_step": made.round.step,
            "lineage": made.lineage,
            "watermarks": {m: [mark.life, mark.steps, mark.position] for m, mark in made.watermarks.items()},
            "delays": {m: dataclasses.astuple(delay) for m, delay in made.delays.items()},
            "pieces": len(state.pieces),
        }
        self._owner.check()
        if self._found not in (None, self._which()):
            raise _Superseded(errno.ESTALE, "the run was started again")
        begun, arrays = time.monotonic(), [*state.pieces, *state.optimizer]
        array_file.save(self._path(p), FRAGMENT, header, arrays)
        self.throughput.add(sum(array.nbytes for array in arrays), time.monotonic() - begun)
        self._keep_version(p, made.version, made.round.step)

    def _which(self) -> tuple[int, int]:
        """The folder that the path leads to; a run that is started again from a snapshot makes another."""
        found = self.folder.stat()
        return found.st_dev, found.st_ino

    def _keep_version(self, p: int, version: int, merged_step: int) -> None:
        if self._keep > 1:
            try:
                fragment_history.keep(self._path(p), version, merged_step, self._keep)
            except OSError as error:  # the run continues, but cannot be rolled back that far
                self._alarm(error, "earlier versions are not kept")

    def _alarm(self, error: OSError, what: str) -> None:
        self._record(records.Alarm(f"{self.folder}: {records.reason(error)}: {what}", time.time()))

    def _save_incarnations(self) -> None:
        """Writes all of them; as many may be appended, so that a file is at most twice as long as needed."""
        self._owner.check()
        checksummed_json.save(self._incarnations(), {str(m): number for m, number in self._known.items()})
        self._appendable = len(self._known) + MIN_APPENDED

    def _load_incarnations(self) -> tuple[tuple[int, int], ...]:
        """The newest incarnation of each learner, over all shards, whose number may have changed."""
        return newest_incarnations(*map(self._known_to, self._all_incarnations()))

    def _all_incarnations(self) -> list[pathlib.Path]:
        """The incarnations of the first shard, and of each other that has written its own."""
        return [self._incarnations(0), *sorted(self.folder.glob(f"{_INCARNATIONS}-[0-9]*.json"))]

    def _known_to(self, path: pathlib.Path) -> list[tuple[int, int]]:
        try:
            return [(int(learner), int(number)) for learner, number in checksummed_json.load(path).items()]
        except OSError as error:
            raise DurableStateError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise DurableStateError(f"{path}: {error}") from None

    def _incarnations(self, shard: int | None = None) -> pathlib.Path:
        which = self._shard if shard is None else shard
        return self.folder / (f"{_INCARNATIONS}-{which:04d}.json" if which else f"{_INCARNATIONS}.json")

    def _path(self, p: int) -> pathlib.Path:
        return self.folder / f"fragment-{p:04d}"
