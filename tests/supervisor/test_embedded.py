from __future__ import annotations

import tempfile

import pytest

from slipstream.supervisor.embedded import EmbeddedSocket


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_two_stacks_have_two_sockets_and_leave_each_other_alone():
    first, second = EmbeddedSocket(), EmbeddedSocket()
    assert first.path != second.path
    assert first.folder.is_dir()
    second.remove()
    assert not second.folder.exists()
    assert first.folder.is_dir()
    first.remove()
    first.remove()
    assert not first.folder.exists()


def test_what_a_killed_stack_left_is_removed_by_the_next():
    import os

    left = EmbeddedSocket()
    os.close(left._lock)  # as the system does when a process ends
    left._lock = -1
    new = EmbeddedSocket()
    assert not left.folder.exists()
    new.remove()


def test_the_socket_is_for_this_user_alone():
    socket = EmbeddedSocket()
    assert socket.folder.stat().st_mode & 0o077 == 0
    assert len(str(socket.path)) < 108
    socket.remove()
