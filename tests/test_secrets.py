"""The password comes from the environment or from a mounted file, and a file that is none is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.config.rules import resolved
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.secrets import free_of_secrets, hand_over, handed_over, hide, redis_password


def test_no_password_is_none() -> None:
    assert redis_password({}) is None
    assert redis_password({"SLIPSTREAM_REDIS_PASSWORD": ""}) is None


def test_it_comes_from_the_environment_first(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("from the file\n")
    named = {"SLIPSTREAM_REDIS_PASSWORD_FILE": str(file)}
    assert redis_password(named) == "from the file"
    assert redis_password({**named, "SLIPSTREAM_REDIS_PASSWORD": "given"}) == "given"


def test_only_the_end_of_the_line_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" with spaces \r\n")
    assert redis_password({"SLIPSTREAM_REDIS_PASSWORD_FILE": str(file)}) == " with spaces "


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b"", "is empty"), (b"\n", "is empty"), (b"\xff", "no UTF-8")]
)
def test_a_file_that_holds_none_is_named(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        redis_password({"SLIPSTREAM_REDIS_PASSWORD_FILE": str(file)})
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert "SLIPSTREAM_REDIS_PASSWORD_FILE" in str(caught.value)


def test_a_role_reads_what_it_was_handed_as_often_as_it_likes_and_others_are_told_nothing() -> None:
    given = {"SLIPSTREAM_REDIS_PASSWORD": "hunter2", "SLIPSTREAM_ENGINE_KEY_FILE": "/run/key", "HOME": "/x"}
    variables, descriptors = hand_over(given)
    try:
        assert "hunter2" not in str(variables)
        assert [redis_password(variables) for _ in range(2)] == ["hunter2", "hunter2"]
        assert variables["SLIPSTREAM_ENGINE_KEY_FILE"] == "/run/key"
        assert handed_over(variables) == descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert free_of_secrets(given) == {"HOME": "/x"}


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        ({"api_key": "abc", "max_tokens": 5}, {"api_key": "(hidden)", "max_tokens": 5}),
        ({"Authorization": "Basic abc"}, {"Authorization": "(hidden)"}),
        ({"headers": [{"x-api-keys": ["a", "b"]}]}, {"headers": [{"x-api-keys": "(hidden)"}]}),
        (
            {"token": "abc", "add_token": True, "password": None},
            {"token": "(hidden)", "add_token": True, "password": None},
        ),
        ("https://me:pw@host:80/a?b=1&sig_token=xyz&c=2", "https://(hidden)@host:80/a?b=1&(hidden)&c=2"),
        ("say hf_abcdefghijklmnop here", "say (hidden) here"),
        ("sk-proj-abcdefghijkl", "(hidden)"),
        ("Bearer abc.def", "Bearer (hidden)"),
        ("prefix s3cr3t-value suffix", "prefix (hidden) suffix"),
        ({"s3cr3t-value": 1}, {"(hidden)": 1}),
        ("file:///a@b, user@host, 7 tokens, /home/me/keys", "file:///a@b, user@host, 7 tokens, /home/me/keys"),
    ],
)
def test_what_leaves_the_machine_holds_no_secret(given: object, hidden: object) -> None:
    assert (
        hide(given, {"JUDGE_KEY": "s3cr3t-value", "SHORT_TOKEN": "to", "KEY_FILE": "/home/me/keys"}) == hidden
    )


def test_the_settings_themselves_are_no_secrets() -> None:
    assert hide(resolved(Config()), {}) == resolved(Config())
