"""A whole stack as a victim: `slipstream up` over a ledger server, with every connection through the proxy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import redis

from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.server import LedgerServer, OwnServer
from slipstream.run.folder import RunFolder

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-sorter.yaml"
SCORER = Path(__file__).with_name("scorer.py")
EPOCHS = 2
_LOOK_SECONDS = 0.1
_SLOW = 0.1  # at most six groups are open (eta 2, two a step), so at most about four steps a second
_DESCRIPTORS = (1024, 2048)  # fewer than the strangers of a flood
_PORT = re.compile(r"(.*:)(\d+)")


class Stack:
    """Two simulated generators, a real tiny learner, user code as the reward.

    Attributes:
        process: The supervisor.
        seen: Every process that was ever seen below a supervisor of this stack.
        poisoned: (ticket, attempt) of groups that were changed in the buffer's file.
        proofs: Folder where a program leaves what it got at.
        ledger_port: Port of the ledger's server on 127.0.0.1, 0 where it has none.
    """

    def __init__(
        self, root: Path, name: str, prompts: int, policy: str, *settings: str, embedded: bool = False
    ) -> None:
        self.folder = RunFolder(root, name)
        self.proxy = Proxy()
        self.server = OwnServer(self.folder) if embedded else LedgerServer(root / f"{name}-redis")
        self.output = root / f"{name}.out"
        self.seen: dict[int, psutil.Process] = {}
        self.poisoned: set[tuple[int, int]] = set()
        self.proofs = root / f"{name}-proofs"
        self.proofs.mkdir()
        self.ledger_port = 0
        self._settings = [
            f"run.root={root}",
            f"run.name={name}",
            *self._redis_url(),
            f"reward.functions={_rewards()}",
            f"data.limit={prompts}",
            f"staleness.policy={policy}",
            *_FIXED,
            *settings,
        ]
        self.process = self._start("up", str(CONFIG), *self._settings)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._interpose, name="interpose", daemon=True)
        self._watcher.start()

    def _redis_url(self) -> list[str]:
        if isinstance(self.server, OwnServer):
            return []
        self.ledger_port = self.proxy.serve("redis", self.server.socket)
        return [f"redis.url=redis://127.0.0.1:{self.ledger_port}"]

    def books(self) -> LedgerServer:
        """The server of a run that has ended; one that ended with its run is started once more."""
        if isinstance(self.server, OwnServer):
            self.server.close()
            self.server = LedgerServer(self.folder.redis)
        return self.server

    @property
    def text(self) -> str:
        """What all processes said."""
        return self.output.read_text(errors="replace")

    def lines(self) -> int:
        """Steps told so far, those that were lost and made again included."""
        steps = self.folder.steps
        return steps.read_bytes().count(b"\n") if steps.exists() else 0

    def resume(self) -> None:
        """Start a supervisor anew, on the run's folder."""
        self.process = self._start("resume", str(self.folder.path))

    def finished(self) -> bool:
        """Whether the ledger says that the run is over."""
        with contextlib.suppress(redis.RedisError):
            return self.server.client.hget(f"slipstream:{{{self.folder.name}}}:run", "status") == b"finished"
        return False

    def hurry(self) -> None:
        """From now on the generators are fast, so that a run that lasted long enough ends soon."""
        text = self.folder.config.read_text()
        self.folder.config.write_text(text.replace(f"step_seconds: {_SLOW}", "step_seconds: 0.001"))
        for name in ("rollout-0", "rollout-1"):
            if (process := self.victim(name)) is not None:
                process.kill()

    def look(self) -> list[psutil.Process]:
        """Every process below the supervisor, now."""
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self.seen |= {process.pid: process for process in found}
            return found
        return []

    def victim(self, role: str) -> psutil.Process | None:
        """The live process of a role; None while there is none."""
        with contextlib.suppress(psutil.Error):
            if role in ("redis", "supervisor"):
                owner = self.server if role == "redis" and isinstance(self.server, LedgerServer) else self
                process = psutil.Process(owner.process.pid)
                return process if _alive(process) else None
            for process in self.look():
                with contextlib.suppress(psutil.Error):
                    if _is(process, role) and _alive(process):
                        return process
        return None

    def left(self) -> list[str]:
        """Processes that still live."""
        with contextlib.suppress(psutil.Error):
            return [f"{each.pid} {each.name()}" for each in self.seen.values() if _alive(each)]
        return self.left()

    def close(self) -> None:
        """Kill whatever is left; only what this stack started."""
        self._ended.set()
        self._watcher.join(5)
        self.look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in self.seen.values():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
                process.wait(5)
        self.server.close()
        self.proxy.close()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.cli.main", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, _DESCRIPTORS)
        return process

    def _interpose(self) -> None:
        """Put the proxy in front of each new member's socket, by changing its address in the ledger."""
        known: dict[str, bytes] = {}
        prefix = f"slipstream:{{{self.folder.name}}}:"
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()
            try:
                client = self.server.client
                for raw in client.zrange(f"{prefix}alive", 0, -1):
                    member = raw.decode()
                    endpoint = client.hget(f"{prefix}m:{member}", "endpoint") or b""
                    match = _PORT.fullmatch(endpoint.decode())
                    if match and int(match[2]) < 65536 and endpoint != known.get(member):
                        ours = f"{match[1]}{self.proxy.serve(member, int(match[2]))}".encode()
                        if client.hset(f"{prefix}m:{member}", "endpoint", ours) == 0:
                            known[member] = ours
            except redis.RedisError:
                continue  # killed, stopped or starting: the next look finds it


def _rewards() -> str:
    """A program has 4 s, and one that takes longer has failed."""
    program = {"timeout_seconds": 4, "memory_mb": 256, "on_timeout": "zero"}
    return json.dumps([{"use": f"{SCORER}:parity"}, {"use": f"{SCORER}:code", **program}])


_FIXED = [
    "run.steps=null",
    f"run.epochs={EPOCHS}",
    "batch.groups=2",
    "batch.group_size=4",
    "data.holdout=8",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "learner.checkpoint.every=3",
    "rollout.replicas=2",
    "rollout.engine.kind=simulated",
    "rollout.engine.max_sequences=16",
    "rollout.engine.options.vocab_size=16",
    f"rollout.engine.options.step_seconds={_SLOW}",
    "rollout.engine.options.mean_length=6",
    "rollout.attempts=30",  # a kill of its owner counts as an attempt, and there are many
    "supervisor.restarts=100",
    "supervisor.window_seconds=2",
    "supervisor.backoff_seconds=0.1",
    "telemetry.log_format=human",
]


def _is(process: psutil.Process, role: str) -> bool:
    words = process.cmdline()
    if role == "valkey":
        return any("valkey-server" in word for word in words[:1])
    if role == "scorer":
        return "slipstream.rewards.workers.scoring_worker" in words
    return words[-2:] == ["--name", role]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
