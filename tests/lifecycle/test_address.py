"""Peers are told an address at which they can reach this process."""

from __future__ import annotations

import socket

import pytest

from slipstream.lifecycle import address
from slipstream.lifecycle.address import announced_host, family_of, in_url


def test_what_is_given_wins() -> None:
    assert announced_host("0.0.0.0", "rollout-0.rollout") == "rollout-0.rollout"
    assert announced_host("10.0.0.7", "203.0.113.9") == "203.0.113.9"


def test_a_bound_address_is_announced_as_it_is() -> None:
    assert announced_host("127.0.0.1") == "127.0.0.1"
    assert announced_host("10.0.0.7", "") == "10.0.0.7"


@pytest.mark.parametrize(
    ("resolved", "routed", "announced"),
    [
        ("10.1.0.5", "192.168.0.2", "10.1.0.5"),
        ("127.0.1.1", "192.168.0.2", "192.168.0.2"),  # Debian's entry for a host's own name
        ("", "192.168.0.2", "192.168.0.2"),
        ("127.0.1.1", "", "here"),
        ("", "127.0.0.1", "here"),
    ],
)
def test_of_every_address_the_reachable_one(monkeypatch, resolved: str, routed: str, announced: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(address, "_resolved", lambda name, family: resolved)
    monkeypatch.setattr(address, "_routed", lambda family: routed)
    assert announced_host("0.0.0.0") == announced


def test_an_unknown_name_and_a_cut_network_are_no_error(monkeypatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr(address, "_NOWHERE", {socket.AF_INET: ("256.0.0.1", 9)})
    assert announced_host("0.0.0.0") == "no-such-host.invalid"


def test_an_address_of_ipv6_goes_into_a_url_in_brackets_and_another_as_it_is() -> None:
    assert [in_url(host) for host in ("::1", "[::1]", "10.0.0.7", "name")] == [
        "[::1]",
        "[::1]",
        "10.0.0.7",
        "name",
    ]
    assert [family_of(host) for host in ("::", "0.0.0.0", "name")] == [socket.AF_INET6] + [socket.AF_INET] * 2
    assert announced_host("::1") == "::1"
