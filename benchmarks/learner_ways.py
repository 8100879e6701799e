"""The ways in which `benchmarks.learner` runs a batch: the learner's step, plain passes, padded passes.

Shapes: R rows, L tokens.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from slipstream.config.load import build
from slipstream.config.sections.services_config import WeightsSection
from slipstream.learner.step.trainer import Trainer
from slipstream.protocol.messages import Group, GroupArrays, Sample
from slipstream.weights.bytes.torch_io import gather
from slipstream.weights.manifest import layout
from slipstream.weights.transports import open_publisher

GROUP_SIZE = 8
SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 8192,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch: samples of log-normal length (shape `sigma`), cut at eight times the mean."""

    size: str
    sigma: float
    mean: int
    samples: int
    prompt: int
    seed: int = 0

    def lengths(self) -> list[int]:
        """Completion tokens of each sample."""
        rng = random.Random(self.seed)
        normal = [rng.gauss(0, 1) for _ in range(self.samples)]
        drawn = [np.exp(self.sigma * z - self.sigma**2 / 2) * self.mean for z in normal]
        return [max(2, min(8 * self.mean, round(value))) for value in drawn]

    def tokens(self) -> int:
        """Tokens of all samples, each with its prompt."""
        return sum(self.lengths()) + self.samples * self.prompt

    def longest(self) -> int:
        """Tokens of the longest sample with its prompt."""
        return max(self.lengths()) + self.prompt

    def groups(self) -> list[tuple[Group, GroupArrays]]:
        """The batch as the learner takes it; half of each group's samples are right."""
        rng, lengths = np.random.default_rng(self.seed), self.lengths()
        vocabulary = SIZES[self.size]["vocab_size"]
        made = []
        for ticket in range(self.samples // GROUP_SIZE):
            own = lengths[ticket * GROUP_SIZE : (ticket + 1) * GROUP_SIZE]
            samples = [
                Sample(
                    tokens=n, finish="stop", versions=[(0, n)], text="", reward=float(i % 2),
                    components={"reward": float(i % 2)}, unscored="",
                )
                for i, n in enumerate(own)
            ]  # fmt: skip
            header = Group(
                run="benchmark", ticket=ticket, attempt=0, prompt_index=ticket, owner="r", admitted_version=0,
                samples=samples,
            )  # fmt: skip
            ids = [rng.integers(3, vocabulary, size=n).astype(np.int32) for n in (self.prompt, sum(own))]
            logprobs = np.full(sum(own), -float(np.log(vocabulary)), dtype=np.float32)
            made.append((header, GroupArrays(prompt_ids=ids[0], token_ids=ids[1], logprobs=logprobs)))
        return made

    def sequences(self) -> list[Tensor]:
        """Ids of each sample, its prompt in front, in the batch's order."""
        found = []
        for group, arrays in self.groups():
            ends = np.cumsum([sample.tokens for sample in group.samples])[:-1]
            parts = np.split(arrays.token_ids, ends)
            found += [torch.from_numpy(np.concatenate([arrays.prompt_ids, part])).long() for part in parts]
        return found


def save_model(size: str, folder: Path) -> Path:
    """A random Llama of the size, in a folder."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True, **SIZES[size]}
    ids = {"pad_token_id": 2, "eos_token_id": 2, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**shape, **ids)).save_pretrained(folder)
    return folder


def trainer_of(folder: Path, budget: int) -> Trainer:
    """The learner's trainer with default settings and a budget of tokens for each pass."""
    tree = {
        "run": {"steps": 1000},
        "model": {"source": str(folder)},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "learner": {"device": "cpu", "micro_batch_tokens": budget},
    }
    return Trainer(build(tree)[0], folder)


Step = Callable[[], dict[str, float]]


def ours(job: Job, folder: Path) -> Step:
    """A step of the learner: CPU seconds of all but the optimizer (`pass`), and of that."""
    trainer, groups = trainer_of(folder, job.longest()), job.groups()

    def step() -> dict[str, float]:
        before = time.process_time()
        report = trainer.step(groups, 0)
        assert report.stepped, report.reason
        whole, update = time.process_time() - before, report.cpu_seconds["optimizer"]
        return {"pass": whole - update, "optimizer": update, "model_tokens": float(report.model_tokens)}

    return step


def plain(job: Job, folder: Path, batches: Callable[[Job], Iterator[dict[str, Any]]]) -> Step:
    """Forward and backward of the model as transformers gives it, and the same AdamW update."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    actions = sum(job.lengths())

    def step() -> dict[str, float]:
        before = time.process_time()
        for batch in batches(job):
            keep, targets = batch.pop("keep"), batch.pop("targets")
            logits = model(**batch, use_cache=False, logits_to_keep=keep).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / actions).backward()
            del logits, loss
        passed = time.process_time()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"pass": passed - before, "optimizer": time.process_time() - passed}

    return step


def one_by_one(job: Job) -> Iterator[dict[str, Any]]:
    """Each sequence by itself: nothing is padded, nothing is masked, only the completion has logits."""
    for ids in job.sequences():
        actions = len(ids) - job.prompt
        yield {"input_ids": ids[None, :-1], "keep": actions, "targets": ids[job.prompt :]}


def packed(job: Job) -> Iterator[dict[str, Any]]:
    """Sequences one behind the other in a row, kept apart by transformers, which reads that from the positions."""
    for part in _fill(job.sequences(), job.longest()):
        positions = torch.cat([torch.arange(len(ids) - 1) for ids in part])
        targets = torch.cat(
            [torch.where(torch.arange(len(ids) - 1) < job.prompt - 1, -100, ids[1:]) for ids in part]
        )
        row = torch.cat([ids[:-1] for ids in part])
        yield {"input_ids": row[None], "position_ids": positions[None], "keep": 0, "targets": targets}


def padded(job: Job) -> Iterator[dict[str, Any]]:
    """Four sequences a pass, all as long as the longest of the batch."""
    sequences, longest = job.sequences(), job.longest() - 1
    for first in range(0, len(sequences), 4):
        part = sequences[first : first + 4]
        ids_RL, targets_RL = (torch.full((len(part), longest), fill) for fill in (0, -100))
        for row, ids in enumerate(part):
            ids_RL[row, : len(ids) - 1] = ids[:-1]
            targets_RL[row, job.prompt - 1 : len(ids) - 1] = ids[job.prompt :]
        mask_RL = torch.tensor([[int(at < len(ids) - 1) for at in range(longest)] for ids in part])
        yield {"input_ids": ids_RL, "attention_mask": mask_RL, "keep": 0, "targets": targets_RL}


def _fill(sequences: Sequence[Tensor], budget: int) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    for ids in sorted(sequences, key=len, reverse=True):
        if part and sum(map(len, part)) + len(ids) > budget:
            yield part
            part = []
        part.append(ids)
    yield part


def stalls(job: Job, folder: Path) -> Step:
    """A step, and what the learner waits for when it publishes and when it saves a checkpoint, CPU seconds."""
    trainer, groups = trainer_of(folder, job.longest()), job.groups()
    gathered = gather(trainer.tensors())
    publisher = open_publisher(
        "benchmark", int(time.time()), layout(gathered.tensors, gathered.tied), WeightsSection(transport="shm")
    )
    version = 0

    def step() -> dict[str, float]:
        nonlocal version
        version += 1
        begun = time.process_time()
        trainer.step(groups, 0)
        stepped = time.process_time()
        staged = publisher.stage(version, gather(trainer.tensors()).tensors)
        published = time.process_time()
        staged.commit()
        publisher.retire(version)
        committed = time.process_time()
        writers = trainer.save_writers()
        held = time.process_time()
        with tempfile.TemporaryDirectory() as target:
            for name, write in writers.items():
                write(Path(target) / name)
        if version == LAST_STALL:
            publisher.close()
        return {
            "step": stepped - begun,
            "publish": published - stepped,
            "checkpoint": held - committed,
        }

    return step


LAST_STALL = 3
WAYS: dict[str, Callable[[Job, Path], Step]] = {
    "learner": ours,
    "one by one": lambda job, folder: plain(job, folder, one_by_one),
    "packed by transformers": lambda job, folder: plain(job, folder, packed),
    "padded": lambda job, folder: plain(job, folder, padded),
    "stalls": stalls,
}
