"""Ranks of `test_ranks.py` of which one is killed: in a step, in a save, or in a publish.

Arguments: a JSON file with {"model": folder, "tree": config, "root": folder, "seconds": limit}. Each fault has two
fresh ranks, forked from this process, which train one step, save it under `root/FAULT`, and meet the fault in the
second. What became of them goes to `root/FAULT.json`: exit codes, and the cause that rank 0 ended with.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import ranks_worker as worker

from slipstream.config.load import build
from slipstream.learner.checkpoint import trainer_state as state
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.follower_rank import follow
from slipstream.learner.publish import gathering
from slipstream.learner.ranks.ranks import open_ranks
from slipstream.learner.step.trainer import Trainer
from slipstream.weights.manifest import layout

FAULTS = ("step", "save", "publish")
_SAVE_SECONDS = 2.0  # who waits longer for a rank's part waits for one that is dead


def killed() -> NoReturn:
    """End as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def second_time(function: Any) -> Any:
    """The function once, and death in the middle of its second call."""
    calls = []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments) if len(calls) == 1 else killed()

    return call


def arm(fault: str, trainer: Trainer) -> None:
    """Have this rank die in its second step, in its second save half way through a file, or between two buckets."""
    if fault == "step":
        trainer._accumulate = second_time(trainer._accumulate)  # type: ignore[method-assign]
    elif fault == "publish":
        exchange = gathering.ShardedTensors._exchange
        gathering.ShardedTensors._exchange = second_time(exchange)  # type: ignore[method-assign]
    else:
        whole = state.RankFile.save

        def save(part: Any, path: Path) -> None:
            whole(part, path)
            if ".step-00000002." in str(path):
                path.write_bytes(path.read_bytes()[:100])
                killed()

        state.RankFile.save = save  # type: ignore[method-assign]


def train(plan: dict[str, Any], fault: str) -> None:
    """One rank's life; rank 0 never gets to the end of it."""
    gathering.BUCKET_BYTES = 3000
    config, root = build(plan["tree"])[0], Path(plan["root"]) / fault
    ranks = open_ranks(config.learner)
    trainer = Trainer(config, Path(plan["model"]), ranks)
    if not ranks.leads:
        arm(fault, trainer)
        follow(trainer)
        return
    trainer.step(worker.groups_of(0), 0)
    write(root, 1, trainer.save_writers())
    trainer.saves._seconds = _SAVE_SECONDS
    trainer.step(worker.groups_of(1), 1)
    sources = trainer.outlet.sources(None)
    trainer.outlet.stage(worker.Memory(layout(sources.tensors, sources.tied)), 1, None)
    write(root, 2, trainer.save_writers())


def fork(plan: dict[str, Any], fault: str, number: int) -> int:
    """Start one rank; returns its process id. Its cause of death is a file."""
    child = os.fork()
    if child:
        return child
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(number), "LOCAL_RANK": str(number)}
    try:
        train(plan, fault)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001
        (Path(plan["root"]) / f"{fault}-{number}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def suffer(plan: dict[str, Any], fault: str) -> None:
    """Both ranks, one of which dies; whoever is left at the limit is killed and counts as hung."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    children = [fork(plan, fault, number) for number in (0, 1)]
    codes: dict[int, int] = {}
    limit = time.monotonic() + plan["seconds"]
    while len(codes) < len(children):
        for child in [each for each in children if each not in codes]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    cause = Path(plan["root"]) / f"{fault}-0"
    found = {
        "codes": [codes[child] for child in children],
        "cause": cause.read_text() if cause.exists() else "",
    }
    (Path(plan["root"]) / f"{fault}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    for each in FAULTS:
        suffer(given, each)
