"""How far learners' outer gradients agree, by round and by kind of tensor, from what runs have recorded."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ddiloco.telemetry.files import read_values
from experiments.cli.tables import markdown

ALL = "all tensors"
OF_KIND = "cosine/"  # before a kind's name among the figures of a round
PARTS = 12  # of a run, each with a mean over its rounds


def measured(folder: pathlib.Path) -> pd.DataFrame:
    """A row for each round and kind, of all runs below a folder: label, seed, kind, part, cosine, to_merged.

    Not of runs that a later one has put into its folder `previous`. The label is the path of the run's folder
    without that of its seed. `to_merged` is the cosine to the mean of q vectors of one length with a mean
    cosine c between them: sqrt((1 + (q - 1) c) / q).
    """
    runs = [path.parent for path in sorted(folder.rglob("rounds.jsonl")) if "previous" not in path.parts]
    rows = [row for run in runs for row in _rounds(folder, run)]
    columns = ["label", "seed", "kind", "part", "cosine", "to_merged"]
    return pd.DataFrame(rows, columns=columns)


def _rounds(folder: pathlib.Path, run: pathlib.Path) -> Iterator[dict[str, Any]]:
    place = run.relative_to(folder).parts
    label = "/".join(part for part in place if not part.startswith("seed=")) or folder.name
    label = label.replace(",-", ", ")  # as it was before it named a folder
    rounds = [line for line in read_values(run / "rounds.jsonl") if line.get("quorum", 0) > 1]
    last = max((line["step"] for line in rounds), default=0)
    for line in rounds:
        kinds = {name.removeprefix(OF_KIND): line[name] for name in line if name.startswith(OF_KIND)}
        for kind, cosine in {ALL: line.get("cosine"), **kinds}.items():
            if cosine is not None:
                q = line["quorum"]
                yield {
                    "label": label,
                    "seed": next((part for part in place if part.startswith("seed=")), ""),
                    "kind": kind,
                    "part": (line["step"] * PARTS // (last + 1) + 0.5) / PARTS,
                    "cosine": cosine,
                    "to_merged": float(np.sqrt(max(0.0, (1 + (q - 1) * cosine) / q))),
                }


def table(frame: pd.DataFrame) -> str:
    """A row for each kind, and for cosines to the merged one; mean and standard deviation over seeds."""
    of_run = frame.groupby(["kind", "label", "seed"], sort=False)[["cosine", "to_merged"]].mean()
    merged = of_run.loc[[ALL]].to_merged.rename({ALL: f"{ALL}, to the merged one"}, level="kind")
    kinds = of_run.cosine.drop(ALL, level="kind").sort_index(level="kind", sort_remaining=False)
    found = pd.concat([of_run.cosine.loc[[ALL]], merged, kinds])
    labels = list(frame.label.unique())
    rows = []
    for kind in found.index.unique("kind"):
        own = dict(iter(found[kind].groupby("label")))
        rows.append([kind, *(_spread(own[label]) if label in own else "" for label in labels)])
    return markdown(("cosine between learners", *labels), rows, align=True)


def _spread(values: pd.Series) -> str:
    return f"{values.mean():.2f}" + (f" ± {values.std():.2f}" if len(values) > 1 else "")
