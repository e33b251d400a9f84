"""Work beside the training: one piece at a time, errors where they are waited for."""

import threading

import pytest

from efcil.engine.aside import Aside


def test_a_piece_waits_for_the_one_before():
    aside, gate, done = Aside(), threading.Event(), []
    aside.start(lambda: (gate.wait(), done.append(1))[1])
    assert done == []
    gate.set()
    aside.start(lambda: done.append(2))
    aside.wait()
    assert done == [1, 2]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_it_raised_is_raised_once_where_it_is_waited_for(error):
    aside = Aside()

    def fail():
        raise error

    aside.start(fail)
    with pytest.raises(type(error)):
        aside.start(lambda: None)
    aside.wait()


def test_waiting_for_nothing():
    Aside().wait()


def test_an_error_can_be_asked_for_without_waiting():
    aside, gate = Aside(), threading.Event()

    def fail():
        gate.wait()
        raise OSError("full")

    aside.start(fail)
    aside.check()
    gate.set()
    aside._thread.join()
    with pytest.raises(OSError, match="full"):
        aside.check()
    aside.check()
