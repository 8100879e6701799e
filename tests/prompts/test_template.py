"""How a question becomes the ids that are sent."""

import pytest

from slipstream.errors import UserError
from slipstream.prompts.raw_rows import read_row
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.template import Template


def render(tokenizer, row, **spec):
    spec = DataSpec(kind="jsonl", **spec)
    return Template(spec, tokenizer).render(read_row(row, spec, "row 0"), "row 0")


def test_chat_template_is_applied_once_and_opens_the_assistants_turn(tokenizer):
    text = render(tokenizer, {"prompt": "6 + 5 ="})
    assert text == "<|im_start|>user\n6 + 5 =<|im_end|>\n<|im_start|>assistant\n"


def test_chatml_by_hand_equals_the_template_without_its_default_system_turn(tokenizer):
    """The main job's prompt."""
    text = render(tokenizer, {"prompt": "6 + 5 ="}, template="chatml_no_system")
    assert text == "<|im_start|>user\n6 + 5 =<|im_end|>\n<|im_start|>assistant\n"


def test_system_turn_is_added_where_the_row_has_none(tokenizer):
    own = [{"role": "system", "content": "row"}, {"role": "user", "content": "q"}]
    for template in ("chat", "chatml_no_system"):
        assert render(tokenizer, {"prompt": "q"}, system="S", template=template).startswith(
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq"
        )
        assert "S" not in render(tokenizer, {"prompt": own}, system="S", template=template)


def test_rows_of_messages_are_rendered_turn_by_turn(tokenizer):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    text = render(tokenizer, row, user_turn="[{prompt}]")
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\n[c]<|im_end|>\n<|im_start|>assistant\n"
    )


def test_plain_and_format_strings_use_columns(tokenizer):
    row = {"prompt": "x{y}", "answer": "1", "metadata": {"expression": "1 + 1"}}
    assert render(tokenizer, row, template="plain") == "x{y}"
    assert render(tokenizer, row, template="plain", user_turn="{metadata[expression]} =") == "1 + 1 ="
    assert render(tokenizer, row, template="{system}|{{}}|{prompt}|", system="S", user_turn="Q{prompt}") == (
        "S|{}|Qx{y}|"
    )


def test_template_options_reach_the_chat_template(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ messages[0].content }}{% if think %}T{% endif %}")
    assert render(tokenizer, {"prompt": "q"}, template_options={"think": True}) == "qT"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages[0].content }}{% if think is defined %}T{% endif %}", "it reads think"),
        (
            "{% for m in messages %}{% generation %}{{ bos_token }}{% endgeneration %}{% break %}{% endfor %}"
            "{% if 0 %}{{ raise_exception('no') }}{% endif %}",
            "it reads nothing else",
        ),
    ],
)
def test_an_option_that_the_chat_template_does_not_read_is_refused(make_tokenizer, template, told):
    with pytest.raises(UserError, match=rf"data\.template_options\.thinking: .*no variable.*{told}"):
        render(make_tokenizer(template=template), {"prompt": "q"}, template_options={"thinking": True})


def test_a_system_turn_of_the_config_that_a_template_refuses_is_told_with_its_setting(make_tokenizer):
    refusing = make_tokenizer(
        template="{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(UserError, match=r"row 0: data\.template: .*leave data\.system empty"):
        render(refusing, {"prompt": "q"}, system="Be brief.")


@pytest.mark.parametrize(
    ("row", "spec", "message"),
    [
        ({"prompt": "q"}, {"template": "chatlm"}, "data.template: 'chatlm'.*chatml_no_system"),
        ({"prompt": "q"}, {"template": "{question}"}, r"data.template.*row 0.*columns are prompt"),
        ({"prompt": "q"}, {"user_turn": "{"}, "data.user_turn"),
        ({"prompt": "q"}, {"user_turn": "{}"}, "data.user_turn"),
        ({"prompt": "q"}, {"template": "plain", "system": "S"}, "data.system"),
        (
            {"prompt": "q"},
            {"columns": {"prompt": "question"}},
            "data.columns.prompt=question.*columns are prompt",
        ),
        ({"question": "q"}, {}, "row 0: no prompt; its columns are question"),
        ({"prompt": " "}, {}, "row 0: the prompt is empty"),
        ({"prompt": 3}, {}, "row 0: the prompt is a int"),
        ({"prompt": [{"role": "user"}]}, {}, "a message without role and text"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, {}, "no message before the assistant"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            {"template": "plain"},
            "use chat for rows of messages",
        ),
    ],
)
def test_users_mistakes_name_the_row_or_setting(tokenizer, row, spec, message):
    with pytest.raises(UserError, match=message):
        render(tokenizer, row, **spec)


def test_missing_or_refusing_chat_template_is_the_users_matter(make_tokenizer):
    with pytest.raises(UserError, match=r"data\.template: chat.*no chat template"):
        render(make_tokenizer(template=None), {"prompt": "q"})
    refusing = make_tokenizer(template="{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match="no system role"):
        render(refusing, {"prompt": "q"})


def test_a_renamed_column_keeps_its_own_name_beside_ours():
    raw = {"question": "q", "answer": "steps", "solution": "4"}
    row = read_row(raw, DataSpec(kind="jsonl", columns={"prompt": "question", "answer": "solution"}), "row 0")
    assert row.columns == {"question": "q", "answer": "4", "solution": "4"}


def test_columns_are_mapped_and_made_fit_for_messages():
    import datetime

    import msgspec

    raw = {"q": "a", "gold": 2**70, "when": datetime.date(2026, 1, 2), "t": (1, {2: None}), "set": {1}}
    row = read_row(raw, DataSpec(kind="jsonl", columns={"prompt": "q", "answer": "gold"}), "row 0")
    assert row.question == "a"
    assert row.columns == {
        "q": "a",
        "gold": str(2**70),
        "answer": str(2**70),
        "when": "2026-01-02",
        "t": [1, {"2": None}],
        "set": "{1}",
    }
    msgspec.msgpack.encode(row.columns)
    assert read_row({"prompt": "x", "n": 5}, DataSpec(kind="jsonl"), "r").columns == {"n": 5}


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_prompt_has_at_most_one_bos_whoever_brings_it(make_tokenizer, template_has_bos, adds_bos):
    """Case 44."""
    template = ("{{ bos_token }}" if template_has_bos else "") + "U:{{ messages[0].content }}"
    tokenizer = make_tokenizer(template=template, adds_bos=adds_bos)
    ids = tokenizer.encode([tokenizer.chat([{"role": "user", "content": "hi"}], {})])[0]
    bos = tokenizer.hf.bos_token_id
    assert ids.count(bos) == (1 if template_has_bos or adds_bos else 0)
    assert ids[0] == bos or bos not in ids
    assert tokenizer.decode(ids) == "U:hi"


def test_doubled_bos_in_the_text_itself_is_reduced_to_one(make_tokenizer):
    """Case 44."""
    tokenizer = make_tokenizer(adds_bos=True)
    assert tokenizer.encode(["<s><s>a"]) == tokenizer.encode(["a"])
