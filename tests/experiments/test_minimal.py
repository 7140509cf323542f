"""The story that experiments.minimal tells, in the order of the protocol."""

import re

import numpy as np

from experiments.minimal import STEPS, TARGETS, Run


def test_every_round_has_its_quorum_its_pulls_its_merge_and_its_updates_and_comes_nearer(capsys):
    run = Run()
    run.run()
    told = capsys.readouterr().out
    rounds = re.findall(
        r"learner 0 reports step (\d+)\nlearner 1 reports step \1\n"
        r"  quorum at step \1: fragment (\d) of learner 0 is pulled\n"
        r"  quorum at step \1: fragment \2 of learner 1 is pulled\n"
        r"  merged and broadcast: version (\d) of fragment \2, 2 learners in it; distance to the best (.*)\n"
        r"  learner 0 applies version \3 of fragment \2\n  learner 1 applies version \3 of fragment \2\n",
        told,
    )
    assert [(int(step), int(p)) for step, p, *_ in rounds] == [
        (t, t // 2 % 2 == 1) for t in range(2, STEPS + 1, 2)
    ]
    distances = [float(distance) for *_, distance in rounds]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.1 * np.linalg.norm(TARGETS.mean(axis=0))
    assert told.startswith("learner 0 is welcomed")
