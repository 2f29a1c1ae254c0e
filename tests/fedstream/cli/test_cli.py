"""The command line: what is wrong is said in one line, with the exit code that means it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import structlog
import typer
from pydantic import Field

from fedstream import __version__
from fedstream.cli import options
from fedstream.cli.app import application, main
from fedstream.core.messages import OUTCOMES
from fedstream.history import display, status
from fedstream.local import run
from fedstream.runtime.plugins import PluginRegistry
from fedstream.runtime.settings_keys import Key, keys_of
from fedstream.settings.config import read
from fedstream.settings.plugin_sources import REGISTRIES
from fedstream.strategies import RULES, Batch
from fedstream.strategies.staleness import Polynomial, Staleness
from fedstream.trainer.loading import BUILT_IN
from tests.broker.certificates import authority
from tests.fedstream.conftest import Command

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def process_restored() -> Iterator[None]:
    """Commands set the umask and the loggers of their process, which is the tests' here."""
    umask, root = os.umask(0o022), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    os.umask(umask)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def fedstream(*arguments: str) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "--nope"], 2, "No such option: --nope"),
        (["run", "--versions", "abc"], 2, "--versions abc: must be a whole number (see"),
        (["compare", "x", "--target", "abc"], 2, "--target abc: must be a number (see"),
        (["journal", "shw"], 2, "Did you mean 'show'? (see fedstream journal -h)"),
        (["journal", "show"], 2, "Missing argument 'DIR' (see fedstream journal show -h)"),
        (["run", "--set", "run.versionz=3"], 2, "did you mean run.versions?"),
        (["run", "--versions", "0"], 2, "run.versions = 0 (from --versions): must be greater"),
        (
            ["run", "--strategy", "fedprox", "--set", "strategy.name=fedavg"],
            2,
            'strategy.name = "fedprox" (from --strategy): must be one of fedasync, fedavg, fedbuff',
        ),
        (["status", "--run", "a b"], 2, "--run: 'a b' is not a valid name"),
        (["run", "--task", "\udce9"], 2, "--task: not valid UTF-8"),
        (["run", "--resume"], 2, "--resume needs --out DIR"),
        (["replay", ".", "--redis", NOWHERE, "--out", "x"], 2, "to live services: leave out --out"),
        (
            ["run", "--strategy", "fedavg", "--set", "scheduler.policy.kind=in_flight"],
            2,
            "strategy.name = 'fedavg' needs scheduler.policy.kind = 'rounds'",
        ),
        (["run", "--set", "scheduler.policy.kind=none"], 2, "also set trainer.anarchic"),
        (["run", "--task", "cifar"], 2, "did you mean 'cifar10-afl'?"),
        (["run", "--task", "not_there.py:task"], 2, "there is no file"),
        (["run", "--task", "mnist", "--data-root", "/not/there"], 1, "/not/there/MNIST/raw"),
        (["run", "--config", "/not/there.toml"], 2, "/not/there.toml: cannot be read"),
        (
            ["run", "--out", "/dev/null/out"],
            2,
            "--out /dev/null/out: Not a directory",
        ),
        (
            ["run", "--set", "http.host=nowhere.invalid"],
            2,
            "'nowhere.invalid': no such host",
        ),
        (["updater", "--set", "updater.keep_versions=0"], 2, "updater.keep_versions = 0"),
        (["status", "--redis", NOWHERE], 1, "127.0.0.1:1 does not answer"),
        (["purge", "--yes", "--redis", NOWHERE], 1, "127.0.0.1:1 does not answer"),
    ],
)
def test_error_is_one_line_with_its_exit_code(
    arguments: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSTREAM_DATA", raising=False)
    assert fedstream(*arguments) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.startswith("fedstream: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.process
def test_closed_pipe_ends_a_command_without_a_word(python: Path) -> None:
    """As `head` does once it has read enough."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [python, "-m", "fedstream", "plugins"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_updates_is_a_deprecated_alias_of_versions(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = "fedstream: --updates is deprecated; use --versions\n"
    assert fedstream(command, "--updates", "0") == 2
    said = capsys.readouterr().err
    assert said.startswith(warning + "fedstream: run.versions = 0 (from --updates): must be")
    both = ("--updates", "2", "--versions", "2")
    assert fedstream(command, *both) == 2
    assert "use --versions alone" in capsys.readouterr().err
    shown = {
        name
        for option in typer.main.get_group(application(command)).commands[command].params
        for name in option.opts
        if not option.hidden  # type: ignore[attr-defined]
    }
    assert "--versions" in shown
    assert "--updates" not in shown


@pytest.mark.process
def test_unwritable_stdout_is_not_a_crash() -> None:
    def said(where: str) -> tuple[int, str]:
        command = ["sh", "-c", f"{sys.executable} -m fedstream --version {where}"]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        return ended.returncode, ended.stderr

    assert said("> /dev/full") == (1, "fedstream: No space left on device\n")
    assert said(">&- 2>&-") == (0, "")


def test_missing_run_is_a_one_line_error(
    redis: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(getattr(redis, "url", ""))
    monkeypatch.setattr("typer.confirm", lambda *_, **__: pytest.fail("nothing is there"))
    for command in (
        ["status"],
        ["status", "--json"],
        ["top", "--once"],
        ["purge"],
        ["purge", "--yes"],
        ["purge", "--force"],
        ["dead", "list"],
        ["dead", "retry", "--all"],
        ["dead", "drop", "--all"],
    ):
        arguments = (*command, "--redis", url, "--run", "nobody")
        assert fedstream(*arguments) == 1
        said = capsys.readouterr().err
        assert said.startswith("fedstream: there is no run 'nobody'")
        assert said.count("\n") == 1


def _asking_redis(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and parameters of every command with an option --redis."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _asking_redis(command, (*path, name))
        elif any("--redis" in parameter.opts for parameter in command.params):
            yield (*path, name), command.params


@pytest.mark.process
def test_options_override_the_environment_before_it_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """redis.tls needs a rediss:// URL, which --redis brings; a wrong name gives way to --run."""
    authority(tmp_path, "ca")
    monkeypatch.setenv("FEDSTREAM_REDIS__TLS__CA", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("FEDSTREAM_RUN__NAME", "not valid")
    waiting = {  # would wait for Redis, so something else is wrong
        "run": (1, "no journal"),
        "replay": (1, "no journal"),
    }
    required = {
        "run": ["--resume", "--out", str(tmp_path), "--set", "run.name=demo"],
        "replay": [str(tmp_path)],
        "load": ["--url", "https://127.0.0.1:1", "--devices", "1"],
        "devices quarantine": ["3"],
        "devices release": ["3"],
        "devices invite": ["3"],
        "devices revoke": ["3"],
        "devices admit": ["3"],
        "dead show": ["x"],
    }
    wrong = {}
    for path, parameters in _asking_redis(typer.main.get_group(application())):
        command = " ".join(path)
        options = {option for parameter in parameters for option in parameter.opts}
        name = ["--run", "demo"] if "--run" in options else []
        code = fedstream(
            *path, *required.get(command, ()), "--redis", "rediss://127.0.0.1:1/0", *name
        )
        shown = capsys.readouterr()
        said = shown.err + shown.out
        expected = waiting.get(command, (1, "127.0.0.1:1 does not answer"))
        if code != expected[0] or expected[1] not in said:
            wrong[command] = code, said
    assert wrong == {}
    # what asks no Redis needs no redis.url
    assert fedstream("status", "--url", "http://127.0.0.1:1", "--run", "demo") == 1
    assert "http://127.0.0.1:1" in capsys.readouterr().err
    monkeypatch.delenv("FEDSTREAM_REDIS__TLS__CA")
    assert fedstream("acl", "--run", "demo") == 2
    assert "FEDSTREAM_PASSWORD_COORDINATOR" in capsys.readouterr().err


def test_a_command_is_loaded_alone_and_is_the_same() -> None:
    every = typer.main.get_group(application()).commands
    for name, command in every.items():
        alone = typer.main.get_group(application(name)).commands
        assert list(alone) == [name]
        assert [one.opts for one in alone[name].params] == [one.opts for one in command.params]
    for other in ("rnu", "--help", None):  # a mistake, and what asks for all
        assert list(typer.main.get_group(application(other)).commands) == list(every)


@pytest.mark.process
def test_public_names_are_cheap_to_import() -> None:
    program = (
        "import sys, fedstream.cli.app; print('numpy' in sys.modules);"
        "from fedstream import *; print(Task, by_classes, iid, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(
        "False\n<class 'fedstream.trainer.task.Task'> <function by_classes"
    )
    assert said.stdout.endswith("> False\n")


def test_no_other_name_is_public() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Tusk'"):
        exec("from fedstream import Tusk")  # noqa: S102  (mypy would say so too)


def test_finished_run_with_its_own_redis_points_to_its_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("another run of that name is asked")

    config = tmp_path / "run.toml"
    config.write_text("[run]\nname = 'over-and-gone'\n")
    for command in (["status"], ["top"], ["purge", "--yes"]):
        assert fedstream(*command, "--config", str(config)) == 1
        assert "is over" not in capsys.readouterr().err  # it may yet begin
    (tmp_path / "summary.json").write_text("{}")
    for command in (["status"], ["top"], ["purge", "--yes"], ["dead", "list"], ["trainer"]):
        with monkeypatch.context() as patched:  # whatever is at the default address
            patched.setattr("fedstream.broker.client.Client.pipeline", asked)
            assert fedstream(*command, "--config", str(config)) == 1
        said = capsys.readouterr().err
        assert f"{config} belongs to a run that is over" in said
        assert f"its results are in {tmp_path / 'summary.json'}" in said
        assert said.count("\n") == 1
    named = ("status", "--config", str(config), "--redis", NOWHERE)
    assert fedstream(*named) == 1
    assert "is over" not in capsys.readouterr().err
    config.write_text(config.read_text() + "[redis.sentinel]\nnodes = ['127.0.0.1:1']\n")
    assert fedstream("status", "--config", str(config)) == 1
    assert "is over" not in capsys.readouterr().err


def test_json_has_null_for_nan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    numbers = {"mean_staleness": float("nan"), "losses": [float("inf")]}

    async def read(*_: object) -> dict[str, Any]:
        return numbers

    monkeypatch.setattr(status, "read", read)
    monkeypatch.setattr(run, "run", lambda *_: (0, numbers))
    for command in ("status", "run"):
        assert fedstream(command, "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"mean_staleness": None, "losses": [None]}


def test_undecodable_text_is_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    assert fedstream("--version") == 0
    display.Lines().say("caf\udce9 · done")
    assert shown.getvalue().endswith(b"caf\\udce9 \\xb7 done\n")


def test_version_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedstream("--version") == 0
    assert capsys.readouterr().out == f"fedstream {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("fedstream jou", ["journal"]),
        ("fedstream journal ve", ["verify"]),
        ("fedstream run --strategy afa", ["afa-cd", "afa-cs"]),
        ("fedstream simulate --task cifar", ["cifar10-fedasync", "cifar10-afl"]),
        ("fedstream journal show --outcome re", ["refused"]),
        ("fedstream replay --trust", ["--trust-recorded-code", "--trust-recorded-task"]),
    ],
)
def test_shell_completion(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("_FEDSTREAM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert fedstream() == 0
    assert capsys.readouterr().out.split() == completed


def test_completions_match_the_registries() -> None:
    assert set(options.TASKS) == set(BUILT_IN)
    assert set(options.OUTCOMES) == set(OUTCOMES)
    assert list(options.STRATEGIES) == list(RULES.built_in)


def test_files_written_are_private_to_the_user(tmp_path: Path) -> None:
    """Folders 0700, files 0600: the journal's, and all that lies beside it."""
    out, exported = tmp_path / "out", tmp_path / "model.safetensors"
    for arguments in (
        ["simulate", "--versions", "3", "--devices", "10", "--out", str(out)],
        ["journal", "export", str(out), "--out", str(exported)],
    ):
        assert fedstream(*arguments) == 0
    found = {path: path.stat().st_mode & 0o777 for path in [out, *out.rglob("*"), exported]}
    assert out / "journal" in found
    assert len(found) > 4
    assert found == {path: 0o700 if path.is_dir() else 0o600 for path in found}


# `fedstream plugins`


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that announces a rule, one that is gone, and one by a taken name."""
    (tmp_path / "announced_rules.py").write_text(
        "from fedstream.strategies import Batch\nclass Mine(Batch): pass\n"
    )
    about = tmp_path / "announced_rules-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: announced-rules\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(
        "[fedstream.strategies]\nmine = announced_rules:Mine\ngone = announced_rules:Gone\n"
        "fedbuff = announced_rules:Mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(RULES, "_found", {})
    yield
    sys.modules.pop("announced_rules", None)


@pytest.mark.usefixtures("installed")
def test_each_name_has_its_source_and_what_is_wrong(command: Command) -> None:
    code, out, err = command("plugins")
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert ["strategy.name", "fedasync", "built in"] in rows
    assert ["strategy.name", "mine", "announced-rules 1.5: announced_rules:Mine"] in rows
    assert ["solver.kind", "proximal", "built in"] in rows
    assert code == 1
    assert "strategy.name = gone: strategy 'gone', entry point announced_rules:Gone: imp" in err
    assert "strategy.name = fedbuff: the name of a built-in one" in err
    assert "mine" not in err
    code, out, _ = command("plugins", "--json")
    told = {(one["key"], one["name"], bool(one["problem"])) for one in json.loads(out)}
    assert {("strategy.name", "gone", True), ("strategy.name", "mine", False)} <= told


def test_only_built_in_ones_are_there_without_packages(command: Command) -> None:
    code, out, err = command("plugins")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1 + sum(len(door.built_in) for door in REGISTRIES.values())


def test_no_door_is_left_out() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("fedstream.")]
    doors = {
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, PluginRegistry)
    }
    assert doors == set(REGISTRIES.values())


# `--strategy NAME --help`


class Documented(Batch):
    """All kinds of keys."""

    usual: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Samples of a device,
    as usual."""
    wanted: int
    mode: Literal["a", "b"] = "a"
    limit: Annotated[int, Field(ge=3)] | None = None
    staleness: Staleness = Polynomial()
    told: bool = Field(default=True, description="by its own description")


def test_keys_have_values_defaults_and_what_is_written_below_them() -> None:
    kinds = "table; kind: constant, linear, polynomial, exponential, hinge or your own"
    assert keys_of(Documented, besides=["name"]) == [
        Key("max_staleness", "integer >= 0 or none", "none", "Staler updates are dropped."),
        Key(
            "cancel_stale",
            "true or false",
            "false",
            "Whether a task is given up as soon as its update would be staler.",
        ),
        Key(
            "adapt",
            "table or none",
            "none",
            "How the length of a step is adapted; None: it stays as configured.",
        ),
        Key("server_lr", "number > 0", "1.0", "the step along the batch's mean"),
        Key("server", "table", "sgd", "the optimizer that takes the step"),
        Key(
            "clip",
            "number > 0 or none",
            "none",
            "S, the length to which a longer x_new - x_tau is shortened",
        ),
        Key("buffer_size", "integer >= 1", "10", "K, the updates in a version"),
        Key("usual", "number > 0, <= 2", "1.0", "Samples of a device, as usual."),
        Key("wanted", "integer", "", ""),
        Key("mode", "a, b", '"a"', ""),
        Key("limit", "integer >= 3 or none", "none", ""),
        Key("staleness", kinds, "polynomial", ""),
        Key("told", "true or false", "true", "by its own description"),
    ]


@pytest.mark.parametrize("name", ["run", "simulate", "replay"])
def test_help_ends_with_the_keys_of_the_strategy_that_was_named(
    command: Command, name: str
) -> None:
    rule = f"{__file__}:Documented"
    kind = "strategy.staleness.kind=hinge"
    for typed in (("--strategy", rule, "--set", kind, "--help"), ("--help", f"--strategy={rule}")):
        code, out, _ = command(name, *typed)
        assert code == 0
        ours = out.partition("All kinds of keys.")[2]
        assert "strategy.usual" in ours
        assert "required" in ours
        assert ("strategy.staleness.b" in ours) == (kind in typed)
    assert "strategy.usual" not in command(name, "--help")[1]
    code, _, said = command(name, "--strategy", "fedbuf", "--help")
    assert (code, "did you mean 'fedbuff'?" in said) == (2, True)


@pytest.mark.parametrize("which", ["patience", "target"])
def test_the_starters_comments_are_valid_keys(which: str, tmp_path: Path) -> None:
    assert fedstream("init", str(tmp_path)) == 0
    file = tmp_path / "fedstream.toml"
    lines = [one for one in file.read_text().splitlines() if "stop =" not in one or which in one]
    file.write_text("\n".join(one.removeprefix("# ") if " = " in one else one for one in lines))
    settings = read(file, ["task.name=digits"])
    assert settings.run.stop is not None
    assert settings.evaluator.per_device == "last"
    assert settings.solver.schedule is not None


def test_init_writes_a_starter_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fedstream("init", "new/one") == 0
    assert capsys.readouterr().out.endswith(
        "next: cd new/one; fedstream run --config fedstream.toml\n"
    )
    mine = tmp_path / "new/one/my_task.py"
    mine.write_text("mine")
    assert fedstream("init", "new/one") == 2
    assert (
        capsys.readouterr().err
        == "fedstream: new/one/my_task.py exists already: name another folder\n"
    )
    assert mine.read_text() == "mine"
    assert fedstream("init", "new/one/my_task.py/inside") == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
