"""Streams of prompts that resume exactly."""

from itertools import islice

import pytest

from slipstream.errors import UserError
from slipstream.prompts.load import load_prompts
from slipstream.prompts.spec import DataSpec, LengthBudget
from slipstream.prompts.stream import StreamedPrompts, stream_prompts

BUDGET = LengthBudget(context=64, max_new_tokens=8)
HUGE = DataSpec(kind="arithmetic", options={"terms": 4, "digits": 6}, limit=10**9, template="plain")


@pytest.fixture
def fifty(tokenizer):
    return load_prompts(DataSpec(kind="sort_digits", limit=50, template="plain"), tokenizer, BUDGET)[0]


def indices(loader, count):
    return [prompt.index for prompt in islice(loader, count)]


def test_stream_goes_over_epochs_without_repeats(fifty):
    """Case 83."""
    drawn = indices(stream_prompts(fifty, seed=5), 120)
    assert set(drawn[:50]) == set(drawn[50:100]) == set(range(50))
    assert drawn[:50] != drawn[50:100]
    assert len(set(drawn[100:])) == 20
    assert indices(stream_prompts(fifty, seed=5), 120) == drawn
    assert indices(stream_prompts(fifty, shuffle=False), 52) == [*range(50), 0, 1]


@pytest.mark.parametrize("stop", [0, 1, 49, 50, 73])
def test_stream_resumes_at_exactly_the_next_prompt(fifty, stop):
    whole = indices(stream_prompts(fifty, seed=1), 120)
    loader = stream_prompts(fifty, seed=1)
    assert indices(iter(loader), stop) == whole[:stop]
    state = loader.state_dict()
    resumed = stream_prompts(fifty, seed=1)
    resumed.load_state_dict(state)
    assert indices(resumed, 120 - stop) == whole[stop:]


def test_huge_source_is_streamed_without_being_read(tokenizer):
    loader = stream_prompts(StreamedPrompts(HUGE, tokenizer, BUDGET))
    iterator = iter(loader)
    drawn = list(islice(iterator, 20))
    assert len({prompt.text for prompt in drawn}) == 20
    assert max(prompt.index for prompt in drawn) > 10**8
    assert drawn[0].prompt_ids == tuple(tokenizer.encode([drawn[0].text])[0])
    resumed = stream_prompts(StreamedPrompts(HUGE, tokenizer, BUDGET))
    resumed.load_state_dict(loader.state_dict())
    assert list(islice(resumed, 5)) == list(islice(iterator, 5))


def test_stream_skips_questions_of_evaluation_sets(tokenizer):
    spec = DataSpec(kind="arithmetic", template="plain")
    _, evals = load_prompts(spec, tokenizer, BUDGET, evals={"e": DataSpec(kind="arithmetic", limit=60, seed=4)})
    loader = stream_prompts(StreamedPrompts(spec, tokenizer, BUDGET, evals["e"].keys))
    drawn = {prompt.text for prompt in islice(loader, 140)}
    assert len(drawn) == 140
    asked = {prompt.text.split("\n")[1].removesuffix("<|im_end|>") for prompt in evals["e"]}
    assert drawn.isdisjoint(asked)


def test_stream_refuses_the_state_of_other_prompts(fifty, tokenizer):
    """Case 85."""
    loader = stream_prompts(fifty)
    indices(iter(loader), 40)
    other, _ = load_prompts(DataSpec(kind="sort_digits", limit=30, template="plain"), tokenizer, BUDGET)
    resumed = stream_prompts(other)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="not those of the checkpoint"):
        next(iter(resumed))


def test_stream_of_nothing_but_refused_prompts_ends_with_the_cause(tokenizer):
    """Case 45: nothing waits for the refused."""
    narrow = LengthBudget(context=10, max_new_tokens=8)
    with pytest.raises(UserError, match="prompts in a row were refused"):
        next(iter(stream_prompts(StreamedPrompts(HUGE, tokenizer, narrow))))


def test_streamed_source_cannot_hold_out_a_part_of_itself(tokenizer):
    spec = DataSpec(kind="arithmetic", eval_size=5)
    with pytest.raises(UserError, match=r"data\.holdout: 5 of a streamed source"):
        StreamedPrompts(spec, tokenizer, BUDGET)


@pytest.mark.process
def test_stream_with_worker_processes_keeps_order_and_resumes(fifty):
    alone = indices(stream_prompts(fifty, seed=2), 40)
    loader = stream_prompts(fifty, seed=2, workers=2)
    iterator = iter(loader)
    assert indices(iterator, 15) == alone[:15]
    state = loader.state_dict()
    del iterator
    resumed = stream_prompts(fifty, seed=2, workers=2)
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    assert indices(iterator, 25) == alone[15:]
    del iterator
