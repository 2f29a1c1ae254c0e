"""The manifests on a real cluster: what the docs say, with counts that add up and an exact replay.

    KUBECONFIG=... python -m tests.cluster [--seed N] [--only SCENARIO ...] [--small]

Needs a cluster with fedstream's image and nothing else. It works in the namespace `fedstream`,
which it deletes. Without KUBECONFIG it says so and leaves. Exit code 1: something did not hold.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from fedstream.experiments import machine
from tests.cluster import rotation as _rotation  # noqa: F401  (registers its scenarios)
from tests.cluster import scenarios as _scenarios  # noqa: F401  (registers them)
from tests.cluster.cluster import IMAGE, Cluster, Failed, reached
from tests.cluster.stage import COLUMNS, SCENARIOS, Docs, Row, Stage, cells_of
from tests.docs.pages import ROOT

TABLE = ROOT / "benchmarks" / "results" / "deployment.md"
_MEANING = """\
Each row with counts ends with a run at rest: the tasks issued are the sum of all outcomes, as many
are applied as the journal has, and the journal, copied as the docs say, replays identically to the
model that Redis has."""


def main() -> int:
    """Plays the scenarios, and writes the table unless only some were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: faults, passwords")
    parser.add_argument("--only", nargs="+", choices=sorted(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--namespace", default="fedstream", help="another one than the docs'")
    parser.add_argument("--image", default=IMAGE, help="as the cluster knows it")
    parser.add_argument("--small", action="store_true", help="lower requests: for a small machine")
    parser.add_argument("--node", default="", help="use this node alone, while others are tested")
    options = parser.parse_args()
    if why := reached():
        sys.stdout.write(f"cluster-test: skipped: {why}\n")
        return 0
    began = time.time()
    cluster = Cluster(options.namespace, options.image, options.small, options.node)
    with tempfile.TemporaryDirectory(prefix="cluster-test-") as folder:
        docs = Docs(cluster, Path(folder))
        stage = Stage(cluster, Path(folder), random.Random(options.seed), docs)
        with docs.shell:
            for name in options.only or SCENARIOS:
                play(stage, name)
        commands = len(docs.typed)
    text = table(stage.rows, cluster, options.seed, commands, time.time() - began)
    sys.stdout.write(text)
    if not options.only:
        TABLE.write_text(text)
    return int(any(row.failed for row in stage.rows))


def play(stage: Stage, name: str) -> None:
    """One scenario; what stops it is a row, and the next one begins."""
    stage.scenario = name
    try:
        SCENARIOS[name](stage)
    except (Failed, AssertionError, subprocess.SubprocessError, OSError) as error:
        traceback.print_exc()
        stage.rows.append(Row(name, "stopped", failed=str(error) or type(error).__name__))
    finally:
        for beside in list(stage.docs.shell.beside):
            stage.docs.shell.ended(beside, "INT")
        stage.docs.shell.run("unset ${!FEDSTREAM_@}")
        stage.cluster.end()


def table(rows: Sequence[Row], cluster: Cluster, seed: int, commands: int, seconds: float) -> str:
    """The results for people."""
    version = cluster.kubectl("version", "--output", "yaml").partition("serverVersion")[2]
    [server] = [line.split()[-1] for line in version.splitlines() if "gitVersion" in line]
    nodes = cluster.kubectl("get", "nodes", "--output", "name").split()
    about = ", ".join(f"{key} {value}" for key, value in machine.described().items())
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    failed = [row for row in rows if row.failed]
    lines = [
        "# Kubernetes, as `make cluster-test` has run it",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, seed {seed}, {seconds / 60:.0f} minutes:",
        f"{len(rows)} rows, {len(failed)} failed, {commands} of the docs' commands typed.",
        f"Kubernetes {server}, {len(nodes)} node(s); {about}.",
        "",
        _MEANING,
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join(cells_of(row))} |" for row in rows),
    ]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [f"- {row.scenario}, {row.what}: {row.failed}" for row in failed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
