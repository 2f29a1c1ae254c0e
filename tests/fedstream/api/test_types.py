"""A user's script as mypy --strict sees it: `make lint` checks this file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import fedstream
from fedstream.strategies import Batch

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn
    from torch.utils.data import Dataset


class Rule(Batch):
    """A rule of the user's."""


class Mine(fedstream.Task):
    devices = 3

    def model(self) -> nn.Module:
        raise NotImplementedError

    def device_data(self, device: int) -> Dataset[Any]:
        raise NotImplementedError


def script() -> None:
    run = fedstream.run(
        Mine(),
        strategy={"name": "fedbuff", "buffer_size": 5},
        versions=20,
        trainers=2,
        solver={"lr": 0.05},
        set={"strategy.alpha": 0.2},
        out="here",
    )
    assert_type(run, fedstream.RunRecord)
    assert_type(fedstream.simulate(Mine, devices=20, journal=False), fedstream.RunRecord)
    table = {"name": Mine, "args": {"hidden": 3}}
    assert_type(fedstream.run(table, strategy=Rule, solver=fedstream.Solver()), fedstream.RunRecord)
    fedstream.simulate(strategy=Rule(buffer_size=3), solver=fedstream.Solver)
    trusting = fedstream.open("here", trust_recorded_code=True, changed_rules=True)
    assert_type(trusting, fedstream.RunRecord)
    assert_type(fedstream.open("here"), fedstream.RunRecord)
    assert_type(fedstream.compare([run, "here"]), fedstream.Comparison)
    history: pd.DataFrame = run.history()
    weights: dict[str, Tensor] = run.model(10)
    fedstream.run(verions=3)  # type: ignore[call-arg]
    fedstream.run(3)  # type: ignore[arg-type]
    unknown = fedstream.nothing  # type: ignore[attr-defined]
    del history, weights, unknown


def test_every_stable_name_is_there() -> None:
    for name in fedstream.__all__:
        assert getattr(fedstream, name) is not None
