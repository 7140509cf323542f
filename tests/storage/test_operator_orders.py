"""What outlasts the syncer: an operator's stop, and a failure for good."""

from ddiloco.storage import operator_orders
from ddiloco.storage.operator_orders import StandingOrders


def test_a_failure_is_kept_with_its_reason_beside_who_is_drained(tmp_path):
    assert not operator_orders.has_failed(tmp_path)
    StandingOrders().drain(3).save(tmp_path)
    operator_orders.fail(tmp_path, "nothing is learnt")
    assert operator_orders.has_failed(tmp_path)
    orders = operator_orders.load(tmp_path)
    assert orders == StandingOrders(True, (3,), "nothing is learnt")
    assert orders.over == "has failed: nothing is learnt"


def test_a_timing_adds_to_the_one_before_and_is_kept(tmp_path):
    assert operator_orders.load(tmp_path).timing == {}
    operator_orders.change(tmp_path, lambda orders: orders.set_timing({"interval": 12, "gamma": 0.5}, "a"))
    operator_orders.change(tmp_path, lambda orders: orders.drain(1).set_timing({"interval": 6}, "b"))
    orders = operator_orders.load(tmp_path)
    assert orders == StandingOrders(drained=(1,), timing={"interval": 6, "gamma": 0.5}, reason="b")
    assert operator_orders.shown_timing(orders.timing) == "sync.interval=6, sync.gamma=0.5"


def test_an_operators_stop_is_no_failure(tmp_path):
    StandingOrders(stopped=True).save(tmp_path)
    assert not operator_orders.has_failed(tmp_path)
    assert operator_orders.load(tmp_path).over == "was stopped by its operator"
    (tmp_path / operator_orders.NAME).write_text("{")
    assert not operator_orders.has_failed(tmp_path), "who goes on with the run says that it cannot be read"
