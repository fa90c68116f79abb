"""What compose.yaml and Dockerfile ask for; nothing is built or started."""

import json
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from backend.commands.command_line import Parser
from backend.commands.serve import add_arguments
from gateway.settings.sources import load
from prefix_store.connectors.options import read_options
from prefix_store.connectors.vllm_support import TESTED

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("backend", "backend-gpu")
GATEWAYS = ("gateway", "gateway-semantic", "gateway-gpu", "gateway-vllm", "gateway-vllm-cpu")
VLLMS = ("vllm-1", "vllm-2", "vllm-cpu-1", "vllm-cpu-2")
EVERYWHERE = "0.0.0.0"  # noqa: S104  # within a container
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
ONCE = {"prepare"}
"""What ends when its work is done."""
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return SERVICES


def aliases(service: str, network: str) -> list[str]:
    """The names that a service has in a network beside its own."""
    networks = SERVICES[service].get("networks", {})
    return networks[network].get("aliases", []) if isinstance(networks, dict) and network in networks else []


def with_defaults(value: Any) -> Any:
    """The same with the defaults of its variables."""
    if isinstance(value, dict):
        return {key: with_defaults(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    return VARIABLE.sub(lambda match: match[2] or "", value) if isinstance(value, str) else value


def test_without_a_profile_nothing_asks_for_a_gpu(services: dict[str, Any]) -> None:
    """Then these start: the store, the engine on the CPU, the gateway in front of it, and what watches them."""
    plain = {name for name, service in services.items() if "profiles" not in service}
    assert plain == {"prepare", "redis", "backend", "gateway", "prometheus", "disks", "grafana"}
    assert not any("deploy" in services[name] for name in plain)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    """It does not run as root or gain privileges, and writes only to volumes and memory."""
    service = SERVICES[name]
    user, _, group = service["user"].partition(":")
    assert user.isdecimal()
    assert int(user) > 0
    assert group.isdecimal()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert not {"cap_add", "privileged", "pid", "ipc", "userns_mode"} & service.keys()
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("network_mode") in (None, "none")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_ends_is_started_again_and_one_that_hangs_is_seen(name: str) -> None:
    """But for what ends when its work is done, which others wait for. None fills the disk with its log."""
    service = SERVICES[name]
    if name in ONCE:
        assert service["restart"] == "no"
        waiting = [other for other in SERVICES.values() if name in other.get("depends_on", {})]
        assert waiting
        assert all(other["depends_on"][name] == {"condition": "service_completed_successfully"} for other in waiting)
    else:
        assert service["restart"] == "unless-stopped"
        check = service["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL")
        assert {"interval", "timeout", "retries"} <= check.keys()
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_until_what_it_needs_is_well(name: str) -> None:
    """Not only until it has been started."""
    for other, waited in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if other in ONCE else "service_healthy"
        assert waited == {"condition": expected}, other


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_for_this_host_alone(name: str) -> None:
    """The gateway's too, until somebody says otherwise; Redis and engines publish none."""
    ports = with_defaults(SERVICES[name].get("ports", []))
    assert all(port.startswith("127.0.0.1:") for port in ports)
    published = {"prometheus", "grafana", "chat", *GATEWAYS}
    assert bool(ports) == (name in published)


@pytest.mark.parametrize("name", SERVICES)
def test_a_base_image_has_an_exact_version(name: str) -> None:
    """So that what is built and started tomorrow is what was tried today."""
    image = SERVICES[name].get("image")
    if image is None:
        assert "build" in SERVICES[name]
    else:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_the_dockerfile_has_one_base_of_an_exact_version() -> None:
    """Which may be given with its digest."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"(?m)^ARG PYTHON_IMAGE=(\S+)$", text)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    stages = re.findall(r"(?m)^FROM (\S+) AS (\S+)$", text)
    names = {name for _, name in stages}
    assert {source for source, _ in stages} - names == {"${PYTHON_IMAGE}"}
    assert {"gateway", "backend", "semantic"} <= names
    # The last user of each image is no root.
    assert re.findall(r"(?m)^USER (\S+)$", text)[-1] == "10001:10001"


def test_the_images_with_vllm_have_a_version_that_was_tested() -> None:
    """The official one, and that for CPUs on the base of the others."""
    text = (ROOT / "deploy/vllm/Dockerfile").read_text(encoding="utf-8")
    main = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    bases = dict(re.findall(r"(?m)^ARG (\w+_IMAGE)=(\S+)$", text))
    assert f"ARG PYTHON_IMAGE={bases['PYTHON_IMAGE']}\n" in main
    assert bases["VLLM_IMAGE"].startswith(tuple(f"vllm/vllm-openai:v{version}." for version in TESTED))
    stages = re.findall(r"(?m)^FROM (\S+) AS (\S+)$", text)
    assert stages[-1] == ("${VLLM_IMAGE}", "gpu")  # it cannot be had everywhere, and old builders build all before it
    assert re.findall(r"(?m)^USER (\S+)$", text)[-1] == "10001:10001"


def test_redis_is_out_of_reach_of_apps(services: dict[str, Any]) -> None:
    """Its network leads nowhere else, and only gateways and engines are on it."""
    assert COMPOSE["networks"]["store"] == {"internal": True}
    on_it = {name for name, service in services.items() if "store" in service.get("networks", ())}
    assert on_it == {"redis", *BACKENDS, *VLLMS, *GATEWAYS}
    assert services["redis"]["networks"] == ["store"]


def test_redis_has_less_memory_than_its_container(services: dict[str, Any]) -> None:
    """While it rewrites its file it may need twice what it holds."""
    redis = with_defaults(services["redis"])
    command = redis["command"]
    held = int(command[command.index("--maxmemory") + 1].removesuffix("mb"))
    assert int(redis["mem_limit"].removesuffix("m")) >= 2 * held
    assert command[command.index("--maxmemory-policy") + 1] == "volatile-lru"
    assert "redis-data:/data" in redis["volumes"]


@pytest.mark.parametrize("name", GATEWAYS)
def test_gateways_have_settings_that_are_some(name: str, tmp_path: Path) -> None:
    """What the environment and the file say is accepted, and the admin key is in a file that the service has."""
    variables = with_defaults(SERVICES[name]["environment"])
    secret = variables.pop("KEEPGATE_ADMIN_KEY_FILE")
    config = variables.pop("KEEPGATE_CONFIG")
    places = {mount.split(":")[1]: mount for mount in SERVICES[name]["volumes"]}
    assert places[str(Path(secret).parent)] == "secrets:/run/keepgate/secrets:ro"
    assert places[str(Path(config).parent)].split(":")[::2] == ["./deploy/gateway", "ro"]
    (tmp_path / "key").write_text("hush")
    file = ROOT / "deploy/gateway" / Path(config).name
    settings, warnings = load(file, {**variables, "KEEPGATE_ADMIN_KEY_FILE": str(tmp_path / "key")}, {})
    assert warnings == []
    assert (settings.admin_key, settings.redis) == ("hush", "redis://redis:6379/0")


@pytest.mark.parametrize("name", GATEWAYS)
def test_gateways_can_be_found_by_one_name(name: str) -> None:
    """By Prometheus and apps, whichever of them runs; and what is asked by default is what is waited for."""
    assert SERVICES[name]["networks"]["default"]["aliases"] == ["keepgate"]
    asked = with_defaults(SERVICES[name]["environment"]["KEEPGATE_UPSTREAMS"])
    urls = [upstream["url"] for upstream in json.loads(asked)] if asked.startswith("[") else [asked]
    known = [name_of for service in SERVICES[name]["depends_on"] for name_of in (service, *aliases(service, "default"))]
    assert {urlsplit(url).hostname for url in urls} <= set(known)


def test_no_secret_is_in_a_variable(services: dict[str, Any]) -> None:
    """But the name of its file. Tokens of a shell may pass, which compose.yaml does not know."""
    for name, service in services.items():
        for variable, value in (service.get("environment") or {}).items():
            if re.search(r"KEY|SECRET|PASSWORD|TOKEN", variable) and value is not None:
                is_file = variable.endswith("_FILE") and str(value).startswith("/")
                assert is_file or (name, variable) == ("chat", "OPENAI_API_KEY"), (name, variable)


def test_every_variable_is_in_the_example() -> None:
    """With its default, and the example has no other."""
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    used = {name: default for name, default in VARIABLE.findall(text) if name.startswith("KEEPGATE_")}
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    shown = dict(re.findall(r"(?m)^#(KEEPGATE_\w+)=(.*)$", example))
    assert shown.keys() == used.keys()
    several = {"KEEPGATE_MODEL", "KEEPGATE_GATEWAY_LIMIT"}  # services differ in these
    assert {name: shown[name] for name in shown.keys() - several} == {n: used[n] for n in used.keys() - several}


def test_volumes_are_declared_and_used(services: dict[str, Any]) -> None:
    """And disks watches all that grow."""
    mounts = [mount for service in services.values() for mount in service.get("volumes", ())]
    named = {mount.partition(":")[0] for mount in mounts if not mount.startswith("./")}
    assert named == COMPOSE["volumes"].keys()
    watched = {mount.partition(":")[0] for mount in services["disks"]["volumes"]}
    assert {"redis-data", "models", "prefixes", "gateway-state", "prometheus-data"} == watched
    assert all(mount.endswith(":ro") for mount in services["disks"]["volumes"])
    assert all((ROOT / mount.partition(":")[0]).is_dir() for mount in mounts if mount.startswith("./"))


@pytest.mark.parametrize(
    ("gateway", "engines"), [("gateway-gpu", ["backend-gpu"]), ("gateway-vllm", ["vllm-1", "vllm-2"])]
)
def test_a_profile_with_a_gpu_reserves_devices(services: dict[str, Any], gateway: str, engines: list[str]) -> None:
    """One for each engine that its gateway waits for and asks."""
    wanted = [with_defaults(services[engine]["deploy"])["resources"]["reservations"]["devices"] for engine in engines]
    for (device,), engine in zip(wanted, engines, strict=True):
        assert services[engine]["profiles"] == services[gateway]["profiles"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    if len(engines) > 1:
        assert [device["device_ids"] for (device,) in wanted] == [[str(place)] for place in range(len(engines))]
    assert set(services[gateway]["depends_on"]) == {"prepare", "redis", *engines}


def options_of(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a vLLM is told of its connector, of its events, and the options of the connector."""
    shell, _, script, _ = with_defaults(SERVICES[name]["entrypoint"])
    assert shell == "sh"
    words = shlex.split(script.replace("$$HOSTNAME", SERVICES[name]["hostname"]).replace("\\\n", " "))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    events = json.loads(words[words.index("--kv-events-config") + 1])
    return transfer, events, transfer["kv_connector_extra_config"]


@pytest.mark.parametrize("name", VLLMS)
def test_vllms_share_what_they_prefilled(name: str) -> None:
    """On the volume of the engines, with their secret and their index; where they publish is where vLLM listens."""
    transfer, events, given = options_of(name)
    assert transfer["kv_connector_module_path"] == "prefix_store.connectors.vllm"
    options, engine = read_options(given), told(SERVICES["backend"])
    assert options.disk == str(engine.prefix_disk)
    assert options.secret_file == str(engine.prefix_secret_file)
    assert options.index == engine.prefix_index
    assert any(mount == "prefixes:/home/keepgate/prefixes" for mount in SERVICES[name]["volumes"])
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:5557", "tcp://*:5558")


@pytest.mark.parametrize("name", VLLMS)
def test_stores_of_vllm_are_out_of_reach_of_apps(name: str) -> None:
    """The name that they listen at is one of the network of Redis alone; gateways know them by it."""
    _, _, given = options_of(name)
    host = urlsplit(given["address"]).hostname
    assert aliases(name, "store") == [host]
    assert host not in aliases(name, "default")
    assert "listen" not in given
    gateway = "gateway-vllm-cpu" if "cpu" in name else "gateway-vllm"
    upstreams = json.loads(SERVICES[gateway]["environment"]["KEEPGATE_UPSTREAMS"])
    (own,) = (each for each in upstreams if each["prefix_url"] == given["address"])
    assert urlsplit(own["url"]).hostname in (name, *aliases(name, "default"))
    assert own["kv_events"] == "auto"


def test_the_engine_on_a_gpu_is_the_same_image(services: dict[str, Any]) -> None:
    """With another model."""
    backend = services["backend-gpu"]
    assert backend["build"] == services["backend"]["build"]
    assert backend["command"][-2:] == ["--model", "${KEEPGATE_MODEL:-default}"]


def told(service: dict[str, Any]) -> Namespace:
    """What the engine's own command line understands, with the variables that have defaults left out."""
    program, command, *words = with_defaults(service["command"])
    assert (program, command) == ("keepgate", "backend")
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("name", BACKENDS)
def test_engines_keep_what_they_prefilled(services: dict[str, Any], name: str) -> None:
    """On a volume, with the secret beside it, and with an index that is not among the answers."""
    options = told(services[name])
    (folder,) = (mount.partition(":")[2] for mount in services[name]["volumes"] if mount.startswith("prefixes:"))
    assert options.prefix_disk.is_relative_to(folder)
    assert options.prefix_secret_file.parent == Path(folder)
    assert options.prefix_disk_size == 4 * 2**30
    answers = urlsplit(services["gateway"]["environment"]["KEEPGATE_REDIS"])
    index = urlsplit(options.prefix_index)
    assert index.netloc == answers.netloc
    assert index.path != answers.path


def test_engines_that_share_a_volume_share_the_secret(services: dict[str, Any]) -> None:
    """Each can use what the other has left, and they find each other by names of their own containers."""
    first, second = (told(services[name]) for name in BACKENDS)
    assert first.prefix_secret_file == second.prefix_secret_file
    assert first.prefix_disk == second.prefix_disk
    assert (first.prefix_name, first.prefix_address) == (second.prefix_name, second.prefix_address) == ("", "")
    assert first.host == second.host == EVERYWHERE


def test_the_chat_ui_asks_the_gateway_and_nobody_else(services: dict[str, Any]) -> None:
    """Nothing is fetched or reported, and its one connection is the name that any gateway has."""
    variables = services["chat"]["environment"]
    assert variables["OPENAI_API_BASE_URL"] == "http://keepgate:8080/v1"
    assert variables["OFFLINE_MODE"] == variables["DO_NOT_TRACK"] == "true"
    assert variables["ENABLE_OLLAMA_API"] == variables["ENABLE_VERSION_UPDATE_CHECK"] == "false"
    assert services["chat"]["profiles"] == ["chat"]
