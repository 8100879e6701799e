"""Imports run one way: light modules below, each part with its one library, services on top and apart."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"torch", "transformers", "zmq", "redis", "vllm", "numpy", "datasets", "reasoning_gym"}
# What each part of common may import beside the standard library: its own libraries, and other parts.
LIBRARIES = {
    "algo": {"torch"},
    "attempt_end": set(),
    "checkpoint": {"msgspec", "xxhash"},
    "conditions": set(),
    "contract": {"numpy"},
    "config": {"pydantic", "yaml"},
    "errors": set(),
    "frames": {"numpy"},
    "headers": {"msgspec"},
    "json_line": set(),
    "ledger": {"redis", "msgspec", "numpy"},
    "literal": {"tokenizers"},
    "lifecycle": set(),
    "messages": {"msgspec", "numpy"},
    "models": {
        "filelock",
        "gguf",
        "huggingface_hub",
        "numpy",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "xxhash",
    },
    "privacy": set(),
    "prompts": {"datasets", "pyarrow", "reasoning_gym", "torch", "torchdata"},
    "provenance": set(),
    "questions": {"msgspec"},
    "rewards": {"math_verify", "msgspec", "reasoning_gym"},
    "run_folder": {"yaml"},
    "seals": {"xxhash"},
    "secrets": set(),
    "shards": set(),
    "simulation": set(),
    "staleness": set(),
    "stores": {"fsspec"},
    "telemetry": {"mlflow", "opentelemetry", "prometheus_client", "tensorboardX", "trackio", "wandb"},
    "text": set(),
    "tokens": {"jinja2", "transformers"},
    "transport": {"msgspec", "zmq"},
    "weights": {"fsspec", "msgspec", "numpy", "torch", "ucxx", "xxhash", "zmq", "zstandard"},
}
PARTS = {
    "algo": {"conditions"},
    "conditions": set(),
    "config": {"algo", "conditions", "errors", "staleness"},
    "errors": set(),
    "frames": {"errors"},
    "headers": {"errors", "frames"},
    "json_line": set(),
    "messages": {"errors", "frames", "headers", "seals"},
    "provenance": {"secrets"},
    "questions": {"messages"},
    "rewards": {"errors", "secrets", "text"},
    "seals": {"errors", "frames", "headers"},
    "secrets": {"errors"},
    "simulation": {"staleness"},
    "staleness": {"errors"},
    "stores": {"errors"},
    "text": set(),
}
TORCH_FREE_ALGO = {
    "algo",
    "algo.spec",
    "algo.recipes",
    "algo.contradictions",
    "algo.context",
    "algo.doubts",
    "algo.ranges",
}


def test_common_imports_no_service(modules: list[Any]) -> None:
    services = {module.part for module in modules if module.root == "services"}
    wrong = [(m.name, m.parts() & services) for m in modules if m.root == "common" and m.parts() & services]
    assert not wrong


def test_services_import_no_other_service(modules: list[Any]) -> None:
    services = {module.part for module in modules if module.root == "services"}
    wrong = [
        (m.name, m.parts() & services)
        for m in modules
        if m.root == "services" and m.part != "cli" and m.parts() & services
    ]
    assert not wrong


def test_every_part_of_common_keeps_to_its_libraries(modules: list[Any]) -> None:
    common = [module for module in modules if module.root == "common"]
    assert {module.part for module in common} <= set(LIBRARIES), "name the new part's libraries here"
    wrong = [(m.name, m.libraries() - LIBRARIES[m.part]) for m in common if m.libraries() - LIBRARIES[m.part]]
    assert not wrong


def test_light_parts_import_only_light_parts(modules: list[Any]) -> None:
    wrong = [
        (m.name, m.parts() - PARTS[m.part])
        for m in modules
        if m.root == "common" and m.part in PARTS and m.parts() - PARTS[m.part]
    ]
    assert not wrong


def test_only_the_learner_and_the_config_use_algo(modules: list[Any]) -> None:
    users = {m.name for m in modules if "algo" in m.parts()}
    assert users
    assert {name for name in users if not name.startswith(("learner.", "config."))} == set()


def test_the_config_uses_only_the_torch_free_modules_of_algo(modules: list[Any]) -> None:
    for module in modules:
        if module.name in TORCH_FREE_ALGO:
            assert not module.libraries(), module.name
        if module.name in TORCH_FREE_ALGO or module.part == "config":
            used = {".".join(n.split(".")[1:3]) for n in module.imports() if n.startswith("slipstream.algo.")}
            assert used <= TORCH_FREE_ALGO, module.name


def test_only_the_vllm_engine_imports_vllm(modules: list[Any]) -> None:
    """Its core, which feeds vLLM, and what vLLM loads in its workers."""
    users = {m.name for m in modules if "vllm" in m.libraries()}
    assert users == {"rollout.engines.vllm_core", "rollout.engines.vllm_worker"}


def test_services_reach_torch_only_in_engines_and_the_learner(modules: list[Any]) -> None:
    users = {m.name for m in modules if m.root == "services" and m.libraries() & {"torch", "transformers"}}
    assert users
    assert all(name.startswith(("rollout.engines.", "learner.")) for name in users), users


def test_no_pickle_and_no_unsafe_yaml(modules: list[Any]) -> None:
    """Promise 9: no code on the wire. PyYAML's loader is subclassed in one place, from the safe one."""
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for module in modules:
        text = module.path.read_text(encoding="utf-8")
        found = {name for name in forbidden if f"import {name}" in text}
        assert not found, (module.name, found)
        if module.name != "config.yaml_loader":
            assert "yaml.load(" not in text, module.name


@pytest.mark.process
@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import slipstream.config.load", set()),
        ("import slipstream.config.schema, slipstream.errors, slipstream.staleness", set()),
        ("import slipstream.cli.main", set()),
        ("from slipstream.cli.main import main; main(['validate', 'smollm2-sums'])", set()),
        (
            "from slipstream.cli.main import main; "
            "main('plan tiny-sorter --mean-length=9 --tokens-per-second=9 --step-seconds=9'.split())",
            set(),
        ),
        ("import slipstream.messages", {"numpy"}),
        ("import slipstream.rewards.base, slipstream.rewards.registry", set()),
        ("import slipstream.ledger.client", {"redis", "numpy"}),
        ("import slipstream.transport.zmq", {"zmq", "numpy"}),
    ],
)
def test_importing_stays_light(statement: str, allowed: set[str]) -> None:
    code = f"{statement}\nimport sys; print('LOADED', *sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert loaded <= allowed
