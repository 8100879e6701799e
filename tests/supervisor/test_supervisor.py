"""Children that die while something else goes on: while they start, while all is ended, while no process is free."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from slipstream.config.load import build
from slipstream.errors import EXIT_FAULT, EXIT_OK, LedgerError
from slipstream.lifecycle.life import Life
from slipstream.run.folder import RunFolder
from slipstream.supervisor import supervisor as module
from slipstream.supervisor.child import Child, ProcessSpec
from slipstream.supervisor.supervisor import Supervisor

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
SERVER = "import os, pathlib, time; open('starts', 'a').write(f'{os.getpid()}\\n'); time.sleep(1000)"
ROLE = "open('role', 'w').close(); import time; time.sleep(1000)"


class Socket:
    """Answers when a test lets it."""

    url, path = "unix:///none", "/none"

    def __init__(self):
        self.answers = asyncio.Event()

    async def ready(self):
        await self.answers.wait()

    def remove(self):
        pass


@pytest.fixture
async def stack(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = {
        "run": {"name": "r", "steps": 1, "root": str(tmp_path)},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "supervisor": {"backoff_seconds": 0.01, "restarts": 3, "drain_seconds": 60.0},
    }
    config, folder = build(tree)[0], RunFolder(tmp_path, "r")
    for each in (folder.logs, folder.redis):
        each.mkdir(parents=True)
    made = SimpleNamespace(socket=Socket(), server=SERVER, roles={"reward-0": ROLE}, life=Life())

    async def no_ledger(self):
        raise LedgerError("there is none")

    def server(*_, **__):
        return SimpleNamespace(command=[sys.executable, "-c", made.server])

    def roles(*_):
        return [ProcessSpec(name, [sys.executable, "-c", code]) for name, code in made.roles.items()]

    monkeypatch.setattr(module, "EmbeddedSocket", lambda: made.socket)
    monkeypatch.setattr(module, "embedded_server", server)
    monkeypatch.setattr(module, "fetch_spec", lambda config: ProcessSpec("fetch", ["true"]))
    monkeypatch.setattr(module, "role_specs", roles)
    monkeypatch.setattr(Supervisor, "_connect", no_ledger)
    made.supervisor, made.folder = Supervisor(config, folder), tmp_path
    return made


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110  (the test's own time limit is the deadline)
        await asyncio.sleep(0.01)


async def test_a_server_that_dies_as_it_starts_ends_the_run_with_its_own_words(stack):
    """And not with the deadline of whoever waits for its first answer."""
    stack.server = "import sys; sys.exit('bad file format reading the append only file')"
    assert await stack.supervisor.run(stack.life) == EXIT_FAULT
    assert stack.supervisor.cause.startswith("valkey ended (exit code 1) too often: bad file format")
    assert not (stack.folder / "role").exists()


async def test_a_stop_while_the_server_starts_ends_all_at_once_and_starts_no_role(stack):
    running = asyncio.create_task(stack.supervisor.run(stack.life))
    await until((stack.folder / "starts").exists)
    stack.life.stop()
    assert await running == EXIT_OK
    assert not (stack.folder / "role").exists()


async def test_a_server_that_dies_while_roles_drain_is_started_again_for_them(stack):
    """What a role has reached is saved in the ledger; without one its drain would be in vain."""
    stack.roles["reward-0"] = """
import os, pathlib, signal, sys, time
def drain(*_):
    starts = pathlib.Path('starts')
    os.kill(int(starts.read_text().split()[0]), signal.SIGKILL)
    while len(starts.read_text().split()) < 2:
        time.sleep(0.01)
    pathlib.Path('saved').touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
pathlib.Path('role').touch()
time.sleep(1000)
"""
    stack.socket.answers.set()
    running = asyncio.create_task(stack.supervisor.run(stack.life))
    starts = stack.folder / "starts"
    await until(lambda: (stack.folder / "role").exists() and starts.exists() and starts.read_text())
    stack.life.stop()
    assert await asyncio.wait_for(running, 50) == EXIT_OK
    assert (stack.folder / "saved").exists()


async def test_a_role_that_cannot_be_started_again_just_now_is_tried_again(stack, monkeypatch):
    """A host that is out of processes for a moment is no end of the run."""
    stack.roles["reward-0"] = "open('role', 'a').write('x')"
    stack.socket.answers.set()
    begin, refused = Child.start, []

    async def start(spec, *more):
        if spec.name == "reward-0" and (stack.folder / "role").exists() and not refused:
            refused.append(spec.name)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await begin(spec, *more)

    monkeypatch.setattr(module.Child, "start", start)
    assert await stack.supervisor.run(stack.life) == EXIT_FAULT  # in the end, by its budget of 3
    assert refused
    assert "reward-0 ended (exit code 0) too often" in stack.supervisor.cause
    assert (stack.folder / "role").read_text() == "xxx"
