"""The copy of a publish: every byte in its place, and digests of exactly those bytes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from slipstream.weights.base import ArraySource
from slipstream.weights.bytes import copying
from slipstream.weights.bytes.copying import copy_all, plan
from slipstream.weights.bytes.digests import bucket_digests
from slipstream.weights.bytes.torch_io import TorchSource
from slipstream.weights.manifest import layout

RANDOM = np.random.default_rng(3)


def sources():
    cast = torch.from_numpy(RANDOM.random((333, 7), np.float32))
    return {
        "bytes": ArraySource(RANDOM.integers(0, 255, 1001, np.uint8)),
        "cast": TorchSource(cast, torch.bfloat16),
        "empty": ArraySource(np.zeros((0, 4), np.float32)),
        "plain": TorchSource(torch.from_numpy(RANDOM.random((90, 41), np.float32)), torch.float32),
        "scalar": ArraySource(np.array(2.5)),
    }


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.mark.parametrize("bucket_bytes", [64, 640, 4096, 1 << 20])
@pytest.mark.parametrize("piece_bytes", [64, 448, 4096])
def test_pieces_cover_every_tensor_once_and_the_digests_are_those_of_the_result(
    bucket_bytes, piece_bytes, pool, monkeypatch
):
    monkeypatch.setattr(copying, "PIECE_BYTES", piece_bytes)
    tensors = sources()
    whole = layout(tensors, bucket_bytes=bucket_bytes)
    target = np.zeros(whole.total_bytes, np.uint8)
    digests = copy_all(target, tensors, plan(whole), pool, 1)
    assert digests == bucket_digests(target, whole)
    for spec in whole.tensors:
        alone = np.zeros(spec.nbytes, np.uint8)
        if spec.nbytes:
            tensors[spec.name].copy(
                alone, 0, alone.size // (spec.nbytes // max(1, np.prod(spec.shape, dtype=int)))
            )
        assert target[spec.offset : spec.offset + spec.nbytes].tobytes() == alone.tobytes()


def test_what_comes_from_a_device_is_digested_after_the_learner_has_gone_on(pool):
    class Far(ArraySource):
        on_host = False

        def raw(self, first, last):
            raise AssertionError("bytes of a device cannot be looked at")

    tensors = {"near": ArraySource(np.ones(100, np.float32)), "far": Far(np.arange(50.0))}
    whole = layout(tensors)
    target = np.zeros(whole.total_bytes, np.uint8)
    assert copy_all(target, tensors, plan(whole), pool, 1) == []
    place = whole.tensors[1]
    assert target[place.offset : place.offset + place.nbytes].view(np.float64).tolist() == list(range(50))
