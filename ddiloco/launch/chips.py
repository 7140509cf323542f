"""Divides the TPU chips of a host among learners, each a process of its own."""

from __future__ import annotations

from collections.abc import Mapping

from ddiloco.config import ConfigError

BOUNDS = {
    1: "1,1,1",
    2: "1,2,1",
    4: "2,2,1",
    8: "2,4,1",
}  # of so many chips of a host, that one process may have


def share(learner: int, num_learners: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have a learner see its share of the chips that TPU_VISIBLE_CHIPS lists, if it does.

    Raises:
      ConfigError: there are fewer chips than learners, since a chip is of one process.
    """
    chips = [chip for chip in environment.get("TPU_VISIBLE_CHIPS", "").split(",") if chip]
    if not chips or num_learners == 1:
        return {}
    if len(chips) < num_learners:
        raise ConfigError(f"TPU_VISIBLE_CHIPS: lists {len(chips)} chips for {num_learners} learners")
    each = max(size for size in BOUNDS if size <= len(chips) // num_learners)
    return {
        "TPU_VISIBLE_CHIPS": ",".join(chips[learner * each : (learner + 1) * each]),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[each],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a process of four chips otherwise counts as that of all
    }
