"""Names of all keys of a run in Redis.

All keys of a run share the hash tag ``{run}``, so they live in one slot of a cluster and a script
may touch any of them.
"""

from __future__ import annotations

import re

from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL

COORDINATORS = "coordinators"  # the group that reads `triggers` and every `inbox:<site>`
TRAINERS = "trainers"  # the group that reads `tasks` and every `tasks:<site>/<owner>`
GATEWAY = "gateway"  # the site of a run's gateway, unless it is configured otherwise

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


def check_name(what: str, name: str) -> str:
    """Return the name if it may be part of a key. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: {name!r} is not a valid name; expected at most 63 letters, digits, '.', '_' "
            "and '-', starting with a letter or digit"
        )
    return name


def member(site: str, trainer: str) -> str:
    """A trainer's name in the registers: ``site/trainer``, or just ``trainer`` for the pool.

    Names contain no slash, so trainers of different sites can't collide.
    """
    return trainer if site == POOL else f"{site}/{trainer}"


def site_of(name: str) -> str:
    """The site of a trainer, from its name in the registers."""
    return name.rpartition("/")[0] or POOL


class Keys:
    """The keys of one run."""

    def __init__(self, run: str) -> None:
        self.name = check_name("run.name", run)
        self.prefix = prefix = f"fedstream:{{{run}}}:"
        # state: hashes, sets and sorted sets
        self.run = prefix + "run"  # the run's record: state, layout, target
        self.head = prefix + "head"  # the newest version
        self.kept = prefix + "kept"  # blob of a kept model -> its version
        self.best = prefix + "best"  # the best version, and the blob that is being measured
        self.lineage = prefix + "lineage"  # version -> digest as given, of the newest versions
        self.open = prefix + "open"  # task -> trigger, for all tasks not yet ended
        self.admitted = prefix + "admitted"  # task -> the attempt that was admitted
        self.ended = prefix + "ended"  # the newest ended tasks, ordered by id
        self.counts = prefix + "counts"  # tasks by outcome and reason, strays, encoded updates
        self.tokens = prefix + "tokens"  # role -> fencing token; "look" during a repair
        self.trainers = prefix + "trainers"  # trainer -> its latest announcement
        self.alive = prefix + "alive"  # trainer -> time of its last message, by Redis's clock
        self.owners = prefix + "owners"  # device -> the trainer that owns it
        self.failing = (
            prefix + "failing"
        )  # device -> failed tasks in a row, end of its rest, last reason
        self.pool = prefix + "pool"  # trainers without devices: they serve the unowned devices
        self.concurrent = prefix + "concurrent"  # gateway's replica -> number of its devices
        self.working = prefix + "working"  # trainer -> its newest heartbeat
        self.rates = prefix + "rates"  # each site's activity in the second under ''
        self.letters = prefix + "letters"  # site|id of each letter in `dead`
        self.sites = prefix + "sites"  # sites that have an inbox
        self.sinks = prefix + "sinks"  # sink -> its cursor
        self.evaluation = prefix + "evaluation"  # the evaluation on the devices under way
        self.evaluations = prefix + "evaluations"  # its tasks that are open -> device, site, entry
        self.sealing = prefix + "sealing"  # the helper's EpochKey, to which devices seal
        self.measured = prefix + "measured"  # its tasks that have ended -> outcome, answer
        # streams
        self.triggers = prefix + "triggers"
        self.tasks = prefix + "tasks"
        self.queue = prefix + "queue"
        self.models = prefix + "models"
        self.events = prefix + "events"
        self.dead = prefix + "dead"
        self.changes = prefix + "changes"  # log: names of changed tasks and devices, in order

    def inbox(self, site: str) -> str:
        """The stream of a site's messages; the site's trainers can only append to it."""
        return f"{self.prefix}inbox:{site}"

    def tasks_of(self, owner: str) -> str:
        """The task stream of a trainer that owns devices; for its name see :func:`member`."""
        return f"{self.tasks}:{owner if '/' in owner else f'{POOL}/{owner}'}"

    def owned(self, trainer: str) -> str:
        """The digest of the list of devices registered for a trainer (see :func:`member`).

        The value also has the time until which heartbeats may replace the list, in ms since 1970.
        """
        return f"{self.prefix}owned:{trainer if '/' in trainer else f'{POOL}/{trainer}'}"

    def leader(self, role: str) -> str:
        """The lease of a role, held by one process at a time."""
        return f"{self.prefix}leader:{role}"

    def model(self, blob: str) -> str:
        """The blob of a version's model, or ``unshared-<digest>``: the run's frozen parameters."""
        return f"{self.prefix}model:{blob}"

    def update(self, blob: str) -> str:
        """The blob of an update not yet admitted; its name begins with the site."""
        return f"{self.prefix}update:{blob}"

    def queued(self, blob: str) -> str:
        """The blob of an admitted update, which its site can no longer touch."""
        return f"{self.prefix}queued:{blob}"

    def device(self, device: int) -> str:
        """The blob of a strategy's state for a device (SCAFFOLD's c_i)."""
        return f"{self.prefix}device:{device}"

    def staged(self, device: int, digest: str) -> str:
        """The device state while it is being written; equal names mean equal bytes."""
        return f"{self.device(device)}:{digest}"

    def control(self, site: str, device: int) -> str:
        """A site's copy of the device state, made when the site gets a task for the device."""
        return f"{self.prefix}control:{site}/{device}"

    def workspace(self, site: str, task: str) -> str:
        """The saved progress of an interrupted task, for a trainer of its site to resume."""
        return f"{self.prefix}workspace:{site}/{task}"

    def enrolled(self, site: str) -> str:
        """The devices of a gateway: device -> public key, and time of enrolment."""
        return f"{self._gateway(site)}devices"

    def invites(self, site: str) -> str:
        """The invites of a gateway: device -> digest of its invite, and expiry."""
        return f"{self._gateway(site)}invites"

    def revoked(self, site: str) -> str:
        """The revoked devices of a gateway: device -> time of revocation."""
        return f"{self._gateway(site)}revoked"

    def enrolments(self, site: str) -> str:
        """A text that changes with the gateway's registers; then replicas read them anew."""
        return f"{self._gateway(site)}changed"

    def moves(self, site: str) -> str:
        """The stream in which a gateway's replicas announce devices that came to them."""
        return f"{self._gateway(site)}moves"

    def secret(self, site: str) -> str:
        """The secret with which the replicas of a gateway sign tokens."""
        return f"{self._gateway(site)}secret"

    def nonce(self, site: str, nonce: str) -> str:
        """A nonce that a gateway has seen; it expires when its request would be refused anyway."""
        return f"{self._gateway(site)}nonce:{nonce}"

    def upload_note(self, site: str, upload: str) -> str:
        """A gateway's note about an upload in parts, by the update's task and attempt."""
        return f"{self._gateway(site)}upload:{upload}"

    def _gateway(self, site: str) -> str:
        return f"{self.prefix}gateway:{site}:"

    def quarantine(self, key: str) -> str:
        """The key to which a foreign value under ``key`` is moved."""
        return f"{self.prefix}quarantine:{key.removeprefix(self.prefix)}"
