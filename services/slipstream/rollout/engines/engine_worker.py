"""The thread on which an engine decodes, and the commands it takes between steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError, WeightsError
from slipstream.rollout.engines.batch_rows import DecodedRow
from slipstream.rollout.engines.chunk_stream import GroupStream
from slipstream.rollout.engines.cpu.decode import DecodeLoop, Deliveries

Answer = Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Submit:
    """Sample these rows."""

    rows: Sequence[DecodedRow]


@dataclass(frozen=True, slots=True)
class Abort:
    """End a stream."""

    stream: GroupStream


@dataclass(frozen=True, slots=True)
class Swap:
    """Serve other weights; `answer` is called on the event loop with None or the error."""

    version: int
    tensors: Mapping[str, Tensor]
    answer: Answer


@dataclass(frozen=True, slots=True)
class Wake:
    """Look whether to close."""


Command = Submit | Abort | Swap | Wake


class Worker:
    """Owns the decode loop: everything that touches the model happens on its thread.

    Args:
        make: Makes the decode loop, on the thread.
        threads: Threads that torch may use for one operation.
        queue_limit: Most commands that may wait.
        deliver: Called on the event loop with the chunks of each step.
        ended: Called on the event loop once the thread ends, with its error if it died.
    """

    def __init__(
        self,
        make: Callable[[], DecodeLoop],
        threads: int,
        queue_limit: int,
        deliver: Callable[[Deliveries], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._make, self._threads = make, threads
        self._deliver, self._ended = deliver, ended
        self._commands: queue.Queue[Command] = queue.Queue(queue_limit)
        self._closing = threading.Event()
        self._events = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="slipstream-decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hand over a command.

        Raises:
            SlipstreamError: Too many wait already.
        """
        try:
            self._commands.put_nowait(command)
        except queue.Full as error:
            raise SlipstreamError(
                f"engine: over {self._commands.maxsize} commands wait for the decoder"
            ) from error

    async def close(self, seconds: float) -> None:
        """Abort every row and end the thread.

        Raises:
            SlipstreamError: It did not end within `seconds`.
        """
        self._closing.set()
        if not self._commands.full():  # a thread with commands to take does not sleep
            self._commands.put_nowait(Wake())
        await asyncio.to_thread(self._thread.join, seconds)
        if self._thread.is_alive():
            raise SlipstreamError(f"engine: its thread did not end within {seconds:.0f} s")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                self._decode(self._make())
        except Exception as caught:  # noqa: BLE001 - the thread's outer edge: whatever it was reaches the readers
            error = caught
        self._post(self._ended, error)

    def _decode(self, loop: DecodeLoop) -> None:
        while not self._closing.is_set():
            for command in self._take_commands(wait=loop.idle):
                self._apply(loop, command)
            if ready := loop.step():
                self._post(self._deliver, ready)
        self._post(self._deliver, loop.abort(None))
        loop.decoder.unload()

    def _take_commands(self, wait: bool) -> list[Command]:
        taken = [self._commands.get()] if wait else []
        while not self._commands.empty():
            taken.append(self._commands.get_nowait())
        return taken

    def _apply(self, loop: DecodeLoop, command: Command) -> None:
        if isinstance(command, Submit):
            loop.submit(command.rows)
        elif isinstance(command, Abort):
            self._post(self._deliver, loop.abort(command.stream))
        elif isinstance(command, Swap):
            self._swap(loop, command)

    def _swap(self, loop: DecodeLoop, command: Swap) -> None:
        try:
            loop.swap(command.version, command.tensors)
        except WeightsError as error:  # said anew: the traceback's frames would keep the tensors in use
            self._post(command.answer, WeightsError(str(error)))
        else:
            self._post(command.answer, None)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._events.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the event loop is closed: no one is left to tell
            return
