"""Every key of a run is in one slot of a cluster, and a run's name can be part of a key."""

from __future__ import annotations

import re

import pytest

from fedstream.broker.keys import Keys, check_name
from fedstream.core.errors import ConfigError


def all_keys(keys: Keys) -> list[str]:
    fixed = [value for name, value in vars(keys).items() if name not in ("name", "prefix")]
    return [
        *fixed,
        keys.tasks_of("t"),
        keys.leader("updater"),
        keys.model("1.1"),
        keys.update("a.b"),
    ]


def test_all_keys_of_a_run_share_one_slot() -> None:
    keys = Keys("demo")
    # Redis's rule: what is between the first { and the first } after it.
    tags = {re.sub(r"[^{]*\{([^}]+)\}.*", r"\1", key) for key in all_keys(keys)}
    assert tags == {"demo"}


def test_keys_are_unique() -> None:
    keys = Keys("demo")
    assert len(set(all_keys(keys))) == len(all_keys(keys))
    assert all(key.startswith(keys.prefix) for key in all_keys(keys))


@pytest.mark.parametrize("name", ["demo", "a", "0", "Run-7_b.2", "x" * 63])
def test_good_names(name: str) -> None:
    assert check_name("run.name", name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "a b", "a{b", "a}b", "a:b", "a*", "é", "x" * 64, "a\n", "a/b"]
)
def test_bad_names_are_refused_with_the_key_and_the_rule(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: .*letters, digits"):
        Keys(name)
