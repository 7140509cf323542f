"""Losses that follow a known law, with and without noise."""

import itertools

import numpy as np
import pandas as pd

from experiments.studies.scaling.measurements import PLACE

SIZES = (20_000, 50_000, 130_000, 350_000)
LEARNERS = (1, 2, 4, 8)


def table_of(*rows, tokens_a_parameter=20):
    """A table of `measurements` with these rows, of seed 0 where they name none."""
    tokens = [{"tokens": tokens_a_parameter * row["params"], "seed": 0, **row} for row in rows]
    columns = [*PLACE, *dict.fromkeys(name for row in tokens for name in row if name not in PLACE)]
    return pd.DataFrame(tokens, columns=columns)


def losses_of(
    loss, multiples=(20,), sizes=SIZES, learners=LEARNERS, noise=0.0, seeds=1, rng=None, common=0.0
):
    """`loss(n, d, m)` at every place, times e to the noise, and to that which a seed has at all places."""
    found = []
    shared = np.exp(common * rng.standard_normal(seeds)) if common else np.ones(seeds)
    for n, multiple, m in itertools.product(sizes, multiples, learners):
        factors = shared * (np.exp(noise * rng.standard_normal(seeds)) if noise else 1.0)
        place = {"params": n, "tokens": n * multiple, "learners": m}
        found += [
            {**place, "seed": seed, "loss": loss(n, n * multiple, m) * factor}
            for seed, factor in enumerate(factors)
        ]
    return table_of(*found).reindex(columns=[*PLACE, "seed", "loss"])
