"""Which address of this process others are told, when it is bound to more than one."""

from __future__ import annotations

import ipaddress
import socket

_EVERY = ("0.0.0.0", "::", "*")
_NOWHERE = ("192.0.2.1", 9)  # TEST-NET-1; a datagram socket is only pointed there, nothing is sent


def announced_host(bound: str, advertise: str | None = None) -> str:
    """The host to announce: `advertise` when given, else what is bound; of 0.0.0.0 this host's own address.

    The address and not the name: a peer that must ask a name server hangs with it when the network is cut.
    """
    if advertise:
        return advertise
    if bound not in _EVERY:
        return bound
    name = socket.gethostname()
    for address in (_resolved(name), _routed()):
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    return name


def _resolved(name: str) -> str:
    """The address that this host's name has: containers and pods write it into /etc/hosts."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _routed() -> str:
    """The address from which a packet would leave this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_NOWHERE)
        except OSError:
            return ""
        return str(probe.getsockname()[0])
