"""Random histories: a helper is killed, emptied, asked twice, late, and for forbidden sums."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from fedstream.helper.opening import NotOpened
from fedstream.private.policy import PrivacyPolicy
from fedstream.private.sealing import Intent, SealedUpdate
from tests.helper.batches import Batches
from tests.private.enrolled import DEVICES, policy_of

SEEDS = 10  # 300 have been played
STEPS = 40
POLICIES = {
    "no noise": policy_of(parameters=4, sigma=0.0, participations=6),
    "correlated": policy_of(parameters=4, bands=3, participations=6),
}


class History:
    """What the server did and got; it keeps every update and every intent."""

    def __init__(self, seed: int, folder: Path, policy: PrivacyPolicy) -> None:
        self.rng, self.policy = random.Random(seed), policy
        self.batches = Batches(folder / f"{seed}.sqlite", policy)
        self.updates: list[SealedUpdate] = []
        self.intents: list[Intent] = []
        self.answers: dict[str, bytes] = {}
        self.opened_in: dict[str, str] = {}  # task -> the one intent that it was opened in
        self.taken: dict[int, int] = {}  # device -> batches, by the store that is there

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.35:
            self.train()
        elif choice < 0.75:
            self.ask(self.new_intent())
        elif choice < 0.85 and self.intents:
            self.ask(self.rng.choice(self.intents))  # late, or twice
        elif choice < 0.91:
            self.batches.restart()
        elif choice < 0.93:
            self.lose_store()
        elif choice < 0.97:
            self.crash_before_the_answer()
        else:
            self.batches.now += self.rng.choice((50.0, 150.0))
            self.batches.helper.rotate()

    def train(self) -> None:
        for device in self.rng.sample(range(len(DEVICES)), 5):
            task = f"task-{len(self.batches.values)}"
            self.updates.append(self.batches.trained(device, task))

    def new_intent(self) -> Intent:
        """An intent, mostly of new tasks; some intents overlap opened ones, or are too small."""
        new = [one for one in self.updates if one.task not in self.opened_in]
        pool = self.updates if self.rng.random() < 0.2 else new[-8:]
        count = min(len(pool), self.rng.randint(2, 6))
        intent = self.batches.intent(*self.rng.sample(pool, count))
        self.intents.append(intent)
        return intent

    def ask(self, intent: Intent) -> None:
        try:
            answer = self.batches.helper.open(intent)
        except NotOpened as error:
            self.refused(intent, error)
            return
        assert len(intent.updates) >= self.policy.min_batch
        self.note(intent)
        assert self.answers.setdefault(intent.digest, answer) == answer
        added = self.batches.opened(intent) - self.batches.plain(intent)
        assert added.any() == bool(self.policy.sigma)
        assert np.linalg.norm(added) <= self.policy.sum_bound(0)

    def refused(self, intent: Intent, error: NotOpened) -> None:
        """A batch that overlaps is told of the one that was opened."""
        if error.reason == "overlap":
            assert error.about["intent"] != intent.digest
            assert self.opened_in[error.about["task"]] == error.about["intent"]

    def note(self, intent: Intent) -> None:
        """No task is opened twice, and no device more often than the policy allows."""
        if intent.digest in self.opened_in.values():
            return
        for update in intent.updates:
            assert update.task not in self.opened_in, f"{update.task} was opened twice"
            self.opened_in[update.task] = intent.digest
            self.taken[update.device] = self.taken.get(update.device, 0) + 1
            assert self.taken[update.device] <= self.policy.participations

    def crash_before_the_answer(self) -> None:
        """The batch is on disk, the answer never left."""
        intent = self.new_intent()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fedstream.helper.service.sum_of_masks", _killed)
            try:
                self.batches.helper.open(intent)
            except NotOpened:
                return
            except KeyboardInterrupt:
                self.note(intent)
        self.batches.restart()

    def lose_store(self) -> None:
        self.batches.store.close()
        self.batches.path.unlink()
        self.batches.start()
        self.taken.clear()


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_no_task_is_opened_twice_whatever_happens(seed: int, policy: str, tmp_path: Path) -> None:
    history = History(seed, tmp_path, POLICIES[policy])
    for _ in range(STEPS):
        history.step()
    for intent in history.intents:  # everything again, late
        history.ask(intent)
    spent = {device: history.batches.store.spent(device)[1] for device in history.taken}
    assert spent == history.taken
    history.batches.store.close()
    assert history.answers
