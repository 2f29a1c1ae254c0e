"""Journals to replay, and what a replay of them makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAvgSettings
from tests.journals import Scribe
from tests.support import layout_of

FEDAVG = FedAvgSettings(clients_per_round=3, weighting="samples")
LARGE = layout_of(1_100_000, integers=2)  # larger than what is read at once


def digests(folder: Path, **options: Any) -> dict[int, str]:
    """Every version that a replay makes, by what its model really is.

    Made as the journal's digests are.
    """
    with Replayer(folder, **options) as replayer:
        return {
            moment.version: moment.model.digest_like(str(moment.message.digest))
            for moment in replayer
            if moment.step.made is not None
        }


def values(folder: Path, **options: Any) -> list[list[float]]:
    """The model after every record."""
    with Replayer(folder, **options) as replayer:
        return [moment.model.floats.tolist() for moment in replayer]


def fedasync(folder: Path, **options: Any) -> Scribe:
    """Nine versions in three segments, the third of another epoch; refused updates between."""
    scribe = Scribe(folder, **options)
    for n in range(4):
        scribe.update(late=n % 3)
    scribe.refuse()
    scribe.segment()
    for n in range(3):
        scribe.update(late=n)
    scribe.segment(epoch=4)
    scribe.update()
    scribe.refuse()
    scribe.update(late=1)
    scribe.close()
    return scribe


def fedavg(folder: Path, rule: FedAvgSettings = FEDAVG, **options: Any) -> Scribe:
    """Four rounds: a full one, one that is cut in two by a segment, a closed one, an open one."""
    scribe = Scribe(folder, rule, **options)
    for _ in range(3):
        scribe.update()
    scribe.update()
    scribe.update()
    scribe.segment(epoch=2)
    scribe.update()
    scribe.update(late=1)  # refused
    scribe.update()
    scribe.close_round()
    scribe.close_round()  # nothing has come
    scribe.update()
    scribe.close()
    return scribe
