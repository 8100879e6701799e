"""Lock files: whose list of files is believed, and what is said when it cannot be written."""

from __future__ import annotations

import errno
import os

import pytest

from slipstream.errors import UserError
from slipstream.weights.host import segments
from slipstream.weights.host.segments import PREFIX, PublisherLock, sweep


def left_lock(folder, name):
    """A lock file that lists another file, as a process leaves it that was killed."""
    (folder / name).write_bytes(b"x")
    lock = folder / f"{PREFIX}left-1.lock"
    lock.write_text(f"{(folder / name).stat().st_ino} {name}\n")
    return lock


def test_what_a_dead_process_of_this_user_lists_goes_with_its_lock(tmp_path):
    left_lock(tmp_path, "psm_1")
    assert sweep(tmp_path) == ["psm_1"]
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_another_user_s_lock_is_not_believed(tmp_path, monkeypatch):
    left_lock(tmp_path, "psm_1")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert sweep(tmp_path) == []
    assert (tmp_path / "psm_1").exists()


def test_a_link_to_a_lock_is_none(tmp_path):
    lock = left_lock(tmp_path, "psm_1")
    elsewhere = tmp_path / "elsewhere"
    lock.rename(elsewhere)
    lock.symlink_to(elsewhere)
    assert sweep(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "bytes free, the weights need"), (errno.EROFS, "cannot be written")]
)
def test_a_list_that_cannot_be_written_is_said_in_a_line(tmp_path, monkeypatch, number, said):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    lock = PublisherLock(tmp_path, f"{PREFIX}run-1")
    monkeypatch.setattr(segments.os, "pwrite", fails)
    with pytest.raises(UserError, match=said):
        lock.note([])
    lock.close()
    assert lock.noted() == []
