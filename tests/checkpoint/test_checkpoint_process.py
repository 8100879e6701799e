"""Saves that are killed in the middle."""

import signal

import pytest

from slipstream.learner.checkpoint.finding import newest_complete, prune, verify
from slipstream.learner.checkpoint.writing import write

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

POINTS = ["file model.bin", "inside", "file optimizer.bin", "file ledger/state.json", "manifest", "marker"]


@pytest.mark.parametrize("point", POINTS)
def test_a_save_killed_before_its_end_is_skipped_by_name_and_the_previous_one_is_taken(
    point, save_process, tmp_path
):
    """Case 108"""
    assert save_process(10, "never") == 0
    assert save_process(20, point) == -signal.SIGKILL
    found = newest_complete(tmp_path)
    assert (found.path, found.step) == (tmp_path / "step-00000010", 10)
    ((left, why),) = found.skipped
    assert (left.name.split(".")[1], left.suffix, why) == (
        "step-00000020",
        ".writing",
        "was still being written",
    )
    assert (found.path / "model.bin").read_bytes() == b"model of 10"
    assert save_process(20, "never") == 0
    assert (newest_complete(tmp_path).step, newest_complete(tmp_path).skipped) == (20, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_save_killed_after_its_rename_counts(save_process, tmp_path):
    """Case 108"""
    assert save_process(10, "never") == 0
    assert save_process(20, "renamed") == -signal.SIGKILL
    assert (newest_complete(tmp_path).step, newest_complete(tmp_path).skipped) == (20, [])


@pytest.mark.parametrize("point", [*POINTS, "aside", "renamed"])
def test_a_replacement_killed_at_any_point_leaves_one_complete_checkpoint_of_the_step(
    point, save_process, tmp_path
):
    write(tmp_path, 10, {"model.bin": lambda path: path.write_bytes(b"older")})
    assert save_process(20, "never") == 0
    assert save_process(20, point) == -signal.SIGKILL
    found = newest_complete(tmp_path)
    assert found.step == 20
    assert verify(found.path) == []
    assert save_process(30, "never") == 0
    prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000030"]
