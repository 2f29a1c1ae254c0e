"""What secure aggregation costs: ``python -m benchmarks.private``.

Devices mask and seal, the helper opens, the server adds, unmasks and checks, all in one process on
one core, so two cores do better. The helper's memory is measured in processes of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.results import add_out, keep
from fedstream.helper.service import Helper
from fedstream.helper.store import HelperStore
from fedstream.private import noise
from fedstream.private.masks import add_masked, check_range, rounded, unmasked, unpacked
from fedstream.private.policy import KeyRoster, PrivacyPolicy
from fedstream.private.sealing import Intent, SealedUpdate, seal

PARAMETERS, BATCH, TURNS, BANDS = 61_706, 100, 5, 16
BATCHES = (10, 100, 1000)  # sizes at which the helper's memory is measured


class Place:
    """Devices, a helper and a server, and the time that each of them took."""

    def __init__(self, parameters: int, batch: int, store: Path, bands: int = 1) -> None:
        self.size = batch
        self.keys = [Ed25519PrivateKey.generate() for _ in range(batch * bands)]
        key = Ed25519PrivateKey.generate()
        roster = KeyRoster.of([one.public_key() for one in self.keys])
        self.policy = PrivacyPolicy.finest(
            roster=roster.digest,
            helper=key.public_key().public_bytes_raw().hex(),
            parameters=parameters,
            clip=1.0,
            min_batch=batch,
            max_batch=batch,
            weights=(1,) * 10,
            sigma=1.0,
            participations=1_000_000,
            bands=bands,
        )
        self.helper = Helper(
            self.policy, roster, key, HelperStore(store, self.policy), epoch_s=1e6, keep_s=1e6
        )
        self.rng = np.random.default_rng(0)
        self.took: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note the time of a block."""
        began = time.perf_counter()
        yield
        self.took[what].append(time.perf_counter() - began)

    def answer(self, device: int, turn: int) -> tuple[bytes, SealedUpdate]:
        """A device's sealed update, made from its delta."""
        delta = self.rng.standard_normal(self.policy.parameters).astype(np.float32)
        with self.timed("device: clip and round"):
            values = rounded(delta, self.policy, self.rng)
        with self.timed("device: mask, seal and sign"):
            return seal(
                values,
                self.policy,
                self.helper.key,
                self.keys[device],
                run="r",
                task=f"{turn}-{device}",
                attempt="1",
                device=device,
                tau=0,
                layout="l",
            )

    def batch(self, turn: int) -> None:
        """A batch, from the devices to the checked sum."""
        first = turn * self.size % len(self.keys)  # with bands, a device sits out
        sent = [self.answer(first + n, turn) for n in range(self.size)]
        updates = tuple(update for _, update in sent)
        intent = Intent(
            run="r",
            policy=self.policy.digest,
            version=0,
            updates=updates,
            weights=(1,) * len(updates),
        )
        with self.timed("helper: check, open, record and draw noise"):
            masks = self.helper.open(intent)
        with self.timed("server: add, unmask and check"):
            total = np.zeros(self.policy.parameters, np.uint32)
            for data, update in sent:
                assert hashlib.sha256(data).hexdigest() == update.masked
                add_masked(total, unpacked(data, self.policy), 1)
            found = unmasked(total, unpacked(masks, self.policy), self.policy)
            check_range(found, len(updates), self.policy)


def peak_mb(batch: int) -> float:
    """Peak memory of a process with a helper that opens batches; their masked words are dropped."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(PARAMETERS, batch, Path(folder, "store"))
        updates = tuple(place.answer(device, 0)[1] for device in range(batch))
        place.helper.open(
            Intent(
                run="r",
                policy=place.policy.digest,
                version=0,
                updates=updates,
                weights=(1,) * batch,
            )
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        place = Place(PARAMETERS, BATCH, Path(folder, "store"))
        place.batch(0)
        place.took.clear()  # the first batch builds the noise's table
        for turn in range(1, TURNS + 1):
            place.batch(turn)
    with tempfile.TemporaryDirectory() as folder:
        correlated = Place(PARAMETERS, BATCH, Path(folder, "store"), BANDS)
        for turn in range(BANDS + TURNS):
            correlated.batch(turn)
    shares = {"device": 1, "helper": BATCH, "server": BATCH}
    ms = {
        what: 1000 * median(times) / shares[what.partition(":")[0]]
        for what, times in place.took.items()
    }
    [opening] = [what for what in ms if what.startswith("helper")]
    in_turn = 1000 * median(correlated.took[opening][-TURNS:]) / BATCH
    began = time.perf_counter()
    noise.draw(bytes(32), 10 * PARAMETERS, place.policy.noise_sigma)
    noise_us = (time.perf_counter() - began) / (10 * PARAMETERS) * 1e6
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {batch: pool.apply(peak_mb, (batch,)) for batch in BATCHES}
    found = {
        "updates_per_s": 1000 / sum(ms.values()),
        "ms_of_an_update": ms,
        "helper_ms_correlated": in_turn,
        "noise_us_a_value": noise_us,
        "helper_peak_mb_by_batch": peaks,
        "cores": 1,
        "machine_cores": os.cpu_count(),
    }
    lines = [
        "# Secure aggregation\n",
        f"`python -m benchmarks.private`: {PARAMETERS:,} parameters, K = {BATCH}, one core,",
        f"medians of {TURNS} batches, noise included.\n",
        "| step | ms of an update |",
        "|---|---|",
        *(f"| {what} | {took:.2f} |" for what, took in ms.items()),
        f"| all of them: {found['updates_per_s']:.0f} updates/s | {sum(ms.values()):.2f} |\n",
        f"With noise that is correlated over {BANDS} sums, the helper takes {in_turn:.2f} ms.\n",
        f"Noise: {noise_us:.3f} µs a value. Peak memory of a process that opens batches of",
        ", ".join(f"{batch}: {peak:.0f} MB" for batch, peak in peaks.items()) + ".\n",
    ]
    keep("private", found, "\n".join(lines), out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
