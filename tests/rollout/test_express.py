from __future__ import annotations

from types import SimpleNamespace

import pytest

from slipstream.config.sections.services_config import RolloutSection
from slipstream.ledger.records import MemberInfo
from slipstream.rollout.express import Express


def replica(name: str, load: int = 0, version: int = 3) -> MemberInfo:
    return MemberInfo(
        id=name,
        role="rollout",
        endpoint="",
        metrics_port=0,
        host="",
        pid=0,
        incarnation="",
        version=version,
        detail={"load": load},
    )


def lane(name: str, *replicas: MemberInfo, express: int = 1, sequences: int = 8) -> Express:
    made = Express(name, RolloutSection(express=express, express_sequences=sequences))
    made.look(replicas)
    return made


def order(name: str, admitted: int):
    return SimpleNamespace(id=name, header=SimpleNamespace(admitted_version=admitted))


@pytest.mark.parametrize(
    ("name", "express", "names", "here"),
    [
        ("r2", 1, ["r0", "r2", "r1"], True),
        ("r1", 1, ["r0", "r2", "r1"], False),
        ("r1", 2, ["r0", "r2", "r1"], True),
        ("r0", 1, ["r0"], False),  # somebody must start things
        ("r1", 2, ["r0", "r1"], False),
        ("r0", 0, ["r0", "r1"], False),
    ],
)
def test_the_last_replicas_are_express_while_others_are_there(name, express, names, here):
    made = lane(name, *map(replica, names), express=express)
    assert made.here is here
    assert made.limit(64) == (8 if here else 64)


def test_stragglers_go_where_there_is_room_and_what_was_sent_counts_at_once():
    made = lane("r0", replica("r0"), replica("r1", load=6), replica("r2", load=2), express=2)
    assert [made.target(4), made.target(4), made.target(2), made.target(2), made.target(1)] == [
        "r2",
        "",
        "r1",
        "r2",
        "",
    ]
    made.look([replica("r0"), replica("r1", load=7), replica("r2", load=8)])
    assert [made.target(1), made.target(1)] == ["r1", ""]


def test_nothing_is_sent_to_a_replica_without_weights_nor_by_an_express_one():
    assert lane("r0", replica("r0"), replica("r1", version=-1)).target(1) == ""
    assert lane("r1", replica("r0"), replica("r1"), replica("r2"), express=2).target(1) == ""


def test_the_oldest_group_is_a_straggler_once_a_version_has_passed():
    made = lane("r0")
    orders = [order("a", 5), order("b", 4), order("c", 4)]
    assert made.straggler(orders, version=4) is None
    straggler = made.straggler(orders, version=5)
    assert straggler is not None
    assert straggler.id == "b"
    assert made.straggler([], version=5) is None
