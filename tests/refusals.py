"""What is refused, and how it is told."""

import pytest


def refusal(kind, call, *arguments, **named):
    """What the call says as it raises an error of the kind: a line."""
    with pytest.raises(kind) as raised:
        call(*arguments, **named)
    assert "\n" not in str(raised.value)
    return str(raised.value)
