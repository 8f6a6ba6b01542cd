""""""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.serving.config import KeyRule, ServingLearning
from pipeline.serving.keys import ENVIRONMENT, Agreement, Keys, read_agreement, read_keys, settle

RULES: list[KeyRule] = ["auto", "required", "none"]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.mark.parametrize("rule", ["auto", "required"])
def test_keys_come_from_the_file_and_the_environment(
    rule: KeyRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# for Ann\nkey-a # old\n\n  key-b\n", encoding="utf-8")
    monkeypatch.setenv(ENVIRONMENT, "key-c, key-d,")
    keys = read_keys(str(file), rule)
    assert len(keys.clients) == 4
    assert not any(b"key" in digest for digest in keys.clients)
    headers = [f"Bearer {key}" for key in ("key-a", "key-b", "key-c", "key-d")]
    assert all(map(keys.may_ask, headers))
    assert not any(map(keys.may_operate, headers))
    assert len({*map(keys.client, headers)}) == 4
    assert not any("key" in keys.client(header) for header in headers)


def test_the_word_operator_makes_a_key_an_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a\nkey-b  operator # for Prometheus\noperator\n", encoding="utf-8")
    monkeypatch.setenv(ENVIRONMENT, "key-c,key-d operator")
    keys = read_keys(str(file), "required")
    clients = ["key-a", "key-b", "key-c", "key-d", "operator"]
    assert [key for key in clients if keys.may_ask(f"Bearer {key}")] == clients
    assert [key for key in clients if keys.may_operate(f"Bearer {key}")] == ["key-b", "key-d"]
    for header in (None, "Bearer key-b operator", "Basic key-b", "Bearer "):
        assert not keys.may_operate(header)
    agreed = tmp_path / "agreed"
    agreed.write_text("key-b operator\n", encoding="utf-8")
    assert read_agreement(learning(str(agreed)), keys).covers("Bearer key-b")


@pytest.mark.parametrize(
    "header", [None, "", "key", "Bearer", "Bearer ", "Bearer kez", "Bearer key2", "Basic key", "Bearer \udcff"]
)
def test_others_may_not_ask(header: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "key")
    assert not read_keys(None, "required").may_ask(header)


@pytest.mark.parametrize("rule", ["auto", "none"])
def test_everybody_may_ask_where_no_key_is_needed(rule: KeyRule) -> None:
    keys = read_keys(None, rule)
    assert keys == Keys()
    for header in (None, "Bearer none", "Bearer other"):
        assert keys.may_ask(header)
        assert keys.may_operate(header)
        assert keys.client(header) == ""  # all are one


def test_a_key_that_is_needed_must_be_there() -> None:
    with pytest.raises(InputError, match="there is no API key: set DRAFTER_API_KEYS or keys_file, or set keys to none"):
        read_keys(None, "required")


@pytest.mark.parametrize("listed", ["", "  ", ",", " , ,"])
@pytest.mark.parametrize("rule", ["auto", "required"])
def test_a_blank_environment_variable_does_not_open_the_server(
    listed: str, rule: KeyRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("key", encoding="utf-8")
    monkeypatch.setenv(ENVIRONMENT, listed)
    for source in (None, str(file)):
        with pytest.raises(InputError, match="DRAFTER_API_KEYS is set but has no key"):
            read_keys(source, rule)


@pytest.mark.parametrize(("content", "message"), [(b"", "has no key"), (b"# none\n", "has no key"), (b"\xff", "text")])
@pytest.mark.parametrize("rule", ["auto", "required"])
def test_a_file_without_keys_does_not_open_the_server(
    content: bytes, message: str, rule: KeyRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "key")
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_keys(str(file), rule)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_keys(str(tmp_path / "none"), rule)


def test_keys_that_nobody_would_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "key")
    with pytest.raises(InputError, match="keys is none, but DRAFTER_API_KEYS has keys"):
        read_keys(None, "none")


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "good,bäd-secret")
    with pytest.raises(InputError) as refusal:
        read_keys(None, "required")
    assert "key 2" in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("file", [None, "keys.txt"])
@pytest.mark.parametrize("listed", [None, "", "key"])
@pytest.mark.parametrize("loopback", [True, False])
def test_only_who_is_alone_on_the_machine_needs_no_key(
    file: str | None, listed: str | None, loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed is not None:
        monkeypatch.setenv(ENVIRONMENT, listed)
    alone = loopback and file is None and listed is None
    assert settle("auto", file, loopback=loopback) == ("auto" if alone else "required")
    for rule in RULES[1:]:
        assert settle(rule, file, loopback=loopback) == rule


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


KNOWN = Keys((digest("key-a"), digest("key-b")))


def learning(agreed: str) -> ServingLearning:
    return ServingLearning(enabled=True, agreed=agreed, folder="head")


@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer key-a", "Basic key-a"])
def test_without_a_word_nobody_has_agreed(header: str | None) -> None:
    assert not Agreement().covers(header)
    assert not read_agreement(ServingLearning(), KNOWN).covers(header)
    assert not read_agreement(ServingLearning(agreed="all"), KNOWN).covers(header)  # no head learns


@pytest.mark.parametrize("header", [None, "Bearer key-b"])
def test_all_are_all(header: str | None) -> None:
    assert read_agreement(learning("all"), Keys()).covers(header)


def test_those_in_a_file_have_agreed_and_others_have_not(tmp_path: Path) -> None:
    file = tmp_path / "agreed"
    file.write_text("# by contract\nkey-a # Ann\n\n")
    agreement = read_agreement(learning(str(file)), KNOWN)
    assert agreement.covers("Bearer key-a")
    for other in (None, "", "Bearer", "Bearer key-b", "Bearer key-c", "Basic key-a", "key-a"):
        assert not agreement.covers(other), other
    assert "key" not in repr(agreement.digests)


@pytest.mark.parametrize(
    ("text", "known", "message"),
    [
        (None, KNOWN, "agreed cannot be read: No such file or directory"),
        ("# nobody\n", KNOWN, "agreed has no key: write one on a line"),
        ("key-a\nkey-c\n", KNOWN, "agreed: key 2 is none of the endpoint's"),
        ("key-a\n", Keys(), "the endpoint has none, and cannot tell clients apart"),
    ],
)
def test_an_agreement_that_cannot_be_kept_is_refused(
    text: str | None, known: Keys, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "agreed"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_agreement(learning(str(file)), known)
