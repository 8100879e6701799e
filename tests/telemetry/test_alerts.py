"""Alert rules: valid, each fires when it should and only then, each known to the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from slipstream.learner.step.objective_metrics import objective_metrics
from slipstream.telemetry.metrics_page import every_metric

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian package prometheus)"
)


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.timeout(160)
@needs_promtool
def test_the_rules_are_valid():
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "alerts.yaml")


@pytest.mark.process
@pytest.mark.timeout(160)
@needs_promtool
def test_every_alert_fires_on_its_case_and_is_quiet_on_another():
    promtool("test", "rules", "tests/alerts_test.yaml")


def test_every_alert_has_both_cases():
    tests = yaml.safe_load((FOLDER / "tests/alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    fires = [case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]]
    quiet = [case["alertname"] for test in tests for case in test["alert_rule_test"] if not case["exp_alerts"]]
    assert sorted(fires) == sorted(quiet) == sorted(rule["alert"] for rule in RULES)


def test_every_alert_has_its_paragraph_in_the_runbook():
    parts = re.split(r"^### (\w+)$", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    paragraphs = dict(zip(parts[::2], parts[1::2], strict=True))
    assert sorted(paragraphs) == sorted(rule["alert"] for rule in RULES)
    assert all(len(text.split()) > 25 for text in paragraphs.values())
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_alerts_and_runbook_name_metrics_that_exist():
    known = {each.name for section in every_metric(objective_metrics()).values() for each in section}
    for text in ((FOLDER / "alerts.yaml").read_text(), (ROOT / "docs" / "runbook.md").read_text()):
        named = set(re.findall(r"slipstream_[a-z0-9_]+", text))
        assert named
        assert named <= known, named - known
