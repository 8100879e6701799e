"""Imports run one way: light modules below, each part with its one library, services on top and apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

HEAVY = {"torch", "transformers", "zmq", "redis", "vllm", "numpy", "datasets", "reasoning_gym"}
# What each part of common may import beside the standard library: its own libraries, and other parts.
LIBRARIES = {
    "algo": {"torch"},
    "conditions": set(),
    "contract": {"numpy"},
    "config": {"pydantic", "yaml"},
    "errors": set(),
    "ledger": {"redis", "msgspec", "numpy"},
    "lifecycle": set(),
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
    "prompts": {"datasets", "pyarrow", "reasoning_gym", "torch", "torchdata"},
    "protocol": {"msgspec", "numpy", "xxhash"},
    "rewards": {"math_verify", "msgspec", "reasoning_gym"},
    "run": {"fsspec", "jinja2", "tokenizers", "transformers", "yaml"},
    "secrets": set(),
    "staleness": set(),
    "telemetry": {"mlflow", "opentelemetry", "prometheus_client", "tensorboardX", "trackio", "wandb"},
    "text": set(),
    "transport": {"msgspec", "zmq"},
    "weights": {"fsspec", "msgspec", "numpy", "torch", "ucxx", "xxhash", "zmq", "zstandard"},
}
PARTS = {
    "algo": {"conditions"},
    "conditions": set(),
    "config": {"algo", "conditions", "errors", "staleness"},
    "errors": set(),
    "protocol": {"errors"},
    "rewards": {"errors", "secrets", "text"},
    "secrets": {"errors"},
    "staleness": {"errors"},
    "text": set(),
}
# The learner's rooms in the order in which a batch passes through them: each may import those before it. What opens
# and holds them together (service, parts, descent and their like) lies beside them.
ROOMS = ("ranks", "batch", "model", "optimizer", "publish", "checkpoint", "step", "intake", "replay", "report")
TORCH_FREE_ALGO = {
    "algo",
    "algo.settings",
    "algo.settings.spec",
    "algo.settings.recipes",
    "algo.settings.contradictions",
    "algo.settings.context",
    "algo.settings.doubts",
    "algo.settings.ranges",
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


def test_no_modules_import_each_other_in_a_circle(modules: list[Any]) -> None:
    """What is imported for the types alone counts, too: who reads one has to read the other."""
    names = {module.name for module in modules}
    edges = {module.name: {n for n in map(_module_of(names), module.all_imports()) if n} for module in modules}
    order: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in order:
            for other in sorted(edges[name] - {name}):
                visit(other, (*path, name))
            order[name] = len(order)

    for name in sorted(names):
        visit(name, ())


def test_the_learner_s_rooms_import_only_those_before_them(modules: list[Any]) -> None:
    wrong = []
    for module in modules:
        parts = module.name.split(".")
        if parts[0] != "learner" or len(parts) < 3:
            continue
        later = set(ROOMS[ROOMS.index(parts[1]) + 1 :])
        used = {n.split(".")[2] for n in module.all_imports() if n.startswith("slipstream.learner.")}
        wrong += [(module.name, room) for room in used & later]
    assert wrong == []


def _module_of(names: set[str]) -> Callable[[str], str]:
    """The module that an imported name is, or is in; empty for one of another project."""

    def find(dotted: str) -> str:
        own = dotted.removeprefix("slipstream.")
        return own if own in names else own.rpartition(".")[0] if own.rpartition(".")[0] in names else ""

    return find


def test_only_the_learner_and_the_config_use_algo(modules: list[Any]) -> None:
    users = {m.name for m in modules if "algo" in m.parts()}
    assert users
    assert {name for name in users if not name.startswith(("learner.", "config."))} == set()


def test_the_config_uses_only_the_torch_free_modules_of_algo(modules: list[Any]) -> None:
    for module in modules:
        if module.name in TORCH_FREE_ALGO:
            assert not module.libraries(), module.name
        if module.name in TORCH_FREE_ALGO or module.part == "config":
            used = {".".join(n.split(".")[1:4]) for n in module.imports() if n.startswith("slipstream.algo.")}
            assert used <= TORCH_FREE_ALGO, module.name


def test_only_the_vllm_engine_imports_vllm(modules: list[Any]) -> None:
    """Its core, which feeds vLLM, and what vLLM loads in its workers."""
    users = {m.name for m in modules if "vllm" in m.libraries()}
    assert users == {"rollout.engines.vllm.vllm_core", "rollout.engines.vllm.vllm_worker"}


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
        ("import slipstream.protocol.messages", {"numpy"}),
        ("import slipstream.rewards.base, slipstream.rewards.reward_registry", set()),
        ("import slipstream.ledger.client", {"redis", "numpy"}),
        ("import slipstream.transport.zeromq.zmq", {"zmq", "numpy"}),
    ],
)
def test_importing_stays_light(statement: str, allowed: set[str]) -> None:
    code = f"{statement}\nimport sys; print('LOADED', *sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert loaded <= allowed
