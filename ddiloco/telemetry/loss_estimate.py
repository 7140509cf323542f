"""A rough estimate of how much held-out loss synchronisation costs, fitted to measured tables.

docs/results/quality.md has the loss by interval, merged_share.md by what links carry, and codecs.md by
codec: a small model, early in training, three seeds. Only differences between two estimates mean anything.
"""

from __future__ import annotations

PER_STEP = 0.08  # percent of the loss for each step of work in a contribution, and of its age at the merge
UNMERGED, POWER = 12.6, 3.6  # percent where nothing is merged; how it falls with the merged share
OF_CODEC = {"int2": 0.4, "sign": 3.0}  # percent; others cost nothing that was measured
ERROR = 0.6  # percent: root mean square of the difference to the tables


def loss_percent(work: float, age: float, share: float, codec: str) -> float:
    """Percent of the loss.

    Args:
      work: steps in a contribution, on average over tokens.
      age: steps that its learner took from the offer to the merge.
      share: of the trained tokens that are merged.
      codec: of offers.
    """
    unmerged = min(max(1.0 - share, 0.0), 1.0)
    return PER_STEP * (work + age) + UNMERGED * unmerged**POWER + OF_CODEC.get(codec, 0.0)
