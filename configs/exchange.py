"""How often learners meet, and in how many bits: what the presets have, and why.

  python -m experiments.tune --config=configs/exchange.py[:FAMILY] --output=runs/exchange-FAMILY
  python -m experiments.compare --config=configs/exchange.py[:FLEET,FLEET...] --output=runs/exchange-fleets

FAMILY  of configs/micro.py: dense (default), moe, vit, multimodal. Each choice has its own best outer rate;
        about 20 runs of a minute on one core.
FLEET   of configs/links.py; with none, nine that cover links, merges and speeds. Nothing is trained: the
        tiny dense preset's bytes and steps, a few seconds a run.

A link carries so many times what a learner sends in float32 at H=24, whatever the choice sends. Outcome:
docs/results/quality.md.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import baselines, links, micro, sections

OFTEN = "H=2, int4"  # not trained here: configs/tuned.py
INT4 = {"outer.codec": "int4", "outer.update_codec": "int4"}
CHOICES = {
    "H=24, float32": {"sync.interval": 24, "outer.codec": "f32", "outer.update_codec": "f32"},  # the paper's
    "H=12, int4": {"sync.interval": 12, **INT4},
    "H=6, int4": {"sync.interval": 6, **INT4},
    OFTEN: {"sync.interval": 2, **INT4},
}
FLEETS = (
    *("20", "1.0", "0.5", "thin-0.25"),
    *("jitter-20", "far-20", "uneven-20", "slow-20", "merges-20"),
)
COLUMNS = ("tokens_total", "merged_share", "worst_share", "real_steps", "age", "bytes_moved")


def get_config(preset: str = "dense") -> ConfigDict:
    """The settings of configs/micro.py, or with `counted` those of configs/links.py."""
    return links.get_config(preset) if preset == "counted" else micro.get_config(preset)


def get_tuning(family: str = "dense") -> dict[str, Any]:
    """Each choice at its own outer rate, against data-parallel."""
    (family,) = sections.words(family, tuple(micro.FAMILIES))
    rows: list[dict[str, Any]] = [{"label": "data-parallel", "preset": f"{family},data_parallel", "axes": []}]
    for label, choice in CHOICES.items():
        if label == OFTEN:
            continue
        row = {"label": label, "preset": f"{family},decoupled", "against": "data-parallel", **choice}
        rows.append({**row, "outer.learning_rate": 0.7, "axes": ["outer.learning_rate"]})
    return {
        "rows": [{**row, **baselines.SCORED_AT_THE_END} for row in rows],
        "grid": {"outer.learning_rate": (0.35, 0.5, 0.7, 1.0)},
        "budget": 3,
        "choosing": baselines.CHOOSING,
    }


def get_comparison(fleets: str = ",".join(FLEETS)) -> list[dict[str, Any]]:
    """Each fleet with each choice."""
    return [
        {"label": f"{name}: {label}", "preset": "counted", **links.fleet(name), **choice}
        for name in fleets.split(",")
        for label, choice in CHOICES.items()
    ]
