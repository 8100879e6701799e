"""Several ranks make exactly the step of one, however the model is sharded; and they live and die together."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from slipstream.learner.checkpoint.finding import newest_complete
from slipstream.learner.ranks.launch import launch
from slipstream.learner.ranks.ranks import Ranks

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("ranks_worker.py")
CHAOS = Path(__file__).with_name("ranks_chaos.py")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length", "longest", "prompt_mean")
STEPS = 2
SAVED = f"step-{STEPS:08d}"


def _worker() -> Any:
    spec = importlib.util.spec_from_file_location("ranks_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _llama(folder: Path, seed: int = 0) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 66, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        ids = {"pad_token_id": 2, "eos_token_id": 2, "bos_token_id": None}
        config = LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=True, initializer_range=0.2)
        LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    return folder


def _tree(
    model: Path, objective: dict[str, Any], replicate: int = 1, tokens: int = 32, **learner: Any
) -> dict[str, Any]:
    parallel = {"replicate": replicate}
    optimizer = {"learning_rate": 1e-4}
    return {
        "model": {"source": str(model)},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "objective": objective,
        "learner": {
            "device": "cpu",
            "micro_batch_tokens": tokens,
            "optimizer": optimizer,
            "parallel": parallel,
            **learner,
        },
    }


def _objectives() -> list[dict[str, Any]]:
    plain = [
        {"recipe": "grpo", "aggregation": name} | ({"horizon": 16} if name == "fixed_length" else {})
        for name in AGGREGATIONS
    ]
    return [*plain, {"recipe": "grpo", "proximal": "recompute", "correction": "tis"}]


def _with_reference(model: Path, other: Path) -> list[dict[str, Any]]:
    """In the loss and in the reward; and the adapters' own base, which is no second model."""
    kl = {"recipe": "grpo", "kl_beta": 0.1}
    apart, own = {"source": str(other)}, {"source": "start"}
    return [
        _tree(model, kl, reference=apart),
        _tree(model, kl | {"kl_place": "reward"}, reference=apart),
        _tree(model, kl, reference=own, lora={"rank": 4}),
    ]


def _run(plan: Path, size: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _start(WORKER, plan, str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _start(script: Path, *arguments: str | Path, **env: str) -> None:
    argv = [sys.executable, str(script), *map(str, arguments)]
    env = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, env=env, start_new_session=True) as process:
        try:
            assert process.wait(600) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(900)
def test_two_ranks_make_the_step_of_one_and_what_they_save_loads_on_any_number(tmp_path: Path) -> None:
    """Case 60: every aggregation, a proximal pass, and LoRA; sharded over both ranks and replicated on both."""
    model, objectives = _llama(tmp_path / "model"), _objectives()
    plain, copied = _tree(model, objectives[0]), _tree(model, objectives[0], replicate=2)
    trees = [_tree(model, objective) for objective in objectives]
    trees += [copied, _tree(model, objectives[-1], replicate=2)]
    trees += [_tree(model, objectives[0], lora={"rank": 4})]
    trees += [_tree(model, objectives[0], replicate=2, lora={"rank": 4})]
    trees += [_tree(model, objectives[-1], n_mini=2)]
    steered = {"kind": "muon", "groups": [{"match": "*.mlp.*", "rate_factor": 0.5}], "learning_rate": 1e-4}
    trees += [_tree(model, objectives[0], optimizer=steered, freeze=["model.layers.0.*"])]
    trees += _with_reference(model, _llama(tmp_path / "other", 1))
    cases: list[dict[str, Any]] = [{"tree": tree, "steps": (0, STEPS)} for tree in trees]
    sharded, replicated = tmp_path / "sharded", tmp_path / "replicated"
    cases[0]["save"], cases[trees.index(copied)]["save"] = str(sharded), str(replicated)
    loaded = {"load": str(sharded / SAVED), "steps": (STEPS, STEPS + 1)}
    cases.append({"tree": plain, **loaded})
    plan = {"model": str(model), "cases": cases, "out": str(tmp_path)}
    (tmp_path / "two.json").write_text(json.dumps(plan))
    _run(tmp_path / "two.json", 2)
    worker = _worker()
    for number, tree in enumerate(trees):
        changes = {
            name: tree["learner"][name]
            for name in ("n_mini", "lora", "reference", "optimizer", "freeze")
            if name in tree["learner"]
        }
        few, many = (_tree(model, tree["objective"], tokens=tokens, **changes) for tokens in (32, 4096))
        alone = worker.train({"tree": few, "steps": (0, STEPS)}, model, Ranks())
        whole = worker.train({"tree": many, "steps": (0, STEPS)}, model, Ranks())
        assert max(alone["micro_batches"]) >= 4
        assert max(whole["micro_batches"]) == changes.get("n_mini", 1)
        for one in (alone, whole):
            found = _assert_same(tmp_path / f"2-{number}", one)
        assert max(found["imbalance"]) < 0.2
    four = [
        {"tree": plain, **loaded, "save": str(tmp_path / "four")},
        {"tree": copied, **loaded, "load": str(replicated / SAVED)},
    ]
    (tmp_path / "four.json").write_text(json.dumps(plan | {"cases": four}))
    _run(tmp_path / "four.json", 4)
    straight = worker.train({"tree": plain, "steps": (0, STEPS + 1)}, model, Ranks())
    for key in ("norms", "metrics"):
        del straight[key][:STEPS]
    for outcome in (f"2-{len(cases) - 1}", "4-0", "4-1"):
        _assert_same(tmp_path / outcome, straight)
    for root, steps in ((sharded, (2, 3)), (replicated, (2, 3)), (tmp_path / "four", (3, 3))):
        found = worker.train(
            {"tree": plain, "load": newest_complete(root).path, "steps": steps}, model, Ranks()
        )
        _assert_near(found["tensors"], straight["tensors"])


def _assert_same(stem: Path, one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stem.with_suffix(".json").read_text())
    assert found["norms"] == pytest.approx(one["norms"], rel=1e-5)
    for ours, theirs in zip(found["metrics"], one["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    for ours, theirs in zip(found["canary"], one["canary"], strict=True):
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
    _assert_near(load_file(stem.with_suffix(".safetensors")), one["tensors"])
    return found


def _assert_near(tensors: dict[str, Any], others: dict[str, Any]) -> None:
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert (value - others[name]).abs().max() <= 1e-6, name


@pytest.mark.timeout(900)
def test_a_rank_that_is_killed_ends_the_other_with_its_cause_and_leaves_no_half_checkpoint(
    tmp_path: Path,
) -> None:
    """kill -9 in the middle of a step, of a save and of a publish: the step before is there, and goes on exactly."""
    model, root = _llama(tmp_path / "model"), tmp_path / "root"
    root.mkdir()
    tree = _tree(model, _objectives()[0])
    plan = {"model": str(model), "tree": tree, "root": str(root), "seconds": 200.0}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    _start(CHAOS, tmp_path / "plan.json")
    worker = _worker()
    straight = worker.train({"tree": tree, "steps": (0, 2)}, model, Ranks())
    for fault in ("step", "save", "publish"):
        found = json.loads((root / f"{fault}.json").read_text())
        assert found["codes"] == [1, -signal.SIGKILL], (fault, found)
        assert found["cause"], fault
        newest = newest_complete(root / fault)
        assert newest.step == 1, fault
        again = worker.train({"tree": tree, "load": newest.path, "steps": (1, 2)}, model, Ranks())
        _assert_near(again["tensors"], straight["tensors"])
    assert (
        "rank 1 has not written its part of a checkpoint"
        in json.loads((root / "save.json").read_text())["cause"]
    )


@pytest.mark.timeout(900)
def test_a_run_trains_on_two_ranks_and_survives_the_death_of_one(stack, simulated):
    """kill -9 of the second rank ends the learner with it; the supervisor starts both again, from the checkpoint."""
    run = stack().up(*simulated, "run.steps=40", "learner.parallel.ranks=2", "learner.checkpoint.every=2")
    run.until_step(4)
    second = [p for p in psutil.process_iter(["environ"]) if _is_second_rank(p, run)]
    assert len(second) == 1
    second[0].send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text[-4000:]
    run.assert_exactly_once()
    run.assert_gone()


def _is_second_rank(process: psutil.Process, run: Any) -> bool:
    environ = process.info["environ"] or {}
    return environ.get("RANK") == "1" and run.name in " ".join(process.cmdline())


def test_a_mistake_ends_every_rank_with_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command of each rank is refused; its code and its line are the learner's."""
    config = tmp_path / "config.yaml"
    config.write_text("learner: {parallel: {ranks: 2}, learning_rte: 1}\n")
    assert launch(2, ["run", "learner", "--config", str(config)], 4.0) == 2
    assert "learner.learning_rte" in capfd.readouterr().err
