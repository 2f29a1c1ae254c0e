"""A helper opens sums of batches, each task once; and the attacks that this is against."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from fedstream.core.errors import BadMessage
from fedstream.helper.opening import NotOpened
from fedstream.helper.service import Helper
from fedstream.private import noise
from fedstream.private.masks import masked
from fedstream.private.policy import KeyRoster
from fedstream.private.sealing import BadSeal, Intent
from tests.helper.batches import Batches, refused
from tests.helper.conftest import Make
from tests.private.enrolled import DEVICES, HELPER, ROSTER, policy_of


def test_without_noise_the_opened_sum_is_the_plaintext_sum(make: Make) -> None:
    batches = make(sigma=0.0, weights=(3, 2, 1))
    updates = [batches.trained(device, tau=7 - device % 3) for device in range(8)]
    intent = batches.intent(*updates)
    np.testing.assert_array_equal(batches.opened(intent), batches.plain(intent))


def test_noise_is_drawn_by_the_intent(batches: Batches) -> None:
    intent = batches.intent(*map(batches.trained, range(4)))
    added = batches.plain(intent) - batches.opened(intent)
    [secret] = batches.store.epochs().values()
    key = noise.noise_key(secret.noise, intent.digest)
    np.testing.assert_array_equal(added, noise.draw(key, 50, batches.policy.noise_sigma))


def test_the_same_intent_gets_the_same_bytes_also_after_a_crash(batches: Batches) -> None:
    """Else the noise could be averaged away by asking again."""
    intent = batches.intent(*map(batches.trained, range(4)))
    first = batches.helper.open(intent)
    assert batches.helper.open(intent) == first
    batches.restart()
    assert batches.helper.open(intent) == first
    assert batches.store.spent(2) == (1, 1)


# The curious server's attacks, each with what it would gain.


def test_a_batch_that_overlaps_an_opened_one_is_refused_with_that_one(batches: Batches) -> None:
    """The difference of the sums of {0, 1, 2, 3} and {0, 1, 2, 4} is of two devices alone."""
    updates = [batches.trained(device) for device in range(7)]
    intent = batches.intent(*updates[:4])
    batches.helper.open(intent)
    error = refused(batches, batches.intent(*updates[:3], updates[4]))
    assert error.reason == "overlap"
    assert error.about == {
        "task": "task-0",
        "intent": intent.digest,
        "tasks": [f"task-{device}" for device in range(4)],
        "weights": [1, 1, 1, 1],
    }
    assert refused(batches, batches.intent(*reversed(updates[:4]))).reason == "overlap"
    error = refused(batches, batches.intent(*updates[4:], updates[3]))
    assert (error.reason, error.about["task"]) == ("overlap", "task-3")


def test_too_few_or_too_many_devices_are_not_opened(batches: Batches) -> None:
    updates = [batches.trained(device) for device in range(11)]
    assert refused(batches, batches.intent(*updates[:2])).reason == "too few"
    assert refused(batches, batches.intent()).reason == "too few"
    assert refused(batches, batches.intent(*updates)).reason == "too many"
    batches.helper.open(batches.intent(*updates[:3]))


def test_a_task_named_twice_is_refused(batches: Batches) -> None:
    same = [batches.trained(0, "task"), batches.trained(1, "task"), batches.trained(2)]
    error = refused(batches, batches.intent(*same))
    assert error.reason == "twice"
    assert error.about == {"task": "task"}


@pytest.mark.parametrize(
    "weights",
    [(0,) + (1,) * 7, (2,) * 8, (1,) * 7, (1,) * 7 + (-1,), (1,) * 7 + (2**32 + 1,)],
)
def test_only_the_policys_weights_are_opened(batches: Batches, weights: Any) -> None:
    """At weights of zero, fewer than K_min may be in the sum; at larger ones, noise hides less."""
    updates = [batches.trained(device) for device in range(8)]
    assert refused(batches, batches.intent(*updates, weights=weights)).reason == "weights"


def test_staleness_is_the_policys(batches: Batches) -> None:
    updates = [batches.trained(device) for device in range(3)]
    for version in (6, 17):
        intent = batches.intent(*updates, version=7).model_copy(update={"version": version})
        assert refused(batches, intent).reason == "weights"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "task-9"),
        ("attempt", "2"),
        ("tau", 6),
        ("masked", "00" * 32),
        ("epoch", "other"),
        ("seed", bytes(80)),
    ],
)
def test_what_a_device_did_not_say_is_not_opened(batches: Batches, field: str, value: Any) -> None:
    *updates, last = map(batches.trained, range(4))
    moved = last.model_copy(update={field: value})
    assert refused(batches, batches.intent(*updates, moved)).reason == "signature"


def test_no_byte_of_an_intent_may_change(batches: Batches) -> None:
    """Whatever arrives is refused with a reason, and never raises anything else."""
    intent = batches.intent(*map(batches.trained, range(3)))
    data, rng = intent.encode(), np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        try:
            found = Intent.decode(bytes(changed))
        except BadMessage:
            continue
        if found != intent:  # a field that the schema ignores
            refused(batches, found)


def test_another_policy_opens_nothing(batches: Batches, make: Make) -> None:
    """Neither is an intent opened under a laxer policy, nor an update that was sealed for one."""
    *updates, last = map(batches.trained, range(4))
    laxer = policy_of(min_batch=2)
    assert refused(batches, batches.intent(*updates, policy=laxer.digest)).reason == "policy"
    other = make(min_batch=2)
    foreign = other.trained(9)
    assert refused(batches, batches.intent(*updates, foreign)).reason == "policy"
    resigned = last.model_copy(update={"policy": laxer.digest})
    resigned = resigned.model_copy(update={"signature": DEVICES[3].sign(resigned.signed)})
    assert refused(batches, batches.intent(*updates, resigned)).reason == "policy"


def test_updates_of_two_runs_or_layouts_are_not_mixed(batches: Batches) -> None:
    updates = [batches.trained(device) for device in range(3)]
    for other in (batches.trained(4, run="another"), batches.trained(5, layout="another")):
        assert refused(batches, batches.intent(*updates, other)).reason == "mixed"
    assert refused(batches, batches.intent(*updates, run="another")).reason == "mixed"


def test_a_device_takes_part_as_often_as_the_policy_allows(make: Make) -> None:
    """Over all runs: nothing of a refused batch counts, neither for its other devices."""
    batches = make(participations=2)
    for number in range(2):
        updates = [batches.trained(device, f"t{number}-{device}") for device in (0, 1, 2)]
        batches.helper.open(batches.intent(*updates))
    updates = [batches.trained(device, run="next") for device in (5, 6, 0)]
    error = refused(batches, batches.intent(*updates, run="next"))
    assert error.reason == "participation"
    assert error.about == {"device": 0}
    assert batches.store.spent(0) == (2, 2)
    assert batches.store.spent(5) == (0, 0)
    others = [batches.trained(device, run="next") for device in (5, 6, 7)]
    batches.helper.open(batches.intent(*others, run="next"))


def test_small_weights_spend_less(make: Make) -> None:
    batches = make(participations=1, weights=(2, 1))
    batches.helper.open(batches.intent(*map(batches.trained, (3, 4, 5))))
    assert batches.store.spent(3) == (4, 1)
    for number in range(4):
        updates = [batches.trained(device, f"t{number}-{device}", tau=6) for device in (0, 1, 2)]
        batches.helper.open(batches.intent(*updates))
    assert batches.store.spent(0) == (4, 4)
    updates = [batches.trained(device, f"t4-{device}", tau=6) for device in (0, 1, 2)]
    assert refused(batches, batches.intent(*updates)).reason == "participation"


# Epochs.


def test_an_epochs_updates_are_opened_until_its_key_is_deleted(batches: Batches) -> None:
    early = [batches.trained(device) for device in range(3)]
    batches.now += 100.5
    batches.helper.rotate()
    late = [batches.trained(device) for device in range(3, 6)]
    assert len({one.epoch for one in early + late}) == 2
    mixed = batches.intent(early[0], *late)
    first = batches.helper.open(mixed)
    newest = batches.store.epochs()[late[0].epoch]  # an older key, if it leaked, tells no noise
    drawn = noise.draw(noise.noise_key(newest.noise, mixed.digest), 50, batches.policy.noise_sigma)
    np.testing.assert_array_equal(batches.plain(mixed) - batches.opened(mixed), drawn)
    batches.now += 99
    batches.helper.rotate()
    batches.restart()
    assert batches.helper.open(mixed) == first
    batches.now += 2
    batches.helper.rotate()
    assert refused(batches, mixed).reason == "helper lost"
    assert refused(batches, batches.intent(*early[1:], late[0])).reason == "helper lost"


def test_devices_seal_to_a_key_until_it_is_deleted(batches: Batches) -> None:
    old = batches.helper.key
    assert old.until == 1000 + 100 + 100
    batches.now += 100.5
    batches.helper.rotate()
    batches.now = old.until
    with pytest.raises(BadSeal, match="expired"):
        old.check(batches.policy, batches.now)
    batches.helper.key.check(batches.policy, batches.now)


def test_a_deleted_key_is_in_no_file(batches: Batches) -> None:
    def written() -> bytes:
        return b"".join(one.read_bytes() for one in batches.path.parent.iterdir())

    [secret] = batches.store.epochs().values()
    assert secret.private in written()
    batches.now += 100.5
    batches.helper.rotate()
    batches.now += 100.5
    batches.helper.rotate()
    assert secret.private not in written()


def test_a_helper_that_lost_its_store_opens_nothing_old(batches: Batches) -> None:
    """It can't know what it opened: open tasks end, and no task is opened twice."""
    intent = batches.intent(*map(batches.trained, range(3)))
    batches.helper.open(intent)
    batches.store.close()
    batches.path.unlink()
    batches.start()
    assert refused(batches, intent).reason == "helper lost"
    batches.helper.open(batches.intent(*(batches.trained(n, f"new-{n}") for n in range(3))))


def test_the_memory_does_not_depend_on_the_number_of_updates(make: Make) -> None:
    batches = make(parameters=100_000, max_batch=20, sigma=0.5)
    peaks = []
    for begin, end in ((0, 4), (4, 24)):
        intent = batches.intent(*map(batches.trained, range(begin, end)))
        batches.sent.clear()
        tracemalloc.start()
        batches.helper.open(intent)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]


def test_a_hybrid_policy_opens_too(make: Make) -> None:
    batches = make(kem="mlkem768-x25519", sigma=0.0)
    intent = batches.intent(*map(batches.trained, range(3)))
    np.testing.assert_array_equal(batches.opened(intent), batches.plain(intent))


def test_what_the_server_holds_of_a_device_is_noise_to_it(make: Make) -> None:
    """Masked words of an update agree with no candidate; the seed would tell at once."""
    batches = make(parameters=20_000, sigma=0.0)
    update = batches.trained(0)
    words = np.frombuffer(batches.sent["task-0"], "<u4").astype(np.float64)
    assert abs(np.corrcoef(words, batches.values["task-0"])[0, 1]) < 4 / np.sqrt(20_000)
    [secret] = batches.store.epochs().values()
    seed = secret.seed_of(update, "x25519")
    told = np.frombuffer(batches.sent["task-0"], "<u4") - masked(np.zeros(20_000, np.int64), seed)
    np.testing.assert_array_equal(told.view(np.int32), batches.values["task-0"])


def test_a_roster_with_another_key_for_a_device_refuses_it(batches: Batches) -> None:
    helper = Helper(
        batches.policy,
        KeyRoster({**ROSTER.keys, 1: ROSTER.keys[2]}),
        HELPER,
        batches.store,
        epoch_s=1e9,
        keep_s=1e9,
        now=lambda: batches.now,
    )
    with pytest.raises(NotOpened, match="not signed by device 1"):
        helper.open(batches.intent(*map(batches.trained, range(3))))
