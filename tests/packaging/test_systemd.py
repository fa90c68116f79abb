"""The systemd unit: what it sets is there, and systemd takes it."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.settings.sources import load

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "keepgate.service"
DROP_INS = sorted(FOLDER.glob("*.conf"))
KEEPGATE = Path(sys.executable).with_name("keepgate")


def values(file: Path, section: str, name: str) -> list[str]:
    """What a unit says under a name that may stand more than once."""
    _, _, rest = file.read_text().partition(f"[{section}]\n")
    return re.findall(rf"^{name}=(.*)$", re.split(r"^\[", rest, flags=re.MULTILINE)[0], re.MULTILINE)


def variables(file: Path) -> dict[str, str]:
    """The environment that it sets."""
    words = " ".join(values(file, "Service", "Environment")).split()
    return dict(word.split("=", 1) for word in words)


def test_its_variables_are_settings(tmp_path: Path) -> None:
    """Every KEEPGATE_ variable is one that the gateway reads, and the admin key comes out of the credential."""
    credentials, file = tmp_path / "credentials", tmp_path / "keepgate.yaml"
    credentials.mkdir()
    (credentials / "admin-key").write_text("word\n")
    file.write_text("port: 8080\n")
    specifiers = {"%S": "/var/lib", "%C": "/var/cache", "%d": str(credentials)}
    given = {}
    for name, value in variables(UNIT).items():
        for specifier, stands_for in specifiers.items():
            value = value.replace(specifier, stands_for)
        given[name] = value
    config = given.pop("KEEPGATE_CONFIG")
    assert config == "/etc/keepgate/keepgate.yaml"
    settings, warnings = load(file, given, {})
    assert warnings == []
    assert settings.admin_key == "word"
    assert str(settings.state_path()) == "/var/lib/keepgate"


def test_what_it_writes_to_is_its_own() -> None:
    """The folders that systemd makes for it are those that the variables name, and nothing else can be written."""
    assert values(UNIT, "Service", "StateDirectory") == ["keepgate"]
    assert values(UNIT, "Service", "CacheDirectory") == ["keepgate"]
    assert variables(UNIT)["KEEPGATE_STATE_DIR"] == "%S/keepgate"
    assert variables(UNIT)["XDG_CACHE_HOME"] == "%C"
    assert values(UNIT, "Service", "ProtectSystem") == ["strict"]
    assert values(UNIT, "Service", "ReadWritePaths") == []


def test_a_reload_is_the_signal_that_the_gateway_knows() -> None:
    """SIGHUP to the gateway alone; a stop too goes to it alone, and it stops its children."""
    assert values(UNIT, "Service", "ExecReload") == ["/bin/kill -HUP $MAINPID"]
    assert values(UNIT, "Service", "KillMode") == ["mixed"]
    assert values(UNIT, "Service", "RestartPreventExitStatus") == ["2"]


@pytest.mark.parametrize("file", [UNIT, *DROP_INS], ids=lambda file: str(file.name))
def test_each_file_is_a_unit(file: Path) -> None:
    """Sections and names with values, none of which holds a secret."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
    parser.read(file)
    assert set(parser.sections()) <= {"Unit", "Service", "Install"}
    assert parser.has_section("Service")
    assert all(value for section in parser.sections() if file != UNIT for value in dict(parser[section]).values())
    assert not re.search(r"KEEPGATE_(ADMIN_KEY|REDIS)=", file.read_text())


@pytest.mark.parametrize("drop_ins", [[], DROP_INS], ids=["alone", "with drop-ins"])
def test_systemd_takes_it(drop_ins: list[Path], tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say, and its exposure is that of a locked service (0 to 10).

    On a machine without systemd the other tests are all there is.
    """
    tool = shutil.which("systemd-analyze")
    if tool is None:
        return
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/keepgate/bin/keepgate", str(KEEPGATE)))
    (tmp_path / f"{UNIT.name}.d").mkdir()
    for file in drop_ins:
        shutil.copy(file, tmp_path / f"{UNIT.name}.d")
    done = subprocess.run([tool, "verify", unit], capture_output=True, text=True, timeout=60)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line or str(tmp_path) in line]
    assert (done.returncode, ours) == (0, [])
    if not drop_ins:
        rated = subprocess.run(
            [tool, "security", "--offline=true", "--no-pager", unit], capture_output=True, text=True, timeout=60
        )
        exposure = re.search(r"exposure level for \S+: ([\d.]+)", rated.stdout)
        assert exposure is not None, rated.stderr
        assert float(exposure[1]) <= 2.0
