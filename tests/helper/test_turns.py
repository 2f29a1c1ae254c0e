"""Correlated noise in the helper: a run's batches take turns, whatever happens to the helper."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedstream.helper.opening import NotOpened
from fedstream.private import noise
from fedstream.private.sealing import Intent
from tests.helper.batches import RUN, Batches
from tests.helper.conftest import Make

BANDS = 3


@pytest.fixture
def batches(make: Make) -> Batches:
    return make(bands=BANDS, parameters=30, participations=100)


def batch_of(batches: Batches, turn: int, run: str = RUN) -> Intent:
    """A batch of devices that were in none of the two before it."""
    devices = [3 * (turn % BANDS) + n for n in range(3)]
    updates = [batches.trained(device, f"{run}-{turn}-{device}", run=run) for device in devices]
    return batches.intent(*updates, run=run)


def noise_of(batches: Batches, intent: Intent) -> NDArray[np.int64]:
    return batches.plain(intent) - batches.opened(intent)


def drawn(batches: Batches, intent: Intent) -> NDArray[np.int64]:
    """What the newest epoch draws for an intent, in steps."""
    *_, secret = batches.store.epochs().values()
    key = noise.noise_key(secret.noise, intent.digest)
    return noise.draw(key, 30, batches.policy.noise_sigma)


def test_a_batchs_noise_takes_back_that_of_the_two_before(batches: Batches) -> None:
    """By the definition, over six turns; a run of its own has turns of its own."""
    before: list[NDArray[np.int64]] = []
    for turn in range(6):
        intent = batch_of(batches, turn)
        z = drawn(batches, intent)
        for factor, one in zip((128, 96), before[::-1], strict=False):
            z = z - factor * one
        before.append(noise_of(batches, intent))
        np.testing.assert_array_equal(before[-1], np.floor_divide(z + 128, 256))
    other = batch_of(batches, 0, run="other")
    first = np.floor_divide(drawn(batches, other) + 128, 256)
    np.testing.assert_array_equal(noise_of(batches, other), first)


def test_a_killed_helper_goes_on_with_the_same_bytes(make: Make) -> None:
    """Killed after each answer, and once before the answer left and once before the record."""
    intents, answers = [], []
    batches = make(bands=BANDS, parameters=30, participations=100)
    for turn in range(5):
        intents.append(batch_of(batches, turn))
        with pytest.MonkeyPatch.context() as patched:
            place = {1: "service.sum_of_masks", 3: "store.HelperStore._refuse_too_soon"}.get(turn)
            if place is not None:
                patched.setattr(f"fedstream.helper.{place}", _killed)
                with pytest.raises(KeyboardInterrupt):
                    batches.helper.open(intents[-1])
        batches.restart()
        answers.append(batches.helper.open(intents[-1]))
        batches.restart()
        assert batches.helper.open(intents[-1]) == answers[-1]
    rows = batches.store._database.execute("SELECT intent FROM turns").fetchall()
    assert rows == [(one.digest,) for one in intents[-2:]]


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_device_sits_out_while_its_batchs_noise_is_taken_back(batches: Batches) -> None:
    """Its update would be in two of the sums that one draw hides."""
    batches.helper.open(batch_of(batches, 0))
    for turn in (1, 2):
        updates = [batches.trained(device, f"soon-{turn}-{device}") for device in (15, 16, 0)]
        with pytest.raises(NotOpened, match="device 0 is in one of the run's last 2") as caught:
            batches.helper.open(batches.intent(*updates))
        assert caught.value.reason == "too soon"
        assert caught.value.about == {"device": 0}
        assert batches.store.spent(15) == (0, 0)
        if turn == 1:
            others = [batches.trained(device, run="other") for device in (0, 1, 2)]
            batches.helper.open(batches.intent(*others, run="other"))
        batches.helper.open(batch_of(batches, turn))
    updates = [batches.trained(device, f"late-{device}") for device in (15, 16, 0)]
    batches.helper.open(batches.intent(*updates))


def test_what_the_check_prevents(make: Make) -> None:
    """The same update in neighbouring sums: all that hides it then is less than the policy says.

    The server weighs what it sees so that noise cancels. By the definition of sigma, the weighted
    noise is sigma for one participation; for two that are apart, sigma / sqrt(2).
    """
    batches = make(bands=BANDS, parameters=1, participations=100)
    c = np.array([256, 128, 96]) / 256
    together = np.convolve([1, 1, 0], c)  # C u of neighbours, and of sums that are apart
    apart = np.convolve([1, 0, 0, 1], c)
    sigma = batches.policy.noise_sigma / 256
    norms = [sigma / np.linalg.norm(one) for one in (together, apart)]
    assert norms[1] == pytest.approx(batches.policy.norm_bound / np.sqrt(2))
    assert norms[0] < 0.87 * norms[1]


def test_an_answer_is_repeated_while_its_noise_is_kept(batches: Batches) -> None:
    first, *others = (batch_of(batches, turn) for turn in range(3))
    answer = batches.helper.open(first)
    batches.helper.open(others[0])
    assert batches.helper.open(first) == answer
    batches.helper.open(others[1])
    with pytest.raises(NotOpened, match="opened long ago") as caught:
        batches.helper.open(first)
    assert caught.value.reason == "helper lost"


def test_an_epochs_noise_goes_with_its_key(batches: Batches) -> None:
    """A store that leaks tells no noise of ended epochs; the next batches don't take it back.

    The batch of the old epoch that is opened last takes those before it along: with a gap, one
    draw would be taken back twice.
    """
    late = batch_of(batches, 1)
    batches.now += 100.5
    batches.helper.rotate()
    batches.helper.open(batch_of(batches, 0))
    batches.helper.open(late)
    assert len(_turns(batches)) == 2
    batches.now += 100.5
    batches.helper.rotate()
    assert _turns(batches) == []
    intent = batch_of(batches, 2)
    first = np.floor_divide(drawn(batches, intent) + 128, 256)
    np.testing.assert_array_equal(noise_of(batches, intent), first)


def _turns(batches: Batches) -> list[tuple[str]]:
    return batches.store._database.execute("SELECT epoch FROM turns").fetchall()


def test_noise_that_was_deleted_is_in_no_file(batches: Batches) -> None:
    def written() -> bytes:
        return b"".join(one.read_bytes() for one in batches.path.parent.iterdir())

    intent = batch_of(batches, 0)
    data = noise_of(batches, intent).astype("<i4").tobytes()
    assert data in written()
    for turn in (1, 2):
        batches.helper.open(batch_of(batches, turn))
    assert data not in written()
