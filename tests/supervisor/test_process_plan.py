from __future__ import annotations

from collections import Counter
from pathlib import Path

from slipstream.config.load import build
from slipstream.supervisor.process_plan import role_specs


def test_every_role_is_started_under_its_own_name_with_the_runs_ledger():
    tree = {
        "run": {"name": "r", "steps": 1},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}], "replicas": 3},
        "rollout": {"replicas": 2, "engine": {"threads": 4}},
    }
    specs = role_specs(build(tree)[0], Path("/run/config.yaml"), "unix:///s", "json", Path("/run/keys"))
    roles = Counter(spec.argv[spec.argv.index("run") + 1] for spec in specs)
    assert roles == {"learner": 1, "buffer": 1, "reward": 3, "rollout": 2}
    assert len({spec.name for spec in specs}) == len(specs)
    assert all(spec.argv[-1] == spec.name for spec in specs)
    assert {spec.env["SLIPSTREAM__REDIS__URL"] for spec in specs} == {"unix:///s"}
    assert {spec.env["SLIPSTREAM__NETWORK__KEYS"] for spec in specs} == {"/run/keys"}
    threads = {spec.name: spec.env["OMP_NUM_THREADS"] for spec in specs}
    assert threads["rollout-0"] == "4"
    assert threads["buffer"] == "1"


def test_shards_are_named_by_their_number_and_keys_of_ones_own_are_used():
    tree = {
        "run": {"name": "r", "steps": 1},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "buffer": {"shards": 2},
        "network": {"keys": "/mine"},
    }
    specs = role_specs(build(tree)[0], Path("/run/config.yaml"), "unix:///s", "json", Path("/run/keys"))
    assert [spec.name for spec in specs if "buffer" in spec.name] == ["buffer-0", "buffer-1"]
    assert {spec.env["SLIPSTREAM__NETWORK__KEYS"] for spec in specs} == {"/mine"}


def test_the_learner_alone_copies_past_the_cache_unless_the_user_has_set_that(monkeypatch):
    config = build(
        {
            "run": {"name": "r", "steps": 1},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
        }
    )[0]

    def tunables():
        specs = role_specs(config, Path("/run/config.yaml"), "unix:///s", "json", Path("/run/keys"))
        return {spec.name: spec.env["GLIBC_TUNABLES"] for spec in specs if "GLIBC_TUNABLES" in spec.env}

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert tunables() == {"learner": "glibc.cpu.x86_non_temporal_threshold=0x40000"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert tunables() == {"learner": "glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=0x40000"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x80000")
    assert tunables() == {}
