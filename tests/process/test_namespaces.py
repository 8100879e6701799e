"""Two network namespaces joined by a cable stand for two hosts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]

LEARNER = """
import sys
from pathlib import Path
import numpy as np
from slipstream.config.sections.services_config import WeightsSection
from slipstream.weights.base import ArraySource
from slipstream.weights.manifest import encode_manifest, layout
from slipstream.weights.transports import open_publisher

model = {"t": ArraySource(np.full((512, 1024), 7.0, np.float32))}
settings = WeightsSection(transport=sys.argv[1])
publisher = open_publisher(sys.argv[2], 1, layout(model), settings, address="10.77.0.1")
print(encode_manifest(publisher.publish(7, model)).hex(), flush=True)
sys.stdin.read()
publisher.close()
"""
REPLICA = """
import sys
from slipstream.config.sections.services_config import WeightsSection
from slipstream.weights.manifest import decode_manifest
from slipstream.weights.transports import open_subscriber

subscriber = open_subscriber(WeightsSection(transport=sys.argv[1], host="far"), address="10.77.0.2")
weights = subscriber.fetch(decode_manifest(bytes.fromhex(sys.stdin.readline())))
print(weights.version, float(weights.tensors["t"].mean()), flush=True)
weights.release()
subscriber.close()
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def spaces():
    """Names of two namespaces with 10.77.0.1 and 10.77.0.2."""
    names = [f"slip{os.getpid()}{end}" for end in "ab"]
    made = [ip("netns", "add", name) for name in names]
    cable = ip(
        "link", "add", "slipA", "netns", names[0], "type", "veth", "peer", "name", "slipB", "netns", names[1]
    )
    try:
        if any(done.returncode for done in [*made, cable]):
            pytest.skip(f"no network namespaces here: {(made[0].stderr + cable.stderr).strip()}")
        for name, link, address in zip(names, ("slipA", "slipB"), ("10.77.0.1", "10.77.0.2"), strict=True):
            for words in (("addr", "add", f"{address}/24", "dev", link), ("link", "set", link, "up")):
                assert ip("-n", name, *words).returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_version_crosses_from_one_host_to_the_other(transport, spaces):
    if transport == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("UCXX is not installed: pip install ucxx-cu12==0.52.0")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, "UCX_TLS": "tcp"}  # else it takes the two for one host, and shared memory
    run = f"spaces{os.getpid()}"
    enter = [["ip", "netns", "exec", name, sys.executable, "-c"] for name in spaces]
    with (
        subprocess.Popen([*enter[0], LEARNER, transport, run], **pipes) as learner,
        subprocess.Popen([*enter[1], REPLICA, transport], **pipes) as replica,
    ):
        manifest = learner.stdout.readline()
        assert b"10.77.0.1" in bytes.fromhex(manifest)
        assert replica.communicate(manifest, timeout=90)[0] == "7 7.0\n"
        learner.communicate(timeout=60)
        assert (learner.returncode, replica.returncode) == (0, 0)
