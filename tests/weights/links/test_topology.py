from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.weights.links.topology import STAR, ancestors, parents, routes

SIZES = st.integers(0, 200)
BUCKETS = st.integers(1, 64)
quick = settings(max_examples=60, deadline=None)


@quick
@given(SIZES, BUCKETS)
def test_every_host_reaches_the_publisher_and_nobody_waits_for_itself(hosts, buckets):
    lines, above = ancestors(hosts, buckets), parents(hosts, buckets)
    assert len(lines) == hosts
    for host, line in enumerate(lines):
        assert len(set(line)) == len(line)
        assert all(0 <= ancestor < host for ancestor in line)
        for child, parent in zip([host, *line], line, strict=False):
            assert above[child] == parent


@quick
@given(SIZES, BUCKETS)
def test_the_way_is_a_star_for_few_a_chain_up_to_the_buckets_and_a_tree_beyond(hosts, buckets):
    depth = max((len(line) + 1 for line in ancestors(hosts, buckets)), default=0)
    above = parents(hosts, buckets)
    children = [above.count(node) for node in range(-1, hosts)]
    if hosts <= STAR:
        assert depth <= 1
    elif hosts <= buckets:
        assert (depth, max(children)) == (hosts, 1)
    else:
        assert depth <= math.ceil(math.log2(hosts + 1))
        assert max(children) <= math.ceil(math.log2(hosts + 1))


@quick
@given(SIZES, BUCKETS, st.data())
def test_whichever_hosts_fail_each_other_one_is_served_by_one_that_lives(hosts, buckets, data):
    dead = data.draw(st.sets(st.integers(0, max(0, hosts - 1))))
    served = {-1}  # the publisher
    for host, line in enumerate(ancestors(hosts, buckets)):
        if host not in dead:
            source = next(ancestor for ancestor in [*line, -1] if ancestor not in dead)
            assert source in served
            served.add(host)
    assert len(served) == 1 + len(set(range(hosts)) - dead)


def test_routes_name_endpoints_of_those_who_pass_on_in_the_order_given():
    relays = {name: f"stream://{name}" for name in "abcde"}
    order = ["c", "x", "a", "b", "e", "d"]
    assert routes(relays, order, buckets=16) == {
        "a": ["stream://c"],
        "b": ["stream://a", "stream://c"],
        "e": ["stream://b", "stream://a", "stream://c"],
        "d": ["stream://e", "stream://b", "stream://a", "stream://c"],
    }
    assert routes({name: relays[name] for name in "abc"}, order, buckets=16) == {}
