"""`forced`: drafts nothing itself. What a grammar forces is drafted with any drafter; here it is all there is."""

from __future__ import annotations

from drafter.drafters.contract import Loading, PlainDecoding


def forced(loading: Loading) -> PlainDecoding:
    return PlainDecoding(loading.nodes)
