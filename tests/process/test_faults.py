"""A dead background task ends its process within seconds, with its cause: each task of each service.

The services run in this process, against a real ledger and over real sockets; only the outer process is missing.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.errors import EXIT_FAULT
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import RunTerms
from slipstream.ledger.server import embedded_server
from slipstream.lifecycle.life import FAULT_VARIABLE, Life, Service
from slipstream.lifecycle.process import run_process
from slipstream.run.folder import RunFolder
from slipstream.transport.base import Parcel, Peer, SenderOptions
from slipstream.transport.zeromq.zmq import make_sender

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
CONFIG = Path(__file__).parents[2] / "configs" / "tiny-sorter.yaml"

TASKS = [
    *[("buffer", task) for task in ("receiver", "intake", "housekeeping", "comparison", "heartbeat")],
    *[("reward", task) for task in ("receiver", "sender:buffer", "peers:buffer", "heartbeat")],
    *[("rollout", task) for task in ("weights", "sender:reward", "peers:reward", "heartbeat")],
    *[("learner", task) for task in ("publish", "sender:buffer", "peers:buffer", "evaluations", "heartbeat")],
]
PER_DELIVERY = [("buffer", "answer"), ("reward", "score")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    how = embedded_server(tmp_path_factory.mktemp("v"))
    process = subprocess.Popen(how.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    with redis.Redis.from_url(how.url) as client:
        while True:
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < end
                time.sleep(0.02)
    yield how.url
    process.kill()
    process.wait()


def make_config(tmp_path: Path, url: str) -> Config:
    settings = [
        f"run.root={tmp_path}",
        f"run.name={tmp_path.name}",
        f"redis.url={url}",
        "data.limit=100",
        "data.holdout=4",
        "batch.groups=2",
        "rollout.engine.kind=simulated",
        "rollout.engine.options.vocab_size=16",
    ]
    return load_config(CONFIG, settings)[0]


def fingerprint(config: Config) -> tuple[str, int]:
    from slipstream.models.resolve import resolve
    from slipstream.prompts.build import build_prompts
    from slipstream.run.tokens import load_tokenizer

    folder = resolve(config.model.source)
    prompts, _ = build_prompts(config, load_tokenizer(str(folder)), folder)
    return prompts.fingerprint, len(prompts)


async def open_run(config: Config, url: str) -> None:
    digest, prompts = fingerprint(config)
    async with await Ledger.connect(url, config.run.name or "") as ledger:
        terms = RunTerms(run_id=config.run.name or "", dataset_fingerprint=digest, prompts=prompts, seed=0)
        await ledger.open_run(terms)


async def deliver_once(role: str, run: str, url: str) -> None:
    """Send the role one parcel, once it is there to take it."""
    async with await Ledger.connect(url, run) as ledger, make_sender(SenderOptions()) as sender:
        while not (found := await ledger.members(role)):  # noqa: ASYNC110  (ends with the test)
            await asyncio.sleep(0.05)
        sender.set_peers({found[0].id: Peer(found[0].endpoint)})
        await sender.deliver(Parcel("t0.0", "group", [b"no group"]), 150)


def with_delivery(service: Service, role: str, run: str, url: str) -> Service:
    async def both(life: Life) -> None:
        messenger = asyncio.create_task(deliver_once(role, run, url))
        try:
            await service(life)
        finally:
            messenger.cancel()
            await asyncio.gather(messenger, return_exceptions=True)

    return both


@pytest.mark.parametrize(("role", "task"), [*TASKS, *PER_DELIVERY])
def test_a_dead_task_ends_its_process_with_the_cause(role, task, tmp_path, url, monkeypatch, caplog):
    """Case 80."""
    import importlib

    config = make_config(tmp_path, url)
    folder = RunFolder.of(config)
    folder.create()
    if role != "learner":
        asyncio.run(open_run(config, url))
    monkeypatch.setenv(FAULT_VARIABLE, task)
    service = importlib.import_module(f"slipstream.{role}.service").serve(config, folder, role)
    if (role, task) in PER_DELIVERY:
        service = with_delivery(service, role, folder.name, url)
    with caplog.at_level(logging.ERROR, "slipstream"):
        assert run_process(service, drain_seconds=90.0) == EXIT_FAULT
    lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.process"]
    assert lines == [f"RuntimeError: fault injected into {task!r} (in background task {task!r})"]
