"""Frames between a pool and its workers."""

import io

import pytest

from slipstream.errors import MessageError
from slipstream.rewards.base import Outcome
from slipstream.rewards.workers.worker_wire import (
    LENGTH,
    MAX_FRAME_BYTES,
    ScoreJob,
    ScoreReply,
    pack,
    read_frame,
    unpack,
)


def test_frames_are_read_back_in_order() -> None:
    job = ScoreJob(
        number=1, prompt="p", completions=["a", "😀"], columns={"answer": 4, "metadata": {"x": [1, None]}}
    )
    reply = ScoreReply(
        number=1, outcomes=[Outcome(value=1.0), Outcome(status="nonfinite", detail="returned nan")]
    )
    stream = io.BytesIO(pack(job) + pack(reply))
    assert read_frame(stream, ScoreJob) == job
    assert read_frame(stream, ScoreReply) == reply
    assert read_frame(stream, ScoreReply) is None


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(MessageError, match="limit"):
        read_frame(io.BytesIO(LENGTH.pack(MAX_FRAME_BYTES + 1)), ScoreReply)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b'{"number": 1}'])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(MessageError, match="reply"):
        unpack(body, ScoreReply)


def test_a_lone_surrogate_is_a_message_error() -> None:
    """Case 52."""
    with pytest.raises(MessageError, match="job"):
        pack(ScoreJob(number=1, prompt="\ud800", completions=[]))
