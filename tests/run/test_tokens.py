"""Text to ids and back."""

import json
import subprocess
import sys

import msgspec
import pytest

from slipstream.errors import UserError
from slipstream.run.tokens import Tokenizer, load_tokenizer
from slipstream.text import REPLACEMENT, repair


@pytest.fixture(scope="module")
def hf():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def test_completion_cut_inside_a_character_decodes_with_a_replacement_and_can_be_sent(hf):
    """Case 52."""
    tokenizer = Tokenizer(hf)
    ids = tokenizer.encode(["ok 😀"])[0]
    for kept in range(len(ids) - 3, len(ids)):
        text = tokenizer.decode(ids[:kept])
        assert text.startswith("ok ")
        assert set(text[3:]) == {REPLACEMENT}
        msgspec.msgpack.encode(text)
    assert tokenizer.decode(ids) == "ok 😀"


def test_ids_outside_of_the_vocabulary_decode_to_a_replacement(hf):
    tokenizer = Tokenizer(hf)
    a, b = tokenizer.encode(["ab"])[0]
    assert tokenizer.decode([a, 99_999, b, -1]) == f"a{REPLACEMENT}b{REPLACEMENT}"
    assert tokenizer.decode([]) == ""


def test_special_tokens_are_hidden_unless_asked_for(hf):
    tokenizer = Tokenizer(hf)
    ids = [*tokenizer.encode(["a"])[0], hf.eos_token_id]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special=False) == "a</s>"


@pytest.mark.parametrize(
    ("text", "mended"),
    [("plain é😀", "plain é😀"), ("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "😀"), ("\ude00", "\ufffd")],
)
def test_repair_joins_pairs_and_replaces_lone_surrogates(text, mended):
    """Case 52."""
    assert repair(text) == mended


def test_encode_neither_cuts_nor_pads_even_when_the_backend_was_told_to(hf):
    tokenizer = Tokenizer(hf)
    hf(["a", "bbb"], padding=True, truncation=True, max_length=2)
    assert [len(ids) for ids in tokenizer.encode(["a", "bbbbb"])] == [1, 5]


def test_identity_changes_with_the_tokenizer_but_not_with_padding_state(hf):
    before = Tokenizer(hf).identity
    hf(["a", "bbb"], padding=True)
    assert Tokenizer(hf).identity == before
    hf.chat_template = "{{ messages }}"
    try:
        assert Tokenizer(hf).identity != before
    finally:
        hf.chat_template = None


def test_stop_ids_come_from_the_tokenizer_and_from_both_configs_of_the_folder(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).stop_ids == (hf.eos_token_id,)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, hf.eos_token_id]}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.stop_ids == (5, 7, hf.eos_token_id)
    assert loaded.encode(["a"]) == Tokenizer(hf).encode(["a"])
    assert loaded.identity == load_tokenizer(str(tmp_path)).identity


def test_folder_without_a_tokenizer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"model\.source.*no tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_broken_generation_config_is_one_line(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json is not JSON"):
        load_tokenizer(str(tmp_path))


def test_importing_tokens_and_prompts_loads_no_heavy_library():
    code = (
        "import sys, slipstream.run.tokens, slipstream.prompts.load_prompts, slipstream.prompts.sets\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets', 'reasoning_gym', 'torchdata', 'numpy'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_a_sentencepiece_model_alone_asks_for_its_package(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("slipstream.run.tokens.find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"SentencePiece .* pip install 'slipstream\[sentencepiece\]'"):
        load_tokenizer(str(tmp_path))
