from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.serving.ingress.keys import ENVIRONMENT, may_ask, read_keys


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# for Ann\nkey-a # old\n\n  key-b\n", encoding="utf-8")
    monkeypatch.setenv(ENVIRONMENT, "key-c, key-d,")
    digests = read_keys(str(file))
    assert len(digests) == 4
    assert not any(b"key" in digest for digest in digests)
    for key in ("key-a", "key-b", "key-c", "key-d"):
        assert may_ask(f"Bearer {key}", digests)


@pytest.mark.parametrize(
    "header", [None, "", "key", "Bearer", "Bearer ", "Bearer kez", "Bearer key2", "Basic key", "Bearer \udcff"]
)
def test_others_may_not_ask(header: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "key")
    assert not may_ask(header, read_keys(None))


def test_without_keys_everybody_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert read_keys(None) == ()
    assert may_ask(None, ())


@pytest.mark.parametrize(("content", "message"), [(b"# none\n", "has no key"), (b"\xff", "it is not text")])
def test_a_file_without_keys_does_not_open_the_server(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_keys(str(file))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_keys(str(tmp_path / "none"))


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "good,bäd-secret")
    with pytest.raises(InputError) as refusal:
        read_keys(None)
    assert "key 2" in str(refusal.value)
    assert "secret" not in str(refusal.value)
