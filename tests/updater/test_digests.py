"""A run's digests are made by the algorithm that it was begun with, whatever is set later."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.digest import DigestAlgorithm, algorithm_of
from fedstream.journal.chain import segments
from fedstream.journal.errors import JournalError
from fedstream.journal.inspection import divergence
from fedstream.journal.records import Taken
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedBuffSettings
from tests.journals import Scribe
from tests.support import Hand, context, model_of, running, wait_until
from tests.updater.journalled import records

OTHER: dict[DigestAlgorithm, DigestAlgorithm] = {"blake3": "sha256", "sha256": "blake3"}
BUFFERED = FedBuffSettings(buffer_size=2)


@pytest.fixture(params=sorted(OTHER))
def algorithm(request: pytest.FixtureRequest) -> DigestAlgorithm:
    """That of the run."""
    found: DigestAlgorithm = request.param
    return found


async def test_all_digests_of_a_run_are_made_alike(
    make: Any, hand: Hand, folder: Path, algorithm: DigestAlgorithm
) -> None:
    """Of versions, of what devices are given, and of what a checkpoint holds; and it replays."""
    about = {"digests": algorithm, "published_as": "int8"}
    async with running(make(BUFFERED, **about), context()):
        await hand.join()
        for number in range(5):
            await hand.admitted(float(number), sends="delta")
        await hand.reaches(2)
        await hand.balanced()
        told = await hand.published()
    async with running(make(BUFFERED, **about), context()):  # begins with a checkpoint
        await hand.join()
        await hand.admitted(9.0, sends="delta")
        await hand.reaches(3)
    for version in told:
        made = {algorithm_of(version.digest), algorithm_of(str(version.given))}
        assert made == {algorithm}
    assert algorithm_of(str(segments(folder)[-1].standing.memory)) == algorithm
    with Replayer(folder) as replayer:
        assert all(moment.identical is not False for moment in replayer)


async def test_a_run_keeps_its_algorithm(make: Any, hand: Hand, algorithm: DigestAlgorithm) -> None:
    for digests in (algorithm, OTHER[algorithm]):
        async with running(make(digests=digests), context()):
            await hand.join()
            number = await hand.version()
            await hand.admitted(1.0)
            await hand.reaches(number + 1)
    assert [algorithm_of(version.digest) for version in await hand.published()] == [algorithm] * 3


async def test_an_adopted_run_keeps_its_algorithm(
    make: Any, hand: Hand, folder: Path, algorithm: DigestAlgorithm
) -> None:
    """Also where what Redis has is a copy, and so another version."""
    async with running(make(digests=algorithm, published_as="bf16"), context()):
        await hand.join()
        await hand.admitted(1.0)
        await hand.reaches(1)
    shutil.rmtree(folder)
    async with running(make(digests=OTHER[algorithm], adopt=True, published_as="bf16"), context()):
        await hand.reaches(2)
    assert algorithm_of((await hand.published())[-1].digest) == algorithm
    assert algorithm_of(segments(folder)[0].standing.digest) == algorithm


async def test_updates_may_have_digests_by_either(
    make: Any, hand: Hand, folder: Path, algorithm: DigestAlgorithm
) -> None:
    """A device of other people's making may know only SHA-256; damage is found all the same."""
    async with running(make(digests="blake3"), context()):
        await hand.join()
        right = model_of(hand.layout, 1.0).digest(algorithm)
        await hand.admitted(1.0, digest=right)
        await hand.reaches(1)
        await hand.admitted(2.0, digest=right)
        await wait_until(hand.queue_is_empty)
        await hand.balanced()
    one, other = (record for record in records(folder) if isinstance(record, Taken))
    assert (one.outcome, other.outcome, other.reason) == ("applied", "refused", "digest")
    with Replayer(folder) as replayer:
        assert [moment.identical for moment in replayer if moment.message.digest] == [True]


def test_journals_of_two_algorithms_are_not_compared(tmp_path: Path) -> None:
    """All of their versions would differ, and none would say why."""
    for name in OTHER:
        scribe = Scribe(tmp_path / name / "journal", made_by=name)
        scribe.update()
        scribe.close()
    ours, theirs = (segments(tmp_path / name / "journal") for name in sorted(OTHER))
    with pytest.raises(JournalError, match=r"digests by blake3 and .* by sha256.*wire\.digest"):
        divergence(ours, theirs)
