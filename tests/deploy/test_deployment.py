"""What is in deploy/ is what the tools of each trade accept, and says nothing that the daemon would refuse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from server.config import load_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE, SYSTEMD = shutil.which("docker-compose"), shutil.which("systemd-analyze")
SECRETS = {"GSWAPD_API_KEY": "a", "GSWAPD_ADMIN_KEY": "b", "GRAFANA_PASSWORD": "c"}
CUSTOM = {"RayCluster", "PodMonitor"}  # kinds that Kubernetes itself does not know
KUBERNETES = "1.33"


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- the image


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    assert run(hadolint, "--no-color", "--config", DEPLOY / "hadolint.yaml", DEPLOY / "Dockerfile") == ""


def test_the_image_is_made_of_what_the_package_is_made_of() -> None:
    wanted = {line.lstrip("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / path).exists() for path in wanted)
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    assert {name.strip(' "*') for name in packages[1].split(",")} <= wanted


# ---- compose


@pytest.mark.skipif(COMPOSE is None, reason="needs the package docker-compose")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_compose_understands_its_files_and_the_daemon_its_settings(
    files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = [part for file in files for part in ("-f", DEPLOY / file)]
    services = yaml.safe_load(run(COMPOSE, *options, "config", **SECRETS))["services"]
    target = services["gswapd"]["build"]["target"]
    assert re.search(rf"^FROM \S+ AS {target}$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", ()))
    assert accepted(services["gswapd"]["environment"], monkeypatch, tmp_path).server.admin_key is not None
    for one in services.values():
        for mount in one.get("volumes", ()):
            source = Path(mount.split(":")[0])
            assert not source.is_relative_to(ROOT) or source.exists(), mount


@pytest.mark.skipif(COMPOSE is None, reason="needs the package docker-compose")
def test_compose_starts_nothing_without_keys() -> None:
    done = subprocess.run([str(COMPOSE), "-f", str(DEPLOY / "compose.yaml"), "config"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "GSWAPD_API_KEY" in done.stderr


def accepted(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, place: Path, file: Path | None = None) -> Any:
    """The configuration that a daemon makes of these variables."""
    for name in [name for name in os.environ if name.startswith("GSWAPD_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        if name.startswith("GSWAPD_"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(place)
    return load_config(file)


def test_the_image_has_settings_that_the_daemon_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = dict(re.findall(r"(GSWAPD_\w+)=(\S+)", (DEPLOY / "Dockerfile").read_text()))
    config = accepted(variables, monkeypatch, tmp_path)
    assert (str(config.store), config.server.host) == ("/models", "0.0.0.0")


# ---- systemd


@pytest.mark.skipif(SYSTEMD is None, reason="needs the package systemd")
def test_systemd_finds_the_unit_right_and_not_exposed(tmp_path: Path) -> None:
    unit = tmp_path / "gswapd.service"
    unit.write_text((DEPLOY / "systemd" / "gswapd.service").read_text().replace("/opt/gswapd/bin/gswapd", "/bin/true"))
    assert run(SYSTEMD, "verify", "--man=no", unit) == ""
    run(SYSTEMD, "security", "--offline=true", "--threshold=40", unit)


# ---- Kubernetes


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay" / "gswapd.yaml").read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    (cluster,) = (one for one in manifests() if one["kind"] == "RayCluster")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        yield group.get("groupName", "head"), group["template"]


def containers() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for _, pod in pods() for one in pod["spec"]["containers"]}


@pytest.mark.parametrize("manifest", manifests(), ids=lambda one: one["kind"])
def test_manifests_keep_to_their_schemas(manifest: dict[str, Any]) -> None:
    if manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    known = {
        "RayCluster": {"apiVersion": "ray.io/v1", "spec": {"rayVersion", "headGroupSpec", "workerGroupSpecs"}},
        "PodMonitor": {"apiVersion": "monitoring.coreos.com/v1", "spec": {"selector", "podMetricsEndpoints"}},
    }[manifest["kind"]]
    assert manifest["apiVersion"] == known["apiVersion"]
    assert manifest["spec"].keys() == known["spec"]


@pytest.mark.parametrize(("name", "template"), list(pods()), ids=lambda one: one if isinstance(one, str) else "")
def test_pods_keep_to_their_schema(name: str, template: dict[str, Any]) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    for one in template["spec"]["containers"]:
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes


def test_everything_finds_its_pods_and_ports() -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods()}
    by_kind = {one["kind"]: one["spec"] for one in manifests() if "spec" in one}
    http = {port["name"] for port in containers()["gswapd"]["ports"]}
    assert by_kind["Service"]["selector"].items() <= labels["head"].items()
    assert not by_kind["Service"]["selector"].items() <= labels["gpu"].items(), "requests go to the daemon only"
    assert by_kind["PodMonitor"]["selector"]["matchLabels"].items() <= labels["head"].items()
    assert {one["port"] for one in by_kind["PodMonitor"]["podMetricsEndpoints"]} <= http
    assert {one["targetPort"] for one in by_kind["Service"]["ports"]} <= http


def test_the_daemon_takes_the_clusters_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (settings,) = (one["data"]["gswapd.yaml"] for one in manifests() if one["kind"] == "ConfigMap")
    (tmp_path / "gswapd.yaml").write_text(settings)
    variables = {one["name"]: one.get("value", "secret") for one in containers()["gswapd"]["env"]}
    config = accepted(variables, monkeypatch, tmp_path, tmp_path / "gswapd.yaml")
    assert config.server.api_key is not None
    assert config.cluster.ray_address == "127.0.0.1:6379"


def test_all_run_the_version_of_ray_that_was_tested() -> None:
    (cluster,) = (one for one in manifests() if one["kind"] == "RayCluster")
    assert f"ray=={cluster['spec']['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert len({one["image"] for one in containers().values()}) == 1


def test_shared_memory_holds_what_is_asked_of_it() -> None:
    (settings,) = (yaml.safe_load(one["data"]["gswapd.yaml"]) for one in manifests() if one["kind"] == "ConfigMap")
    gibibytes = int(settings["memory"]["host_tier"].removesuffix("GiB"))
    for name, pod in pods():
        (shm,) = (one["emptyDir"]["sizeLimit"] for one in pod["spec"]["volumes"] if one["name"] == "shm")
        assert name == "head" or int(shm.removesuffix("Gi")) > gibibytes
