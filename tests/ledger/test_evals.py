"""Evaluation jobs: every item once, all at one version."""

from __future__ import annotations

import pytest

from slipstream.errors import FencedError, LedgerError


async def test_the_first_claim_pins_the_version(ledger, replica):
    await ledger.join(replica("g0"))
    await ledger.join(replica("g1"))
    await ledger.open_eval("e1", 5, min_version=2, deadline_s=100)
    assert await ledger.claim_eval("g0", 2, 1) is None
    claim = await ledger.claim_eval("g0", 2, 3)
    assert (claim.job, claim.version, claim.items) == ("e1", 3, [0, 1])
    assert await ledger.claim_eval("g1", 9, 4) is None
    assert (await ledger.claim_eval("g1", 9, 3)).items == [2, 3, 4]
    assert await ledger.claim_eval("g1", 9, 3) is None
    for item in range(5):
        assert await ledger.report_eval("e1", item, "g0" if item < 2 else "g1", 3, bytes([255, item]))
    assert not await ledger.report_eval("e1", 0, "g0", 3, b"a repeated report changes nothing")
    status = await ledger.eval_status("e1")
    assert (status.done, status.total, status.version, status.complete) == (5, 5, 3, True)
    assert await ledger.eval_results("e1") == {item: bytes([255, item]) for item in range(5)}
    await ledger.close_eval("e1")
    with pytest.raises(FencedError, match="closed"):
        await ledger.report_eval("e1", 0, "g0", 3, b"")
    with pytest.raises(LedgerError, match="not open"):
        await ledger.eval_status("e1")


async def test_items_of_an_expired_member_are_claimed_again(ledger, replica, clock):
    await ledger.join(replica("g0"))
    await ledger.join(replica("g1"))
    await ledger.open_eval("e:1", 4, 0, 100)
    await ledger.claim_eval("g0", 3, 0)
    await ledger.claim_eval("g1", 1, 0)
    await ledger.report_eval("e:1", 1, "g0", 0, b"done")
    clock.advance(8)
    await ledger.heartbeat("g1", version=0)
    clock.advance(4)
    assert (await ledger.claim_eval("g1", 9, 0)).items == [0, 2]
    with pytest.raises(FencedError, match="claimed by g1, not by g0"):
        await ledger.report_eval("e:1", 0, "g0", 0, b"from the expired one, at the same version")
    await ledger.report_eval("e:1", 0, "g1", 0, b"from the one that holds it")
    assert (await ledger.eval_status("e:1")).done == 2


async def test_the_job_begins_again_when_nobody_serves_its_version(ledger, replica):
    await ledger.join(replica("g0"))
    await ledger.join(replica("g1"))
    await ledger.open_eval("e1", 3, 0, 100)
    await ledger.claim_eval("g0", 2, 1)
    await ledger.report_eval("e1", 0, "g0", 1, b"old")
    assert await ledger.claim_eval("g1", 3, 2) is None
    await ledger.heartbeat("g0", version=2)
    again = await ledger.claim_eval("g1", 3, 2)
    assert (again.version, again.items) == (2, [0, 1, 2])
    assert (await ledger.eval_status("e1")).done == 0
    with pytest.raises(FencedError, match="pinned to version 2, not 1"):
        await ledger.report_eval("e1", 1, "g0", 1, b"old")


async def test_a_claim_whose_reply_was_lost_comes_again(ledger, replica):
    """Case 97."""
    await ledger.join(replica())
    await ledger.open_eval("e1", 4, 0, 100)
    first = await ledger.claim_eval("g0", 2, 0)
    ledger._eval_grants.clear()
    assert await ledger.claim_eval("g0", 2, 0) == first
    assert (await ledger.claim_eval("g0", 2, 0)).items == [2, 3]


async def test_a_job_past_its_deadline_hands_out_nothing(ledger, replica, clock):
    await ledger.join(replica())
    await ledger.open_eval("e1", 4, 0, 5)
    await ledger.open_eval("e2", 1, 0, 100)
    clock.advance(6)
    assert (await ledger.claim_eval("g0", 2, 0)).job == "e2"
    assert (await ledger.eval_status("e1")).expired


async def test_opening_twice_is_one_job_and_other_terms_are_refused(ledger):
    await ledger.open_eval("e1", 4, 0, 5)
    await ledger.open_eval("e1", 4, 0, 5)
    with pytest.raises(LedgerError, match="other terms"):
        await ledger.open_eval("e1", 5, 0, 5)
