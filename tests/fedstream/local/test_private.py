"""`fedstream run --private` before anything starts: policy, strategy, helper and devices."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Tensor
from fedstream.local import private, supervisor
from fedstream.local.private import LocalHelper
from fedstream.local.request import OverHttp, RunRequest
from fedstream.operate.agreement import Agreement, agree
from fedstream.settings.config import Settings, read
from fedstream.strategies.private_sums import PrivateSums

LAYOUT = Layout((Tensor("weight", (50,), "float32", "parameter"),))


def asked(out: Path, *sets: str, **more: Any) -> RunRequest:
    return RunRequest(read(None, sets), out, **more)


def test_fedbuff_is_the_strategy_unless_another_is_named(tmp_path: Path) -> None:
    assert asked(tmp_path, private=True).resolved().settings.strategy.name == "fedbuff"
    named = asked(tmp_path, "strategy.name=fedavg", private=True).resolved()
    assert named.settings.strategy.name == "fedavg"
    assert asked(tmp_path).resolved().settings.strategy.name == "fedasync"


def test_run_gets_a_policy_and_a_helper_that_updater_alone_may_ask(tmp_path: Path) -> None:
    settings = asked(tmp_path, private=True).resolved().settings
    helper = LocalHelper(tmp_path / "private", 4321)
    settings = helper.agreed(settings, LAYOUT, 10)
    assert isinstance(settings.rule, PrivateSums)
    assert settings.private.helper == "http://127.0.0.1:4321"
    program = helper.program(5.0)
    config = tomllib.loads((tmp_path / "private" / "helper.toml").read_text())
    assert config.keys() == {"helper", "http"}, "it reads nothing of the run's"
    assert "http.port=4321" in program.arguments
    assert not [one for one in program.arguments if helper.token in one], "which ps would show"
    environ = supervisor.environment({}, settings, "unix:///redis.sock")
    assert environ["FEDSTREAM_PRIVATE__TOKEN"] == f'"{helper.token}"'
    assert program.environment["FEDSTREAM_HTTP__TOKEN"] == f'"{helper.token}"'
    assert program.role in supervisor.STOP_ORDER


def test_resumed_run_keeps_policy_and_store_also_in_a_moved_folder(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    first = agree(folder / "private", read(None, ["strategy.name=fedbuff"]), LAYOUT, 10)
    folder.rename(moved)
    again = asked(moved, "strategy.name=fedbuff", resume=True)
    assert again.has_helper
    settings = again.resolved().settings
    assert settings.private.policy == str(moved / "private" / "policy.json")
    agreed = LocalHelper(moved / "private", 1).agreed(settings, LAYOUT, 10)
    assert agreed.private.read() == first.policy
    helper = tomllib.loads((moved / "private" / "helper.toml").read_text())["helper"]
    assert helper["store"] == str(moved / "private" / "helper.sqlite")
    assert Agreement.read(moved / "private").policy == first.policy
    assert not asked(tmp_path, resume=True).has_helper


def test_run_that_was_not_private_cannot_become_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--private: the run in .* is not private"):
        asked(tmp_path, private=True, resume=True).resolved()


@pytest.mark.parametrize("key", ["terms.sigma", "buckets"])
def test_terms_of_a_run_that_is_not_private_are_refused(key: str, tmp_path: Path) -> None:
    """A user who asks for noise must not get a run without."""
    wanted = f"private.{key}=3"
    with pytest.raises(ConfigError, match=r"^private\.\w+ is set, but the run is not private"):
        asked(tmp_path, wanted).resolved()
    asked(tmp_path, wanted, private=True).resolved()


def test_policy_is_either_made_or_named(tmp_path: Path) -> None:
    made = agree(tmp_path / "there", read(None, ["strategy.name=fedbuff"]), LAYOUT, 10)
    named = [f"private.policy={tmp_path}/there/policy.json", f"private.owner={made.owner}"]
    with pytest.raises(ConfigError, match=r"^--private makes a policy, and private\.policy"):
        asked(tmp_path, *named, private=True).resolved()


def test_device_over_https_has_its_key_of_the_roster_and_the_policy(tmp_path: Path) -> None:
    settings = read(None, ["strategy.name=fedbuff"])
    over_http = OverHttp(3, tmp_path / "devices", 1)
    assert over_http.identity(2, settings.private) == (
        "--key",
        str(tmp_path / "devices" / "device-2.pem"),
    )
    made = agree(tmp_path / "private", settings, LAYOUT, 10)
    given = over_http.identity(2, made.of_run(settings.private))
    options = dict(zip(given[::2], given[1::2], strict=True))
    assert options == {
        "--key": str(tmp_path / "private" / "keys" / "2.pem"),
        "--dir": str(tmp_path / "devices" / "device-2.state"),
        "--policy": str(tmp_path / "private" / "policy.json"),
        "--policy-owner": made.owner,
    }


def test_summary_states_the_policy_and_what_it_guarantees(tmp_path: Path) -> None:
    assert private.facts(Settings()) is None
    assert private.described(Settings()) == {}
    sets = ["strategy.name=fedbuff", "private.terms.sigma=4", "private.terms.participations=10"]
    settings = LocalHelper(tmp_path, 1).agreed(read(None, sets), LAYOUT, 10)
    found = private.facts(settings)
    assert found is not None
    assert found["epsilon"] == pytest.approx(3.617, abs=0.001)
    assert found["policy"] == Agreement.read(tmp_path).policy.digest
    assert found["policy"][:12] in private.described(settings)["privacy"]
