"""The supervisor: starts every role, restarts what dies, and ends all with one exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.errors import EXIT_FAULT, EXIT_HALTED, EXIT_OK, EXIT_USER, LedgerError, UserError
from slipstream.ledger.client import Ledger
from slipstream.ledger.counts import Counts
from slipstream.ledger.server import embedded_server
from slipstream.lifecycle.life import Life
from slipstream.run.folder import RunFolder
from slipstream.secrets import redis_password
from slipstream.supervisor.child import Child, Echo, ProcessSpec, to_stderr
from slipstream.supervisor.data_lock import data_lock
from slipstream.supervisor.embedded import EmbeddedSocket
from slipstream.supervisor.process_plan import fetch_spec, role_specs
from slipstream.supervisor.restarts import SAME_FAULTS, RestartBudget
from slipstream.transport.zeromq import keys
from slipstream.weights.host import segments

log = logging.getLogger("slipstream.supervisor")
_FINAL_CODES = (EXIT_USER, EXIT_HALTED)
_LEDGER_SECONDS = 5.0
_STAMP = re.compile(r"^(\d\d:\d\d:\d\d \S+ +([A-Z]+: )?|slipstream: )")


class Supervisor:
    """Runs one stack. `run` returns the run's exit code; everything started is gone by then.

    Attributes:
        cause: Why the run ended early, in the words of the process that ended it; empty otherwise.
        finished: Whether the ledger calls the run finished, by its steps or by the end of its data.
        counts: What the ledger said of all groups at the end; None when it could not be asked.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self.cause = ""
        self.finished = False
        self.counts: Counts | None = None
        self._url = config.redis.url or ""
        self._children: dict[str, Child] = {}
        self._outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._held = AsyncExitStack()

    async def run(self, life: Life) -> int:
        """Start, watch and end the stack.

        Raises:
            UserError: The server of redis.url cannot be used.
            SlipstreamError: The embedded server does not start.
        """
        life.drains()
        socket = EmbeddedSocket() if self._config.redis.url is None else None
        try:
            code = await self._fetch_model(life)
            if code is not None:
                return code
            code = await self._unless_over(life, self._start_valkey(socket) if socket else self._check_server())
            if code is not None:
                return code
            self._make_keys()
            specs = self._role_specs()
            log.info("starting %s; each says when it is ready", ", ".join(spec.name for spec in specs))
            for spec in specs:
                await self._start(spec)
            return await self._watch_until_over(life)
        finally:
            await self._stop_all()
            await self._held.aclose()
            if socket is not None:
                socket.remove()
            segments.sweep(segments.SHM)

    async def _unless_over(self, life: Life, work: Coroutine[None, None, None]) -> int | None:
        """Do what comes before the roles; an exit code where a stop, or the final end of a child, comes first."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(life.wait_for_stop())
        try:
            await asyncio.wait({task, stop, self._outcome}, return_when=asyncio.FIRST_COMPLETED)
            if self._outcome.done():
                return self._outcome.result()
            return task.result() if task.done() else EXIT_OK
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _make_keys(self) -> None:
        """The key that the run's processes know each other by; a run that goes on keeps its own.

        Raises:
            UserError: The key that is there cannot be used.
        """
        folder = self._config.network.keys
        if folder is None and not (self._folder.keys / keys.FILE).exists():
            keys.make(self._folder.keys)
        keys.keys_of(folder or str(self._folder.keys))

    def _role_specs(self) -> list[ProcessSpec]:
        config, folder = self._config, self._folder
        return role_specs(config, folder.config, self._url, _log_format(config), folder.keys)

    async def _fetch_model(self, life: Life) -> int | None:
        """Bring the model into the cache, where every role then finds it; an exit code if it ends here."""
        log.info("looking for the model %s in the cache, else fetching it", self._config.model.source)
        spec = fetch_spec(self._config)
        child = self._children["fetch"] = await Child.start(spec, self._log_file("fetch"), _told_by_us)
        stop = asyncio.create_task(life.wait_for_stop())
        ended = asyncio.create_task(child.wait())
        await asyncio.wait({stop, ended}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not ended.done():
            return EXIT_OK
        del self._children["fetch"]
        if ended.result() == EXIT_OK:
            return None
        self.cause = f"fetch: {_said(child)}"
        return EXIT_USER if ended.result() == EXIT_USER else EXIT_FAULT

    async def _check_server(self) -> None:
        """Look at the given server once, so that a mistake shows before six processes tell of it."""
        try:
            await (await self._connect()).close()
        except UserError:
            raise
        except LedgerError as error:
            raise UserError(str(error), "start the server, or correct redis.url") from None

    async def _connect(self) -> Ledger:
        password = redis_password()
        return await Ledger.connect(self._url, self._folder.name, password=password, deadline=_LEDGER_SECONDS)

    async def _start_valkey(self, socket: EmbeddedSocket) -> None:
        server = embedded_server(self._folder.redis, socket=socket.path)
        lock = await self._held.enter_async_context(data_lock(self._folder.redis))
        await self._start(ProcessSpec("valkey", server.command, foreign=True, keep=(lock,)), echo=None)
        await socket.ready()
        self._folder.announce(socket.url)
        self._url = socket.url

    async def _start(self, spec: ProcessSpec, echo: Echo | None = to_stderr) -> None:
        self._children[spec.name] = await Child.start(spec, self._log_file(spec.name), echo)
        self._watchers[spec.name] = asyncio.create_task(self._keep_alive(spec, echo), name=f"keep:{spec.name}")

    async def _keep_alive(self, spec: ProcessSpec, echo: Echo | None) -> None:
        """Restart one process for as long as its budget lasts; its final end decides the run's outcome."""
        budget, began = RestartBudget(self._config.supervisor), True
        while True:
            child, started = self._children[spec.name], time.monotonic()
            code = await child.wait()
            if spec.name == "learner" and code == EXIT_OK and await self._run_finished():
                self.finished = True
                return self._decide(EXIT_OK)
            if code in _FINAL_CODES and not spec.foreign:
                return self._decide(code, f"{spec.name}: {_said(child)}")
            now = time.monotonic()
            if (
                budget.hopeless(_said(child) if code > 0 and began else None, now - started)
                and not spec.foreign
            ):
                return self._decide(
                    EXIT_FAULT,
                    f"{spec.name} ended {SAME_FAULTS} times in a row with the same fault: {_said(child)}",
                )
            pause = budget.next_pause(now)
            if pause is None:
                return self._decide(EXIT_FAULT, f"{spec.name} ended ({_how(code)}) too often: {_said(child)}")
            log.warning("%s ended (%s): starting it again in %.1f s", spec.name, _how(code), pause)
            await asyncio.sleep(pause)
            try:
                self._children[spec.name] = await Child.start(spec, self._log_file(spec.name), echo)
                began = True
            except OSError as error:  # the host is out of processes or descriptors: as if it had died again
                log.warning("%s cannot be started: %s", spec.name, error)
                began = False

    async def _run_finished(self) -> bool:
        """Whether the learner ended because the run has: it also ends with 0 when somebody asked it to."""
        try:
            async with await self._connect() as ledger:
                return (await ledger.state()).status == "finished"
        except LedgerError as error:
            log.warning("cannot tell whether the run has finished: %s", error)
            return False

    def _decide(self, code: int, cause: str = "") -> None:
        if not self._outcome.done():
            self.cause = cause
            self._outcome.set_result(code)

    async def _watch_until_over(self, life: Life) -> int:
        stop = asyncio.create_task(life.wait_for_stop())
        await asyncio.wait({stop, self._outcome, *self._watchers.values()}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for watcher in self._watchers.values():
            if watcher.done():
                watcher.result()  # a fault of the supervisor's own is never swallowed
        return self._outcome.result() if self._outcome.done() else EXIT_OK

    async def _stop_all(self) -> None:
        """The ledger last, and started again until then: each role can still say goodbye to it."""
        keeps_valkey = self._watchers.pop("valkey", None)
        await _cancelled(*self._watchers.values())
        drain, more = self._config.supervisor.drain_seconds, self._config.learner.checkpoint.stop_seconds
        roles = {name: child for name, child in self._children.items() if name != "valkey"}
        times = {name: drain + more if name == "learner" else drain for name in roles}
        await asyncio.gather(*(child.stop(times[name]) for name, child in roles.items()))
        if self._watchers:  # else no role was started
            with contextlib.suppress(LedgerError):
                async with await self._connect() as ledger:
                    self.counts = await ledger.counts()
        if keeps_valkey is not None:
            await _cancelled(keeps_valkey)
            await self._children["valkey"].stop(drain)

    def _log_file(self, name: str) -> Path:
        return self._folder.logs / f"{name}.log"


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_format(config: Config) -> str:
    """Children write to a pipe, so whether a person reads along is decided here."""
    if config.telemetry.log_format != "auto":
        return config.telemetry.log_format
    return "human" if sys.stderr.isatty() else "json"


def _told_by_us(line: bytes) -> None:
    """A line of a helper that has no log of its own, in the run's format."""
    log.info("%s", line.decode(errors="replace").strip())


def _said(child: Child) -> str:
    """The last line of a process, which tells why it ended, without what stands in front of each line."""
    try:
        line = json.loads(child.last_line)
    except ValueError:
        return _STAMP.sub("", child.last_line) or "without a word"
    return str(line.get("message", child.last_line)) if isinstance(line, dict) else child.last_line


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
