"""The services of a run as programs."""

from __future__ import annotations

from pathlib import Path

from fedstream.local.supervisor import environment, programs
from fedstream.settings.config import Settings


def test_services_inherit_no_override_twice() -> None:
    environ = {
        "PATH": "/bin",
        "FEDSTREAM_DATA": "/data",
        "FEDSTREAM_RUN__VERSIONS": "7",
        "FEDSTREAM_CONFIG": "other.toml",
        "FEDSTREAM_NAME": "me",
    }
    assert environment(environ, Settings(), "redis://h:1/0") == {
        "PATH": "/bin",
        "FEDSTREAM_DATA": "/data",
        "FEDSTREAM_REDIS__URL": "redis://h:1/0",
    }


def test_every_service_is_started_and_the_coordinator_gets_its_port() -> None:
    services = {one.name: one for one in programs(Settings(), 2, Path("run.toml"), 8080)}
    assert sorted(services) == [
        "coordinator",
        "evaluator",
        "scheduler",
        "trainer-1",
        "trainer-2",
        "updater",
    ]
    assert "http.port=8080" in services["coordinator"].arguments
    assert services["trainer-2"].role == "trainer"
    assert services["trainer-2"].arguments[:4] == ("--name", "trainer-2", "--config", "run.toml")
    assert services["trainer-2"].drain_s == Settings().trainer.drain_s
