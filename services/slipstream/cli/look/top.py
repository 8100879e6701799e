"""`top`: a live view of a run in the terminal, and a few keys that ask things of it through the ledger."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from slipstream.cli.look.find_run import open_ledger
from slipstream.cli.look.picture import View, picture
from slipstream.cli.look.run_state import Look, StepsFile, look_at, without_ledger
from slipstream.config.load import load_recorded
from slipstream.errors import EXIT_OK, LedgerError, UserError

if TYPE_CHECKING:
    from slipstream.ledger.client import Ledger

EVERY_SECONDS = 1.0
DRAW_SECONDS = 0.5
ANSWER_SECONDS = 3.0
OPEN_SECONDS = 120.0


def top(options: argparse.Namespace) -> int:
    """Show a run until `q`; with --once print one picture and end."""
    console = Console()
    if not options.once and not (sys.stdin.isatty() and console.is_terminal):
        raise UserError("top needs a terminal", "use `slipstream status`, or --once for a single picture")
    asyncio.run(_top(options.run, console, options.once))
    return EXIT_OK


async def _top(run: str, console: Console, once: bool) -> None:
    async with open_ledger(run) as (folder, ledger):
        config, _ = load_recorded(folder.config)
        steps = StepsFile(folder.steps)

        async def look() -> Look:
            return await look_at(folder, config.run.steps, ledger, steps)

        if not once:  # one who starts a run and looks at it is here before its learner
            with console.status("waiting for the learner to open the run"):
                await ledger.state(wait_s=OPEN_SECONDS)
        embedded = config.redis.url is None

        def alone(look: Look) -> Look:
            return without_ledger(look, folder) if embedded and not folder.in_use else look

        watcher = Watcher(ledger, await look(), alone)
        if once:
            console.print(picture(watcher.view(), console.width))
            return
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            following = asyncio.create_task(watcher.follow(look), name="looks")
            try:
                while not watcher.over and not following.done():
                    live.update(picture(watcher.view(), console.width), refresh=True)
                    with contextlib.suppress(TimeoutError):
                        await watcher.press(await asyncio.wait_for(keys.get(), DRAW_SECONDS))
            finally:
                following.cancel()
                await asyncio.wait([following])
        if not following.cancelled():
            following.result()


class Watcher:
    """Turns looks into views and keys into wishes.

    Args:
        ledger: The run's.
        look: The first.
        alone: What the last look becomes when the ledger does not answer: the run may have ended.

    Attributes:
        over: Whether `q` was pressed.
        note: What the last key did.
    """

    def __init__(self, ledger: Ledger, look: Look, alone: Callable[[Look], Look] = lambda look: look) -> None:
        self._ledger = ledger
        self._look = look
        self._alone = alone
        self._rates: dict[str, dict[str, float]] = {}
        self._ask = ""
        self._away = ""
        self.over = False
        self.note = ""

    async def follow(self, look: Callable[[], Awaitable[Look]]) -> None:
        """Look again and again; keys are heard meanwhile, also while the ledger does not answer."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            try:
                self.show(await look())
            except LedgerError as error:
                self._away = f"no answer from the ledger since {time.strftime('%H:%M:%S')}: {error}"
                self._look = self._alone(self._look)

    def show(self, look: Look) -> None:
        """Take in a new look."""
        names = {member.id for member in look.members}
        rates = self._rates | rates_between(self._look, look)
        self._rates = {name: rates[name] for name in names & rates.keys()}
        self._look, self._away = look, ""

    def view(self) -> View:
        """What is to be drawn now."""
        return View(self._look, self._rates, self.note, self._ask, self._away)

    async def press(self, key: str) -> None:
        """Do what a key asks; what cannot be taken back is asked for twice."""
        ask, self._ask = self._ask, ""
        self.note = ""
        if key in ("q", ""):  # or the terminal has gone: an empty key is the end of its input
            self.over = True
        elif key == "d" and not ask:
            self._ask = "press d again to end the run after the step under way; `slipstream resume` goes on"
        elif key in "pcd":
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    self.note = await {"p": self._pause_or_resume, "c": self._save, "d": self._drain}[key]()
            except (LedgerError, TimeoutError) as error:
                self.note = f"not done: {str(error) or 'the ledger does not answer'}"

    async def _save(self) -> str:
        await self._ledger.ask("checkpoint")
        return "a checkpoint will be saved with the next step"

    async def _drain(self) -> str:
        await self._ledger.ask("drain")
        return "the run ends after its step; it can be resumed"

    async def _pause_or_resume(self) -> str:
        status = (await self._ledger.state()).status
        if status == "running":
            await self._ledger.pause()
            return "paused: nothing new is admitted, what is under way goes on"
        if status == "paused":
            await self._ledger.resume()
            return "running again"
        return f"the run has {status}"


def rates_between(before: Look, after: Look) -> dict[str, dict[str, float]]:
    """Tokens and groups a second of each process that has told something new, by its own clock."""
    known = {(member.id, member.incarnation): member.detail for member in before.members}
    rates = {}
    for member in after.members:
        old, new = known.get((member.id, member.incarnation), {}), member.detail
        seconds = new.get("up", 0.0) - old.get("up", 0.0)
        if old and seconds > 0:
            rates[member.id] = {
                what: max(0.0, new.get(what, 0.0) - old.get(what, 0.0)) / seconds
                for what in ("tokens", "groups")
            }
    return rates


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Queue[str]]:
    """Keys as they are pressed; the terminal is given back as it was, however this ends."""
    queue: asyncio.Queue[str] = asyncio.Queue()
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: queue.put_nowait(os.read(descriptor, 1).decode("latin-1")))
    try:
        yield queue
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
