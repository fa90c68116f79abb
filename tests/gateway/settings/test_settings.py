"""Settings: their sources, precedence and errors."""

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.commands.command_line import Parser
from backend.commands.serve import add_arguments
from gateway.routing.models import check_models
from gateway.settings.backend import BackendSettings
from gateway.settings.fields import SettingsError, Size
from gateway.settings.settings import Settings
from gateway.settings.sources import load
from gateway.upstreams.identity import check_api_keys


def from_file(folder: Path, text: str | bytes) -> Settings:
    """The settings of a file named keepgate.yaml."""
    file = folder / "keepgate.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    settings, warnings = load(file, {}, {})
    assert not warnings
    return settings


def from_environment(**variables: str) -> Settings:
    """The settings of these variables, named without KEEPGATE_."""
    settings, warnings = load(None, {f"KEEPGATE_{name}": value for name, value in variables.items()}, {})
    assert not warnings
    return settings


def refusal(*args: Any) -> str:
    """The message with which `load` refuses, which is one line."""
    with pytest.raises(SettingsError) as caught:
        load(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_default_settings() -> None:
    """The defaults are a gateway on loopback port 8080 with an embedded store."""
    settings, warnings = load(None, {}, {})
    assert settings == Settings()
    assert (settings.host, settings.port, settings.redis, settings.upstreams) == ("127.0.0.1", 8080, "embedded", ())
    assert warnings == []


def test_the_precedence_of_file_environment_and_command_line(tmp_path: Path) -> None:
    """Each source overrides only its own keys of an earlier one, in nested groups as well."""
    file = tmp_path / "k.yaml"
    file.write_text("port: 1001\nhost: 10.0.0.1\nworkers: 2\ncache: {ttl: 11, variants: 7}\ntimeouts: {idle: 5}\n")
    environment = {"KEEPGATE_PORT": "1002", "KEEPGATE_HOST": "10.0.0.2", "KEEPGATE_CACHE_TTL": "12"}
    settings, _ = load(file, environment, {"port": "1003", "workers": None})
    assert (settings.port, settings.host, settings.workers) == (1003, "10.0.0.2", 2)
    assert (settings.cache.ttl, settings.cache.variants, settings.cache.sampled) == (12.0, 7, "reuse")
    assert (settings.timeouts.idle, settings.timeouts.connect) == (5.0, 5.0)


def test_the_upstreams_of_a_later_source_replace_earlier_ones(tmp_path: Path) -> None:
    """A list of a later source replaces that of an earlier one."""
    file = tmp_path / "k.yaml"
    file.write_text("upstreams: ['http://a/v1', 'http://b/v1']\n")
    environment = {"KEEPGATE_UPSTREAMS": " http://c , http://d/v1,"}
    assert load(file, {}, {})[0].upstreams == ("http://a/v1", "http://b/v1")
    assert load(file, environment, {})[0].upstreams == ("http://c", "http://d/v1")
    assert load(file, environment, {"upstreams": ["mock:"]})[0].upstreams == ("mock:",)


def test_every_setting_can_come_from_the_environment() -> None:
    """Every setting has a variable, whose text is converted to the setting's type."""
    settings = from_environment(
        PORT="0",
        CACHE_TTL="0.5",
        CACHE_ENABLED="false",
        CACHE_MEMORY="1GiB",
        CACHE_NAMESPACE="header:X-Team",
        TIMEOUTS_FIRST_BYTE="7",
        ADMIN_KEY="hush",
        STATE_DIR="/srv/keepgate",
        LOG_LEVEL="debug",
        REDIS="rediss://user:secret@cache:6380/2?ssl_cert_reqs=none",
    )
    assert (settings.port, settings.cache.ttl, settings.cache.enabled) == (0, 0.5, False)
    assert (settings.cache.memory, settings.cache.namespace) == (2**30, "header:X-Team")
    assert (settings.timeouts.first_byte, settings.admin_key, settings.log_level) == (7.0, "hush", "debug")
    assert settings.state_path() == Path("/srv/keepgate")


@pytest.mark.parametrize(
    ("written", "size"),
    [("1048576", 2**20), ("1MiB", 2**20), ("1 mib", 2**20), ("1.5KiB", 1536), ("2GB", 2 * 10**9), ("4096B", 4096)],
)
def test_a_size_may_have_a_unit(written: str, size: int) -> None:
    """A size may have a binary or decimal unit in either case."""
    assert from_environment(MAX_BODY=written).max_body == size


@given(st.integers(0, 2**50))
def test_a_size_in_bytes_is_itself(size: int) -> None:
    """A size in bytes is exact, up to the largest."""
    assert Size.parse(size) == Size.parse(str(size)) == Size.parse(f"{size} B") == size


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PORT", "eighty", "expected a port from 1 to 65535, or 0 for any free one, got 'eighty'"),
        ("PORT", "80.5", "expected a port from 1 to 65535, or 0 for any free one, got '80.5'"),
        ("PORT", "65536", "expected a port from 1 to 65535, or 0 for any free one, got '65536'"),
        ("PORT", "-1", "expected a port from 1 to 65535, or 0 for any free one, got '-1'"),
        ("PORT", "", "expected a port from 1 to 65535, or 0 for any free one, got nothing; unset it for the default"),
        ("WORKERS", "0", "expected a whole number from 1 to 256, got '0'"),
        ("HOST", " ", "expected text that is not empty, got nothing; unset it for the default"),
        ("ADMIN_KEY", "", "expected one line of text that is not empty, got nothing; unset it for the default"),
        ("UPSTREAMS", ",", "expected URLs such as http://127.0.0.1:8000/v1, or mock:, got nothing; unset it"),
        ("UPSTREAMS", "localhost:8000", "expected URLs such as http://127.0.0.1:8000/v1, or mock:, got 'localhost:"),
        ("UPSTREAMS", "http://a, ftp://b", "expected URLs such as http://127.0.0.1:8000/v1, or mock:, got 'ftp://b'"),
        ("UPSTREAMS", "http://h:99999", "expected URLs such as http://127.0.0.1:8000/v1, or mock:, got 'http://h:99"),
        ("UPSTREAMS", "http://h/v1?key=1", "expected a base URL, without anything from `?` or `#` on"),
        ("UPSTREAMS", "http://u:p@h/v1", "expected a URL without credentials: each caller's own Authorization is"),
        ("REDIS", "localhost:6379", "expected embedded, none, or a URL such as redis://127.0.0.1:6379/0 or unix://"),
        ("REDIS", "redis://h:port", "expected embedded, none, or a URL such as redis://127.0.0.1:6379/0 or unix://"),
        ("REDIS", "redis://h/cache", "expected the number of a database after the last slash, got 'cache'"),
        ("REDIS", "redis://h?db=one", "expected the number of a database, got db='one'"),
        ("REDIS", "redis://h?password=x", "expected the password in front of the host: redis://USER:PASSWORD@HOST"),
        ("REDIS", "redis://h?retries=x", "the option 'retries' of the URL is unknown"),
        ("SEMANTIC_MODEL_URL", "mock:", "expected the URL of a server, such as http://127.0.0.1:8000/v1, got 'mock:'"),
        ("SEMANTIC_MODEL_URL", "http://u:p@h/v1", "expected a URL without credentials: the key is a setting of its"),
        ("SEMANTIC_JUDGE", "http://u:p@h/v1", "expected a URL without credentials: the key is a setting of its"),
        ("SEMANTIC_JUDGE", "http://[::1", "expected embedding, upstream, or the URL of a server, such as http"),
        ("LOG_LEVEL", "loud", "expected one of debug, info, warning and error, got 'loud'"),
        ("MAX_BODY", "5 parsecs", "expected a size such as 256MiB, at least 1KiB, got '5 parsecs'"),
        ("MAX_BODY", "0", "expected a size such as 256MiB, at least 1KiB, got '0'"),
        ("MAX_BODY", "-1", "expected a size such as 256MiB, at least 1KiB, got '-1'"),
        ("CACHE_MEMORY", "9999999GiB", "expected a size such as 256MiB, got '9999999GiB'"),
        ("CACHE_TTL", "soon", "expected seconds, from 0 to ten years, got 'soon'"),
        ("CACHE_TTL", "nan", "expected seconds, from 0 to ten years, got 'nan'"),
        ("CACHE_TTL", "inf", "expected seconds, from 0 to ten years, got 'inf'"),
        ("CACHE_TTL", "-1", "expected seconds, from 0 to ten years, got '-1'"),
        ("CACHE_REDIS_DEADLINE", "0", "expected seconds, more than 0 and at most ten years, got '0'"),
        ("CACHE_ENABLED", "maybe", "expected true or false, got 'maybe'"),
        ("CACHE_NAMESPACE", "cookie", "expected authorization, shared, or header:NAME, got 'cookie'"),
        ("SEMANTIC_POLICY", "vcache", "expected budget or threshold, got 'vcache'"),
        ("CACHE_SAMPLED", "never", "expected one of reuse, variants and bypass, got 'never'"),
        ("CACHE_VARIANTS", "1", "expected a whole number from 2 to 64, got '1'"),
        ("BACKEND_DEVICE", "gpu", "expected one of auto, cpu and cuda, got 'gpu'"),
        ("BACKEND_DTYPE", "half", "expected one of auto, float32, bfloat16 and float16, got 'half'"),
        ("BACKEND_KV_DTYPE", "int4", "expected one of auto, int8 and fp8, got 'int4'"),
        ("BACKEND_KV_MEMORY", "lots", "expected a size such as 512MiB, at least 1KiB, got 'lots'"),
        ("BACKEND_MAX_BATCH", "0", "expected a whole number, 1 or more and below 2147483648, got '0'"),
        ("BACKEND_MAX_SECONDS", "0", "expected seconds, more than 0 and at most ten years, got '0'"),
        ("BACKEND_MAX_WAIT_MS", "-1", "expected milliseconds, 0 or more, got '-1'"),
        ("BACKEND_PREFIX_SHARING", "maybe", "expected true or false, got 'maybe'"),
        ("BACKEND_BATCHING", "greedy", "expected one of continuous, dynamic and static, got 'greedy'"),
        ("BACKEND_PREFIX_MEMORY", "0", "expected a size such as 512MiB, at least 1KiB, got '0'"),
        ("BACKEND_PREFIX_DISK_SIZE", "-1", "expected a size such as 4GiB, or 0 for none, got '-1'"),
        ("BACKEND_PREFIX_DISK_CODEC", "zip", "expected one of plain, int8 and fp8, got 'zip'"),
        ("BACKEND_PREFIX_INDEX", "none", "expected a URL such as redis://127.0.0.1:6379/0 or unix:///run/redis.sock"),
        ("BACKEND_PREFIX_INDEX", "http://u:hush@h", "expected a URL such as redis://127.0.0.1:6379/0 or unix:///run/"),
        ("BACKEND_PREFIX_ADDRESS", "10.0.0.7:8081", "expected a URL such as http://10.0.0.7:8081, got '10.0.0.7:8081'"),
        ("BACKEND_PREFIX_AUDIT", "-1", "expected a whole number, 0 or more and below 2147483648, got '-1'"),
        ("BACKEND_PUBLIC_PREFIX", ",", "expected paths of files, got nothing; unset it for the default"),
        ("BACKEND_CHAT_TEMPLATE", "", "expected the path of a file, got nothing; unset it for the default"),
        ("TIMEOUTS_IDLE", "0", "expected seconds, more than 0 and at most ten years, got '0'"),
    ],
)
def test_a_bad_variable_is_named_with_what_would_be_right(variable: str, text: str, message: str) -> None:
    """The message on an invalid variable has source, name, expectation and value."""
    said = refusal(None, {f"KEEPGATE_{variable}": text}, {})
    assert said.startswith(f"environment: KEEPGATE_{variable}: {message}")


def test_an_embedding_server_needs_the_name_of_its_model_and_a_key_its_server() -> None:
    """Either alone is refused with the name of the setting that is missing, and the key is not shown."""
    said = refusal(None, {"KEEPGATE_SEMANTIC_MODEL_URL": "http://h/v1"}, {})
    assert "SEMANTIC_MODEL: expected the name of a model at the server of model_url" in said
    said = refusal(None, {"KEEPGATE_SEMANTIC_MODEL_KEY": "sk-hush"}, {})
    assert "SEMANTIC_MODEL_URL: expected a server's URL, for there is a key for it" in said
    assert "sk-hush" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: eighty", "port: expected a port from 1 to 65535, or 0 for any free one, got 'eighty'"),
        ("port: true", "port: expected a port from 1 to 65535, or 0 for any free one, got true"),
        ("port:", "port: expected a port from 1 to 65535, or 0 for any free one, got nothing"),
        ("port: [80]", "port: expected a port from 1 to 65535, or 0 for any free one, got [80]"),
        ("host: ''", "host: expected text that is not empty, got nothing"),
        ("upstreams: http://a", "upstreams: expected URLs such as http://127.0.0.1:8000/v1, or mock:, got 'http://a'"),
        ("upstreams: [1]", "upstreams[0]: expected URLs such as http://127.0.0.1:8000/v1, or mock:, got 1"),
        ("cache: 3", "cache: expected keys and values, got 3"),
        ("cache: {ttl: soon}", "cache.ttl: expected seconds, from 0 to ten years, got 'soon'"),
        ("cache: {memory: [1]}", "cache.memory: expected a size such as 256MiB, got [1]"),
        ("state_dir: ''", "state_dir: expected the path of a folder, got nothing"),
        ("prot: 1", "prot is not a setting; did you mean port?"),
        ("ttl: 1", "ttl is not a setting; did you mean cache.ttl?"),
        ("cache: {tll: 1}", "cache.tll is not a setting; did you mean cache.ttl?"),
        ("quantization: int4", "quantization is not a setting; did you mean backend.quantization?"),
        ("backend: {quantisation: int4}", "backend.quantisation is not a setting; did you mean backend.quantization?"),
        ("backend: {model: x}", "backend.model is not a setting; did you mean model?"),
        ("backend: {threads: two}", "backend.threads: expected a whole number, 1 or more and below 2147483648, got 't"),
        ("backend: int4", "backend: expected keys and values, got 'int4'"),
        ("timeouts: {zzz: 1}", "timeouts.zzz is not a setting"),
        ("port: 1\nport: 2", "not valid YAML: port appears twice (line 2, column 1)"),
        ("8080: 1", "not valid YAML: a key must be text (line 1, column 1)"),
        ("a: b: c", "not valid YAML: mapping values are not allowed here (line 1, column 5)"),
        ("[[[", "not valid YAML: expected the node content, but found '<stream end>' (line 1, column 4)"),
        ("[" * 600, "not valid YAML: it is nested too deeply"),
        ("port: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("host: !!python/name:os.system", "not valid YAML: could not determine a constructor for the tag"),
        ("a\0b", "not valid YAML: unacceptable character #x0000"),
        (b"port: \xff", "not valid YAML: unacceptable character #x00ff: invalid start byte"),
        ("- port", "expected keys and values, such as `port: 8080`"),
    ],
)
def test_a_bad_file_is_named_with_what_would_be_right(tmp_path: Path, text: str | bytes, message: str) -> None:
    """The message on an invalid file has the file, the key as written, and the expectation."""
    file = tmp_path / "keepgate.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = re.sub(r", line \d+:", ":", refusal(file, {}, {}), count=1)
    assert said.startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("port: 1\nupstreams:\n- http://a\n- url: ftp://b\n", 4, "upstreams[1].url: expected a URL such as http"),
        ("upstreams:\n- {url: 'http://a', wieght: 2}\n", 2, "upstreams[0].wieght is not a setting; did you mean upstr"),
        ("upstreams:\n- url: http://a\n  weight: 0\n", 3, "upstreams[0].weight: expected a number more than 0, got 0"),
        ("upstreams:\n- weight: 1\n", 2, "upstreams[0]: url is missing"),
        ("upstreams:\n- {url: 'http://a', prefix_url: 'b:1'}\n", 2, "upstreams[0].prefix_url: expected a URL such as"),
        ("upstreams:\n- {url: 'http://a', prefix_url: []}\n", 2, "upstreams[0].prefix_url: expected a URL such as"),
        (
            "upstreams:\n- url: http://a\n  prefix_url: ['b:1']\n",
            3,
            "upstreams[0].prefix_url[0]: expected a URL such as",
        ),
        ("upstreams:\n- url: http://a\n  api_key: sk-1\n", 3, "upstreams[0].api_key: expected env:NAME or file:PATH"),
        (
            "routing:\n  models:\n    a: {strategy: weighted}\n    b:\n      strategy: best\n",
            5,
            "routing.models.b.strategy: expected one of least-connections,",
        ),
        (
            "routing:\n  models:\n    a:\n      canary: {x: 2}\n",
            4,
            "routing.models.a.canary.x: expected a share from 0",
        ),
        (
            "routing:\n  models:\n    a:\n      rules:\n      - use: x\n        tols: true\n",
            6,
            "routing.models.a.rules[0].tols is not a setting; did you mean routing.models.a.rules[0].tools?",
        ),
        ("costs:\n  prices:\n    m: {input: 1}\n", 3, "costs.prices.m: output is missing"),
    ],
)
def test_a_bad_value_in_a_list_or_a_mapping_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    """The message says at which line of the file, and in which item or key."""
    file = tmp_path / "keepgate.yaml"
    file.write_text(text)
    said = refusal(file, {}, {})
    assert said.startswith(f"{file}, line {line}: {message}"), said


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "upstreams:\n- {url: 'http://a', name: a}\nrouting:\n  models:\n    m: {upstreams: [a]}\n"
            "    gpt-4.1:\n      upstreams: [a, nosuch]\n",
            7,
            "routing.models.gpt-4.1.upstreams[1]: 'nosuch' is no upstream; there are a",
        ),
        ("routing:\n  aliases:\n    b: c\n    c: b\n", 3, "routing.aliases.b: b → c → b is a circle; name a model"),
        ("redis: none\nkeys:\n  required: true\n", 3, "keys.required: virtual keys are kept in Redis"),
        (
            "upstreams:\n- {url: 'http://a', name: x}\n- {url: 'http://b', name: x}\n",
            3,
            "upstreams[1].name: 'x' is the name of",
        ),
        (
            "upstreams:\n- url: http://a\n  api_key: env:NO_SUCH_VARIABLE\n",
            3,
            "upstreams[0].api_key: expected a key in the environment variable NO_SUCH_VARIABLE, which is not set",
        ),
        ("port: 1\ntls: {key: k.pem}\n", 2, "tls.certificate: expected the path of a file"),
    ],
)
def test_settings_that_do_not_go_together_are_named_with_their_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    """The message names the file and the line of the setting to change."""
    file = tmp_path / "keepgate.yaml"
    file.write_text(text)

    def check(settings: Settings) -> None:
        check_models(settings.routing, settings.servers)
        check_api_keys(settings.servers)

    with pytest.raises(SettingsError) as refused:
        load(file, {}, {}, check)
    assert str(refused.value).startswith(f"{file}, line {line}: {message}")


def test_a_conflict_is_told_of_the_source_that_named_the_setting(tmp_path: Path) -> None:
    """Of a file and the environment it is the one that has the setting to change."""
    file = tmp_path / "keepgate.yaml"
    file.write_text("redis: none\n")
    assert refusal(file, {"KEEPGATE_KEYS_REQUIRED": "true"}, {}).startswith("environment: KEEPGATE_KEYS_REQUIRED: ")


def test_a_mapping_in_a_variable_is_json() -> None:
    """Keys and values are written as JSON there, and JSON that is none is refused."""
    assert from_environment(ROUTING_ALIASES='{"gpt": "qwen"}').routing.aliases == {"gpt": "qwen"}
    assert refusal(None, {"KEEPGATE_ROUTING_ALIASES": "gpt=qwen"}, {}).startswith(
        "environment: KEEPGATE_ROUTING_ALIASES: expected JSON: "
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A settings file that is missing or no file is named."""
    assert refusal(tmp_path / "no.yaml", {}, {}) == f"{tmp_path}/no.yaml: cannot be read: No such file or directory"
    assert refusal(tmp_path, {}, {}) == f"{tmp_path}: cannot be read: Is a directory"


def test_a_file_of_comments_has_no_effect(tmp_path: Path) -> None:
    """A file of comments has no effect."""
    assert from_file(tmp_path, "# port: 1\n") == Settings()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": "x"}, "--port: expected a port from 1 to 65535, or 0 for any free one, got 'x'"),
        ({"upstreams": ["http://a", "b"]}, "--upstream: expected URLs such as http://127.0.0.1:8000/v1, or mock:"),
        ({"log_level": "loud"}, "--log-level: expected one of debug, info, warning and error, got 'loud'"),
        ({"state_dir": ""}, "--state-dir: expected the path of a folder, got nothing"),
        ({"backend.kv_memory": "much"}, "--kv-memory: expected a size such as 512MiB, at least 1KiB, got 'much'"),
        (
            {"backend.prefix_disk_size": "big"},
            "--prefix-disk-size: expected a size such as 4GiB, or 0 for none, got 'b",
        ),
        ({"model": ""}, "--model: expected text that is not empty, got nothing"),
    ],
)
def test_a_bad_option_is_named_as_it_was_written(arguments: dict[str, Any], message: str) -> None:
    """The message on an invalid option has the option with its hyphens."""
    assert refusal(None, {}, arguments).startswith(f"command line: {message}")


def test_an_error_in_an_overridden_source_is_reported(tmp_path: Path) -> None:
    """An error is reported with its source even if a later source overrides the value."""
    file = tmp_path / "k.yaml"
    file.write_text("port: eighty")
    assert refusal(file, {"KEEPGATE_PORT": "80"}, {}).startswith(f"{file}, line 1: port: ")


def test_an_unknown_variable_is_a_warning() -> None:
    """An unknown variable is a warning with the nearest setting."""
    environment = {"KEEPGATE_PROT": "1", "KEEPGATE_UPSTREAM": "http://a", "KEEPGATE_QQQQQQ": "x", "PORT": "2"}
    settings, warnings = load(None, environment, {})
    assert settings == Settings()
    assert warnings == [
        "KEEPGATE_PROT is not a setting; did you mean KEEPGATE_PORT?",
        "KEEPGATE_UPSTREAM is not a setting; did you mean KEEPGATE_UPSTREAMS?",
        "KEEPGATE_QQQQQQ is not a setting",
    ]


def test_the_secret_of_the_backends_prefix_store_is_no_setting() -> None:
    """The variable with the backend's secret gives no warning and is not printed."""
    assert load(None, {"KEEPGATE_PREFIX_SECRET": "hush"}, {}) == (Settings(), [])


def test_no_secret_shows_in_a_representation_or_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """The admin key and a store's password are in no output of the settings."""
    settings = from_environment(
        ADMIN_KEY="hush-1",
        REDIS="redis://user:hush-2@cache:6379/0",
        BACKEND_PREFIX_INDEX="redis://user:hush-3@index:6379/0",
    )
    logging.getLogger("test").warning("%s %r %s %s", settings, settings, [settings.admin_key], settings.backend)
    shown = caplog.text + repr(settings) + str(settings) + f"{[settings.admin_key]}"
    assert "hush" not in shown
    assert "redis://***@cache:6379/0" in repr(settings)
    assert "redis://***@index:6379/0" in repr(settings)


@pytest.mark.parametrize(
    "url", ["redis://user:hush@host:port/0", "redis:/user:hush@host", "user:hush@host", "redis://:hu/hush@h:x"]
)
def test_no_secret_shows_in_a_refusal(url: str) -> None:
    """The message on a refused URL does not have its password."""
    assert "hush" not in refusal(None, {"KEEPGATE_REDIS": url}, {})
    assert "hush" not in refusal(None, {"KEEPGATE_UPSTREAMS": url}, {})
    if not url.startswith("redis://"):  # which the backend reads
        assert "hush" not in refusal(None, {"KEEPGATE_BACKEND_PREFIX_INDEX": url}, {})


def test_no_admin_key_shows_when_it_is_no_text(tmp_path: Path) -> None:
    """A numeric admin key in YAML is refused without being printed."""
    file = tmp_path / "k.yaml"
    file.write_text("admin_key: 123456")
    assert refusal(file, {}, {}) == f"{file}, line 1: admin_key: expected one line of text that is not empty"


@pytest.mark.parametrize("mode", ["on", "off", "'on'"])
def test_on_and_off_need_no_quotes(mode: str, tmp_path: Path) -> None:
    """They are texts, though YAML 1.1 takes them for true and false; yes and true are still true."""
    file = tmp_path / "k.yaml"
    file.write_text(f"semantic: {{mode: {mode}}}\ncache: {{enabled: yes}}")
    settings, _ = load(file, {}, {})
    assert (settings.semantic.mode, settings.cache.enabled) == (mode.strip("'"), True)


def test_a_secret_is_one_line(tmp_path: Path) -> None:
    """The line break that ends a block of YAML is no part of it; what no header can have is refused, and not shown."""
    file = tmp_path / "k.yaml"
    file.write_text("admin_key: |\n  hush\n")
    assert load(file, {}, {})[0].admin_key == "hush"
    file.write_text("admin_key: |\n  hush\n  hush\n")
    assert refusal(file, {}, {}) == f"{file}, line 1: admin_key: expected one line of text that is not empty"


def test_the_state_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The state directory is the setting, else below XDG_STATE_HOME, else ~/.local/state, and absolute."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert Settings().state_path() == tmp_path / ".local/state/keepgate"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "x"))
    assert Settings().state_path() == tmp_path / "x/keepgate"
    assert Settings(state_dir="~/kept").state_path() == tmp_path / "kept"
    monkeypatch.chdir(tmp_path)
    assert Settings(state_dir="here").state_path() == tmp_path / "here"


def test_the_backend_gets_its_options_from_every_source(tmp_path: Path) -> None:
    """Later sources win key by key, and unset options keep the backend's defaults."""
    file = tmp_path / "k.yaml"
    file.write_text("backend: {quantization: int8, kv_memory: 1GiB, prefix_sharing: false, max_wait_ms: 20}\n")
    settings, warnings = load(
        file, {"KEEPGATE_BACKEND_QUANTIZATION": "int4"}, {"backend.max_batch": "64", "backend.kv_memory": None}
    )
    assert warnings == []
    assert settings.backend.options() == [
        "--quantization=int4",
        "--kv-memory=1073741824",
        "--max-batch=64",
        "--max-wait-ms=20.0",
        "--no-prefix-sharing",
    ]
    assert Settings().backend.options() == []


def test_options_of_a_backend_that_does_not_run_are_a_warning(tmp_path: Path) -> None:
    """Backend options beside upstreams give a warning that they have no effect."""
    file = tmp_path / "k.yaml"
    file.write_text("backend: {threads: 2}\n")
    words = {"upstreams": ["mock:"], "backend.quantization": "int4"}
    not_used = "is not used: it is for the in-repo backend, and upstreams are named"
    assert load(file, {"KEEPGATE_MODEL": "m"}, words)[1] == [
        f"{file}: backend.threads {not_used}",
        f"environment: KEEPGATE_MODEL {not_used}",
        f"command line: --quantization {not_used}",
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("device", ["auto", "cpu", "cuda"]),
        ("dtype", ["auto", "float32", "bfloat16", "float16"]),
        ("quantization", ["none", "auto", "int8", "int4", "fp8", "nf4", "gptq-int4", "awq-int4", "mixed"]),
        ("kv_dtype", ["auto", "int8", "fp8"]),
        ("batching", ["continuous", "dynamic", "static"]),
        ("kv_memory", ["4KiB", "1.5GiB", "1048576"]),
        ("max_batch", ["1", "2147483647"]),
        ("max_context", ["4096"]),
        ("max_waiting", ["7"]),
        ("step_tokens", ["512"]),
        ("threads", ["1"]),
        ("max_seconds", ["0.5", "1e8"]),
        ("max_wait_ms", ["0", "12.5"]),
        ("scheduling_policy", ["fcfs", "priority"]),
        ("speculation", ["true", "false"]),
        ("medusa", ["heads", "-odd name"]),
        ("draft_model", ["HuggingFaceTB/SmolLM2-135M-Instruct"]),
        ("prefix_sharing", ["true", "false"]),
        ("prefix_memory", ["512MiB"]),
        ("prefix_memory_codec", ["plain", "int8", "fp8"]),
        ("prefix_disk", ["/srv/prefixes", "-odd folder"]),
        ("prefix_disk_size", ["4GiB"]),
        ("prefix_disk_codec", ["plain", "int8", "fp8"]),
        ("prefix_mooncake", ["/etc/mooncake.json"]),
        ("prefix_mooncake_codec", ["plain", "int8", "fp8"]),
        ("prefix_index", ["redis://h:6379/0", "unix:///run/redis.sock?db=1"]),
        ("prefix_secret_file", ["/run/secrets/prefix"]),
        ("prefix_name", ["gpu-1"]),
        ("prefix_address", ["http://10.0.0.7:8081"]),
        ("prefix_audit", ["0", "1000"]),
        ("public_prefix", ["one.txt", "one.txt, -two.json"]),
        ("chat_template", ["chat.jinja", "-odd name.jinja"]),
    ],
)
def test_each_backend_setting_is_an_option_of_the_backend(name: str, values: list[str]) -> None:
    """Each setting is an option of the backend's command line with the same values, and there are no others; but
    `replicas` says how many backends there are.
    """
    parser = Parser()
    add_arguments(parser)
    known = {action.dest: action for action in parser._actions}  # argparse has no public list of them
    for value in values:
        settings = from_environment(**{f"BACKEND_{name.upper()}": value}).backend
        understood, said = getattr(parser.parse_args(settings.options()), name), getattr(settings, name)
        assert (tuple(map(str, understood)) if isinstance(said, tuple) else str(understood)) == (
            said if isinstance(said, tuple) else str(said)
        )
    if known[name].choices is not None:
        assert values == list(known[name].choices or ())
    theirs = known.keys() - {"help", "model", "host", "port", "exit_with_parent"}
    assert theirs == {field.name for field in msgspec.structs.fields(BackendSettings)} - {"replicas"}


def test_variables_of_other_commands_and_those_that_settings_name_are_known(tmp_path: Path) -> None:
    """A shell that is set up for `keepgate keys`, or has the credential of an upstream, starts a gateway unwarned."""
    file = tmp_path / "keepgate.yaml"
    file.write_text("upstreams: [{url: 'http://gpu:8000/v1', api_key: 'env:KEEPGATE_OPENAI'}]")
    environment = {
        "KEEPGATE_URL": "http://localhost:9000",
        "KEEPGATE_ADMIN_KEY": "hush",
        "KEEPGATE_PREFIX_INDEX": "redis://r:6379/0",
        "KEEPGATE_PREFIX_SECRET": "hush",
        "KEEPGATE_OPENAI": "sk-1",
        "KEEPGATE_OPENIA": "sk-1",
    }
    _, warnings = load(file, environment, {})
    assert [warning.partition(";")[0] for warning in warnings] == ["KEEPGATE_OPENIA is not a setting"]
