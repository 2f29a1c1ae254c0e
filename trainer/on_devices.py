"""Evaluation on the devices: which devices are asked, and the metrics over their answers. No I/O.

In the field nobody has a central test set. A device measures a version on its own test data, and
answers with its metrics' sums and weights alone.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fedstream.runtime.config import Section


class OnDevicesSettings(Section):
    """The table ``[evaluator.on_devices]``: how many devices measure a version, and how often."""

    fraction: Annotated[float, Field(gt=0, le=1)] | None = None  # of the devices that are present
    count: Annotated[int, Field(ge=1)] | None = None  # of devices, in place of a fraction
    every: Annotated[int, Field(ge=1)] | None = None  # versions; None: `evaluator.every`
    min_devices: Annotated[int, Field(ge=1)] = 1  # with fewer measured, a version has no metrics
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0  # of an evaluation
    share: Annotated[float, Field(gt=0, le=1)] = 0.5  # of the workers that may measure at a time
    # Largest counted weight of a device of an untrusted site; None: 10 times the median weight.
    most_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _has_one_number(self) -> Self:
        if (self.fraction is None) == (self.count is None):
            raise ValueError("needs a fraction of the devices, or their count")
        if self.count is not None and self.count < self.min_devices:
            raise ValueError(f"count = {self.count} is below min_devices = {self.min_devices}")
        return self
