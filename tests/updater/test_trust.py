"""Where a device's word does not count: staleness counts from what was handed out, and samples as
far as is usual."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.messages import Upload
from fedstream.journal import Taken
from fedstream.journal.norms import Norms
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAsyncSettings, FedAvgSettings, FedBuffSettings, State
from fedstream.strategies.staleness import Constant, Polynomial
from fedstream.updater.decider import refusal_by_metadata, weighable
from tests.journals import Scribe
from tests.support import Hand, context, layout_of, model_of, running, wait_until
from tests.updater.journalled import records
from tests.updater.states import upload_of

FADING = FedAsyncSettings(alpha=0.5, staleness=Polynomial(a=1.0))


async def two_versions_later(hand: Hand, **said: Any) -> Upload:
    """An update that says that it began with version 2, of a task that is as old as version 0."""
    for number in (1, 2):
        await hand.admitted(1.0)
        await hand.reaches(number)
    [trigger] = await hand.open()
    upload = await hand.trained(trigger, 3.0, **said)
    assert upload.tau == 2
    await hand.slip_in(upload)
    return upload


async def test_untrusted_updates_staleness_is_its_tasks(
    make: Any, hand: Hand, folder: Path
) -> None:
    """Live, and out of the journal again: by the same rule, and by another."""
    async with running(make(FADING), context()):
        await hand.join()
        await two_versions_later(hand, site="north", handed=0)
        await hand.reaches(3)
    last = (await hand.published())[-1]
    [made] = last.updates
    assert (made.tau, made.staleness, made.weight) == (2, 2, 0.5 / 3)
    with Replayer(folder) as again:
        found = [(m.version, m.model.digest(), m.step.decision) for m in again if m.step.made]
    assert found[-1][:2] == (3, last.digest)
    other = FedAsyncSettings(alpha=0.5, staleness=Polynomial(a=2.0))
    with Replayer(folder, strategy=other) as under_another:
        weights = [m.step.decision.weight for m in under_another if m.step.decision]
    assert weights[-1] == 0.5 / 9


def test_replay_with_more_versions_keeps_recorded_staleness(tmp_path: Path) -> None:
    """Three updates are one version by the one rule, and three by the other."""
    scribe = Scribe(tmp_path, FedBuffSettings(buffer_size=3))
    for _ in range(3):
        scribe.update()
    taken = scribe.update(site="north", handed=0)
    scribe.close()
    assert (taken.upload.tau, taken.staleness) == (1, 1)
    with Replayer(tmp_path, strategy=FedBuffSettings(buffer_size=1)) as under_another:
        told = [m.step.decision.staleness for m in under_another if m.step.decision]
    assert told == [0, 0, 0, 1]


async def test_update_may_be_too_stale_despite_claiming_freshness(make: Any, hand: Hand) -> None:
    strategy = FedAsyncSettings(alpha=0.5, staleness=Constant(), max_staleness=1)
    async with running(make(strategy), context()):
        await hand.join()
        upload = await two_versions_later(hand, site="north", handed=0)

        async def is_refused() -> bool:
            return (await hand.ledger.look()).reasons("refused") == {"too stale": 1}

        await wait_until(is_refused)
        [event] = [one for one in await hand.events() if one.task == upload.task]
        assert event.staleness == 2


MANY = 2**53 - 1


def claiming(samples: int, **changes: Any) -> Upload:
    """An update of a site that is not trusted, by its device's word."""
    return upload_of("t", samples=samples, **{"tau": 0, "handed": 0} | changes)


@pytest.mark.parametrize(
    ("known", "most", "counted"),
    [
        ((), None, 10),
        ((600,) * 20, None, 10),
        ((600,) * 21, None, 6000),
        ((*[600] * 51, *[MANY] * 50), None, 6000),
        ((0,) * 101, None, 10),
        ((), 50, 50),  # the operator's limit, instead
        ((600,) * 30, 50_000, 50_000),
    ],
)
def test_claimed_samples_count_as_far_as_is_usual(
    known: tuple[int, ...], most: int | None, counted: int
) -> None:
    norms = Norms(samples=known)
    upload = weighable(claiming(MANY), norms.samples, most)
    assert (upload.samples, upload.claimed) == (counted, MANY)
    assert norms.with_samples(counted).samples == (*known, counted)[-101:]
    for fine in (claiming(MANY, handed=None), claiming(counted)):
        assert weighable(fine, norms.samples, most) == fine


def counts(claims: Iterable[int]) -> list[int]:
    """The samples that a run's updates count with, all from untrusted sites."""
    norms, found = Norms(), list[int]()
    for claim in claims:
        found.append(weighable(claiming(claim), norms.samples, None).samples)
        norms = norms.with_samples(found[-1])
    return found


@pytest.mark.parametrize("first", [0, 1, 500, MANY])
def test_no_first_claim_lets_a_later_device_be_the_average(first: int) -> None:
    """Of the round of 21 that it ends, wherever that is in the run."""
    honest = counts([first, *[500] * 200])
    for n in range(20, 201):
        *others, liar = counts([first, *[500] * (n - 1), MANY])[n - 20 :]
        assert others == honest[n - 20 : n]
        assert liar <= sum(others) / 2


def test_honest_untrusted_devices_count_alike_from_the_first_on() -> None:
    found = counts([500] * 200)
    assert found == [10] * 21 + [100] * 42 + [500] * 137


async def test_device_that_claims_all_samples_there_are_is_not_the_average(
    make: Any, hand: Hand, folder: Path
) -> None:
    """Live, by a successor that begins where the claims are in a checkpoint, and replayed."""
    rule = FedAvgSettings(clients_per_round=6, weighting="samples")
    for successor in range(2):
        updater = make(rule, name=f"updater-{successor}", norm_factor=0)
        async with running(updater, context()):
            await hand.join()
            for n in range(30):
                liar = n % 6 == 1
                handed = n // 6 + 5 * successor
                said: dict[str, Any] = {"site": "north", "handed": handed} if liar else {}
                [trigger] = await hand.open()
                samples = MANY if liar else 600
                value = 100.0 if liar else 1.0
                upload = await hand.trained(trigger, value, samples=samples, **said)
                await hand.slip_in(upload)
                if n % 6 == 5:
                    await hand.reaches(5 * successor + n // 6 + 1)
    made = [version for version in await hand.published() if version.updates]
    weights = [[one.weight for one in version.updates] for version in made]
    # Five of six are trusted: theirs is the median once they are more than those of the beginning.
    caps = [10.0] * 4 + [100.0] + [6000.0] * 5
    assert weights == [[600.0, cap, *[600.0] * 4] for cap in caps]
    taken = [record for record in records(folder) if isinstance(record, Taken)]
    assert {one.upload.claimed for one in taken} == {None, MANY}
    with Replayer(folder) as again:
        assert [m.model.digest() for m in again if m.step.made][-1] == made[-1].digest
    by_samples = FedAvgSettings(clients_per_round=12, weighting="samples")
    with Replayer(folder, strategy=by_samples) as under_another:
        weighed = [m.step.decision.weight for m in under_another if m.step.decision]
    assert weighed == [weight for each in weights for weight in each]


@pytest.mark.parametrize(
    ("tau", "handed", "since", "why"),
    [
        (5, None, 5, ""),
        (3, None, 3, "too stale"),
        (5, 4, 4, ""),
        (5, 3, 3, "too stale"),
        (6, 4, 4, "unknown base"),
        (3, 4, 3, "too stale"),
    ],
)
def test_staleness_counts_from_the_older_version(
    tau: int, handed: int | None, since: int, why: str
) -> None:
    model = model_of(layout_of())
    upload = claiming(1, tau=tau, layout=model.layout.signature, handed=handed)
    rule = FedAsyncSettings(max_staleness=1).build()
    assert upload.since == since
    assert refusal_by_metadata(upload, rule, State(5, model)) == why
