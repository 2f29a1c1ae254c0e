"""Plant a sample of faults, one at a time, and print which of them no test noticed."""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.operators import Mutant
from tests.mutants.plan import TESTS, package_of, sample
from tests.mutants.reach import Reach

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # for the tests of one mutant; one that hangs them is noticed too
HANGS_S = 70  # one test, in seconds: more than any of them takes, or waits for what doesn't come


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    killed_by: str  # the first test that failed; '': it survived


def main() -> int:
    """Exits with 1 if fewer than ``--least`` of a package's mutants were killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("package", nargs="*", choices=[*TESTS, []], metavar="PACKAGE")
    parser.add_argument("--mutants", type=int, default=40, help="number of mutants per package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--least", type=float, default=0.9, help="share of mutants that must be killed"
    )
    parser.add_argument("--csv", type=Path, help="write every verdict to this file")
    options = parser.parse_args()
    packages = options.package or [*TESTS]
    drawn = [m for name in packages for m in sample(ROOT, name, options.mutants, options.seed)]
    with _copies(options.jobs) as trees, ThreadPoolExecutor(options.jobs) as pool:
        every = sorted({tests for name in packages for tests in TESTS[name]})
        tree = trees.get()
        reach, failed = traced(tree, every, options.jobs)
        trees.put(tree)
        if failed:
            parser.error(f"these tests fail even without a mutant: {', '.join(failed)}")
        verdicts = []
        for verdict in pool.map(lambda mutant: _tried(mutant, reach, trees), drawn):
            verdicts.append(verdict)
            how = f"killed by {verdict.killed_by}" if verdict.killed_by else "SURVIVED"
            print(f"[{len(verdicts)}/{len(drawn)}] {verdict.mutant}: {how}", flush=True)
    if options.csv:
        _write(options.csv, options.seed, verdicts)
    return _summary(packages, verdicts, options.least)


def _summary(packages: list[str], verdicts: list[Verdict], least: float) -> int:
    enough = True
    for name in packages:
        mine = [v for v in verdicts if package_of(v.mutant) == name]
        killed = sum(bool(v.killed_by) for v in mine)
        enough &= killed >= least * len(mine)
        print(f"{name}: {killed} of {len(mine)} killed ({killed / max(1, len(mine)):.0%})")
    return 0 if enough else 1


def traced(tree: Path, tests: list[str], jobs: int) -> tuple[Reach, list[str]]:
    """Which tests run which lines, and those that fail although nothing was planted."""
    written = tree.parent / f"{tree.name}.reach"
    tracer = tree / "tests/mutants/traced"
    output = _run(
        tree,
        tests,
        ["-n", str(jobs), "-p", "sitecustomize"],
        limit_s=None,
        PYTHONPATH=f"{tracer}{os.pathsep}{tree}",
        MUTANTS_REACH=str(written),
    )
    # Traced, they are slow, which some take for a fault.
    return Reach(written), [test for test in _failed(output) if killed_by(tree, [test])]


def _tried(mutant: Mutant, reach: Reach, trees: SimpleQueue[Path]) -> Verdict:
    tree = trees.get()
    path = tree / mutant.path
    source = path.read_text()
    tests = reach.of(mutant, tree)
    try:
        path.write_text(mutant.applied(source))
        killer = killed_by(tree, [*TESTS[package_of(mutant)]] if tests is None else tests)
        return Verdict(mutant, killer)
    finally:
        path.write_text(source)
        trees.put(tree)


def killed_by(tree: Path, tests: list[str]) -> str:
    """The first test that failed, twice, or what else ended the run; '': all passed."""
    if not tests:
        return ""
    options = ["-x", "-p", "tests.mutants.twice"]
    try:
        return next(iter(_failed(_run(tree, tests, options, LIMIT_S, PYTHONPATH=str(tree)))), "")
    except subprocess.TimeoutExpired:
        return f"nothing ended within {LIMIT_S} s"


def _run(
    tree: Path, tests: list[str], options: list[str], limit_s: float | None, **environ: str
) -> str:
    """What pytest says of these tests; '' where all passed."""
    listed = tree.parent / f"{tree.name}.tests"
    listed.write_text("\n".join(tests))  # more than a command may be long
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
    with subprocess.Popen(
        [*command, f"--timeout={HANGS_S}", *options, f"@{listed}"],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environ,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
    if process.returncode not in (0, 1, 2, 3):  # 4, 5: there are no such tests
        raise RuntimeError(f"pytest ended with {process.returncode}: {output[-2000:]}")
    return output if process.returncode else ""


def _failed(output: str) -> list[str]:
    """The tests that failed, in their order."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    found = list(dict.fromkeys(line.split(" ", 1)[1].split(" - ")[0] for line in lines))
    return found if found or not output else ["an error before any test"]


@contextmanager
def _copies(n: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of the tree as it is, without what git ignores, beside the real ``../shared``."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shared = ROOT.parent / "shared"
        if shared.is_dir():
            (Path(folder) / "shared").symlink_to(shared.resolve())
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(n):
            tree = Path(folder) / f"tree-{number}"
            for name in names.splitlines():
                if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)
            trees.put(tree)
        yield trees


def _write(path: Path, seed: int, verdicts: list[Verdict]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["seed", "file", "line", "kind", "old", "new", "killed_by"])
        for v in verdicts:
            m = v.mutant
            old, new = (" ".join(text.split()) for text in (m.old, m.new))
            rows.writerow([seed, m.path, m.line, m.what, old, new, v.killed_by])


if __name__ == "__main__":
    sys.exit(main())
