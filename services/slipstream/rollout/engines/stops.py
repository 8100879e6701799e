"""Stop strings, the same for every engine: a completion ends with the token that completes one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.base import Sampling

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """Looks for stop strings in the text of a growing completion.

    Args:
        decode: Text of ids; None where no tokenizer is at hand, and then stop strings are refused.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode

    def check(self, sampling: Sampling) -> None:
        """Refuse stop strings that could not be looked for.

        Raises:
            SlipstreamError: There is no tokenizer, or a string is empty.
        """
        if sampling.stop_strings and self._decode is None:
            raise SlipstreamError("engine: stop strings need a tokenizer, and this engine was given none")
        if not all(sampling.stop_strings):
            raise SlipstreamError("engine: a stop string is empty")

    def hit(self, sampling: Sampling, completion_ids: Sequence[int]) -> bool:
        """Whether the newest token completed a stop string."""
        if not sampling.stop_strings or self._decode is None:
            return False
        # A token adds a byte at least, so no string reaches further back; a character cut in front does not matter.
        reach = max(len(string.encode()) for string in sampling.stop_strings)
        text = self._decode(completion_ids[-reach:])
        return any(string in text for string in sampling.stop_strings)
