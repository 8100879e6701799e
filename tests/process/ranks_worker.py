"""Ranks of `test_ranks.py`: they train each given configuration for a few steps; rank 0 leaves the weights in a file.

Arguments: a JSON file with {"model": folder, "cases": [...], "out": folder}, and the number of ranks. A case has a
config's "tree", the "steps" [first, last) to make, and may "load" a checkpoint before and "save" one after, under a
root. The ranks are forked from one process, so that the libraries are imported once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers  # noqa: F401
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from slipstream.config.load import build
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.follower_rank import follow
from slipstream.learner.publish import gathering
from slipstream.learner.ranks.ranks import Ranks, close_ranks, open_ranks
from slipstream.learner.step.trainer import Trainer
from slipstream.protocol.messages import Group, GroupArrays, Sample
from slipstream.weights.base import Together, WeightsSource
from slipstream.weights.manifest import Layout, layout


def groups_of(step: int, count: int = 5, size: int = 4) -> list[tuple[Group, GroupArrays]]:
    """Groups of uneven lengths over few ids, each with both rewards."""
    rng = np.random.default_rng(step)
    return [_group(rng, ticket, size) for ticket in range(count)]


def _group(rng: np.random.Generator, ticket: int, size: int) -> tuple[Group, GroupArrays]:
    lengths = rng.integers(1, 10, size=size).tolist()
    ids = np.concatenate([[*rng.integers(1, 4, size=n - 1), 2] for n in lengths]).astype(np.int32)
    rewards = [0.0, 1.0, *rng.integers(0, 2, size=size - 2).astype(float).tolist()]
    samples = [
        Sample(
            tokens=n,
            finish="stop",
            versions=[(0, n)],
            text="",
            reward=reward,
            components={"reward": reward},
            unscored="",
        )
        for n, reward in zip(lengths, rewards, strict=True)
    ]
    group = Group(
        run="test",
        ticket=ticket,
        attempt=0,
        prompt_index=ticket,
        owner="rollout-0",
        admitted_version=0,
        samples=samples,
    )
    prompt = rng.integers(1, 40, size=rng.integers(1, 6)).astype(np.int32)
    return group, GroupArrays(
        prompt_ids=prompt, token_ids=ids, logprobs=np.full(len(ids), -2.0, dtype=np.float32)
    )


def train(case: dict[str, Any], model: Path, ranks: Ranks) -> dict[str, Any]:
    """The outcome of a few steps; the other ranks follow, and return nothing."""
    trainer = Trainer(build(case["tree"])[0], model, ranks)
    if not ranks.leads:
        follow(trainer)
        return {}
    if "load" in case:
        trainer.load(Path(case["load"]))
    first, last = case["steps"]
    reports = []
    for step in range(first, last):
        trainer.outlet.canaries()  # a forward pass between two steps, as a publish makes it
        reports.append(trainer.step(groups_of(step), step))
    tensors = {name: value.clone() for name, value in trainer.tensors().items()}
    _published_as_it_is(trainer, tensors, torch.bfloat16)
    _published_as_it_is(trainer, tensors, None)
    canary = [msgspec.to_builtins(each) for each in trainer.outlet.canaries()]
    if "save" in case:
        write(Path(case["save"]), last, trainer.save_writers())
    if ranks.size > 1:
        ranks.dismiss()
    return {
        "tensors": tensors,
        "canary": canary,
        "norms": [report.gradient_norm for report in reports],
        "metrics": [report.metrics for report in reports],
        "micro_batches": [report.micro_batches for report in reports],
        "imbalance": [report.imbalance for report in reports],
    }


class Memory:
    """A publisher of one version, in this process."""

    def __init__(self, place: Layout) -> None:
        self.layout = place
        self.data = np.zeros(place.total_bytes, dtype=np.uint8)

    def stage(self, version: int, tensors: Mapping[str, WeightsSource]) -> Memory:
        if isinstance(tensors, Together):
            tensors.write_all(self.data, self.layout)
            return self
        for spec in self.layout.tensors:
            place = self.data[spec.offset : spec.offset + spec.nbytes]
            tensors[spec.name].copy(place, 0, math.prod(spec.shape))
        return self


def _published_as_it_is(trainer: Trainer, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Every byte in its place."""
    sources = trainer.outlet.sources(dtype)
    memory = Memory(layout(sources.tensors, sources.tied))
    trainer.outlet.compare(memory.layout, trainer.outlet.stage(memory, 1, dtype).data)
    for spec in memory.layout.tensors:
        wire = tensors[spec.name].to(dtype or tensors[spec.name].dtype).contiguous().reshape(-1)
        found = memory.data[spec.offset : spec.offset + spec.nbytes]
        assert np.array_equal(found, wire.view(torch.uint8).numpy()), spec.name


def rank(plan: dict[str, Any]) -> None:
    """Join, train every case, leave."""
    gathering.BUCKET_BYTES = 3000  # so small that tensors are cut
    ranks = open_ranks(build(plan["cases"][0]["tree"])[0].learner)
    for number, case in enumerate(plan["cases"]):
        replicate = case["tree"]["learner"]["parallel"]["replicate"]
        shape = (replicate, ranks.size // replicate)
        ranks.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        outcome = train(case, Path(plan["model"]), ranks)
        if outcome:
            stem = f"{ranks.size}-{number}"
            save_file(outcome.pop("tensors"), Path(plan["out"]) / f"{stem}.safetensors")
            (Path(plan["out"]) / f"{stem}.json").write_text(json.dumps(outcome))
    close_ranks()


def fork(plan: dict[str, Any], number: int, size: int) -> int:
    """Start one rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(number), "LOCAL_RANK": str(number)}
    try:
        rank(plan)
        os._exit(0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Start the ranks and wait for all of them; one that fails ends the others."""
    plan, size = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    running = {fork(plan, number, size) for number in range(size)}
    failed = False
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, 9)
    sys.exit(failed)


if __name__ == "__main__":
    main()
