"""Which address of this process others are told, when it is bound to more than one."""

from __future__ import annotations

import ipaddress
import socket

_EVERY = ("0.0.0.0", "::", "*")
# Addresses for documentation; a datagram socket is only pointed there, nothing is sent.
_NOWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}


def is_v6(host: str) -> bool:
    """Whether a host is written as an IPv6 address."""
    return ":" in host


def in_url(host: str) -> str:
    """A host as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if is_v6(host) and not host.startswith("[") else host


def family_of(host: str) -> socket.AddressFamily:
    """The family of a socket that is bound to a host."""
    return socket.AF_INET6 if is_v6(host) else socket.AF_INET


def announced_host(bound: str, advertise: str | None = None) -> str:
    """The host to announce: `advertise` when given, else what is bound; of 0.0.0.0 or :: this host's own address.

    The address and not the name: a peer that must ask a name server hangs with it when the network is cut.
    """
    if advertise:
        return advertise
    if bound not in _EVERY:
        return bound
    name = socket.gethostname()
    family = family_of(bound)
    for address in (_resolved(name, family), _routed(family)):
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    return name


def _resolved(name: str, family: socket.AddressFamily) -> str:
    """The address that this host's name has: containers and pods write it into /etc/hosts."""
    try:
        return str(socket.getaddrinfo(name, None, family)[0][4][0])
    except OSError:
        return ""


def _routed(family: socket.AddressFamily) -> str:
    """The address from which a packet would leave this host."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(_NOWHERE[family])
            return str(probe.getsockname()[0])
    except OSError:
        return ""
