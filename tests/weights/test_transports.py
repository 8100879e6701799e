"""What a config opens, and what it refuses with the setting's name."""

from __future__ import annotations

import importlib.util

import pytest

from slipstream.config.sections.services_config import WeightsSection
from slipstream.errors import UserError
from slipstream.weights.transports import open_publisher, open_subscriber, schemes


@pytest.mark.parametrize(
    ("transport", "address", "folder", "found"),
    [
        ("shm", "10.0.0.1", "/x", []),
        ("auto", "127.0.0.1", None, []),
        ("auto", "localhost", None, []),
        ("auto", "::1", "/x", ["file"]),
        ("auto", "10.0.0.1", "/x", ["tcp", "file"]),
        ("auto", "node-3", None, ["tcp"]),
        ("tcp", "127.0.0.1", "/x", ["tcp"]),
        ("file", "10.0.0.1", "/x", ["file"]),
    ],
)
def test_auto_opens_links_only_where_others_can_reach_this_host(transport, address, folder, found):
    settings = WeightsSection(transport=transport, folder=folder)
    usable = [scheme for scheme in schemes(settings, address) if scheme != "ucx"]
    assert usable == found


def test_ucx_comes_before_tcp_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert schemes(WeightsSection(), "10.0.0.1") == ["ucx", "tcp"]


def test_auto_keeps_the_weights_of_a_run_with_a_key_encrypted_unless_it_is_told_otherwise(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert schemes(WeightsSection(), "10.0.0.1", keyed=True) == ["tcp"]
    assert caplog.text.count("weights.allow_unencrypted") == 1
    caplog.clear()
    assert schemes(WeightsSection(allow_unencrypted=True), "10.0.0.1", keyed=True) == ["ucx", "tcp"]
    assert schemes(WeightsSection(transport="ucx"), "10.0.0.1", keyed=True) == ["ucx"]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "file"}, "needs weights.folder"),
        (
            {"transport": "file", "folder": "carrier://pigeon"},
            "weights.folder 'carrier://pigeon' cannot be used",
        ),
        ({"transport": "nccl"}, "weights.transport nccl.*use auto"),
        ({"transport": "ucx"}, r"weights.transport ucx.*pip install 'ucxx-cu12==0.52.0'"),
    ],
)
def test_what_this_host_cannot_do_is_refused_and_leaves_no_files(settings, message, plain_layout, tmp_path):
    wanted = WeightsSection(**settings)
    if wanted.transport == "ucx" and importlib.util.find_spec("ucxx") is not None:
        pytest.skip("UCXX is installed here")
    with pytest.raises(UserError, match=message):
        open_publisher("slipstream-test-refused", 1, plain_layout, wanted)
    if wanted.transport == "nccl":
        with pytest.raises(UserError, match=message):
            open_subscriber(wanted)
