"""Scenario files: each tells one story of the protocol, event by event, with the exact actions that follow.

After a change that is meant to alter them, `python -m tests.protocol.test_scenarios --rewrite` writes the
actions again; read the difference as you would a change of the code.
"""

import pathlib
import sys

import pytest

from tests.protocol.scenario_language import rewritten

FOLDER = pathlib.Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_actions_of_a_scenario_are_those_it_tells(path):
    text = path.read_text()
    assert text.startswith("# ") and len(text.split("\n\n")[0].split()) > 20, "it begins with its story"
    assert rewritten(text) == text, "if this change is meant, rewrite the scenarios and review them"


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python -m tests.protocol.test_scenarios --rewrite")
    for path in FILES:
        path.write_text(rewritten(path.read_text()))
