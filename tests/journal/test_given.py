"""What the journal says of versions as devices were given them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.core.formats import format_of
from fedstream.core.given import given
from fedstream.core.layout import Model
from fedstream.journal import Diverged, JournalDamaged, Taken
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAsyncSettings, FedAvgSettings, FedBuffSettings, Strategy
from tests.journals import Scribe

FORMATS = ("bf16", "int8", "int8+zstd")


def replayed(folder: Path) -> int:
    """How many versions are identical."""
    with Replayer(folder) as replayer:
        return sum(moment.identical is True for moment in replayer)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "rule", [FedAsyncSettings(), FedAvgSettings(clients_per_round=2), FedBuffSettings()]
)
def test_journal_says_what_devices_were_given(folder: Path, rule: Strategy, name: str) -> None:
    scribe = Scribe(folder, rule, format=name)
    while scribe.version < 6:
        scribe.update(late=0 if rule.name == "fedavg" else scribe.version // 2)
        if scribe.records == 3:
            scribe.segment()
    scribe.close()
    assert len(scribe.given) == 6
    assert not set(scribe.given.values()) & set(scribe.digests.values())
    assert replayed(folder) == 6
    x: dict[int, Model] = {}
    with Replayer(folder, bases=True) as replayer:
        for moment in replayer:
            message, state = moment.message, moment.step.after.state
            assert isinstance(message, Taken)
            tau = message.upload.tau
            if tau:  # version 0 is in no record
                assert message.upload.base == scribe.given[tau]
                assert moment.base is not None
                assert moment.base.floats.tolist() == x[tau].floats.tolist()
            if message.digest is not None:
                how = format_of(name)
                one = given(
                    state.model,
                    how,
                    version=state.version,
                    sends=rule.build().sends,
                    digests="sha256",
                )
                x[state.version] = Model(state.model.layout)
                how.decode(one.payload.buffer, x[state.version])


def test_another_copy_than_the_journals_is_found(folder: Path) -> None:
    """As if this release rounded otherwise: devices would be refused after a fall-back."""
    scribe = Scribe(folder, format="int8")
    scribe.head = scribe.head.model_copy(update={"format": "bf16"})
    scribe.update()
    scribe.close()
    with pytest.raises(
        Diverged, match=r"version 1 in int8 is not reproduced: digest .*journal says"
    ):
        replayed(folder)


def test_unknown_format_is_damage(folder: Path) -> None:
    scribe = Scribe(folder, format="fp4")
    scribe.close()
    with pytest.raises(JournalDamaged, match=r"0\.journal: wire format: fp4 is none of ours"):
        replayed(folder)
