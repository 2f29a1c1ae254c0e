"""A Flower app without training: the client returns nearly what it gets. LeNet, 61,706 parameters.

``app`` is written with the Message API, ``numpy_app`` as a NumPyClient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn

app = ClientApp()


class Net(nn.Module):
    """The layers of LeNet, which are never computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)


@app.train()  # type: ignore[untyped-decorator]  # flwr is not where mypy runs
def train(message: Message, _: Any) -> Message:
    """Change one value: the same model again would not have to be downloaded."""
    arrays = dict(message.content["arrays"].items())
    bias = arrays["fc3.bias"].numpy()
    arrays["fc3.bias"] = Array(bias + np.float32(1e-3))
    numbers = MetricRecord({"num-examples": 1, "train_loss": 0.0})
    return Message(
        RecordDict({"arrays": ArrayRecord(arrays), "metrics": numbers}), reply_to=message
    )


class Client(NumPyClient):  # type: ignore[misc]  # as above
    """The same."""

    def fit(self, parameters: list[Any], config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        """Change one array."""
        return [*parameters[:-1], parameters[-1] + np.float32(1e-3)], 1, {"train_loss": 0.0}


numpy_app = ClientApp(lambda _: Client().to_client())
