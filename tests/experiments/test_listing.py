"""The list of all settings: each with its value, its meaning and its bounds."""

import re

from configs import moe
from ddiloco.config import leaves
from ddiloco.settings.experiment import parse
from experiments.cli.listing import listing


def test_every_setting_has_a_line_with_value_meaning_and_bounds():
    experiment = parse(moe.get_config("small"))
    lines = listing(experiment).splitlines()
    assert [line.split()[0] for line in lines] == ["model.name", *(leaf.path for leaf in leaves(experiment))]
    told = {line.split()[0]: re.split(" {2,}", line, maxsplit=2)[1:] for line in lines}
    assert told["model.name"][0] == "moe"
    assert told["train.batch_size"] == ["16", "rows that one learner reads for one step [at least 1]"]
    assert told["sync.max_run_ahead"][0] == "None"
    assert told["virtual.loss"] == ["(0.0,)", "share of messages that are lost [at least 0.0 and below 1.0]"]
    assert told["algorithm"][1].endswith("lone_learner]; stays when a run resumes")
