"""Component backup: what its jobs run, on the journal of a run that goes on meanwhile."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import BLOBS, TEST_GUARD_S, Command, held, wait_until
from tests.k8s.manifests import K8S, ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

SCRIPT = K8S / "components" / "backup" / "backup.sh"
VERSIONS = 60


class Volumes:
    """The journal's volume and the copies', as a job has them."""

    def __init__(self, journal: Path, copies: Path, programs: Path) -> None:
        self.journal, self.copies = journal, copies
        copies.mkdir()
        self.environ = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "JOURNAL": str(journal), "BACKUPS": str(copies), "KEEP": "2",
        }  # fmt: skip

    def job(self, name: str, *, fails: bool = False, **environ: str) -> str:
        """What a job's pod says: ``backup`` or ``restore``."""
        done = subprocess.run(
            ["sh", SCRIPT, name], env=self.environ | environ,
            capture_output=True, text=True, timeout=TEST_GUARD_S, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    def backup(self, **environ: str) -> Path:
        """The newest copy, which is new. Copies are named by the second."""
        before = [name for name in self.names() if name != "unfinished"]
        wait_until(lambda: not (before and before[-1] == _now()), "the next second")
        self.job("backup", fails=False, **environ)
        [made] = {*self.names()} - {*before}
        return self.copies / made

    def names(self) -> list[str]:
        """Of the copies, oldest first."""
        return sorted(path.name for path in self.copies.iterdir())


def _now() -> str:
    return subprocess.check_output(["date", "-u", "+%Y%m%dT%H%M%SZ"], text=True).strip()


def segments(folder: Path) -> dict[str, bytes]:
    """The files of a journal by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.journal"))}


def test_a_run_goes_on_from_a_copy_that_was_made_while_it_went_on(
    tmp_path: Path, quick_programs: Path
) -> None:
    """The journal's volume and Redis are lost together; the claim is empty when it is restored."""
    (tmp_path / "blobs.py").write_text(held(BLOBS, 25))
    command = Command(
        tmp_path, "--task", "blobs.py:task", "--versions", str(VERSIONS), "--trainers", "1",
        "--set", "journal.segment_versions=5", programs=quick_programs,
    )  # fmt: skip
    volumes = Volumes(command.out / "journal", tmp_path / "copies", quick_programs)
    try:
        command.reaches(7)
        first = volumes.backup()
        command.reaches(20)
        copy = volumes.backup()
    finally:
        command.clean_up()
    shared = min(segments(first))
    assert (copy / shared).samefile(first / shared), "complete segments take no more room"
    before = segments(copy)
    shutil.rmtree(volumes.journal)
    volumes.journal.mkdir()
    (volumes.journal / "00000002.claim").touch()  # an updater was here before
    assert copy.name in volumes.job("restore")
    assert segments(volumes.journal) == before
    assert not volumes.journal.with_suffix(".before").exists()
    command.go()
    again = Command(
        tmp_path, "--resume", "--trust-recorded-code", "--trainers", "1", programs=quick_programs
    )
    try:
        assert again.ended() == 0, again.stdout + again.stderr
    finally:
        again.clean_up()
    assert again.summary["versions"] == VERSIONS
    assert 0 < again.summary["versions_before"] < VERSIONS
    after = segments(volumes.journal)
    own = [name for name in before if after.get(name) == before[name]]
    assert own == [*before][: max(len(own), len(before) - 1)], "only its end may have been torn"
    replay = subprocess.run(
        [quick_programs / "fedstream", "replay", "out", "--trust-recorded-code"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TEST_GUARD_S, check=False,
    )  # fmt: skip
    assert f"{VERSIONS} of {VERSIONS} versions identical" in replay.stdout, replay.stderr


@pytest.fixture
def volumes(tmp_path: Path, quick_programs: Path) -> Volumes:
    """With a journal of four segments, and no copies."""
    journal = tmp_path / "journal"
    journal.mkdir()
    for file in (ROOT / "tests" / "data" / "journals" / "quarantine").iterdir():
        (journal / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    return Volumes(journal, tmp_path / "copies", quick_programs)


def test_no_more_copies_are_kept_than_wanted(volumes: Volumes) -> None:
    made = [volumes.backup().name for _ in range(3)]
    assert volumes.names() == made[1:]


def test_a_copy_lacks_no_segment_between_two_when_the_oldest_are_deleted_meanwhile(
    volumes: Volumes, tmp_path: Path
) -> None:
    names = sorted(segments(volumes.journal))
    old = " ".join(f"{volumes.journal}/{name}" for name in names[:2])
    path = with_program(volumes, tmp_path, "cp", f'rm -f {old}; exec {shutil.which("cp")} "$@"')
    assert sorted(segments(volumes.backup(PATH=path))) == names[2:]


def test_copies_are_made_without_hard_links(volumes: Volumes, tmp_path: Path) -> None:
    path = with_program(volumes, tmp_path, "ln", "exit 1")
    first, second = volumes.backup(PATH=path), volumes.backup(PATH=path)
    assert segments(first) == segments(second)


def test_a_copy_without_room_is_none(volumes: Volumes, tmp_path: Path) -> None:
    path = with_program(volumes, tmp_path, "cp", 'head -c 9999 "$2" >"$3"; exit 1')
    assert "could not be copied" in volumes.job("backup", fails=True, PATH=path)
    assert volumes.names() == ["unfinished"]
    volumes.backup()
    assert "unfinished" not in volumes.names()


def with_program(volumes: Volumes, folder: Path, name: str, script: str) -> str:
    """A PATH with another program of this name."""
    program = folder / "programs" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}:{volumes.environ['PATH']}"


def test_a_damaged_journal_replaces_no_copy(volumes: Volumes) -> None:
    [kept] = [volumes.backup().name]
    file = min(volumes.journal.glob("*.journal"))
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)
    volumes.job("backup", fails=True)
    assert [name for name in volumes.names() if name != "unfinished"] == [kept]
    good = segments(volumes.copies / kept)
    volumes.job("restore")
    assert segments(volumes.journal) == good
    assert bytes(text) in segments(volumes.journal.with_name("journal.before")).values()
    assert "journal.before is there" in volumes.job("restore", fails=True)
    shutil.rmtree(volumes.journal)
    assert "the copies stay" in volumes.job("backup", fails=True)


def test_the_copy_to_restore_can_be_named(volumes: Volumes) -> None:
    first = volumes.backup()
    max(volumes.journal.glob("*.journal")).unlink()
    volumes.backup()
    said = volumes.job("restore", fails=True, BACKUP="20200101T000000Z")
    assert f"no copy 20200101T000000Z in {volumes.copies}; there are: {first.name}" in said
    volumes.job("restore", BACKUP=first.name)
    assert segments(volumes.journal) == segments(first)
