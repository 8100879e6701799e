"""Small tokenizers built on the spot, and a maker of JSONL files."""

import json

import pytest

from slipstream.run.tokens import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer():
    def make(template=CHATML, bos="<s>", adds_bos=False):
        """A byte-level tokenizer: one token for each byte, plus the special ones."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([bos, "<|im_start|>", "<|im_end|>"])
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
            )
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="<|im_end|>")
        hf.chat_template = template
        return Tokenizer(hf)

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
