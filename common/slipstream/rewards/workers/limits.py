"""What a worker process does to itself: a limit of memory before it loads a scorer, and hiding from programs.

Linux has all of it; elsewhere what is missing is skipped, and the wall-time limit from outside remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

_PR_SET_DUMPABLE = 4


def hide() -> None:
    """Close this process to others of the same user: nobody traces it, reads its memory or takes its descriptors."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space, leave no core file, and offer this process first when the host runs short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
