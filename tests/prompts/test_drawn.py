"""Prompts that are drawn from a stream: by their place, in order, again, and from a checkpoint's state."""

from __future__ import annotations

import json

import pytest

from slipstream.config.load import build
from slipstream.errors import ConfigError, UserError
from slipstream.prompts import drawn as stream
from slipstream.prompts.drawn import StreamedPrompts
from slipstream.prompts.load_prompts import load_prompts
from slipstream.prompts.source_spec import DataSpec, LengthBudget

BUDGET = LengthBudget(context=64, max_new_tokens=8)


@pytest.fixture
def rows(tmp_path):
    """A file of 300 rows, every seventh too long; blank lines in between."""
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "x" * 200 if n % 7 == 3 else f"add {n}", "answer": n} for n in range(300)]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture(params=["jsonl", "huggingface"])
def kind(request):
    if request.param == "huggingface":
        pytest.importorskip("datasets")
    return request.param


@pytest.fixture
def opened(rows, tokenizer, monkeypatch):
    """A stream over the file, with little room for what was drawn."""
    monkeypatch.setattr(stream, "KEPT", 20)
    monkeypatch.setattr(stream, "_MARK_EVERY", 16)

    def open_stream(kind: str = "jsonl", limit: int = 250, budget: LengthBudget = BUDGET, **more):
        spec = DataSpec(kind=kind, path=str(rows), template="plain", limit=limit, stream=True, **more)
        prompts, _ = load_prompts(spec, tokenizer, budget)
        assert isinstance(prompts, StreamedPrompts)
        return prompts

    return open_stream


def answers(prompts, places):
    return [prompts[place].columns["answer"] for place in places]


USABLE = [n for n in range(300) if n % 7 != 3]


def test_a_prompt_is_the_usable_row_at_its_place_whatever_was_asked_before(opened, kind):
    prompts = opened(kind)
    assert len(prompts) == 250
    asked = [0, 1, 5, 3, 249, 240, 17, 200, 199, 0]
    assert answers(prompts, asked) == [USABLE[place] for place in asked]
    assert [prompts[place].index for place in asked] == asked
    assert prompts.report.refused_ids
    with pytest.raises(IndexError):
        prompts[250]


def test_little_is_kept_and_little_is_read_again(opened):
    prompts = opened()
    answers(prompts, range(250))
    assert len(prompts._kept) == 20
    read = prompts.report.rows
    assert answers(prompts, [235, 100]) == [USABLE[235], USABLE[100]]
    assert prompts.report.rows - read < 40  # from the nearest mark, not from the start


def test_a_checkpoint_s_state_is_where_another_process_takes_up(opened, kind, monkeypatch):
    """Cases 84 and 85: the state saves time and changes no prompt; that of other prompts is left alone."""
    state = json.loads(json.dumps(opened(kind).state_before(200)))
    resumed = opened(kind)
    resumed.load_state(state)
    assert answers(resumed, [200, 201, 249]) == [USABLE[place] for place in (200, 201, 249)]
    assert resumed.report.rows < 70
    assert answers(resumed, [3]) == [USABLE[3]]  # before the state, as for a ticket that was issued again
    other = opened(kind, user_turn="{prompt}!")
    other.load_state(state)
    assert answers(other, [200]) == [USABLE[200]]
    assert other.report.rows > 200
    assert other.fingerprint != resumed.fingerprint == opened(kind).fingerprint


def test_a_set_that_was_read_through_has_nothing_to_keep(rows, tokenizer):
    prompts, _ = load_prompts(DataSpec(kind="jsonl", path=str(rows), template="plain"), tokenizer, BUDGET)
    assert prompts.state_before(7) is None
    assert prompts.shuffled


def test_questions_of_evaluation_sets_are_passed_over(rows, tokenizer, tmp_path):
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "add 1", "answer": 1}))
    spec = DataSpec(kind="jsonl", path=str(rows), template="plain", limit=9, stream=True)
    evals = {"e": DataSpec(kind="jsonl", path=str(tmp_path / "eval.jsonl"), template="plain")}
    prompts, sets = load_prompts(spec, tokenizer, BUDGET, evals)
    assert answers(prompts, range(4)) == [0, 2, 4, 5]
    assert len(sets["e"]) == 1


def test_a_stream_that_ends_too_early_says_how_long_it_is(opened):
    prompts = opened(limit=1000)
    with pytest.raises(UserError, match=f"ended after {len(USABLE)} prompts.*set data.limit={len(USABLE)}"):
        prompts[999]


def test_a_broken_row_is_named_by_its_line(opened, rows):
    rows.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not a line of JSON"):
        opened()[1]


def test_nothing_but_refused_rows_ends_with_the_cause(opened, monkeypatch):
    """Case 45: nothing waits for the refused."""
    monkeypatch.setattr(stream, "MAX_SKIPPED", 50)
    with pytest.raises(UserError, match="50 prompts in a row were refused"):
        opened(budget=LengthBudget(context=9, max_new_tokens=8, min_new_tokens=8))[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "arithmetic"}, "data.stream: kind arithmetic is not streamed"),
        ({"limit": None}, "set data.limit"),
        ({"holdout": 8}, "set data.holdout to 0"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(changes, says):
    data = {"kind": "jsonl", "path": "rows.jsonl", "stream": True, "limit": 10, "holdout": 0} | changes
    with pytest.raises(ConfigError, match=says):
        build({"data": data, "reward": {"functions": [{"use": "last_number"}]}})
