"""The privacy officer's statement: everything in it is computed again from the journal."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.core.formats import format_of
from fedstream.core.layout import Model, Payload
from fedstream.history.privacy import statement
from fedstream.journal import SumOpened, opened
from fedstream.journal.progress import open_sum, take
from fedstream.journal.records import PRIVATE_SUMS
from fedstream.private.masks import masked, packed, rounded, sum_of_masks
from fedstream.private.policy import PrivacyPolicy
from fedstream.strategies import FedBuffSettings
from fedstream.strategies.private_sums import PrivateSums, PrivateTerms
from tests.fedstream.conftest import Command
from tests.journals import Scribe
from tests.private.enrolled import policy_of
from tests.support import layout_of

K = 3


class PrivateScribe(Scribe):
    """A private run whose every batch is masked, opened and written down."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.policy: PrivacyPolicy = policy_of(max_batch=K, **changes)
        self.seeds: list[tuple[bytes, int]] = []
        rule = PrivateSums.of(FedBuffSettings(buffer_size=K), PrivateTerms(policy=self.policy))
        layout = layout_of(self.policy.parameters)
        super().__init__(folder, rule, layout=layout, needs=(PRIVATE_SUMS,))

    def batch(
        self, *devices: int, late: int = 0, refused: str = "", malformed: bool = False
    ) -> None:
        """A batch of these devices' updates is buffered, and its sum opened, or ``refused``."""
        for device in devices:
            self._buffer(device, late)
        words = sum_of_masks(self.seeds, None, self.policy.parameters)
        if malformed:
            words = words + np.arange(words.size, dtype=np.uint32) * 1_000_003
        self.seeds = []
        sent = None if refused else Payload(np.frombuffer(packed(words, self.policy), np.uint8))
        masks = None if sent is None else self._decoded(sent)
        step = open_sum(self.strategy, self.progress, masks, refused)
        record = SumOpened(
            intent="ab" * 32,
            updates=len(devices),
            reason=step.dropped,
            format="mask32",
            masks=None if sent is None else sent.digest("sha256"),
            time=self._time,
            **self._made(step),
        )
        self.writer.append(record, *([sent] if sent else []))

    def _buffer(self, device: int, late: int) -> None:
        delta = self.rng.standard_normal(self.policy.parameters).astype(np.float32)
        seed = os.urandom(32)
        words = masked(rounded(delta, self.policy, self.rng), seed)
        sent = Payload(np.frombuffer(packed(words, self.policy), np.uint8))
        upload = self._upload(
            device, sent, late, format="mask32", sealed=b"sealed", samples=0, steps=0, loss=None
        )
        model = self._decoded(sent)
        step = take(self.strategy, self.progress, upload, model, Model(self.layout))
        assert step.decision
        self.seeds.append((seed, int(step.decision.weight)))
        made = self._made(step)
        self._taken(upload, sent, outcome="buffered", weight=step.decision.weight, **made)

    def _decoded(self, sent: Payload) -> Model:
        model = Model(self.layout)
        format_of("mask32").decode(sent.buffer, model)
        return model


def of(folder: Path, delta: float = 1e-5) -> Any:
    with opened(folder) as chain:
        return statement(chain, delta)


def test_ten_batches_at_sigma_four(tmp_path: Path, command: Command) -> None:
    """The known answer, across segments: 3.617, and 3.341 by the exact formula."""
    scribe = PrivateScribe(tmp_path / "journal", sigma=4.0, participations=12)
    for n in range(10):
        scribe.batch(0, 1 + n % 3, 4 + n % 5)
        if n in (3, 6):
            scribe.segment()
    scribe.close()
    found = of(tmp_path)
    assert (found.opened, found.dropped) == (10, {})
    worst = found.worst
    assert (worst.device, worst.sums, worst.squares, worst.left) == (0, 10, 10, 2)
    assert worst.epsilon == pytest.approx(3.617, abs=5e-4)
    assert found.exact_epsilon == pytest.approx(3.341, abs=5e-4)
    assert found.by_device[-1].epsilon == 0  # device 9 was in no sum
    code, out, _ = command("privacy", tmp_path)
    assert code == 0
    for said in ("3.617 at delta 1e-05", "3.341", found.policy.digest, "10 sums", "zero-out"):
        assert said in out
    table = tmp_path / "devices.csv"
    code, out, _ = command("privacy", tmp_path, "--json", "--csv", table)
    numbers = json.loads(out)
    assert numbers["epsilon"] == worst.epsilon
    assert len(numbers["devices"]) == 10
    with table.open() as file:
        assert [int(row["sums"]) for row in csv.DictReader(file)][:2] == [10, 4]
    assert command("privacy", tmp_path, "--csv", table)[0] == 2  # it is not overwritten


def test_dropped_batch_counts_if_it_was_opened(tmp_path: Path) -> None:
    """The server has the masks of a sum out of range, and nothing of a refused one."""
    scribe = PrivateScribe(tmp_path / "journal", sigma=2.0)
    scribe.batch(0, 1, 2, malformed=True)
    scribe.batch(0, 3, 4, refused="seal")
    scribe.batch(0, 5, 6)
    scribe.close()
    found = of(tmp_path)
    assert (found.opened, found.versions) == (2, 1)
    assert found.dropped == {"sum out of range": 1, "seal": 1}
    sums = {one.device: one.sums for one in found.by_device}
    assert sums == {0: 2, 1: 1, 2: 1, 5: 1, 6: 1, 3: 0, 4: 0, 7: 0, 8: 0, 9: 0}


def test_staler_updates_cost_less(tmp_path: Path) -> None:
    """By the squares of the policy's weights, and a device is refused at the largest one."""
    scribe = PrivateScribe(tmp_path / "journal", weights=(2, 1), participations=1, min_batch=2)
    scribe.batch(7, 8, 9)
    scribe.batch(0, 1, 2, late=1)
    scribe.close()
    by_device = {one.device: one for one in of(tmp_path).by_device}
    assert [(one.squares, one.left) for one in (by_device[7], by_device[0])] == [(4, 0), (1, 0)]
    assert by_device[7].rho == pytest.approx(4 * by_device[0].rho)


def test_older_segments_may_be_gone(tmp_path: Path, command: Command) -> None:
    """The accounts are in each segment's beginning; the reasons of dropped batches are not."""
    scribe = PrivateScribe(tmp_path / "journal", sigma=1.0)
    scribe.batch(0, 1, 2)
    scribe.batch(0, 1, 2, refused="overlap")
    scribe.segment()
    scribe.batch(0, 1, 2)
    scribe.close()
    whole = of(tmp_path)
    min((tmp_path / "journal").glob("*.journal")).unlink()
    left = of(tmp_path)
    assert left.accounts == whole.accounts
    assert left.opened == 2
    assert left.dropped == {"before the oldest segment": 1}
    assert "1 sum: 1 before the oldest segment" in command("privacy", tmp_path)[1]


def test_without_noise_there_is_no_differential_privacy(tmp_path: Path, command: Command) -> None:
    scribe = PrivateScribe(tmp_path / "journal", sigma=0.0)
    scribe.batch(0, 1, 2)
    scribe.close()
    assert "there is NO differential privacy" in command("privacy", tmp_path)[1]
    numbers = json.loads(command("privacy", tmp_path, "--json")[1])
    assert (numbers["is_private"], numbers["epsilon"]) == (False, None)


def test_adopted_model_is_told(tmp_path: Path, command: Command) -> None:
    scribe = PrivateScribe(tmp_path / "journal")
    scribe.batch(0, 1, 2)
    scribe.adopt()
    scribe.close()
    assert "THE JOURNAL IS NOT WHOLE" in command("privacy", tmp_path)[1]


def test_run_that_is_not_private(tmp_path: Path, command: Command) -> None:
    scribe = Scribe(tmp_path / "journal")
    scribe.update()
    scribe.close()
    said = f"{tmp_path}: not a private run: the server saw every single update\n"
    assert command("privacy", tmp_path) == (0, said, "")
    assert command("privacy", tmp_path, "--json") == (0, "null\n", "")
