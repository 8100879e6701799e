"""Frames as a forger makes them: nothing is checked on the way out, and every digest is the right one."""

from __future__ import annotations

import numpy as np

from slipstream.protocol.frames import joined
from slipstream.protocol.messages import Group, GroupArrays, encode_header
from slipstream.protocol.seals import seal


def forged(group: Group, arrays: GroupArrays) -> list[bytes]:
    """Header, prompt ids, token ids and logprobs, whatever they say."""
    ids = joined(arrays.token_ids, arrays.head_ids)
    logprobs = joined(arrays.logprobs, arrays.head_logprobs)
    frames = [
        np.ascontiguousarray(arrays.prompt_ids, "<i4").tobytes(),
        np.ascontiguousarray(ids, "<i4").tobytes(),
        np.ascontiguousarray(logprobs, "<f4").tobytes(),
    ]
    seal(group, frames)
    return [bytes(encode_header(group)), *frames]
