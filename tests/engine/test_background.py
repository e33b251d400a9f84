"""Work beside the training: one piece at a time, errors where they are waited for."""

import threading

import pytest

from efcil.engine.background import Background


def test_a_piece_waits_for_the_one_before():
    background, gate, done = Background(), threading.Event(), []
    background.start(lambda: (gate.wait(), done.append(1))[1])
    assert done == []
    gate.set()
    background.start(lambda: done.append(2))
    background.wait()
    assert done == [1, 2]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_what_it_raised_is_raised_once_where_it_is_waited_for(error):
    background = Background()

    def fail():
        raise error

    background.start(fail)
    with pytest.raises(type(error)):
        background.start(lambda: None)
    background.wait()


def test_waiting_for_nothing():
    Background().wait()


def test_an_error_can_be_asked_for_without_waiting():
    background, gate = Background(), threading.Event()

    def fail():
        gate.wait()
        raise OSError("full")

    background.start(fail)
    background.check()
    gate.set()
    background._thread.join()
    with pytest.raises(OSError, match="full"):
        background.check()
    background.check()
