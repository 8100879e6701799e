"""How a receiver shares its credits among senders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.transport.base import ReceiverOptions
from slipstream.transport.sessions import Sessions


def test_a_newcomer_gets_its_share_once_the_others_have_given_theirs_back():
    sessions = Sessions(ReceiverOptions(credits=8, max_outstanding=8))
    first = sessions.get(b"first")
    assert sessions.grant(first, 0) == 8
    first.held = 8
    second = sessions.get(b"second")
    assert sessions.grant(second, 0) == 0
    assert sessions.grant(first, 0) == 4
    assert sessions.grant(second, 0) == 0
    first.held = 4
    assert sessions.grant(second, 0) == 4


def test_parcels_of_a_sender_that_left_still_hold_room():
    sessions = Sessions(ReceiverOptions(credits=8, max_outstanding=8))
    assert sessions.grant(sessions.get(b"new"), in_progress=5) == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_what_senders_may_send_never_passes_the_total(steps):
    sessions = Sessions(ReceiverOptions(credits=6, max_outstanding=10))
    for name, confirms in steps:
        session = sessions.get(bytes([name]))
        granted = sessions.grant(session, 0)
        assert 0 <= granted <= 6
        if confirms:
            session.held = granted
        assert sum(other.claim for other in sessions) <= 10
