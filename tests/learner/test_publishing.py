from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream.config.load import build
from slipstream.errors import WeightsError
from slipstream.learner import publishing as publishing_module
from slipstream.learner.publish.outlet import Outlet
from slipstream.learner.publishing import Publishing
from slipstream.learner.ranks.ranks import Ranks
from slipstream.weights.manifest import Manifest, layout


def make_manifest(version):
    return Manifest(
        run="r",
        version=version,
        incarnation=1,
        layout=layout({}),
        digests=[],
        digest=f"d{version}",
        locations={},
    )


class FakePublisher:
    """Copies by value; a commit waits for the test's leave."""

    def __init__(self, place) -> None:
        self.layout, self.spoil = place, False
        self.staged, self.retired, self.abandoned = {}, [], []
        self.gate, self.closed = threading.Event(), False

    def stage(self, version, tensors):
        data = np.zeros(self.layout.total_bytes, dtype=np.uint8)
        for spec in self.layout.tensors:
            tensors[spec.name].copy(data[spec.offset : spec.offset + spec.nbytes], 0, math.prod(spec.shape))
        self.staged[version] = {"w": torch.from_numpy(data[:12].view(np.float32))}
        data[5] ^= self.spoil

        def commit():
            self.gate.wait(20)
            return make_manifest(version)

        return SimpleNamespace(data=data, commit=commit, abandon=lambda: self.abandoned.append(version))

    def retire(self, acknowledged):
        self.retired.append(acknowledged)

    def close(self):
        self.closed = True


class FakeLedger:
    def __init__(self) -> None:
        self.announced = []
        self.served = [3, -1, 2]

    async def announce(self, version, manifest, learner):
        self.announced.append((version, manifest, learner))

    async def members(self, role):
        return [SimpleNamespace(version=version, detail={}) for version in self.served]


@pytest.fixture
async def bench(monkeypatch):
    made = []
    monkeypatch.setattr(publishing_module, "encode_manifest", lambda manifest: manifest.version)
    monkeypatch.setattr(
        publishing_module,
        "open_publisher",
        lambda run, incarnation, layout, settings, **options: made.append(FakePublisher(layout)) or made[0],
    )
    tree = {
        "run": {"name": "r", "steps": 1},
        "data": {"kind": "arithmetic"},
        "reward": {"functions": [{"use": "last_number"}]},
        "weights": {"canary_bound": None},
    }
    weights = {"w": torch.zeros(3)}
    ledger = FakeLedger()
    policy = SimpleNamespace(tensors=lambda: weights, adapters=None)
    trainer = SimpleNamespace(outlet=Outlet(policy, Ranks()), policy=policy)
    publishing = Publishing(build(tree)[0], trainer, ledger, "0a")
    running = asyncio.create_task(publishing.run())
    yield SimpleNamespace(
        publishing=publishing, publisher=made[0], ledger=ledger, weights=weights, running=running
    )
    made[0].gate.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_step_goes_on_while_digests_are_computed_and_the_copy_keeps_the_old_weights(bench):
    """Promise 7: publishing costs the learner one copy."""
    await bench.publishing.publish(1)
    bench.weights["w"] += 1.0  # the next step
    assert bench.ledger.announced == []
    bench.publisher.gate.set()
    await bench.publishing.settled()
    assert bench.ledger.announced == [(1, 1, "0a")]
    assert bench.publishing.version == 1
    assert bench.publisher.staged[1]["w"].tolist() == [0.0, 0.0, 0.0]


async def test_the_first_version_is_compared_byte_for_byte_and_later_ones_are_not(bench):
    bench.publisher.spoil = True
    with pytest.raises(WeightsError, match="first published version differs from the learner's own in w"):
        await bench.publishing.publish(1)
    bench.publisher.spoil = False
    await bench.publishing.publish(2)
    bench.publisher.spoil = True
    await bench.publishing.publish(3)


async def test_a_step_waits_for_no_earlier_version_and_only_the_newest_that_waits_is_announced(bench):
    """Promise 7, with a store or a link that is slower than the steps."""
    await bench.publishing.publish(1)
    await asyncio.sleep(0)  # its commit begins, and waits for the gate
    for version in (2, 3, 4):
        await bench.publishing.publish(version)
    assert bench.ledger.announced == []
    bench.publisher.gate.set()
    await bench.publishing.settled()
    assert [version for version, *_ in bench.ledger.announced] == [1, 4]
    assert bench.publisher.abandoned == [2, 3]


async def test_versions_that_no_live_replica_needs_are_retired(bench):
    """Case 74: a replica that serves nothing yet holds none back."""
    bench.publisher.gate.set()
    await bench.publishing.publish(4)
    await bench.publishing.settled()
    assert bench.publisher.retired == [2]


async def test_a_failed_announcement_ends_the_background_task_with_its_cause(bench):
    async def refused(*_):
        raise ConnectionError("gone")

    bench.ledger.announce = refused
    bench.publisher.gate.set()
    await bench.publishing.publish(1)
    with pytest.raises(ConnectionError, match="gone"):
        await bench.running


async def test_many_hosts_are_told_whom_to_ask_and_the_learner_notes_its_fingerprints(bench):
    """Those that keep up stand in front; the publisher itself is asked last of all and by everybody."""
    announced = []
    publishing_module_encode = publishing_module.encode_manifest
    publishing_module.encode_manifest = lambda manifest: announced.append(manifest) or manifest.version
    bench.ledger.members = members_of({"a": 1, "b": 3, "c": 2, "d": 2, "none": 9})
    bench.publisher.gate.set()
    await bench.publishing.publish(4)
    await bench.publishing.settled()
    publishing_module.encode_manifest = publishing_module_encode
    assert set(announced[0].routes) <= {"a", "b", "c", "d"}
    assert max(announced[0].routes.values(), key=len)[-1] == "stream://b"
    assert bench.publishing.note() == {"fingerprints": {"4": "d4"}}


def members_of(versions):
    async def members(role):
        return [
            SimpleNamespace(
                version=version, detail={"host": host, "relay": "" if host == "none" else f"stream://{host}"}
            )
            for host, version in versions.items()
        ]

    return members
