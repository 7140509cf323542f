"""What a syncer of a large run needs, on paper: from what `experiments.bench syncer` measured.

python -m experiments.bench syncer --output=runs/syncer.json
python -m experiments.studies.syncer_scale runs/syncer.json
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.cli import program
from experiments.cli.tables import markdown

BITS = {"f32": 32.0, "int8": 8.25, "int4": 4.25}
"""Of an element as it travels; groups of 128 share a float32 scale."""
OVERLAP = 2
"""tau: steps that a round may overlap."""


@dataclasses.dataclass(frozen=True)
class SyncerHost:
    """A machine of the syncer; by default a common one of a cloud, which is stated, not measured.

    Attributes:
      cores: each as fast as those that were measured.
      network: bytes a second each way.
      disk: bytes a second made durable.
      memory: bytes.
    """

    cores: int = 64
    network: float = 12.5e9
    disk: float = 3e9
    memory: float = 512 * 2.0**30


@dataclasses.dataclass(frozen=True)
class LargeRun:
    """A run of the decoupled family, whose fragments are all as large. `step_seconds` is of all learners."""

    name: str
    parameters: float
    step_seconds: float
    up: str = "int4"
    down: str = "int4"
    learners: int = 8
    fragments: int = 24
    interval: int = 24

    @property
    def fragment(self) -> float:
        """Bytes of one in float32."""
        return 4 * self.parameters / self.fragments

    @property
    def rounds(self) -> float:
        """A step."""
        return self.fragments / self.interval


class Rates(NamedTuple):
    """Processor seconds for each byte, in float32, of what a learner offers, or of a version.

    Attributes:
      exchange: of an offer: received, decoded and checked, and an update sent back.
      merge: of an offer.
      disk: of a version, which is written with the outer optimizer's state.
    """

    exchange: float
    merge: float
    disk: float

    @classmethod
    def of(cls, row: Mapping[str, Any], learners: int = 8) -> Rates:
        """From a row of the bench in which rounds follow one another."""
        size = row["fragment_bytes"]
        spent = {purpose: row[f"syncer_{purpose}_ms_a_round"] / 1e3 for purpose in cls._fields}
        offered = learners * size
        return cls(spent["exchange"] / offered, spent["merge"] / offered, spent["disk"] / size)


class SyncerNeeds(NamedTuple):
    """What a run asks of its syncer.

    Attributes:
      bytes_in: a step; `bytes_out`, `durable` likewise.
      processor: seconds a step.
      memory: bytes of all hosts together.
      hosts: by what asks for so many.
      round_seconds: from the first byte of a round to the last, on one host that has nothing else to do.
      fragments: P with which that is two steps, at least the run's.
    """

    bytes_in: float
    bytes_out: float
    durable: float
    processor: float
    memory: float
    hosts: Mapping[str, int]
    round_seconds: float
    fragments: int

    @property
    def parts(self) -> int:
        """S: the fewest hosts."""
        return max(self.hosts.values())


def needs(run: LargeRun, rates: Rates, host: SyncerHost) -> SyncerNeeds:
    """Closed forms; the round's stages follow one another, its learners and merge use all cores."""
    size, offered = run.fragment, run.learners * run.fragment
    kept = 3 if run.down == "f32" else 4  # two versions, momentum, and what the update codec left out
    up, down, durable = offered * BITS[run.up] / 32, offered * BITS[run.down] / 32, (kept - 1) * size
    spent = Rates(offered * rates.exchange, offered * rates.merge, size * rates.disk)
    under_way = (OVERLAP + 1) * (offered + (0 if run.up == "f32" else up) + size)
    memory = kept * size * run.fragments + under_way
    asked = {
        "cores": run.rounds * sum(spent) / run.step_seconds / host.cores,
        "network": run.rounds * max(up, down) / run.step_seconds / host.network,
        "disk": run.rounds * durable / run.step_seconds / host.disk,
        "memory": memory / host.memory,
    }
    computing = spent.exchange / min(run.learners, host.cores) + spent.merge / host.cores
    round_seconds = (up + down) / host.network + computing + max(spent.disk, durable / host.disk)
    hosts = {name: math.ceil(share) for name, share in asked.items()}
    moved = (run.rounds * size for size in (up, down, durable, sum(spent)))
    finer = max(1.0, round_seconds / run.step_seconds / OVERLAP)
    return SyncerNeeds(*moved, memory, hosts, round_seconds, math.ceil(run.fragments * finer))


RUNS = (
    LargeRun("9B", 9e9, 0.7),  # docs/results/compile.md, a learner on v5p:4x4x4
    LargeRun("70B", 70e9, 3.0),
    LargeRun("1T", 1e12, 10.0),
)
"""Step times of 70B and 1T are stated: of learners that are large enough for them."""


def table(rows: Sequence[Mapping[str, Any]], host: SyncerHost) -> str:
    """Markdown: what each run needs with each pair of codecs that was measured."""
    names = ["run", "codecs", "GB/s in", "out", "durable", "cores", "host memory"]
    names += ["S by cores, network, disk, memory", "**S**", "a round takes", "P for two steps"]
    lines = []
    for run in RUNS:
        for measured in rows:
            name, _, stage = measured["name"].partition(" ")
            if stage != "merge":
                continue
            up, down = name.split("/")
            made = dataclasses.replace(run, up=up, down=down)
            found, seconds = needs(made, Rates.of(measured), host), run.step_seconds
            rates = (x / seconds / 1e9 for x in (found.bytes_in, found.bytes_out, found.durable))
            cells = [f"{run.name}, {seconds:g} s", name, *(f"{rate:.2f}" for rate in rates)]
            cells += [f"{found.processor / seconds:.1f}", f"{found.memory / 2**30:,.0f} GiB"]
            cells += [" ".join(map(str, found.hosts.values())), f"**{found.parts}**"]
            cells.append(f"{found.round_seconds:.1f} s, {found.round_seconds / seconds:.1f} steps")
            cells.append(str(found.fragments))
            lines.append(cells)
    return markdown(names, lines)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        raise program.UsageError("name the JSON file that experiments.bench syncer has written")
    path = pathlib.Path(arguments[1])
    with program.reaching("file", path):
        text = path.read_text()
    print(table(json.loads(text)["rows"], SyncerHost()))
    return 0


if __name__ == "__main__":
    program.run(main, positional=True)
