"""Attacks on one device's update: each succeeds without its check, and is refused with it.

The attacker is the server: it has all masked updates and sealed seeds, chooses every intent, and
knows the values of devices of its own. Where a test shows what a missing check would have opened,
:func:`unchecked` is the helper: it opens whatever it is asked for, without noise.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedstream.core.errors import ConfigError
from fedstream.helper.store import HelperStore
from fedstream.private import noise
from fedstream.private.masks import add_masked, masked, rounded, sum_of_masks, unmasked, unpacked
from fedstream.private.sealing import SUITES, BadSeal, EpochSecret, SealedUpdate, seal
from tests.helper.batches import RUN, Batches, refused
from tests.helper.conftest import Make
from tests.private.enrolled import DEVICES, HELPER, key_of, policy_of

Values = NDArray[np.int64]
VICTIM = "task-0"


@pytest.fixture
def batches(make: Make) -> Batches:
    return make(parameters=2000, min_batch=4)


def unchecked(
    batches: Batches, *updates: SealedUpdate, weights: tuple[int, ...] | None = None
) -> Values:
    """The sum that the server would get of a helper without checks."""
    policy, weights = batches.policy, weights or (1,) * len(updates)
    secrets = batches.store.epochs()
    total, seeds = np.zeros(policy.parameters, np.uint32), []
    for one, weight in zip(updates, weights, strict=True):
        seeds.append((secrets[one.epoch].seed_of(one, policy.kem), weight))
        add_masked(total, unpacked(batches.sent[one.task], policy), weight)
    return unmasked(total, sum_of_masks(seeds, None, policy.parameters), policy)


def is_victims(batches: Batches, found: Values) -> bool:
    return np.array_equal(found, batches.values[VICTIM])


def correlation(first: Any, second: Any) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def signed_by(update: SealedUpdate, key: Any, **changes: Any) -> SealedUpdate:
    """A sealed update that someone has changed and signed."""
    changed = update.model_copy(update=changes)
    return changed.model_copy(update={"signature": key.sign(changed.signed)})


# Sums that differ by one device.


def test_two_overlapping_batches(batches: Batches) -> None:
    updates = [batches.trained(device) for device in range(5)]
    difference = unchecked(batches, *updates) - unchecked(batches, *updates[1:])
    assert is_victims(batches, difference)
    batches.helper.open(batches.intent(*updates))
    assert refused(batches, batches.intent(*updates[1:])).reason == "overlap"


def test_retries_of_the_same_tasks(batches: Batches) -> None:
    """A retry has the same update under another seed, so its message is another one."""
    updates = [batches.trained(device) for device in range(5)]
    whole = unchecked(batches, *updates)
    retries = [batches.trained(device, attempt="2") for device in range(1, 5)]
    assert is_victims(batches, whole - unchecked(batches, *retries))
    again = [batches.trained(device) for device in range(5)]
    batches.helper.open(batches.intent(*again))
    assert refused(batches, batches.intent(*retries)).reason == "overlap"


def test_a_retry_with_the_seed_of_the_first_attempt(batches: Batches) -> None:
    """A two-time pad needs no helper: the difference of two answers of the victim is in clear."""
    policy, rng = batches.policy, np.random.default_rng(0)
    seed = bytes(range(32))
    first, second = (
        rounded(rng.standard_normal(2000).astype(np.float32), policy, rng) for _ in range(2)
    )
    leaked = unmasked(masked(first, seed), masked(second, seed), policy)
    np.testing.assert_array_equal(leaked, first - second)

    sent = []
    for attempt in ("1", "2"):
        batches.trained(0, attempt=attempt)
        sent.append(unpacked(batches.sent[VICTIM], policy))
    pads = unmasked(sent[0], sent[1], policy)  # the values are the same, so all of it is pad
    assert np.abs(pads).mean() == pytest.approx(1 << (policy.word_bits - 2), rel=0.1)


def test_copies_of_an_update_under_other_tasks(batches: Batches) -> None:
    """Three devices that help the server sign copies: the sum would be four times the victim's."""
    policy, [secret] = batches.policy, batches.store.epochs().values()
    victim, *helping = map(batches.trained, (0, 5, 6, 7))
    seed = secret.seed_of(victim, "x25519")
    public = X25519PrivateKey.from_private_bytes(secret.private).public_key()
    unbound = SUITES["x25519"].encrypt(seed, public, b"")  # opens under any name
    found = SUITES["x25519"].decrypt(unbound, X25519PrivateKey.from_private_bytes(secret.private))
    words, streams = unpacked(batches.sent[VICTIM], policy), sum_of_masks([(found, 4)], None, 2000)
    np.testing.assert_array_equal(unmasked(4 * words, streams, policy), 4 * batches.values[VICTIM])

    moved = [victim.model_copy(update={"task": one.task}) for one in helping]
    renamed = [
        one.model_copy(update={"device": n}) for n, one in zip((5, 6, 7), moved, strict=True)
    ]
    assert refused(batches, batches.intent(victim, *renamed)).reason == "signature"
    copies = [signed_by(one, DEVICES[one.device]) for one in renamed]
    assert refused(batches, batches.intent(victim, *copies)).reason == "seal"


# Sums in which the other devices don't hide the victim.


def test_a_batch_of_invented_devices(batches: Batches) -> None:
    """The server knows the updates of K - 1 devices that it made up."""
    victim, *others = map(batches.trained, range(5))
    found = unchecked(batches, victim, *others)
    known = sum((batches.values[one.task] for one in others), np.zeros(1, np.int64))
    assert is_victims(batches, found - known)

    thief = key_of(900)
    strangers = [signed_by(one, thief, device=one.device + 100) for one in others]
    assert refused(batches, batches.intent(victim, *strangers)).reason == "not in roster"
    forged = [signed_by(one, thief) for one in others]
    assert refused(batches, batches.intent(victim, *forged)).reason == "signature"
    helping = [batches.trained(1, f"helping-{n}") for n in range(4)]
    assert refused(batches, batches.intent(victim, *helping)).reason == "twice"


def test_a_batch_that_is_too_small(batches: Batches) -> None:
    victim = batches.trained(0)
    assert is_victims(batches, unchecked(batches, victim))
    updates = [victim, *map(batches.trained, (1, 2))]
    assert refused(batches, batches.intent(*updates)).reason == "too few"


def test_weights_that_let_the_victim_stand_out(make: Make) -> None:
    """At 15, 1, ..., 1, also a batch of a hundred shows it: a correlation of .83."""
    rng = np.random.default_rng(0)
    hundred = rng.standard_normal((100, 20_000))
    shown = 14 * hundred[0] + hundred.sum(axis=0)
    assert correlation(shown, hundred[0]) == pytest.approx(15 / np.sqrt(225 + 99), abs=0.01)

    batches = make(parameters=2000, min_batch=4, weights=(15, 1), max_batch=40)
    updates = [batches.trained(device, tau=7 - bool(device)) for device in range(40)]
    intent = batches.intent(*updates)
    found = unchecked(batches, *updates, weights=intent.weights)
    assert correlation(found, batches.values[VICTIM]) > 0.9
    assert "add up to 54 with one of 15" in str(refused(batches, batches.intent(*updates)))


def test_weights_of_zero(batches: Batches) -> None:
    updates = [batches.trained(device) for device in range(5)]
    weights = (1, 0, 0, 0, 0)
    assert is_victims(batches, unchecked(batches, *updates, weights=weights))
    assert refused(batches, batches.intent(*updates, weights=weights)).reason == "weights"


def test_a_laxer_policy(batches: Batches) -> None:
    """The server's own, which opens two devices without noise: the other one is the server's."""
    victim, helping = batches.trained(0), batches.trained(1)
    found = unchecked(batches, victim, helping)
    assert is_victims(batches, found - batches.values["task-1"])
    laxer = policy_of(parameters=2000, min_batch=2, sigma=0.0)
    relabelled = [
        signed_by(one, DEVICES[one.device], policy=laxer.digest) for one in (victim, helping)
    ]
    for updates in ((victim, helping), relabelled):
        intent = batches.intent(*updates, policy=laxer.digest)
        assert refused(batches, intent).reason == "policy"
    [secret] = batches.store.epochs().values()
    with pytest.raises(BadSeal, match="the seed was not sealed for this update"):
        secret.seed_of(relabelled[0], "x25519")  # also a helper of the laxer policy can't
    with pytest.raises(BadSeal, match="the helper's key is for policy"):
        secret.announced(laxer, HELPER, 1 << 40).check(batches.policy, 0)


# Noise that is averaged away.


def test_a_batch_that_is_asked_for_again_and_again(batches: Batches) -> None:
    """With new noise each time, a hundred answers would leave a tenth of it."""
    updates = [batches.trained(device) for device in range(5)]
    intent, sigma = batches.intent(*updates), batches.policy.noise_sigma
    fresh = [noise.draw(bytes([n]) * 32, 2000, sigma) for n in range(100)]
    assert np.mean(fresh, axis=0).std() == pytest.approx(sigma / 10, rel=0.1)
    assert len({batches.helper.open(intent) for _ in range(10)}) == 1
    batches.restart()
    added = batches.opened(intent) - batches.plain(intent)
    assert added.std() == pytest.approx(sigma, rel=0.1)
    for other in (
        batches.intent(*reversed(updates)),
        batches.intent(*updates, version=8),
        batches.intent(signed_by(updates[0], DEVICES[0], attempt="2"), *updates[1:]),
    ):
        assert refused(batches, other).reason in ("overlap", "seal")


def test_a_device_that_is_asked_again_and_again(make: Make) -> None:
    """In many batches of new tasks, its updates tell ever more of its data: the budget ends it."""
    batches = make(parameters=20, participations=3)
    for turn in range(4):
        updates = [batches.trained(0, f"{turn}-0")]
        updates += [batches.trained(3 * turn + n, f"{turn}-{n}") for n in (1, 2, 3)]
        intent = batches.intent(*updates)
        if turn < 3:
            batches.helper.open(intent)
    assert refused(batches, intent).about == {"device": 0}


# Secrets and stores.


def test_a_store_that_is_put_back(make: Make) -> None:
    """A snapshot of the disk opens all again: the helper can't know. A copied file, it refuses."""
    batches = make(sigma=0.0)
    updates = [batches.trained(device) for device in range(4)]
    backup = batches.path.with_name("backup")
    shutil.copy(batches.path, backup)
    count = batches.path.with_name(f"{batches.path.name}-count")
    counted = count.read_bytes()
    first = batches.opened(batches.intent(*updates))
    batches.store.close()
    batches.path.write_bytes(backup.read_bytes())  # into the same file
    with pytest.raises(ConfigError, match="is a copy: it may not know all tasks"):
        HelperStore(batches.path, batches.policy)
    count.write_bytes(counted)  # as a snapshot: both files
    batches.start()
    assert is_victims(batches, first - batches.opened(batches.intent(*updates[1:])))

    batches.store.close()
    backup.replace(batches.path)
    with pytest.raises(ConfigError, match="is a copy: it may not know all tasks"):
        HelperStore(batches.path, batches.policy)
    batches.path.unlink()
    batches.start()
    assert refused(batches, batches.intent(*updates)).reason == "helper lost"


def test_an_epochs_key_that_leaked_after_its_end(batches: Batches) -> None:
    """It opens that epoch's updates, and nothing that is sealed later: shown to its end."""
    [leaked] = batches.store.epochs().values()
    old = batches.helper.key
    early = batches.trained(0)
    seed = leaked.seed_of(early, "x25519")
    words = unpacked(batches.sent[VICTIM], batches.policy)
    stream = sum_of_masks([(seed, 1)], None, 2000)
    assert is_victims(batches, unmasked(words, stream, batches.policy))

    for _ in range(2):
        batches.now += 100.5
        batches.helper.rotate()
    late = batches.trained(0)
    assert leaked.epoch not in batches.helper.epochs
    with pytest.raises(BadSeal):
        leaked.seed_of(late, "x25519")
    others = [batches.trained(device) for device in (1, 2, 3)]
    assert refused(batches, batches.intent(early, *others)).reason == "helper lost"
    about: dict[str, Any] = {
        "run": RUN,
        "task": "t",
        "attempt": "1",
        "device": 0,
        "tau": 7,
        "layout": "l",
    }
    values = batches.values[VICTIM]
    assert batches.now > old.until
    with pytest.raises(BadSeal, match="expired"):
        seal(values, batches.policy, old, DEVICES[0], now=batches.now, **about)
    # A device without that check would seal to the key that leaked.
    _, update = seal(values, batches.policy, old, DEVICES[0], now=old.until - 1, **about)
    assert len(leaked.seed_of(update, "x25519")) == 32


def test_a_key_that_the_server_announces(batches: Batches) -> None:
    """A device that seals to it has no secret left."""
    mine = EpochSecret.new("x25519")
    announced = mine.announced(batches.policy, key_of(900), 1 << 40)
    with pytest.raises(BadSeal, match="the epoch's key is not the helper's"):
        announced.check(batches.policy, batches.now)
