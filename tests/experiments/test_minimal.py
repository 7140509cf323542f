"""The story that experiments.minimal tells, in the order of the protocol."""

import re

import numpy as np

from experiments.minimal import STEPS, TARGETS, Run


def test_every_round_has_its_questions_its_offers_its_merge_and_its_updates_and_comes_nearer(capsys):
    run = Run()
    run.run()
    told = capsys.readouterr().out
    rounds = re.findall(
        r"learner 0 reports step (\d+)\n  learner 0 offers fragment (\d) at step \1\n"
        r"learner 1 reports step \1\n  learner 1 offers fragment \2 at step \1\n"
        r"(?:  asked ahead: learner 0 and learner 1, for fragment \d at step \d+\n)?"
        r"  merged and broadcast: version (\d) of fragment \2, 2 learners in it; distance to the best (.*)\n"
        r"(?:  asked ahead: learner 0 and learner 1, for fragment \d at step \d+\n)?"
        r"  learner 0 applies version \3 of fragment \2\n  learner 1 applies version \3 of fragment \2\n",
        told,
    )
    assert [(int(step), int(p)) for step, p, *_ in rounds] == [
        (t, t // 2 % 2 == 1) for t in range(2, STEPS, 2)
    ]  # at the last step both are due
    for step, p, *_ in rounds:
        asked = rf"asked ahead: .*learner 1.* for fragment {p} at step {step}\n"
        assert re.search(asked, told).start() < told.index(f"learner 0 reports step {int(step) - 1}\n")
    distances = [float(distance) for *_, distance in rounds]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.1 * np.linalg.norm(TARGETS.mean(axis=0))
    assert told.startswith("learner 0 is welcomed")
