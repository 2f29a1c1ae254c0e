"""Images: here a container's programs are those that are installed on this machine.

In a pod, localhost is the pod. A Redis server listens on the pod's own address because the image's
entry says so, and redis-cli looks for it there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedstream.local.redis_server import find_servers
from tests.k8s.cluster.forks import Zygote

_REDIS_NEEDED = (7, 0)  # %R~ in an ACL
_POD = "POD"  # in a program's arguments: the pod's address


@dataclass(frozen=True)
class Program:
    """A program of an image: what runs in its place, with arguments of ours around the others."""

    path: Path
    before: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True)
class Image:
    """What a container of an image starts with."""

    programs: Mapping[str, Program]
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: Sequence[str] = ()
    zygote: Zygote | None = None  # what its services are forked from, if any

    def install(self, folder: Path, address: str) -> None:
        """Puts the programs into a folder that is to be the first of PATH."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, program in self.programs.items():
            before, after = (
                " ".join(shlex.quote(word.replace(_POD, address)) for word in words)
                for words in (program.before, program.after)
            )
            script = folder / name
            script.write_text(
                f'#!/bin/sh\nexec {shlex.quote(str(program.path))} {before} "$@" {after}\n'
            )
            script.chmod(0o755)

    def environment_at(self, address: str) -> dict[str, str]:
        """The image's environment in a pod of this address."""
        return {name: value.replace(_POD, address) for name, value in self.environment.items()}


def fedstream(zygote: Zygote) -> Image:
    """This interpreter's fedstream. It listens at the pod's address, as 0.0.0.0 would there."""
    return Image(
        {"fedstream": Program(Path(sys.executable).parent / "fedstream")},
        {"FEDSTREAM_HTTP__HOST": _POD},
        ["fedstream"],
        zygote,
    )


def redis() -> Image | None:
    """A Redis or Valkey of this machine that knows the manifest's ACL; None without one."""
    for server in find_servers():
        cli = server.with_name(server.name.replace("-server", "-cli"))
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r" v=(\d+)\.(\d+)", said.stdout)
        if version and tuple(map(int, version.groups())) >= _REDIS_NEEDED and cli.exists():
            return Image(
                {
                    "redis-server": Program(server, after=["--bind", _POD]),
                    "redis-sentinel": Program(server, after=["--sentinel", "--bind", _POD]),
                    "redis-cli": Program(cli, before=["-h", _POD]),
                },
                entrypoint=["redis-server"],
            )
    return None


def name_of(reference: str) -> str:
    """An image's own name: of ``registry.example/team/fedstream:1.2@sha256:...`` fedstream."""
    return re.sub(r"[:@].*$", "", reference.rpartition("/")[2])
