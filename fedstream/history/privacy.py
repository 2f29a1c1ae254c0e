"""`fedstream privacy`: what a private run has told of its devices, for a privacy officer.

Everything comes from the journal: the policy, and each sum with the devices in it. Its points are
those that NIST SP 800-226 asks of a claim of differential privacy.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from fedstream.core.errors import ConfigError
from fedstream.journal import RoundClosed, Segment, SumOpened, Taken, cuts, entries
from fedstream.journal.progress import PrivacyAccount, charged
from fedstream.private.accounting import epsilon, gaussian_epsilon, rho
from fedstream.private.policy import PrivacyPolicy
from fedstream.runtime.config import check
from fedstream.terminal import counted, two_columns

_SHOWN = 20  # devices in the table
_NOTHING = PrivacyAccount()


@dataclass(frozen=True)
class DeviceLoss:
    """What the opened sums have told of a device."""

    device: int
    sums: int  # opened ones with an update of it
    squares: int  # of its weights in these, added up
    rho: float  # of zero-concentrated differential privacy
    epsilon: float
    left: int  # sums at the largest weight in which it may still take part


@dataclass(frozen=True)
class PrivacyStatement:
    """A private run's policy, its sums, and the devices' accounts."""

    run: str
    lineage: str
    strategy: str
    devices: int
    policy: PrivacyPolicy
    delta: float
    opened: int  # sums that the server has, whether or not they were of use
    versions: int
    dropped: Mapping[str, int]  # batches that were of no use, by reason
    accounts: Mapping[int, PrivacyAccount]
    is_whole: bool  # False: sums before an adopted model may be missing

    @cached_property
    def by_device(self) -> Sequence[DeviceLoss]:
        """All devices of the run, the most exposed first."""
        loss = lru_cache(None)(self._loss)  # many devices have the same account
        found = []
        for device in {*range(self.devices), *self.accounts}:
            one = self.accounts.get(device, _NOTHING)
            found.append(DeviceLoss(device, one.sums, one.squares, *loss(one.squares, one.sums)))
        return sorted(found, key=lambda one: (-one.squares, -one.sums, one.device))

    def _loss(self, squares: int, sums: int) -> tuple[float, float, int]:
        policy = self.policy
        left = max(0, policy.allowance - squares) // max(policy.weights) ** 2
        return rho(policy, squares), epsilon(policy, squares, sums, self.delta), left

    @property
    def worst(self) -> DeviceLoss:
        """The most exposed device."""
        return self.by_device[0]

    @property
    def limit(self) -> float:
        """The largest epsilon that the policy allows, of a device in the most sums."""
        policy = self.policy
        sums = policy.allowance // min(policy.weights) ** 2
        return epsilon(policy, policy.allowance, sums, self.delta)

    @property
    def exact_epsilon(self) -> float:
        """Epsilon of the most exposed device if the noise were continuous, by the exact formula."""
        spent = self.worst.rho
        return gaussian_epsilon(spent, self.delta) if 0 < spent < math.inf else spent

    def as_numbers(self) -> dict[str, Any]:
        """The statement as plain values; an infinite epsilon is None."""
        policy = self.policy
        return {
            "run": self.run,
            "lineage": self.lineage,
            "strategy": self.strategy,
            "policy": policy.model_dump(mode="json") | {"digest": policy.digest},
            "norm_bound": policy.norm_bound,
            "noise_sigma": policy.sum_sigma,
            "unit": "device of the roster",
            "adjacency": "zero-out",
            "accountant": "zCDP, converted (Canonne, Kamath and Steinke 2020)",
            "is_private": bool(policy.sigma),
            "delta": self.delta,
            "epsilon": _finite(self.worst.epsilon),
            "exact_gaussian_epsilon": _finite(self.exact_epsilon),
            "epsilon_limit": _finite(self.limit),
            "sums_opened": self.opened,
            "versions": self.versions,
            "sums_dropped": dict(self.dropped),
            "is_whole": self.is_whole,
            "devices": [
                one.__dict__ | {"rho": _finite(one.rho), "epsilon": _finite(one.epsilon)}
                for one in self.by_device
            ],
        }

    def write_table(self, path: Path) -> int:
        """Write the devices to a new CSV file; returns their number. Raises ConfigError."""
        try:
            with path.open("x", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(DeviceLoss.__dataclass_fields__)
                writer.writerows(one.__dict__.values() for one in self.by_device)
        except OSError as error:
            raise ConfigError(f"--csv {path}: {error.strerror}: choose another file") from error
        return len(self.by_device)

    # for people

    def page(self) -> RenderableType:
        """The statement as tables and sentences."""
        more = len(self.by_device) - _SHOWN
        return Group(
            two_columns(self._rows()),
            "",
            self._table(),
            f"and {more:,} devices that are less exposed (--csv FILE)" if more > 0 else "",
            "What this rests on:",
            two_columns(("-", one) for one in self._assumptions()),
        )

    def _rows(self) -> Iterator[tuple[str, str]]:
        policy = self.policy
        yield "run", f"{self.run}, {self.strategy}, {counted(self.devices, 'device')}"
        yield "policy", policy.digest
        yield (
            "",
            (
                f"sums of {policy.min_batch} to {policy.max_batch} devices; updates clipped to a "
                f"norm of {policy.clip:g}, after rounding at most {policy.norm_bound:,} units of "
                f"2^{-policy.scale_bits}"
            ),
        )
        yield "", f"weights by staleness {_weights(policy)}; noise {self._noise()}"
        yield "unit", f"a device of the roster {policy.roster[:12]}..., over all sums of this run"
        yield "adjacency", "zero-out: all updates of the device are replaced by zeros"
        least = f"each of at least {policy.min_batch} devices"
        noise = "with noise" if policy.sigma else "without noise"
        yield (
            "released",
            (
                f"{counted(self.opened, 'sum')}, {least}, {noise}: to the server, and by the "
                "models made from them to all who get a model"
            ),
        )
        if self.dropped:
            why = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            yield "dropped", f"{counted(sum(self.dropped.values()), 'sum')}: {why}"
        yield from self._result()

    def _noise(self) -> str:
        policy = self.policy
        if not policy.sigma:
            return "none"
        kind = f"correlated over {policy.bands} sums" if policy.bands > 1 else "independent"
        return (
            f"sigma {policy.sigma:g}, in units {policy.sum_sigma:,.0f} (discrete Gaussian, {kind})"
            f"; {policy.participations:,} participations"
        )

    def _result(self) -> Iterator[tuple[str, str]]:
        if not self.policy.sigma:
            yield (
                "epsilon",
                (
                    "none: the sums have no noise, so there is NO differential privacy. Single "
                    "updates are hidden, but many sums together may tell much of a device"
                ),
            )
            return
        worst = self.worst
        yield (
            "accountant",
            (
                "zero-concentrated differential privacy, sums add up (Canonne, Kamath and Steinke "
                "2020, theorem 14, corollary 13); no amplification by sampling"
            ),
        )
        yield (
            "epsilon",
            (
                f"{_or_unbounded(worst.epsilon)} at delta {self.delta:g}, of the most exposed "
                f"device (rho {worst.rho:.4f}); {self.exact_epsilon:.3f} by the exact formula for "
                "continuous noise"
            ),
        )
        none_left = sum(not one.left for one in self.by_device)
        yield (
            "budget",
            (
                f"epsilon {_or_unbounded(self.limit)} at most by the policy; "
                f"{counted(none_left, 'device')} of {self.devices:,} may take no more part"
            ),
        )

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("device", "sums", "squares", "rho", "epsilon", "sums left"):
            table.add_column(name, justify="right")
        for one in self.by_device[:_SHOWN]:
            table.add_row(
                str(one.device),
                f"{one.sums:,}",
                f"{one.squares:,}",
                f"{one.rho:.4f}",
                f"{one.epsilon:.3f}",
                f"{one.left:,}",
            )
        return table

    def _assumptions(self) -> Iterator[str]:
        if not self.is_whole:
            yield (
                "THE JOURNAL IS NOT WHOLE: it was continued with --adopt, so sums that were opened "
                "before are missing here. The helper's store has counted them"
            )
        yield (
            "Trust: server and helper don't work together. Private against a malicious server "
            "with an honest helper, and against a curious helper that gets no masked updates"
        )
        yield (
            "Helper: it keeps its keys to itself, draws the noise as it should, and its store was "
            "never restored from a backup"
        )
        yield (
            "Device: its own program clips, rounds and masks as fedstream does. Other devices may "
            "do as they like; those that help the server make the sum of the others smaller"
        )
        if self.policy.sigma:
            yield (
                "Arithmetic: noise and updates are integers, so no floating point leaks; each "
                "value of the noise is within 2^-62 of the distribution, which delta includes"
            )
        yield (
            "Other runs under this policy add to this: the helper counts a device over all of "
            "them, and refuses what exceeds the policy"
        )
        yield (
            "Not covered: that a device took part, when, and from which address; measurements on "
            "data of your own; what a device's owner publishes"
        )


def statement(chain: Sequence[Segment], delta: float) -> PrivacyStatement:
    """Read a private run's statement from its journal, one record at a time.

    Raises JournalError.
    """
    first, head = chain[0].standing, chain[-1].head
    terms = head.strategy["private"]
    policy = check(PrivacyPolicy, terms["policy"], "strategy.private.policy")
    accounts: Mapping[int, PrivacyAccount] = {
        device: PrivacyAccount(*numbers) for device, *numbers in first.accounts
    }
    dropped: Counter[str] = Counter()
    if first.dropped:
        dropped["before the oldest segment"] = first.dropped
    in_sum = first.held[len(first.held) - len(first.sealed) :]  # the others' buckets are opened
    batch = [(one.device, int(one.weight)) for one in in_sum]
    found = first.sums
    for segment, cut in cuts(chain):
        versions = segment.standing.version
        for _, entry in entries(segment, cut):
            if isinstance(entry, Taken) and entry.outcome == "buffered":
                batch.append((entry.upload.device, int(entry.weight)))
            elif isinstance(entry, SumOpened):
                is_opened = entry.masks is not None
                accounts = charged(
                    accounts, batch, is_opened=is_opened, is_dropped=bool(entry.reason)
                )
                found += is_opened
                if entry.reason:
                    dropped[entry.reason] += 1
                batch.clear()
            elif isinstance(entry, RoundClosed) and entry.dropped:
                dropped["too few answers"] += 1
                batch.clear()
            versions = entry.version
    return PrivacyStatement(
        run=head.run,
        lineage=head.lineage,
        strategy=str(head.strategy["name"]),
        devices=head.devices,
        policy=policy,
        delta=delta,
        opened=found,
        versions=versions,
        dropped=dropped,
        accounts=accounts,
        is_whole=all(segment.standing.why != "adopted" for segment in chain),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_unbounded(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "without a bound"


def _weights(policy: PrivacyPolicy) -> str:
    if len(set(policy.weights)) == 1:
        return f"{policy.weights[0]} up to {len(policy.weights) - 1}"
    return ", ".join(map(str, policy.weights))
