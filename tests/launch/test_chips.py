"""How the TPU chips of a host are divided among its learners."""

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.supervisor import learner_environment, share_of_chips


def test_learners_have_chips_of_their_own():
    given = {"TPU_VISIBLE_CHIPS": "0,1,2,3"}
    shares = [learner_environment(m, 2, given) for m in range(2)]
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0,1", "2,3"]
    assert all(share["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1" for share in shares)
    assert all(share["TPU_PROCESS_BOUNDS"] == "1,1,1" for share in shares)


def test_processes_of_four_chips_do_not_keep_each_other_out():
    shares = [share_of_chips(m, 2, {"TPU_VISIBLE_CHIPS": "0,1,2,3,4,5,6,7"}) for m in range(2)]
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0,1,2,3", "4,5,6,7"]
    # libtpu takes these bounds for all chips of a host, and lets in one process, unless it is told.
    assert all(share["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1" for share in shares)
    assert all(share["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" for share in shares)


def test_a_share_is_of_a_shape_that_the_runtime_knows():
    shares = [share_of_chips(m, 2, {"TPU_VISIBLE_CHIPS": "0,1,2,3,4,5,6"}) for m in range(2)]
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0,1", "2,3"]  # three would be no rectangle


def test_one_learner_has_what_there_is():
    assert share_of_chips(0, 1, {"TPU_VISIBLE_CHIPS": "0,1,2,3"}) == {}
    assert share_of_chips(0, 4, {}) == {}


def test_a_chip_is_not_shared():
    with pytest.raises(ConfigError, match="lists 2 chips for 4 learners"):
        share_of_chips(0, 4, {"TPU_VISIBLE_CHIPS": "0,1"})
