"""One contract of a group, with every line of it broken once."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.config.load import build
from slipstream.contract import Contract, GroupTerms, contract_of
from slipstream.errors import MessageError
from slipstream.ledger.records import RunTerms
from slipstream.protocol.messages import Group, GroupArrays, Sample, encode_group
from slipstream.rewards.base import MAX_COMPONENTS

TERMS = GroupTerms(
    run="r", vocabulary=10, context=6, completion=4, group_size=2, head=2, rewards=("math", "style")
)


def group(*, scored: bool = True, **changes) -> Group:
    rewards = [{"reward": 1.0, "components": {"math": 1.0, "style.tone": 0.5}}, {"unscored": "timeout"}]
    samples = [
        Sample(tokens=2, finish="stop", versions=[(3, 2)], text="", **(more if scored else {}))
        for more in rewards
    ]
    fields = {"run": "r", "ticket": 7, "attempt": 0, "prompt_index": 1, "owner": "o", "admitted_version": 3}
    return Group(**{**fields, "samples": samples, "head": 2, **changes})


def arrays(**changes) -> GroupArrays:
    fields = {
        "prompt_ids": np.array([1, 2], np.int32),
        "token_ids": np.array([3, 4, 5, 9], np.int32),
        "logprobs": np.array([-0.5, 0.0, -1.0, -9.0], np.float32),
        "head_ids": np.array([[3, 1], [4, 1], [5, 0], [9, 1]], np.int32),
        "head_logprobs": np.array([[-0.5, -1], [0.0, -9], [-1, -np.inf], [-9, -9.5]], np.float32),
    }
    return GroupArrays(**{**fields, **changes})


def sample(**changes) -> list[Sample]:
    fields = {"tokens": 2, "finish": "stop", "versions": [(3, 2)], "text": "", "reward": 1.0}
    return [Sample(**{**fields, **changes}), *group().samples[1:]]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_group_of_the_run_is_read():
    read, numbers = Contract(TERMS).read(encode_group(group(), arrays()), scored=True)
    assert (read.ticket, numbers.token_ids.tolist()) == (7, [3, 4, 5, 9])


HEADS = arrays().head_logprobs
BROKEN = {
    "another run": ({"run": "other"}, {}, "this is run 'r'"),
    "too few samples": (
        {"samples": sample()[:1]},
        {"token_ids": ids(3, 4)},
        "1 samples, a group of this run has 2",
    ),
    "a head of another width": ({"head": 1}, {}, "1 likeliest tokens for each, this run has 2"),
    "an empty prompt": ({}, {"prompt_ids": ids()}, "prompt_ids: empty"),
    "a prompt id over the vocabulary": ({}, {"prompt_ids": ids(1, 10)}, r"prompt_ids\[1\]: id 10, .* has 10"),
    "a token id over the vocabulary": ({}, {"token_ids": ids(3, 4, 5, 99)}, r"token_ids\[3\]: id 99"),
    "a head id over the vocabulary": ({}, {"head_ids": ids(*[10] * 8).reshape(4, 2)}, r"head_ids\[0\]: id 10"),
    "beyond the context": ({}, {"prompt_ids": ids(*[1] * 5)}, r"5 \+ 2 tokens, the context holds 6"),
    "a positive logprob": (
        {},
        {"logprobs": floats(-1, 1.5, -1, -1)},
        "logprobs: 1.5 is no logprob, -10000 to 0 are",
    ),
    "an endless logprob": ({}, {"logprobs": floats(-1, -1e5, -1, -1)}, "logprobs: -100000 is no logprob"),
    "a positive head": ({}, {"head_logprobs": np.abs(HEADS)}, "head_logprobs: .* is no logprob"),
    "a head of nothing": ({}, {"head_logprobs": np.full((4, 2), -np.inf, np.float32)}, "no likeliest one"),
    "no reward, no reason": (
        {"samples": sample(reward=None)},
        {},
        r"samples\[0\]: has either a reward or a reason",
    ),
    "reward and reason": ({"samples": sample(unscored="timeout")}, {}, "has either a reward or a reason"),
    "a reason of nobody's": ({"samples": sample(reward=None, unscored="x" * 99)}, {}, "is no reason of ours"),
    "a reward beyond all": (
        {"samples": sample(reward=1e30)},
        {},
        r"samples\[0\].reward: 1e\+30 is beyond 1e\+06",
    ),
    "a component beyond": (
        {"samples": sample(components={"math": -1e155})},
        {},
        "components.math: -1e.155 is beyond",
    ),
    "an unknown component": (
        {"samples": sample(components={"maths": 1.0})},
        {},
        "'maths' is of no reward .* math, st",
    ),
    "a part of no function": (
        {"samples": sample(components={"maths.x": 1.0})},
        {},
        "'maths.x' is of no reward",
    ),
    "a part without a name": ({"samples": sample(components={"math.": 1.0})}, {}, "'math.' is of no reward"),
    "a part of a long name": ({"samples": sample(components={"math." + "x" * 65: 1.0})}, {}, "is of no reward"),
}


@pytest.mark.parametrize(("header", "numbers", "problem"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_group_of_the_run_is_refused_by_name(header, numbers, problem):
    with pytest.raises(MessageError, match=problem):
        Contract(TERMS).check(group(**header), arrays(**numbers), scored=True)


def test_a_completion_longer_than_any_is_refused():
    long = [Sample(tokens=5, finish="stop", versions=[(3, 5)], text="", reward=1.0), *group().samples[1:]]
    with pytest.raises(MessageError, match="5 tokens in one, at most 4 are sampled"):
        Contract(TERMS).check(group(samples=long), arrays(prompt_ids=ids(1)), scored=True)


def test_as_many_components_as_rewards_may_return_are_taken_and_no_more():
    most = {f"math.{'x' * 61}{number:03}": 1.0 for number in range(2 * (1 + 2 * MAX_COMPONENTS))}
    Contract(TERMS).check(group(samples=sample(components=most)), arrays(), scored=True)
    with pytest.raises(MessageError, match=r"samples\[0\].components: 259, at most 258"):
        Contract(TERMS).check(group(samples=sample(components={**most, "math": 1.0})), arrays(), scored=True)


def test_before_scoring_nothing_is_said_of_rewards():
    Contract(TERMS).check(group(scored=False), arrays(), scored=False)
    Contract(TERMS).check(group(samples=sample(reward=1e30)), arrays(), scored=False)


def test_an_item_of_an_evaluation_has_one_sample_and_no_head():
    one = group(kind="eval", job="0:holdout", samples=sample()[:1], head=0)
    numbers = GroupArrays(prompt_ids=ids(1), token_ids=ids(3, 4), logprobs=floats(-1, -1))
    Contract(TERMS).check(one, numbers, scored=False)
    with pytest.raises(MessageError, match="2 samples, a group of this run has 1"):
        Contract(TERMS).check(group(kind="eval"), arrays(), scored=False)


def test_the_terms_are_those_of_the_config_and_of_the_runs_record():
    tree = {
        "run": {"name": "r", "steps": 1},
        "model": {"context_length": 64},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}, {"use": "mine.py:check", "name": "own"}]},
        "batch": {"group_size": 3},
        "sampling": {"max_new_tokens": 16},
    }
    record = RunTerms(run_id="r", dataset_fingerprint="d", prompts=9, seed=0, vocabulary=40, positions=128)
    assert contract_of(build(tree)[0], record).terms == GroupTerms(
        run="r",
        vocabulary=40,
        context=64,
        completion=16,
        group_size=3,
        head=0,
        rewards=("last_number", "own"),
    )
