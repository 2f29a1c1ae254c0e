"""The same client as a NumPyClient."""

import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from digits_app.task import Net, load_data, test, train


class Client(NumPyClient):
    """Trains on one partition."""

    def __init__(self, node, run):
        self.net = Net()
        self.epochs = run["local-epochs"]
        self.data, self.held_out = load_data(
            node["partition-id"], node["num-partitions"], run["batch-size"]
        )

    def get_parameters(self, config):
        return [values.numpy() for values in self.net.state_dict().values()]

    def load(self, parameters):
        state = zip(self.net.state_dict(), map(torch.tensor, parameters), strict=True)
        self.net.load_state_dict(dict(state))

    def fit(self, parameters, config):
        self.load(parameters)
        loss = train(self.net, self.data, self.epochs, config["lr"])
        return self.get_parameters(config), len(self.data.dataset), {"train_loss": loss}

    def evaluate(self, parameters, config):
        self.load(parameters)
        loss, accuracy = test(self.net, self.held_out)
        return loss, len(self.held_out.dataset), {"accuracy": accuracy}


app = ClientApp(lambda context: Client(context.node_config, context.run_config).to_client())
