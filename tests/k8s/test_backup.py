"""Component backup: what its jobs run. On a cluster a run goes on from a copy: tests/cluster."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import BLOBS, TEST_GUARD_S, Command, held, wait_until
from tests.journal.test_unshared import recorded
from tests.k8s.manifests import K8S, ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

SCRIPT = K8S / "components" / "backup" / "backup.sh"
VERSIONS = 60
OTHERS = ("unfinished", ".lock")  # beside the copies


def with_program(folder: Path, name: str, script: str, path: str = os.environ["PATH"]) -> str:
    """A PATH with another program of this name."""
    program = folder / "programs" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}:{path}"


class Volumes:
    """The journal's volume and the copies', as a job has them."""

    def __init__(self, journal: Path, copies: Path, programs: Path) -> None:
        self.journal, self.copies = journal, copies
        copies.mkdir()
        self.environ = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "JOURNAL": str(journal),
            "BACKUPS": str(copies),
            "KEEP": "2",
        }

    def path(self, name: str, script: str) -> str:
        """A PATH with another program of this name."""
        return with_program(self.copies.parent, name, script, self.environ["PATH"])

    def starts(self, name: str, **environ: str) -> subprocess.Popen[str]:
        """A job's process: ``backup`` or ``restore``."""
        return subprocess.Popen(
            ["sh", SCRIPT, name],
            env=self.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def job(self, name: str, *, fails: bool = False, **environ: str) -> str:
        """What a job's pod says."""
        with self.starts(name, **environ) as process:
            out, err = process.communicate(timeout=TEST_GUARD_S)
        assert (process.returncode != 0) == fails, out + err
        return err if fails else out

    def backup(self, **environ: str) -> Path:
        """The newest copy, which is new."""
        before = self.names()
        self.job("backup", fails=False, **environ)
        [made] = {*self.names()} - {*before}
        return self.copies / made

    def names(self) -> list[str]:
        """Of the copies, oldest first."""
        return sorted(path.name for path in self.copies.iterdir() if path.name not in OTHERS)


def segments(folder: Path) -> dict[str, bytes]:
    """The files of a journal by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.journal"))}


@pytest.fixture
def volumes(tmp_path: Path, quick_programs: Path) -> Volumes:
    """With a journal of four segments, and no copies."""
    journal = tmp_path / "journal"
    journal.mkdir()
    for file in (ROOT / "tests" / "data" / "journals" / "quarantine").iterdir():
        (journal / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    return Volumes(journal, tmp_path / "copies", quick_programs)


def test_no_more_copies_are_kept_than_wanted(volumes: Volumes) -> None:
    made = [volumes.backup() for _ in range(3)]
    assert volumes.names() == [one.name for one in made[1:]]
    shared = min(segments(made[1]))
    assert (made[2] / shared).samefile(made[1] / shared), "complete segments take no more room"


def test_a_copy_lacks_no_segment_between_two_when_the_oldest_are_deleted_meanwhile(
    volumes: Volumes, tmp_path: Path
) -> None:
    names = sorted(segments(volumes.journal))
    old = " ".join(f"{volumes.journal}/{name}" for name in names[:2])
    path = volumes.path("cp", f'rm -f {old}; exec {shutil.which("cp")} "$@"')
    assert sorted(segments(volumes.backup(PATH=path))) == names[2:]


def test_copies_are_made_without_hard_links(volumes: Volumes) -> None:
    """NFS may say of a link that it made that it is there already: cp must not write into it."""
    path = volumes.path("ln", f'{shutil.which("ln")} "$@"; exit 1')
    first, second = volumes.backup(PATH=path), volumes.backup(PATH=path)
    assert segments(first) == segments(second)
    assert not any((first / name).samefile(second / name) for name in segments(first))


def test_a_copy_without_room_is_none(volumes: Volumes) -> None:
    path = volumes.path("cp", 'head -c 9999 "$2" >"$3"; exit 1')
    assert "could not be copied" in volumes.job("backup", fails=True, PATH=path)
    assert volumes.names() == []
    volumes.backup()
    assert not (volumes.copies / "unfinished").exists()


def test_two_backups_take_turns(volumes: Volumes, tmp_path: Path) -> None:
    reached, go_on = tmp_path / "reached", tmp_path / "go on"
    wait = f'touch {reached}; while [ ! -e "{go_on}" ]; do sleep 0.05; done'
    path = volumes.path("cp", f'{wait}; exec {shutil.which("cp")} "$@"')
    with volumes.starts("backup", PATH=path) as first:
        wait_until(reached.exists, "the first copies")
        with volumes.starts("backup") as second:
            assert second.stdout is not None
            try:
                assert second.stdout.readline() == "backup: another one is running: waiting\n"
            finally:
                go_on.touch()
            first.communicate()
            second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(volumes.names()) == 2
    for name in volumes.names():
        assert segments(volumes.copies / name) == segments(volumes.journal)


def test_a_backup_that_is_killed_leaves_no_part_of_a_copy_as_a_copy(volumes: Volumes) -> None:
    """While it deletes the oldest. A journal without its end is as valid as a whole one."""
    volumes.backup()
    volumes.backup()
    rm = shutil.which("rm")
    path = volumes.path(
        "rm", f'[ -d "$2" ] || exec {rm} "$@"; {rm} "$2"/00000003-000002.journal; kill -9 $PPID'
    )
    volumes.job("backup", fails=True, PATH=path)
    for name in volumes.names():
        assert segments(volumes.copies / name) == segments(volumes.journal)


def test_a_restore_that_is_killed_can_be_repeated(volumes: Volumes) -> None:
    good = segments(volumes.backup())
    path = volumes.path("mv", f'{shutil.which("mv")} "$@"; kill -9 $PPID')
    volumes.job("restore", fails=True, PATH=path)
    assert not volumes.journal.exists()
    volumes.job("restore")
    assert segments(volumes.journal) == good
    assert segments(volumes.journal.with_name("journal.before")) == good


def test_a_restore_does_not_take_an_updaters_new_folder_for_its_place(volumes: Volumes) -> None:
    good = segments(volumes.backup())
    claim = f"mkdir {volumes.journal}; touch {volumes.journal}/00000009.claim"
    move = f'{shutil.which("mv")} "$@" || exit'
    path = volumes.path("mv", f"{move}; [ -e {volumes.journal} ] || {{ {claim}; }}")
    assert "scale it to 0" in volumes.job("restore", fails=True, PATH=path)
    volumes.job("restore")
    assert segments(volumes.journal) == good


def test_an_updater_stops_when_a_copy_takes_its_journals_place(
    tmp_path: Path, quick_programs: Path
) -> None:
    """Else it would go on in the folder that was moved away, and then begin a segment in the copy,
    which lacks what is between. Started again, it goes on from the copy.
    """
    (tmp_path / "blobs.py").write_text(held(BLOBS, 12))
    command = Command(
        tmp_path,
        f"--task blobs.py:task --versions {VERSIONS} --trainers 1",
        sets=("journal.segment_versions=5", "journal.adopt=true"),
        programs=quick_programs,
    )
    volumes = Volumes(command.out / "journal", tmp_path / "copies", quick_programs)
    try:
        command.reaches(12)
        volumes.backup()
        volumes.job("restore")
        command.go()
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    assert "journal: was replaced while being written" in command.stdout + command.stderr
    volumes.backup()  # which verifies it


def test_a_damaged_journal_replaces_no_copy(volumes: Volumes) -> None:
    [kept] = [volumes.backup().name]
    file = min(volumes.journal.glob("*.journal"))
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)
    volumes.job("backup", fails=True)
    assert volumes.names() == [kept]
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


def test_frozen_parameters_are_copied_and_put_back(tmp_path: Path, quick_programs: Path) -> None:
    recorded(tmp_path / "journal")
    volumes = Volumes(tmp_path / "journal", tmp_path / "copies", quick_programs)
    names = sorted(one.name for one in volumes.journal.iterdir())
    assert len(names) == 2
    [copy] = [volumes.backup(), volumes.backup()][1:]
    assert sorted(one.name for one in copy.iterdir()) == names
    shutil.rmtree(volumes.journal)
    volumes.job("restore")
    assert sorted(one.name for one in volumes.journal.iterdir()) == names
