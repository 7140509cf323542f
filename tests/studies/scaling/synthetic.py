"""Losses that follow a known law, with and without noise."""

import itertools

import numpy as np

from experiments.studies.scaling.measurements import GridPlace

SIZES = (20_000, 50_000, 130_000, 350_000)
LEARNERS = (1, 2, 4, 8)


def losses_of(
    loss, multiples=(20,), sizes=SIZES, learners=LEARNERS, noise=0.0, seeds=1, rng=None, common=0.0
):
    """`loss(n, d, m)` at every place, times e to the noise, and to that which a seed has at all places."""
    found = {}
    shared = np.exp(common * rng.standard_normal(seeds)) if common else np.ones(seeds)
    for n, multiple, m in itertools.product(sizes, multiples, learners):
        factors = np.exp(noise * rng.standard_normal(seeds)) if noise else np.ones(seeds)
        there = loss(n, n * multiple, m) * shared * factors
        found[GridPlace(n, n * multiple, m)] = dict(enumerate(there.tolist()))
    return found
