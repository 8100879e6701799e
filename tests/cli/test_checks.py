"""What a config asks of this machine is checked by one list before anything starts: `validate`, `up`, `resume`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cli.main import main
from slipstream.config import packages
from slipstream.errors import EXIT_OK, EXIT_USER
from slipstream.supervisor import supervisor

pytestmark = pytest.mark.usefixtures("clean_environment")
LAYER = "model.layers.0.mlp.down_proj.weight"


def make_model(folder: Path, vocabulary: int = 32, template: bool = True) -> Path:
    """A folder with all that can be looked at without torch; its only weights are zeros."""
    folder.mkdir(parents=True)
    described = {"model_type": "llama", "vocab_size": vocabulary, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
    header = {
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [vocabulary, 4], "data_offsets": [0, 512]},
        LAYER: {"dtype": "F32", "shape": [4, 8], "data_offsets": [512, 640]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(640))
    return folder


async def _started(self: object, life: object) -> int:
    raise AssertionError("the run was started")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A config of a model, a file of rows and a reward that are all here, with settings changed by path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor.Supervisor, "run", _started)
    make_model(tmp_path / "model")
    make_model(tmp_path / "mute", template=False)
    make_model(tmp_path / "other", vocabulary=16)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')

    def write(**changes: Any) -> str:
        tree: dict[str, Any] = {
            "run": {"root": str(tmp_path / "runs"), "steps": 1},
            "model": {"source": str(tmp_path / "model")},
            "data": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "holdout": 0},
            "reward": {"functions": [{"use": "last_number"}]},
        }
        for path, value in changes.items():
            *parents, key = path.split("__")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[key] = value
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
        return str(tmp_path / "c.yaml")

    return write


def test_a_config_whose_parts_are_here_is_ok(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", config()]) == EXIT_OK, capsys.readouterr().err


CASES: list[tuple[dict[str, Any], str]] = [
    ({"model__source": "/nowhere"}, "model.source: no folder '/nowhere'"),
    ({"model__source": "."}, "lacks config.json"),
    ({"model__context_length": 65}, "model.context_length 65 is above the model's 64"),
    ({"model__source": "mute"}, "data.template: chat, but mute has no chat template; set it to plain"),
    ({"learner__freeze": ["nope*"]}, "learner.freeze: 'nope*' matches none"),
    ({"learner__freeze": ["*"]}, "leaves nothing to train"),
    ({"learner__lora__rank": 9}, "learner.lora.rank 9"),
    ({"learner__lora__rank": 2, "learner__lora__targets": ["nope"]}, "learner.lora.targets: no linear layer 'nope'"),
    ({"learner__device": "cuda0"}, "learner.device 'cuda0' is no device; use auto, cpu, cuda or cuda:N"),
    ({"learner__start_from": "/nowhere"}, "learner.start_from '/nowhere': no such folder"),
    ({"learner__checkpoint__upload": "zz://x"}, "learner.checkpoint.upload 'zz://x' cannot be used"),
    (
        {"learner__reference__source": "/nowhere", "objective__kl_beta": 0.1},
        "learner.reference.source: no folder '/nowhere'",
    ),
    (
        {"learner__reference__source": "other", "objective__kl_beta": 0.1},
        "learner.reference.source 'other': its vocabulary is not that of model.source",
    ),
    ({"rollout__engine__options": {"nope": 1}}, "rollout.engine.options: unknown nope; this engine takes"),
    (
        {"rollout__engine__kind": "http", "rollout__engine__options": {"endpoints": ["x"]}},
        "rollout.engine.options: endpoints: 'x' is no http:// or https:// URL",
    ),
    ({"run__root": "rows.jsonl"}, "run.root 'rows.jsonl'"),
    ({"network__keys": "nowhere"}, "network.keys 'nowhere': no curve.key there; make one: slipstream keys nowhere"),
    ({"weights__transport": "file"}, "weights.transport file needs weights.folder"),
    ({"data__columns": {"prompt": "question"}}, "rows.jsonl:1: data.columns.prompt=question, but its columns are"),
    ({"data__user_turn": "{question}"}, "data.user_turn: '{question}' does not fit"),
    ({"data__template": "bare"}, "data.template: 'bare'"),
    ({"data__path": "nowhere.jsonl"}, "data.path: no file 'nowhere.jsonl'"),
    (
        {"evaluation__sets": {"hard": {"kind": "arithmetic", "options": {"nope": 1}}}},
        "evaluation.sets.hard.options",
    ),
    ({"reward__functions": [{"use": "nowhere.py:f"}]}, "reward.functions.0.use:"),
    (
        {"reward__functions": [{"use": "math", "options": {"answer_column": "solution"}}]},
        "data: reward 'math' cannot score 1 of 1 rows",
    ),
    ({"reward__functions": [{"use": "python"}]}, "rows.jsonl:1: the row has no column 'tests'; it has"),
    (
        {
            "reward__functions": [{"use": "exact_match", "options": {"answer_column": "solution"}}],
            "data__columns": {"solution": "answer"},
            "evaluation__sets": {"hard": {"kind": "arithmetic", "limit": 1}},
        },
        "evaluation.sets.hard: reward 'exact_match' cannot score 1 of 1 rows (row 0: the row has no column 'so",
    ),
    ({"buffer__order": "nowhere.py:f"}, "buffer.order"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["validate", "up"])
@pytest.mark.parametrize(("changes", "says"), CASES, ids=[says[:40] for _, says in CASES])
def test_what_is_wrong_is_said_before_anything_starts(
    changes: dict[str, Any],
    says: str,
    command: str,
    config: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main([command, config(**changes)]) == EXIT_USER
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["validate", "up"])
def test_broken_rows_are_named_a_few_of_many(
    command: str, config: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = config()
    lines = ['{"prompt": "a"}', "{", '{"prompt": ""}', '{"question": "a"}', "[1]", "{"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    assert main([command, path]) == EXIT_USER
    said = capsys.readouterr().err
    for number, what in (
        (2, "not a line of JSON"),
        (3, "the prompt is empty"),
        (4, "no prompt; its columns are question"),
    ):
        assert f"rows.jsonl:{number}: {what}" in said
    assert "rows.jsonl:5" not in said
    assert "more rows are broken" in said


def test_a_file_below_the_home_folder_is_found_by_all(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["validate", config(data__path="~/rows.jsonl")]) == EXIT_OK, capsys.readouterr().err


def test_a_store_that_cannot_be_written_is_said_before_the_run(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`validate` alone reaches out to nobody; `up` does."""
    path = config(learner__checkpoint__upload=f"file://{tmp_path}/rows.jsonl/below")
    assert main(["validate", path]) == EXIT_OK
    assert main(["up", path]) == EXIT_USER
    assert "learner.checkpoint.upload" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["validate", "up"])
@pytest.mark.parametrize(
    ("described", "says"),
    [
        (
            {"model_type": "qwen2_vl", "vision_config": {"depth": 2}},
            "model.source 'odd': a qwen2_vl model has several",
        ),
        (
            {"model_type": "gemma3", "text_config": {"max_position_embeddings": 64}},
            "a gemma3 model has several parts",
        ),
        (
            {"layer_types": ["linear_attention"], "model_type": "qwen3_next"},
            "is recurrent (layer_types: linear_att",
        ),
        ({"model_type": "mamba", "state_size": 16}, "a mamba model is recurrent"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30 caps the logits"),
        ({"attn_logit_softcapping": 50.0}, "set model.attention=eager"),
        (
            {"max_position_embeddings": None, "n_positions": 32},
            "model.context_length 48 is above the model's 32",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_config_alone(
    described: dict[str, Any],
    says: str,
    command: str,
    config: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path / "odd")
    content = json.loads((folder / "config.json").read_text()) | described
    (folder / "config.json").write_text(json.dumps(content))
    assert main([command, config(model__source="odd", model__context_length=48)]) == EXIT_USER
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["validate", "up"])
def test_numbers_that_are_not_finite_are_named_by_their_rows(
    command: str, config: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = config()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "answer": NaN}\n')
    assert main([command, path]) == EXIT_USER
    assert "rows.jsonl:2: column 'answer' holds nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "package", "says"),
    [
        (
            {"telemetry__tensorboard": True},
            "tensorboardX",
            "telemetry.tensorboard true: tensorboardX is not installed",
        ),
        ({"telemetry__wandb": "p"}, "wandb", "telemetry.wandb 'p': wandb is not installed here; pip install"),
        (
            {"telemetry__otlp_endpoint": "http://h:4318"},
            "opentelemetry.exporter.otlp.proto.http",
            "telemetry.otlp_endpoint 'http://h:4318'",
        ),
        ({"weights__transport": "ucx"}, "ucxx", "weights.transport ucx: ucxx is not installed here"),
        (
            {"evaluation__sets": {"hard": {"kind": "reasoning_gym", "name": "chain_sum", "limit": 4}}},
            "reasoning_gym",
            "evaluation.sets.hard.kind reasoning_gym: reasoning_gym is not installed here",
        ),
    ],
)
def test_a_missing_package_is_warned_of_by_validate_and_refused_by_up(
    changes: dict[str, Any],
    package: str,
    says: str,
    config: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A config may be checked on another machine than that of its run."""
    monkeypatch.setattr(packages, "_here", lambda name: name != package)
    path = config(**changes)
    assert main(["validate", path]) == EXIT_OK
    assert f"warning: {says}" in capsys.readouterr().err
    assert main(["up", path]) == EXIT_USER
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        ({"kind": "vllm"}, EXIT_USER),
        ({"kind": "http", "options": {"endpoints": ["http://127.0.0.1:1"]}}, EXIT_USER),
        ({"kind": "http", "options": {"endpoints": ["http://127.0.0.1:1"], "fixed_weights": True}}, EXIT_OK),
        ({"kind": "transformers"}, EXIT_OK),
    ],
)
def test_experts_that_a_version_joins_are_refused_where_the_engine_knows_only_the_files(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: Any, code: int
) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    text = json.dumps({name: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}).encode()
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(128))
    assert main(["validate", config(rollout__engine=engine)]) == code, capsys.readouterr().err
    if code:
        assert name in (said := capsys.readouterr().err)
        assert "set rollout.engine.kind=transformers" in said


@pytest.mark.process
def test_a_function_that_fails_on_the_first_row_is_told_before_a_run_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.py").write_text(
        "def has(completions, **rest):\n    return [float('1' in each[0]['content']) for each in completions]\n"
    )
    changes = ["reward.functions=[{use: 'chat.py:has'}]", "run.steps=1"]
    assert main(["up", "tiny-sorter", *changes]) == EXIT_USER
    said = capsys.readouterr().err
    assert "a trial call with the first row" in said
    assert "set the reward's `completions: messages` for lists of messages" in said
    assert not (tmp_path / "runs").exists()
