"""The one file that touches UCXX: its synchronous core layer, in event mode, on one thread.

Pinned to ucxx-cu12 0.52.0, since these classes are not its public interface. UCX has no deadlines of its own and
does not notice a peer that is stopped; whoever uses this brings both. A forked child cannot use UCX at all.
"""

from __future__ import annotations

import os
import time
from typing import Any

from slipstream.errors import SlipstreamError, TransportTimeout, UserError, install
from slipstream.weights.base import Bytes

VERSION = "0.52"
# segments of 256 KiB instead of 8 and 64: a quarter less CPU per byte over TCP
CONFIG = {"TCP_TX_SEG_SIZE": "256K", "TCP_RX_SEG_SIZE": "256K", "WARN_UNUSED_ENV_VARS": "n"}


class UcxCore:
    """A context and a worker; made and used by one thread.

    Raises:
        UserError: UCXX is not installed, or another version than this was written for.
    """

    def __init__(self) -> None:
        self._api, self._array = _load()
        self._pid = os.getpid()
        features = (self._api.Feature.TAG, self._api.Feature.WAKEUP)
        self._context = self._api.UCXContext({**CONFIG}, feature_flags=features)
        self._worker = self._api.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self.fd = int(self._worker.epoll_file_descriptor)
        self.address: bytes = self._worker.address.tobytes()

    def connect(self, address: bytes) -> Any:
        """An endpoint to a worker elsewhere; raises `TransportTimeout` when it cannot be reached."""
        self._check()
        try:
            there = self._api.UCXAddress.create_from_buffer(address)
            return self._worker.create_endpoint_from_worker_address(there, endpoint_error_handling=True)
        except (self._api.UCXError, ValueError, IndexError, RuntimeError) as error:
            raise TransportTimeout(f"ucx: no way to the receiver: {error}") from error

    def send(self, endpoint: Any, data: Bytes, tag: int) -> Any:
        """Begin to send; `data` must stay as it is until the request is `completed`.

        Raises:
            TransportTimeout: The endpoint takes nothing more.
        """
        try:
            return endpoint.tag_send(self._array(data), self._api.UCXXTag(tag))
        except (self._api.UCXError, ValueError, OverflowError, RuntimeError) as error:
            raise TransportTimeout(f"ucx: cannot send to the receiver: {error}") from error

    def receive(self, data: Bytes, tag: int) -> Any:
        """Begin to receive into `data`; it is UCX's until the request is `completed`."""
        return self._worker.tag_recv(self._array(data), self._api.UCXXTag(tag))

    def failed(self, request: Any) -> str:
        """What went wrong with a completed request; empty if nothing did."""
        try:
            request.check_error()
        except self._api.UCXError as error:
            return str(error) or type(error).__name__
        return ""

    def progress(self) -> bool:
        """Move what can be moved; True when the thread may sleep until `fd` is readable."""
        self._check()
        while self._worker.progress_once():
            pass
        return bool(self._worker.arm())

    def cancel(self, requests: list[Any], seconds: float) -> bool:
        """Give requests up and wait until UCX has let go of their buffers; says whether it has."""
        end = time.monotonic() + seconds
        while not all(request.completed for request in requests):
            if time.monotonic() > end:
                return False
            self._worker.cancel_inflight_requests()
            self._worker.progress()
            time.sleep(0.001)
        return True

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise SlipstreamError("ucx: used in a forked child, where it hangs; start processes by spawn")


def _load() -> tuple[Any, Any]:
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise UserError(
            f"weights.transport ucx needs UCXX, which cannot be imported here ({error})",
            f"{install('ucx')} on every host of the run, or use tcp",
        ) from None
    if not ucxx.__version__.startswith(VERSION):
        raise UserError(
            f"weights.transport ucx was written for UCXX {VERSION}, and {ucxx.__version__} is installed",
            install("ucx"),
        )
    return libucxx, Array
