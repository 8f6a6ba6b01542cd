from __future__ import annotations

from drafter.budget.adaptive import Pause


def test_a_pause_is_longer_after_each_failure_up_to_four_times() -> None:
    pause, lengths = Pause(), []
    for _ in range(4):
        pause.begin(10, 1000)
        lengths.append(pause.left)
    assert lengths == [10, 20, 40, 40]
    pause.begin(10, 25)
    assert pause.left == 25


def test_a_pause_ends_step_by_step_and_stays_over() -> None:
    pause = Pause()
    pause.begin(2, 1000)
    left = []
    for _ in range(3):
        pause.step()
        left.append(pause.left)
    assert left == [1, 0, 0]


def test_what_is_forgotten_begins_anew() -> None:
    pause = Pause()
    pause.begin(10, 1000)
    pause.forget()
    assert pause.left == 0
    pause.begin(10, 1000)
    assert pause.left == 10
