"""Weights through a folder that all hosts see, or an object store: for clusters without direct links.

A version is one folder, `<run>/<incarnation>-<version>`: the bytes, the delta if any, and last of all a marker
with the digest. Whoever reads looks for the marker first and checks every digest afterwards, so a folder that is
half written, or removed while it is read, is refused and never applied. Only the newest learner removes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.errors import TransportTimeout, UserError, WeightsError
from slipstream.run.stores import open_store
from slipstream.weights.base import Bytes, Part
from slipstream.weights.manifest import Manifest

BLOCK_BYTES = 8 << 20
MARKER = "complete"
SETTING = "weights.folder"


class FileStore:
    """The learner's side; the one that removes.

    Raises:
        UserError: The folder cannot be written.
    """

    scheme = "file"

    def __init__(self, url: str, run: str, incarnation: int) -> None:
        self._url = url.rstrip("/")
        self._system, root = open_store(url, SETTING)
        self._root, self._run, self._prefix = f"{root}/{run}", run, f"{incarnation}-"
        self._own: list[int] = []
        try:
            self._system.makedirs(self._root, exist_ok=True)
            foreign = [self._name(entry) for entry in self._system.ls(self._root, detail=False)]
        except OSError as error:
            raise UserError(f"weights.folder {url!r} cannot be written: {error}", "name another one") from None
        self._foreign = [name for name in foreign if not name.startswith(self._prefix)]

    def put(self, manifest: Manifest, data: Bytes, delta: bytes) -> str:
        """Write a version [total_bytes] and its delta, the marker last; returns where."""
        name = f"{self._prefix}{manifest.version}"
        folder = f"{self._root}/{name}"
        try:
            self._system.makedirs(folder, exist_ok=True)
            self._own.append(manifest.version)
            self._write(f"{folder}/dense", data.data)
            if delta:
                self._write(f"{folder}/delta", memoryview(delta))
            self._system.pipe_file(f"{folder}/{MARKER}", manifest.digest.encode())
        except OSError as error:
            raise WeightsError(
                f"version {manifest.version} cannot be written to {self._url}: {error}"
            ) from error
        return f"{self._url}/{self._run}/{name}"

    def retire(self, acknowledged: int) -> None:
        """Remove what every live replica is past: also what learners before this one left."""
        for version in [v for v in self._own[:-1] if v < acknowledged]:
            self._own.remove(version)
            self._remove(f"{self._prefix}{version}")
        if self._own and acknowledged >= self._own[0]:
            for name in self._foreign:
                self._remove(name)
            self._foreign.clear()

    def close(self) -> None:
        """Remove all that this learner wrote; harmless when repeated."""
        for version in self._own:
            self._remove(f"{self._prefix}{version}")
        self._own.clear()

    def _write(self, path: str, data: memoryview) -> None:
        with self._system.open(path, "wb", block_size=BLOCK_BYTES) as file:
            for start in range(0, len(data), BLOCK_BYTES):
                file.write(data[start : start + BLOCK_BYTES])

    def _remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        try:
            for part in (MARKER, "delta", "dense"):  # the marker first: what is left is not taken for whole
                if self._system.exists(f"{folder}/{part}"):
                    self._system.rm_file(f"{folder}/{part}")
            if self._system.exists(folder):
                self._system.rmdir(folder)
        except OSError:  # the store is away, or somebody cleaned up by hand: nobody needs it any more anyway
            return

    @staticmethod
    def _name(path: str) -> str:
        return str(path).rstrip("/").rpartition("/")[2]


class FilePuller:
    """The replica's side; reads block by block, each with the store's own deadlines."""

    scheme = "file"

    def pull(
        self,
        manifest: Manifest,
        endpoint: str,
        part: Part,
        target: Bytes,
        start: int,
        filled: Callable[[int], None],
    ) -> None:
        """See `base.Puller`; a folder that is missing or without its marker is to be asked for again."""
        system, folder = open_store(endpoint, SETTING)
        try:
            if system.cat_file(f"{folder}/{MARKER}").decode(errors="replace") != manifest.digest:
                raise WeightsError(f"{endpoint} holds another version than {manifest.version}")
            with system.open(f"{folder}/{part}", "rb", block_size=BLOCK_BYTES, cache_type="none") as file:
                file.seek(start)
                for offset in range(start, len(target), BLOCK_BYTES):
                    stop = min(offset + BLOCK_BYTES, len(target))
                    self._read(file, target.data[offset:stop], endpoint)
                    filled(stop)
        except FileNotFoundError as error:
            raise WeightsError(
                f"version {manifest.version} is gone from {endpoint}; fetch the newest one"
            ) from error
        except OSError as error:
            raise TransportTimeout(f"weights from {endpoint}: {error}") from error

    def close(self) -> None:
        """Nothing is kept open."""

    def _read(self, file: Any, place: memoryview, endpoint: str) -> None:
        done = 0
        while done < len(place):
            received = file.read(len(place) - done)
            if not received:
                raise WeightsError(f"{endpoint} is shorter than its version")
            np.copyto(
                np.frombuffer(place, np.uint8)[done : done + len(received)], np.frombuffer(received, np.uint8)
            )
            done += len(received)
