"""Offers of a learner of several hosts, put together from the blocks that each of them sends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ddiloco.outer.blocks import Blocks, Cut, slices, tiled
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.outer.host_memory import aligned_empty
from ddiloco.protocol import events
from ddiloco.remote.wire.agreement import WireError


class _Growing:
    """An offer of which some hosts have sent their blocks."""

    def __init__(self, offer: events.FragmentArrived, formats: Sequence[ArrayFormat]) -> None:
        self.offer = offer
        self.arrays = tuple(aligned_empty(form.shape, form.dtype) for form in formats)
        self.cuts: list[list[Cut]] = [[] for _ in formats]
        self.hosts: set[int] = set()


class HostOffers:
    """Of one learner, at most one a fragment; a newer one takes the place of what never became whole."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._lock = threading.Lock()
        self._growing: dict[int, _Growing] = {}  # by fragment

    def add(
        self,
        host: int,
        offer: events.FragmentArrived,
        formats: Sequence[ArrayFormat],
        blocks: Sequence[Blocks],
    ) -> tuple[np.ndarray, ...] | None:
        """Takes one host's blocks; gives the arrays once all hosts' are there.

        Raises:
          WireError: the hosts do not say the same of the offer, or their blocks are not the arrays.
        """
        fragment = offer.round.fragment
        with self._lock:
            growing = self._growing.get(fragment)
            if growing is None or growing.offer.round != offer.round:
                growing = self._growing[fragment] = _Growing(offer, formats)
            if growing.offer != offer:
                raise WireError("another offer", "a learner's hosts differ in what they say of it")
            for target, cuts, part in zip(growing.arrays, growing.cuts, blocks, strict=True):
                shaped = target.reshape(part.shape)
                for box, block in part.blocks.items():
                    shaped[slices(box)] = block
                cuts.append(part.cut)
            growing.hosts.add(host)
            if len(growing.hosts) < self.hosts:
                return None
            del self._growing[fragment]
        if not all(map(tiled, growing.cuts)):
            raise WireError("blocks that are no fragment", "the hosts' blocks overlap or leave gaps")
        return growing.arrays
