"""A recording made by a strategy or a staleness function of its user's."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedstream
from fedstream.core.errors import ConfigError
from fedstream.journal import RuleChanged, Segment, opened
from fedstream.journal.rebuild import rule_of
from fedstream.journal.replay import Replayer
from fedstream.runtime.config import dump, load
from fedstream.runtime.plugins import NotTrusted, allowing
from fedstream.settings.config import Settings, read
from fedstream.settings.recording import resumable
from fedstream.settings.start import first_model
from fedstream.strategies import FUNCTIONS, RULES, sources_of
from tests.fedstream.conftest import Command
from tests.fedstream.history.scribes import Digits, written
from tests.journals import Scribe

PROGRAM = '''
from pathlib import Path
from typing import Annotated
from pydantic import Field
from fedstream.strategies import Batch

Path(__file__ + ".ran").touch()

class BySamples(Batch):
    """A batch in which an update counts by its device's samples."""

    usual: Annotated[float, Field(gt=0)] = 100.0
    """Samples of a device whose updates have weight 1."""

    def weigh(self, version: int, tau: int, samples: int) -> float:
        return samples / self.usual

def late(d: int, a: float = 1.0) -> float:
    return 1.0 / (1.0 + a * d)
'''


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's file; afterwards it is forgotten, as in another process."""
    path, file = list(sys.path), tmp_path / "recorded_rules.py"
    file.write_text(PROGRAM)
    yield file
    sys.path[:] = path
    forget(file)


def forget(file: Path) -> None:
    """The next process knows nothing of this one's modules."""
    sys.modules.pop(file.stem, None)
    Path(f"{file}.ran").unlink(missing_ok=True)
    for door in (RULES, FUNCTIONS):
        for name in [name for name in door._found if file.stem in name]:
            del door._found[name]


@pytest.fixture
def recording(program: Path, tmp_path: Path) -> Path:
    """A journal by both of the file's rules, one after the other, which nobody has loaded yet."""
    folder = tmp_path / "run" / "journal"
    rule = read(None, [f"strategy.name={program}:BySamples", "strategy.buffer_size=2"]).rule
    scribe = Scribe(folder, rule, sources=sources_of(rule))
    for late in range(6):
        scribe.update(late=late % 2)
    scribe.close()
    forget(program)
    return folder.parent


def digest(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()


def test_head_records_names_and_sources(recording: Path, program: Path) -> None:
    with opened(recording) as chain:
        head = chain[-1].head
    assert head.strategy == {
        "name": f"{program}:BySamples",
        "max_staleness": None,
        "buffer_size": 2,
        "server_lr": 1.0,
        "usual": 100.0,
    }
    assert head.sources == {"name": digest(program)}
    kind = f"strategy.staleness.kind={program}:late"
    assert sources_of(read(None, [kind]).rule) == {"staleness.kind": digest(program)}
    assert sources_of(Settings().rule) == {}


COMMANDS = [
    ("replay", "{}"),
    ("replay", "{}", "--strategy", "fedbuff", "--evaluate-every", 0),
    ("journal", "verify", "{}"),
    ("journal", "show", "{}", "--norms"),
    ("journal", "stats", "{}"),
    ("journal", "export", "{}", "--out", "{}/model.safetensors"),
]


def given(arguments: tuple[object, ...], folder: Path) -> list[str]:
    return [str(one).format(folder) for one in arguments]


def test_no_command_runs_the_rule_that_only_a_recording_names(
    command: Command, recording: Path, program: Path
) -> None:
    for arguments in COMMANDS:
        code, _, said = command(*given(arguments, recording))
        assert code == 2, arguments
        assert "recorded_rules.py:BySamples' runs its code: give --trust-recorded-code" in said
        assert said.count("\n") == 1
    for harmless in (("journal", "show", recording), ("journal", "diff", recording, recording)):
        assert command(*harmless)[0] == 0
    assert not Path(f"{program}.ran").exists()


@pytest.mark.parametrize("arguments", COMMANDS)
def test_trusted_recording_is_read_by_its_rule(
    command: Command, recording: Path, program: Path, arguments: tuple[object, ...]
) -> None:
    code, _, said = command(*given(arguments, recording), "--trust-recorded-code")
    assert (code, said) == (0, "")
    assert Path(f"{program}.ran").exists()


def test_naming_the_rule_oneself_is_trust(command: Command, recording: Path, program: Path) -> None:
    code, out, said = command(
        "replay", recording, "--strategy", f"{program}:BySamples", "--evaluate-every", 0
    )
    assert (code, said) == (0, "")
    assert "distance 0 from the original" in out


def test_own_rule_is_a_what_if_of_any_recording(
    command: Command, program: Path, tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path / "plain")
    for _ in range(4):
        scribe.update()
    scribe.close()
    options = ("--set", f"strategy.staleness.kind={program}:late", "--evaluate-every", 0)
    code, out, said = command("replay", tmp_path / "plain", *options)
    assert (code, said) == (0, "")
    assert "distance 0 from the original" in out  # no update was stale
    wrong = ("--set", f"strategy.staleness.kind={program}:lat", "--evaluate-every", 0)
    assert "did you mean 'late'?" in command("replay", tmp_path / "plain", *wrong)[2]


def test_changed_source_is_told_and_needs_an_option(
    command: Command, recording: Path, program: Path
) -> None:
    program.write_text(PROGRAM.replace("samples / self.usual", "2 * samples / self.usual"))
    trusted = ("replay", recording, "--trust-recorded-code")
    code, _, said = command(*trusted)
    assert code == 2
    assert "strategy.name: its source has changed since" in said
    assert "--changed-rules" in said
    code, _, said = command(*trusted, "--changed-rules")
    assert code == 1
    assert "is not reproduced" in said  # the recorded weights are used, so the weight differs
    program.write_text(PROGRAM + "# a comment\n")
    forget(program)
    code, out, _ = command(*trusted, "--changed-rules")
    assert (code, "3 of 3 versions identical" in out) == (0, True)


def test_replayer_asks_for_the_same_consent(recording: Path, program: Path) -> None:
    with Replayer(recording / "journal") as replayer, pytest.raises(NotTrusted):
        list(replayer)
    program.write_text(PROGRAM + "\n")
    with allowing(recorded=True), Replayer(recording / "journal") as replayer:
        with pytest.raises(RuleChanged):
            list(replayer)
        with allowing(changed=True):
            assert len(list(replayer)) == 6


def test_resuming_with_a_changed_source_is_asked_for(recording: Path, program: Path) -> None:
    settings = read(None, [f"strategy.name={program}:BySamples"])
    assert resumable(recording, settings, None) is False
    forget(program)
    program.write_text(PROGRAM + "\n")
    settings = read(None, [f"strategy.name={program}:BySamples"])
    with pytest.raises(RuleChanged, match="--changed-rules"):
        resumable(recording, settings, None)
    asked: list[str] = []
    assert resumable(recording, settings, asked.append) is True
    assert "Resume with the changed source?" in asked[0]


def test_recording_whose_file_is_gone_says_so(recording: Path, program: Path) -> None:
    shutil.move(program, program.with_suffix(".old"))
    [segment] = (recording / "journal").glob("*.journal")
    opened_segment = Segment(segment)
    with allowing(recorded=True), pytest.raises(Exception, match=r"there is no file .*rules\.py"):
        rule_of(opened_segment)
    opened_segment.close()


def test_run_toml_of_a_stranger_runs_nothing_and_ones_own_means_the_same_anywhere(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.parent)
    sets = ["strategy.name=recorded_rules.py:BySamples", "strategy.usual=7"]
    text = dump(read(None, sets).with_absolute_paths())
    assert f'name = "{program}:BySamples"' in text
    forget(program)
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(
        NotTrusted, match=r"run.toml names the strategy '.*choose strategy.name yourself"
    ):
        load(Settings, path=file, environ={}, trusted=False)
    assert not Path(f"{program}.ran").exists()
    assert load(Settings, path=file, environ={}).strategy.model_dump()["usual"] == 7.0
    own = load(Settings, path=file, environ={}, sets=["strategy.name=fedbuff"], trusted=False)
    assert own.strategy.name == "fedbuff"


def test_report_measures_an_own_rules_models_only_if_it_is_trusted(
    command: Command, program: Path, tmp_path: Path
) -> None:
    rule = read(None, [f"strategy.name={program}:BySamples", "strategy.buffer_size=1"]).rule
    digits = Digits(tmp_path / "run" / "journal", strategy=rule, sources=sources_of(rule))
    digits.learns(0)
    digits.close()
    forget(program)
    code, out, said = command("report", tmp_path / "run")
    assert (code, "not measured: " in said, "--trust-recorded-code" in said) == (0, True, True)
    assert "accuracy   not measured" in out
    assert not Path(f"{program}.ran").exists()
    code, out, said = command("report", tmp_path / "run", "--trust-recorded-code")
    assert (code, said) == (0, "")
    assert "at version 1" in out


def test_recorded_folder_of_an_app_is_not_searched_for_modules(
    command: Command, tmp_path: Path
) -> None:
    written(tmp_path / "run" / "journal", (1, 1.0))
    text = f'[task]\nname = "digits"\nargs = {{app_dir = "{tmp_path}"}}\n'
    (tmp_path / "run" / "run.toml").write_text(text)
    code, _, said = command("report", tmp_path / "run")
    assert (code, "task.args.app_dir has no effect on the built-in task" in said) == (0, True)
    assert str(tmp_path) not in sys.path


def test_python_may_trust_a_recording_like_the_commands(recording: Path, program: Path) -> None:
    with pytest.raises(NotTrusted, match="--trust-recorded-code"):
        fedstream.open(recording).model()
    assert not Path(f"{program}.ran").exists()
    run = fedstream.open(recording, trust_recorded_code=True)
    replayer = run.replayer()
    with replayer:
        assert [moment.version for moment in replayer][-1] == 3
    assert set(run.model()) == set(run.x_tau(5)) == set(run.delta(5))
    forget(program)
    program.write_text(PROGRAM + "# changed\n")
    with pytest.raises(RuleChanged):
        run.model()
    changed = fedstream.open(recording, trust_recorded_code=True, changed_rules=True)
    with changed.replayer() as replayer:
        assert [moment.version for moment in replayer][-1] == 3
    assert changed.model().keys() == changed.delta(5).keys()


def test_fork_of_an_own_rules_run_takes_its_exported_model(
    command: Command, program: Path, tmp_path: Path
) -> None:
    rule = read(None, [f"strategy.name={program}:BySamples", "strategy.buffer_size=1"]).rule
    digits = Digits(tmp_path / "run" / "journal", strategy=rule, sources=sources_of(rule))
    digits.learns(0)
    digits.learns(1)
    digits.close()
    forget(program)
    with pytest.raises(ConfigError, match=r"export .*/run --version 1 --out FILE.safetensors --tr"):
        first_model(digits.task, 0, f"{tmp_path / 'run'}@1")
    assert not Path(f"{program}.ran").exists()
    file = tmp_path / "one.safetensors"
    export = ("export", tmp_path / "run", "--version", 1, "--out", file, "--trust-recorded-code")
    assert command("journal", *export)[0] == 0
    model, _ = first_model(digits.task, 0, str(file))
    assert model.digest() == digits.digests[1]
