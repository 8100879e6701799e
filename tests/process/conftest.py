"""Whole stacks as processes: started, watched, killed; what they leave behind is looked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.weights.host import segments

SHM = Path("/dev/shm")
# Generous deadlines: these tests wait for what must come, and how soon it comes is the machine's business.
PATIENCE = 300.0
GONE = 30.0
CONFIG = Path(__file__).parents[2] / "configs" / "tiny-sorter.yaml"

# small and quick: two groups of four a step, a simulated engine, no evaluation
QUICK = [
    "batch.groups=2",
    "batch.group_size=4",
    "data.limit=400",
    "data.holdout=8",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "learner.checkpoint.every=3",
    "supervisor.backoff_seconds=0.1",
    "telemetry.log_format=human",
]
SIMULATED = [
    "rollout.engine.kind=simulated",
    "rollout.engine.max_sequences=16",
    "rollout.engine.options.vocab_size=16",
    "rollout.engine.options.step_seconds=0.02",
    "rollout.engine.options.mean_length=6",
]


# rewards that differ within every group, from a worker process: a batch without a gradient would be no step
SCORER = """
def letters(prompts, completions, **columns):
    return [sum(place * ord(letter) for place, letter in enumerate(text, 1)) % 97 / 97 for text in completions]
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "slipstream.cli.main", *arguments]


class Stack:
    """One `slipstream up` in a folder of its own."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.folder = root / name
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, psutil.Process] = {}
        self.output = root / f"{name}.out"

    def up(
        self,
        *settings: str,
        config: Path = CONFIG,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Stack:
        """Start the run; `before` is put in front of the command."""
        place = [f"run.root={self.root}", f"run.name={self.name}"]
        return self._start([*before, *command("up", str(config), *place, *settings)], env)

    def resume(self, *settings: str) -> Stack:
        return self._start(command("resume", str(self.folder), *settings), None)

    def role_alone(self, role: str, *settings: str) -> Stack:
        """One role without a supervisor."""
        place = [f"run.root={self.root}", f"run.name={self.name}"]
        return self._start(command("run", role, "--config", str(CONFIG), *place, *settings), None)

    def _start(self, argv: Sequence[str], env: dict[str, str] | None) -> Stack:
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        return self

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def look(self) -> list[psutil.Process]:
        """Every process below the supervisor; all that were ever seen are remembered."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self.seen |= {process.pid: process for process in found}
            return found
        return []

    def role(self, name: str) -> psutil.Process | None:
        """The live process of a role, by its --name, or valkey."""
        for process in self.look():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words and (
                    words[-2:] == ["--name", name] or (name == "valkey" and "valkey-server" in words[0])
                ):
                    return process
        return None

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code; a stack that does not end in time is killed and fails the test with its output."""
        assert self.process is not None
        self.until(lambda: self.process.poll() is not None, seconds, "the end")  # type: ignore[union-attr]
        return int(self.process.returncode)

    def until(
        self, condition: Callable[[], Any], seconds: float = PATIENCE, what: str = "what was expected"
    ) -> Any:
        """Poll until the condition gives something true; returns that."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > end:
                raise AssertionError(f"no {what} within {seconds} s:\n{self.text[-6000:]}")
            self.look()
            time.sleep(0.05)
        return found

    def until_step(self, number: int, seconds: float = PATIENCE) -> None:
        def there() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text[-6000:]}"
            return any(step["step"] >= number for step in self.steps())

        self.until(there, seconds, f"step {number}")

    def left(self) -> list[str]:
        """What is still there of the stack: processes, and files in shared memory."""
        living = [
            f"{process.pid} {process.name()}"
            for process in self.seen.values()
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        return living + [path.name for path in SHM.glob(f"slipstream*{self.name}*")]

    def assert_gone(self) -> None:
        """Nothing of the stack is left, once the system has taken away what it killed."""
        self.until(lambda: not self.left(), GONE, f"end of {self.left()}")

    def end(self) -> None:
        """Kill whatever a failed test left running; only what this stack started."""
        self.look()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.seen.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(5)
        segments.sweep(SHM)

    def audit(self) -> str:
        """Output of `slipstream audit`, which must hold."""
        done = subprocess.run(
            command("audit", str(self.folder)), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def assert_exactly_once(self) -> list[int]:
        """Promise 2: in the line of descent no ticket is trained twice; returns those that were, sorted.

        A step that was made again after a restart replaces the lost one and all after it.
        """
        line: list[dict[str, Any]] = []
        for step in self.steps():
            while line and line[-1]["step"] >= step["step"]:
                line.pop()
            line.append(step)
        assert [step["step"] for step in line] == list(range(1, len(line) + 1))
        versions = [step["version"] for step in line]
        assert versions == sorted(versions)
        counts = Counter(ticket for step in line for ticket, _ in step["tickets"])
        assert [ticket for ticket, count in counts.items() if count > 1] == []
        trained = int(re.search(r"trained (\d+)", self.audit()).group(1))  # type: ignore[union-attr]
        assert trained == len(counts)
        return sorted(counts)


@pytest.fixture(scope="session", autouse=True)
def model_cache() -> None:
    """Put the tiny model into the cache once; the first stack would do it otherwise, and be slower than others."""
    subprocess.run(command("fetch", "tiny-sorter"), check=True, capture_output=True, timeout=300)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Callable[[str], Stack]]:
    made: list[Stack] = []

    def make(name: str = "") -> Stack:
        made.append(Stack(tmp_path, name or f"t{os.getpid()}-{len(made)}"))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def quick() -> list[str]:
    return QUICK


@pytest.fixture
def simulated(tmp_path: Path) -> list[str]:
    """No model in the rollout, but rewards that carry a gradient, so that versions move."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)
    return [*QUICK, *SIMULATED, f"reward.functions.0.use={scorer}:letters"]


@pytest.fixture
def kill() -> Callable[[psutil.Process], None]:
    return lambda process: process.send_signal(signal.SIGKILL)
