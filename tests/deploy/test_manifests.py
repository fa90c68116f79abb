"""The manifests are what the Kubernetes API accepts, and fit each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from tests.deploy.kustomization import KUBERNETES, Manifest, Refused, Rendering
from tests.deploy.network import Pod, allows

_OLDEST, _NEWEST = "1.30", "1.37"
"""Versions of Kubernetes, as deploy/kubernetes/README.md names them."""


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    labels: dict[str, str]
    namespace: str


class _Selector(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    match_labels: dict[str, str]


class _Endpoint(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    port: str
    path: str
    interval: str
    scrape_timeout: str


class _MonitorSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    job_label: str
    selector: _Selector
    endpoints: list[_Endpoint]


class ServiceMonitor(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """The fields in use of the Prometheus operator's resource (monitoring.coreos.com/v1)."""

    api_version: str
    kind: str
    metadata: _Metadata
    spec: _MonitorSpec


def containers(rendering: Rendering) -> Iterator[tuple[Manifest, dict[str, Any]]]:
    """Each container with the workload it belongs to."""
    for workload in rendering.workloads():
        for container in workload["spec"]["template"]["spec"]["containers"]:
            yield workload, container


def pods(rendering: Rendering) -> Iterator[dict[str, Any]]:
    for workload in rendering.workloads():
        yield workload["spec"]["template"]["spec"]


def selected(rendering: Rendering, selector: dict[str, str]) -> list[Manifest]:
    """The workloads whose pods a selector matches."""
    return [
        workload
        for workload in rendering.workloads()
        if selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]


@pytest.mark.parametrize("version", [_OLDEST, _NEWEST])
def test_every_manifest_has_the_form_that_kubernetes_accepts(overlay: Rendering, version: str) -> None:
    """By the strict schemas of the oldest version that is named, and of the newest that is known."""
    for manifest in overlay.manifests:
        if manifest["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_is_refused(dev: Rendering) -> None:
    """By the same schemas."""
    gateway = msgspec.json.decode(msgspec.json.encode(dev.one("Deployment", "keepgate-gateway")))
    gateway["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(gateway, _NEWEST, strict=True)


def test_no_file_is_left_over() -> None:
    """Each is part of an overlay, or of a component that an operator adds to one."""
    kustomizations = sorted(KUBERNETES.rglob("kustomization.yaml"))
    rendered = [Rendering(file.parent).files for file in kustomizations if "overlays" in file.parts]
    optional = KUBERNETES / "components" / "requests-in-flight"
    used = set().union(*rendered, optional.glob("*.yaml"))
    assert {file for file in KUBERNETES.rglob("*.yaml") if file.resolve() not in used} == set()


def test_the_optional_metric_is_added_to_the_autoscaler(tmp_path: Path, dev: Rendering) -> None:
    """An overlay with that component scales by CPU and by requests in flight, and is accepted."""
    optional = KUBERNETES / "components" / "requests-in-flight"
    kustomization = {"resources": [str(KUBERNETES / "overlays" / "dev")], "components": [str(optional)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    autoscaler = Rendering(tmp_path).one("HorizontalPodAutoscaler", "keepgate-gateway")
    kubernetes_validate.validate(autoscaler, _OLDEST, strict=True)
    assert [metric["type"] for metric in autoscaler["spec"]["metrics"]] == ["Resource", "Pods"]
    metric = autoscaler["spec"]["metrics"][1]["pods"]["metric"]["name"]
    assert metric in (KUBERNETES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kustomization", "message"),
    [
        ({"replacements": []}, "does not know"),
        ({"patches": [{"target": {"version": "v1", "kind": "Pod", "name": "none"}, "path": "p.yaml"}]}, "there are 0"),
        ({"configMapGenerator": [{"name": "a", "files": []}]}, "with a hash"),
    ],
)
def test_what_is_not_rendered_is_refused(tmp_path: Path, kustomization: dict[str, Any], message: str) -> None:
    """A field that the renderer of these tests does not know, and a patch of nothing."""
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (tmp_path / "p.yaml").write_text("[]")
    with pytest.raises(Refused, match=message):
        Rendering(tmp_path)


def test_services_lead_to_ports_of_pods(overlay: Rendering) -> None:
    """Each selects one workload, and names a port of it."""
    assert overlay.of("Service")
    for service in overlay.of("Service"):
        (workload,) = selected(overlay, service["spec"]["selector"])
        named = {
            port["name"]: port["containerPort"]
            for container in workload["spec"]["template"]["spec"]["containers"]
            for port in container["ports"]
        }
        for port in service["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_replicas_of_a_stateful_set_have_names(overlay: Rendering) -> None:
    """Its Service is headless."""
    for workload in overlay.of("StatefulSet"):
        service = overlay.one("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert selected(overlay, service["spec"]["selector"]) == [workload]


def test_pods_match_the_selector_of_their_workload(overlay: Rendering) -> None:
    """And nobody else's."""
    for workload in overlay.workloads():
        assert selected(overlay, workload["spec"]["selector"]["matchLabels"]) == [workload]


def test_what_serves_requests_survives_a_drained_node(overlay: Rendering) -> None:
    """The gateway and every engine have a budget of disruptions, which always lets one pod go, and are spread."""
    guarded = []
    for budget in overlay.of("PodDisruptionBudget"):
        (workload,) = selected(overlay, budget["spec"]["selector"]["matchLabels"])
        assert budget["spec"]["maxUnavailable"] == 1
        guarded.append(workload)
    for workload in guarded:
        constraints = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert all(selected(overlay, c["labelSelector"]["matchLabels"]) == [workload] for c in constraints)
    assert [w for w in overlay.workloads() if w not in guarded and w["metadata"]["name"] != "keepgate-valkey"] == []


def test_the_autoscaler_owns_the_number_of_gateways(overlay: Rendering) -> None:
    """It scales a Deployment that is there, by a share of a CPU request that is there, and no manifest resets it."""
    (autoscaler,) = overlay.of("HorizontalPodAutoscaler")
    target = autoscaler["spec"]["scaleTargetRef"]
    deployment = overlay.one(target["kind"], target["name"])
    assert deployment["apiVersion"] == target["apiVersion"]
    assert "replicas" not in deployment["spec"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "cpu" in container["resources"]["requests"]
    assert "cpu" not in container["resources"]["limits"]


def test_pods_have_no_rights(overlay: Rendering) -> None:
    """What the namespace enforces (Pod Security Standards, restricted), a read-only root, and no token of the API."""
    (namespace,) = overlay.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(overlay):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {kind for volume in pod.get("volumes", ()) for kind in volume} <= {
            *("name", "configMap", "secret", "emptyDir")
        }
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}
    for _, container in containers(overlay):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_containers_are_measured_and_probed(overlay: Rendering) -> None:
    """Each asks for CPU and memory, has a limit of memory, and says when it has started and when it can serve."""
    for _, container in containers(overlay):
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        assert {"startupProbe", "readinessProbe"} <= container.keys()


def test_mounts_and_volumes_belong_together(overlay: Rendering) -> None:
    """No mount without a volume, and no volume without a mount; none of a single file, which would not be renewed."""
    for workload, container in containers(overlay):
        pod = workload["spec"]["template"]["spec"]
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes = {volume["name"] for volume in pod.get("volumes", ())} | {c["metadata"]["name"] for c in claims}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert not any("subPath" in mount for mount in container["volumeMounts"])


def test_a_gpu_is_requested_where_an_overlay_is_for_one() -> None:
    """One for each engine, on nodes that are kept for them; in no other overlay."""
    for name, engine in (("gpu", "keepgate-engine"), ("vllm", "keepgate-vllm")):
        workload = Rendering(KUBERNETES / "overlays" / name).one("StatefulSet", engine)
        pod = workload["spec"]["template"]["spec"]
        resources = pod["containers"][0]["resources"]
        assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for name in ("dev", "external"):
        text = msgspec.json.encode(Rendering(KUBERNETES / "overlays" / name).manifests)
        assert b"nvidia.com" not in text


def test_prometheus_finds_the_metrics() -> None:
    """The ServiceMonitor has fields of its kind alone, and selects the gateway and engines, which it may reach."""
    prometheus = Pod({"app.kubernetes.io/name": "prometheus"}, "monitoring")
    for name, components in (("external", {"gateway"}), ("gpu", {"gateway", "engine"}), ("vllm", {"gateway", "vllm"})):
        rendering = Rendering(KUBERNETES / "overlays" / name)
        (manifest,) = rendering.of("ServiceMonitor")
        monitor = msgspec.convert(manifest, ServiceMonitor)
        assert monitor.api_version == "monitoring.coreos.com/v1"
        (endpoint,) = monitor.spec.endpoints
        assert endpoint.path == "/metrics"
        found = set()
        for service in rendering.of("Service"):
            ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
            labels = service["metadata"]["labels"]
            if monitor.spec.selector.match_labels.items() <= labels.items() and endpoint.port in ports:
                (workload,) = selected(rendering, service["spec"]["selector"])
                pod = Pod(workload["spec"]["template"]["metadata"]["labels"])
                assert allows(rendering.of("NetworkPolicy"), prometheus, pod, ports[endpoint.port])
                found.add(labels[monitor.spec.job_label])
        assert found == components
