import errno
import os
import re

import msgspec
import pytest

from slipstream.errors import SlipstreamError, UserError
from slipstream.learner.checkpoint import writing
from slipstream.learner.checkpoint.checkpoint_files import CHUNK_BYTES
from slipstream.learner.checkpoint.finding import newest_complete, prune, verify
from slipstream.learner.checkpoint.writing import write


def file_of(content: bytes):
    return lambda path: path.write_bytes(content)


def save(root, step, content=b"model"):
    return write(root, step, {"model.bin": file_of(content), "state/rng.bin": file_of(b"rng")})


def steps(root):
    return sorted(int(path.name.removeprefix("step-")) for path in root.iterdir())


def test_a_checkpoint_holds_its_files_and_their_digests(tmp_path):
    path = save(tmp_path / "deep" / "checkpoints", 120)
    manifest = msgspec.json.decode((path / "MANIFEST.json").read_bytes())
    assert (path / "model.bin").read_bytes() == b"model"
    assert (path / "state" / "rng.bin").read_bytes() == b"rng"
    assert manifest["step"] == 120
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        "model.bin": 5, "state/rng.bin": 3,
    }  # fmt: skip
    assert verify(path) == []


@pytest.mark.parametrize("size", [CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_a_file_of_several_chunks_is_verified_to_its_last_byte(tmp_path, size):
    path = write(
        tmp_path, 1, {"model.bin": lambda place: place.write_bytes(bytes(range(256)) * (-(-size // 256)))}
    )
    assert verify(path) == []
    data = bytearray((path / "model.bin").read_bytes())
    data[-1] ^= 1
    (path / "model.bin").write_bytes(data)
    assert "model.bin has digest" in verify(path)[0]


def test_a_writer_may_write_a_folder(tmp_path):
    def folder(path):
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "a").write_bytes(b"a")
        (path / "b").write_bytes(b"b")

    path = write(tmp_path, 1, {"model": folder})
    assert verify(path) == []
    (path / "model" / "inner" / "a").write_bytes(b"x")
    assert "model/inner/a has digest" in verify(path)[0]


def test_every_file_is_on_disk_before_the_marker_and_the_marker_before_the_rename(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(fd):
        name = os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(tmp_path))
        synced.append(re.sub(r"\.[0-9a-f]{8}\.writing", ".writing", name))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 1)
    work = "/.step-00000001.writing"
    assert synced == [
        f"{work}/model.bin", f"{work}/state/rng.bin", f"{work}/MANIFEST.json", f"{work}/state", work,
        f"{work}/COMPLETE", work, "",
    ]  # fmt: skip


def test_two_that_save_the_same_step_do_not_meet(tmp_path):
    """A learner that was replaced may wake up and save; neither writes into, nor sweeps away, what the other does."""

    def late(path):
        path.write_bytes(b"late")
        assert len(list(tmp_path.glob(".step-*.writing"))) == 1
        save(tmp_path, 5, b"first")
        assert [each.name for each in tmp_path.glob(".step-*.writing")] == [path.parent.name]

    path = write(tmp_path, 5, {"model.bin": late})
    assert verify(path) == []
    assert (path / "model.bin").read_bytes() == b"late"
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000005"]


def test_the_newest_complete_one_is_found(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    found = newest_complete(tmp_path)
    assert (found.path, found.step, found.skipped) == (tmp_path / "step-00000100", 100, [])


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_is_no_error(tmp_path, exists):
    found = newest_complete(tmp_path if exists else tmp_path / "none")
    assert (found.path, found.step, found.skipped) == (None, None, [])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "COMPLETE").unlink(), "COMPLETE is missing"),
        (lambda path: (path / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
        (lambda path: (path / "MANIFEST.json").write_text("{}"), "MANIFEST.json differs"),
        (lambda path: (path / "COMPLETE").write_bytes(b"\xff"), "MANIFEST.json cannot be read"),
        (lambda path: (path / "model.bin").unlink(), "model.bin is missing"),
        (lambda path: (path / "model.bin").write_bytes(b"mode"), "model.bin has 4 bytes, expected 5"),
        (lambda path: (path / "model.bin").write_bytes(b"modem"), "model.bin has digest"),
        (lambda path: (path / "state" / "rng.bin").write_bytes(b"rnG"), "state/rng.bin has digest"),
    ],
)
def test_a_damaged_one_is_skipped_with_its_reason(tmp_path, damage, reason):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    found = newest_complete(tmp_path)
    assert found.step == 1
    assert [path.name for path, _ in found.skipped] == ["step-00000002"]
    assert reason in found.skipped[0][1]


def test_a_folder_under_another_steps_name_is_skipped(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step-00000007")
    found = newest_complete(tmp_path)
    assert (found.step, found.skipped[0][1]) == (1, "holds step 2 under the name of another")


def test_a_step_trained_again_replaces_its_checkpoint(tmp_path):
    save(tmp_path, 5, b"first")
    path = save(tmp_path, 5, b"again")
    assert (path / "model.bin").read_bytes() == b"again"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_a_writer_that_fails_leaves_the_last_one_and_no_leftovers(tmp_path):
    def broken(path):
        path.write_bytes(b"half")
        raise RuntimeError("no memory")

    save(tmp_path, 1)
    with pytest.raises(RuntimeError, match="no memory"):
        write(tmp_path, 2, {"model.bin": broken})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_place_that_cannot_be_written_is_one_line_with_the_mend(tmp_path, code):
    def full(path):
        raise OSError(code, os.strerror(code), str(path))

    with pytest.raises(UserError) as caught:
        write(tmp_path, 2, {"model.bin": full})
    text = str(caught.value)
    assert str(tmp_path) in text
    assert os.strerror(code) in text
    assert "bytes free" in text
    assert "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_recognised_behind_the_error_of_safetensors(tmp_path):
    def full(path):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        write(tmp_path, 2, {"model.safetensors": full})
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_the_users_mistake(tmp_path):
    root = tmp_path / "file"
    root.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(root, 1)
    with pytest.raises(UserError, match="cannot be read"):
        newest_complete(root)


def test_other_faults_of_the_system_are_not_blamed_on_the_user(tmp_path):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, 1, {"model.bin": broken})


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../b", "COMPLETE", "MANIFEST.json"])
def test_a_name_outside_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a file"):
        write(tmp_path, 1, {name: file_of(b"")})
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_last_and_every_so_many(tmp_path):
    for step in range(10, 100, 10):
        save(tmp_path, step)
    removed = prune(tmp_path, keep_last=2, keep_every=30)
    assert steps(tmp_path) == [30, 60, 80, 90]
    assert len(removed) == 5


def test_prune_never_counts_an_incomplete_one_nor_removes_the_newest_complete(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (save(tmp_path, 30) / "COMPLETE").unlink()
    (save(tmp_path, 15) / "COMPLETE").unlink()
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [20, 30]
    assert newest_complete(tmp_path).step == 20


def test_prune_does_not_count_one_that_lacks_bytes(tmp_path):
    """Two whole ones stay, whatever lies between them."""
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / "step-00000030" / "model.bin").write_bytes(b"")
    prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [20, 30, 40]


def test_what_does_not_read_back_as_it_was_written_is_no_checkpoint(tmp_path, monkeypatch):
    """A disk at fault is found while the checkpoint before is still there, and before anybody counts on this one."""
    save(tmp_path, 10)
    plain = writing.digest_on_disk
    monkeypatch.setattr(writing, "digest_on_disk", lambda path: plain(flip(path)))
    with pytest.raises(SlipstreamError, match="step-00000020 does not read back as it was written: model"):
        save(tmp_path, 20)
    assert steps(tmp_path) == [10]
    assert newest_complete(tmp_path).step == 10


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    return path


def test_prune_leaves_everything_when_nothing_is_complete(tmp_path):
    (save(tmp_path, 30) / "COMPLETE").unlink()
    assert prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [30]


def test_prune_refuses_to_keep_none(tmp_path):
    with pytest.raises(UserError, match="keep_last is 0"):
        prune(tmp_path, keep_last=0)


def test_other_files_in_the_root_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-latest").mkdir()
    for step in (1, 2):
        save(tmp_path, step)
    prune(tmp_path, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000002", "step-latest"]
    assert newest_complete(tmp_path).step == 2
