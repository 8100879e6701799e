"""Who asks whom: a plan for a version's way through the hosts, made by the publisher from live membership.

Up to three hosts all ask the publisher. More form a chain, in which each passes on bucket by bucket what it has, so
that H hosts and B buckets cost (B + H - 1) / B of one transfer; when there are more hosts than buckets, a binomial
tree is shorter. A host is given its whole line of ancestors: when the one in front of it fails, it asks the next,
from the bucket at which it stands, and so the rest re-plans itself without waiting for anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STAR = 3


def parents(hosts: int, buckets: int) -> list[int]:
    """The host that each of `hosts` asks first, -1 for the publisher. A parent's number is below its child's."""
    if hosts <= STAR:
        return [-1] * hosts
    if hosts <= buckets:
        return list(range(-1, hosts - 1))
    # Binomial: the publisher is node 0 and host i node i + 1; a node's parent lacks its highest bit.
    return [node - (1 << node.bit_length() - 1) - 1 for node in range(1, hosts + 1)]


def ancestors(hosts: int, buckets: int) -> list[list[int]]:
    """For each host those in front of it, the nearest first; the publisher, whom all may ask, is left out."""
    found: list[list[int]] = []
    for parent in parents(hosts, buckets):
        found.append([parent, *found[parent]] if parent >= 0 else [])
    return found


def routes(relays: Mapping[str, str], order: Sequence[str], buckets: int) -> dict[str, list[str]]:
    """The endpoints that each host asks before the publisher.

    Args:
        relays: Endpoint by host, of those that can pass weights on.
        order: Hosts in the order in which they are best served, such as those that keep up first.
        buckets: Buckets of a version.
    """
    hosts = [host for host in order if host in relays]
    lines = ancestors(len(hosts), buckets)
    return {
        host: [relays[hosts[index]] for index in line] for host, line in zip(hosts, lines, strict=True) if line
    }
