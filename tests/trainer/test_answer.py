"""What a device sends: what train() must return, and the difference that it made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstream.core.layout import Model
from fedstream.trainer.learner import as_sent
from fedstream.trainer.solvers import NoCompression, Trained
from fedstream.trainer.vector import layout_of
from tests.trainer.adding import Point


@pytest.mark.parametrize(
    ("trained", "error", "said"),
    [
        (None, TypeError, "not NoneType"),
        (Trained(1, 1, 0.5), TypeError, "control="),
        (Trained(-1, 1, 0.5), ValueError, "no negative numbers"),
    ],
)
def test_train_must_return_trained(trained: object, error: type[Exception], said: str) -> None:
    layout = layout_of(Point()).with_controls()
    with pytest.raises(error, match=said):
        as_sent(trained, Model(layout), Model(layout), None, "delta", NoCompression())


@pytest.mark.parametrize("known", [None, 0.5])
def test_update_is_the_difference_from_the_base(known: float | None) -> None:
    layout = layout_of(Point()).with_controls()
    base, into = Model(layout), Model(layout)
    base.floats[:], into.floats[:] = 1.0, 3.0
    control = np.full(4, 2.0, np.float32)
    device_control = None if known is None else np.full(4, known, np.float32)
    some: Any = np.int64(2)  # numpy's numbers are no JSON
    trained = Trained(some, some, 0.5, control)
    took = as_sent(trained, into, base, device_control, "delta", NoCompression())
    assert into.parameters.tolist() == [2.0] * 4
    assert into.controls.tolist() == [2.0 - (known or 0.0)] * 4
    assert (took, type(took.steps)) == (Trained(2, 2, 0.5), int)
