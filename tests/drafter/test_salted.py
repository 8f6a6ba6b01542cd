from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from drafter.salted import kept_for, salted_cache


def test_a_result_is_kept_for_its_own_salt_alone() -> None:
    made: list[int] = []

    @salted_cache(4)
    def twice(number: int) -> int:
        """Return twice a number."""
        made.append(number)
        return 2 * number

    def asked(salt: str, number: int) -> int:
        with kept_for(salt):
            return twice(number)

    for salt, number, work in (("a", 1, 1), ("a", 1, 1), ("b", 1, 2), ("a", 2, 3), ("b", 1, 3)):
        assert (asked(salt, number), len(made)) == (2 * number, work)
    with kept_for("a"), ThreadPoolExecutor(1) as another:
        assert another.submit(asked, "b", 1).result() == twice(1) == 2
    assert (twice(1), len(made), twice.__doc__) == (2, 4, "Return twice a number.")
