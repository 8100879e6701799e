"""Thirty-odd faults at random instants on every kind of process, the ledger's server included, over two epochs."""

from __future__ import annotations

import os
import random

import pytest
from benchmarks.chaos.__main__ import POLICIES, Trial, run
from benchmarks.chaos.hostile.acts import DEEDS
from benchmarks.chaos.hostile.claims import CLAIMS
from benchmarks.chaos.hostile.files import POISONS
from benchmarks.chaos.hostile.groups import SPOILED
from benchmarks.chaos.hostile.programs import ATTACKS
from benchmarks.chaos.schedule import FAULTS, HOSTILE, MENU, embedded, longer, make_schedule

SEED = "SLIPSTREAM_CHAOS_SEED"
COUNT = 36  # each fault of each process, and two more


@pytest.mark.process
@pytest.mark.timeout(1500)  # generous: a crowded machine takes ten times as long as a quiet one
def test_whatever_is_killed_stopped_or_cut_off_each_prompt_is_trained_exactly_once(tmp_path):
    """Promises 1, 2, 3 and 8; cases 84, 91, 101 and 103. SLIPSTREAM_CHAOS_SEED=N tries another schedule."""
    seed = int(os.environ.get(SEED, "18"))
    print(f"{SEED}={seed}")
    policy = POLICIES[seed % len(POLICIES)]
    trial = Trial(seed, COUNT, policy, prompts=240, gap=0.5, longest=1.5, menu=FAULTS)
    result = run(trial, tmp_path, f"chaos-{os.getpid()}")
    assert result["problems"] == []
    assert result["faults"] == COUNT


@pytest.mark.process
@pytest.mark.timeout(1500)
def test_programs_strangers_bad_members_and_poison_end_nothing_and_train_nothing(tmp_path):
    """Promises 1, 2, 3, 9 and 10: each hostile act once, and no process ends for it."""
    seed = int(os.environ.get(SEED, "18"))
    print(f"{SEED}={seed}")
    trial = Trial(seed, len(HOSTILE), "token", 900, gap=0.5, longest=1.5, menu=HOSTILE, weights="tcp")
    result = run(trial, tmp_path, f"hostile-{os.getpid()}")
    assert result["problems"] == []
    assert result["by_kind"].keys() == DEEDS.keys()


def test_the_same_seed_gives_the_same_schedule():
    seed = random.randrange(1 << 32)
    assert make_schedule(seed, 100, 1.0) == make_schedule(seed, 100, 1.0)
    assert make_schedule(seed, 100, 1.0) != make_schedule(seed + 1, 100, 1.0)


def test_a_schedule_has_every_fault_of_every_process():
    schedule = make_schedule(18, COUNT, 1.0, menu=FAULTS)
    assert sum(fault.kind == "kill" for fault in schedule) >= 10  # case 84
    pairs = {(fault.role, fault.kind) for fault in schedule}
    assert pairs == {(role, kind) for role, kinds in FAULTS.items() for kind in kinds}


def test_the_menu_has_every_hostile_act_that_there_is():
    deeds = {(role.rpartition(":")[2], kind) for role, kinds in MENU.items() for kind in kinds if kind in DEEDS}
    acts = {"program": ATTACKS, "member": {**CLAIMS, **SPOILED}, "poison": POISONS}
    floods = {(role, "flood") for role in ("rollout-0", "reward-0", "buffer", "learner")}
    assert deeds == floods | {(name, kind) for kind, names in acts.items() for name in names}


def test_the_long_version_also_has_stops_that_outlast_a_lease_and_the_server_of_up():
    schedule = make_schedule(18, 110, 1.0, menu=longer(embedded(MENU)))
    frozen = {fault.role for fault in schedule if fault.kind == "freeze"}
    assert {"rollout-0", "reward-0", "buffer", "learner", "valkey"} <= frozen
    assert all(fault.seconds > 15 for fault in schedule if fault.kind == "freeze")
    assert {fault.kind for fault in schedule if fault.role == "valkey"} == {"kill", "stop", "freeze"}
    assert "redis" not in {fault.role for fault in schedule}
