"""How long versions and their pages live."""

import pytest

from slipstream.errors import UserError, WeightsError
from slipstream.weights.host import segments
from slipstream.weights.host.shm_reader import ShmSubscriber


def first_numbers(weights):
    return [float(array.flat[0]) for array in weights.tensors.values()]


def expected_numbers(value):
    return [value * 10.0 + index for index in range(6)]


def test_a_reader_of_an_old_version_is_never_cut_off(publisher, subscriber, model):
    """Case 74"""
    old = subscriber.fetch(publisher.publish(1, model(1.0)))
    for version in range(2, 9):
        publisher.publish(version, model(float(version)))
        publisher.retire(version)
    assert first_numbers(old) == expected_numbers(1.0)


def test_arrays_kept_after_release_keep_their_bytes(publisher, subscriber, model):
    weights = subscriber.fetch(publisher.publish(1, model(1.0)))
    kept = weights.tensors["t2"]
    weights.release()
    weights.release()
    for version in range(2, 6):
        publisher.publish(version, model(float(version)))
        publisher.retire(version)
    assert float(kept.max()) == 12.0
    with pytest.raises(WeightsError, match="released"):
        _ = weights.tensors


def test_a_version_stays_until_every_live_replica_is_past_it(publisher, subscriber, model):
    """Case 74"""
    first = publisher.publish(1, model(1.0))
    publisher.publish(2, model(2.0))
    publisher.retire(1)
    assert publisher.versions == [1, 2]
    assert first_numbers(subscriber.fetch(first)) == expected_numbers(1.0)
    publisher.retire(9)
    assert publisher.versions == [2]
    with pytest.raises(WeightsError, match="version 1 of learner incarnation 1 is gone; fetch the newest"):
        subscriber.fetch(first)


def test_a_superseded_version_nobody_leaves_goes_at_its_deadline(publisher, model, clock):
    publisher.publish(1, model(1.0))
    publisher.publish(2, model(2.0))
    clock.now = 59.0
    publisher.publish(3, model(3.0))
    assert publisher.versions == [1, 2, 3]
    clock.now = 61.0
    publisher.publish(4, model(4.0))
    assert publisher.versions == [2, 3, 4]


def test_versions_that_nobody_acknowledges_are_bounded(publisher, model, tmp_path):
    for version in range(20):
        publisher.publish(version, model())
    assert publisher.versions == [16, 17, 18, 19]
    assert len(list(tmp_path.iterdir())) <= 4 + 2 + 1


def test_pages_are_used_again_once_nobody_reads_them(publisher, subscriber, model, tmp_path):
    inodes = set()
    for version in range(10):
        manifest = publisher.publish(version, model(float(version)))
        inodes.add((tmp_path / manifest.locations["shm"]).stat().st_ino)
        weights = subscriber.fetch(manifest)
        assert first_numbers(weights) == expected_numbers(float(version))
        weights.release()
        publisher.retire(version)
    assert len(inodes) == 2


def test_a_late_joiner_fetches_the_newest_by_its_manifest(publisher, tmp_path, model):
    """Case 90"""
    for version in range(8):
        manifest = publisher.publish(version, model(float(version)))
    late = ShmSubscriber(directory=tmp_path)
    assert first_numbers(late.fetch(manifest)) == expected_numbers(7.0)


def test_space_that_runs_out_later_fails_the_publish_and_not_the_readers(
    publisher, subscriber, model, monkeypatch
):
    manifests = [publisher.publish(version, model(float(version))) for version in (1, 2)]
    monkeypatch.setattr(segments, "free_bytes", lambda directory: 0)
    with pytest.raises(UserError, match="0 bytes free"):
        publisher.publish(3, model(3.0))
    assert first_numbers(subscriber.fetch(manifests[1])) == expected_numbers(2.0)
    publisher.retire(2)
    assert first_numbers(subscriber.fetch(publisher.publish(3, model(3.0)))) == expected_numbers(3.0)


def test_close_leaves_nothing_behind_and_readers_keep_theirs(publisher, subscriber, model, tmp_path):
    weights = subscriber.fetch(publisher.publish(1, model(1.0)))
    publisher.stage(2, model(2.0))
    publisher.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []
    assert first_numbers(weights) == expected_numbers(1.0)
    with pytest.raises(WeightsError, match="closed"):
        publisher.publish(3, model(3.0))


def test_a_version_may_be_staged_while_the_one_before_is_still_being_committed(publisher, subscriber, model):
    five, six = publisher.stage(5, model(5.0)), publisher.stage(6, model(6.0))
    newest = six.commit()
    late = five.commit()
    assert first_numbers(subscriber.fetch(late)) == expected_numbers(5.0)
    publisher.retire(9)
    assert publisher.versions == [6]
    assert first_numbers(subscriber.fetch(newest)) == expected_numbers(6.0)
