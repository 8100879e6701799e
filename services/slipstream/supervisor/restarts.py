"""When a dead process may start again: back-off that doubles, a limit within a window, and no fault for ever."""

from __future__ import annotations

from collections import deque

from slipstream.config.sections.services_config import SupervisorSection

_LONGEST_PAUSE = 30.0
SAME_FAULTS = 3  # in a row, each soon after a start: a fourth start would end like them


class RestartBudget:
    """Counts one process's restarts. Times are seconds of any steady clock."""

    def __init__(self, config: SupervisorSection) -> None:
        self._config = config
        self._times: deque[float] = deque()
        self._fault: str | None = None
        self._same = 0

    def hopeless(self, fault: str | None, lived: float) -> bool:
        """Take note of an end; whether the same fault has ended the process so often that starting it is no use.

        Args:
            fault: What it said of its end; None where it could not say anything, as when it was killed.
            lived: Seconds since its start. An end that came later than the window counts as another.
        """
        again = fault is not None and fault == self._fault and lived <= self._config.window_seconds
        self._same = self._same + 1 if again else 1
        self._fault = fault
        return fault is not None and self._same >= SAME_FAULTS

    def next_pause(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None when the budget of the window is spent."""
        while self._times and now - self._times[0] > self._config.window_seconds:
            self._times.popleft()
        if len(self._times) >= self._config.restarts:
            return None
        pause = self._config.backoff_seconds * 2.0 ** len(self._times)
        self._times.append(now)
        return min(pause, _LONGEST_PAUSE)
