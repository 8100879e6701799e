from pathlib import Path

import numpy as np
import pytest

from slipstream.config.sections.services_config import WeightsSection
from slipstream.errors import UserError, WeightsError
from slipstream.weights.base import ArraySource
from slipstream.weights.host import segments
from slipstream.weights.host.shm import ShmPublisher
from slipstream.weights.host.shm_reader import ShmSubscriber
from slipstream.weights.manifest import layout
from slipstream.weights.transports import open_publisher, open_subscriber


def first_numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


def expected_numbers(value):
    return [value * 10.0 + index for index in range(6)]


def test_a_subscriber_sees_exactly_what_was_published(publisher, subscriber, model):
    tensors = model(3.0)
    weights = subscriber.fetch(publisher.publish(1, tensors))
    assert weights.version == 1
    assert list(weights.tensors) == list(tensors)
    for index, array in enumerate(weights.tensors.values()):
        np.testing.assert_array_equal(array, np.full((4, 1024), 30.0 + index, np.float32))


def test_the_callers_tensors_may_change_after_publish(publisher, subscriber, model):
    array = np.ones((4, 1024), np.float32)
    tensors = model(2.0) | {"t0": ArraySource(array)}
    manifest = publisher.publish(1, tensors)
    array[:] = 7
    assert float(subscriber.fetch(manifest).tensors["t0"].max()) == 1.0


def test_a_staged_version_is_not_visible_before_its_commit(publisher, subscriber, model):
    subscriber.fetch(publisher.publish(1, model(1.0)))
    staged = publisher.stage(2, model(2.0))
    assert publisher.versions == [1]
    manifest = staged.commit()
    assert first_numbers(subscriber.fetch(manifest)) == expected_numbers(2.0)


def test_mapped_arrays_are_read_only(publisher, subscriber, model):
    weights = subscriber.fetch(publisher.publish(1, model()))
    with pytest.raises(ValueError, match="read-only"):
        weights.tensors["t0"][0, 0] = 1.0


def test_scalars_empties_odd_dtypes_and_ties_travel(tmp_path):
    bits = np.arange(6, dtype=np.uint16)
    tensors = {
        "scalar": ArraySource(np.array(2.5, np.float64)),
        "empty": ArraySource(np.zeros((0, 3), np.float32)),
        "half": ArraySource(bits, "bfloat16"),
        "flags": ArraySource(np.array([True, False])),
        "strided": ArraySource(np.arange(12, dtype=np.int64).reshape(3, 4).T),
    }
    publisher = ShmPublisher("odd", 1, layout(tensors, {"head": "half"}), directory=tmp_path)
    weights = ShmSubscriber(directory=tmp_path).fetch(publisher.publish(0, tensors))
    assert float(weights.tensors["scalar"]) == 2.5
    assert weights.tensors["empty"].shape == (0, 3)
    assert weights.tensors["half"].tolist() == bits.tolist()
    assert weights.tensors["head"] is weights.tensors["half"]
    assert weights.tensors["flags"].tolist() == [True, False]
    assert weights.tensors["strided"].tolist() == np.arange(12).reshape(3, 4).T.tolist()
    publisher.close()


def test_three_subscribers_share_one_copy(publisher, tmp_path, model):
    manifest = publisher.publish(1, model())
    mapped = [ShmSubscriber(directory=tmp_path).fetch(manifest) for _ in range(3)]
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = {line.split()[4] for line in lines if line.endswith(manifest.locations["shm"])}
    assert len(inodes) == 1
    assert len({weights.data.ctypes.data for weights in mapped}) == 3
    assert sum(path.name.startswith("slipstream-run-1-1") for path in tmp_path.iterdir()) == 1


def test_a_corrupted_byte_is_refused_with_its_bucket_and_tensor(publisher, subscriber, model, tmp_path):
    manifest = publisher.publish(1, model())
    with open(tmp_path / manifest.locations["shm"], "r+b") as file:
        file.seek(5 * 8192 + 3)
        file.write(b"\xff")
    with pytest.raises(WeightsError, match=r"version 1: bucket 5 of 12 \(with t2\)"):
        subscriber.fetch(manifest)


def test_a_short_file_is_refused(publisher, subscriber, model, tmp_path, plain_layout):
    manifest = publisher.publish(1, model())
    name = tmp_path / manifest.locations["shm"]
    name.unlink()
    name.write_bytes(b"\0" * 100)
    with pytest.raises(WeightsError, match=f"100 bytes, expected {plain_layout.total_bytes}"):
        subscriber.fetch(manifest)


def test_a_name_of_another_place_is_refused(publisher, subscriber, model):
    manifest = publisher.publish(1, model())
    manifest.locations["shm"] = "../etc/passwd"
    with pytest.raises(WeightsError, match="foreign name"):
        subscriber.fetch(manifest)


def test_tensors_that_differ_from_the_layout_publish_nothing(publisher, model):
    wrong = model() | {"t1": ArraySource(np.zeros((4, 1024), np.float16))}
    with pytest.raises(WeightsError, match="t1: dtype float16, expected float32"):
        publisher.publish(1, wrong)
    with pytest.raises(WeightsError, match="t6: not expected"):
        publisher.publish(1, model(tensors=7))
    with pytest.raises(WeightsError, match="t5: missing"):
        publisher.publish(1, model(tensors=5))
    assert publisher.versions == []


def test_a_version_that_does_not_fit_the_model_is_refused(publisher, tmp_path, model):
    other = layout(model(rows=5))
    with pytest.raises(WeightsError, match=r"t0: shape \[4, 1024\], expected \[5, 1024\]"):
        ShmSubscriber(expected=other, directory=tmp_path).fetch(publisher.publish(1, model()))


def test_versions_only_grow(publisher, model):
    publisher.publish(5, model())
    with pytest.raises(WeightsError, match="version 5 cannot follow version 5"):
        publisher.publish(5, model())


def test_a_source_that_fails_leaves_the_last_version_and_the_next_publish_works(publisher, subscriber, model):
    """Case 72"""

    class Broken(ArraySource):
        def raw(self, first, last):
            raise RuntimeError("lost device")

    manifest = publisher.publish(1, model(1.0))
    with pytest.raises(RuntimeError, match="lost device"):
        publisher.publish(2, model(2.0) | {"t3": Broken(np.zeros((4, 1024), np.float32))})
    assert publisher.versions == [1]
    assert first_numbers(subscriber.fetch(manifest)) == expected_numbers(1.0)
    assert first_numbers(subscriber.fetch(publisher.publish(2, model(2.0)))) == expected_numbers(2.0)


def test_too_little_space_is_refused_with_the_numbers_and_the_mend(tmp_path, plain_layout, monkeypatch):
    monkeypatch.setattr(segments, "free_bytes", lambda directory: 1000)
    with pytest.raises(UserError) as caught:
        ShmPublisher("run", 1, plain_layout, directory=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "1000 bytes free" in str(caught.value)
    assert f"need {2 * plain_layout.total_bytes}" in str(caught.value)
    assert "--shm-size" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_shared_memory_at_all_is_a_mistake_with_its_mend(tmp_path, plain_layout):
    with pytest.raises(UserError, match=r"no shared memory.*cannot be written \(No such file.*--shm-size"):
        ShmPublisher("run", 1, plain_layout, directory=tmp_path / "absent")


def test_a_second_live_publisher_of_one_incarnation_is_refused(publisher, tmp_path, plain_layout, model):
    publisher.publish(1, model())
    with pytest.raises(UserError, match="is alive"):
        ShmPublisher("run", 1, plain_layout, directory=tmp_path)
    other = ShmPublisher("run-1", 1, plain_layout, directory=tmp_path)
    other.close()
    assert publisher.versions == [1]
    assert (tmp_path / "slipstream-run-1-1").exists()


@pytest.mark.parametrize("name", ["", "a/b", "../up", "-x", "a" * 200, "sp ace"])
def test_a_run_name_that_cannot_name_files_is_refused(name, tmp_path, plain_layout):
    with pytest.raises(UserError, match="run name"):
        ShmPublisher(name, 1, plain_layout, directory=tmp_path)


def test_the_factory_opens_both_sides_on_the_hosts_shared_memory(plain_layout, model):
    publisher = open_publisher("slipstream-test-factory", 1, plain_layout, WeightsSection())
    subscriber = open_subscriber(WeightsSection(), expected=plain_layout)
    try:
        weights = subscriber.fetch(publisher.publish(1, model(1.0)))
        assert first_numbers(weights) == expected_numbers(1.0)
    finally:
        subscriber.close()
        publisher.close()
    assert not list(segments.SHM.glob("slipstream-slipstream-test-factory*"))
