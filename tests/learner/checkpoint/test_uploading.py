"""Uploads of checkpoints, into a store on disk and one in memory: the marker is last, and nothing waits for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import fsspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from slipstream.errors import UserError
from slipstream.learner.checkpoint.finding import prune, thin, verify
from slipstream.learner.checkpoint.uploading import Uploader
from slipstream.learner.checkpoint.writing import write
from slipstream.learner.descent import write_checkpoint
from slipstream.run.stores import open_store


@pytest.fixture
def metrics():
    return SimpleNamespace(uploads=Counter("uploads", "", ["result"], registry=CollectorRegistry()))


@pytest.fixture
async def start(tmp_path, metrics):
    running = []

    def make(url):
        uploader = Uploader(url, "r", tmp_path / "checkpoints", metrics, wait_s=0.0)
        running.append(asyncio.create_task(uploader.run()))
        return uploader

    yield make
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def save(tmp_path, step, content="weights"):
    writers = {name: lambda path: path.write_text(content) for name in ("model", "sub/trainer")}
    return write(tmp_path / "checkpoints", step, writers)


@pytest.mark.parametrize("scheme", ["file", "memory"])
async def test_a_checkpoint_is_there_as_it_is_on_disk(tmp_path, start, metrics, scheme):
    url = f"file://{tmp_path}/there" if scheme == "file" else "memory://uploading-as-it-is"
    uploader = start(url)
    path = save(tmp_path, 3)
    uploader.offer(3, path)
    assert await uploader.settled(30.0)
    fsspec.filesystem(scheme).get(f"{url}/r/step-00000003", str(tmp_path / "back"), recursive=True)
    (tmp_path / "back").rename(tmp_path / "step-00000003")
    assert verify(tmp_path / "step-00000003") == []
    assert metrics.uploads.labels("done")._value.get() == 1


async def test_the_copy_of_a_checkpoint_keeps_the_moments_that_are_taken_out_here(tmp_path, start):
    uploader = start(f"file://{tmp_path}/there")
    names = ("model.safetensors", "trainer.safetensors")
    path = write(tmp_path / "checkpoints", 3, {name: lambda path: path.write_text("x") for name in names})
    uploader.offer(3, path)
    assert await uploader.settled(30.0)
    write(tmp_path / "checkpoints", 4, {name: lambda path: path.write_text("x") for name in names})
    assert thin(tmp_path / "checkpoints", 1, "trainer*") == [path]
    uploader.offer(3, path)
    assert await uploader.settled(30.0)
    there = tmp_path / "there" / "r" / "step-00000003"
    assert verify(there) == []
    assert (there / "trainer.safetensors").exists()


class Store:
    """Stands between the uploader and its store, and notes the order; `fault` is raised by each file's upload."""

    def __init__(self, inner):
        self.inner, self.files, self.faults, self.gate = inner, [], [], threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def put_file(self, source, target):
        self.entered.set()
        assert self.gate.wait(30)
        if self.faults:
            raise self.faults.pop()
        self.files.append(target.rpartition("/")[2])
        self.inner.put_file(source, target)

    def pipe_file(self, target, content):
        self.files.append(target.rpartition("/")[2])
        self.inner.pipe_file(target, content)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture
async def through(start, tmp_path):
    uploader = start(f"file://{tmp_path}/there")
    uploader._system = Store(uploader._system)
    return uploader


async def test_the_marker_is_last_and_a_second_time_nothing_is_copied(tmp_path, through):
    path = save(tmp_path, 1)
    for _ in range(2):
        through.offer(1, path)
        assert await through.settled(30.0)
    assert through._system.files == ["MANIFEST.json", "model", "trainer", "COMPLETE"]


async def test_a_step_that_was_trained_anew_is_uploaded_anew(tmp_path, through):
    through.offer(1, save(tmp_path, 1))
    assert await through.settled(30.0)
    through.offer(1, save(tmp_path, 1, "other"))
    assert await through.settled(30.0)
    assert (tmp_path / "there" / "r" / "step-00000001" / "model").read_text() == "other"
    assert through._system.files.count("COMPLETE") == 2


async def test_a_failure_is_counted_told_and_tried_again(tmp_path, through, metrics, caplog):
    through._system.faults = [OSError("no network"), PermissionError("no key\nand more")]
    with caplog.at_level(logging.WARNING, "slipstream"):
        through.offer(1, save(tmp_path, 1))
        assert await through.settled(30.0)
    assert (through.failed, metrics.uploads.labels("failed")._value.get()) == (2, 2)
    assert "checkpoint at step 1 not uploaded" in caplog.text
    assert "and more" not in caplog.text
    assert (tmp_path / "there" / "r" / "step-00000001" / "COMPLETE").exists()


async def test_only_the_newest_that_waits_is_uploaded_and_what_is_read_is_spared(tmp_path, through):
    through._system.gate.clear()
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    through.offer(1, paths[0])
    assert await asyncio.to_thread(through._system.entered.wait, 30)
    through.offer(2, paths[1])
    through.offer(3, paths[2])
    assert not await through.settled(0.0)
    prune(tmp_path / "checkpoints", 1, spare=through.busy)
    assert [path.exists() for path in paths] == [True, False, True]
    through._system.gate.set()
    assert await through.settled(30.0)
    there = sorted(path.name for path in (tmp_path / "there" / "r").iterdir())
    assert there == ["step-00000001", "step-00000003"]


async def test_one_that_was_pruned_meanwhile_is_given_up(tmp_path, through):
    path = save(tmp_path, 1)
    save(tmp_path, 2)
    prune(tmp_path / "checkpoints", 1)
    through.offer(1, path)
    assert await through.settled(30.0)
    assert through.failed == 0


async def test_what_an_earlier_start_left_is_uploaded(tmp_path, start):
    save(tmp_path, 4)
    assert await start(f"file://{tmp_path}/there").settled(30.0)
    assert (tmp_path / "there" / "r" / "step-00000004" / "COMPLETE").exists()


def test_a_place_that_no_package_knows_is_a_mistake():
    with pytest.raises(UserError, match=r"learner\.checkpoint\.upload 'nowhere://x'"):
        open_store("nowhere://x", "learner.checkpoint.upload")


async def test_one_that_is_written_anew_meanwhile_is_sent_again_as_it_is_now(tmp_path, through):
    path = save(tmp_path, 1)
    through._system.gate.clear()
    through.offer(1, path)
    assert await asyncio.to_thread(through._system.entered.wait, 30)
    save(tmp_path, 1, "other")
    through._system.gate.set()
    assert await through.settled(30.0)
    assert through.failed == 1
    there = tmp_path / "there" / "r" / "step-00000001"
    assert {file.relative_to(there): file.read_bytes() for file in there.rglob("*") if file.is_file()} == {
        file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_one_that_is_read_keeps_its_optimizer(tmp_path):
    keep = SimpleNamespace(keep_last=3, keep_every=None, keep_optimizer_last=1)
    parts = SimpleNamespace(
        config=SimpleNamespace(learner=SimpleNamespace(checkpoint=keep)),
        folder=SimpleNamespace(checkpoints=tmp_path),
        uploader=SimpleNamespace(busy=1),
    )
    files = ("model.safetensors", "trainer.safetensors")
    for step in (1, 2, 3):
        write_checkpoint(parts, step, {name: lambda path: path.write_text("x") and None for name in files})
    kept = [(tmp_path / f"step-0000000{step}" / files[1]).exists() for step in (1, 2, 3)]
    assert kept == [True, False, True]
