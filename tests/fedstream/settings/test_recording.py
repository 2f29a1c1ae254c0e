"""A stranger's recording: looking at it runs no program that it names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fedstream.cli.app import application
from fedstream.core.errors import ConfigError
from fedstream.history.ui.work import TaskAccess
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings, initial
from tests.fedstream.conftest import Command
from tests.journals import Scribe

PROGRAM = """
from pathlib import Path
from fedstream.trainer.task import TaskSettings
from fedstream.trainer.images import digits
Path({marker!r}).touch()
task = digits(TaskSettings())
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that the stranger's program makes as soon as it is imported."""
    return tmp_path / "it-ran"


@pytest.fixture(params=["its run.toml", "its journal", "a module beside it"])
def stranger(
    request: pytest.FixtureRequest, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A run's folder that names a program of its own, in one place or the other."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    program = folder / "stranger_task.py"
    program.write_text(PROGRAM.format(marker=str(marker)))
    named = f"{program}:task"
    if request.param == "a module beside it":
        named = "stranger_task:task"
    by_journal = request.param == "its journal"
    layout = initial(load_task("digits", TaskSettings()), 0).layout
    scribe = Scribe(folder / "journal", layout=layout, task=named if by_journal else "digits")
    for late in range(6):
        scribe.update(late=late % 2)
    scribe.close()
    if not by_journal:
        (folder / "run.toml").write_text(f"[task]\nname = {named!r}\n")
    monkeypatch.chdir(folder)  # as whoever looks at it would
    before = list(sys.path)
    yield folder
    sys.path[:] = before
    sys.modules.pop("stranger_task", None)


def test_no_command_runs_the_program_a_folder_names(
    command: Command, stranger: Path, marker: Path, tmp_path: Path
) -> None:
    looked: list[tuple[object, ...]] = [
        ("replay", stranger),
        ("replay", stranger, "--evaluate-every", 0, "--set", "strategy.alpha=0.1"),
        ("journal", "show", stranger),
        ("journal", "verify", stranger),
        ("journal", "stats", stranger),
        ("journal", "diff", stranger, stranger),
        ("journal", "export", stranger, "--out", tmp_path / "model.safetensors"),
    ]
    for arguments in looked:
        code, _, said = command(*arguments)
        assert (code, said) == (0, ""), arguments
    asked: list[tuple[object, ...]] = [
        ("replay", stranger, "--set", "strategy.alpha=0.1"),
        ("replay", stranger, "--without", "device=0"),
        ("replay", stranger, "--evaluate-every", 2),
        ("replay", stranger / "journal", "--evaluate-every", 2),
        ("journal", "bisect", stranger, "--below", 0.5),
        ("journal", "bisect", stranger, "--below", 0.5, "--set", "task.seed=1"),
    ]
    if (stranger / "run.toml").is_file():
        asked.append(("run", "--resume", "--out", stranger))
    for arguments in asked:
        code, out, said = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert "names the task" in said
        assert "stranger_task" in said
        assert "--task TASK" in said
        assert "--trust-recorded-code" in said
        assert said.count("\n") == 1
    refused: list[tuple[object, ...]] = [
        ("run", "--out", stranger),
        ("simulate", "--out", stranger),
    ]
    for arguments in refused:
        assert command(*arguments)[0] == 1, arguments
    assert not marker.exists()


def test_trusted_recordings_program_runs(command: Command, stranger: Path, marker: Path) -> None:
    command("replay", stranger, "--evaluate-every", 2, "--trust-recorded-task")
    assert marker.exists()  # so that the test above can see a program run


@pytest.mark.parametrize("stranger", ["its run.toml"], indirect=True)
def test_users_task_overrides_the_recorded_one(
    command: Command, stranger: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = ("replay", stranger, "--evaluate-every", 2)
    assert command(*measured, "--task", "digits")[0] == 0
    monkeypatch.setenv("FEDSTREAM_TASK__NAME", "digits")
    assert command(*measured)[0] == 0
    monkeypatch.delenv("FEDSTREAM_TASK__NAME")
    bisected = ("journal", "bisect", stranger, "--below", 2)
    assert command(*bisected, "--set", "task.name=digits")[0] == 1  # never was better
    assert not marker.exists()
    assert command(*measured, "--task", f"{stranger}/stranger_task.py:task")[0] == 0
    assert marker.exists()


# What they are for is to run the code of the configuration that they are given.
TRAIN_OR_SERVE = {
    "agree",
    "run",
    "simulate",
    "sweep",
    "device",
    "coordinator",
    "scheduler",
    "updater",
    "trainer",
    "evaluator",
    "sinks",
    "gateway",
}
EVERY_PART = """
solvers = [{{devices = [0], kind = "{0}:Any"}}]
sinks = [{{kind = "{0}:Any"}}]
[task]
name = "{0}:task"
partition = {{kind = "{0}:Any"}}
[strategy]
name = "{0}:Any"
staleness = {{kind = "{0}:Any"}}
[solver]
kind = "{0}:Any"
[scheduler]
policy = {{kind = "{0}:Any"}}
[gateway]
attestation = {{kind = "{0}:Any"}}
"""


def leaves(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """All commands, by the words that call them."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from leaves(one, *path, name)
        else:
            yield " ".join((*path, name)), one


@pytest.mark.parametrize("stranger", ["its run.toml"], indirect=True)
def test_what_a_configuration_names_runs_only_to_train_or_to_serve(
    command: Command, stranger: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that takes a file with --config, one after the other."""
    program, file = stranger / "stranger_task.py", tmp_path / "named.toml"
    file.write_text(EVERY_PART.format(program) + "[run]\nname = 'asked'\n")
    monkeypatch.setenv("FEDSTREAM_REDIS__URL", "redis://127.0.0.1:1/0")
    given = {
        "replay": (stranger, "--evaluate-every", 2),
        "journal bisect": (stranger, "--below", 2),
        "report": (stranger, "--evaluate-every", 1),
        "dead retry": ("1-0",),
        "dead drop": ("1-0", "--yes"),
        "dead show": ("1-0",),
        "purge": ("--yes",),
        "devices quarantine": (1,),
        "devices release": (1,),
        "devices invite": (1,),
        "devices revoke": (1,),
        "devices admit": (1,),
    }
    asked = {
        name
        for name, one in leaves(typer.main.get_group(application()))
        if any("--config" in parameter.opts for parameter in one.params)
    }
    assert asked >= {*given, "ui"} | TRAIN_OR_SERVE
    for name in sorted(asked - TRAIN_OR_SERVE - {"ui"}):  # which serves until it is ended
        code, _, said = command(*name.split(), *given.get(name, ()), "--config", file)
        assert not marker.exists(), name
        assert "Usage:" not in said, (name, said)  # it got so far as to read the file
        if name in ("doctor", "replay", "journal bisect"):
            assert (code, "--trust-recorded-code" in said, said.count("\n")) == (2, True, 1), said
        elif name not in ("acl", "helper", "report"):
            assert "127.0.0.1:1 does not answer" in said, (name, said)
    with pytest.raises(ConfigError, match=r"names the .*runs its code"):
        TaskAccess(config=file).settings(stranger)  # of `ui`
    assert not marker.exists()


@pytest.mark.parametrize("stranger", ["its run.toml"], indirect=True)
@pytest.mark.parametrize("how", ["--trust-recorded-code", "--task", "FEDSTREAM_CONFIG"])
def test_doctor_loads_a_task_that_is_trusted_or_named(
    command: Command,
    stranger: Path,
    marker: Path,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDSTREAM_REDIS__URL", "redis://127.0.0.1:1/0")
    program, file = stranger / "stranger_task.py", tmp_path / "named.toml"
    file.write_text("" if how == "--task" else f"[task]\nname = '{program}:task'\n")
    if how == "FEDSTREAM_CONFIG":  # what the services here run
        monkeypatch.setenv(how, str(file))
        arguments: tuple[object, ...] = ()
    else:
        arguments = ("--config", file, how, *([f"{program}:task"] if how == "--task" else []))
    assert command("doctor", *arguments)[0] == 1  # Redis is away
    assert marker.exists()


@pytest.mark.parametrize("stranger", ["its run.toml"], indirect=True)
def test_recording_cannot_cause_downloads(
    command: Command, stranger: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (stranger / "run.toml").write_text(
        f"[task]\nname = 'mnist'\ndownload = true\ndata_root = '{tmp_path}/fetched'\n"
    )
    monkeypatch.setattr("urllib.request.urlopen", pytest.fail)
    code, _, said = command("replay", stranger, "--evaluate-every", 2)
    assert code == 1
    assert "MNIST/raw" in said
    assert not (tmp_path / "fetched").exists()
