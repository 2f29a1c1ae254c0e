"""`fedstream agree`: makes the policy of private runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstream import private
from fedstream.cli.options import (
    Config,
    DataRoot,
    Devices,
    Flower,
    FlowerModel,
    Sets,
    StrategyName,
    TaskName,
    settings_of,
    task_options,
)
from fedstream.runtime import process
from fedstream.terminal import line


def agree(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="for policy and keys; keys that are there are kept"),
    ],
    config: Config = None,
    task: TaskName = None,
    flower: Flower = None,
    model: FlowerModel = None,
    strategy: StrategyName = None,
    devices: Devices = None,
    roster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="the devices' public keys, a line each: number, space, Ed25519 key in "
            "hexadecimal; default: make their keys",
        ),
    ] = None,
    data_root: DataRoot = None,
    sets: Sets = None,
) -> None:
    """Make the policy of private runs, signed, for the task's model and by private.terms.

    Devices, updater and helper need the policy and the owner's public key. The helper also needs
    its own key and the roster: it runs by helper.toml. No party needs owner.pem but the owner.
    """
    with process.importing():
        from fedstream.settings.services import devices_of, task_of
        from fedstream.trainer.task import untrained
        from fedstream.trainer.vector import layout_of
    with private.importing("`fedstream agree`"):
        from fedstream.operate.agreement import KEYS, Agreement, in_words
        from fedstream.operate.agreement import agree as agreed_in

    named = task_options(task, flower, model)
    settings = settings_of(
        config,
        sets,
        trusted=True,
        track=None,
        **named,
        strategy=strategy,
        devices=devices,
        data_root=data_root,
    )
    found = task_of(settings)
    agreement: Agreement = agreed_in(
        folder, settings, layout_of(untrained(found)), devices_of(settings, found), roster
    )
    policy = agreement.policy
    line(f"policy   {policy.digest}")
    line(f"owner    {agreement.owner}")
    line(f"allows   {in_words(policy, settings.private.delta)}")
    line(f"helper   fedstream helper --config {folder / 'helper.toml'}")
    if roster is None:
        line(f"devices  {folder / KEYS}: private keys, one for each device")
