"""Which devices are to be quarantined, as their updates stand out time after time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedstream.core.messages import QUARANTINED, SetQuarantine
from fedstream.journal import QuarantineSet
from fedstream.updater.state import Change, RunState

_WHY = "its updates stand out"


@dataclass
class Suspicions:
    """Counts how often in a row each device's updates stood out, since this updater began.

    An update stands out when its change names its device. A device's count begins anew with a
    version that has updates of it, none of which stood out, and with its quarantine or release.
    """

    limit: int  # so many in a row lead to the quarantine; 0: none does
    counts: Counter[int] = field(default_factory=Counter)
    recent: set[int] = field(default_factory=set)  # named since the last version

    def after(self, change: Change, state: RunState) -> SetQuarantine | None:
        """Count a decided change; return the control entry that it leads to, if any.

        ``state``: the run after the change.
        """
        if not self.limit:
            return None
        if isinstance(change.record, QuarantineSet):
            for device in change.record.devices:
                del self.counts[device]
        self.counts.update(change.suspects)
        self.recent.update(change.suspects)
        if change.version is not None:
            for device in {one.device for one in change.version.updates} - self.recent:
                del self.counts[device]
            self.recent.clear()
        known = state.quarantines.by_device
        due = [d for d in change.suspects if self.counts[d] >= self.limit and d not in known]
        return SetQuarantine(devices=tuple(due[:QUARANTINED]), why=_WHY) if due else None
