"""What the chart's containers run, started as plain processes: commands, environment and probes as rendered.

What the kubelet does is done by hand: variables are expanded, mounts become folders, and since all share one host,
each role gets ports of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.ledger.server import embedded_server

pytestmark = pytest.mark.process

CHART = Path(__file__).parents[2] / "k8s" / "chart" / "slipstream"
PASSWORD = "open-sesame"
VALUES = {
    "drainSeconds": 4,
    "config": {
        "run": {"steps": 100000},
        "model": {"source": "tiny-sorter", "context_length": 16},
        "data": {
            "kind": "sort_digits",
            "limit": 400,
            "holdout": 8,
            "template": "plain",
            "options": {"stop": ""},
        },
        "evaluation": {"at_start": False, "at_end": False},
        "sampling": {"max_new_tokens": 7},
        "batch": {"groups": 2, "group_size": 4},
        "reward": {"functions": [{"use": "exact_match"}]},
        "rollout": {"engine": {"max_sequences": 16}},
    },
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Node:
    """Runs containers as processes under a folder that stands for their file systems."""

    def __init__(self, root: Path) -> None:
        helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
        with helm.Chart.load(CHART) as chart:
            files = chart.render(VALUES, name="sums", namespace="rl")
        objects = [
            o for path, text in files.items() if path.endswith(".yaml") for o in yaml.safe_load_all(text)
        ]
        self.objects = [each for each in objects if each]
        self.root, self.redis_port = root, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        (root / "etc").mkdir()
        (root / "password").write_text(PASSWORD)
        (config,) = [o for o in self.objects if o["metadata"]["name"].endswith("-config")]
        (root / "etc" / "config.yaml").write_text(config["data"]["config.yaml"])

    def container(self, name: str) -> dict[str, Any]:
        specs = [
            o["spec"].get("template", o)["spec"]
            for o in self.objects
            if o["kind"] not in ("Service",) and ("template" in o.get("spec", {}) or o["kind"] == "Pod")
        ]
        (found,) = [c for spec in specs for c in spec["containers"] if c["name"] == name]
        assert isinstance(found, dict)
        return found

    def environment(self, name: str) -> dict[str, str]:
        """As the kubelet makes it, with this host's places in it."""
        fields = {"metadata.name": f"sums-{name}-0", "status.podIP": "127.0.0.1"}
        made: dict[str, str] = {}
        for each in self.container(name)["env"]:
            value = each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            made[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], value)
        made["SLIPSTREAM__RUN__ROOT"] = str(self.root / "runs")
        made["SLIPSTREAM__REDIS__URL"] = f"redis://127.0.0.1:{self.redis_port}/0"
        made["SLIPSTREAM_REDIS_PASSWORD_FILE"] = str(self.root / "password")
        for port in (
            "SLIPSTREAM__NETWORK__METRICS_PORT",
            "SLIPSTREAM__NETWORK__PORT",
            "SLIPSTREAM__WEIGHTS__PORT",
        ):
            if port in made:
                made[port] = str(free_port())
        self.ports[name] = int(made["SLIPSTREAM__NETWORK__METRICS_PORT"])
        return made

    def argv(self, name: str, environment: dict[str, str]) -> list[str]:
        words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], w) for w in self.container(name)["args"]]
        words = [word.replace("/etc/slipstream", str(self.root / "etc")) for word in words]
        return [sys.executable, "-m", "slipstream.cli.main", *words]

    def start(self, name: str) -> None:
        environment = self.environment(name)
        keep = {key: value for key, value in os.environ.items() if not key.startswith("SLIPSTREAM__")}
        self._open(name, self.argv(name, environment), {**keep, **environment})

    def start_redis(self) -> None:
        """By the chart's own shell script; `redis-server` is the embedded Valkey's program here."""
        program = embedded_server(self.root / "unused").command[0]
        (self.root / "bin").mkdir()
        wrapper = self.root / "bin" / "redis-server"
        wrapper.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        wrapper.chmod(0o755)
        shell, flags, script = self.container("redis")["command"]
        (self.root / "data").mkdir()
        for place, here in {
            "/run/slipstream/redis/password": self.root / "password",
            "/tmp/redis.conf": self.root / "redis.conf",
            "--dir /data": f"--dir {self.root / 'data'}",
            "--port 6379": f"--port {self.redis_port}",
        }.items():
            assert place in script
            script = script.replace(place, str(here))
        self._open(
            "redis", [shell, flags, script], {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
        )

    def _open(self, name: str, argv: list[str], environment: dict[str, str]) -> None:
        with (self.root / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def probe(self, name: str, kind: str) -> bool:
        """Whether the kubelet would be content."""
        how = self.container(name)[f"{kind}Probe"]["httpGet"]
        assert how["port"] == "metrics"
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.ports[name]}{how['path']}", timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def steps(self) -> int:
        file = self.root / "runs" / "sums" / "steps.jsonl"
        rows = file.read_text().splitlines(keepends=True) if file.exists() else []
        return max((json.loads(row)["step"] for row in rows if row.endswith("\n")), default=0)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 100.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            ended = {name: p.poll() for name, p in self.processes.items() if p.poll() is not None}
            if ended or time.monotonic() > end:
                raise AssertionError(f"no {what}; ended: {ended}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(
            f"== {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in self.root.glob("*.log")
        )

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()


@pytest.mark.timeout(240)
def test_the_charts_containers_train_and_answer_their_probes(node: Node) -> None:
    roles = ("rollout", "reward", "buffer", "learner")
    node.start_redis()
    for role in roles:
        node.start(role)
    node.until(lambda: node.steps() >= 2, "second step")
    for role in roles:
        for kind in ("startup", "liveness", "readiness"):
            node.until(lambda role=role, kind=kind: node.probe(role, kind), f"{kind} of {role}")

    environment = {**os.environ, **node.environment("audit")}
    done = subprocess.run(
        node.argv("audit", environment), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "the equation holds" in done.stdout

    for role in roles:  # in the order of their preStop hooks; nobody needs longer than the chart grants
        process = node.processes.pop(role)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, node.logs()
    secrets = [path.name for path in tmp_files(node.root) if PASSWORD in path.read_text(errors="replace")]
    assert secrets == []


def tmp_files(root: Path) -> Iterator[Path]:
    """What the roles wrote for people to read: their logs and the recorded configs."""
    yield from (path for path in root.glob("*.log"))
    yield from (path for path in (root / "runs").rglob("*") if path.suffix in (".yaml", ".json", ".jsonl"))
