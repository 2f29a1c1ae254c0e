"""Command-line options, paths and wire formats in the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from fedstream.core.errors import ConfigError
from fedstream.runtime.config import dump
from fedstream.settings.config import Settings, options, read


def test_options_are_configuration_keys() -> None:
    given = options(versions=60, task="a.py:t", redis=None, data_root="007")
    settings = read(None, ["task.devices=4", "run.versions=2"], given)
    assert (settings.run.versions, settings.task.name) == (60, "a.py:t")
    assert (settings.task.devices, settings.task.data_root) == (4, "007")
    assert not settings.redis.is_named


# Every key that holds text: paths, with a relative one, ...
PATHS = {
    "run.start": "runs@5",
    "task.name": "mine.py:task",
    "task.data_root": "data",
    "task.args.app_dir": "app",
    "redis.password_file": "file",
    "redis.tls.ca": "file",
    "redis.tls.cert": "file",
    "redis.tls.key": "file",
    "redis.sentinel.password_file": "file",
    "http.token_file": "file",
    "http.certificates": '["file"]',
    "gateway.tls_cert": "file",
    "gateway.tls_key": "file",
    "gateway.client_ca": "file",
    "gateway.flower_app": "file",
    "gateway.flower_keys": "file",
    "trainer.local_dir": "file",
    "helper.policy": "file",
    "helper.roster": "file",
    "helper.key": "file",
    "helper.store": "file",
    "helper.tls_cert": "file",
    "helper.tls_key": "file",
    "helper.client_ca": "file",
    "private.policy": "file",
    "private.keys": "file",
    "private.ca": "file",
    "private.tls_cert": "file",
    "private.tls_key": "file",
}
# ... those whose commands put them into the run's folder, or which tests of their own resolve, ...
PLACED = {
    "journal.dir",
    "sinks.kind",
    "solver.kind",
    "solver.schedule.kind",
    "solvers.kind",
    "task.partition.kind",
    "scheduler.policy.kind",
    "gateway.attestation.kind",
}
# ... and other texts.
TEXTS = {
    "run.name",
    "run.stop.metric",
    "redis.url",
    "redis.username",
    "redis.sentinel.nodes",
    "redis.sentinel.master",
    "redis.sentinel.username",
    "http.host",
    "http.hosts",
    "page.operator_username",
    "tracing.endpoint",
    "strategy.name",
    "strategy.adapt.metric",
    "coordinator.sites",
    "coordinator.trusted_sites",
    "gateway.site",
    "gateway.names",
    "helper.owner",
    "private.owner",
    "private.helper",
    "private.terms.image",
    "trainer.site",
    "wire.update",
    "wire.model",
    "solver.groups.parameters",
    "solver.lr_scheduler.kind",
}


def types_in(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from types_in(part)


def keys_of_texts(table: type[BaseModel], at: str = "") -> Iterator[str]:
    """The keys of a table, and of those in it, that hold text."""
    for name, field in table.model_fields.items():
        found = set(types_in(field.annotation))
        tables = [one for one in found if issubclass(one, BaseModel)]
        for one in tables:
            yield from keys_of_texts(one, f"{at}{name}.")
        if str in found and not tables:
            yield f"{at}{name}"


def test_every_path_is_the_same_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services read some again and again, wherever they were started."""
    known = {*PATHS, *PLACED, *TEXTS, "task.args"} - {"task.args.app_dir"}
    assert set(keys_of_texts(Settings)) == known, "is it a path? then with_absolute_paths has it"
    monkeypatch.chdir(tmp_path)
    sets = ["redis.url=rediss://h", 'redis.sentinel.nodes=["h:1"]']
    others = ("gateway.flower", ("gateway.client_ca", "private."))  # which exclude each other
    for other in others:
        given = {key: value for key, value in PATHS.items() if not key.startswith(other)}
        owner = [f"private.owner={'0' * 64}"] * ("private.policy" in given)
        settings = read(None, [*sets, *owner, *(f"{key}={value}" for key, value in given.items())])
        found = settings.with_absolute_paths()
        assert found.with_absolute_paths() == found
        for key, value in given.items():
            held: object = found
            for part in key.split("."):
                held = held[part] if isinstance(held, dict) else getattr(held, part)
            expected = f"{tmp_path}/{value}" if value[0] != "[" else (f"{tmp_path}/file",)
            assert held == expected, key
    assert dump(Settings().with_absolute_paths()) == dump(Settings())
    for name in ("digits", "package.module:task"):
        assert read(None, [f"task.name={name}"]).with_absolute_paths().task.name == name


def test_devices_that_trigger_themselves_have_no_rests() -> None:
    own = ["scheduler.policy.kind=none", "trainer.anarchic.rate=1.0"]
    assert read(None, own).scheduler.rest_s == 0.0
    with pytest.raises(ConfigError, match=r"scheduler\.rest_s = 60 with scheduler\.policy\.kind"):
        read(None, [*own, "scheduler.rest_s=60"])


def _error(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(None, sets)
    return str(caught.value)


def test_a_format_is_written_in_one_way() -> None:
    deltas = "strategy.name=fedbuff"
    wire = read(None, ["wire.update=topk:0.100", "wire.model=bf16+zstd", deltas]).wire
    assert (wire.update, wire.of_updates.name) == ("topk:0.1", "topk:0.1")
    assert (wire.model, wire.of_models.name) == ("bf16+zstd", "bf16+zstd")
    said = _error("wire.update=topk:2", deltas)
    assert "wire.update" in said
    assert "the share of topk is a decimal number above 0 and at most 1" in said


def test_kind_in_place_of_its_table() -> None:
    said = _error("strategy.name=fedbuff", "strategy.server=adam")
    assert 'must be a table, as in strategy.server.kind = "adam"' in said


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg"])
def test_models_take_no_format_of_changes(strategy: str) -> None:
    sets = f"strategy.name={strategy}"
    said = _error("wire.update=topk:0.1", sets)
    assert f"{strategy} takes models, and topk is too coarse for them; use bf16 or int8" in said
    assert read(None, ["wire.update=int8+zstd", sets]).wire.update == "int8+zstd"
    assert "int4 is too coarse for models: use f32, bf16 or int8" in _error("wire.model=int4")


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ([], False),
        (["strategy.name=basgd"], False),
        (["strategy.name=basgd", "strategy.clip=1"], True),
        (["strategy.name=fedbuff", "strategy.aggregate=median"], True),
        (["strategy.name=aflguard"], True),
    ],
)
def test_quarantine_needs_a_rule_that_names_suspects(sets: list[str], *, names: bool) -> None:
    asked = "updater.quarantine_after=3"
    if names:
        assert read(None, [asked, *sets]).updater.quarantine_after == 3
    else:
        assert "which names no suspects: set strategy.clip" in _error(asked, *sets)


def test_no_quarantine_of_devices_that_the_rule_waits_for() -> None:
    said = _error("updater.quarantine_after=3", "strategy.name=ringleader", "strategy.clip=1")
    assert "'ringleader', which waits for every device: the run would stop" in said
