"""When a dead process may start again: back-off that doubles, and a limit within a window."""

from __future__ import annotations

from collections import deque

from slipstream.config.services import SupervisorSection

_LONGEST_PAUSE = 30.0


class RestartBudget:
    """Counts one process's restarts. Times are seconds of any steady clock."""

    def __init__(self, config: SupervisorSection) -> None:
        self._config = config
        self._times: deque[float] = deque()

    def next_pause(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None when the budget of the window is spent."""
        while self._times and now - self._times[0] > self._config.window_seconds:
            self._times.popleft()
        if len(self._times) >= self._config.restarts:
            return None
        pause = self._config.backoff_seconds * 2.0 ** len(self._times)
        self._times.append(now)
        return min(pause, _LONGEST_PAUSE)
