"""The manifests on a real cluster: what the docs say, with counts that add up and an exact replay.

    KUBECONFIG=... python -m tests.cluster [--seed N] [--only SCENARIO ...] [--small]

Needs a cluster with fedstream's image and nothing else. It works in the namespace `fedstream`,
which it deletes. Without KUBECONFIG it says so and leaves. Exit code 1: something did not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from experiments import machine
from tests.cluster import domains as _domains  # noqa: F401
from tests.cluster import faults as _faults  # noqa: F401  (registers its scenarios)
from tests.cluster import rotation as _rotation  # noqa: F401
from tests.cluster import scenarios as _scenarios  # noqa: F401
from tests.cluster.cluster import IMAGE, Cluster, Failed, reached
from tests.cluster.stage import COLUMNS, SCENARIOS, Docs, Row, Stage, cells_of
from tests.docs.pages import ROOT

TABLE = ROOT / "benchmarks" / "results" / "deployment.md"
_MEANING = """\
Written by `make cluster-test`; a scenario that is played again takes the place of its rows. Where
there are counts, the run was at rest in the end: the tasks issued are the sum of all outcomes, as
many are applied as the journal has, and the journal, copied as the docs say, replays identically to
the model that Redis has. Pauses are the longest time between two versions."""


def main() -> int:
    """Plays the scenarios; their rows go into the table."""
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
    about = machine.described()
    cluster = Cluster(options.namespace, options.image, options.small, options.node)
    with tempfile.TemporaryDirectory(prefix="cluster-test-") as folder:
        docs = Docs(cluster, Path(folder))
        stage = Stage(cluster, Path(folder), options.seed, docs)
        with docs.shell:
            for name in options.only or SCENARIOS:
                play(stage, name)
                TABLE.write_text(table(stage, about, TABLE.read_text()))
    sys.stdout.write(TABLE.read_text())
    left = "\n".join(f"  {one}" for one in docs.left())
    sys.stdout.write(f"{len(docs.typed)} of the docs' commands typed, not these:\n{left}\n")
    return int(any(row.failed for row in stage.rows))


def play(stage: Stage, name: str) -> None:
    """One scenario; what stops it is a row, and the next one begins."""
    stage.scenario = name
    try:
        SCENARIOS[name](stage)
    except (Failed, AssertionError, subprocess.SubprocessError, OSError) as error:
        traceback.print_exc()
        said = str(error).replace(f"{stage.folder}/", "")  # nothing in the table is of one machine
        stage.rows.append(Row(name, "stopped", failed=said or type(error).__name__))
    finally:
        for beside in list(stage.docs.shell.beside):
            stage.docs.shell.ended(beside, "INT")
        stage.docs.shell.run(f"unset ${{!FEDSTREAM_@}}; cd {stage.docs.clone}")
        stage.cluster.end()


def table(stage: Stage, described: Mapping[str, object], before: str) -> str:
    """The results for people: the rows of the scenario just played, and of others as before."""
    version = stage.cluster.kubectl("version", "--output", "yaml").partition("serverVersion")[2]
    [server] = [line.split()[-1] for line in version.splitlines() if "gitVersion" in line]
    nodes = stage.cluster.kubectl("get", "nodes", "--output", "name").split()
    about = dict(described)
    commit = f"{about.pop('date')}, {about.pop('commit')}, seed {stage.seed}"
    rows = [line.strip("| ").split(" | ") for line in before.splitlines() if line.startswith("| ")]
    kept = [cells for cells in rows if cells[0] in SCENARIOS and cells[0] != stage.scenario]
    new = [[*cells_of(row), commit] for row in stage.rows if row.scenario == stage.scenario]
    order = list(SCENARIOS)
    return "\n".join(
        [
            "# Kubernetes, on a real cluster",
            "",
            _MEANING,
            "",
            f"Kubernetes {server} with {len(nodes)} nodes;",
            f"{', '.join(f'{key} {value}' for key, value in about.items())}.",
            "",
            f"| {' | '.join([*COLUMNS, 'date, commit'])} |",
            "|---" * (len(COLUMNS) + 1) + "|",
            *(
                f"| {' | '.join(c)} |"
                for c in sorted([*kept, *new], key=lambda c: order.index(c[0]))
            ),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
