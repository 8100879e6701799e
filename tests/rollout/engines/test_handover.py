"""A version that another process opens by name: where it lies, or copied once, and nothing left behind."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.errors import WeightsError
from slipstream.models.tensors import tensor_shapes
from slipstream.rollout.engines.checks import check_weights
from slipstream.rollout.engines.handover import hand_over
from slipstream.weights.base import ArraySource
from slipstream.weights.host import segments
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import layout

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.uint16)}


def read(handover: Any) -> dict[str, np.ndarray]:
    data = Path(handover.path).read_bytes()
    kinds = {"float32": np.float32, "bfloat16": np.uint16}
    message = handover.message()
    assert message["nbytes"] == len(data)
    return {
        name: np.frombuffer(data, kinds[dtype], int(np.prod(shape)), offset).reshape(shape)
        for name, dtype, shape, offset in message["tensors"]
    }


def test_arrays_are_copied_into_memory_that_has_no_name() -> None:
    tied = {**ARRAYS, "head": ARRAYS["a"]}
    with hand_over(SimpleNamespace(version=3, tensors=tied)) as handover:
        found = read(handover)
        path = handover.path
    assert found.keys() == ARRAYS.keys()  # the tied name has no bytes of its own
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    assert {name: dtype for name, dtype, *_ in handover.message()["tensors"]}["b"] == "bfloat16"
    assert not os.path.exists(path)


def test_a_published_version_is_named_where_it_lies_and_copied_when_its_name_is_gone() -> None:
    sources = {"a": ArraySource(ARRAYS["a"]), "b": ArraySource(ARRAYS["b"], "bfloat16")}
    publisher = ShmPublisher(f"handover-{os.getpid()}", 1, layout(sources))
    subscriber = ShmSubscriber()
    try:
        weights = subscriber.fetch(publisher.publish(1, sources))
        name = weights.manifest.locations["shm"]
        with hand_over(weights) as handover:
            assert os.path.samefile(handover.path, segments.SHM / name)
            np.testing.assert_array_equal(read(handover)["a"], ARRAYS["a"])
        (segments.SHM / name).unlink()
        with hand_over(weights) as handover:
            np.testing.assert_array_equal(read(handover)["b"], ARRAYS["b"])
        weights.release()
    finally:
        subscriber.close()
        publisher.close()


def test_weights_are_checked_against_the_folder_before_anything_is_touched(tmp_path: Path) -> None:
    header = json.dumps(
        {"__metadata__": {}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    expected = tensor_shapes(tmp_path)
    assert expected == {"a": (2, 3)}
    check_weights(SimpleNamespace(tensors={"a": ARRAYS["a"]}), expected, tied_head=False)
    head = {"a": ARRAYS["a"], "lm_head.weight": ARRAYS["a"]}
    check_weights(SimpleNamespace(tensors=head), expected, tied_head=True)
    for tensors, words in [
        ({}, "lack tensor 'a'"),
        ({"a": ARRAYS["b"]}, r"shape \[5\] instead of \[2, 3\]"),
        (head, "'lm_head.weight' is no part of this model"),
        ({"a": ARRAYS["a"].astype(np.int8)}, "'a' has type int8, which is no float"),
    ]:
        with pytest.raises(WeightsError, match=words):
            check_weights(SimpleNamespace(tensors=tensors), expected, tied_head=False)
