"""run.toml: what a run leaves in it, and what later commands make of it."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
import tomli_w

from fedstream.local.request import RunRequest
from fedstream.local.supervisor import environment
from fedstream.runtime.config import load
from fedstream.settings import run_toml
from fedstream.settings.config import Settings, read
from fedstream.settings.recording import CONFIG

OWN = "unix://:secret@/tmp/fedstream-redis-0/redis.sock"  # as a run that is killed leaves it


@pytest.mark.parametrize("secret", ["geheim", "12345", '"quoted"', "a'b\\c\"d", "{a=1}"])
def test_password_is_passed_by_environment_and_never_written(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "given.toml"
    sentinel = {"nodes": ["127.0.0.1:1"], "password": f"{secret}-2"}
    file.write_text(tomli_w.dumps({"redis": {"password": secret, "sentinel": sentinel}}))
    given = read(file)
    assert not RunRequest(given, tmp_path).own_redis
    run_toml.write(given, tmp_path, given.redis.url, private=False)
    written = tmp_path / CONFIG
    assert secret not in written.read_text()
    environ = environment({}, given, given.redis.url)
    settings = load(Settings, path=written, environ=environ)
    assert settings.redis == given.redis
    assert secret not in repr(settings)


def test_configuration_file_is_private(asked: RunRequest) -> None:
    asked.out.mkdir()
    file = asked.out / "run.toml"
    file.write_text("left by an earlier run")
    file.chmod(0o644)
    with file.open() as earlier:  # whoever has the old file open reads the old file
        run_toml.write(asked.settings, asked.out, "redis://:secret@127.0.0.1:1/0", private=False)
        assert earlier.read() == "left by an earlier run"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read(file).redis.url == "redis://:secret@127.0.0.1:1/0"


def test_written_configuration_names_no_redis_that_is_gone(asked: RunRequest) -> None:
    asked.out.mkdir()
    run_toml.write(asked.settings, asked.out, None, private=True)
    left = read(asked.out / "run.toml")
    assert "url" not in left.redis.model_fields_set
    json_logs = asked.settings.log.model_copy(update={"format": "json"})
    assert left == asked.settings.model_copy(update={"log": json_logs})


def test_configuration_is_written_atomically(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.out.mkdir()
    run_toml.write(asked.settings, asked.out, None, private=True)
    before = (asked.out / CONFIG).read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        run_toml.write(asked.settings, asked.out, OWN, private=True)
    assert [path.name for path in asked.out.iterdir()] == [CONFIG]
    assert (asked.out / CONFIG).read_text() == before


def test_own_redis_that_is_gone_is_not_contacted(tmp_path: Path) -> None:
    run_toml.write(Settings(), tmp_path, OWN, private=True)  # as a run that is killed leaves it
    file = tmp_path / CONFIG
    settings = read(file)
    assert settings.redis.url == OWN  # for those who look at the run
    assert RunRequest(run_toml.without_private_redis(settings, file), tmp_path).own_redis
    named = read(file, ["redis.url=redis://127.0.0.1:8/0"])
    assert run_toml.without_private_redis(named, file) is named
    assert run_toml.without_private_redis(named, None) is named


def test_joining_trainer_exits_with_the_run_or_its_redis(tmp_path: Path) -> None:
    run_toml.write(Settings(), tmp_path, OWN, private=True)
    file = tmp_path / CONFIG
    assert (read(file).trainer.redis_away_s, read(file).trainer.ends_with_run) == (None, None)
    joined = run_toml.for_joining_trainer(read(file), file).trainer
    assert (joined.redis_away_s, joined.ends_with_run) == (30.0, True)
    patient = read(file, ["trainer.redis_away_s=600", "trainer.ends_with_run=false"])
    assert run_toml.for_joining_trainer(patient, file) == patient
    served = read(file, ["redis.url=redis://127.0.0.1:8/0"])  # which outlives the run
    assert run_toml.for_joining_trainer(served, file) is served
