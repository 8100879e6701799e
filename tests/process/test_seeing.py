"""One live run looked at in every way: scraped by a real Prometheus, in a browser, by status, and asked to drain."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
DASHBOARDS = sorted((Path(__file__).parents[2] / "k8s" / "grafana").glob("*.json"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def slipstream(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", *arguments], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def live(stack, simulated):
    run = stack().up(
        *simulated, "run.steps=100000", "evaluation.every=2", "learner.checkpoint.every=2", "data.holdout=8"
    )
    run.until_step(5)
    return run


@pytest.fixture
def prometheus(live, tmp_path):
    """A server that scrapes the run; its base URL."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is missing (Debian package prometheus)")
    (tmp_path / "targets.json").write_text(slipstream("metrics", "targets", str(live.folder)))
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs: [{job_name: slipstream, file_sd_configs: [{files: [targets.json]}]}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [*argv, f"--storage.tsdb.path={tmp_path / 'tsdb'}"], cwd=tmp_path, stdout=log, stderr=log
        )
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(120)


def answers(base: str, expression: str) -> int:
    """How many series an expression gives; an error of the query fails."""
    resolved = expression.replace("$__rate_interval", "20s").replace("$run", ".*")
    url = f"{base}/api/v1/query?" + urllib.parse.urlencode({"query": resolved})
    with urllib.request.urlopen(url, timeout=20) as reply:
        found = json.loads(reply.read())
    assert found["status"] == "success", found
    return sum(value["value"][1] not in ("NaN", "+Inf", "-Inf") for value in found["data"]["result"])


def asked() -> dict[str, str]:
    found = {}
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for inner in (panel, *panel.get("panels", [])):
                for target in inner.get("targets", []):
                    found[f"{file.stem}: {inner['title']}: {target['refId']}"] = target["expr"]
    return found


def test_every_panel_of_every_dashboard_shows_something_of_a_live_run(live, prometheus):
    empty, end = asked(), time.monotonic() + 300
    assert len(empty) > 60
    while empty and time.monotonic() < end:
        time.sleep(1.0)
        try:
            empty = {
                name: expression for name, expression in empty.items() if not answers(prometheus, expression)
            }
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise AssertionError(error.read()) from None
    assert empty == {}


def test_a_live_run_is_shown_and_does_what_it_is_asked(live, tmp_path):
    status = json.loads(slipstream("status", str(live.folder), "--json"))
    assert status["status"] == "running"
    assert {each["role"] for each in status["processes"]} == {"learner", "buffer", "reward", "rollout"}
    assert "rollout ×1" in slipstream("top", str(live.folder), "--once")
    page = tmp_path / "report.html"
    slipstream("report", str(live.folder), "-o", str(page))
    if CHROMIUM is not None:
        drawn = subprocess.run(
            [CHROMIUM, *QUIET.split(), f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        assert 'data-drawn="yes"' in drawn
        assert "The equation holds" in drawn
        assert drawn.count("<svg") >= 10
        assert re.search(r'class="completion"><span title="version \d+, age \d+', drawn)
    wish(live, "drain")
    assert live.wait(300) == 0, live.text[-3000:]
    ended = json.loads(slipstream("status", str(live.folder), "--json"))
    assert (ended["status"], ended["finish_reason"]) == ("finished", "drained")
    assert ended["durable_step"] == ended["step"] >= 5
    live.assert_exactly_once()


def wish(run, what: str) -> None:
    """What a key of `top` does."""
    code = (
        "import asyncio, sys\nfrom slipstream.cli.look.find_run import open_ledger\n"
        "async def ask():\n    async with open_ledger(sys.argv[1]) as (_, ledger): await ledger.ask(sys.argv[2])\n"
        "asyncio.run(ask())"
    )
    subprocess.run([sys.executable, "-c", code, str(run.folder), what], check=True, timeout=60)


def test_a_run_whose_supervisor_was_killed_is_said_to_be_stopped(stack, simulated):
    run = stack().up(*simulated, "run.steps=100000", "learner.checkpoint.every=2")
    run.until_step(3)
    assert json.loads(slipstream("status", str(run.folder), "--json"))["status"] == "running"
    run.process.kill()
    run.process.wait()
    run.assert_gone()
    assert json.loads(slipstream("status", str(run.folder), "--json"))["status"] == "stopped"
    assert f"slipstream resume {run.folder}" in slipstream("status", str(run.folder))
    assert "ended from outside" in slipstream("top", str(run.folder), "--once")
