"""The global model: sole owner of Theta, of the outer optimizers' states and of the versions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.arrays.host_memory import host_device, owned
from ddiloco.outer.encoding import InvalidContribution, check_format
from ddiloco.outer.fragments import FragmentLayout, assemble, take
from ddiloco.outer.guards import (
    Guard,
    Notice,
    Verdict,
    draw_witnesses,
    offered,
    sample_counts,
    sample_lines,
    sampled_cosines,
)
from ddiloco.outer.merging import contribution_weight
from ddiloco.outer.offers import MeasuredOffer, OfferSampler
from ddiloco.outer.optimizer import OuterConfig
from ddiloco.outer.outer_step import OuterStep


class FragmentState(NamedTuple):
    """Everything that the next merge of a fragment depends on."""

    version: int  # how often the fragment has been merged
    pieces: tuple[np.ndarray, ...]  # Theta_p
    # The leaves of the outer optimizer's state, in the order of `jax.tree.leaves`, then what the update codec
    # left out
    optimizer: tuple[np.ndarray, ...]


class NextVersion(NamedTuple):
    """The result of a merge."""

    pieces: tuple[np.ndarray, ...]  # of the newest version, read-only
    metrics: dict[str, float]  # those of `OuterResult`
    left_out: tuple[int, ...] = ()  # the learners whose offers are not in it
    notices: tuple[Notice, ...] = ()  # what the guard found, and did
    # What leads from the last version to this, in the update codec; () where the pieces are sent
    difference: tuple[np.ndarray, ...] = ()
    # Nothing was merged: the newest version is still the one before, and there are no metrics
    empty: bool = False


_DIFFER = "parameters are not those of the layout; the first to differ is "


class GlobalModel:
    """P fragments of float32 host arrays. A merge makes new arrays and never writes into those it returned.

    For one thread at a time; only `read` may be called from any thread, and `state` of a fragment that is not
    being merged. Beside Theta and the
    optimizer's state it keeps the previous version of each fragment: the next merge writes into that memory,
    unless it is still being read, since allocating new memory would take as long as the merge.

    Attributes:
      layout: the fragments.
      fragments: those that it holds.
      guard: judges offers; None: nobody does.

    Example:
      >>> import numpy as np
      >>> from ddiloco.outer.fragments import fragment
      >>> config = OuterConfig(merge="direct", optimizer="direct")
      >>> model = GlobalModel(fragment({"a": (2,)}, 1), {"a": np.float32([0, 0])}, config, num_learners=2)
      >>> offers = [model.read(0, (theta,)) for theta in np.float32([[1, 0], [0, 4]])]
      >>> new = model.merge(0, offers, counts=[(10, 300), (10, 100)])  # (steps, tokens)
      >>> print(new.pieces[0], model.fragment(0)[0])
      [0.9 0.4] 1
    """

    def __init__(
        self,
        layout: FragmentLayout,
        parameters: Mapping[str, np.ndarray],
        config: OuterConfig,
        num_learners: int,
        step_tokens: int | None = None,
        fragments: Sequence[int] | None = None,
        rebase: bool = False,
    ) -> None:
        """Copies the parameters, float32; raises ValueError if they are not those of the layout.

        `num_learners`: M, the most contributions that a merge can have. `step_tokens`: the most tokens that
        a step of any learner can have; None: not known. `fragments`: those that it holds; None: all.
        `rebase`: whether learners do: offers are outer gradients then, whatever the codec.
        """
        if wrong := sorted(parameters.keys() ^ dict(layout.shapes).keys()):
            raise ValueError(_DIFFER + wrong[0])
        self.layout = layout
        self.fragments = tuple(range(layout.num_fragments) if fragments is None else fragments)
        self._codec_of, self._codecs = config.codec_of, config.codecs
        of_parameters = config.all_exact and not rebase
        self._step = OuterStep(layout, config, num_learners, of_parameters)
        self._of_parameters = of_parameters
        self._guarding, self._step_tokens = config.guard, step_tokens
        self.guard = self.new_guard()
        self._device = host_device()
        self._pieces = {p: self._owned(self._taken(p, parameters)) for p in self.fragments}
        self._states = {p: self._step.init(pieces) for p, pieces in self._pieces.items()}
        self._versions = dict.fromkeys(self.fragments, 0)
        self._retired: dict[int, tuple[jax.Array, ...] | None] = dict.fromkeys(self.fragments)

    def compile(self) -> None:
        """Compiles what its fragments' rounds run, so that none waits for it."""
        for p in self.fragments:
            self._step.compile(p)
            for codec in self._codecs if self.guard is not None else ():
                self._sampler(p).compile(codec)

    def fragment(self, p: int) -> tuple[int, tuple[np.ndarray, ...]]:
        """Version and pieces of fragment p, read-only; later merges do not change them."""
        return self._versions[p], tuple(np.asarray(piece) for piece in self._pieces[p])

    def read(self, p: int, arrays: Sequence[np.ndarray], learner: int = 0) -> MeasuredOffer:
        """What the learner sent of fragment p, which may be anything, for `merge`; it is kept encoded.

        Raises:
          InvalidContribution: the arrays are not those of its codec, or values of them are not finite or have
            squares that are not.
        """
        codec = self._codec_of(learner)
        check_format(self.layout, p, codec, arrays)
        pieces = self._pieces[p]
        # Views, so that no merge writes over them meanwhile.
        offer = self._step.measure(p, tuple(map(np.asarray, pieces)), arrays, codec)
        for piece, norm in zip(self.layout.fragments[p], offer.norms, strict=True):
            if not math.isfinite(norm):
                raise InvalidContribution(f"{piece.name} holds values that are not finite or beyond 1e19")
        return offer._replace(anchor=pieces if self._of_parameters else None)

    def merge(
        self,
        p: int,
        offers: Sequence[MeasuredOffer],
        counts: Sequence[tuple[int, int]],
        learners: Sequence[int] = (),
        interval: int | None = None,
    ) -> NextVersion:
        """Makes the next version of fragment p.

        If all weights are zero, or all are left out, no version is made and the optimizer does not step. The
        same holds where the outer step would make values that are not finite; then the fragment's outer
        optimizer also starts afresh. Of no offers at all, the next version is the last one once more.

        Args:
          offers: of each learner in the merge, as `read` gave them: theta_{m,p} where all send in the codec
            f32 and do not rebase, else its outer gradient.
          counts: (c_steps, c_tokens) of each.
          learners: their numbers, by which the guard knows them; (): the guard is not asked.
          interval: steps beyond it add no weight (`contribution_weight`); None: all do.
        """
        if not offers:
            self._versions[p] += 1
            return NextVersion(self.fragment(p)[1], {})
        weights = [contribution_weight(steps, tokens, interval) for steps, tokens in counts]
        left_out: list[int] = []
        notices: tuple[Notice, ...] = ()
        offers = [self._measured_now(p, offer) for offer in offers]
        if learners and self.guard is not None:
            refused, notices = self._judge(self.guard, p, offers, counts, learners)
            left_out = [m for m in learners if m in refused]
            weights = [0.0 if m in refused else w for m, w in zip(learners, weights, strict=True)]
        if any(weights):
            step = self._step(p, self._pieces[p], self._states[p], offers, weights, self._retired[p])
            if step.finite:
                self._retired[p], self._pieces[p] = self._pieces[p], step.pieces
                self._states[p] = step.opt_state
                self._versions[p] += 1
                new = self.fragment(p)[1]
                return NextVersion(new, step.metrics, tuple(left_out), notices, step.difference)
            self._retired[p], self._states[p] = step.pieces, step.opt_state
            notices += tuple(Notice("left_out", m, "the outer step was not finite") for m in learners)
        return NextVersion(self.fragment(p)[1], {}, tuple(learners), notices, empty=True)

    def _measured_now(self, p: int, offer: MeasuredOffer) -> MeasuredOffer:
        """The offer with its norms from Theta_p as it is now."""
        pieces = self._pieces[p]
        if not self._of_parameters or offer.anchor is pieces:
            return offer
        return self._step.measure(p, pieces, offer.arrays, offer.codec)

    def _judge(
        self,
        guard: Guard,
        p: int,
        offers: Sequence[MeasuredOffer],
        counts: Sequence[tuple[int, int]],
        learners: Sequence[int],
    ) -> Verdict:
        anchor, sizes = self.fragment(p)[1], self._sizes(p)
        norms = np.stack([offer.norms for offer in offers], axis=1)
        lines, sampler = sample_lines(sizes, norms), self._sampler(p)
        theta: np.ndarray | int = sampler("f32", anchor, lines) if self._of_parameters else 0

        def sampled(place: int) -> np.ndarray:
            offer = offers[place]
            return theta - sampler(offer.codec, offer.arrays, lines)  # where it is the gradient, its opposite

        cosines = sampled_cosines(sampled, len(offers), draw_witnesses(norms))
        found = offered(learners, counts, norms, sizes, cosines)
        return guard.judge(p, found, lambda: math.sqrt(sum(float(np.vdot(x, x)) for x in anchor)))

    def _sizes(self, p: int) -> list[int]:
        return [math.prod(shape) for shape in self.layout.piece_shapes(p)]

    def _sampler(self, p: int) -> OfferSampler:
        return OfferSampler(self.layout.piece_shapes(p), sample_counts(self._sizes(p)))

    def new_guard(self) -> Guard | None:
        """A guard without history, as every process of the syncer starts with."""
        return Guard(self._guarding, self._step_tokens) if self._guarding.gates else None

    def parameters(self) -> dict[str, np.ndarray]:
        """All tensors by name, put together; later merges do not change them."""
        return assemble(self.layout, [self.fragment(p)[1] for p in range(self.layout.num_fragments)])

    def sha256(self) -> str:
        """`parameters_sha256` of the parameters as they are now."""
        return parameters_sha256(self.parameters())

    def state(self, p: int) -> FragmentState:
        """The state of fragment p, for a checkpoint; later merges do not change it."""
        version, pieces = self.fragment(p)
        return FragmentState(version, pieces, tuple(np.array(x) for x in jax.tree.leaves(self._states[p])))

    def restore(self, p: int, state: FragmentState) -> None:
        """Replaces fragment p by a copy of a saved state; raises ValueError if that is of other shapes."""
        leaves, structure = jax.tree.flatten(self._states[p])
        wanted = [(x.shape, x.dtype) for x in (*self._pieces[p], *leaves)]
        given = [(np.shape(x), np.asarray(x).dtype) for x in (*state.pieces, *state.optimizer)]
        if wanted != given:
            raise ValueError(f"the saved state of fragment {p} is not of this layout and outer optimizer")
        self._pieces[p] = self._owned(state.pieces)
        self._states[p] = jax.tree.unflatten(structure, self._owned(state.optimizer))
        self._versions[p] = int(state.version)
        self._retired[p] = None

    def _taken(self, p: int, parameters: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        pieces, shapes = take(self.layout, p, parameters), self.layout.piece_shapes(p)
        for piece, array, shape in zip(self.layout.fragments[p], pieces, shapes, strict=True):
            if tuple(array.shape) != shape:
                raise ValueError(_DIFFER + piece.name)
        return pieces

    def _owned(self, arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
        return tuple(owned(np.asarray(x), self._device) for x in arrays)


def pieces_sha256(pieces: Sequence[np.ndarray]) -> bytes:
    """SHA-256 over the bytes of a fragment's pieces, in their order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(_bytes_of(piece))
    return digest.digest()


def parameters_sha256(parameters: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes of the tensors, in the order of their names.

    Example:
      >>> import numpy as np
      >>> parameters_sha256({"a": np.float32([1.0])})[:16]
      '0c9c989b0e9db5bd'
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        tensor = np.ascontiguousarray(parameters[name])
        shape = tuple(np.shape(parameters[name]))
        digest.update(f"{name}\0{tensor.dtype.name}\0{shape}\0".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
