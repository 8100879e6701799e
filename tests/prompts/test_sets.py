"""Sets of prompts: length, split, fingerprint."""

import msgspec
import pytest

from slipstream.errors import UserError
from slipstream.prompts.load_prompts import load_prompts
from slipstream.prompts.sets import PromptSet
from slipstream.prompts.source_spec import DataSpec, LengthBudget

WIDE = LengthBudget(context=4096, max_new_tokens=8)


def load(path, tokenizer, budget=WIDE, evals=None, **spec):
    return load_prompts(
        DataSpec(kind="jsonl", path=path, template="plain", **spec), tokenizer, budget, evals=evals
    )


def texts(prompts: PromptSet):
    return [prompt.text for prompt in prompts]


def test_prompts_too_long_are_refused_at_load_and_others_get_their_room(tokenizer, jsonl):
    """Case 45."""
    path = jsonl([{"prompt": "x" * n, "id": f"len{n}"} for n in (20, 16, 12, 4)])
    prompts, _ = load(path, tokenizer, LengthBudget(context=16, max_new_tokens=8))
    assert [(p.index, len(p.prompt_ids), p.max_new_tokens) for p in prompts] == [(0, 12, 4), (1, 4, 8)]
    assert (prompts.report.refused, prompts.report.refused_ids) == (2, ["len20", "len16"])
    assert "2 refused as too long (len20, len16)" in str(prompts.report)


def test_min_new_tokens_decides_who_is_refused_and_three_are_named(tokenizer, jsonl):
    """Case 45."""
    path = jsonl([{"prompt": "x" * n} for n in (12, 12, 12, 12, 4)])
    prompts, _ = load(path, tokenizer, LengthBudget(context=16, max_new_tokens=8, min_new_tokens=5))
    assert len(prompts) == 1
    assert (prompts.report.refused, prompts.report.refused_ids) == (4, ["0", "1", "2"])


def test_set_with_every_prompt_refused_is_an_error(tokenizer, jsonl):
    """Case 45."""
    path = jsonl([{"prompt": "x" * 16}] * 5)
    with pytest.raises(UserError, match=r"every prompt.*5 refused.*\(0, 1, 2\).*raise the context"):
        load(path, tokenizer, LengthBudget(context=16, max_new_tokens=8))


def test_prompt_carries_the_ids_that_are_sent_and_its_columns(tokenizer, jsonl):
    prompts, _ = load(jsonl([{"prompt": "ab", "answer": "c", "tag": 1}]), tokenizer)
    prompt = prompts[0]
    assert prompt.prompt_ids == tuple(tokenizer.encode(["ab"])[0])
    assert (prompt.text, prompt.columns, prompt.max_new_tokens) == ("ab", {"answer": "c", "tag": 1}, 8)
    assert prompts[0] == prompt
    for outside in (1, -1):
        with pytest.raises(IndexError):
            prompts[outside]


def test_lone_surrogate_in_a_row_is_replaced_and_counted(tokenizer, tmp_path):
    """Case 52."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"prompt": "a\\ud83d", "answer": "1"}\n{"prompt": "b \xed\xa0\xbd", "answer": "\\ud83d\\ude00"}\n'
    )
    prompts, _ = load(str(path), tokenizer)
    assert texts(prompts) == ["a\ufffd", "b \ufffd"]
    assert prompts[1].columns == {"answer": "😀"}
    assert prompts.report.repaired == 2
    msgspec.msgpack.encode([prompts[0].text, prompts[1].columns])


def test_holdout_is_by_question_and_does_not_depend_on_order_or_duplicates(tokenizer, jsonl):
    rows = [{"prompt": f"q{i % 40}", "answer": str(i)} for i in range(100)]
    train, evals = load(jsonl(rows), tokenizer, eval_size=10)
    held = set(texts(evals["holdout"]))
    assert len(evals["holdout"]) == len(held) == 10
    assert held.isdisjoint(texts(train))
    assert len(train) == sum(row["prompt"] not in held for row in rows)
    assert train.report.held_out == 100 - len(train)
    _, other = load(jsonl(rows[::-1], "reversed.jsonl"), tokenizer, eval_size=10)
    assert set(texts(other["holdout"])) == held
    _, seeded = load(jsonl(rows), tokenizer, eval_size=10, seed=1)
    assert set(texts(seeded["holdout"])) != held


def test_same_question_with_other_spaces_is_the_same_question(tokenizer, jsonl):
    rows = [{"prompt": text} for i in range(20) for text in (f"what is {i}", f" what  is {i}\n")]
    train, evals = load(jsonl(rows), tokenizer, eval_size=5)
    assert len(train) == 30
    assert {t.strip() for t in texts(evals["holdout"])}.isdisjoint(" ".join(t.split()) for t in texts(train))


def test_questions_of_named_evaluation_sets_are_kept_out_of_training(tokenizer, jsonl):
    train_path = jsonl([{"prompt": f"q{i}"} for i in range(20)])
    spec = DataSpec(
        kind="jsonl", path=jsonl([{"prompt": "q3"}, {"prompt": "new"}], "e.jsonl"), template="plain"
    )
    train, evals = load(train_path, tokenizer, evals={"hard": spec}, eval_size=4)
    assert texts(evals["hard"]) == ["q3", "new"]
    assert len(evals["holdout"]) == 4
    assert len(train) == 20 - 4 - 1
    assert not {"q3", *texts(evals["holdout"])} & set(texts(train))
    with pytest.raises(UserError, match=r"evaluation\.sets\.holdout"):
        load(train_path, tokenizer, evals={"holdout": spec})


def test_holdout_that_leaves_nothing_to_train_is_refused(tokenizer, jsonl):
    path = jsonl([{"prompt": "same"}] * 5 + [{"prompt": "other"}])
    with pytest.raises(UserError, match=r"data\.holdout: 2, but there are 2 distinct"):
        load(path, tokenizer, eval_size=2)


def test_main_job_holds_out_sums_and_evaluates_on_unseen_two_digit_sums(tokenizer):
    train, evals = load_prompts(
        DataSpec(kind="arithmetic", template="chatml_no_system", eval_size=64),
        tokenizer,
        WIDE,
        evals={"two_digits": DataSpec(kind="arithmetic", options={"digits": 2}, limit=64)},
    )
    assert [len(train), len(evals["holdout"]), len(evals["two_digits"])] == [136, 64, 64]
    assert train[0].text.startswith("<|im_start|>user\n")
    assert train[0].text.endswith(" =<|im_end|>\n<|im_start|>assistant\n")


def test_reasoning_gym_sums_can_be_asked_in_the_short_form(tokenizer):
    prompts, _ = load_prompts(
        DataSpec(
            kind="reasoning_gym",
            name="chain_sum",
            options={"max_terms": 2, "max_digits": 1},
            limit=5,
            user_turn="{metadata[expression]} =",
            template="chatml_no_system",
        ),
        tokenizer,
        WIDE,
    )
    question = prompts[0].columns["metadata"]["expression"]
    assert prompts[0].text == f"<|im_start|>user\n{question} =<|im_end|>\n<|im_start|>assistant\n"


def test_fingerprint_follows_rows_order_template_and_tokenizer_alone(make_tokenizer, jsonl):
    """Case 85."""
    tokenizer = make_tokenizer()
    rows = [{"prompt": f"q{i}", "answer": str(i)} for i in range(6)]
    base = load(jsonl(rows), tokenizer)[0].fingerprint
    same = [dict(reversed(row.items())) for row in rows]
    assert load(jsonl(same, "b.jsonl"), tokenizer)[0].fingerprint == base
    budget = LengthBudget(context=512, max_new_tokens=99)
    assert load(jsonl(rows), tokenizer, budget)[0].fingerprint == base
    others = [
        load(jsonl(rows[::-1], "c.jsonl"), tokenizer)[0],
        load(jsonl(rows[:5], "d.jsonl"), tokenizer)[0],
        load(jsonl([*rows[:5], {**rows[5], "answer": "x"}], "e.jsonl"), tokenizer)[0],
        load(jsonl(rows), tokenizer, user_turn="{prompt}?")[0],
        load(jsonl(rows), make_tokenizer(adds_bos=True))[0],
        load(jsonl(rows), tokenizer, eval_size=2)[0],
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 7


def test_prompts_with_ids_that_the_model_lacks_are_refused_with_their_rows(tokenizer, jsonl):
    path = jsonl([{"prompt": "ab"}, {"prompt": "a<|im_start|>"}, {"prompt": "<|im_end|>b"}])
    beyond = tokenizer.hf.convert_tokens_to_ids("<|im_start|>")
    budget = LengthBudget(context=4096, max_new_tokens=8, vocabulary=beyond)
    prompts, _ = load(path, tokenizer, budget, control_tokens=True)
    assert texts(prompts) == ["ab"]
    assert f"2 refused for ids outside the model's vocabulary of {beyond} (1, 2)" in str(prompts.report)
    with pytest.raises(
        UserError, match=r"3 refused for ids outside the model's vocabulary of 1 .*another model's"
    ):
        load(path, tokenizer, LengthBudget(context=4096, max_new_tokens=8, vocabulary=1))


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '{"a": [1, {"b": NaN}]}', "1e999"])
def test_a_number_that_is_not_finite_is_refused_by_row_and_column(tokenizer, tmp_path, value):
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "gold": {value}}}\n')
    with pytest.raises(
        UserError, match=r"rows\.jsonl:2: column 'gold' holds (nan|inf|-inf), which is no finite"
    ):
        load(str(tmp_path / "rows.jsonl"), tokenizer)
