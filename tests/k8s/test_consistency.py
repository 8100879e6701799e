"""What no schema can see: that the objects of the chart fit each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

Render = Callable[[str], Any]
ROLES = ("rollout", "reward", "buffer", "learner")
GIVEN_FROM_OUTSIDE = {
    "Secret": {"books", "curve", "more", "hub", "pull"},
    "PersistentVolumeClaim": {"models", "lustre"},
}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def references(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, name) of everything that a pod's spec needs."""
    yield "ServiceAccount", spec["serviceAccountName"]
    for volume in spec["volumes"]:
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for pull in spec.get("imagePullSecrets", []):
        yield "Secret", pull["name"]
    for container in spec["containers"]:
        for each in container.get("envFrom", []):
            yield "Secret", each["secretRef"]["name"]
        for each in container.get("env", []):
            if key := each.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", key["name"]


def test_selectors_find_their_own_pods_and_no_others(rendered: Any) -> None:
    pods = [(name, labels) for name, labels, _ in rendered.pods()]
    for workload in rendered.workloads():
        if workload["kind"] == "Job":
            continue  # the controller makes a Job's selector itself
        found = [name for name, labels in pods if matches(workload["spec"]["selector"]["matchLabels"], labels)]
        assert found == [workload["metadata"]["name"]]
    one_each = [*rendered.of("PodDisruptionBudget"), *rendered.of("NetworkPolicy")]
    for each in one_each:
        selector = each["spec"].get("selector", each["spec"].get("podSelector"))["matchLabels"]
        assert len([name for name, labels in pods if matches(selector, labels)]) == 1, each["metadata"]["name"]
    for monitor in rendered.of("PodMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        assert all(matches(selector, labels) for _, labels in pods)


def test_services_lead_to_ports_that_a_pod_has(rendered: Any) -> None:
    for service in rendered.of("Service"):
        ((_, _, spec),) = [pod for pod in rendered.pods() if matches(service["spec"]["selector"], pod[1])]
        ports = {port["name"]: port["containerPort"] for c in spec["containers"] for port in c["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_governing_services_exist(rendered: Any) -> None:
    services = {each["metadata"]["name"] for each in rendered.of("Service")}
    for each in rendered.of("StatefulSet"):
        assert each["spec"]["serviceName"] in services
    (job,) = rendered.of("Job")
    assert job["spec"]["template"]["spec"]["subdomain"] in services


def test_probes_name_ports_that_the_container_has(rendered: Any) -> None:
    for _, _, spec in rendered.pods():
        for container in spec["containers"]:
            names = {port["name"] for port in container.get("ports", [])}
            probes = [container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")]
            if container["name"] == "audit":
                continue
            assert all(probes), container["name"]
            for probe in probes:
                how = probe.get("httpGet") or probe.get("tcpSocket") or {"port": next(iter(names))}
                assert how["port"] in names


def test_ports_are_those_that_the_environment_sets(rendered: Any) -> None:
    for role in ROLES:
        container = rendered.container(role)
        env = {each["name"]: each.get("value") for each in container["env"]}
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert ports["metrics"] == env["SLIPSTREAM__NETWORK__METRICS_PORT"]
        assert ports.get("groups") == env.get("SLIPSTREAM__NETWORK__PORT")
        assert ports.get("weights") == env.get("SLIPSTREAM__WEIGHTS__PORT")


def test_everything_named_exists(rendered: Any) -> None:
    made = {(each["kind"], each["metadata"]["name"]) for each in rendered.objects}
    for name, _, spec in rendered.pods():
        for kind, wanted in references(spec):
            outside = GIVEN_FROM_OUTSIDE.get(kind, set())
            default = (kind, wanted) == ("ServiceAccount", "default")
            assert (kind, wanted) in made or wanted in outside or default, (name, kind, wanted)


def test_every_mount_has_its_volume_and_the_reverse(rendered: Any) -> None:
    for workload in [*rendered.workloads(), *rendered.of("Pod")]:
        spec = workload["spec"].get("template", workload)["spec"]
        claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = [volume["name"] for volume in spec["volumes"]] + claims
        mounts = [mount["name"] for c in spec["containers"] for mount in c["volumeMounts"]]
        assert sorted(volumes) == sorted(mounts), workload["metadata"]["name"]
        paths = [mount["mountPath"] for c in spec["containers"] for mount in c["volumeMounts"]]
        assert len(set(paths)) == len(paths)


def test_keys_of_config_maps_and_secrets_are_those_that_are_mounted(rendered: Any) -> None:
    (secrets, books) = (rendered.of("Secret"), rendered.values["redis"])
    for _, _, spec in rendered.pods():
        secret = {v["name"]: v["secret"]["items"] for v in spec["volumes"] if "secret" in v}
        items = secret.get("redis") or secret["password"]
        assert secret.get("keys", [{"key": "curve.key", "path": "curve.key"}]) == [
            {"key": "curve.key", "path": "curve.key"}
        ]
        assert items == [{"key": books["secretKey"], "path": "password"}]
    assert [list(each["data"]) for each in secrets] == (
        [] if books["existingSecret"] else [[books["secretKey"]]]
    )


@pytest.mark.parametrize(
    "release", ["a", "slipstream", "x" * 53, "a-slipstream-with-a-name-of-53-characters-in-all-0000"]
)
def test_names_are_short_enough_and_unlike(release: str, render: Callable[..., Any], everything: str) -> None:
    """Helm's own limit for a release is 53; hosts and labels may have 63, and pods get a suffix of up to 17."""
    rendered = render(everything, name=release)
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered.objects]
    assert len(set(names)) == len(names)
    room = {"Deployment": 17, "StatefulSet": 3, "Job": 9}
    for kind, name in names:
        assert len(name) + room.get(kind, 0) <= 63, name
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name), name
    for each in rendered.objects:
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


def test_images_have_a_tag_that_stays(rendered: Any) -> None:
    for _, _, spec in rendered.pods():
        for container in spec["containers"]:
            _, _, tag = container["image"].rpartition(":")
            assert tag
            assert "latest" not in tag
            assert "/" not in tag


def test_roles_that_need_torch_have_an_image_with_it(rendered: Any) -> None:
    for role in ("rollout", "learner"):
        assert rendered.container(role)["image"].endswith(("-cpu", "-gpu"))


def test_requests_and_limits_are_set_and_fit(rendered: Any) -> None:
    for name, _, spec in rendered.pods():
        for container in spec["containers"]:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            for resource in ("cpu", "memory", "ephemeral-storage"):
                assert 0 < quantity(requests[resource]) <= quantity(limits[resource]), (name, resource)
            extended = {key for key in limits if "/" in key}
            assert all(requests[key] == limits[key] for key in extended)
            shm = [v["emptyDir"]["sizeLimit"] for v in spec["volumes"] if v["name"] == "shm"]
            assert all(quantity(size) < quantity(limits["memory"]) for size in shm)
        assert spec["terminationGracePeriodSeconds"] > 0 if "terminationGracePeriodSeconds" in spec else True


def quantity(value: str | float) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(m|[KMGTP]i?)?", str(value)).groups()  # type: ignore[union-attr]
    powers = {"m": 1e-3, None: 1.0} | {u: 1e3 ** (i + 1) for i, u in enumerate("KMGTP")}
    powers |= {f"{u}i": 1024.0 ** (i + 1) for i, u in enumerate("KMGTP")}
    return float(number) * powers[unit]


def test_pods_are_locked_down(rendered: Any) -> None:
    for _, _, spec in rendered.pods():
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]


def test_no_secret_stands_in_a_command_or_an_environment(rendered: Any) -> None:
    (made,) = [[*each["data"].values()] for each in rendered.of("Secret")] or [[]]
    text = yaml.safe_dump([spec for _, _, spec in rendered.pods()])
    assert not any(secret in text for secret in made)


def test_senders_end_before_those_they_send_to(rendered: Any) -> None:
    """Each role has its whole drain before the next one hears of the end; all within their grace period."""

    def delay(container: dict[str, Any]) -> int:
        return int(
            container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1]
        )

    drain = rendered.values["drainSeconds"]
    specs = {c["name"]: (c, spec) for _, _, spec in rendered.pods() for c in spec["containers"]}
    order = [delay(specs[role][0]) for role in ("rollout", "reward", "buffer", "redis") if role in specs]
    assert order == sorted(set(order))
    assert order[0] == 0
    assert order[1] >= drain
    for name, (container, spec) in specs.items():
        if name != "audit":
            assert spec["terminationGracePeriodSeconds"] >= delay(container) + 10
    assert specs["rollout"][1]["terminationGracePeriodSeconds"] > drain


def test_policies_allow_the_links_of_the_design_and_no_other(render: Render) -> None:
    rendered = render("")
    allowed = {
        (source, target, port)
        for policy in rendered.of("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
        if "podSelector" in peer
        for source in [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]]
        for target in [policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]]
        for port in ([each["port"] for each in rule["ports"]] if "ports" in rule else ["any"])
    }
    assert allowed == {
        ("rollout", "reward", 9401),
        ("reward", "buffer", 9401),
        ("learner", "buffer", 9401),
        ("rollout", "learner", 9402),
        ("learner", "learner", "any"),
        ("rollout", "rollout", "any"),
        *((role, "redis", 6379) for role in (*ROLES, "audit")),
    }
    for policy in rendered.of("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_every_way_in_has_a_way_out(rendered: Any) -> None:
    """A link needs both: what the one side may send, the other may receive."""
    policies = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"]
        for each in rendered.of("NetworkPolicy")
    }
    component = "app.kubernetes.io/component"

    def peers(role: str, rules: str, side: str) -> set[str]:
        found = [peer for rule in policies[role][rules] for peer in rule.get(side, []) if "podSelector" in peer]
        return {peer["podSelector"]["matchLabels"][component] for peer in found}

    ways_in = {(source, role) for role in policies for source in peers(role, "ingress", "from")}
    ways_out = {(role, target) for role in policies for target in peers(role, "egress", "to")}
    assert ways_in == ways_out


def test_an_external_server_is_reached_at_its_port(render: Render) -> None:
    base = "redis: {enabled: false, existingSecret: s, url: %s}"
    for url, port in [("rediss://user@books.example:6380/3", 6380), ("redis://books.example/0", 6379)]:
        rendered = render(base % url)
        rules = rendered.named("NetworkPolicy", "-reward")["spec"]["egress"]
        assert [{"protocol": "TCP", "port": port}] in [rule.get("ports") for rule in rules]
        assert not [each for each in rendered.of("StatefulSet") if each["metadata"]["name"].endswith("-redis")]


def test_ranks_meet_at_the_first_pod_of_the_job(render: Render) -> None:
    rendered = render("learner: {nodes: 2, ranksPerNode: 4, storage: {accessMode: ReadWriteMany}}")
    (job,) = rendered.of("Job")
    command = rendered.container("learner")["command"]
    name, service = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert f"--rdzv-endpoint={name}-0.{service}:29500" in command
    assert {"--nnodes=2", "--nproc-per-node=4"} <= set(command)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    assert rendered.named("Service", "-learner")["spec"]["publishNotReadyAddresses"] is True


def test_an_upgrade_makes_a_new_job_and_leaves_the_claims(chart: Any) -> None:
    """A Job's template cannot be changed, so the learner's carries the revision in its name."""
    import helm_python

    with helm_python.Chart.load(chart) as loaded:
        names = []
        for revision in (1, 2):
            files = loaded.render({}, name="sums", namespace="rl", revision=revision, is_upgrade=revision > 1)
            objects = [
                o for path, text in files.items() if path.endswith(".yaml") for o in yaml.safe_load_all(text)
            ]
            names.append({(each["kind"], each["metadata"]["name"]) for each in objects if each})
    assert names[0] ^ names[1] == {("Job", "sums-slipstream-learner-1"), ("Job", "sums-slipstream-learner-2")}


def test_the_monitor_reads_a_port_that_every_role_has(render: Render, everything: str) -> None:
    rendered = render(everything)
    (monitor,) = rendered.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for role in ROLES:
        assert endpoint["port"] in {port["name"] for port in rendered.container(role)["ports"]}
    assert {each["targetLabel"] for each in endpoint["relabelings"]} == {"role", "process"}


def test_the_scaler_replaces_the_replicas(render: Render, everything: str) -> None:
    rendered = render(everything)
    (scaler,) = rendered.of("ScaledObject")
    target = rendered.named("Deployment", "-rollout")
    assert scaler["spec"]["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert "replicas" not in target["spec"]
    assert scaler["spec"]["minReplicaCount"] <= scaler["spec"]["maxReplicaCount"]
    (trigger,) = scaler["spec"]["triggers"]
    assert 0 < float(trigger["metadata"]["threshold"]) < 1
    assert trigger["metadata"]["query"].split() == [
        'sum(rate(slipstream_learner_seconds_total{part="wait",',
        'run="2024",',
        'namespace="rl"}[5m]))',
        "/",
        'sum(rate(slipstream_learner_seconds_total{run="2024",',
        'namespace="rl"}[5m]))',
    ]
    assert not render("").of("ScaledObject")
