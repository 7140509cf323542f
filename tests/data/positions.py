"""Where a stream of batches is, as a snapshot keeps it."""

import json

from tests.workbench import assert_equal


def assert_goes_on(original, restored, steps):
    """From its state after so many steps, another stream gives the very batches that follow."""
    state = json.loads(json.dumps(original.get_state()))
    expected = [next(original) for _ in range(5)]
    next(restored)
    restored.set_state(state)
    assert (restored.batches, restored.get_state()) == (steps, state)
    for batch in expected:
        assert_equal(next(restored), batch)
    assert restored.get_state() == original.get_state()
    original.close()
    restored.close()
