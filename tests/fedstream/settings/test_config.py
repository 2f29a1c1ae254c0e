"""Command-line options and paths in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.broker.errors import ConfigError
from fedstream.settings.config import options, read


def test_options_are_configuration_keys() -> None:
    given = options(versions=60, task="a.py:t", redis=None, data_root="007")
    settings = read(None, ["task.devices=4", "run.versions=2"], given)
    assert (settings.run.versions, settings.task.name) == (60, "a.py:t")
    assert (settings.task.devices, settings.task.data_root) == (4, "007")
    assert not settings.redis.is_named


def test_relative_paths_resolve_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = read(None, ["task.name=mine.py:task", "task.data_root=data"])
    task = settings.with_absolute_paths().task
    assert (task.name, task.data_root) == (f"{tmp_path}/mine.py:task", f"{tmp_path}/data")
    for name in ("digits", "package.module:task"):
        assert read(None, [f"task.name={name}"]).with_absolute_paths().task.name == name


def test_files_are_named_by_absolute_paths() -> None:
    """Those that a service reads again and again, wherever it was started."""
    keys = (
        "redis.password_file", "redis.tls.ca", "redis.sentinel.password_file", "http.token_file",
        "gateway.client_ca",
    )  # fmt: skip
    sets = ["redis.url=rediss://h", 'redis.sentinel.nodes=["h:1"]', "gateway.tls_cert=a"]
    sets += ["gateway.tls_key=b", *(f"{key}=file" for key in keys)]
    found = read(None, sets).with_absolute_paths()
    for key in keys:
        table: object = found
        for part in key.split("."):
            table = getattr(table, part)
        assert table == str(Path("file").absolute()), key


def test_devices_that_trigger_themselves_have_no_rests() -> None:
    own = ["scheduler.policy.kind=none", "trainer.anarchic.rate=1.0"]
    assert read(None, own).scheduler.rest_s == 0.0
    with pytest.raises(ConfigError, match=r"scheduler\.rest_s = 60 with scheduler\.policy\.kind"):
        read(None, [*own, "scheduler.rest_s=60"])
