"""What a scenario has to work with: the cluster, the docs' commands, and the table's rows."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import yaml

from fedstream.local.supervisor import is_answering
from tests.cluster.checks import Outcome, Run
from tests.cluster.cluster import IMAGE, Cluster, Failed, until
from tests.docs.pages import COMMANDS, ROOT, Block, blocks
from tests.docs.shell import Beside, Shell
from tests.k8s.manifests import K8S, Manifest, kubectl
from tests.support import free_port

ROLES = (
    "coordinator",
    "scheduler",
    "updater",
    "evaluator",
    "trainer",
    "operator",
    "replica",
    "sentinel",
    "watch",
    "sinks",
    "gateway",
)
KUBERNETES, OPERATE = "docs/how-to/kubernetes.md", "docs/how-to/operate-kubernetes.md"
PRODUCTION = "docs/how-to/production.md"
PAGES = (KUBERNETES, OPERATE, PRODUCTION, "docs/how-to/inspect.md", "docs/how-to/browser.md")

# The manifests' own task, whose every step takes a while: tasks are open whenever a fault comes,
# and many pods share a small machine.
SLOW = (
    (K8S / "base" / "task" / "task.py").read_text()
    + """
import time
class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)
task = Slow
"""
)


_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    scenario: str
    what: str
    outcome: Outcome | None = None
    pause: float | None = None  # seconds without a version
    note: str = ""
    failed: str = ""


def secret(name: str, namespace: str, data: Mapping[str, str]) -> Manifest:
    """A Secret."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(data)}


def answers(port: int) -> None:
    """Waits until something listens on a port of this machine. Raises Failed."""
    until(lambda: is_answering("127.0.0.1", port), f"something at port {port}", 30)


class Docs:
    """The docs' commands, as they stand there. Each must do what the page says."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.clone, self._cluster = folder / "fedstream", cluster
        self.clone.mkdir(parents=True)
        for entry in ("Dockerfile", "Makefile", "README.md"):
            (self.clone / entry).symlink_to(ROOT / entry)
        shutil.copytree(K8S, self.clone / "k8s")
        programs = folder / "programs"
        programs.mkdir()
        self._programs(programs)
        environ = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
        environ["PATH"] = f"{programs}:{environ['PATH']}"
        self.shell = Shell(self.clone, folder / "terminal", environ)
        self.typed: set[str] = set()
        self.web, self.redis = free_port(), free_port()  # in place of 8080 and 6379 here

    def _programs(self, folder: Path) -> None:
        """fedstream, kubectl, and what stands in for programs that load the image."""
        (folder / "fedstream").symlink_to(Path(sys.executable).with_name("fedstream"))
        for name in ("docker", "kind"):  # the image is in the cluster
            (folder / name).symlink_to("/bin/true")
        cluster, real = self._cluster, shlex.quote(str(kubectl()))
        if cluster == Cluster("fedstream"):
            return
        # What is applied is adapted as everywhere in the suite.
        options = ["--namespace", cluster.namespace, "--image", cluster.image]
        options += ["--node", cluster.node]
        adapt = shlex.join(
            [
                sys.executable,
                "-m",
                "tests.cluster.cluster",
                *options,
                *(["--small"] if cluster.small else []),
            ]
        )
        (folder / "kubectl").write_text(
            "#!/bin/bash\nset -o pipefail\nPATH=${PATH#*:}\n"
            'case "$1 $2" in\n'
            f'  "apply -k"|"delete -k") render() {{ {real} kustomize "$1"; }} ;;\n'
            '  "apply --filename") render() { cat "$1"; } ;;\n'
            f'  *) exec {real} "$@" ;;\n'
            "esac\n"
            f'render "$3" | PYTHONPATH={ROOT} {adapt} | {real} "$1" -f -\n'
        )
        (folder / "kubectl").chmod(0o755)

    def commands(self, page: str) -> list[tuple[Block, str]]:
        """The commands of a page."""
        found = (block for block in blocks(page) if block.language in COMMANDS)
        return [(block, text) for block in found for text in block.commands()]

    def _find(self, page: str, begins: str) -> tuple[Block, str]:
        """On this page, or wherever else it is."""
        every = [self.commands(one) for one in (page, *PAGES) if (ROOT / one).exists()]
        found = [one for some in every for one in some if one[1].startswith(begins)]
        if not found:
            raise Failed(f"{page} has no command {begins!r}")
        block, text = found[0]
        self.typed.add(f"{block.place}: {text}")
        return block, self.here(text)

    def here(self, text: str) -> str:
        """A command of the docs with the namespace, ports and image of this machine."""
        text = text.replace("YOUR_OVERLAY", "../YOUR_OVERLAY").replace(IMAGE, self._cluster.image)
        text = re.sub(r"\b8080(:80\b)?", lambda found: f"{self.web}{found[1] or ''}", text)
        text = text.replace("service/redis 6379", f"service/redis {self.redis}:6379")
        text = re.sub(r"\b(127\.0\.0\.1|localhost):6379", rf"\1:{self.redis}", text)
        for option in ("--namespace ", "-n "):
            text = text.replace(f"{option}fedstream", f"{option}{self._cluster.namespace}")
        return text

    def text(self, page: str, language: str, begins: str) -> str:
        """A block that is no command, such as a file, as it is written here."""
        [found] = (
            one.text
            for one in blocks(page)
            if one.language == language and one.text.startswith(begins)
        )
        return self.here(found).replace(
            "namespace: fedstream", f"namespace: {self._cluster.namespace}"
        )

    def type(self, page: str, *begins: str) -> str:
        """Types commands, by how they begin, and waits: what they printed. Raises Failed."""
        said = ""
        for one in begins:
            block, text = self._find(page, one)
            said += self.given(text, block.place)
        return said

    def inline(self, page: str, begins: str) -> str:
        """Types a command that stands in a sentence: what it printed. Raises Failed."""
        text = " ".join((ROOT / page).read_text().split())
        found = re.search(rf"`({re.escape(begins)}[^`]*)`", text)
        if not found:
            raise Failed(f"{page} has no command {begins!r}")
        self.typed.add(f"{page}: {found[1]}")
        return self.given(self.here(found[1]), page)

    def left(self) -> list[str]:
        """The commands of the pages on Kubernetes that nobody has typed."""
        every = {
            f"{block.place}: {text}"
            for page in PAGES
            for block, text in self.commands(page)
            if page.endswith("kubernetes.md") or "kubectl" in text
        }
        return sorted(every - self.typed)

    def follow(self, page: str, files: Mapping[str, str]) -> None:
        """Types all of a page, and writes its files, by their kinds. Raises Failed."""
        for block in blocks(page):
            if block.language == "yaml":
                text = self.here(block.text).replace(
                    "namespace: fedstream", f"namespace: {self._cluster.namespace}"
                )
                kind = re.findall(r"(?m)^kind: (\w+)", text)[0]
                self.given(f"cat > {files[kind]} <<'END'\n{text}\nEND")
            for command in block.commands() if block.language in COMMANDS else ():
                self.typed.add(f"{block.place}: {command}")
                if command.endswith(" &"):
                    self.shell.begin(self.here(command.removesuffix(" &")))
                    answers(self.web)
                else:
                    self.given(self.here(command), block.place)

    def given(self, command: str, place: str = "") -> str:
        """Types what no page says, or at a place of one: what it printed. Raises Failed."""
        code, said = self.shell.run(command)
        if code:
            raise Failed(f"{place}: {command}: exit code {code}: {said.strip()[-1500:]}")
        return said

    def begin(self, page: str, begins: str) -> Beside:
        """Types a command that goes on, in another terminal."""
        return self.shell.begin(self._find(page, begins)[1].rstrip("& "))

    def overlay(self, *components: str, **settings: str) -> None:
        """YOUR_OVERLAY, next to the clone: the base with components and the slow task."""
        names = [*(f"components/{name}" for name in components), "images"]
        literals = [f"FEDSTREAM_{key}={value}" for key, value in settings.items()]
        content = {
            "kind": "Kustomization",
            "namespace": "fedstream",
            "resources": ["../fedstream/k8s/base"],
            "components": [f"../fedstream/k8s/{name}" for name in names],
            "configMapGenerator": [
                {"name": "fedstream-task", "behavior": "replace", "files": ["task.py"]},
                {"name": "fedstream-settings", "behavior": "merge", "literals": literals},
            ],
        }
        folder = self.clone.parent / "YOUR_OVERLAY"
        folder.mkdir(exist_ok=True)
        (folder / "task.py").write_text(SLOW)
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))


@dataclass
class Stage:
    """For one scenario after the other."""

    cluster: Cluster
    folder: Path
    seed: int
    docs: Docs
    scenario: str = ""
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        names = (*ROLES, "site-a", "site-b", "token")
        self.passwords = {name: f"{self.rng.getrandbits(128):032x}" for name in names}

    def secrets(self) -> list[Manifest]:
        """Every Secret that components want."""
        one, space = self.passwords, self.cluster.namespace
        return [
            secret("fedstream-redis", space, {role: one[role] for role in ROLES}),
            secret("fedstream-http", space, {"token": one["token"]}),
            secret("fedstream-site-a", space, {"password": one["site-a"]}),
            secret("fedstream-site-b", space, {"password": one["site-b"]}),
            secret("fedstream-redis-tls", space, self.certificate),
        ]

    @cached_property
    def certificate(self) -> dict[str, str]:
        """Redis's, as the docs make it, and for a Redis elsewhere too: the Secret's files."""
        self.docs.given(f"cd {self.docs.clone}")  # another page's commands may have left it
        self.docs.type(KUBERNETES, "cat > names")
        self.docs.given(f"sed -i '1s/$/,DNS:redis.{self.cluster.namespace}-redis/' names")
        self.docs.type(KUBERNETES, "openssl req -x509", "openssl req -newkey", "openssl x509")
        names = ("tls.crt", "tls.key", "ca.crt")
        return {name: (self.docs.clone / name).read_text() for name in names}

    def run(self) -> Run:
        """The run in the namespace."""
        return Run(self.cluster, self.folder)

    @contextmanager
    def deployed(
        self,
        *components: str,
        resource: str = "base",
        versions: int = 3,
        change: Callable[[Manifest], object] = id,
        before: Iterable[Manifest] = (),
        redis: Cluster | None = None,
        settings: Mapping[str, str] = _NONE,
    ) -> Iterator[Run]:
        """A namespace with the slow task on these components, at work. ``before``: further
        objects; ``change``: changes each."""
        self.cluster.begin()
        self.cluster.apply([*self.secrets(), *before])
        keys = {"RUN__VERSIONS": "1000000", **settings}
        objects = self.cluster.rendered(*components, resource=resource, task=SLOW, **keys)
        for one in objects:
            change(one)
        self.cluster.apply(objects)
        self.cluster.ready()
        with Run(self.cluster, self.folder, redis) as run:
            run.more(versions)
            yield run

    def add(
        self, what: str, outcome: Outcome | None = None, pause: float | None = None, note: str = ""
    ) -> None:
        """A row of the table; an outcome with faults is a failure."""
        failed = "; ".join(outcome.wrong[:5]) if outcome else ""
        self.rows.append(Row(self.scenario, what, outcome, pause, note, failed))
        sys.stdout.write(told(self.rows[-1]) + "\n")
        sys.stdout.flush()


Scenario: TypeAlias = Callable[[Stage], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(play: Scenario) -> Scenario:
    """Registers a scenario under its function's name; the first line of its docstring says what."""
    SCENARIOS[play.__name__.replace("_", "-")] = play
    return play


def told(row: Row) -> str:
    """A row in one line."""
    return " | ".join(cell for cell in cells_of(row) if cell != "-")


COLUMNS = ("scenario", "what", "versions", "tasks", "longest pause", "replay", "figures")


def cells_of(row: Row) -> tuple[str, ...]:
    """A row's cells, by COLUMNS."""
    versions = tasks = replay = ""
    if row.outcome is not None:
        counts = row.outcome.tasks
        ended = [
            f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if n and name != "issued"
        ]
        versions = str(len(row.outcome.versions) - 1)
        tasks = f"{counts.get('issued', 0)} = {' + '.join(ended)}"
        replay = row.outcome.replayed
    pause = "" if row.pause is None else f"{row.pause:.1f} s"
    failure = " ".join(row.failed.replace("|", "/").split())[:200]
    verdict = f"FAILED: {failure}" if row.failed else replay
    cells = row.scenario, row.what, versions, tasks, pause, verdict, row.note
    return tuple(cell or "-" for cell in cells)
