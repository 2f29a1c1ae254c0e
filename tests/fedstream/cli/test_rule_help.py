"""`--strategy NAME --help` shows what can be set."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedstream.runtime.settings_keys import Key, keys_of
from fedstream.strategies import Batch
from fedstream.strategies.staleness import Polynomial, Staleness
from tests.fedstream.conftest import Command


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
        Key(
            "max_staleness", "integer >= 0 or none", "none", "Updates that are staler are dropped."
        ),
        Key("buffer_size", "integer >= 1", "10", "K, the updates in a version"),
        Key("server_lr", "number > 0", "1.0", "the step along the batch's mean"),
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
