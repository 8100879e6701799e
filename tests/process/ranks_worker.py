"""One rank of `test_ranks.py`: trains each given configuration for a few steps; rank 0 leaves the weights in a file.

Arguments: a JSON file with {"model": folder, "cases": [config trees], "steps": n, "out": folder}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from slipstream.config.load import build
from slipstream.learner.ranks import Ranks, close_ranks, open_ranks
from slipstream.learner.trainer import Trainer
from slipstream.learner.work import follow
from slipstream.messages import Group, GroupArrays, Sample


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


def train(tree: dict[str, object], model: Path, steps: int, ranks: Ranks) -> dict[str, object]:
    """The outcome of a few steps; the other ranks follow, and return nothing."""
    trainer = Trainer(build(tree)[0], model, ranks)
    if not ranks.leads:
        follow(trainer)
        return {}
    reports = [trainer.step(groups_of(step), step) for step in range(steps)]
    tensors = {name: value.clone() for name, value in trainer.tensors().items()}
    trainer.save_writers()
    if ranks.size > 1:
        ranks.dismiss()
    return {
        "tensors": tensors,
        "norms": [report.gradient_norm for report in reports],
        "metrics": [report.metrics for report in reports],
        "micro_batches": [report.micro_batches for report in reports],
        "imbalance": [report.imbalance for report in reports],
    }


def main() -> None:
    """Join, train every case, leave."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    ranks = open_ranks(build(plan["cases"][0])[0].learner.parallel, "cpu", 300.0)
    for number, tree in enumerate(plan["cases"]):
        replicate = tree["learner"]["parallel"]["replicate"]
        shape = (replicate, ranks.size // replicate)
        ranks.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        outcome = train(tree, Path(plan["model"]), plan["steps"], ranks)
        if outcome:
            save_file(outcome.pop("tensors"), Path(plan["out"]) / f"{number}.safetensors")
            (Path(plan["out"]) / f"{number}.json").write_text(json.dumps(outcome))
    close_ranks()


if __name__ == "__main__":
    main()
