"""All that reads bytes that another wrote, under bytes that nobody would write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.storage import array_file
from tests.fuzz import rpcs, seeds, targets


@pytest.fixture(autouse=True, scope="module")
def servers_end():
    yield
    if rpcs.rpcs.cache_info().currsize:
        rpcs.rpcs().end()
        rpcs.rpcs.cache_clear()


@pytest.mark.parametrize("name", targets.TARGETS)
def test_sound_bytes_and_no_bytes_do_no_harm(name):
    for data in (b"", *seeds.of(name)):
        targets.feed(name, data)


@st.composite
def mangled(draw, name):
    """Sound bytes with some of them cut out, doubled or replaced."""
    data = bytearray(draw(st.sampled_from(seeds.of(name))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_no_bytes_whatever_raise_what_is_not_expected(name):
    @given(mangled(name) | st.binary(max_size=100))
    def check(data):
        targets.feed(name, data)

    check()


@pytest.mark.parametrize(
    "arrays",
    [[["<f4", [1 << 40]]], [["<f4", [-4]]], [["O", [1]]], 7],
    ids=["long", "negative", "objects", "a number"],
)
def test_a_file_whose_header_asks_for_what_is_not_there_is_damaged(arrays):
    with pytest.raises(ValueError, match="is damaged: its header cannot be read"):
        array_file.parse(targets.checked(seeds.array_body({"arrays": arrays}, bytes(64))), targets.MAGIC)
