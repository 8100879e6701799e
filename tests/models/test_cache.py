from __future__ import annotations

import threading
from pathlib import Path

import pytest
from filelock import FileLock

from slipstream.errors import SlipstreamError, UserError
from slipstream.models.cache import build_once, cache_root


def test_half_a_folder_is_never_seen_and_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        assert not target.exists()
        raise UserError("broken")

    with pytest.raises(UserError, match="broken"):
        build_once(target, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_parallel_starts_build_once(tmp_path: Path) -> None:
    target, builds = tmp_path / "model", []
    together = threading.Barrier(4)

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "config.json").write_text("{}")

    def start() -> None:
        together.wait(10)
        build_once(target, build)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(builds) == 1
    assert (target / "config.json").is_file()


def test_leftovers_of_a_killed_builder_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".model.part-dead").mkdir()
    build_once(tmp_path / "model", lambda folder: None)
    assert not (tmp_path / ".model.part-dead").exists()


def test_waiting_for_another_builder_has_a_deadline(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".model.lock"), pytest.raises(SlipstreamError, match="another process"):
        build_once(tmp_path / "model", lambda folder: None, seconds=0.01)


def test_unwritable_cache_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="SLIPSTREAM_CACHE"):
        build_once(tmp_path / "file" / "model", lambda folder: None)


def test_full_disk_is_said_so(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="no space left"):
        build_once(tmp_path / "model", full)


def test_cache_follows_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
