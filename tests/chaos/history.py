"""What a journal says when it is read from its beginning and computed anew."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.checks import Journalled
from updater.journal import JournalError, RoundClosed, Taken, segments
from updater.replay import Replayer


def journalled(folder: Path) -> Journalled:
    """The records that count and what they give; where it is damaged, as far as that goes."""
    records: list[Taken | RoundClosed] = []
    begun = replayed = (-1, "")
    try:
        begun = replayed = _beginning(folder)
        with Replayer(folder) as replayer:
            for moment in replayer:
                records.append(moment.message)
                replayed = moment.version, moment.model.digest()
    except JournalError as error:
        return Journalled(begun, tuple(records), replayed, str(error))
    return Journalled(begun, tuple(records), replayed, "")


def _beginning(folder: Path) -> tuple[int, str]:
    chain = segments(folder)
    for segment in chain:
        segment.close()
    if not chain:
        raise JournalError(f"{folder}: there is no journal")
    return chain[0].standing.version, chain[0].standing.digest
