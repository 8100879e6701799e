"""Rows as data sets publish them: conversations, parts, nested columns, texts that read like control tokens."""

from __future__ import annotations

import json

import pytest

from slipstream.errors import UserError
from slipstream.prompts.load_prompts import load_prompts
from slipstream.prompts.raw_rows import read_row
from slipstream.prompts.source_spec import DataSpec, LengthBudget

WIDE = LengthBudget(context=4096, max_new_tokens=8)


def question(raw, **spec):
    return read_row(raw, DataSpec(kind="jsonl", **spec), "row 1").question


def user(content):
    return {"role": "user", "content": content}


def test_sharegpt_turns_are_messages_and_the_answer_at_the_end_is_left_out():
    turns = [("system", "Be brief."), ("human", "2 + 2?"), ("gpt", "4")]
    row = read_row(
        {"conversations": [{"from": who, "value": text} for who, text in turns]},
        DataSpec(kind="jsonl"),
        "row 1",
    )
    assert row.question == [{"role": "system", "content": "Be brief."}, user("2 + 2?")]
    assert row.dropped


def test_parts_of_type_text_are_joined():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert question({"prompt": [user(parts)]}) == [user("a b")]
    with pytest.raises(UserError, match=r"row 1: a message with a part of type 'image_url'"):
        question({"prompt": [user([{"type": "image_url", "image_url": {"url": "x"}}])]})


def test_turns_of_tools_without_a_text_pass():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    turns = [user("q"), call, {"role": "tool", "content": None, "tool_calls": None}]
    assert question({"messages": turns}) == [
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": ""},
    ]
    with pytest.raises(UserError, match=r"row 1: a message without role and text"):
        question({"messages": [user(None)]})


def test_a_row_may_go_on_from_the_assistant_s_turn(tokenizer, jsonl):
    rows = [{"messages": [user("q"), {"role": "assistant", "content": "It is"}]}]
    (one,) = load_prompts(DataSpec(kind="jsonl", path=jsonl(rows), final_assistant="prefill"), tokenizer, WIDE)[
        0
    ]
    assert one.text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nIt is"
    (other,) = load_prompts(DataSpec(kind="jsonl", path=jsonl(rows)), tokenizer, WIDE)[0]
    assert other.text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("raw", "place", "value"),
    [
        ({"reward_model": {"ground_truth": "72"}}, "reward_model.ground_truth", "72"),
        ({"reward_model": '{"ground_truth": "72"}'}, "reward_model.ground_truth", "72"),
        ({"solutions": [{"x": 1}, {"x": 2}]}, "solutions.-1.x", 2),
        ({"a.b": "whole", "a": {"b": "inner"}}, "a.b", "whole"),
    ],
)
def test_a_column_reaches_into_structs_and_json_text(raw, place, value):
    row = read_row({"prompt": "q", **raw}, DataSpec(kind="jsonl", columns={"answer": place}), "row 1")
    assert row.columns["answer"] == value


def test_a_column_that_is_declared_to_be_a_number_or_json_is_one():
    spec = DataSpec(kind="jsonl", types={"price": "number", "meta": "json"})
    row = read_row({"prompt": "q", "price": "1.50", "meta": '{"a": [1]}', "code": "007"}, spec, "row 1")
    assert row.columns == {"price": 1.5, "meta": {"a": [1]}, "code": "007"}
    with pytest.raises(UserError, match=r"row 1: data\.types\.price=number, but it holds '007'"):
        read_row({"prompt": "q", "price": "007"}, spec, "row 1")


def test_a_place_that_is_not_there_says_what_is():
    with pytest.raises(UserError, match=r"data\.columns\.answer=a\.c, but 'a' holds b"):
        read_row({"prompt": "q", "a": {"b": 1}}, DataSpec(kind="jsonl", columns={"answer": "a.c"}), "row 1")


@pytest.mark.parametrize("template", ["chat", "chatml_no_system", "plain", "Q: {prompt}"])
def test_the_text_of_a_control_token_is_text(tokenizer, jsonl, template):
    """The stop token's text too: its ids are those of any text, and only the template writes control tokens."""
    path = jsonl([{"prompt": "What does <|im_end|> mean?"}, {"prompt": "What does it mean?"}])
    (odd, even), _ = load_prompts(DataSpec(kind="jsonl", path=path, template=template), tokenizer, WIDE)
    control = set(tokenizer.hf.all_special_ids) | {tokenizer.hf.convert_tokens_to_ids("<|im_start|>")}
    count = [sum(each in control for each in prompt.prompt_ids) for prompt in (odd, even)]
    assert count[0] == count[1]
    assert tokenizer.decode(odd.prompt_ids, skip_special=False) == odd.text
    assert "<|im_end|> mean?" in odd.text


def test_who_wants_control_tokens_in_rows_has_them(tokenizer, jsonl):
    path = jsonl([{"prompt": "a<|im_end|>"}])
    spec = DataSpec(kind="jsonl", path=path, template="plain", control_tokens=True)
    (one,) = load_prompts(spec, tokenizer, WIDE)[0]
    assert one.prompt_ids[-1] == tokenizer.hf.convert_tokens_to_ids("<|im_end|>")


def test_the_report_says_what_was_read_as_text_and_left_out(tokenizer, jsonl):
    answered = [user("q"), {"role": "assistant", "content": "a"}]
    path = jsonl([{"prompt": "a<|im_end|>"}, {"messages": answered}])
    report = str(load_prompts(DataSpec(kind="jsonl", path=path), tokenizer, WIDE)[0].report)
    assert "1 with the text of a control token, read as text (data.control_tokens)" in report
    assert "1 without the assistant's turn at their end (data.final_assistant)" in report


def test_a_template_that_refuses_a_turn_names_the_row_and_the_mend(make_tokenizer, jsonl):
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    rows = [{"messages": [{"role": "system", "content": "S"}, user("q")]}]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: data\.template: .*System role .*chatml_no_system"):
        load_prompts(DataSpec(kind="jsonl", path=jsonl(rows)), make_tokenizer(template), WIDE)


def test_options_that_are_not_the_template_s_own_are_refused(tokenizer, jsonl):
    spec = DataSpec(kind="jsonl", path=jsonl([{"prompt": "q"}]), template_options={"tokenize": True})
    with pytest.raises(UserError, match=r"data\.template_options\.tokenize: is set by slipstream"):
        load_prompts(spec, tokenizer, WIDE)


def test_messages_written_down_as_json_are_messages_and_other_lists_are_text():
    turns = [{"role": "user", "content": "q"}]
    assert question({"prompt": json.dumps(turns)}) == turns
    assert question({"prompt": "[1, 2]"}) == "[1, 2]"
    assert question({"prompt": '[{"a": 1}]'}) == '[{"a": 1}]'


def test_turns_as_other_tools_write_them():
    turns = [
        {"role": "user", "value": "a"},
        {"from": "function_call", "value": "f()"},
        {"from": "human", "value": "b"},
    ]
    assert [each["content"] for each in question({"messages": turns})] == ["a", "f()", "b"]
    assert question({"messages": [user(["x", {"type": "input_text", "text": "y"}])]}) == [user("xy")]
