"""Weights between processes that share no memory, as far as they know: a run trains over every link."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.weights.links.tcp.tcp_wire import FRAME_BYTES

SCORER = """
def length(prompts, completions, **columns):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.mark.parametrize("transport", ["tcp", "file"])
def test_a_run_trains_over_a_link_between_hosts(transport, stack, simulated, tmp_path):
    """Two replicas of one other host: one of them pulls, both serve, and nothing stays behind."""
    folder = tmp_path / "store"
    settings = [f"weights.transport={transport}", "rollout.replicas=2", "weights.host=elsewhere"]
    run = stack().up(*simulated, *settings, f"weights.folder={folder}", "run.steps=5")
    pulled = run.until(
        lambda: list(Path("/dev/shm").glob(f"slipstream-relay.{run.name}*.lock")), 300, "a relay"
    )
    assert len(pulled) == 1
    assert run.wait() == 0, run.text[-4000:]
    assert len(run.assert_exactly_once()) == 10
    assert "waiting for usable weights" not in run.text
    assert "Traceback" not in run.text
    run.assert_gone()
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def large_llama(folder: Path) -> int:
    """A random Llama that reads the characters of the tiny sorter; returns the bytes of its weights in 16 bits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipstream.models.tiny_sorter import CHARACTERS, CONTEXT, PAD_ID, STOP_ID, write_character_tokenizer

    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(CHARACTERS),
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": STOP_ID, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=False))
    model.save_pretrained(folder)
    write_character_tokenizer(folder)
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def test_a_run_with_a_key_trains_a_model_larger_than_a_frame_over_tcp(stack, quick, tmp_path):
    """`up` makes the key; every version, from the first on, comes in several encrypted frames of the real size."""
    assert large_llama(tmp_path / "large") > FRAME_BYTES
    (tmp_path / "scorer.py").write_text(SCORER)
    settings = ["weights.transport=tcp", "run.steps=3", f"reward.functions.0.use={tmp_path}/scorer.py:length"]
    run = stack().up(
        *quick, *settings, f"model.source={tmp_path / 'large'}", "learner.optimizer.warmup_steps=0"
    )
    assert run.wait() == 0, run.text[-4000:]
    assert (run.folder / "keys" / "curve.key").is_file()
    assert [step["stepped"] for step in run.steps()] == [True] * 3
    assert len(run.assert_exactly_once()) == 6
    assert "waiting for usable weights" not in run.text
    assert "Traceback" not in run.text
    run.assert_gone()
