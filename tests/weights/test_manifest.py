from itertools import pairwise

import msgspec
import numpy as np
import pytest

from slipstream.errors import WeightsError
from slipstream.weights.base import ArraySource
from slipstream.weights.manifest import (
    ALIGNMENT,
    Layout,
    Manifest,
    TensorSpec,
    decode_manifest,
    encode_manifest,
    layout,
    mismatches,
)


def source(*shape, dtype=np.float32):
    return ArraySource(np.zeros(shape, dtype))


def manifest_of(plan: Layout, **changes) -> Manifest:
    fields = {
        "run": "r", "version": 3, "incarnation": 1, "layout": plan, "digests": ["0" * 32] * plan.buckets,
        "digest": "0" * 32, "locations": {"shm": "slipstream-r-1-3"},
    }  # fmt: skip
    return Manifest(**(fields | changes))


def test_tensors_lie_in_order_aligned_and_without_overlap():
    plan = layout({"a": source(3, 5), "b": source(), "c": source(7, dtype=np.int64)}, {"d": "a"})
    ends = [spec.offset + spec.nbytes for spec in plan.tensors]
    assert [spec.name for spec in plan.tensors] == ["a", "b", "c"]
    assert all(spec.offset % ALIGNMENT == 0 for spec in plan.tensors)
    assert all(end <= spec.offset for end, spec in zip(ends, plan.tensors[1:], strict=False))
    assert ends[-1] <= plan.total_bytes < ends[-1] + ALIGNMENT


def test_buckets_cover_every_byte_once_and_know_their_tensors():
    plan = layout({"a": source(100), "b": source(100)}, bucket_bytes=256)
    ranges = [plan.bucket(index) for index in range(plan.buckets)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == plan.total_bytes
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert plan.names_in(0) == ["a"]
    assert plan.names_in(1) == ["a", "b"]


@pytest.mark.parametrize(
    ("tensors", "tied", "named"),
    [
        ({"a": ArraySource(np.zeros(2, np.complex64))}, {}, "complex64"),
        ({"a": source(2)}, {"a": "a"}, "a is given as a tensor and as tied"),
        ({"a": source(2)}, {"head": "embed"}, "head is tied to embed"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(tensors, tied, named):
    with pytest.raises(WeightsError, match=named):
        layout(tensors, tied)


def test_every_difference_is_named():
    want = layout({"a": source(2), "b": source(2, 3), "c": source(4), "gone": source(1)}, {"head": "a"})
    got = layout({"a": source(2), "b": source(3, 2), "c": source(4, dtype=np.float16), "more": source(1)})
    assert sorted(mismatches(want, got)) == [
        "b: shape [3, 2], expected [2, 3]",
        "c: dtype float16, expected float32",
        "gone: missing",
        "head: tied to None, expected a",
        "more: not expected",
    ]
    assert mismatches(want, want) == []


def test_a_name_given_twice_is_named():
    spec = TensorSpec("a", "float32", (2,), 0)
    got = Layout([spec, spec], {}, 64)
    assert "a: given twice" in mismatches(Layout([spec], {}, 64), got)


def test_a_manifest_survives_the_wire():
    manifest = manifest_of(layout({"a": source(3, 5), "s": source()}, {"d": "a"}))
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_manifest_of_another_schema_is_refused_with_both_numbers():
    raw = msgspec.msgpack.decode(encode_manifest(manifest_of(layout({"a": source(3)}))))
    with pytest.raises(WeightsError, match=r"schema 99.*schema 3"):
        decode_manifest(msgspec.msgpack.encode(raw | {"schema": 99}))


@pytest.mark.parametrize(
    ("plan", "changes", "named"),
    [
        (Layout([TensorSpec("a", "float32", (64,), 0)], {}, 64), {}, "a lies outside"),
        (Layout([TensorSpec("a", "float32", (1,), -64)], {}, 64), {}, "a lies outside"),
        (Layout([TensorSpec("a", "float32", (-1, -1), 0)], {}, 64), {}, "a lies outside"),
        (Layout([TensorSpec("a", "float32", (1,), 4)], {}, 64), {}, "not aligned"),
        (Layout([TensorSpec("a", "object", (1,), 0)], {}, 64), {}, "unknown dtype object"),
        (Layout([TensorSpec("a", "float32", (1,), 0)], {"h": "x"}, 64), {}, "h is tied to x"),
        (Layout([TensorSpec("a", "float32", (1,), 0)] * 2, {}, 64), {}, "given twice"),
        (Layout([TensorSpec("a", "float32", (1,), 0)], {}, 64), {"digests": []}, "0 bucket digests"),
    ],
)
def test_a_manifest_that_does_not_fit_together_is_refused(plan, changes, named):
    with pytest.raises(WeightsError, match=named):
        decode_manifest(encode_manifest(manifest_of(plan, **changes)))


def test_malformed_bytes_are_refused():
    with pytest.raises(WeightsError, match="cannot be read"):
        decode_manifest(b"\xc1")
    with pytest.raises(WeightsError, match="schema None"):
        decode_manifest(msgspec.msgpack.encode([1, 2]))
