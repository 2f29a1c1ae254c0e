"""``make lock``: write the requirement lists, with the hash of every file of every package.

``constraints.txt`` pins versions; packages that it does not name keep their version from the
current lists. The lists suit Python 3.11 and later on Linux, macOS and Windows. They are separate
because not everybody installs all of them:

- ``torch-cpu.txt``: PyTorch's CPU build, from wherever pip is told to find it (its hashes are in
  ``torch-cpu.sha256``), with either build of torchvision. pip prefers files whose hash the index
  names over files in a folder, so a list that allowed both builds would never get the smaller one.
- ``torch-cuda.txt``: torch and torchvision from the package index, with their dependencies on
  Linux: several gigabytes. On macOS this is a CPU build too.
- ``runtime.txt``: fedstream's other dependencies, with those of a gateway, also for Flower's
  supernodes: the image has them.
- ``helper.txt``: those of ``runtime.txt`` that the helper imports: its image has no others.
- ``dev.txt``: additional dependencies of the tests.
- ``flower.txt``: fedstream's other dependencies beside Flower, which wants older releases of some,
  and what its tests need. Together with torch, a separate environment.
- ``supernode-1.40.txt`` and others like it: Flower alone in another release, whose supernodes are
  tested with what ``flower.txt`` lists beside it.
- ``fedlab.txt``: FedLab, which `make bench` compares with. Together with torch, a separate
  environment.
- ``tools.txt``, ``docs.txt``, ``mutants.txt`` and ``checkov.txt``: separate environments.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
SUPERNODES = ("supernode-1.40", "supernode-1.42")  # flower.txt has the one between
LISTS = (
    "torch-cpu",
    "torch-cuda",
    "runtime",
    "helper",
    "dev",
    "flower",
    *SUPERNODES,
    "fedlab",
    "tools",
    "docs",
    "mutants",
    "checkov",
)

_TORCH = ("torch", "torchvision")
_CUDA = re.compile(r"nvidia-|cuda-|triton$")
_OLDEST_PYTHON = "3.11"
_HEADER = "# Written by `make lock`. Installed with --require-hashes --no-deps.\n"

Entries = dict[str, str]  # package name to its lines


def entries(text: str) -> Entries:
    """The packages in a list, each with its pin, marker and hashes."""
    found: Entries = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if pin := re.match(r"([a-z0-9-]+)==", line):
            name = pin[1]
            found[name] = ""
        found[name] += line
    return found


def _pin(lines: str) -> str:
    return lines.split(maxsplit=1)[0]


def read(name: str) -> Entries:
    """The current content of a list; empty if it does not exist yet."""
    path = FOLDER / f"{name}.txt"
    return entries(path.read_text()) if path.is_file() else {}


def cpu_builds() -> dict[str, list[str]]:
    """The hashes of PyTorch's CPU builds, by pin, e.g. ``torch==2.13.0``."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / "torch-cpu.sha256").read_text().splitlines():
        digest, file = line.split()
        name, version = file.split("-")[:2]
        found.setdefault(f"{name}=={version.removesuffix('+cpu')}", []).append(digest)
    return found


def torch_cpu(every: Entries, builds: Mapping[str, Sequence[str]]) -> Entries:
    """The list ``torch-cpu``. Raises SystemExit if there is no known CPU build of a pin."""
    for name in _TORCH:
        if (pin := _pin(every[name])) not in builds:
            raise SystemExit(f"torch-cpu.sha256 has no CPU build of {pin}: add its hashes")
    torch, torchvision = (_pin(every[name]) for name in _TORCH)
    either = [*re.findall(r"--hash=sha256:(\w+)", every["torchvision"]), *builds[torchvision]]
    return {
        "torch": _entry(f"{torch}+cpu", builds[torch]),
        "torchvision": _entry(torchvision, either),
    }


def _entry(pin: str, digests: Sequence[str]) -> str:
    return " \\\n    ".join([pin, *(f"--hash=sha256:{one}" for one in sorted({*digests}))]) + "\n"


def _compiled(
    known: Mapping[str, str], *arguments: str | Path, python: str = _OLDEST_PYTHON
) -> Entries:
    """What uv resolves, keeping known versions where possible."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        out.write_text("".join(known.values()))
        subprocess.run(
            [
                Path(sys.executable).with_name("uv"),
                "pip",
                "compile",
                "--quiet",
                "--universal",
                "--python-version",
                python,
                "--generate-hashes",
                "--no-header",
                "--no-annotate",
                "--output-file",
                out,
                *arguments,
            ],
            check=True,
            cwd=ROOT,
        )
        return entries(out.read_text())


def _write(name: str, packages: Mapping[str, str]) -> None:
    (FOLDER / f"{name}.txt").write_text(_HEADER + "".join(packages.values()))


def _write_project() -> None:
    known = read("torch-cuda") | read("runtime") | read("dev")
    project, pins = ROOT / "pyproject.toml", ("--constraint", ROOT / "constraints.txt")
    runtime = _compiled(known, project, "--extra", "supernodes", *pins)
    every = _compiled(known | runtime, project, "--extra", "dev", *pins)
    if differing := [name for name in runtime if _pin(runtime[name]) != _pin(every[name])]:
        raise SystemExit(f"the tests need other versions of {', '.join(differing)}")
    cuda = [name for name in every if name in _TORCH or _CUDA.match(name)]
    _write("torch-cpu", torch_cpu(every, cpu_builds()))
    _write("torch-cuda", {name: every[name] for name in cuda})
    rest = {name: lines for name, lines in every.items() if name not in cuda}
    _write("runtime", {name: lines for name, lines in rest.items() if name in runtime})
    _write("dev", {name: lines for name, lines in rest.items() if name not in runtime})


def _write_helper() -> None:
    ours = read("runtime")
    asked = _compiled(ours, FOLDER / "helper.in")
    _write("helper", {name: lines for name, lines in ours.items() if name in asked})


def _write_flower() -> None:
    """fedstream's own pins as far as Flower allows; it caps some packages."""
    ours = read("torch-cuda") | read("runtime") | read("dev")
    every = _compiled(
        read("flower") | ours, ROOT / "pyproject.toml", FOLDER / "flower.in", "--extra", "flower"
    )
    torch = read("torch-cuda")
    _write("flower", {name: lines for name, lines in every.items() if name not in torch})


def _write_supernodes() -> None:
    for name in SUPERNODES:
        with tempfile.NamedTemporaryFile("w", suffix=".in") as asked:
            asked.write(f"flwr=={name.removeprefix('supernode-')}.*\n")
            asked.flush()
            _write(name, _compiled(read(name), asked.name, "--no-deps"))


def _write_fedlab() -> None:
    """With our torch, so that both are measured on the same."""
    torch = read("torch-cuda")
    every = _compiled(read("fedlab") | torch | read("runtime"), FOLDER / "fedlab.in")
    _write("fedlab", {name: lines for name, lines in every.items() if name not in torch})


def main() -> None:
    """Rewrite all lists."""
    _write_project()
    _write_helper()
    _write_flower()
    _write_supernodes()
    _write_fedlab()
    for name in ("tools", "docs", "mutants"):
        _write(name, _compiled(read(name), FOLDER / f"{name}.in"))
    # One of checkov's dependencies does not support older Pythons.
    _write("checkov", _compiled(read("checkov"), FOLDER / "checkov.in", python="3.11.5"))


if __name__ == "__main__":
    main()
