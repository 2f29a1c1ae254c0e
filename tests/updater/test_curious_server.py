"""The curious server: a run's Redis, journal and traffic give no device's update away."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedstream.core.messages import Upload
from fedstream.helper.store import HelperStore
from fedstream.private.masks import masked, packed, sum_of_masks
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import EpochSecret, Intent
from fedstream.private.settings import PrivateSettings
from fedstream.strategies import FedBuffSettings
from fedstream.strategies.private_sums import PrivateSums, PrivateTerms
from tests.helper.between import Between
from tests.helper.served import serving
from tests.private.curious import Evidence, attack
from tests.private.devices import Devices
from tests.private.enrolled import policy_of
from tests.support import Hand, context, layout_of, running, wait_until

K = 4
BATCHES = 3
PARAMETERS = 8_000
RULE = FedBuffSettings(buffer_size=K)


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


def learnt(device: int) -> NDArray[np.float32]:
    """A device's update: what all learn, and more in the parameters of its own data."""
    rng = np.random.default_rng([7, device])
    delta = np.random.default_rng(7).standard_normal(PARAMETERS) + rng.standard_normal(PARAMETERS)
    delta[device * 400 : device * 400 + 600] *= 5
    return (delta / 100).astype(np.float32)


class Recorded:
    """A private run of three batches without noise, and what the server has seen of it."""

    def __init__(self, hand: Hand, policy: PrivacyPolicy, folder: Path) -> None:
        self.hand, self.policy, self.folder = hand, policy, folder
        self.devices = Devices(hand, policy)
        self.evidence = Evidence()
        self.sums: list[NDArray[np.int64]] = []  # that are meant to be released
        self.retried: Upload  # whose first attempt, of another training, was lost

    async def play(self, between: Between, journal: Path) -> None:
        """Devices answer; one of them makes two attempts. All is recorded."""
        for batch in range(BATCHES):
            uploads = []
            for number in range(K):
                device = batch * K + number
                [task] = await self.hand.open(device=device)
                if not device:
                    self.retried = await self.devices.trains(task, "a0", delta=learnt(20))
                upload = await self.devices.trains(task, delta=learnt(device))
                await self.evidence.look(self.hand.client)
                await self.hand.admit(upload)
                await self.evidence.look(self.hand.client)
                uploads.append(upload)
            await self.hand.reaches(batch + 1)
            await wait_until(self.hand.queue_is_empty)
            await self.evidence.look(self.hand.client)
            values = [self.devices.values[one.task, one.attempt] for one in uploads]
            self.sums.append(np.sum(values, axis=0))
        for exchange in between.exchanges:
            if (intent := exchange.intent) is not None:
                self.evidence.hear(intent, exchange.answer)
        self.evidence.read_journal(journal)
        for version in await self.hand.published():
            self.evidence.forget(version.digest)

    @property
    def truth(self) -> dict[str, NDArray[Any]]:
        """The updates as they were sent, by task and attempt."""
        return {f"{task} {attempt}": one for (task, attempt), one in self.devices.values.items()}

    def secret(self) -> EpochSecret:
        """The helper's, once it has ended."""
        store = HelperStore(self.folder / "helper.sqlite", self.policy)
        [secret] = store.epochs().values()
        store.close()
        return secret


@pytest.fixture
async def recorded(make: Any, hand: Hand, folder: Path, tmp_path: Path) -> Recorded:
    """A private run, and all that the server has seen."""
    hand.layout = layout_of(PARAMETERS)
    policy = policy_of(parameters=PARAMETERS, clip=100.0, sigma=0.0, min_batch=K, max_batch=K)
    (tmp_path / "helper").mkdir()
    found = Recorded(hand, policy, tmp_path / "helper")
    async with serving(tmp_path / "helper", policy=policy) as helper, Between() as between:
        between.helper = str(helper.make_url("/"))
        rule = PrivateSums.of(RULE, PrivateTerms(policy=policy))
        async with running(make(rule, private=PrivateSettings(helper=between.url)), context()):
            await hand.join()
            await found.play(between, folder)
    return found


async def test_server_recovers_no_update_of_a_private_run(recorded: Recorded) -> None:
    """And each hole, when it is opened in the evidence, lets the same attack recover updates."""
    evidence, truth = recorded.evidence, recorded.truth
    assert len(truth) == K * BATCHES + 1
    for name, sealed in evidence.sealed.items():
        assert evidence.blobs[name] in evidence.journal
        assert sealed.seed in evidence.journal
    assert len(evidence.sealed) == K * BATCHES
    assert len(evidence.opened) == BATCHES
    found = attack(evidence, truth, recorded.sums)
    assert found.tries > 1000
    assert found.bound < 0.1
    assert found.recovered == set(), found.found
    assert found.exact == set()

    # One seed at both attempts: the difference of the two blobs is that of the two updates.
    secret, kem = recorded.secret(), recorded.policy.kem
    task = recorded.retried.task
    again = next(one for one in evidence.sealed.values() if one.task == task)
    hole = copy.deepcopy(evidence)
    data = packed(masked(truth[f"{task} a0"], secret.seed_of(again, kem)), recorded.policy)
    hole.blobs[hashlib.sha256(data).hexdigest()] = data
    found = attack(hole, truth, recorded.sums)
    # What is known of one update of a batch tells something of the others: their sum is known.
    assert {f"{task} a0", f"{task} a1"} <= found.recovered
    assert found.found[f"{task} a1"].how == "the difference of two blobs"

    # An update that is not masked.
    hole = copy.deepcopy(evidence)
    data = packed(truth[f"{task} a1"].astype(np.uint32), recorded.policy)
    hole.blobs[hashlib.sha256(data).hexdigest()] = data
    found = attack(hole, truth, recorded.sums)
    assert found.exact == {f"{task} a1"}

    # A batch is opened again without one of its updates.
    hole = copy.deepcopy(evidence)
    intent, _ = next(iter(evidence.opened.values()))
    fewer = Intent(
        run=intent.run,
        policy=intent.policy,
        version=intent.version,
        updates=intent.updates[1:],
        weights=intent.weights[1:],
    )
    seeds = [(secret.seed_of(one, kem), 1) for one in fewer.updates]
    hole.hear(fewer, packed(sum_of_masks(seeds, None, PARAMETERS), recorded.policy))
    found = attack(hole, truth, recorded.sums)
    assert found.exact == {f"{intent.updates[0].task} a1"}
    assert found.found[f"{intent.updates[0].task} a1"].how == "the difference of two sums"


async def test_server_recovers_every_update_of_a_plain_run(
    make: Any, hand: Hand, folder: Path
) -> None:
    hand.layout = layout_of(PARAMETERS)
    evidence, truth = Evidence(), {}
    async with running(make(RULE), context()):
        await hand.join()
        for device in range(K):
            [task] = await hand.open(device=device)
            upload = await hand.trained(task, *learnt(device), sends="delta")
            truth[upload.task] = learnt(device)
            await evidence.look(hand.client)
            await hand.admit(upload)
        await hand.reaches(1)
    evidence.read_journal(folder)
    assert all(one.tobytes() in evidence.journal for one in truth.values())
    found = attack(evidence, truth, [np.sum([*truth.values()], axis=0)])
    assert found.exact == set(truth)
    assert {one.how for one in found.found.values()} == {"a blob of numbers"}
