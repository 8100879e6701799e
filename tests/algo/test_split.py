"""The gradient doesn't depend on how a batch is cut into micro-batches and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.algo.measures.metrics import finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, Prepared, prepare
from slipstream.algo.settings.recipes import RECIPES, resolve
from slipstream.algo.settings.spec import Objective

Learner = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length", "longest", "prompt_mean")
ORDER = torch.tensor([3, 0, 5, 7, 1, 6, 2, 4])


def gradient(
    spec: Objective, prepared: Prepared, sampler_BT: Tensor, learner: Learner, parts: list[Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of a batch handled part by part."""
    parameters = torch.linspace(-1, 1, 8 * 6 * 7, dtype=torch.float64).cos().reshape(8, 6, 7).requires_grad_()
    tally = prepared.tally
    for rows in parts:
        part = prepared.rows(rows)
        width = part.mask_BT.shape[1]
        pi_BT, head_BTK = learner(parameters, sampler_BT)
        entropy_BT = -pi_BT if spec.entropy_coeff else None
        loss, part_tally = objective(
            spec,
            part,
            pi_BT[rows, :width],
            None if entropy_BT is None else entropy_BT[rows, :width],
            head_BTK[rows, :width],
        )
        loss.backward()
        tally = tally.merge(part_tally)
    assert parameters.grad is not None
    return parameters.grad, finish_metrics(tally)


def check_splits(spec: Objective, batch: GlobalBatch, learner: Learner) -> None:
    prepared = prepare(spec, batch)
    assert batch.sampler_BT is not None
    whole, values = gradient(spec, prepared, batch.sampler_BT, learner, [torch.arange(8)])
    for size in (1, 2, 4):
        parts = list(ORDER.split(size))
        got, got_values = gradient(spec, prepared, batch.sampler_BT, learner, parts)
        torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-12)
        assert got_values == pytest.approx(values, rel=1e-6, abs=1e-12)
    skipping = ORDER[prepared.gradient_B[ORDER]]
    got, _ = gradient(spec, prepared, batch.sampler_BT, learner, list(skipping.split(3)))
    torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-12)
    assert whole.abs().max() > 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_splits_of_8_give_one_gradient_for_each_aggregation(
    aggregation: str, make_batch: Callable[..., GlobalBatch], learner: Learner
) -> None:
    """Case 60."""
    spec = resolve("grpo", {"aggregation": aggregation, "horizon": 9})
    check_splits(spec, make_batch(max_age=2), learner)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "seq_mask_tis"])
def test_splits_of_8_give_one_gradient_for_each_recipe(
    recipe: str, make_batch: Callable[..., GlobalBatch], learner: Learner
) -> None:
    check_splits(resolve(recipe, {"horizon": 9}), make_batch(), learner)


@pytest.mark.parametrize(
    "fields",
    [
        {"kl_beta": 0.1, "kl_kind": "k3", "entropy_coeff": 0.01},
        {"kl_beta": 0.1, "kl_kind": "k1_weighted", "correction_level": "product"},
        {"kl_beta": 0.1, "kl_place": "reward"},
        {"correction": "raw", "sequence_mask_low": 0.7, "sequence_mask_high": 1.3, "veto_high": 1.4},
        {"correction": "none", "loss": "gspo", "proximal": "sampler", "off_policy_delta": 0.1},
    ],
)
def test_splits_of_8_give_one_gradient_with_every_term(
    fields: dict[str, object], make_batch: Callable[..., GlobalBatch], learner: Learner
) -> None:
    check_splits(resolve("grpo", fields), make_batch(max_age=2), learner)


def test_tied_groups_may_be_skipped_but_still_count(
    make_batch: Callable[..., GlobalBatch], learner: Learner
) -> None:
    batch = make_batch()
    tied = replace(batch, rewards_B=torch.tensor([1, 0, 1, 0, 1, 1, 0.5, 0], dtype=torch.float64))
    assert prepare(resolve("grpo"), tied).gradient_B.sum() == 2
    check_splits(resolve("grpo"), tied, learner)


WORKER = """
import json, sys, torch, torch.distributed as dist
from slipstream.algo.measures.metrics import Tally, finish_metrics
from slipstream.algo.objective import objective
from slipstream.algo.prepare import GlobalBatch, prepare
from slipstream.algo.settings.recipes import resolve
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
lengths = torch.tensor([2, 6])
sampler = torch.linspace(-2, -0.1, 12, dtype=torch.float64).reshape(2, 6)


def run(mode, first, step):
    spec = resolve("grpo", {"advantage": "given", "aggregation": mode, "horizon": 9})
    batch = GlobalBatch(torch.zeros(2), torch.tensor([0, 1]), lengths, sampler, given_B=torch.tensor([-1.0, -3.0]))
    prepared = prepare(spec, batch)
    shift = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    total, tally = 0.0, Tally.of({}, {})
    for row in range(first, 2, step):
        part = prepared.rows(torch.tensor([row]))
        width = part.mask_BT.shape[1]
        loss, part_tally = objective(spec, part, (sampler[row] + shift)[None, :width])
        loss.backward()
        tally = tally.merge(part_tally)
    if step == size:
        dist.all_reduce(shift.grad)
        dist.all_reduce(tally.sums)
        dist.all_reduce(tally.maxima, op=dist.ReduceOp.MAX)
    values = finish_metrics(tally.merge(prepared.tally))
    return [shift.grad.tolist(), values["slipstream_objective_loss"], values]


results = {mode: [run(mode, 0, 1), run(mode, rank, size)] for mode in sys.argv[4:]}
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(results))
"""


def run_two_ranks(folder: Path) -> dict[str, list[list[object]]]:
    """Gradient, loss and metrics of each aggregation: by one process alone, and shared by two."""
    command = [sys.executable, "-c", WORKER]
    tail = ["2", str(folder / "store"), *AGGREGATIONS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *tail], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=250) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert all(process.returncode == 0 for process in ranks), outputs
    results: dict[str, list[list[object]]] = json.loads(outputs[0][0])
    return results


@pytest.mark.process
def test_two_ranks_give_the_gradient_and_the_metrics_of_one(tmp_path: Path) -> None:
    """Case 60: ranks of 2 tokens with loss 1 and 6 tokens with loss 3 have a token mean of 2.5."""
    results = run_two_ranks(tmp_path)
    for one, two in results.values():
        assert two[0] == pytest.approx(one[0], rel=1e-6)
        assert two[2] == pytest.approx(one[2], rel=1e-6)
    assert set(results) == set(AGGREGATIONS)
    assert results["token_mean"][1][1] == pytest.approx(2.5)
