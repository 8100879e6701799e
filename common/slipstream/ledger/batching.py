"""Calls that go together: what is asked while one call is on its way travels in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slipstream.errors import LedgerError

Send = Callable[[Sequence[Sequence[Any]]], Awaitable[Sequence[Exception | Any]]]
MOST_AT_ONCE = 256  # bounds the time for which one call holds the server


class CallBatch:
    """Many small calls as few large ones, each with an answer of its own.

    Args:
        send: Sends several at once; what each answers or would have raised, in their order.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[tuple[Sequence[Any], asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, *args: Any) -> Any:
        """One call's answer; raises what it met. Cancelled, it may still be carried out."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((args, done))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="batch")
        return await done

    async def close(self) -> None:
        """Give up what waits; whoever waits for it is cancelled."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send_all(self) -> None:
        batch: list[tuple[Sequence[Any], asyncio.Future[Any]]] = []
        cause: Exception | None = None
        try:
            await asyncio.sleep(0)  # what else this turn of the loop asks for comes along
            while self._waiting:
                batch, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
                try:
                    answers: Sequence[Any] = await self._send([args for args, _ in batch])
                    if len(answers) != len(batch):
                        raise LedgerError(f"the ledger gave {len(answers)} answers to {len(batch)} calls")
                except Exception as error:  # noqa: BLE001  (raised where each call waits)
                    answers = [error] * len(batch)
                for (_, done), answer in zip(batch, answers, strict=True):
                    if done.done():
                        continue
                    if isinstance(answer, Exception):
                        done.set_exception(answer)
                    else:
                        done.set_result(answer)
        except Exception as error:  # noqa: BLE001  (nobody waits for this task: raised where each call waits)
            cause = error
        finally:
            self._sending = None
            for _, done in [*batch, *self._waiting]:
                if cause is None or done.done():
                    done.cancel()
                else:
                    done.set_exception(cause)
            self._waiting = []
