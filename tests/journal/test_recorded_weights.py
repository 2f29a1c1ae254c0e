"""A journal's weights are what was: another machine's C library may end in another bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstream.history.journal_text import verdict
from fedstream.journal import Diverged, segments
from fedstream.journal.inspection import verify
from fedstream.journal.rebuild import recovered
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAsyncSettings, FedBuffSettings, Strategy
from fedstream.strategies.staleness import Exponential, Polynomial
from tests.journals import Scribe

RULES: tuple[Strategy, ...] = (
    FedAsyncSettings(staleness=Exponential(a=0.3)),
    FedAsyncSettings(staleness=Polynomial(a=0.5)),
    FedBuffSettings(buffer_size=2, staleness=Polynomial(a=0.5)),
)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, str]]:
    """Writes a journal on a machine whose C library gives other weights: its digests."""

    def written(rule: Strategy, other: Callable[[float], float]) -> dict[int, str]:
        scribe = Scribe(tmp_path, rule)
        with monkeypatch.context() as elsewhere:
            for function in (Exponential, Polynomial):
                here = function.__call__
                elsewhere.setattr(function, "__call__", lambda self, d, f=here: other(f(self, d)))
            for n in range(8):
                scribe.update(late=n % 4)
            scribe.close()
        return scribe.digests

    return written


def some_bits_more(weight: float) -> float:
    return weight + 3 * math.ulp(weight)


def a_hair_more(weight: float) -> float:
    """As far as float32 tells it: a model mixed with it is another."""
    return weight * (1 + 3e-7)


@pytest.mark.parametrize("rule", RULES, ids=["exponential", "polynomial", "fedbuff"])
def test_journal_from_another_machine_gives_the_same_bits(
    rule: Strategy, written: Callable[..., dict[int, str]], tmp_path: Path
) -> None:
    digests = written(rule, some_bits_more)
    [segment] = segments(tmp_path)
    found = recovered(segment)
    assert (found.version, found.digest) == max(digests.items())
    assert found.reweighed == 8
    segment.close()
    with Replayer(tmp_path) as replayer:
        made = {m.version: m.message.digest for m in replayer if m.identical}
    assert made == {version: digest for version, digest in digests.items() if version}


def test_recorded_weight_is_the_one_used(
    written: Callable[..., dict[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another float32 comes of it, as a bit of a float64 does at the right place."""
    monkeypatch.setattr("fedstream.journal.rebuild._WEIGHTS", 1e-3)
    digests = written(RULES[0], a_hair_more)
    [segment] = segments(tmp_path)
    assert recovered(segment).digest == digests[8]
    segment.close()


def test_verify_warns_about_differing_weights(
    written: Callable[..., dict[int, str]], tmp_path: Path
) -> None:
    written(RULES[0], some_bits_more)
    [found] = verify(segments(tmp_path))
    assert found.damage is None
    assert found.reweighed == 8
    assert "warning: 8 recorded weights differ from this machine's in their last bits" in verdict(
        found
    )


@pytest.mark.parametrize("rule", RULES, ids=["exponential", "polynomial", "fedbuff"])
def test_implausible_weight_is_an_error(
    rule: Strategy, written: Callable[..., dict[int, str]], tmp_path: Path
) -> None:
    written(rule, a_hair_more)
    [found] = verify(segments(tmp_path))
    assert found.damage is not None
    assert "the journal says weight" in found.damage
    [segment] = segments(tmp_path)
    with pytest.raises(Diverged, match="the journal says weight"):
        recovered(segment)


def test_same_machine_gives_no_warning(
    written: Callable[..., dict[int, str]], tmp_path: Path
) -> None:
    written(RULES[0], float)
    [found] = verify(segments(tmp_path))
    assert found.reweighed == 0
    assert "warning" not in verdict(found)
