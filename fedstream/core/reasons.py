"""The closed set of reasons for the ends of tasks and for stray messages.

A reason stays in a run's counts for ever and is a metric label, so the set is closed. Services and
scripts use reasons by name: `reasons.TOO_STALE` in a script of `broker/lua` is replaced by the text
when the script is loaded. Any other text from the wire appears verbatim in the event of the task's
end, but is counted under a catch-all reason.
"""

from __future__ import annotations

import builtins
from typing import Literal

from fedstream.core import errors

Overdue = Literal["timed out", "deadline passed"]
TIMED_OUT: Overdue = "timed out"  # open for longer than `scheduler.task_timeout_s`
DEADLINE_PASSED: Overdue = "deadline passed"  # of its round

# An update was refused by the coordinator, or by the updater after checking its bytes.
REFUSED = (
    ANOTHER_DEVICE := "another device",  # than the task's
    LAYOUT := "layout",  # not the run's
    TOO_LARGE := "too large",  # for `coordinator.max_update_bytes`
    SIZE := "size",  # not the model's, or its blob has another
    UNKNOWN_BASE := "unknown base",  # no version that its trainer can have trained from
    TOO_STALE := "too stale",
    UNKNOWN_DEVICE := "unknown device",  # to a strategy that remembers each device
    NO_STEPS := "no steps",  # where a strategy divides by them
    LEARNING_RATE := "learning rate",  # far from the configured one, where a strategy divides by it
    SENDS_A_MODEL := "sends a model",  # and the strategy takes deltas
    SENDS_A_DELTA := "sends a delta",  # and the strategy takes models
    BLOB_MISSING := "blob missing",  # or a part of it
    DIGEST := "digest",  # the bytes are others than announced
    NOT_FINITE := "not finite",
    NORM_TOO_LARGE := "norm too large",  # above `max_norm`, or far above the usual
    INTEGERS := "integers",  # some changed that must not
    TOO_OLD := "too old",  # trained from a version older than the journal
    DEVICE_QUARANTINED := "device quarantined",  # by an operator
    WIRE_FORMAT := "wire format",  # unknown, or not for this strategy
    WIRE_LENGTH := "wire length",  # truncated, too long, or for another number of values
    WIRE_SCALE := "wire scale",  # of a block: negative or not finite
    WIRE_INDEX := "wire index",  # of a kept value: beyond the last parameter
    WIRE_TOO_LONG := "wire bomb",  # would decompress to more than a model
    SEAL := "seal",  # of a private update: missing, or made for another one or other bytes
    HELPER_LOST := "helper lost",  # sealed to a key that the helper has no more
    IN_THE_BATCH := "in the batch already",  # another update of this device
    PRIVACY_SPENT := "privacy spent",  # the device has no privacy budget left
    FAR_FROM_ROOT := "far from the root",  # aflguard's: the newest update of a root device
    NO_ROOT := "no root update yet",  # to judge it by
)
# The task will get no answer.
GIVEN_UP = (
    DROPPED_OUT := "dropped out",
    TIMED_OUT,
    DEADLINE_PASSED,
    ROUND_OVER := "round over",
    BECAME_STALE := "became too stale",  # before its update came
    ANOTHER_ERROR := "raised another error",  # than the well-known ones: see `raised`
    ANOTHER_REASON := "another reason",  # in the trainer's own words
    ENTRY_LOST := "entry lost",  # deleted from its stream
    OWNER_GONE := "owner gone",
    UNSERVED := "nobody serves this device",
    RUN_FINISHED := "run finished",
    REVOKED_DEVICE := "device revoked",  # by an operator; given up by the gateway
    LOST_WITH_REDIS := "lost with Redis",  # Redis was emptied, or fell back to an older state
)
# The task's entry was moved to `dead`.
DEAD = (
    CRASHED_TRAINERS := "crashed its trainers",
    CRASHED_COORDINATORS := "crashed its coordinators",
    UNREADABLE := "unreadable",
)
# A device's evaluation ended; also with the reasons that `of_evaluation` returns.
EVALUATED = (
    MEASURED := "measured",
    NO_TEST_DATA := "no test data",
    DOES_NOT_EVALUATE := "does not evaluate",  # the device's program
    NO_ANSWER := "no answer in time",  # within `evaluator.on_devices.timeout_s`
    METRICS_NOT_FINITE := "metrics not finite",
    NOT_AS_ASKED := "not as asked",  # of another device, or another version
)
# A message ended no task.
STRAY = (
    UNKNOWN_TASK := "unknown task",
    ANSWERED_TWICE := "answered twice",
    LATE := "late",  # the task was given up before
    ANOTHER_SITES_TASK := "another site's task",
    OWN_TRIGGER := "trigger of its own",  # but the scheduler decides in this run
    ANOTHERS_DEVICE := "trigger for another's device",
    BUSY_DEVICE := "trigger for a busy device",  # it has a task, or an update in a private batch
    QUARANTINED_DEVICE := "trigger for a quarantined device",
    SPENT_DEVICE := "trigger for a device without privacy budget",
    RESTING_DEVICE := "trigger for a resting device",  # its last tasks failed
    TRIGGER_TOO_LONG := "trigger for too long",
    TRIGGER_OVER_LIMIT := "trigger over the limit",
    EVENT_OVER_LIMIT := "event over the limit",
    LETTER_OVER_LIMIT := "letter over the limit",
    ANNOUNCEMENT_OVER_LIMIT := "announcement over the limit",
    TRAINER_OVER_LIMIT := "trainer over the limit",
    NO_DEVICES := "trainer without devices",
    MESSAGE_TOO_LONG := "message too long",
)

# Ends that are no failure of the device, unlike all other refusals, give-ups and deaths. If a site
# gives such a reason, `admit` checks it, so that no device can excuse itself.
OF_THE_RUN = frozenset(
    {
        TOO_STALE,
        TOO_OLD,
        HELPER_LOST,
        IN_THE_BATCH,
        PRIVACY_SPENT,
        FAR_FROM_ROOT,
        NO_ROOT,
        DEVICE_QUARANTINED,
        DROPPED_OUT,
        ROUND_OVER,
        BECAME_STALE,
        ENTRY_LOST,
        OWNER_GONE,
        UNSERVED,
        RUN_FINISHED,
        REVOKED_DEVICE,
        LOST_WITH_REDIS,
        CRASHED_COORDINATORS,
        UNREADABLE,
    }
)

_RAISED = "raised "
_ERRORS = frozenset(
    one.__name__
    for space in (builtins, errors)
    for one in vars(space).values()
    if isinstance(one, type) and issubclass(one, Exception)
) | {"OutOfMemoryError", "AcceleratorError", "LinAlgError"}  # torch's
_OF_TRAINERS = frozenset(
    {DROPPED_OUT, DEADLINE_PASSED, ROUND_OVER, BECAME_STALE, RUN_FINISHED, REVOKED_DEVICE}
)


def sends(what: Literal["model", "delta"]) -> str:
    """The reason to refuse a model where a delta is expected, or the reverse."""
    return SENDS_A_MODEL if what == "model" else SENDS_A_DELTA


def raised(error: Exception) -> str:
    """The text with which a trainer gives up a task because of an error."""
    return f"{_RAISED}{type(errors.innermost(error)).__name__:.100}"


def of_giving_up(said: str) -> str:
    """The reason under which to count a given-up task, from the trainer's text."""
    if said in _OF_TRAINERS:
        return said
    if not said.startswith(_RAISED):
        return ANOTHER_REASON
    return said if said.removeprefix(_RAISED) in _ERRORS else ANOTHER_ERROR


def of_evaluation(said: str | None) -> str:
    """The outcome under which to count a device's evaluation, from the trainer's text.

    None: the device was measured.
    """
    if said is None:
        return MEASURED
    own = (NO_TEST_DATA, DOES_NOT_EVALUATE, METRICS_NOT_FINITE)
    return said if said in own else of_giving_up(said)


def of_death(said: str) -> str:
    """The reason under which to count an entry moved to ``dead``.

    The text if it is one of DEAD; otherwise 'unreadable'.
    """
    return said if said in DEAD else UNREADABLE


def named() -> dict[str, str]:
    """The reasons by the names that scripts use."""
    texts = {*REFUSED, *GIVEN_UP, *DEAD, *EVALUATED, *STRAY}
    return {name: text for name, text in globals().items() if name.isupper() and text in texts}
