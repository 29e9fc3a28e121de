"""The compose stack without Docker: what it mounts is there, what is mounted is what the programs read, every image is pinned."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
COMPOSE = LAUNCH / "compose"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
HERE_ONLY = {"prometheus": "--web.listen-address=127.0.0.1:9090", "alertmanager": "--web.listen-address=127.0.0.1:9093"}

pytestmark = pytest.mark.stack


def mounts(service: str) -> dict[str, Path]:
    """Path in the container -> what of the repository is there."""
    found = {}
    for volume in SERVICES[service]["volumes"]:
        if isinstance(volume, str) and volume.startswith("."):
            source, target, mode = volume.split(":")
            assert mode == "ro", volume
            found[target] = (COMPOSE / source).resolve()
    return found


def here(service: str, path: str) -> Path:
    """What a program in the container finds at this path."""
    for target, source in mounts(service).items():
        if path == target or path.startswith(f"{target}/"):
            return source / path[len(target) :].lstrip("/") if path != target else source
    raise AssertionError(f"{service}: nothing of ours is mounted at {path}")


def flag(service: str, name: str) -> str:
    return next(word.partition("=")[2] for word in SERVICES[service]["command"] if word.startswith(f"--{name}="))


@pytest.mark.parametrize("service", SERVICES)
def test_every_image_is_pinned_to_a_release(service: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?", SERVICES[service]["image"])


@pytest.mark.parametrize("service", SERVICES)
def test_all_that_is_mounted_is_in_the_repository(service: str) -> None:
    assert mounts(service)
    for source in mounts(service).values():
        assert source.exists(), source
        assert source.is_relative_to(ROOT)


def test_nothing_listens_beyond_loopback() -> None:
    assert {name: service["network_mode"] for name, service in SERVICES.items()} == dict.fromkeys(SERVICES, "host")
    for service, listens in HERE_ONLY.items():
        assert listens in SERVICES[service]["command"]
    assert SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "--cluster.listen-address=" in SERVICES["alertmanager"]["command"], "no gossip"


def test_prometheus_reads_its_configuration_and_the_rules_of_this_repository(tmp_path: Path) -> None:
    path = here("prometheus", flag("prometheus", "config.file"))
    config = yaml.safe_load(path.read_text())
    rules = [here("prometheus", rule) for rule in config["rule_files"]]
    assert rules == [ROOT / "dashboards" / "alerts.yaml"]
    (scrape,) = config["scrape_configs"]
    folder = next(volume["target"] for volume in SERVICES["prometheus"]["volumes"] if isinstance(volume, dict))
    assert scrape["file_sd_configs"][0]["files"] == [f"{folder}/rankwatch_*.json"]
    (tmp_path / "prometheus.yml").write_text(json.dumps({**config, "rule_files": [str(rule) for rule in rules]}))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (alertmanager,) = config["alerting"]["alertmanagers"]
    assert alertmanager["static_configs"][0]["targets"] == [flag("alertmanager", "web.listen-address")]


def test_alertmanager_has_the_routing_of_this_repository() -> None:
    path = here("alertmanager", flag("alertmanager", "config.file"))
    assert path == ROOT / "dashboards" / "alertmanager.yml"
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_grafana_finds_one_prometheus_and_the_dashboards_that_ask_for_one() -> None:
    (source,) = yaml.safe_load((here("grafana", "/etc/grafana/provisioning/datasources") / "rankwatch.yaml").read_text())["datasources"]
    assert source["url"] == f"http://{flag('prometheus', 'web.listen-address')}"
    assert (source["type"], source["isDefault"], source["access"]) == ("prometheus", True, "proxy")
    (provider,) = yaml.safe_load((here("grafana", "/etc/grafana/provisioning/dashboards") / "rankwatch.yaml").read_text())["providers"]
    folder = here("grafana", provider["options"]["path"])
    boards = {path: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert {path.name for path in boards} == {path.name for path in (ROOT / "dashboards").glob("*.json")}
    for path, board in boards.items():
        variable = next(one for one in board["templating"]["list"] if one["name"] == "datasource")
        assert (variable["type"], variable["query"]) == ("datasource", source["type"]), path.name
        used = set(re.findall(r'"uid": "([^"]+)"', path.read_text())) - {board["uid"]}
        assert used <= {"${datasource}", "-- Grafana --"}, f"{path.name} names a datasource of its own"
    assert here("grafana", SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]) in boards


def test_grafana_has_no_password_that_everybody_knows() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


RECIPES = sorted(path for path in LAUNCH.rglob("*") if path.is_file() and path.name != "README.md")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(LAUNCH)))
def test_a_recipe_begins_with_the_line_to_type(path: Path) -> None:
    lines = path.read_text().splitlines()
    line = lines[1] if lines[0].startswith("#!") else lines[0]
    typed = re.fullmatch(r"# (?:.* && )?(prometheus|docker compose|sbatch|kubectl) .+", line)
    assert typed is not None, line
    for word in re.findall(r"launch/\S+", line):
        assert (ROOT / word).exists(), word
    assert str(path.relative_to(ROOT)) in line or typed[1] == "docker compose", "it is about this file"
