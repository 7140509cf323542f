"""All presets on slices of each kind of chip: compiled one after another, in one table."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.settings.experiment import parse, to_json
from ddiloco.telemetry.files import read_json
from ddiloco.telemetry.formatting import number
from experiments.cli import program
from experiments.cli.tables import markdown

_FOUR = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
_EIGHT = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
_LARGE = ("v5e:8x16", "v5p:4x4x4", "v6e:8x8")
GRID: dict[str, Sequence[str]] = {
    "dense:tiny": _FOUR,
    "dense:small": _EIGHT,
    "dense:2b": ("v5e:8x8", "v5p:2x2x2", "v6e:4x8"),
    "dense:5b": _LARGE,
    "dense:9b": _LARGE,
    "moe:tiny": _FOUR,
    "moe:small": _EIGHT,
    "moe:2.8b": (*_LARGE, "v5p:4x4x8"),
    "moe:3.8b": (*_LARGE, "v5p:4x4x8"),
    "vit:tiny": _FOUR,
    "vit:small": _EIGHT,
    "vit:base": _EIGHT,
    "multimodal:tiny": _FOUR,
    "multimodal:small": _EIGHT,
}


def compile_all(folder: pathlib.Path, print_line: Callable[[str], None]) -> list[dict[str, Any]]:
    """The figures of the whole grid, in its order, each from a process of its own.

    What lies in the folder with the preset's settings is not compiled again; what cannot be compiled is
    reported and left out.
    """
    found = []
    for preset, topology in ((preset, one) for preset, slices in GRID.items() for one in slices):
        output = folder / f"{preset}-{topology}.json".replace(":", "-")
        model, _, size = preset.partition(":")
        config = f"configs/{model}.py:{size}"
        settings = json.loads(json.dumps(to_json(parse(program.load_config(config)))))
        if read_json(output).get("settings") != settings:
            print_line(f"{preset} on {topology}")
            asked = [f"--config={config}", f"--topology={topology}", f"--output={output}"]
            done = subprocess.run(
                [sys.executable, "-m", "experiments.compile", *asked], capture_output=True, text=True
            )
            if done.returncode:
                print_line(_problem(done))
                continue
        found.append({**json.loads(output.read_text()), "preset": preset})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown table: a row for each preset and slice, sizes in GiB a chip."""
    names = ("preset", "slice", "mesh", "compile s", "state", "temporaries", "peak", "of HBM", "fits")
    names += ("FLOP / model's", "sent GB", "roofline s", "by", "MFU at most")
    return markdown(names, [_row(one) for one in found])


def _problem(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says why, which the compiler follows with where; one that is killed says nothing."""
    lines = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
    return next((line for line in lines if "Error: " in line or line.startswith("error: ")), lines[-1])


def _row(one: Mapping[str, Any]) -> list[str]:
    line = one["roofline"] or {}
    mesh = " ".join(f"{axis} {size}" for axis, size in one["mesh"].items() if size > 1)
    return [
        one["preset"],
        one["topology"],
        mesh or "1",
        f"{one['compile_seconds']:.0f}",
        *(f"{one[name]:.2f}" for name in ("state_gib", "temp_gib", "peak_gib", "hbm_gib")),
        "yes" if one["fits"] else "no",
        number(one["flops_ratio"] if line else None, ".2f"),
        number(sum(one["collective_bytes"].values()) / 1e9 if line else None, ".2f"),
        number(line.get("step_seconds"), ".3g"),
        line.get("bound_by", "-"),
        number(line.get("mfu"), ".0%"),
    ]
