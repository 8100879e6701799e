"""File descriptors are shared by all that a process does: how many there are, and what strangers may hold of them.

A listener takes no more than its share, so that a worker, a file or a connection to the ledger always finds one left.
"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter

MOST = 65_536
"""No soft limit above this: some programs walk through all descriptors that they could have."""
MOST_SILENT = 512

cut: Counter[str] = Counter()
"""Connections that were closed to make room, by listener: data, weights or pages."""


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard one, at most `MOST`; returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _soft()


def most_peers() -> int:
    """Connections that one listener may hold."""
    return _soft() // 3


def most_silent() -> int:
    """Connections of which a listener has had no message yet."""
    return min(_soft() // 8, MOST_SILENT)


def _soft() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
