import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import WeightsError
from slipstream.weights.base import ArraySource
from slipstream.weights.bytes import delta
from slipstream.weights.manifest import layout

MIXED = layout(
    {
        "half": ArraySource(np.zeros((300, 7), np.uint16), "bfloat16"),
        "full": ArraySource(np.zeros(501, np.float32)),
        "scalar": ArraySource(np.zeros((), np.int64)),
        "bytes": ArraySource(np.zeros(33, np.int8)),
        "last": ArraySource(np.zeros(5, np.float16)),
    }
)


def random_version(seed, plan=MIXED):
    """Random bytes inside the tensors, zeros between them."""
    random, data = np.random.default_rng(seed), np.zeros(plan.total_bytes, np.uint8)
    for spec in plan.tensors:
        data[spec.offset : spec.offset + spec.nbytes] = random.integers(0, 256, spec.nbytes)
    return data


def changed(base, share, seed, plan=MIXED):
    """A copy with about `share` of the bytes of each tensor changed."""
    random, data = np.random.default_rng(seed), base.copy()
    for spec in plan.tensors:
        own = data[spec.offset : spec.offset + spec.nbytes]
        own[random.random(spec.nbytes) < share] += 1
    return data


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.0005, 0.01, 0.05]))
def test_the_result_is_the_new_version_bit_for_bit(seed, share):
    base = random_version(seed)
    new = changed(base, share, seed + 1)
    encoded = delta.encode(base, new, MIXED)
    result = base.copy()
    delta.apply(result, encoded.blob, MIXED)
    np.testing.assert_array_equal(result, new)


def test_every_bit_pattern_is_exact_not_only_numbers():
    plan = layout({"x": ArraySource(np.zeros(4000, np.float32))})
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0, 0x7F800000, 1], np.uint32)
    base, new = np.zeros(plan.total_bytes, np.uint8), np.zeros(plan.total_bytes, np.uint8)
    base.view(np.uint32)[:6], new.view(np.uint32)[:6] = bits, bits[::-1]
    result = base.copy()
    delta.apply(result, delta.encode(base, new, plan).blob, plan)
    np.testing.assert_array_equal(result, new)


def test_the_share_of_changed_elements_is_measured():
    plan = layout({"x": ArraySource(np.zeros(10_000, np.uint16), "bfloat16")})
    base = random_version(1, plan)
    new = base.copy()
    new.view(np.uint16)[:10_000:100] ^= 1
    assert delta.encode(base, new, plan).density == pytest.approx(0.01)
    assert delta.encode(base, base, plan).density == 0.0


def test_one_percent_of_bfloat16_costs_less_than_two_percent_of_the_dense_bytes():
    plan = layout({"x": ArraySource(np.zeros((1000, 1000), np.uint16), "bfloat16")})
    random, base = np.random.default_rng(3), random_version(3, plan)
    new = base.copy()
    touched = random.random(1_000_000) < 0.01
    new.view(np.uint16)[:1_000_000][touched] += random.choice(np.array([1, 0xFFFF], np.uint16), touched.sum())
    assert len(delta.encode(base, new, plan).blob) < 0.02 * plan.total_bytes


def test_a_delta_that_would_be_larger_than_it_is_worth_is_not_made():
    base = random_version(1)
    encoded = delta.encode(base, random_version(2), MIXED)
    assert encoded.blob is None
    assert encoded.density > 0.95


def test_a_delta_with_a_piece_longer_than_a_message_holds_is_not_made(monkeypatch):
    """Of a version of some 50 billion parameters; the version then comes whole."""
    base = random_version(5)
    new = changed(base, 0.02, 6)
    pieces = msgspec.msgpack.decode(delta.encode(base, new, MIXED).blob)["lanes"]
    longest = max(len(lane[name]) for lane in pieces for name in ("gaps", "steps"))
    monkeypatch.setattr(delta, "PIECE_BYTES", longest)
    assert delta.encode(base, new, MIXED).blob is not None
    monkeypatch.setattr(delta, "PIECE_BYTES", longest - 1)
    assert delta.encode(base, new, MIXED).blob is None


def test_chunks_do_not_show(monkeypatch):
    base = random_version(5)
    new = changed(base, 0.02, 6)
    whole = delta.encode(base, new, MIXED)
    monkeypatch.setattr(delta, "CHUNK_BYTES", 64)
    assert delta.encode(base, new, MIXED) == whole


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda raw: b"\xc1", "cannot be read"),
        (lambda raw: msgspec.msgpack.encode(raw | {"schema": 7}), "schema 7"),
        (
            lambda raw: msgspec.msgpack.encode(raw | {"lanes": [raw["lanes"][0] | {"count": 1 << 50}]}),
            "elements of",
        ),
        (lambda raw: msgspec.msgpack.encode(raw | {"lanes": [raw["lanes"][0] | {"count": 3}]}), "unpack"),
        (lambda raw: msgspec.msgpack.encode(raw | {"lanes": [raw["lanes"][0] | {"gaps": b"no"}]}), "unpack"),
        (lambda raw: msgspec.msgpack.encode(raw | {"lanes": [raw["lanes"][0] | {"width": 3}]}), "of 3 bytes"),
    ],
)
def test_a_damaged_delta_is_refused(damage, named):
    base = random_version(1)
    raw = msgspec.msgpack.decode(delta.encode(base, changed(base, 0.01, 2), MIXED).blob)
    with pytest.raises(WeightsError, match=named):
        delta.apply(base.copy(), damage(raw), MIXED)


def test_positions_outside_the_version_are_refused():
    base = random_version(1)
    blob = delta.encode(base, changed(base, 0.01, 2), MIXED).blob
    small = layout({"x": ArraySource(np.zeros(64, np.float32))})
    with pytest.raises(WeightsError, match="delta"):
        delta.apply(np.zeros(small.total_bytes, np.uint8), blob, small)
