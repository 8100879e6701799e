"""Load, check, split and fingerprint sets of prompts, in one pass over each source.

Every row is rendered and encoded once here, so that what is too long, or has ids that the model lacks, is known
at load: such rows are refused with a count and the first three names. Memory during the pass: 32 bytes a row.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256

from slipstream.errors import UserError
from slipstream.prompts.raw_rows import Row, question_key
from slipstream.prompts.sets import LoadReport, PromptSet, Reader
from slipstream.prompts.source_spec import DataSpec, LengthBudget
from slipstream.rewards.inputs import RowFaults
from slipstream.run.tokens import Tokenizer

_DIGEST_BYTES = 16
_KEPT_BYTES = 8  # of each row's, to find the one that differs once the fingerprints do


def load_prompts(
    train: DataSpec,
    tokenizer: Tokenizer,
    budget: LengthBudget,
    evals: Mapping[str, DataSpec] | None = None,
    faults: RowFaults | None = None,
    rows: int | None = None,
) -> tuple[PromptSet, dict[str, PromptSet]]:
    """The training set and the named evaluation sets; with `eval_size`, one of these is `holdout`.

    No question of any evaluation set is left in training. `rows` bounds what is read of the training source, for a
    run that began when it had no more. `faults` hears of every row; a stream, which is not read through, passes over
    those that it finds wanting.

    Raises:
        UserError: A source cannot be read, a row is broken, a set would be empty, or some reward cannot score some
            row.
    """
    faults = faults or RowFaults({})
    sets: dict[str, PromptSet] = {}
    for name, spec in (evals or {}).items():
        if name == "holdout":
            raise UserError(
                "evaluation.sets.holdout: the name of the hold-out of training", "give another name"
            )
        _, sets[name] = _split(
            replace(spec, eval_size=0), tokenizer, budget, frozenset(), faults, all_eval=True
        )
    taken = frozenset().union(*(each.keys for each in sets.values()))
    if train.stream:
        from slipstream.prompts.drawn import (
            StreamedPrompts,  # it imports torch, which not every caller has use for
        )

        faults.refuse()
        return StreamedPrompts(train, tokenizer, budget, taken, faults), sets
    if rows is not None:
        train = replace(train, limit=min(rows, train.limit or rows))
    trained, holdout = _split(train, tokenizer, budget, taken, faults, all_eval=False)
    faults.refuse()
    return trained, {"holdout": holdout, **sets} if train.eval_size else sets


@dataclass(slots=True)
class _Scan:
    """The kept rows of a source, in order: row numbers, question hashes and row digests, side by side."""

    rows: array[int]
    keys: array[int]
    digests: bytearray
    report: LoadReport


def _split(
    spec: DataSpec,
    tokenizer: Tokenizer,
    budget: LengthBudget,
    taken: frozenset[int],
    faults: RowFaults,
    *,
    all_eval: bool,
) -> tuple[PromptSet, PromptSet]:
    """(training set, evaluation set) of one source; either may be empty where it is not asked for."""
    reader = Reader(spec, tokenizer, budget)
    scan = _scan(reader, faults)
    held = set(scan.keys) if all_eval else _held_out(scan, spec, taken)
    train_at, eval_at, seen = array("Q"), array("Q"), set[int]()
    for place, key in enumerate(scan.keys):
        if all_eval or (key in held and key not in seen):
            eval_at.append(place)
            seen.add(key)
        if key not in held and key not in taken:
            train_at.append(place)
    if not all_eval and not train_at:
        raise UserError(
            f"data: no prompt is left for training ({scan.report})",
            "lower data.holdout, or add rows that differ",
        )
    scan.report.held_out = 0 if all_eval else len(scan.rows) - len(train_at)
    return _subset(reader, scan, train_at, frozenset()), _subset(reader, scan, eval_at, frozenset(seen))


def _scan(reader: Reader, faults: RowFaults) -> _Scan:
    scan = _Scan(array("Q"), array("Q"), bytearray(), LoadReport())
    for number, row, ids, literal in reader.rows():
        scan.report.rows += 1
        scan.report.repaired += row.repaired
        scan.report.literal += literal
        scan.report.dropped += row.dropped
        if (reason := reader.refusal(ids)) is not None:
            scan.report.refuse(str(row.columns.get("id", number)), reason)
            continue
        faults.note(reader.source.label(number), row.columns)
        scan.report.longest = max(scan.report.longest, len(ids))
        scan.rows.append(number)
        scan.keys.append(question_key(row.question))
        scan.digests += _row_digest(row)
    if not scan.rows:
        raise UserError(
            f"data: every prompt is refused ({scan.report})",
            "raise the context length, lower min_new_tokens, or shorten the prompts; ids outside the vocabulary mean "
            "that the tokenizer is another model's",
        )
    return scan


def _held_out(scan: _Scan, spec: DataSpec, taken: Iterable[int]) -> set[int]:
    """The `eval_size` distinct questions with the smallest hash under the seed, whatever their order."""
    if not spec.eval_size:
        return set()
    free = set(scan.keys).difference(taken)
    if len(free) <= spec.eval_size:
        raise UserError(
            f"data.holdout: {spec.eval_size}, but there are {len(free)} distinct questions",
            "hold out fewer, so that some are left for training",
        )
    salt = f"holdout/{spec.seed}/".encode()

    def rank(key: int) -> bytes:
        return blake2b(salt + key.to_bytes(8, "little"), digest_size=16).digest()

    return set(heapq.nsmallest(spec.eval_size, free, key=rank))


def _row_digest(row: Row) -> bytes:
    canonical = json.dumps([row.question, row.columns], sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=_DIGEST_BYTES).digest()


def _subset(reader: Reader, scan: _Scan, places: array[int], keys: frozenset[int]) -> PromptSet:
    digest = sha256(json.dumps(reader.identity, sort_keys=True).encode())
    rows, digests = array("Q"), bytearray()
    for place in places:
        rows.append(scan.rows[place])
        own = scan.digests[place * _DIGEST_BYTES : (place + 1) * _DIGEST_BYTES]
        digest.update(own)
        digests += own[:_KEPT_BYTES]
    return PromptSet(reader, rows, digest.hexdigest(), scan.report, keys, bytes(digests))
