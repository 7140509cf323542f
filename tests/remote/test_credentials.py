"""Secrets on disk: tokens that are made, read and refused."""

import pytest

from ddiloco.config import ConfigError
from experiments.cli.credentials import load_security


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602])
def test_a_secret_that_others_can_read_is_refused(tmp_path, mode):
    file = tmp_path / "token"
    file.write_text("x" * 16)
    file.chmod(mode)
    refused = r"^token_file: .*token: others can read or change it; use `chmod 600`"
    with pytest.raises(ConfigError, match=refused):
        load_security(str(file), None)
    file.chmod(0o600)
    assert load_security(str(file), None).token == "x" * 16


def test_tokens_are_made_for_each_learner_and_read_by_both_ends(programs, tmp_path):
    made, again = (
        programs.run("make_tokens", "--learners=3", f"--output={tmp_path / 'made'}") for _ in range(2)
    )
    assert made.returncode == 0, made.stderr
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    everyone = load_security(str(tmp_path / "made/tokens"), None)
    assert sorted(everyone.tokens) == [0, 1, 2] and everyone.token is None
    for m in range(3):
        own = load_security(str(tmp_path / f"made/learner-{m}"), None)
        assert own.metadata == everyone.of(m).metadata
        assert own.token not in repr(own) + repr(everyone)
    with pytest.raises(ConfigError, match="no token of learner 3"):
        everyone.of(3)
    assert load_security(str(tmp_path / "made/operator"), None).token == everyone.operator


@pytest.mark.parametrize(
    "text",
    [
        "0 short\n",
        f"0 {'x' * 16}\n1 {'x' * 16}\n",
        f"0 {'x' * 16}\noperator {'x' * 16}\n",
    ],
)
def test_a_file_of_tokens_that_is_none_is_refused(tmp_path, text):
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(text.format(x="x" * 16))
    with pytest.raises(ConfigError, match=r"^token_file: .*must hold one line"):
        load_security(str(file), None)
