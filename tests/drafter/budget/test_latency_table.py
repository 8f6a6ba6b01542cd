from __future__ import annotations

import numpy as np

from drafter.budget.contract import SHADOW_ROWS
from drafter.budget.latency_table import LatencyTable, batch_sizes, measure_latency

_MS = 1e-3


def test_latencies_are_interpolated_between_batches() -> None:
    table = LatencyTable(
        batches=np.array([1.0, 8.0]),
        nodes=(0, 4, 8),
        verify=np.array([[1.0, 1.2, 1.5], [2.0, 5.0, 12.0]]),
        draft=np.array([[[0.0, 0.2, 0.2], [0.0, 0.5, 0.5]], [[0.0, 0.1, 0.1], [0.0, 0.1, 0.1]]]),
    )
    alone = table.at(1)
    assert alone.verify.tolist() == [1.0, 1.2, 1.5]
    assert alone.draft.tolist() == alone.shadow.tolist() == [[0.0, 0.2, 0.2], [0.0, 0.1, 0.1]]
    assert table.at(8).draft[0].tolist() == [0.0, 0.5, 0.5]
    assert 1.2 < table.at(4).verify[1] < 5.0
    assert table.at(8).shadow[0, 1] == table.at(SHADOW_ROWS).draft[0, 1] < 0.5


def test_a_table_follows_a_machine_that_has_changed() -> None:
    """Memory is slower than it was, and the processor faster: 1 and 4 rows of 1 and 4 nodes."""
    draft = np.array([[[0.0, 0.5], [0.0, 0.75]]])
    table = LatencyTable(np.array([1.0, 4.0]), (0, 3), np.array([[1.0, 2.0], [2.0, 8.0]]), draft)
    found = table.changed(1.25, 0.75)
    assert np.allclose(found.verify, [[1.25, 1.5], [1.5, 6.0]])
    assert np.array_equal(found.draft, draft)


def test_batch_sizes_are_powers_of_four_and_the_slots() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 4, 16, 20]


def test_the_least_of_several_measurements_counts_and_more_work_takes_no_less() -> None:
    """Something else runs on the machine from time to time, and once while the least work is timed."""
    calls = 0

    def probe(rows: int, nodes: int) -> tuple[float, float]:
        nonlocal calls
        calls += 1
        disturbed = 5.0 if calls % 3 == 0 else 0.0
        return 0.1 * _MS * nodes + disturbed, _MS * (rows + nodes) + disturbed

    table = measure_latency(probe, (1, 4), (0, 2), depth=2)
    assert np.allclose(table.verify, _MS * np.array([[1, 3], [4, 6]]))
    assert np.allclose(table.draft, 0.1 * _MS * np.array([[[0, 2], [0, 2]]]))


def test_trees_that_cannot_pay_are_not_timed() -> None:
    """A row gets at most five tokens of a step with drafts four deep."""
    asked = []

    def probe(rows: int, nodes: int) -> tuple[float, float]:
        asked.append((rows, nodes))
        return 0.0, _MS * (1 + nodes * (rows > 1))

    table = measure_latency(probe, (1, 8), (0, 3, 7, 15), depth=4)
    assert (1, 15) in asked
    assert (8, 7) in asked  # it costs eight plain steps
    assert (8, 15) not in asked
    assert np.allclose(table.verify, _MS * np.array([[1, 1, 1, 1], [1, 4, 8, 16]]))


def test_long_steps_are_timed_once_where_time_is_up() -> None:
    asked: list[tuple[int, int]] = []

    def probe(rows: int, nodes: int) -> tuple[float, float]:
        asked.append((rows, nodes))
        return 0.0, 0.4 + 0.02 * nodes

    measure_latency(probe, (1, 4), (0, 3), depth=3, seconds=0.0)
    assert asked == [(1, 0), (1, 3), (4, 0), (4, 3)]


def test_every_shape_has_a_latency_though_time_is_up_at_once() -> None:
    """Plain steps are short, and drafting is long from some number of nodes on, in every way that this may fall."""
    for limit in (3, 7, 15):

        def probe(rows: int, nodes: int, limit: int = limit) -> tuple[float, float]:
            return 0.0, 10 * _MS + 0.5 * (nodes >= limit)

        table = measure_latency(probe, (1, 4), (0, 3, 7, 15), depth=8, seconds=0.0)
        assert bool(np.isfinite(table.verify).all())
        assert bool((np.diff(table.verify, axis=1) >= 0).all())
