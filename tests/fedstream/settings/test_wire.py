"""Which wire formats a configuration may name."""

from __future__ import annotations

import pytest

from fedstream.core.errors import ConfigError
from fedstream.settings.config import read

_DELTAS = "strategy.name=fedbuff"


def _error(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(None, sets)
    return str(caught.value)


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4", "topk:0.1", "topk:1", "int8+zstd"])
def test_every_format_by_its_name(name: str) -> None:
    wire = read(None, [f"wire.update={name}", _DELTAS]).wire
    assert (wire.update, wire.of_updates.name) == (name, name)
    assert (wire.model, wire.of_models.is_plain) == ("f32", True)


def test_a_share_is_written_in_one_way() -> None:
    assert read(None, ["wire.update=topk:0.100", _DELTAS]).wire.update == "topk:0.1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("topk", "topk needs the share of values it keeps, as in topk:0.1"),
        ("topk+zstd", "topk needs the share of values it keeps, as in topk:0.1"),
        ("topk:2", "the share of topk is a decimal number above 0 and at most 1"),
        ("topk:0.0", "the share of topk is a decimal number above 0 and at most 1"),
        ("fp8", "expected one of f32, bf16, int8, int4, topk:SHARE, or one of them with +zstd"),
    ],
)
def test_unknown_formats_are_explained(name: str, text: str) -> None:
    said = _error(f"wire.update={name}", _DELTAS)
    assert "wire.update" in said
    assert text in said


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg"])
@pytest.mark.parametrize("name", ["int4", "topk:0.1"])
def test_models_take_no_format_of_changes(strategy: str, name: str) -> None:
    said = _error(f"wire.update={name}", f"strategy.name={strategy}")
    kind = name.partition(":")[0]
    assert f"{strategy} takes models, and {kind} is too coarse for them; use bf16 or int8" in said
    for fine in ("f32", "bf16", "int8+zstd"):
        assert read(None, [f"wire.update={fine}", f"strategy.name={strategy}"]).wire.update == fine


def test_versions_take_no_format_of_changes() -> None:
    assert "int4 is too coarse for models: use f32, bf16 or int8" in _error("wire.model=int4")
    assert read(None, ["wire.model=bf16+zstd"]).wire.of_models.name == "bf16+zstd"
