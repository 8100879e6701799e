"""A group is about the prompt of its ticket, in the learner's own rows."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from slipstream.errors import MessageError, UserError
from slipstream.learner.intake.group_check import Asked
from slipstream.prompts.order import EpochOrder
from slipstream.protocol.messages import decode_group, encode_group

SEED, SIZE = 3, 7


class Rows:
    """Seven prompts with an answer of their own."""

    shuffled = True
    broken = False

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index):
        if self.broken:
            raise UserError("data.path: row 1 changed while in use", "start the run again")
        columns = {"answer": str(index), "pair": (index, None), "share": 0.1}
        return SimpleNamespace(prompt_ids=(1, index), text=f"question {index}", columns=columns)


@pytest.fixture
def honest(make_group):
    """A group as it comes over the wire: (group, arrays) of a ticket."""

    def make(ticket):
        epoch, index = EpochOrder(SIZE, SEED).at(ticket)
        prompt = Rows()[index]
        group, arrays = make_group(list(prompt.prompt_ids), [[5], [6]], [1.0, 0.0], ticket=ticket)
        group.epoch, group.prompt_index = epoch, index
        group.prompt, group.columns = prompt.text, prompt.columns
        return decode_group(encode_group(group, arrays))

    return make


@pytest.mark.parametrize("ticket", range(2 * SIZE))
def test_an_honest_group_is_about_the_prompt_of_its_ticket(honest, ticket):
    Asked(Rows(), SEED).check(*honest(ticket))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"columns": {}}, "columns.answer"),
        ({"columns": {"answer": "0", "pair": [0, None], "share": 0.1}}, "columns"),
        ({"prompt": "an easier question"}, "prompt"),
        ({"prompt_index": 99}, "prompt_index"),
        ({"epoch": 5}, "prompt_index"),
    ],
)
def test_who_makes_up_the_question_or_its_gold_trains_nothing(honest, change, named):
    group, arrays = honest(next(n for n in range(SIZE) if EpochOrder(SIZE, SEED).at(n)[1] != 0))
    with pytest.raises(MessageError, match=f"^{named}"):
        Asked(Rows(), SEED).check(msgspec.structs.replace(group, **change), arrays)


def test_other_prompt_ids_train_nothing(honest):
    group, arrays = honest(1)
    other = msgspec.structs.replace(arrays, prompt_ids=np.array([9, 9], dtype="<i4"))
    with pytest.raises(MessageError, match="prompt"):
        Asked(Rows(), SEED).check(group, other)


def test_rows_that_cannot_be_read_any_longer_blame_no_group(honest):
    rows = Rows()
    rows.broken = True
    Asked(rows, SEED).check(*honest(1))
