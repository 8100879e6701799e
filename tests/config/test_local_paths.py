"""A recorded config is good from any folder."""

from __future__ import annotations

from slipstream.config.local_paths import absolute


def test_local_paths_become_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    tree = absolute(
        {
            "run": {"root": "runs"},
            "network": {"keys": None},
            "data": {"path": "rows.jsonl"},
            "evaluation": {"sets": {"a": {"path": "rows*.jsonl"}, "b": {"path": "openai/gsm8k"}}},
            "model": {"source": "model"},
            "reward": {"functions": [{"use": "mine.py:score"}, {"use": "exact_match"}, {"use": "pack.mod:fn"}]},
            "learner": {"start_from": None, "reference": {"source": "org/name"}},
            "buffer": {"order": "fifo"},
        }
    )
    assert tree == {
        "run": {"root": f"{tmp_path}/runs"},
        "network": {"keys": None},
        "data": {"path": f"{tmp_path}/rows.jsonl"},
        "evaluation": {"sets": {"a": {"path": f"{tmp_path}/rows*.jsonl"}, "b": {"path": "openai/gsm8k"}}},
        "model": {"source": f"{tmp_path}/model"},
        "reward": {
            "functions": [{"use": f"{tmp_path}/mine.py:score"}, {"use": "exact_match"}, {"use": "pack.mod:fn"}]
        },
        "learner": {"start_from": None, "reference": {"source": "org/name"}},
        "buffer": {"order": "fifo"},
    }
