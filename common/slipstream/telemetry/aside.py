"""Groups that could not be trained on, kept aside for a person to look at: what they hold, and what was wrong."""

from __future__ import annotations

import time
from typing import Any

from slipstream.errors import MessageError
from slipstream.protocol.frames import Frames
from slipstream.protocol.messages import Group, GroupArrays, decode_group
from slipstream.telemetry.sample_log import SampleLog, group_record

_SHOWN = 4096  # numbers of an array, and bytes of a header that cannot be read


class AsideLog:
    """One file of such groups, written by one process and bounded like the files of samples."""

    def __init__(self, samples: SampleLog) -> None:
        self._samples = samples

    def keep(self, group: Group, arrays: GroupArrays, why: str) -> None:
        """Write one group down."""
        self._samples.write(group_record(group, "poison") | {"why": why} | _numbers(arrays))

    def keep_frames(self, ticket: int, frames: Frames, why: str) -> None:
        """Write down what was to be a group, as far as it can be read."""
        try:
            group, arrays = decode_group(frames)
        except MessageError:
            record = {"time": time.time(), "reason": "poison", "ticket": ticket, "why": why}
            self._samples.write(record | {"bytes": [len(each) for each in frames], "header": _header(frames)})
        else:
            self.keep(group, arrays, why)


def _numbers(arrays: GroupArrays) -> dict[str, Any]:
    named = {
        "prompt_ids": arrays.prompt_ids,
        "token_ids": arrays.token_ids,
        "logprobs": arrays.logprobs,
        "head_ids": arrays.head_ids,
        "head_logprobs": arrays.head_logprobs,
    }
    return {name: each.ravel()[:_SHOWN].tolist() for name, each in named.items() if each is not None}


def _header(frames: Frames) -> str:
    return bytes(frames[0][:_SHOWN]).hex() if frames else ""
