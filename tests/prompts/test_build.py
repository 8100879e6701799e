"""From a config and a model's folder to the room that prompts have."""

import json

import pytest

from slipstream.config.load import build
from slipstream.errors import UserError
from slipstream.prompts.build import build_prompts, context_length


def config(**model):
    tree = {
        "model": {"source": "tiny-sorter", **model},
        "data": {"kind": "arithmetic", "limit": 8, "holdout": 0, "template": "plain"},
        "reward": {"functions": [{"use": "last_number"}]},
        "sampling": {"max_new_tokens": 8},
    }
    return build(tree)[0]


@pytest.mark.parametrize("described", [{"n_positions": 64}, {"text_config": {"max_position_embeddings": 64}}])
def test_the_context_is_the_models_whatever_it_calls_it(tmp_path, described):
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert context_length(config(), tmp_path) == 64
    assert context_length(config(context_length=32), tmp_path) == 32
    with pytest.raises(UserError, match=r"model\.context_length 65 is above the model's 64"):
        context_length(config(context_length=65), tmp_path)


def test_prompts_are_held_against_the_embedding(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"n_positions": 64, "vocab_size": 2}))
    with pytest.raises(UserError, match="8 refused for ids outside the model's vocabulary of 2"):
        build_prompts(config(), tokenizer, tmp_path)
