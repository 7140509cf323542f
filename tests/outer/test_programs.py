"""Programs that threads share."""

import threading

from ddiloco.outer.programs import shared


def test_threads_that_ask_at_once_for_the_same_wait_for_one_that_compiles_it():
    begun, go_on, compiled = threading.Event(), threading.Event(), []

    @shared
    def program(shape):
        compiled.append(shape)
        begun.set()
        assert go_on.wait(60)
        return f"of {shape}"

    answers = []
    threads = [threading.Thread(target=lambda: answers.append(program((2,)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert answers == ["of (2,)"] * 3
    assert compiled == [(2,)]


def test_another_shape_does_not_wait_for_the_one_that_is_compiled():
    begun, go_on = threading.Event(), threading.Event()

    @shared
    def program(shape):
        if shape == (2,):
            begun.set()
            assert go_on.wait(60)
        return shape

    slow = threading.Thread(target=program, args=((2,),))
    slow.start()
    assert begun.wait(60)
    assert program((3,)) == (3,)
    go_on.set()
    slow.join(60)
