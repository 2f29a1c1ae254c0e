"""Dockerfile and compose.yaml: nothing here builds or runs them, so what they name is compared."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedstream.runtime.config import load
from fedstream.settings.config import Settings
from fedstream.settings.services import ROLES
from requirements.lock import read
from tests.k8s.manifests import K8S, ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
# Sinks need a package of a tracker; the helper has a file of its own (test_helper.py).
STARTED = [role for role in ROLES if role not in ("sinks", "helper")]
SERVICES = {
    name: one
    for name, one in COMPOSE["services"].items()
    if one.get("profiles", ["gateway"]) == ["gateway"]
}
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())


def default(text: str) -> str:
    """A variable's value where nobody sets it: ``${NAME:-value}``."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def environment(service: str) -> dict[str, str]:
    """What compose gives a service."""
    return {name: default(text) for name, text in SERVICES[service]["environment"].items()}


def in_the_image() -> set[str]:
    """The packages: what we depend on, gateways too, for supernodes too, and so on."""
    python = re.search(r"^ARG PYTHON=([\d.]+)-", DOCKERFILE, re.MULTILINE)
    assert python
    target = {"python_full_version": python[1], "extra": ""}
    found: set[str] = set()
    project = PACKAGE["project"]
    extras = project["optional-dependencies"]
    more = [*extras["gateway"], *extras["supernodes"]]
    todo = [*project["dependencies"], *(one for one in more if "fedstream[" not in one)]
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or wanted.marker.evaluate(target)):
            found.add(name)
            todo += metadata.requires(name) or []
    return found


def test_compose_uses_the_manifests_images() -> None:
    table = yaml.safe_load((K8S / "images" / "kustomization.yaml").read_text())["images"]
    images = {entry["name"]: f"{entry['newName']}:{entry['newTag']}" for entry in table}
    used = {name: service["image"] for name, service in SERVICES.items()}
    assert used.pop("redis") == images["redis"]
    assert set(used) == {*STARTED, "acl"}
    assert set(used.values()) == {images["fedstream"]}


@pytest.mark.parametrize("role", STARTED)
def test_compose_starts_every_service_with_its_own_user(role: str) -> None:
    service, env = SERVICES[role], environment(role)
    found = load(Settings, path=K8S / "base" / "run.toml", environ=env)
    assert service["command"] == [role]
    assert found.redis.username == role
    assert (
        env["FEDSTREAM_REDIS__PASSWORD"] == environment("acl")[f"FEDSTREAM_PASSWORD_{role.upper()}"]
    )
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= getattr(found, role).drain_s + 5
    assert f"127.0.0.1:{found.http.health_port}/readyz" in service["healthcheck"]["test"][-1]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def test_compose_mounts_what_the_configuration_names() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = default(volume).split(":")[0]
            if source.startswith("./k8s/"):
                assert (ROOT / source).exists(), source
            elif not source.startswith("."):
                assert source in COMPOSE["volumes"]
    kept = {
        volume.split(":")[1] for volume in SERVICES["updater"]["volumes"] if "journal" in volume
    }
    found = load(Settings, path=K8S / "base" / "run.toml", environ={})
    assert any(found.journal.dir.startswith(f"{path}/") for path in kept)
    users = re.search(r"^aclfile (\S+)$", (K8S / "base" / "redis.conf").read_text(), re.MULTILINE)
    assert users
    assert SERVICES["acl"]["command"] == ["acl", "--out", users[1]]


def test_image_and_build_context_have_every_package() -> None:
    linked = {path.name for path in (ROOT / "fedstream").iterdir() if path.is_symlink()}
    packages = {"fedstream", *linked}
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert linked
    assert copied == packages
    assert packages < allowed
    for line in re.findall(r"^COPY ((?!--from).*) \S+$", DOCKERFILE, re.MULTILINE):
        assert set(line.split()) <= allowed, line


def test_image_matches_the_manifests_assumptions() -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert 'ENTRYPOINT ["fedstream"]' in final
    user = re.search(r"^USER (\d+):(\d+)$", final, re.MULTILINE)
    assert user
    assert int(user[1]) >= 10_000, "restricted Pod Security wants a number that is not 0"
    assert "HOME=/tmp" in final, "all else is read-only"
    assert re.search(
        r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE
    )


def test_every_package_of_the_image_is_listed() -> None:
    """What --no-deps leaves out would be missing: `pip check` says so, but only in the build."""
    for torch in ("torch-cpu", "torch-cuda"):
        assert in_the_image() <= read("runtime").keys() | read(torch).keys()
