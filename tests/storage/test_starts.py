"""A process that is restarted over and over on one node."""

from ddiloco.storage import starts


def started(path, times):
    return [starts.record_start(path, time) for time in times]


def test_only_many_starts_on_one_node_within_a_while_are_told(tmp_path, monkeypatch):
    path = tmp_path / "starts" / "3.0"
    monkeypatch.setenv("DDILOCO_NODE", "gke-a")
    assert started(path, [0.0, 10.0, 20.0, 30.0]) == [None] * 4
    monkeypatch.setenv("DDILOCO_NODE", "gke-b")  # the same disk, seen from another
    assert started(path, [40.0]) == [None]
    monkeypatch.setenv("DDILOCO_NODE", "gke-a")
    assert started(path, [50.0]) == ["started 5 times in 30 minutes on node gke-a"]
    assert started(path, [50.0 + starts.WITHIN]) == [None], "those before are long ago"


def test_a_clock_that_is_set_back_and_a_damaged_file_count_for_nothing(tmp_path):
    path = tmp_path / "3.0"
    path.write_text("{")
    assert started(path, [1000.0] * 4) == [None] * 4
    assert started(path, [10.0] * 4) == [None] * 4
