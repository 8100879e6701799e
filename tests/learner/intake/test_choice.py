from __future__ import annotations

import pytest

from slipstream.config.load import build
from slipstream.errors import RunHalted, UserError
from slipstream.learner.intake.choice import choose, order_of, ordered
from slipstream.protocol.questions import Stored


def row(ticket, oldest=0, arrived=0, informative=True):
    return Stored(ticket, 0, ticket, oldest, 10, arrived, informative, 0.5, 100)


ROWS = [row(1, 5, 3), row(2, 4, 1), row(3, 5, 2), row(4, 3, 4)]


@pytest.fixture
def config():
    def make(policy="pace", **buffer):
        tree = {
            "run": {"name": "r", "seed": 3},
            "data": {"kind": "arithmetic"},
            "reward": {"functions": [{"use": "last_number"}]},
            "staleness": {"policy": policy},
            "buffer": buffer,
        }
        return build(tree)[0]

    return make


@pytest.mark.parametrize(
    ("order", "tickets"),
    [("fifo", [2, 3, 1, 4]), ("freshest", [3, 1, 2, 4]), ("oldest_first", [4, 2, 3, 1])],
)
def test_orders(config, order, tickets):
    assert [each.ticket for each in choose(ROWS, order_of(config(order=order)), 1, 4, 4)] == tickets


def test_random_order_depends_on_seed_step_and_ticket_alone():
    rows = [row(n) for n in range(20)]
    first = [each.ticket for each in ordered(rows, "random", 1, 1)]
    assert first == [each.ticket for each in ordered(reversed(rows), "random", 1, 1)]
    assert first != [each.ticket for each in ordered(rows, "random", 2, 1)]
    assert first != [each.ticket for each in ordered(rows, "random", 1, 2)]  # nobody is last for ever
    rest = [each for each in rows if each.ticket != first[0]]
    assert [each.ticket for each in ordered(rest, "random", 1, 1)] == first[1:]


def test_under_wait_the_oldest_go_first_whatever_is_configured(config):
    assert choose(ROWS, order_of(config("wait", order="freshest")), 1, 1, 1)[0].ticket == 4


def test_a_users_order_sees_the_groups_by_arrival_and_the_step(config, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def longest(groups, step):\n"
        "    assert [g.arrived for g in groups] == sorted(g.arrived for g in groups)\n"
        "    assert (step, groups[0].reward) == (7, 0.5)\n"
        "    return [g.ticket for g in groups if g.oldest > 3][::-1]\n"
    )
    order = order_of(config(order=f"{path}:longest"))
    assert [each.ticket for each in choose(ROWS, order, 7, 4, 4)] == [1, 3, 2]  # 4 waits


def test_a_users_order_that_is_not_there_is_one_line(config):
    with pytest.raises(UserError, match=r"buffer\.order 'nowhere:f'"):
        order_of(config(order="nowhere:f"))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda rows, step: [9], "ticket 9"),
        (lambda rows, step: [1, 1], "came twice"),
        (lambda rows, step: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_users_order_that_goes_wrong_stops_the_run_with_its_words(answer, why):
    with pytest.raises(RunHalted, match=rf"buffer\.order.*{why}"):
        choose(ROWS, answer, 1, 4, 4)


def test_a_quota_passes_over_groups_without_signal_beyond_its_rest():
    rows = [row(n, arrived=n, informative=n in (3, 5)) for n in range(1, 7)]
    order = order_by_arrival
    assert [each.ticket for each in choose(rows, order, 1, 3, 1)] == [1, 3, 5]
    assert [each.ticket for each in choose(rows, order, 1, 3, 0)] == [3, 5]
    assert [each.ticket for each in choose(rows, order, 1, 3, 3)] == [1, 2, 3]


def order_by_arrival(rows, step):
    return [each.ticket for each in rows]
