"""A decoder over the Llama forward pass: places rows in cache slots, starts prompts once per group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.rollout.engines.batch_rows import DecodedRow
from slipstream.rollout.engines.cpu.kv_cache import KvCache
from slipstream.rollout.engines.cpu.llama import LlamaForward, Pass
from slipstream.rollout.engines.cpu.llama_weights import LlamaShape, LlamaWeights, read_weights

RECOMPUTE_COLUMNS = 512


class LlamaDecoder:
    """See `rows.Decoder`. DecodedRow i of the batch lies in cache slot i; removing one moves the last there."""

    def __init__(self, shape: LlamaShape, slots: int, context: int) -> None:
        self.shape = shape
        self.cache = KvCache(shape.layers, slots, context, shape.kv_heads, shape.head_size)
        self.rows: list[DecodedRow] = []
        self._forward = LlamaForward(shape, self.cache)
        self._weights: LlamaWeights | None = None
        self._loads = 0

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors from now on; nothing is copied when they are float32."""
        self._weights = read_weights(tensors, self.shape)
        self._loads += 1

    def unload(self) -> None:
        """Let go of the tensors."""
        self._weights = None

    def step(self, fresh: Sequence[Sequence[DecodedRow]]) -> tuple[list[DecodedRow], Tensor]:
        """Logits [V, N] of the next token of each row, rows in cache order."""
        starting = [group for group in fresh if not self._join_siblings(group)]
        decoded = list(self.rows)
        work = _empty_pass()
        for row in decoded:
            self._add_newest(work, row)
        for group in starting:
            self._place(group)
            _add_segment(work, self.cache, group[0], group[0].ids)
            work.outputs.append(len(work.ids) - 1)
        logits_VO = self._run(work)
        for group in starting:
            self._spread_prompt(group)
        if not starting:
            return decoded, logits_VO
        return list(self.rows), logits_VO[:, _columns(len(decoded), starting)]

    def recompute(self) -> None:
        """Compute the cache of every row again, several rows in one pass."""
        work = _empty_pass()
        for row in self.rows:
            if work.ids and len(work.ids) + len(row.ids) > RECOMPUTE_COLUMNS:
                self._run(work)
                work = _empty_pass()
            _add_segment(work, self.cache, row, row.ids[:-1])
            row.prompt_load = self._loads
        if work.ids:
            self._run(work)

    def remove(self, row: DecodedRow) -> None:
        """Free the row's slot."""
        last = self.rows.pop()
        self.cache.clear(row.slot, len(row.ids))
        if last is not row:
            # all its ids: the newest may be in the cache or, if it was sampled a moment ago, not yet
            self.cache.copy(last.slot, [row.slot], len(last.ids))
            self.cache.clear(last.slot, len(last.ids))
            last.slot = row.slot
            self.rows[last.slot] = last
        row.slot = -1

    def _run(self, work: Pass) -> Tensor:
        if self._weights is None:
            raise SlipstreamError("decoder: no weights are loaded")
        return self._forward(self._weights, work)

    def _place(self, group: Sequence[DecodedRow]) -> None:
        for row in group:
            row.slot = len(self.rows)
            row.prompt_load = self._loads
            self.rows.append(row)

    def _spread_prompt(self, group: Sequence[DecodedRow]) -> None:
        targets = [row.slot for row in group[1:]]
        self.cache.copy(group[0].slot, targets, group[0].prompt_length)

    def _join_siblings(self, group: Sequence[DecodedRow]) -> bool:
        """Start rows from a sibling's cached prompt, if the loaded weights made it.

        The prompt's last token is then fed like a sampled one, for its logits are gone.
        """
        stream = group[0].stream
        sibling = next((row for row in self.rows if row.stream is stream), None)
        if sibling is None or sibling.prompt_load != self._loads or group[0].made:
            return False
        self._place(group)
        self.cache.copy(sibling.slot, [row.slot for row in group], sibling.prompt_length - 1)
        return True

    def _add_newest(self, work: Pass, row: DecodedRow) -> None:
        position = len(row.ids) - 1
        work.ids.append(row.ids[-1])
        work.positions.append(position)
        work.cache_positions.append(self.cache.position(row.slot, position))
        work.lengths.append(position + 1)
        work.outputs.append(len(work.outputs))


def _empty_pass() -> Pass:
    return Pass(ids=[], positions=[], cache_positions=[], lengths=[], segments=[], outputs=[])


def _add_segment(work: Pass, cache: KvCache, row: DecodedRow, ids: Sequence[int]) -> None:
    begin = len(work.ids)
    work.ids.extend(ids)
    work.positions.extend(range(len(ids)))
    work.cache_positions.extend(cache.position(row.slot, index) for index in range(len(ids)))
    work.segments.append((begin, begin + len(ids)))


def _columns(decoded: int, starting: Sequence[Sequence[DecodedRow]]) -> list[int]:
    """Column of each row: its own when decoded, the group's one when the group starts."""
    columns = list(range(decoded))
    for number, group in enumerate(starting):
        columns += [decoded + number] * len(group)
    return columns
