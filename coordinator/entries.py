"""Decisions on the entries that coordinators read: triggers, and messages from sites.

A site is identified by its inbox. A site's messages can affect only its own trainers, devices and
tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fedstream.broker.keys import member
from fedstream.broker.ledger.base import Pending
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.streams import Entry
from fedstream.coordinator.sites import Site
from fedstream.core import reasons
from fedstream.core.errors import BadMessage, NoRun, Undecodable
from fedstream.core.formats import F32, format_of
from fedstream.core.messages import (
    POOL,
    CloseRound,
    Dead,
    Event,
    GiveUp,
    Heartbeat,
    Measured,
    Presence,
    Trigger,
    Upload,
    Withdraw,
    decode,
    task_id,
)
from fedstream.runtime.health import EventCounts

if TYPE_CHECKING:
    from fedstream.coordinator.settings import CoordinatorSettings
    from fedstream.core.layout import Layout
    from fedstream.runtime.service import Context

Decided: TypeAlias = "tuple[Pending[Any], Callable[[Any], None]]"

LARGEST = 1 << 18  # bytes of an entry in a site's inbox
_EVENTS = 10  # per second and site
_LAYOUT_S = 1.0  # between two reads of the run's layout
_TEXT = 8000  # characters
_OF_SITES = (Upload, GiveUp, Dead, Trigger, Presence, Heartbeat, Event, Measured)
_LOSS = 1e30  # largest counted loss of an untrusted device


class Entries:
    """Decides on entries, and reports the outcomes."""

    def __init__(
        self,
        ledger: CoordinatorLedger,
        settings: CoordinatorSettings,
        context: Context,
        *,
        anarchic: bool,
        lr_of: Callable[[int, int], float] | None = None,
    ) -> None:
        """``anarchic``: devices decide for themselves when to train. ``lr_of``: the configured
        learning rate of a device, for a rule that divides by it; None: any rate is accepted.
        """
        self._ledger = ledger
        self._settings = settings
        self._context = context
        self._anarchic = anarchic
        self._lr_of = lr_of
        # Few labels: verdicts and reasons are closed sets.
        self._answers = EventCounts(
            "fedstream_answers",
            "Trainers' answers, by admission's verdict.",
            ["verdict", "reason"],
            registry=context.registry,
        )
        self._dispatched = EventCounts(
            "fedstream_tasks_dispatched",
            "Triggers, by what became of them.",
            ["verdict"],
            registry=context.registry,
        )
        self._idle: set[str] = set()  # already reported trainers without devices
        self._layout: Layout | None = None  # of the run, read for the first encoded update
        self._layout_at = 0.0  # time of the last read

    def of_triggers(self, entry: Entry) -> Decided:
        """Decide on a trigger, the end of a round, or overdue tasks.

        Raises BadMessage.
        """
        message = decode(entry.data, Trigger, CloseRound, Withdraw)
        tell = partial(self._tell_dispatched, message, time.time())
        if isinstance(message, Withdraw):
            return self._ledger.withdraw(entry, message), tell
        if isinstance(message, CloseRound):
            return self._ledger.close_round(entry, message), tell
        return self._ledger.dispatch(entry, message), tell

    async def of_site(self, site: Site, entry: Entry) -> Decided | Dead:
        """Decide on a site's message; the caller must bury a returned Dead. Raises BadMessage."""
        if entry.size > LARGEST:
            return self._dropped(site, entry, reasons.MESSAGE_TOO_LONG, bytes=entry.size)
        match decode(entry.data, *_OF_SITES):
            case Upload() | GiveUp() as answer:
                sizes, unfit = await self._judged(answer)
                if isinstance(answer, Upload) and not site.trusted:
                    unfit = unfit or self._unusual_rate(answer)
                    answer = self._bounded(answer)
                decision = self._ledger.admit(
                    entry,
                    answer,
                    size_limit=self._settings.max_update_bytes,
                    site=site.name,
                    trusted=site.trusted,
                    most_steps=self._settings.most_steps,
                    sizes=sizes,
                    unfit=unfit,
                )
                name = member(site.name, answer.trainer)
                return decision, partial(self._tell_answered, answer, name, time.time())
            case Measured() as measured:
                return self._of_measured(site, entry, measured)
            case Trigger() as trigger:
                return self._of_own(site, entry, trigger)
            case Presence() as said:
                return self._of_presence(site, entry, said)
            case Heartbeat() as said:
                rate = self._settings.announce_rate
                return self._ledger.beat(site.name, entry, said, rate=rate), lambda _: None
            case Event(what="error", device=int()) as event:  # evaluator: none
                told = Event(
                    what="error",
                    service=member(site.name, event.service),
                    time=self._ledger.now(),
                    task=event.task,
                    device=event.device,
                    version=event.version,
                    reason=(event.reason or "")[:200],
                    text=(event.text or "")[-_TEXT:],
                    site=site.name,
                )
                return self._relayed(site, entry, told, reasons.EVENT_OVER_LIMIT)
            case Dead() as dead:
                return dead
            case other:
                raise BadMessage(f"a site must not send {other.kind}")

    def _bounded(self, upload: Upload) -> Upload:
        """An untrusted device's upload with bounded loss and time, so that their sums stay finite.

        Samples and steps are bounded later, by the updater and by the script that admits the
        update.
        """
        loss = upload.loss
        if loss is not None:
            loss = min(max(loss, -_LOSS), _LOSS)
        seconds = min(max(0.0, upload.seconds), self._settings.most_seconds)
        return upload.model_copy(update={"loss": loss, "seconds": seconds})

    def _unusual_rate(self, upload: Upload) -> str:
        """The reason to refuse an untrusted device's learning rate; '' for none.

        The rate is not replaced by the configured one, as the gradient would be wrong if the device
        did train with its rate. The updater refuses a rate that is not positive.
        """
        factor = self._settings.lr_factor
        if self._lr_of is None or not factor or not upload.lr > 0:
            return ""
        try:
            usual = self._lr_of(upload.device, upload.tau)
        except Exception:  # a schedule has no rate, or raises, for the version that a site names
            return reasons.LEARNING_RATE
        return "" if usual / factor <= upload.lr <= usual * factor else reasons.LEARNING_RATE

    async def _judged(self, answer: Upload | GiveUp) -> tuple[tuple[int, int] | None, str]:
        """The arguments ``sizes`` and ``unfit`` of :meth:`CoordinatorLedger.admit`."""
        if not isinstance(answer, Upload) or answer.format == F32.name:
            return None, ""
        try:
            how = format_of(answer.format)
        except Undecodable as error:
            return None, error.reason
        if how.of_changes and answer.sends == "model":
            return None, reasons.WIRE_FORMAT
        # A run's layout never changes, but a new run may have taken this name. Read the run at most
        # once a second: a site can name any number of foreign layouts, and each read delays all
        # other messages.
        is_other = self._layout is not None and self._layout.signature != answer.layout
        now = time.monotonic()
        if self._layout is None or (is_other and now - self._layout_at >= _LAYOUT_S):
            self._layout_at = now
            with suppress(NoRun):
                self._layout = (await self._ledger.run()).layout
        if self._layout is None or self._layout.signature != answer.layout:
            return None, ""  # the script refuses the layout
        return how.sizes(self._layout), ""

    def _relayed(self, site: Site, entry: Entry, event: Event | None, why: str) -> Decided:
        """Relay an event to observers; count None, or an event over the limit, under ``why``."""
        decision = self._ledger.relay(site.name, entry, event, most=_EVENTS, why=why)
        return decision, lambda _: None

    def _dropped(self, site: Site, entry: Entry, why: str, **about: object) -> Decided:
        self._context.log.warning("not taken up", site=site.name, reason=why, **about)
        return self._relayed(site, entry, None, why)

    def _of_own(self, site: Site, entry: Entry, trigger: Trigger) -> Decided:
        """Decide on a device's own trigger. The coordinator sets the task's id and origin."""
        most = self._settings
        asked = ((trigger.steps, most.most_steps), (trigger.epochs, most.most_epochs))
        if any((n or 0) > limit for n, limit in (*asked, (trigger.seconds, most.most_seconds))):
            return self._dropped(site, entry, reasons.TRIGGER_TOO_LONG, device=trigger.device)
        own = trigger.model_copy(
            update={
                "task": task_id(round(entry.time * 1000)),
                "why": "own initiative",
                "origin": member(site.name, trigger.origin),
                "version": None,
                "deadline": None,
            }
        )
        decision = self._ledger.take_up(
            site.name,
            entry,
            own,
            anarchic=self._anarchic,
            rate=most.trigger_rate,
            limit=most.open_limit,
        )
        return decision, partial(self._tell_dispatched, own, time.time())

    def _of_presence(self, site: Site, entry: Entry, said: Presence) -> Decided:
        name = member(site.name, said.trainer)
        if site.name != POOL and not said.owns and not said.leaves:
            if name not in self._idle and len(self._idle) < self._settings.site_trainers:
                self._idle.add(name)
                self._context.log.warning(
                    "trainer owns no devices and gets no tasks: check trainer.owns", trainer=name
                )
            return self._relayed(site, entry, None, reasons.NO_DEVICES)
        decision = self._ledger.hear(
            site.name,
            entry,
            said,
            denied=site.denied(said.owns),
            most=self._settings.site_trainers,
            rate=self._settings.announce_rate,
        )
        return decision, lambda _: None

    def _of_measured(self, site: Site, entry: Entry, answer: Measured) -> Decided:
        """Decide on a device's answer to an evaluation."""
        decision = self._ledger.admit_measured(site.name, entry, answer, trusted=site.trusted)
        return decision, partial(self._tell_measured, answer, member(site.name, answer.trainer))

    # outcomes

    def _tell_measured(self, answer: Measured, trainer: str, decided: tuple[str, str]) -> None:
        verdict, outcome = decided
        self._answers.add(verdict, outcome)
        if verdict == "stray":
            self._context.log.warning(
                "measurement not admitted",
                task=answer.task,
                device=answer.device,
                trainer=trainer,
                reason=outcome,
            )

    def _tell_dispatched(
        self, message: Trigger | CloseRound | Withdraw, at: float, verdict: str
    ) -> None:
        """Count and log the outcome. ``at``: the decision's time, in seconds since 1970."""
        self._dispatched.add(verdict)
        if isinstance(message, Trigger):
            what = "dispatched" if verdict == "sent" else "not dispatched"
            self._context.trace(
                what, at=at, task=message.task, device=message.device, verdict=verdict
            )

    def _tell_answered(
        self, answer: Upload | GiveUp, trainer: str, at: float, decided: tuple[str, str]
    ) -> None:
        verdict, reason = decided
        self._answers.add(verdict, reason)
        if verdict in ("admitted", "given_up"):
            why: dict[str, Any] = {"reason": reason} if reason else {}
            self._context.trace(
                verdict.replace("_", " "),
                at=at,
                task=answer.task,
                device=answer.device,
                trainer=trainer,
                **why,
            )
        if verdict in ("refused", "stray"):
            self._context.log.warning(
                "answer not admitted",
                task=answer.task,
                device=answer.device,
                trainer=trainer,
                verdict=verdict,
                reason=reason,
            )
