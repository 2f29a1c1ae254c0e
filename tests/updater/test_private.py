"""A private run's updater: it opens sums, journals them, and needs no helper to make them again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fedstream.core import reasons
from fedstream.core.errors import ConfigError
from fedstream.core.records import Head
from fedstream.helper.store import HelperStore
from fedstream.history.privacy import statement
from fedstream.journal import SumOpened, Taken, segments
from fedstream.journal import opened as opened_journal
from fedstream.journal.inspection import verify
from fedstream.journal.progress import OUT_OF_RANGE, PrivacyAccount, Progress, charged
from fedstream.journal.replay import Replayer
from fedstream.private.accounting import epsilon
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import Intent, SealedUpdate
from fedstream.private.settings import PrivateSettings
from fedstream.strategies import FedAsyncSettings, FedAvgSettings, FedBuffSettings, State
from fedstream.strategies.private_sums import PrivateSums, PrivateTerms
from fedstream.strategies.staleness import Polynomial
from fedstream.strategies.strategy import Strategy
from fedstream.updater.service import Updater
from fedstream.updater.state import RunState
from fedstream.updater.sums import Opening, Sums
from tests.fedstream.views import update
from tests.helper.between import Between, Trouble
from tests.helper.served import Http, serving
from tests.private.devices import Devices
from tests.private.enrolled import policy_of
from tests.support import Hand, context, counted, layout_of, model_of, running, wait_until
from tests.updater.journalled import reasons as refused
from tests.updater.journalled import records

K = 3
RULE = FedBuffSettings(buffer_size=K)


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


@pytest.fixture
def bands() -> int:
    return 1


@pytest.fixture
def participations() -> int:
    return 1000


@pytest.fixture
def policy(hand: Hand, bands: int, participations: int) -> PrivacyPolicy:
    """Sums of at least three updates, without noise unless it is to be correlated."""
    hand.layout = layout_of(50)  # so many that a malformed update can't look like an honest one
    return policy_of(
        parameters=hand.layout.parameters,
        sigma=float(bands > 1),
        max_batch=K,
        participations=participations,
        bands=bands,
    )


@pytest.fixture
async def helper(tmp_path: Path, policy: PrivacyPolicy) -> AsyncIterator[Http]:
    """The helper of the run, over HTTP."""
    (tmp_path / "helper").mkdir()
    async with serving(tmp_path / "helper", policy=policy) as http:
        yield http


@pytest.fixture
def devices(hand: Hand, policy: PrivacyPolicy) -> Devices:
    return Devices(hand, policy)


@pytest.fixture
def private(make: Any, helper: Http, policy: PrivacyPolicy) -> Callable[..., Updater]:
    """An updater of the private run."""

    def made(rule: Strategy = RULE, terms: Any = None, **settings: Any) -> Updater:
        url = str(helper.make_url("/"))
        mine = PrivateSums.of(rule, PrivateTerms(policy=policy, **(terms or {})))
        found: Updater = make(mine, private=PrivateSettings(helper=url), **settings)
        return found

    return made


def opened(folder: Path) -> list[SumOpened]:
    return [one for one in records(folder) if isinstance(one, SumOpened)]


async def test_version_is_the_mean_of_masked_updates(
    private: Callable[..., Updater], hand: Hand, devices: Devices, folder: Path
) -> None:
    """Two versions; the journal alone then makes them again, and no single update is in it."""
    async with running(private(), context()):
        await hand.join()
        first = [await devices.answers(device) for device in range(K)]
        await hand.reaches(1)
        second = [await devices.answers(device) for device in range(K)]
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    published = await hand.published()
    model = (await hand.model(published[-1])).parameters
    np.testing.assert_allclose(
        model, devices.mean(*first) + devices.mean(*second), rtol=1e-5, atol=1e-7
    )
    assert [one.device for one in published[1].updates] == [0, 1, 2]
    assert await refused(hand, "refused", {})
    assert (await hand.ledger.look()).counts["buffered"] == 2 * K
    kinds = [type(one) for one in records(folder)]
    assert kinds == ([Taken] * K + [SumOpened]) * 2
    chain = segments(folder)
    assert [one.damage for one in verify(chain)] == [None]
    with Replayer(folder) as replayer:
        made = [moment.identical for moment in replayer if moment.message.digest]
    assert made == [True, True]


async def test_malformed_update_costs_its_batch_alone(
    private: Callable[..., Updater], hand: Hand, devices: Devices, folder: Path
) -> None:
    its = context()
    async with running(private(), its):
        await hand.join()
        for device in range(K):
            await devices.answers(device, malformed=device == 1)
        await wait_until(lambda: counted(its, "fedstream_sums_total", outcome=OUT_OF_RANGE) == 1)
        good = [await devices.answers(device) for device in range(K)]
        await hand.reaches(1)
    [dropped, made] = opened(folder)
    assert (dropped.reason, dropped.updates, dropped.digest) == (OUT_OF_RANGE, K, None)
    assert (made.reason, made.version) == ("", 1)
    model = (await hand.model((await hand.published())[-1])).parameters
    np.testing.assert_allclose(model, devices.mean(*good), rtol=1e-5, atol=1e-7)
    with Replayer(folder) as replayer:
        assert [moment.step.dropped for moment in replayer][K] == OUT_OF_RANGE


async def test_devices_of_three_dropped_batches_are_quarantined(
    private: Callable[..., Updater], hand: Hand, devices: Devices
) -> None:
    """A device whose every batch is lost; those that were in a good batch since are free."""
    async with running(private(), context()):
        await hand.join()
        for others in ((0, 1), (2, 3), (4, 5)):
            for device in (*others, 9):
                await devices.answers(device, malformed=device == 9)

        async def is_barred() -> bool:
            head = await hand.ledger.head()
            return head is not None and list(head.quarantines.by_device) == [9]

        await wait_until(is_barred)
        head = await hand.ledger.head()
        assert head is not None
        assert head.quarantines.by_device[9].why == "its private updates spoil sums"


@pytest.mark.parametrize("at", ["flush", "answer"])
async def test_updater_that_dies_around_the_opening_gets_the_same_sum(
    private: Callable[..., Updater],
    hand: Hand,
    devices: Devices,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    """Killed before it asks, or with the answer in its hands: the successor asks for the same."""
    ask, died = Sums.open, asyncio.Event()
    first: list[Opening] = []

    async def dies(self: Sums, state: RunState) -> Opening:
        if at == "answer":
            first.append(await ask(self, state))
        died.set()
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(Sums, "open", dies)
    async with running(private(lease_s=0.5), context()):
        await hand.join()
        uploads = [await devices.answers(device) for device in range(K)]
        await died.wait()
    assert not opened(folder)
    monkeypatch.setattr(Sums, "open", ask)
    async with running(private(name="updater-1"), context()):
        await hand.reaches(1)
    [made] = opened(folder)
    assert not first or made.intent == first[0].intent.digest
    model = (await hand.model((await hand.published())[-1])).parameters
    np.testing.assert_allclose(model, devices.mean(*uploads), rtol=1e-5, atol=1e-7)


IN_BUCKETS: dict[str, Any] = {
    "rule": FedBuffSettings(buffer_size=3 * K),
    "terms": {"buckets": 3, "over": "median"},
}


async def test_version_is_the_median_of_opened_buckets(
    private: Callable[..., Updater], hand: Hand, devices: Devices, folder: Path
) -> None:
    """The updater stops after two of three, and a malformed update costs its bucket alone.

    A device takes part once in all buckets of a version.
    """
    async with running(private(**IN_BUCKETS), context()):
        await hand.join()
        buckets = [[await devices.answers(K * n + one) for one in range(K)] for n in range(2)]
        await devices.answers(0)
        await wait_until(lambda: len(opened(folder)) == 2)
        await wait_until(lambda: refused(hand, "refused", {reasons.IN_THE_BATCH: 1}))
    async with running(private(**IN_BUCKETS, name="updater-1"), context()):
        for device in (6, 7, 8):
            await devices.answers(device, malformed=device == 7)
        buckets.append([await devices.answers(device) for device in (6, 7, 8)])
        await hand.reaches(1)
        await wait_until(hand.queue_is_empty)
    sums = opened(folder)
    assert [(one.updates, one.version, one.reason) for one in sums] == [
        (K, 0, ""), (K, 0, ""), (K, 0, OUT_OF_RANGE), (K, 1, "")
    ]  # fmt: skip
    [_, made] = await hand.published()
    assert [one.device for one in made.updates] == list(range(9))
    found = (await hand.model(made)).parameters
    wanted = np.median([devices.mean(*bucket) for bucket in buckets], axis=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert {one.damage for one in verify(segments(folder))} == {None}
    with Replayer(folder) as replayer:
        assert [moment.identical for moment in replayer if moment.message.digest] == [True]


async def test_buckets_are_those_of_the_run(
    private: Callable[..., Updater], hand: Hand, devices: Devices
) -> None:
    """Another number would need other vectors."""
    async with running(private(**IN_BUCKETS), context()):
        await hand.join()
        await devices.answers(0)
    buckets = pytest.RaisesExc(ConfigError, match=r"private\.buckets")
    with pytest.RaisesGroup(buckets, flatten_subgroups=True):
        async with asyncio.timeout(30):
            await private(**IN_BUCKETS | {"rule": RULE, "terms": None}).run(context())


async def test_answer_to_another_intent_is_not_a_sum(
    make: Any, helper: Http, policy: PrivacyPolicy, hand: Hand, devices: Devices, folder: Path
) -> None:
    """A proxy that mixes answers up costs another request, and not the batch."""
    mine = PrivateSums.of(RULE, PrivateTerms(policy=policy))
    async with Between() as between:
        between.helper = str(helper.make_url("/"))
        updater = make(mine, private=PrivateSettings(helper=between.url))
        async with running(updater, context()):
            await hand.join()
            for version in (1, 2):
                for device in range(K):
                    await devices.answers(device)
                await hand.reaches(version)
                between.next = [Trouble.ANSWER_OF_ANOTHER, Trouble.GARBLED]
    assert between.met == [Trouble.ANSWER_OF_ANOTHER, Trouble.GARBLED]
    assert [one.reason for one in opened(folder)] == ["", ""]


@asynccontextmanager
async def refusing(
    make: Any, helper: Http, policy: PrivacyPolicy, answer: Callable[[Intent], web.Response]
) -> AsyncIterator[list[Intent]]:
    """An updater that runs, behind a proxy with answers of its own: the intents that came."""
    asked: list[Intent] = []

    async def opens(request: web.Request) -> web.StreamResponse:
        asked.append(Intent.decode(await request.read()))
        return answer(asked[-1]) if len(asked) > 1 else web.Response(status=409, text="conflict")

    async def key(_request: web.Request) -> web.StreamResponse:
        reply = await helper.get("/v1/key")
        return web.Response(body=await reply.read())

    app = web.Application()
    app.add_routes([web.post("/v1/open", opens), web.get("/v1/key", key)])
    mine = PrivateSums.of(RULE, PrivateTerms(policy=policy))
    async with TestServer(app) as proxy:
        updater = make(mine, private=PrivateSettings(helper=str(proxy.make_url("/"))))
        async with running(updater, context()):
            yield asked


async def test_refusal_that_is_no_helpers_costs_no_batch(
    make: Any, policy: PrivacyPolicy, hand: Hand, devices: Devices, helper: Http, folder: Path
) -> None:
    """A proxy's 409 is worth another try; a reason of another release is journalled as one word."""

    def unknown(_intent: Intent) -> web.Response:
        return web.json_response({"reason": "no reason" * 1000}, status=409)

    async with refusing(make, helper, policy, unknown) as asked:
        await hand.join()
        for device in range(K):
            await devices.answers(device)
        await wait_until(lambda: opened(folder))
    assert [one.reason for one in opened(folder)] == ["refused"]
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("seal", "its private updates spoil sums"),
        ("participation", "it has spent its privacy budget, as the helper counts it over all runs"),
    ],
)
async def test_device_that_the_helper_names_is_quarantined(
    make: Any,
    policy: PrivacyPolicy,
    hand: Hand,
    devices: Devices,
    helper: Http,
    reason: str,
    why: str,
) -> None:
    """By its task or its number. A device that other runs have spent is not blamed for it."""

    def names(intent: Intent) -> web.Response:
        said = {"task": intent.updates[1].task} if reason == "seal" else {"device": 1}
        return web.json_response({"reason": reason} | said, status=409)

    async with refusing(make, helper, policy, names):
        await hand.join()
        for device in range(K):
            await devices.answers(device)

        async def barred() -> dict[int, str]:
            head = await hand.ledger.head()
            found = head.quarantines.by_device if head is not None else {}
            return {device: one.why for device, one in found.items()}

        assert await wait_until(barred) == {1: why}


def test_batch_that_the_helper_refuses_makes_no_device_suspect() -> None:
    """Its store was lost, or a round had too few updates: honest devices are in such batches."""
    known = {3: PrivacyAccount(squares=2, sums=2, dropped=1)}
    assert charged(known, [(3, 1), (4, 1)], is_opened=False, is_dropped=True) == known
    again = charged(known, [(3, 1)], is_opened=True, is_dropped=True)
    assert again[3] == PrivacyAccount(squares=3, sums=3, dropped=2)
    assert charged(again, [(3, 1)], is_opened=True, is_dropped=False)[3].dropped == 0


async def test_run_waits_for_its_helper(
    private: Callable[..., Updater], hand: Hand, devices: Devices, helper: Http, folder: Path
) -> None:
    """Nothing is lost while the helper is away, and nothing is buffered beyond a full batch."""
    async with running(private(), context()):
        await hand.join()
        await devices.answers(0)
        await helper.server.close()
        for device in range(1, K + 2):
            await devices.answers(device)
        await wait_until(lambda: sum(isinstance(one, Taken) for one in records(folder)) == K)
        assert not opened(folder)


async def test_store_that_the_helper_loses_costs_one_batch(
    make: Any,
    helper: Http,
    policy: PrivacyPolicy,
    hand: Hand,
    devices: Devices,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its new key is in Redis before the next batch begins, however seldom the updater looks.

    So it is once Redis falls back to the earlier key: the first update that is sealed to that one
    is refused, and costs no batch.
    """
    monkeypatch.setattr("fedstream.updater.sums._LOOK_S", 3600.0)
    mine = PrivateSums.of(RULE, PrivateTerms(policy=policy))
    (tmp_path / "emptied").mkdir()
    async with Between() as between, serving(tmp_path / "emptied", policy=policy) as emptied:
        between.helper = str(helper.make_url("/"))
        updater = make(mine, private=PrivateSettings(helper=between.url))
        async with running(updater, context()):
            await hand.join()
            await devices.answers(0)
            early = await hand.client.call("GET", hand.keys.sealing)
            between.helper = str(emptied.make_url("/"))
            for device in range(1, K):
                await devices.answers(device)
            await wait_until(lambda: opened(folder))
            for device in range(K):
                await devices.answers(device)
            await hand.reaches(1)
            late = await hand.client.call("GET", hand.keys.sealing)
            await hand.client.call("SET", hand.keys.sealing, early)
            await devices.answers(0)

            async def is_late() -> bool:
                return bool(await hand.client.call("GET", hand.keys.sealing) == late)

            await wait_until(is_late)
            await wait_until(lambda: refused(hand, "refused", {reasons.HELPER_LOST: 1}))
    assert [one.reason for one in opened(folder)] == ["helper lost", ""]


async def test_seal_of_another_update_is_refused(
    private: Callable[..., Updater], hand: Hand, devices: Devices
) -> None:
    """The helper would not open it, and the whole batch would be lost.

    Nor could the helper know whether the masked words are those that the device has signed.
    """
    others: dict[str, Any] = {
        "run": "another",
        "task": "another",
        "attempt": "a2",
        "device": 1,
        "tau": 5,
        "layout": "other",
        "policy": "00" * 32,
        "masked": "00" * 32,
    }
    async with running(private(), context()):
        await hand.join()
        for name, value in others.items():
            [task] = await hand.open(device=2)
            upload = await devices.trains(task)
            assert upload.sealed is not None
            sealed = SealedUpdate.decode(upload.sealed).model_copy(update={name: value})
            await hand.admit(upload.model_copy(update={"sealed": sealed.encode()}))
        await wait_until(lambda: refused(hand, "refused", {reasons.SEAL: len(others)}))


async def test_device_takes_part_in_a_batch_once(
    private: Callable[..., Updater], hand: Hand, devices: Devices
) -> None:
    async with running(private(), context()):
        await hand.join()
        for device in (0, 0, 1, 2):
            await devices.answers(device)
        await hand.reaches(1)
        assert await refused(hand, "refused", {reasons.IN_THE_BATCH: 1})


@pytest.mark.parametrize("bands", [3])
async def test_device_sits_out_the_sums_whose_noise_takes_back_its_own(
    private: Callable[..., Updater], hand: Hand, devices: Devices, folder: Path
) -> None:
    """Also after the updater was replaced; the scheduler learns of it from the head."""
    async with running(private(lease_s=0.5), context()):
        await hand.join()
        for version, batch in enumerate(((0, 1, 2), (3, 4, 5)), 1):
            for device in batch:
                await devices.answers(device)
            await hand.reaches(version)
        head = await hand.ledger.head()
        assert head is not None
        assert head.recent == {0, 1, 2, 3, 4, 5}
    async with running(private(name="updater-1"), context()):
        await wait_until(lambda: hand.client.call("GET", hand.keys.sealing))
        for device in (0, 5, 6, 7, 8):
            await devices.answers(device)
        await hand.reaches(3)
        assert await refused(hand, "refused", {reasons.IN_THE_BATCH: 2})
        for device in (0, 1, 2):
            await devices.answers(device)
        await hand.reaches(4)
    assert [one.reason for one in opened(folder)] == [""] * 4
    with Replayer(folder) as replayer:
        assert all(moment.identical for moment in replayer if moment.message.digest)


async def test_update_that_is_plain_or_of_other_words_is_refused(
    private: Callable[..., Updater], hand: Hand, devices: Devices
) -> None:
    """Also if a coordinator has let it in."""
    async with running(private(), context()):
        await hand.join()
        [one, two] = await hand.open(2)
        await hand.slip_in(await hand.trained(one, sends="delta"))
        upload = await devices.trains(two)
        half = {"format": "mask16", "size": upload.size // 2}
        await hand.slip_in(upload.model_copy(update=half))
        await wait_until(lambda: refused(hand, "refused", {reasons.WIRE_FORMAT: 2}))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (FedAsyncSettings(), "needs each update alone"),
        (FedBuffSettings(buffer_size=K, staleness=Polynomial()), "strategy.staleness"),
        (FedAvgSettings(clients_per_round=K, weighting="samples"), "samples"),
        (FedBuffSettings(buffer_size=K + 1), "opens sums of 3 to 3"),
    ],
)
def test_rules_that_need_single_updates_are_refused(
    policy: PrivacyPolicy, rule: Strategy, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        PrivateSums.of(rule, PrivateTerms(policy=policy))


async def test_run_ends_before_a_device_exceeds_its_budget(
    make: Any, hand: Hand, tmp_path: Path, folder: Path
) -> None:
    """Devices are drawn at random among those that the head leaves, and one batch is malformed.

    Another updater takes over meanwhile. At the end, helper and journal have counted the same.
    """
    hand.layout = layout_of(50)
    policy = policy_of(
        parameters=hand.layout.parameters, sigma=4.0, max_batch=K, weights=(2,), participations=3
    )
    devices, draw = Devices(hand, policy), random.Random(5)
    (tmp_path / "helper").mkdir()
    batches, spent_on_the_way = 0, 0

    async def head() -> Head:
        found = await hand.ledger.head()
        assert found is not None
        return found

    async def is_counted() -> bool:
        loss = (await head()).privacy
        return loss is not None and loss.opened == batches

    async with serving(tmp_path / "helper", policy=policy) as http:
        settings = PrivateSettings(helper=str(http.make_url("/")))
        rule = PrivateSums.of(RULE, PrivateTerms(policy=policy))
        for name, most in (("first", 4), ("second", 1000)):
            async with running(make(rule, name=name, lease_s=0.5, private=settings), context()):
                await hand.join()
                while batches < most and (await hand.ledger.run()).state == "running":
                    spent = (await head()).spent
                    spent_on_the_way = max(spent_on_the_way, len(spent))
                    for device in draw.sample([d for d in range(10) if d not in spent], K):
                        await devices.answers(device, malformed=batches == 2)
                    batches += 1
                    await wait_until(is_counted)
    run = await hand.ledger.run()
    assert run.why is not None
    assert run.why.startswith("the privacy budget is spent: ")
    assert await refused(hand, "refused", {})
    loss = (await head()).privacy
    assert loss is not None
    assert (loss.opened, loss.dropped, spent_on_the_way) == (batches, 1, 7)
    assert loss.epsilon == epsilon(policy, policy.allowance, 3, 1e-5)
    with opened_journal(folder) as chain:
        found = statement(chain, 1e-5)
    assert found.worst.squares == policy.allowance
    assert {one.device for one in found.by_device if not one.left} == loss.spent
    store = HelperStore(tmp_path / "helper" / "helper.sqlite", policy)
    for one in found.by_device:
        assert store.spent(one.device) == (one.squares, one.sums)
    store.close()


@pytest.mark.parametrize("participations", [1])
async def test_device_without_budget_costs_no_batch(
    private: Callable[..., Updater], hand: Hand, devices: Devices
) -> None:
    """The helper would refuse it, and with it the others of its batch."""
    async with running(private(), context()):
        await hand.join()
        for device in range(K):
            await devices.answers(device)
        await hand.reaches(1)
        await devices.answers(0)
        await wait_until(lambda: refused(hand, "refused", {reasons.PRIVACY_SPENT: 1}))


async def test_emptied_redis_gets_accounts_and_key_again(
    private: Callable[..., Updater],
    hand: Hand,
    devices: Devices,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the scheduler would ask devices that can take part no more, and the others could not."""
    monkeypatch.setattr("fedstream.updater.sums._LOOK_S", 3600.0)
    async with running(private(), context()):
        await hand.join()
        for device in range(K):
            await devices.answers(device)
        await hand.reaches(1)
        await hand.ledger.purge()

        async def is_told() -> bool:
            head = await hand.ledger.head()
            return head is not None and head.privacy is not None and head.privacy.opened == 1

        await wait_until(is_told)
        await wait_until(lambda: hand.client.call("EXISTS", hand.keys.sealing))


def test_devices_that_began_a_version_in_buckets_are_enough_to_end_it(hand: Hand) -> None:
    """They are spent once their bucket is opened, but count for the version that it is part of."""
    policy = policy_of(participations=1, max_batch=K)
    sums = Sums(policy, PrivateSettings(helper="http://helper"), hand.client, hand.keys)
    spent = {device: PrivacyAccount(squares=1, sums=1) for device in range(K)}
    held = tuple(update(f"task-{device}", device=device) for device in spent)
    begun = Progress(State(0, model_of(hand.layout)), held=held, accounts=spent)
    assert not sums.exhausted(begun, 2 * K, 2 * K)
    over = "the privacy budget is spent: 3 devices may still take part, sums need 6"
    assert sums.exhausted(replace(begun, held=()), 2 * K, 2 * K) == over
    assert not sums.exhausted(replace(begun, held=()), 3 * K, 2 * K)
