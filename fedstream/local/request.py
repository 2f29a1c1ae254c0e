"""The user's request to `fedstream run`, with trainers or with devices over HTTPS.

Devices over HTTPS replace trainers, all on this machine: a gateway listens on 127.0.0.1 with a
certificate made for the run, and each device is a process with its own key and invite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.coordinator.rounds import Rounds
from fedstream.core.errors import ConfigError
from fedstream.journal import FOLDER
from fedstream.local import private
from fedstream.local.supervisor import Program, is_answering
from fedstream.operate.enrolment import invite
from fedstream.private.settings import PrivateSettings
from fedstream.settings.config import Settings
from fedstream.terminal import counted

DEVICES = "devices"  # in a run's folder: certificates, the devices' keys and state
HOST = "127.0.0.1"
GATEWAY = "gateway"  # its role and name
_CA, _PAIR = "ca.pem", "gateway.pem"
_NEEDED = ("cryptography", "jwt", "trustme")
_INVITED_S = 3600.0
_RATE = 10_000.0  # requests per second
_DRAIN_S = 10.0  # of a device, for a step of training and a give-up


@dataclass(frozen=True)
class OverHttp:
    """A run's devices over HTTPS, and their gateway."""

    count: int  # devices, numbered from 0
    folder: Path  # for their files; its content is deleted
    port: int  # the gateway's

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return f"https://{HOST}:{self.port}"

    def prepare(self) -> None:
        """Write the gateway's certificate and the authority that devices trust. Raises OSError."""
        import trustme

        rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        authority = trustme.CA(organization_name="fedstream run")
        pair = authority.issue_cert(HOST).private_key_and_cert_chain_pem
        (self.folder / _PAIR).touch(mode=0o600)
        pair.write_to_path(str(self.folder / _PAIR))
        authority.cert_pem.write_to_path(str(self.folder / _CA))

    def gateway(self, config: Path, drain_s: float) -> Program:
        """The gateway as a program."""
        sets = (f"http.host={HOST}", f"http.port={self.port}", "http.health_port=0")
        options = [word for one in sets for word in ("--set", one)]
        return Program(
            GATEWAY, GATEWAY, ("--name", GATEWAY, "--config", str(config), *options), drain_s
        )

    def is_open(self) -> bool:
        """Whether the gateway accepts connections."""
        return is_answering(HOST, self.port)

    async def devices(self, client: Client, settings: Settings, config: Path) -> Sequence[Program]:
        """The devices as programs, with fresh invites. Raises NoRun, FedstreamError."""
        keys = Keys(settings.run.name)
        made = await invite(
            client, keys, settings.gateway.site, range(self.count), seconds=_INVITED_S
        )
        return [
            Program(
                f"device-{device}",
                "device",
                (
                    "--url",
                    self.url,
                    "--ca",
                    str(self.folder / _CA),
                    *self.identity(device, settings.private),
                    "--config",
                    str(config),
                ),
                _DRAIN_S,
                ends=True,
                environment={"FEDSTREAM_INVITE": text},  # which `ps` doesn't show
            )
            for device, text in made.invites.items()
        ]

    def identity(self, device: int, private: PrivateSettings) -> Sequence[str]:
        """Options for a device's key and the folder of what it remembers."""
        own = self.folder / f"device-{device}.pem"
        if private.policy is None or private.owner is None or private.keys is None:
            return ("--key", str(own))
        key, kept = Path(private.keys) / f"{device}.pem", own.with_suffix(".state")
        pinned = ("--policy", private.policy, "--policy-owner", private.owner)
        return ("--key", str(key), "--dir", str(kept), *pinned)


def configured(settings: Settings, count: int, out: Path) -> Settings:
    """The configuration of a run in ``out`` whose devices come over HTTPS.

    Raises ConfigError if they can't take part in it, or a package is missing.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"--devices-over-http: {' and '.join(missing)} not installed: "
            "pip install 'fedstream[demo]' adds what it needs"
        )
    policy, given = settings.policy, f"--devices-over-http {count}"
    if settings.strategy.controls:
        raise ConfigError(
            f"{given}: devices over HTTPS get no control variates, which strategy.name = "
            f"{settings.strategy.name!r} needs: choose another strategy"
        )
    if isinstance(policy, Rounds):
        if policy.k is not None and policy.k > count:
            raise ConfigError(
                f"{given}: a round takes {policy.k} devices (scheduler.policy.k): give at least "
                "so many"
            )
    elif policy.devices_decide:
        raise ConfigError(
            f"{given}: scheduler.policy.kind = {policy.kind!r} leaves triggering to the devices, "
            "and those over HTTPS wait to be asked: choose another policy"
        )
    gateway, coordinator = settings.gateway, settings.coordinator
    pair = str((out / DEVICES / _PAIR).absolute())
    # These devices share an address, and are as fast as this machine.
    rates = {"device_rate", "address_rate"} - gateway.model_fields_set
    gateway = gateway.model_copy(
        update={"tls_cert": pair, "tls_key": pair, **dict.fromkeys(rates, _RATE)}
    )
    update: dict[str, object] = {"gateway": gateway}
    if gateway.site not in (one.partition(":")[0] for one in coordinator.sites):
        sites = (*coordinator.sites, gateway.site)
        update["coordinator"] = coordinator.model_copy(update={"sites": sites})
    return settings.model_copy(update=update)


@dataclass(frozen=True)
class RunRequest:
    """Configuration, output folder and options of a local run."""

    settings: Settings
    out: Path
    trainers: int = 2
    devices_over_http: int = 0  # instead of trainers; 0: none
    port: int | None = None  # the coordinator's; 0: any free one; None: http.port
    resume: bool = False
    private: bool = False  # by a policy and a helper of its own
    changed_rules: bool = False  # resume although a rule's source has changed
    redis_within_s: float = 10.0  # time limit for a configured Redis to answer

    @property
    def own_redis(self) -> bool:
        """Whether the run brings its own Redis, because none was configured."""
        return not self.settings.redis.is_named

    @property
    def who_trains(self) -> str:
        """The trainers or devices, for people."""
        if self.devices_over_http:
            return f"gateway, {counted(self.devices_over_http, 'device')} over HTTPS"
        return counted(self.trainers, "trainer")

    @property
    def has_helper(self) -> bool:
        """Whether the run brings its own helper; a resumed one does if it did before."""
        return self.private or (self.resume and (self.out / private.PRIVATE).is_dir())

    def resolved(self) -> RunRequest:
        """The request with absolute paths, and with the journal in the run's own folder.

        The configured journal folder is ignored. Raises ConfigError if devices over HTTPS can't
        take part, or the run can't be private.
        """
        settings = self.settings.with_absolute_paths()
        if self.has_helper:
            settings = private.configured(settings, self.out, resume=self.resume)
        else:
            private.check_used(settings)
        folder = {"dir": str(self.out.absolute() / FOLDER)}
        journal = settings.journal.model_copy(update=folder)
        sinks = tuple(sink.placed(self.out.absolute()) for sink in settings.sinks)
        settings = settings.model_copy(update={"journal": journal, "sinks": sinks})
        if self.devices_over_http:
            settings = configured(settings, self.devices_over_http, self.out)
        return replace(self, settings=settings)
