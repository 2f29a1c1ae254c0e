"""Each role's ledger uses exactly the scripts that its rights name, and no command beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from fedstream.broker import cleanup, lease, streams
from fedstream.broker.ledger import operator, scheduler, trainer
from fedstream.broker.ledger.base import Ledger
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.ledger.evaluator import EvaluatorLedger
from fedstream.broker.ledger.gateway import ENROL, GatewayLedger
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.broker.ledger.scheduler import SchedulerLedger
from fedstream.broker.ledger.sinks import SinksLedger
from fedstream.broker.ledger.trainer import Outbox, TrainerLedger
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.rights import RIGHTS, ROLES, commands, rights_of
from fedstream.broker.scripts import Script

CLASSES: dict[str, tuple[type, ...]] = {
    "coordinator": (CoordinatorLedger,),
    "scheduler": (SchedulerLedger,),
    "updater": (UpdaterLedger,),
    "evaluator": (EvaluatorLedger,),
    "trainer": (TrainerLedger, Outbox),
    "gateway": (GatewayLedger, TrainerLedger, Outbox),
    "sinks": (SinksLedger,),
    "operator": (OperatorLedger,),
}
# What the services run besides: leases, groups and clean-up; an operator feeds recorded updates.
BESIDES: dict[str, tuple[Script, ...]] = {
    "coordinator": (streams.CLAIM, streams.REAP, *cleanup.SCRIPTS),
    "scheduler": lease.SCRIPTS,
    "updater": lease.SCRIPTS,
    "operator": (
        *lease.SCRIPTS,
        scheduler.TRIGGER,
        streams.CLAIM,
        trainer.FINISH,
        operator.MAY,
    ),
}
# Words of commands that are not their names.
OPTIONS = {
    "BLOCK",
    "COUNT",
    "IDLE",
    "LIMIT",
    "MATCH",
    "MAXLEN",
    "NX",
    "PX",
    "STREAMS",
    "WITHSCORES",
    "XX",
}


def functions(some: tuple[type, ...]) -> Iterator[FunctionType]:
    """Their own and inherited methods."""
    for cls in {base for one in some for base in one.__mro__}:
        yield from (value for value in vars(cls).values() if isinstance(value, FunctionType))


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


def scripts_of(some: tuple[type, ...]) -> set[str]:
    """The scripts that their methods name."""
    return {
        found.name
        for function in functions(some)
        for code in codes(function.__code__)
        for name in code.co_names
        if isinstance(found := function.__globals__.get(name), Script)
    }


def words_of(constant: Any) -> Iterator[str]:
    if isinstance(constant, tuple):
        for one in constant:
            yield from words_of(one)
    elif isinstance(constant, str) and constant.isascii() and constant.isupper():
        yield constant


def commands_of(some: tuple[type, ...]) -> set[str]:
    """The commands that their methods send themselves."""
    found = {
        word
        for function in functions(some)
        for code in codes(function.__code__)
        for constant in code.co_consts
        for word in words_of(constant)
    }
    return {word.lower() for word in found - OPTIONS}


LOADS_NONE = {"trainer", "gateway"}  # they may not load scripts, so rights name theirs by command


@pytest.mark.parametrize("role", [role for role in ROLES if role not in LOADS_NONE])
def test_roles_scripts_match_its_rights(role: str) -> None:
    used = scripts_of(CLASSES[role]) | {script.name for script in BESIDES.get(role, ())}
    assert sorted(script.name for script in RIGHTS[role].scripts) == sorted(used)


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_commands_are_granted(role: str) -> None:
    granted = {command for one in rights_of(role) for command in commands(one)}
    sent = commands_of(CLASSES[role])
    assert sent
    assert sent <= granted


def test_a_trainers_script_sends_what_is_listed_for_trainers() -> None:
    """They may not load scripts, so theirs are listed by their commands."""
    listed = {command for one in rights_of("trainer") for command in commands(one)}
    assert scripts_of(CLASSES["trainer"]) == {"finish_task"}
    for script in (trainer.FINISH, Script("claim"), Script("renew"), Script("release")):
        assert {"evalsha", *sent_by(script)} <= listed


def test_a_gateways_script_sends_what_is_listed_for_gateways() -> None:
    listed = {command for one in rights_of("gateway") for command in commands(one)}
    assert scripts_of(CLASSES["gateway"]) == {"finish_task", "enrol"}
    assert {"evalsha", *sent_by(ENROL)} <= listed
    assert {command for one in rights_of("trainer") for command in commands(one)} < listed


def sent_by(script: Script) -> set[str]:
    """The commands inside a script."""
    return set(commands(type(RIGHTS["trainer"])(scripts=(script,)))) - {"script|load"}


@pytest.mark.parametrize("role", ROLES)
def test_ledger_offers_only_its_roles_commands(role: str) -> None:
    """Only what several roles may do is in a class that they share."""
    own = {name for name in vars(CLASSES[role][0]) if not name.startswith("_")}
    for other, (ledger, *_) in CLASSES.items():
        assert issubclass(ledger, Ledger)
        if other != role:
            assert not own & set(dir(ledger)) - {"prepare"}
