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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from slipstream.cli.looking import open_ledger
from slipstream.cli.picture import View, picture
from slipstream.cli.state import Look, StepsFile, look_at
from slipstream.config.load import load_config
from slipstream.errors import EXIT_OK, LedgerError, UserError

if TYPE_CHECKING:
    from slipstream.ledger.client import Ledger

EVERY_SECONDS = 1.0


def top(options: argparse.Namespace) -> int:
    """Show a run until `q`; with --once print one picture and end."""
    console = Console()
    if not options.once and not (sys.stdin.isatty() and console.is_terminal):
        raise UserError("top needs a terminal", "use `slipstream status`, or --once for a single picture")
    asyncio.run(_top(options.run, console, options.once))
    return EXIT_OK


async def _top(run: str, console: Console, once: bool) -> None:
    async with open_ledger(run) as (folder, ledger):
        config, _ = load_config(folder.config)
        steps = StepsFile(folder.steps)
        look = await look_at(folder, config.run.steps, ledger, steps)
        if once:
            console.print(picture(View(look), console.width))
            return
        watcher = Watcher(ledger)
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not watcher.over:
                watcher.show(look)
                live.update(picture(watcher.view(), console.width), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await watcher.press(await asyncio.wait_for(keys.get(), EVERY_SECONDS))
                try:
                    look = await look_at(folder, config.run.steps, ledger, steps)
                except LedgerError as error:
                    watcher.note = f"the ledger is away: {error}"


class Watcher:
    """Turns looks into views and keys into wishes.

    Attributes:
        over: Whether `q` was pressed.
        note: What the last key did.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._look: Look | None = None
        self._seen: tuple[float, Look] | None = None
        self._rates: Mapping[str, Mapping[str, float]] = {}
        self._ask = ""
        self.over = False
        self.note = ""

    def show(self, look: Look) -> None:
        """Take in a new look."""
        now = time.monotonic()
        if self._seen is None or now - self._seen[0] >= EVERY_SECONDS:
            self._rates = {} if self._seen is None else rates_between(self._seen[1], look, now - self._seen[0])
            self._seen = (now, look)
        self._look = look

    def view(self) -> View:
        """What is to be drawn now."""
        assert self._look is not None
        return View(self._look, self._rates, self.note, self._ask)

    async def press(self, key: str) -> None:
        """Do what a key asks; what cannot be taken back is asked for twice."""
        ask, self._ask = self._ask, ""
        self.note = ""
        try:
            if key in ("q", "\x03"):
                self.over = True
            elif key == "p":
                await self._pause_or_resume()
            elif key == "c":
                await self._ledger.ask("checkpoint")
                self.note = "a checkpoint will be saved with the next step"
            elif key == "d" and not ask:
                self._ask = "press d again to end the run after the step under way; `slipstream resume` goes on"
            elif key == "d":
                await self._ledger.ask("drain")
                self.note = "the run ends after its step; it can be resumed"
        except LedgerError as error:
            self.note = str(error)

    async def _pause_or_resume(self) -> None:
        status = (await self._ledger.state()).status
        if status == "running":
            await self._ledger.pause()
            self.note = "paused: nothing new is admitted, what is under way goes on"
        elif status == "paused":
            await self._ledger.resume()
            self.note = "running again"
        else:
            self.note = "the run has finished"


def rates_between(before: Look, after: Look, seconds: float) -> dict[str, dict[str, float]]:
    """Tokens and groups a second of each process that was there at both looks."""
    known = {(member.id, member.incarnation): member.detail for member in before.members}
    return {
        member.id: {
            what: max(0.0, member.detail.get(what, 0.0) - known[member.id, member.incarnation].get(what, 0.0))
            / seconds
            for what in ("tokens", "groups")
        }
        for member in after.members
        if (member.id, member.incarnation) in known
    }


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
