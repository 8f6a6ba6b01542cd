""""""

from __future__ import annotations

import pytest

from pipeline.serving.connections import names_loopback


@pytest.mark.parametrize(
    ("hosts", "good"),
    [
        (["localhost"], True),
        (["LOCALHOST:8000"], True),
        (["127.0.0.1:1"], True),
        (["127.4.5.6"], True),
        (["[::1]"], True),
        (["[::1]:8000"], True),
        ([], False),
        ([""], False),
        (["evil.example"], False),
        (["evil.example:8000"], False),
        (["localhost.evil.example"], False),
        (["127.0.0.1.evil.example"], False),
        (["localhost:8000:8000"], False),
        (["localhost:x"], False),
        (["::1"], False),
        (["[::2]"], False),
        (["10.0.0.7"], False),
        (["localhost", "evil.example"], False),
    ],
)
def test_which_hosts_are_this_machine(hosts: list[str], good: bool) -> None:
    assert names_loopback(hosts) == good
