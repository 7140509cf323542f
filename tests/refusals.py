"""What is refused, and how it is told."""

import pytest


def refusal(kind, call, *arguments, **named):
    """What the call says as it raises an error of the kind: a line."""
    with pytest.raises(kind) as raised:
        call(*arguments, **named)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def assert_refused(done, told):
    """A program has ended with exit code 2, and has said nothing but one line, which begins so."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"error: {told}") and done.stderr.count("\n") == 1, done.stderr
