"""Every key that a run has in Redis, named in one place.

All keys of a run share the hash tag ``{run}``, so that they live in one slot of a cluster and a
script may touch any of them.
"""

from __future__ import annotations

import re

from fedstream.broker.errors import ConfigError

COORDINATORS = "coordinators"  # the group that reads `triggers` and every `inbox:<site>`
TRAINERS = "trainers"  # the group that reads `tasks` and every `tasks:<site>/<owner>`
POOL = "pool"  # the operator's own site: its trainers serve every device that nobody owns

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")


def check_name(what: str, name: str) -> str:
    """The name, if it may be part of a key; else ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: {name!r} is no name: letters, digits, '.', '_' and '-', at most 63, "
            "the first a letter or a digit"
        )
    return name


def member(site: str, trainer: str) -> str:
    """What a trainer of a site is called in the registers: those of the pool by their name alone.

    No name has a slash in it, so nobody is called like a trainer of another site.
    """
    return trainer if site == POOL else f"{site}/{trainer}"


def site_of(name: str) -> str:
    """The site of a trainer by what it is called."""
    return name.rpartition("/")[0] or POOL


class Keys:
    """The keys of one run."""

    def __init__(self, run: str) -> None:
        self.name = check_name("run.name", run)
        self.prefix = prefix = f"fedstream:{{{run}}}:"
        # what is, as hashes and sorted sets
        self.run = prefix + "run"  # the run's record: state, layout, target
        self.head = prefix + "head"  # the newest version
        self.kept = prefix + "kept"  # versions whose blob is still there
        self.lineage = prefix + "lineage"  # version -> digest, of the newest versions
        self.open = prefix + "open"  # task -> trigger, for all tasks not yet ended
        self.admitted = prefix + "admitted"  # task -> the attempt that was admitted
        self.ended = prefix + "ended"  # the newest ended tasks, in order of their ids
        self.counts = prefix + "counts"  # tasks by outcome and reason, strays by reason
        self.tokens = prefix + "tokens"  # role -> fencing token; "look" of who repairs
        self.trainers = prefix + "trainers"  # trainer -> what it said of itself
        self.alive = prefix + "alive"  # trainer -> when it was last heard, Redis's clock
        self.owners = prefix + "owners"  # device -> the trainer that owns it
        self.pool = prefix + "pool"  # trainers that own nothing: they serve what nobody owns
        self.rates = prefix + "rates"  # what each site did in the second that '' says
        self.letters = prefix + "letters"  # whose each letter in `dead` is
        self.sites = prefix + "sites"  # those that have an inbox
        # what flows, as streams
        self.triggers = prefix + "triggers"
        self.tasks = prefix + "tasks"
        self.queue = prefix + "queue"
        self.models = prefix + "models"
        self.events = prefix + "events"
        self.dead = prefix + "dead"

    def inbox(self, site: str) -> str:
        """All that a site's trainers say. They can append to it, and nothing else."""
        return f"{self.prefix}inbox:{site}"

    def tasks_of(self, owner: str) -> str:
        """The tasks of a trainer that owns devices: see :func:`member`."""
        return f"{self.tasks}:{owner if '/' in owner else f'{POOL}/{owner}'}"

    def leader(self, role: str) -> str:
        """The lease of a role that one process holds at a time."""
        return f"{self.prefix}leader:{role}"

    def model(self, blob: str) -> str:
        """The blob of a model."""
        return f"{self.prefix}model:{blob}"

    def update(self, blob: str) -> str:
        """The blob of an update as its site writes it; its name begins with the site."""
        return f"{self.prefix}update:{blob}"

    def queued(self, blob: str) -> str:
        """The same once it is admitted: out of its site's reach, until the updater is done."""
        return f"{self.prefix}queued:{blob}"

    def device(self, device: int) -> str:
        """What a strategy remembers of a device (SCAFFOLD's c_i)."""
        return f"{self.prefix}device:{device}"

    def staged(self, device: int, digest: str) -> str:
        """The same while it is written: the same name is always the same bytes."""
        return f"{self.device(device)}:{digest}"

    def control(self, site: str, device: int) -> str:
        """The same, as it was when a site was given a task of this device."""
        return f"{self.prefix}control:{site}/{device}"

    def workspace(self, site: str, task: str) -> str:
        """What an interrupted task left for whoever of its site goes on with it."""
        return f"{self.prefix}workspace:{site}/{task}"

    def quarantine(self, key: str) -> str:
        """Where something goes that has no business under a key of ours."""
        return f"{self.prefix}quarantine:{key.removeprefix(self.prefix)}"
