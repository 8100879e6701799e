"""Samples for a person: which are chosen, and that every number stands at its own token."""

from __future__ import annotations

import pytest

from slipstream.learner.report.samples_shown import HEAD_TOKENS, TAIL_TOKENS, chosen, pieces, shown_step


class Bytes:
    """One token a byte, as byte-level vocabularies end."""

    def decode(self, ids, *, skip_special=True):
        return bytes(ids).decode("utf-8", "replace")


def test_a_character_of_several_tokens_stands_at_its_last():
    ids = list("aé€b".encode())
    assert pieces(ids, Bytes()) == ["a", "", "é", "", "", "€", "b"]
    assert pieces(ids[:2], Bytes()) == ["a", "\ufffd"]  # cut in the middle: shown as what it is
    assert pieces([255] * 9, Bytes())[7] != ""  # what is no character at all does not wait for ever


def test_groups_take_turns_and_one_with_a_signal_goes_first(make_group):
    flat = make_group([1], [[5], [6]], [1.0, 1.0])[0]
    live = make_group([1], [[5], [6], [7]], [0.0, 1.0, None])[0]
    assert chosen([flat, live, flat], 0, 2)[0] == 1
    assert chosen([flat, live, live], 2, 2)[0] == 2
    assert chosen([flat, flat], 1, 2)[0] == 1  # none has one
    assert chosen([live], 0, 2)[1] == [1, 2]  # the best, and the worst: unscored
    assert chosen([live], 0, 9)[1] == [0, 1, 2]


def test_numbers_stand_at_their_tokens(make_group):
    first = make_group([1], [[97], [98]], [0.0, 1.0], ticket=3)
    second = make_group(
        [1],
        [[97, 98, 99], [100]],
        [0.0, 1.0],
        ticket=4,
        version=[[(2, 1), (3, 2)], [(3, 1)]],
        logprob=-1.0,
    )
    record = shown_step([first, second], (1, [0, 1]), {2: [-0.5, -1.0, -2.0]}, Bytes(), step=9, version=4)
    assert (record["ticket"], record["step"], record["version"]) == (4, 9, 4)
    one, two = record["samples"]
    assert one["tokens"] == ["a", "b", "c"]
    assert one["versions"] == [[2, 1], [3, 2]]
    assert one["gap"] == pytest.approx([0.5, 0.0, -1.0])  # learner less sampler
    assert (two["tokens"], two["gap"]) == (["d"], None)  # it had no gradient


def test_the_middle_of_a_long_completion_is_left_out_and_counted(make_group):
    length = HEAD_TOKENS + TAIL_TOKENS + 5
    group = make_group([1], [[97] * length], [1.0], version=[[(0, length - 1), (1, 1)]])
    (sample,) = shown_step([group], (0, [0]), {}, Bytes(), 1, 1)["samples"]
    assert (sample["omitted"], sample["length"]) == (5, length)
    assert len(sample["tokens"]) == HEAD_TOKENS + TAIL_TOKENS
    assert sample["versions"] == [[0, HEAD_TOKENS + TAIL_TOKENS - 1], [1, 1]]
