"""Journals of private runs, made without a service: devices, updater and helper by hand.

python -m tests.private.journalled      # writes those of this release to tests/data/journals
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstream.core.layout import Model, Payload
from fedstream.journal import SumOpened, Taken
from fedstream.journal.progress import open_sum, take
from fedstream.journal.records import PRIVATE_SUMS, WIRE_FORMATS
from fedstream.private.masks import packed, rounded, sum_of_masks, unpacked
from fedstream.private.sealing import Intent, SealedUpdate, seal
from fedstream.strategies import FedBuffSettings, Strategy
from fedstream.strategies.optimizers import Adam
from fedstream.strategies.private_sums import PrivateSums, PrivateTerms, words_of
from tests.journals import GOLDEN, Scribe, keep_golden
from tests.private.enrolled import DEVICES, epoch_of, policy_of
from tests.support import layout_of

EACH = 3
SIZE = 50
POLICY = policy_of(parameters=SIZE, sigma=0.0, max_batch=6, participations=1000, weights=(2, 2, 1))


class PrivateScribe(Scribe):
    """A run of masked updates; ``values`` are the plain ones, by task."""

    def __init__(
        self, folder: Path, rule: Strategy | None = None, *, terms: Any = None, **head: Any
    ) -> None:
        rule = rule or FedBuffSettings(buffer_size=EACH)
        mine = PrivateSums.of(rule, PrivateTerms(policy=POLICY, **({"per": 0.5} | (terms or {}))))
        self.secret, self.key = epoch_of(POLICY)
        self.values: dict[str, NDArray[np.int64]] = {}
        needs = (PRIVATE_SUMS, WIRE_FORMATS)
        about: dict[str, Any] = {"devices": 20, "needs": needs}
        super().__init__(folder, mine, layout=layout_of(SIZE), **about | head)

    def update(
        self, device: int | None = None, *, late: int = 0, malformed: bool = False, **changes: Any
    ) -> Taken:
        """A masked update arrives; ``malformed``: of other words than the device sealed."""
        values = rounded((self.rng.standard_normal(SIZE) / 8).astype(np.float32), POLICY, self.rng)
        about: dict[str, Any] = {
            "task": f"task-{self.records}",
            "attempt": "a1",
            "device": self.records % 10,
        }
        about |= changes | ({} if device is None else {"device": device})
        tau = max(0, self.version - late)
        data, sealed = seal(
            values,
            POLICY,
            self.key,
            DEVICES[about["device"]],
            run=self.head.lineage,
            tau=tau,
            layout=self.layout.signature,
            now=1.0,
            **about,
        )
        sent = Payload(np.frombuffer(data[::-1] if malformed else data, np.uint8))
        self.values[about["task"]] = values
        told = {
            "format": "mask32",
            "samples": 0,
            "steps": 0,
            "loss": None,
            "sealed": sealed.encode(),
        }
        upload = self._upload(about.pop("device"), sent, late, **about, **told)
        model = Model(self.layout)
        words_of(model)[:] = unpacked(sent.buffer.tobytes(), POLICY)
        step = take(self.strategy, self.progress, upload, model, Model(self.layout))
        assert step.decision
        made = self._made(step)
        return self._taken(
            upload, sent, outcome=step.decision.outcome, weight=step.decision.weight, **made
        )

    def opens(self, refused: str = "") -> SumOpened:
        """The helper opens the batch's sum, or refuses it."""
        before = self.progress
        updates = tuple(SealedUpdate.decode(one) for one in before.sealed)
        weights = tuple(int(one.weight) for one in before.in_sum)
        intent = Intent(
            run=self.head.lineage,
            policy=POLICY.digest,
            version=self.version,
            updates=updates,
            weights=weights,
        )
        sent, masks = None, None
        if not refused:
            seeds = (self.secret.seed_of(one, POLICY.kem) for one in updates)
            words = sum_of_masks(zip(seeds, weights, strict=True), None, SIZE)
            sent, masks = Payload(np.frombuffer(packed(words, POLICY), np.uint8)), None
            masks = Model(self.layout)
            words_of(masks)[:] = words
        step = open_sum(self.strategy, before, masks, refused)
        made = self._made(step)
        self.records += 1
        record = SumOpened(
            intent=intent.digest,
            updates=len(updates),
            reason=step.dropped,
            format="mask32",
            masks=sent.digest(self.made_by) if sent is not None else None,
            time=self._time,
            **made,
        )
        self.writer.append(record, *([] if sent is None else [sent]))
        return record

    def fills(self, updates: int = EACH, **changes: Any) -> SumOpened:
        """A batch of updates arrives, and is opened."""
        for _ in range(updates):
            self.update(**changes)
        return self.opens()


def private_run(folder: Path, rule: Strategy | None = None, **head: Any) -> PrivateScribe:
    """Five versions in two segments: stale updates, a dropped sum, and one that was refused."""
    scribe = PrivateScribe(folder, rule, **head)
    scribe.fills()
    scribe.update(malformed=True)
    scribe.fills(EACH - 1)
    scribe.fills()
    scribe.update()
    scribe.segment(epoch=3)
    scribe.fills(EACH - 1, late=1)
    for _ in range(EACH):
        scribe.update()
    scribe.opens(refused="overlap")
    scribe.fills()
    scribe.fills()
    scribe.close()
    return scribe


def run_in_buckets(folder: Path, rule: Strategy | None = None, **head: Any) -> PrivateScribe:
    """Two versions of three buckets; a segment begins, and a sum is dropped, in the midst."""
    terms = {"buckets": 3} | head.pop("terms", {"over": "median"})
    rule = rule or FedBuffSettings(buffer_size=3 * EACH)
    scribe = PrivateScribe(folder, rule, terms=terms, **head)
    for bucket in range(7):
        if bucket == 4:
            for device in range(EACH):
                scribe.update(20 + device)
            scribe.opens(refused="overlap")
        for one in range(EACH):
            scribe.update(EACH * bucket + one)
            if one == 0 and bucket in (1, 5):
                scribe.segment()
        scribe.opens()
    scribe.close()
    return scribe


def write_golden() -> None:
    """A private run by an optimizer, and one of buckets by their geometric median.

    Those that are there stay.
    """
    for name, run, terms in (
        ("private", private_run, {}),
        ("private-buckets", run_in_buckets, {"over": "geometric median"}),
    ):
        n = 1 if run is private_run else 3
        if not (GOLDEN / name).exists():
            rule = FedBuffSettings(buffer_size=n * EACH, server_lr=0.5, server=Adam())
            keep_golden(run(GOLDEN / name, rule, terms=terms))


if __name__ == "__main__":
    write_golden()
