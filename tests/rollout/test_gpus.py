from __future__ import annotations

import pytest

from slipstream.rollout.replica_parts import _gpus


@pytest.mark.parametrize(
    ("kind", "options", "driver", "count"),
    [
        ("vllm", {}, True, 1),
        ("vllm", {"tensor_parallel": 4, "data_parallel": 2}, True, 8),
        ("vllm", {}, False, 0),
    ],
)
def test_gpus_are_those_that_the_engine_takes(config, tmp_path, kind, options, driver, count):
    engine = config.rollout.engine.model_copy(update={"kind": kind, "options": options})
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    assert _gpus(changed, tmp_path if driver else tmp_path / "none") == count
    assert _gpus(config, tmp_path) == 0  # another engine
