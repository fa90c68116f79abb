"""What the manifests tell the gateway and the engine is what these understand."""

import base64
import inspect
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from backend.api.app import create_app
from backend.commands.command_line import Parser
from backend.commands.serve import add_arguments
from gateway.routing.models import check_models
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from gateway.settings.sources import load
from gateway.upstreams.identity import check_api_keys
from gateway.upstreams.mock import MockUpstream
from prefix_store.connectors.options import read_options
from prefix_store.store.options import read_size
from tests.deploy.kustomization import KUBERNETES, Manifest, Rendering
from tests.deploy.network import Address, Pod, allows
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage, stage

__all__ = ["stage"]

SECRETS = "/run/secrets/keepgate/"
_EXAMPLES = {
    "redis-url": "rediss://user:password@redis.example.org:6379/0",
    "admin-key": "0123456789abcdef",
    "openai-key": "sk-0123456789abcdef",
}
_GATEWAY = Pod({"app.kubernetes.io/name": "keepgate", "app.kubernetes.io/component": "gateway"})
_APP = Pod({"app": "chat"}, "chat", {"keepgate-client": "true"})
_STRANGER = Pod({"app": "chat"}, "elsewhere")
_PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, "monitoring")


def container_of(workload: Manifest) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def gateway_of(overlay: Rendering) -> dict[str, Any]:
    return container_of(overlay.one("Deployment", "keepgate-gateway"))


def file_of(overlay: Rendering) -> str:
    """The settings file of an overlay's gateway, by the way that its container finds it."""
    container = gateway_of(overlay)
    folder, _, name = container["args"][-1].rpartition("/")
    (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == folder)
    pod = overlay.one("Deployment", "keepgate-gateway")["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    text: str = overlay.one("ConfigMap", volume["configMap"]["name"])["data"][name]
    return text


def secrets_of(overlay: Rendering) -> dict[str, str]:
    """The files of the gateway's Secret, by name: the overlay's own, or examples of what an operator makes."""
    for secret in overlay.of("Secret"):
        if secret["metadata"]["name"] == "keepgate":
            return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    return _EXAMPLES


def settings_of(overlay: Rendering, folder: Path) -> tuple[Settings, list[str]]:
    """The gateway's settings as `keepgate serve` reads them, with the folder of secrets elsewhere."""

    def check(settings: Settings) -> None:
        check_models(settings.routing, settings.servers)
        check_api_keys(settings.servers)

    for name, secret in secrets_of(overlay).items():
        (folder / name).write_text(secret)
    file = folder / "keepgate.yaml"
    file.write_text(file_of(overlay).replace(SECRETS, f"{folder}/"))
    container = gateway_of(overlay)
    assert container["args"][:-1] == ["keepgate", "serve", "--config"]
    environment = {entry["name"]: entry["value"].replace(SECRETS, f"{folder}/") for entry in container["env"]}
    return load(file, environment, {}, check)


def test_the_gateway_accepts_its_settings(overlay: Rendering, tmp_path: Path) -> None:
    """All of the file and the variables, without a warning; it listens where its probes and its Service ask."""
    settings, warnings = settings_of(overlay, tmp_path)
    assert warnings == []
    assert settings.host == "0.0.0.0"  # noqa: S104  # within a container
    assert [settings.port] == [port["containerPort"] for port in gateway_of(overlay)["ports"]]
    assert settings.workers == 1
    assert settings.admin_key == secrets_of(overlay)["admin-key"]
    assert settings.redis == secrets_of(overlay)["redis-url"]


def test_a_gateway_writes_where_it_may(overlay: Rendering, tmp_path: Path) -> None:
    """Its root is read-only: what it keeps is in a folder that is mounted, and no files are kept for others."""
    settings, _ = settings_of(overlay, tmp_path)
    writable = {mount["mountPath"] for mount in gateway_of(overlay)["volumeMounts"] if not mount.get("readOnly")}
    assert {str(settings.state_path()), "/tmp"} == writable  # noqa: S108  # where Python's tempfile looks
    assert not settings.batches.enabled


def test_the_memory_tier_fits_the_pod(overlay: Rendering, tmp_path: Path) -> None:
    """It takes no more than half of what the container may."""
    settings, _ = settings_of(overlay, tmp_path)
    limit = gateway_of(overlay)["resources"]["limits"]["memory"]
    assert settings.cache.memory <= int(limit.removesuffix("Gi")) * 2**30 / 2


def test_a_pod_ends_after_its_requests(overlay: Rendering, tmp_path: Path) -> None:
    """It has time for connections that still arrive, for requests under way, and for what is left to write."""
    settings, _ = settings_of(overlay, tmp_path)
    pod = overlay.one("Deployment", "keepgate-gateway")["spec"]["template"]["spec"]
    command, seconds = gateway_of(overlay)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    left = pod["terminationGracePeriodSeconds"] - int(seconds) - settings.timeouts.shutdown
    assert left >= 5  # seconds for writes to Redis


def test_variables_of_services_are_no_settings(overlay: Rendering) -> None:
    """For a Service named keepgate Kubernetes sets KEEPGATE_PORT to a URL, which is refused: it is told not to."""
    assert "keepgate" in {service["metadata"]["name"] for service in overlay.of("Service")}
    with pytest.raises(SettingsError, match="KEEPGATE_PORT"):
        load(None, {"KEEPGATE_PORT": "tcp://10.96.3.7:8080"}, {})
    for workload in overlay.workloads():
        assert workload["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_every_upstream_is_a_replica_that_can_be_reached(overlay: Rendering, tmp_path: Path) -> None:
    """Names in the settings are those of pods, each pod is named once, and policies let the gateway through."""
    settings, _ = settings_of(overlay, tmp_path)
    policies = overlay.of("NetworkPolicy")
    named = []
    for server in settings.servers:
        for url in filter(None, (server.url, server.kv_events, *server.prefix_urls)):
            parts = urlsplit(url)
            assert parts.hostname is not None
            if parts.hostname.endswith(".com"):
                assert allows(policies, _GATEWAY, Address("203.0.113.7"), 443)
                continue
            assert parts.port is not None
            pod, _, service = parts.hostname.partition(".")
            workload = overlay.one("StatefulSet", pod.rpartition("-")[0])
            assert service == workload["spec"]["serviceName"]
            assert parts.port in [port["containerPort"] for port in container_of(workload)["ports"]]
            assert allows(policies, _GATEWAY, labels_of(workload), parts.port)
            named += [pod] if url == server.url else []
    replicas = [
        f"{workload['metadata']['name']}-{number}"
        for workload in overlay.of("StatefulSet")
        for number in range(workload["spec"]["replicas"])
        if workload["metadata"]["name"] != "keepgate-valkey"
    ]
    assert sorted(named) == replicas


def labels_of(workload: Manifest) -> Pod:
    return Pod(workload["spec"]["template"]["metadata"]["labels"])


def test_the_network_is_open_where_it_has_to_be(overlay: Rendering) -> None:
    """For apps, Prometheus, Redis and DNS."""
    policies = overlay.of("NetworkPolicy")
    dns = Pod({"k8s-app": "kube-dns"}, "kube-system")
    assert allows(policies, _APP, _GATEWAY, 8080)
    assert allows(policies, _PROMETHEUS, _GATEWAY, 8080)
    assert allows(policies, _GATEWAY, Address("10.20.30.40"), 6379)
    assert all(allows(policies, _GATEWAY, dns, 53, protocol) for protocol in ("UDP", "TCP"))
    for workload in overlay.of("StatefulSet"):
        assert allows(policies, labels_of(workload), dns, 53, "UDP")


def test_the_network_is_closed_elsewhere(overlay: Rendering) -> None:
    """For pods of other namespaces, for apps beyond the gateway, and for private addresses."""
    policies = overlay.of("NetworkPolicy")
    assert not allows(policies, _STRANGER, _GATEWAY, 8080)
    assert not allows(policies, _APP, _GATEWAY, 22)
    for private in ("10.20.30.40", "169.254.169.254", "192.168.1.1"):
        assert not allows(policies, _GATEWAY, Address(private), 443)
        assert not allows(policies, _GATEWAY, Address(private), 80)
    for workload in overlay.of("StatefulSet"):
        for port in container_of(workload)["ports"]:
            assert not allows(policies, _APP, labels_of(workload), port["containerPort"])
        assert not allows(policies, labels_of(workload), Address("169.254.169.254"), 443)
        assert not allows(policies, labels_of(workload), _GATEWAY, 8080)


def test_only_the_overlay_for_outside_lets_the_gateway_out() -> None:
    """The others' gateways have their upstreams in the cluster."""
    out = {
        name: allows(
            Rendering(KUBERNETES / "overlays" / name).of("NetworkPolicy"), _GATEWAY, Address("203.0.113.7"), 443
        )
        for name in ("dev", "external", "gpu", "vllm")
    }
    assert out == {"dev": False, "external": True, "gpu": False, "vllm": False}


def test_the_store_of_development_is_reached_by_those_who_use_it(dev: Rendering) -> None:
    """Under the name in the secrets, by the gateway and the engine and nobody else; virtual keys are never evicted."""
    policies = dev.of("NetworkPolicy")
    valkey, engine = (dev.one("StatefulSet", f"keepgate-{name}") for name in ("valkey", "engine"))
    urls = [
        urlsplit(base64.b64decode(secret["data"][key]).decode())
        for secret in dev.of("Secret")
        for key in secret["data"].keys() & {"redis-url", "prefix-index"}
    ]
    assert [(url.hostname, url.port) for url in urls] == [(valkey["spec"]["serviceName"], 6379)] * 2
    assert len({url.path for url in urls}) == 2  # the index of blocks is not among the answers
    assert allows(policies, _GATEWAY, labels_of(valkey), 6379)
    assert allows(policies, labels_of(engine), labels_of(valkey), 6379)
    assert not allows(policies, _STRANGER, labels_of(valkey), 6379)
    words = container_of(valkey)["args"]
    assert words[words.index("--maxmemory-policy") + 1] == "volatile-lru"


def engine_options(overlay: Rendering) -> Namespace:
    """What the engine's own command line understands, with Kubernetes' variables filled in."""
    container = container_of(overlay.one("StatefulSet", "keepgate-engine"))
    values = {entry["name"]: entry.get("value", "keepgate-engine-0") for entry in container["env"]}
    program, command, *words = (re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in container["args"])
    assert (program, command) == ("keepgate", "backend")
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("name", ["dev", "gpu"])
def test_the_engine_accepts_its_options(name: str) -> None:
    """It listens on its port, keeps blocks on a volume that is large enough, and tells others where it is."""
    overlay = Rendering(KUBERNETES / "overlays" / name)
    options = engine_options(overlay)
    workload = overlay.one("StatefulSet", "keepgate-engine")
    container = container_of(workload)
    assert [options.port] == [port["containerPort"] for port in container["ports"]]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {c["metadata"]["name"]: c["spec"]["resources"]["requests"]["storage"] for c in claims_of(workload)}
    volume = int(claims[mounts[str(options.prefix_disk.parent)]].removesuffix("Gi")) * 2**30
    assert options.prefix_disk_size <= 0.9 * volume
    assert str(options.prefix_secret_file) == f"{SECRETS}prefix-secret"
    assert options.prefix_address == f"http://keepgate-engine-0.keepgate-engine:{options.port}"
    assert claims[mounts["/home/keepgate/.cache"]]
    engine = labels_of(workload)
    assert allows(overlay.of("NetworkPolicy"), engine, engine, options.port)


def test_the_prefix_store_under_vllm_accepts_its_options() -> None:
    """Like the engine's: on a volume that is large enough, with the secret, at a port that other replicas reach."""
    overlay = Rendering(KUBERNETES / "overlays" / "vllm")
    workload = overlay.one("StatefulSet", "keepgate-vllm")
    container = container_of(workload)
    (word,) = (word for word in container["args"] if word.startswith("--kv-transfer-config="))
    transfer = json.loads(word.partition("=")[2].replace("$(POD_NAME)", "keepgate-vllm-0"))
    assert transfer["kv_connector_module_path"] == "prefix_store.connectors.vllm"
    options = read_options(transfer["kv_connector_extra_config"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {c["metadata"]["name"]: c["spec"]["resources"]["requests"]["storage"] for c in claims_of(workload)}
    assert options.disk is not None
    volume = int(claims[mounts[str(Path(options.disk).parent)]].removesuffix("Gi")) * 2**30
    assert read_size(str(options.disk_size)) <= 0.9 * volume
    assert options.secret_file == f"{SECRETS}prefix-secret"
    at = urlsplit(options.address)
    assert (at.hostname, options.name) == ("keepgate-vllm-0.keepgate-vllm", "keepgate-vllm-0")
    assert at.port in [port["containerPort"] for port in container["ports"]]
    assert at.port is not None
    vllm = labels_of(workload)
    assert allows(overlay.of("NetworkPolicy"), vllm, vllm, at.port)
    assert allows(overlay.of("NetworkPolicy"), vllm, Address("10.20.30.40"), 6379)


def claims_of(workload: Manifest) -> list[Manifest]:
    claims: list[Manifest] = workload["spec"]["volumeClaimTemplates"]
    return claims


def test_probes_of_the_engine_ask_for_what_it_serves(dev: Rendering) -> None:
    """Paths of its table of routes."""
    container = container_of(dev.one("StatefulSet", "keepgate-engine"))
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[name]["httpGet"]["path"]
        assert f'web.get("{path}"' in inspect.getsource(create_app)


async def probe(client: Client, container: dict[str, Any], name: str) -> int:
    return (await client.get(container[name]["httpGet"]["path"])).status


async def test_a_gateway_that_loses_its_upstreams_still_answers_hits(stage: Stage, dev: Rendering) -> None:
    """It stays in the Service, and alive, as its probes ask; a new one would not be let in yet."""
    container = gateway_of(dev)
    async with MockUpstream().serving() as upstream:
        client = await stage.gateway(upstream)
        await client.gateway.router.refresh()
        assert await probe(client, container, "startupProbe") == 200
        assert (await client.post(chat())).status == 200
    await client.gateway.router.refresh()
    probes = [await probe(client, container, name) for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == [503, 200, 200]
    hit = await client.post(chat())
    assert (hit.status, hit.headers["x-keepgate-cache"]) == (200, "hit")


def test_the_guide_makes_the_secrets_that_are_asked_for(overlay: Rendering) -> None:
    """Every key of a Secret that a pod reads is made by the overlay, or by a command of the README."""
    text = (KUBERNETES / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    made = {
        (name, key)
        for name, rest in re.findall(r"create secret generic (\S+)(.*)", text)
        for key in re.findall(r"--from-literal=([\w-]+)=", rest)
    }
    made |= {(secret["metadata"]["name"], key) for secret in overlay.of("Secret") for key in secret["data"]}
    asked = set()
    for workload in overlay.workloads():
        container = container_of(workload)
        references = [entry["valueFrom"] for entry in container.get("env", ()) if "valueFrom" in entry]
        asked |= {(r["secretKeyRef"]["name"], r["secretKeyRef"]["key"]) for r in references if "secretKeyRef" in r}
        values = [entry.get("value", "") for entry in container.get("env", ())]
        text = " ".join([*container["args"], *values, file_of(overlay) if container["name"] == "gateway" else ""])
        volumes = workload["spec"]["template"]["spec"].get("volumes", ())
        names = [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
        asked |= {(name, key) for name in names for key in re.findall(rf"{SECRETS}([\w-]+)", text)}
    assert asked
    assert asked <= made
