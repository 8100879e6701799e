from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.rollout.engines.cpu.transformers import TransformersEngine
from slipstream.rollout.engines.factory import make_engine
from slipstream.rollout.engines.simulated import SimulatedEngine


def made(kind: str, **options):
    tree = {
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "run": {"steps": 1},
        "batch": {"group_size": 4},
        "sampling": {"max_new_tokens": 12},
        "rollout": {"engine": {"kind": kind, "max_sequences": 4, "options": options}},
    }
    return make_engine(build(tree)[0], Path("model"), context=40)


def test_an_engine_takes_its_size_from_the_config_and_the_rest_from_its_options():
    engine = made("simulated", step_seconds=0, vocab_size=16)
    assert isinstance(engine, SimulatedEngine)
    assert (engine.config.slots, engine.config.max_length) == (4, 12)
    assert (engine.config.step_seconds, engine.config.vocab_size) == (0.0, 16)
    engine = made("transformers", cache_policy="recompute")
    assert isinstance(engine, TransformersEngine)
    assert (engine.config.folder, engine.config.slots, engine.config.context) == (Path("model"), 4, 40)
    assert engine.config.cache_policy == "recompute"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("simulated", {"step_second": 1.0}, "unknown step_second.*step_seconds"),
        ("simulated", {"slots": 8}, "unknown slots"),
        ("simulated", {"step_seconds": "slow"}, "float.*step_seconds"),
        ("transformers", {"cache_policy": "keeep"}, "keeep.*cache_policy"),
        ("transformers", {"chunk_tokens": 1.5}, "int.*chunk_tokens"),
    ],
)
def test_an_option_that_an_engine_cannot_use_is_refused_at_the_start(kind, options, words):
    with pytest.raises(UserError, match=f"rollout.engine.options: .*{words}"):
        made(kind, **options)
