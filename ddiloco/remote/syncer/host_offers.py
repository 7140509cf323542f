"""Offers of a learner of several hosts, put together from the blocks that each of them sends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ddiloco.outer.blocks import Blocks, Cut, Gathered
from ddiloco.outer.codecs import ArrayFormat
from ddiloco.protocol import events
from ddiloco.remote.wire.agreement import WireError


class _Growing:
    """An offer of which some hosts have sent their blocks."""

    def __init__(
        self, offer: events.FragmentArrived, formats: Sequence[ArrayFormat], blocks: Sequence[Blocks]
    ) -> None:
        self.offer = offer
        of = zip(blocks, formats, strict=True)
        self.gathered = [Gathered(Cut.whole(part.shape), form.dtype) for part, form in of]
        self.hosts: set[int] = set()


class HostOffers:
    """Of one learner, at most one a fragment; a newer one takes the place of what never became whole."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
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
            growing, step = self._growing.get(fragment), offer.contribution.step
            same = growing is not None and growing.offer.round == offer.round
            if same and step < growing.offer.contribution.step:
                raise WireError("another offer", "a newer one has come already")
            if not same or step > growing.offer.contribution.step or host in growing.hosts:
                growing = _Growing(offer, formats, blocks)  # what came before will never be whole
            self._growing.pop(fragment, None)
            if growing.offer != offer:
                raise WireError("another offer", "a learner's hosts differ in what they say of it")
            try:
                for gathered, part in zip(growing.gathered, blocks, strict=True):
                    gathered.add(part)
                growing.hosts.add(host)
                if len(growing.hosts) < self._hosts:
                    self._growing[fragment] = growing
                    return None
                whole = [gathered.blocks().all for gathered in growing.gathered]
            except ValueError as error:
                raise WireError("blocks that are no fragment", str(error)) from None
        return tuple(array.reshape(form.shape) for array, form in zip(whole, formats, strict=True))
