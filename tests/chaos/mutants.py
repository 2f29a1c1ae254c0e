"""Faults planted in the code, one at a time: the chaos suite must notice each.

    python -m tests.chaos.mutants [--only NAME ...]

Each is planted in a copy of the project, where runs under faults are played, one seed after the
other, until a check complains; then without it, where all must hold. A mutant that no check
complains of has survived. The table goes to `benchmarks/results/chaos-mutants.md` and `.csv`;
mutants that were not asked for keep their lines there.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments import machine
from experiments.program import commit
from tests.chaos.checks import CHECKS
from tests.chaos.faults import Kind

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "chaos-mutants"
PACKAGES = ("broker", "coordinator", "experiments", "fedstream", "trainer", "updater", "tests")
COLUMNS = (
    "planted",
    "file",
    "faults",
    "seeds",
    "killed by",
    "first complaint",
    "without it",
    "seconds",
    "commit",
)
FAULTS = 6  # of a run
_STUCK_S = 40.0
_COMPLAINT = re.compile(rf"^({'|'.join(check.__name__ for check in CHECKS)}): ", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """What is planted where. ``before`` stands in the file exactly once."""

    name: str
    path: str
    before: str
    after: str
    kinds: tuple[Kind, ...]  # of fault that reach it
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    over_http: bool = False  # played with a gateway and devices over HTTP

    def plant(self, root: Path) -> None:
        """Changes the file. Raises ValueError if what it changes is not there, or several times."""
        path = root / self.path
        text = path.read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.path} has not exactly one {self.before!r}")
        path.write_text(text.replace(self.before, self.after))


MUTANTS = (
    Mutant(
        "applied is counted as refused",
        "broker/lua/prelude.lua",
        "  count(outcome)\n",
        "  count(outcome == 'applied' and 'refused' or outcome)\n",
        (Kind.KILL,),
    ),
    Mutant(
        "no token fences anybody",
        "broker/lua/prelude.lua",
        "return now and not same and 'fenced' or 'lost'",
        "return nil",
        (Kind.USURP, Kind.LATE, Kind.AMNESIA),
    ),
    Mutant(
        "what is synced is not on disk",
        "fedstream/journal/writer.py",
        "            os.fdatasync(self._file)\n",
        "            pass\n",
        (Kind.POWER, Kind.BLACKOUT),
    ),
    Mutant(
        "what a failed sync did not write is read from the cache",
        "updater/recovery.py",
        "        await self._patiently(lambda: sync_and_drop_cache(newest.path))\n",
        "",
        (Kind.EIO,),
        (0, 1, 2, 3, 4, 5),
    ),
    Mutant(
        "an entry is deleted before its record is on disk",
        "fedstream/journal/recorder.py",
        "return self.appended - self._writer.unsynced",
        "return self.appended",
        (Kind.POWER,),
        (1, 3, 5, 6),
    ),
    Mutant(
        "a second answer is admitted",
        "broker/lua/admit.lua",
        "if first then return astray(reasons.ANSWERED_TWICE) end\n",
        "",
        (Kind.TWICE,),
        (1, 3, 0, 2),
    ),
    Mutant(
        "counts are not restored after Redis was emptied",
        "broker/lua/create.lua",
        "    counts = a.counts\n",
        "    counts.issued = a.counts.issued\n",
        (Kind.EMPTY,),
    ),
    Mutant(
        "an update weighs half",
        "fedstream/strategies/fedasync.py",
        "return self.alpha_schedule(",
        "return 0.5 * self.alpha_schedule(",
        (Kind.KILL,),
    ),
    Mutant(
        "tasks lost with Redis are counted twice",
        "broker/lua/create.lua",
        "    counts[lost] = counts.issued - known\n",
        "    counts[lost] = 2 * (counts.issued - known)\n"
        "    counts.issued = known + counts[lost]\n",
        (Kind.EMPTY,),
    ),
    Mutant(
        "the newest model is not published again",
        "updater/loop.py",
        "if not await self.publisher.keep(",
        "if False and not await self.publisher.keep(",
        (Kind.ERASE,),
    ),
    Mutant(
        "a successor reads before it fences",
        "fedstream/journal/claims.py",
        r"(-[0-9]{6}\.journal|\.claim)",
        r"(-[0-9]{6}\.journal)",
        (Kind.TAKEOVER,),
        (0, 1, 2, 3, 6, 12),
    ),
    Mutant(
        "nobody looks for a successor",
        "fedstream/journal/claims.py",
        "        if newer is not None:\n",
        "        if False:\n",
        (Kind.TAKEOVER, Kind.RELAPSE),
        (0, 1, 2, 3, 6, 12),
    ),
    Mutant(
        "a version is committed on any other",
        "broker/lua/commit.lua",
        "  if due < 1 or due > #versions + 1 then return behind end\n",
        "",
        (Kind.LATE,),
        (7, 0, 1, 2),
    ),
    Mutant(
        "a task that is in the journal is done again",
        "updater/decider.py",
        "state.ends.get(message.task)) is not None:",
        "state.ends.get(message.task)) is not None and False:",
        (Kind.REWIND, Kind.TORN),
    ),
    Mutant(
        "a segment's name is not on disk",
        "fedstream/journal/writer.py",
        "            _named(aside, self.path)\n            sync_folder(folder)\n",
        "            _named(aside, self.path)\n",
        (Kind.POWER, Kind.KILL),
        (1, 3, 5, 0),
    ),
    Mutant(
        "a successor begins before its predecessor is on disk",
        "fedstream/journal/writer.py",
        "                os.fdatasync(file)\n            os.fdatasync(file)\n",
        "                pass\n",
        (Kind.KILL, Kind.POWER),
        (1, 3, 5, 6),
    ),
    Mutant(
        "damage in a record is not noticed",
        "fedstream/journal/segment.py",
        "if not is_whole(self._salt, data, checksum):",
        "if False:",
        (Kind.ROT,),
    ),
    Mutant(
        "what a device has to know is not handed out",
        "updater/commit.py",
        "used = {end.device for end in ends if",
        "used = {end.device for end in ends if False and",
        (Kind.KILL,),
        (5, 11),
    ),
    Mutant(
        "an end is counted and not told",
        "broker/lua/prelude.lua",
        "event.what, event.task, event.outcome, event.reason = 'outcome', task, outcome, reason\n"
        "  tell(event)\n",
        "",
        (Kind.KILL,),
    ),
    Mutant(
        "a task is opened and not counted",
        "broker/lua/trigger.lua",
        "count('issued')",
        "count('issue')",
        (Kind.KILL,),
    ),
    Mutant(
        "an end that Redis forgot is counted again",
        "broker/lua/prelude.lua",
        "if redis.call('HDEL', key.open, task) == 0 then return 0 end",
        "redis.call('HDEL', key.open, task)",
        (Kind.REWIND, Kind.KILL),
    ),
    Mutant(
        "buffers are added up",
        "fedstream/strategies/batches.py",
        "1.0 / arrivals, into=total.buffers",
        "1.0, into=total.buffers",
        (Kind.KILL,),
        (2, 3),
    ),
    Mutant(
        "a device's last gradient stays in the sum",
        "fedstream/strategies/caches.py",
        "np.subtract(latest, last)",
        "latest",
        (Kind.KILL,),
        (4, 10),
    ),
    Mutant(
        "an update says another base",
        "trainer/attempt.py",
        "trainer=self._shared.name,\n            tau=start.version,",
        "trainer=self._shared.name,\n            tau=max(0, start.version - 1),",
        (Kind.KILL,),
    ),
    Mutant(
        "what an update left unsent is not kept",
        "broker/lua/finish_task.lua",
        "  if staged[i] then redis.call('RENAME', KEYS[i], KEYS[i + 1]) end\n",
        "",
        (Kind.KILL,),
        (2, 10, 14, 15),
    ),
    Mutant(
        "what an update left unsent is not sent",
        "trainer/learner.py",
        "fed_back(into, memory, how)",
        "fed_back(into, None, how)",
        (Kind.KILL,),
        (2, 10, 14, 15),
    ),
    Mutant(
        "an update leaves unsent what it sent",
        "fedstream/core/formats.py",
        "lost = np.subtract(wanted, update.parameters, out=wanted)",
        "lost = np.multiply(wanted, 1, out=wanted)",
        (Kind.KILL,),
        (2, 10, 14, 15),
    ),
    Mutant(
        "a field that an earlier release does not write is required",
        "fedstream/core/messages.py",
        '    sends: Sends = "model"\n',
        "    sends: Sends\n",
        (Kind.KILL,),
        (0, 1, 6, 7),
    ),
    Mutant(
        "a gateway acknowledges a task when it gets it",
        "coordinator/gateway/tasks.py",
        "is_untouched=is_new), now\n        )\n",
        "is_untouched=is_new), now\n        )\n"
        '        await self._client.call("XACK", group.stream, TRAINERS, entry.id)\n',
        (Kind.HANG_UP,),
        over_http=True,
    ),
    Mutant(
        "a device gets another device's task",
        "coordinator/gateway/device_sessions.py",
        "return session.tasks[0] if session is not None and session.tasks else None",
        "return next(iter(self._held.values()), None)",
        (Kind.HANG_UP,),
        over_http=True,
    ),
    Mutant(
        "a device hears of an error of the gateway's while Redis is away",
        "coordinator/gateway/app.py",
        "            case FedstreamError(retriable=True):\n",
        "            case FedstreamError(retriable=None):\n",
        (Kind.PARTITION, Kind.CUT),
        over_http=True,
    ),
    Mutant(
        "an upload that was cut is filled up",
        "coordinator/gateway/uploads.py",
        '"more bytes than the upload has") from None\n',
        '"more bytes than the upload has") from None\n'
        "        except Exception:\n"
        "            for number, chunk in chunks.take(bytes(chunks._length - chunks.received)):\n"
        "                await use(number, chunk)\n",
        (Kind.HANG_UP,),
        over_http=True,
    ),
    Mutant(
        "an update over HTTP says the newest version as its base",
        "coordinator/gateway/uploads.py",
        "tau=report.tau,\n            base=report.base,",
        "tau=self._run_cache.head.version,\n            base=self._run_cache.head.given,",
        (Kind.HANG_UP,),
        over_http=True,
    ),
)


@dataclass(frozen=True)
class Played:
    """What runs came to, with a mutant or without."""

    seeds: tuple[int, ...]
    complained: tuple[str, ...]  # the checks that did; (): everything held
    first: str  # complaint
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    played: Played
    without: Played  # the same runs of the project as it is

    @property
    def killed(self) -> bool:
        """Whether checks complained of the mutant, and of nothing else."""
        return bool(self.played.complained) and not self.without.complained


def copied(into: Path) -> None:
    """The project's code, without what is built or measured."""
    left = shutil.ignore_patterns("__pycache__", "*.pyc", "node_modules", ".venv*")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, into / package, symlinks=True, ignore=left)


def play(
    mutant: Mutant | None, kinds: Sequence[Kind], seeds: Sequence[int], *, over_http: bool
) -> Played:
    """Plays seeds in a copy of the project, with the mutant in it, until one fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedstream-mutant-") as folder:
        copied(Path(folder))
        if mutant is not None:
            mutant.plant(Path(folder))
        said = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.chaos",
                "--of",
                str(FAULTS),
                "--at-once",
                "1",
                "--stuck-s",
                str(_STUCK_S),
                "--until-failure",
                "--seed",
                *map(str, seeds),
                *(["--gateway"] if over_http else []),
                "--only",
                *kinds,
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        ).stdout
    played = tuple(
        int(n) for n in re.findall(r"^seed (\d+): .*(?:held|FAILED)", said, re.MULTILINE)
    )
    checks = Counter(_COMPLAINT.findall(said))
    first = next((line for line in said.splitlines() if _COMPLAINT.match(line)), "")
    if len(played) < len(seeds) and not checks:
        raise RuntimeError(f"{mutant}: the suite ended after seeds {played}:\n{said[-2000:]}")
    return Played(played, tuple(checks), first[:200], time.monotonic() - began)


@cache
def baseline(kinds: tuple[Kind, ...], seeds: tuple[int, ...], over_http: bool) -> Played:
    """The same without a mutant, where everything should hold."""
    return play(None, kinds, seeds, over_http=over_http)


def judged(mutant: Mutant) -> Verdict:
    """Plays a mutant's seeds, and without it those that were played."""
    played = play(mutant, mutant.kinds, mutant.seeds, over_http=mutant.over_http)
    return Verdict(mutant, played, baseline(mutant.kinds, played.seeds, mutant.over_http))


def row(verdict: Verdict) -> dict[str, str]:
    """A mutant's line of the table, to be kept."""
    mutant, played, without = verdict.mutant, verdict.played, verdict.without
    return {
        "planted": mutant.name,
        "file": mutant.path,
        "faults": " ".join(mutant.kinds),
        "seeds": " ".join(map(str, played.seeds)),
        "killed by": " ".join(played.complained),
        "first complaint": played.first,
        "without it": " ".join(without.complained) or "held",
        "seconds": str(round(played.seconds)),
        "commit": commit(),
    }


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """The results for people."""
    about = ", ".join(f"{name} {value}" for name, value in machine.described().items())
    killed = sum(one["killed by"] != "" and one["without it"] == "held" for one in rows)
    missing = len(MUTANTS) - len(rows)
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join(["---"] * len(COLUMNS)) + " |"]
    for one in rows:
        cells = dict(one) | {"killed by": one["killed by"] or "**survived**"}
        lines.append("| " + " | ".join(cells[name].replace("|", "\\|") for name in COLUMNS) + " |")
    return (
        "\n".join(
            [
                "# Faults planted in the code",
                "",
                "`make chaos-mutants`: each is planted alone in a copy of the project, in which",
                f"runs of {FAULTS} faults that reach it are played, seed by seed, until a check",
                "complains; then the same runs without it. `tests/chaos/mutants.py` says what",
                "exactly is planted.",
                "",
                about,
                "",
                f"{killed} of {len(rows)} killed" + (f", {missing} not played" if missing else ""),
                "",
                *lines,
            ]
        )
        + "\n"
    )


def written(verdicts: Sequence[Verdict]) -> str:
    """Writes the tables: what was played now, and of the other mutants what is there of before."""
    path = RESULTS.with_suffix(".csv")
    known = {}
    if path.exists():
        with path.open(newline="") as file:
            known = {one["planted"]: one for one in csv.DictReader(file)}
    known |= {verdict.mutant.name: row(verdict) for verdict in verdicts}
    rows = [known[mutant.name] for mutant in MUTANTS if mutant.name in known]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    text = table(rows)
    RESULTS.with_suffix(".md").write_text(text)
    return text


def main() -> int:
    """Judges, prints, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="words of the mutants' names")
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    wanted = [m for m in MUTANTS if not options.only or any(w in m.name for w in options.only)]
    if not wanted:
        parser.error(f"no mutant has one of these words in its name: {options.only}")
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for verdict in pool.map(judged, wanted):
            verdicts.append(verdict)
            played, without = verdict.played, verdict.without
            sys.stdout.write(
                f"{verdict.mutant.name}: {', '.join(played.complained) or 'SURVIVED'} "
                f"(seeds {played.seeds}, {played.seconds:.0f} s), "
                f"without it {', '.join(without.complained) or 'held'}\n"
            )
            sys.stdout.flush()
            text = written(verdicts)
    sys.stdout.write(text)
    return int(not all(verdict.killed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
