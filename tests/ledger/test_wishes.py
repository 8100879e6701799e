"""What a person asks of the learner waits in the ledger until it is taken up."""

from __future__ import annotations


async def test_a_wish_made_while_another_is_taken_up_stays(ledger, terms):
    await ledger.open_run(terms())
    assert await ledger.asked() == ""
    await ledger.ask("checkpoint")
    assert await ledger.asked() == "checkpoint"
    await ledger.ask("drain")
    await ledger.fulfilled("checkpoint")
    assert await ledger.asked() == "drain"
    for _ in range(2):
        await ledger.fulfilled("drain")
        assert await ledger.asked() == ""
