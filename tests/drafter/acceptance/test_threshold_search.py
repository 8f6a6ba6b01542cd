""""""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.operation_counts import OperationCounts
from drafter.acceptance.sampling import INTERVALS, PASSES, least_reaching

LARGEST = 2**63 - 1


def test_thresholds_by_hand() -> None:
    numbers = torch.tensor([[7, 4, 7]]).expand(5, -1)
    wanted = torch.tensor([[1], [2], [3], [4], [LARGEST]])
    assert least_reaching(numbers, torch.ones_like(numbers), wanted).tolist() == [[4], [7], [7], [LARGEST], [LARGEST]]
    weights = torch.tensor([[0, 5, 1]]).expand(5, -1)
    assert least_reaching(numbers, weights, wanted).tolist() == [[4], [4], [4], [4], [LARGEST]]
    for large in (2**62, LARGEST - 2**50, LARGEST - 1, LARGEST):
        numbers, weights = torch.tensor([[0, large, 9]]), torch.tensor([[0, 1, 0]])
        assert least_reaching(numbers, weights, torch.tensor([[1]])).tolist() == [[large]]


@settings(max_examples=100)
@given(st.data())
def test_a_threshold_reaches_and_none_below_it_does(data: st.DataObject) -> None:
    values = st.integers(0, LARGEST) | st.integers(0, 40) | st.sampled_from([2**50 - 1, 2**50, 2**62, 0x7FF0 << 48])
    numbers = data.draw(st.lists(values, min_size=1, max_size=30))
    weights = data.draw(st.lists(st.integers(0, 2**56), min_size=len(numbers), max_size=len(numbers)))
    wanted = data.draw(st.integers(1, max(sum(weights), 1)))
    found = int(least_reaching(torch.tensor([numbers]), torch.tensor([weights]), torch.tensor([[wanted]])))

    def reached(threshold: int) -> int:
        return sum(weight for number, weight in zip(numbers, weights, strict=True) if number <= threshold)

    if sum(weights) < wanted:
        assert found == LARGEST
    else:
        assert found in numbers
        assert reached(found) >= wanted > reached(found - 1)


def test_all_numbers_are_read_a_few_times() -> None:
    numbers = torch.arange(100_000)[None]
    with OperationCounts() as counts, torch.inference_mode():
        least_reaching(numbers, torch.ones(1, 1, dtype=torch.long).expand_as(numbers), torch.tensor([[500]]))
    # Each pass takes from the numbers, shifts, bounds and counts them; then it looks at its intervals.
    assert counts.bytes_read <= PASSES * 4 * numbers.nbytes + 25 * (INTERVALS + 2 * PASSES) + 1000
