"""A tiny random Llama in a folder, and groups of made-up samples for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config.load import build
from slipstream.learner.step.trainer import Trainer
from slipstream.protocol.messages import Group, GroupArrays, Sample

VOCAB = 40


def save_llama(folder: Path, **changes: Any) -> Path:
    """Save a random two-layer Llama with tied embeddings and as many key heads as wanted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": 2,
        "eos_token_id": 2,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings | changes))
        model.get_input_embeddings().weight.data.normal_(std=0.5)  # the pad id's row too, which starts as zeros
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Path]:
    return save_llama


def group_of(
    prompt: Sequence[int],
    completions: Sequence[Sequence[int]],
    rewards: Sequence[float | None],
    ticket: int = 0,
    version: int | Sequence[list[tuple[int, int]]] = 0,
    logprob: float = -2.0,
    finish: Sequence[str] | None = None,
) -> tuple[Group, GroupArrays]:
    """A scored group; `version` is one for all tokens, or the run-length list of each sample."""
    samples = [
        Sample(
            tokens=len(ids),
            finish=finish[index] if finish else "stop",  # type: ignore[arg-type]
            versions=([(version, len(ids))] if ids else []) if isinstance(version, int) else version[index],
            text="",
            reward=reward,
            components={"reward": reward},
            unscored="" if reward is not None else "error",
        )
        for index, (ids, reward) in enumerate(zip(completions, rewards, strict=True))
    ]
    header = Group(
        run="test",
        ticket=ticket,
        attempt=0,
        prompt_index=ticket,
        owner="rollout-0",
        admitted_version=0,
        samples=samples,
    )
    flat = [token for ids in completions for token in ids]
    arrays = GroupArrays(
        prompt_ids=np.array(prompt, dtype=np.int32),
        token_ids=np.array(flat, dtype=np.int32),
        logprobs=np.full(len(flat), logprob, dtype=np.float32),
    )
    return header, arrays


@pytest.fixture(scope="session")
def make_group() -> Callable[..., tuple[Group, GroupArrays]]:
    return group_of


@pytest.fixture
def random_groups() -> Callable[..., list[tuple[Group, GroupArrays]]]:
    def make(count: int = 4, size: int = 6, longest: int = 9, seed: int = 0) -> list[tuple[Group, GroupArrays]]:
        """Groups over few ids, so that beginnings are often shared; 2 is both pad and stop token."""
        rng = np.random.default_rng(seed)
        groups = []
        for ticket in range(count):
            prompt = rng.integers(1, VOCAB, size=rng.integers(1, 6)).tolist()
            lengths = rng.integers(1, longest + 1, size=size)
            completions = [[*rng.integers(1, 4, size=n - 1).tolist(), 2] for n in lengths]
            rewards = rng.integers(0, 2, size=size).astype(float).tolist()
            rewards[:2] = [0.0, 1.0]
            groups.append(group_of(prompt, completions, rewards, ticket))
        return groups

    return make


@pytest.fixture
def make_trainer(llama_folder):
    def make(objective=None, optimizer=None, learner=None, eta=4, folder=None, **sections):
        settings = {"learning_rate": 1e-2, "grad_clip": None, **(optimizer or {})}
        tree = {
            "run": {"steps": 50},
            "model": {"source": str(folder or llama_folder)},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "objective": {"recipe": "grpo", **(objective or {})},
            "staleness": {"policy": "token", "max_staleness": eta},
            "learner": {"device": "cpu", "optimizer": settings, **(learner or {})},
            **sections,
        }
        return Trainer(build(tree)[0], folder or llama_folder)

    return make


@pytest.fixture
def gradients_of():
    """A step's gradients by name, caught just before the optimizer would use them, and its report."""

    def catch_gradients(trainer, groups, version=0):
        caught = {}

        def catch(norm, factor):
            caught.update({name: p.grad.clone() for name, p in trainer.policy.parameters().items()})
            trainer.optimizer.forget()

        trainer.optimizer.step = catch
        report = trainer.step(groups, version)
        assert report.stepped
        return caught, report

    return catch_gradients
