"""Commands of the pages that these tests do not play to their end, and why. There is no other list.

``NOT_RUN`` are skipped, after a check of what can be checked without running them. ``STAND_INS``
take the place of programs that need what no test has; the commands around them are run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT


def _target(command: str) -> None:
    """The Makefile knows it."""
    _, name = shlex.split(command, comments=True)
    assert f"\n{name}:" in (ROOT / "Makefile").read_text(), name


def _options(command: str) -> None:
    """Its program takes these options."""
    _, _, module, *arguments = shlex.split(command, comments=True)
    options = {one for one in arguments if one.startswith("--")}
    place = ROOT.joinpath(*module.split("."))
    source = (place / "__main__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
    unknown = options - {*re.findall(r'add_argument\(\s*"(.*?)"', source)}
    assert not unknown, f"{module} has no {unknown}"


def _tests(command: str) -> None:
    """What pytest is given is there: a folder, or a mark."""
    _, *arguments = shlex.split(command, comments=True)
    if "-m" in arguments:
        at = arguments.index("-m")
        mark = arguments[at + 1].removeprefix("not ")
        assert f'"{mark}: ' in (ROOT / "pyproject.toml").read_text(), mark
        del arguments[at : at + 2]
    missing = [one for one in arguments if one[0] != "-" and not (ROOT / one).is_dir()]
    assert not missing, f"no such folder: {missing}"


@dataclass(frozen=True)
class NotRun:
    """Commands that a pattern matches from their beginning."""

    pattern: str
    reason: str
    check: Callable[[str], None]


NOT_RUN = (
    NotRun(r"make (test|fast)\b", "is what runs these tests", _target),
    NotRun(r"make chaos(-mutants)?\b", "takes a quarter of an hour, or half of one", _target),
    NotRun(r"\.venv/bin/python -m tests\.chaos\b", "minutes; CI plays the short form", _options),
    NotRun(r"\.venv/bin/pytest\b", "tests that run tests", _tests),
)

STAND_INS = {
    "kubectl": "needs a cluster: the real one reads the command, and finds no server",
    "docker": "needs a daemon, and builds for minutes: its files and the image's tag are checked",
    "kind": "needs a cluster: the image's tag is checked",
}
_NO_CLUSTER = """
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
users: [{name: none}]
"""
# The real kubectl refuses options and files that are wrong before it looks for a server. Then this
# answers in the cluster's place: with a password of the reader's environment, with the journal in
# CLUSTER_JOURNAL, and as a pod does by running fedstream here.
_KUBECTL = """#!/bin/bash
if [ -n {real} ]; then
    [[ "$*" != *" --dry-run=client "* ]] || exec {real} --kubeconfig {config} "$@"
    said=$({real} --kubeconfig {config} "$@" 2>&1)
    case $said in
        *"connection refused"*|*"was refused"*) ;;
        *) echo "kubectl: $said" >&2; exit 1 ;;
    esac
else
    cat >/dev/null
fi
case "$*" in
    *" get secret "*) printf %s "$CLUSTER_PASSWORD" | base64 ;;
    *" cp updater-0:"*) cp --recursive "$CLUSTER_JOURNAL" "${{@: -2:1}}" ;;
    *" exec "*" -- fedstream "*)
        [[ "$*" =~ /([a-z]+)" -- " ]]
        export FEDSTREAM_CONFIG=$PWD/run.toml FEDSTREAM_REDIS__USERNAME=${{BASH_REMATCH[1]}}
        exec fedstream "${{@: -1}}" ;;
esac
"""
_DOCKER = """#!/bin/bash
case "$*" in
    "build -t fedstream:{version} ."|"build -t fedstream:{version}-helper --build-arg TORCH=none .")
        [ -e Dockerfile ] ;;
    "compose --file $3 --file $5 up --build") [ -e "$3" ] && [ -e "$5" ] ;;
    *) false ;;
esac
"""
_KIND = """#!/bin/bash
[[ "$*" =~ ^"load docker-image fedstream:{version}"(-helper)?$ ]]
"""


def stand_ins(folder: Path, kubectl: Path | None, version: str) -> None:
    """Puts them into a folder for PATH."""
    config = folder / "no-cluster.yaml"
    config.write_text(_NO_CLUSTER)
    quoted = shlex.quote(str(kubectl or ""))
    texts = {
        "kubectl": _KUBECTL.format(real=quoted, config=shlex.quote(str(config))),
        "docker": _DOCKER.format(version=version),
        "kind": _KIND.format(version=version),
    }
    assert texts.keys() == STAND_INS.keys()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def not_run(command: str) -> NotRun | None:
    """The entry of a command that is to be skipped."""
    return next((one for one in NOT_RUN if re.match(one.pattern, command)), None)
