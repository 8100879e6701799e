from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.models.resolve import resolve
from slipstream.models.tiny_sorter import STOP_ID, build_tiny_sorter, sorting_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("tiny-sorter", tmp_path_factory.mktemp("cache"))


def test_half_knows_how_to_sort(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 529_024
    torch.manual_seed(1)
    ids = sorting_batch(256)
    made = model.generate(ids[:, :7], max_new_tokens=7, do_sample=True, top_k=0, top_p=1.0)
    correct = (made[:, 7:] == ids[:, 7:]).all(dim=1).float().mean().item()
    assert 0.2 < correct < 0.7


def test_tokenizer_is_one_id_per_character(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("_$09>*").input_ids == [0, 1, 2, 11, 14, 15]
    assert tokenizer("9x\n1").input_ids == [11, 0, 0, 3]
    assert tokenizer.decode(tokenizer("1>2$").input_ids) == "1>2$"
    assert tokenizer.decode(tokenizer("1>2$").input_ids, skip_special_tokens=True) == "1>2"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, STOP_ID)


def test_same_seed_makes_the_same_weights_and_leaves_the_random_state(folder: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    build_tiny_sorter(tmp_path, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    again, first = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_folder_is_made_once(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny-sorter", folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
