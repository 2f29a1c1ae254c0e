"""The client, written with Flower's Message API."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import Net, load_data, test, train

app = ClientApp()


def received(message: Message, context: Context):
    """The model that was sent, and this partition's data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    node, run = context.node_config, context.run_config
    return net, *load_data(node["partition-id"], node["num-partitions"], run["batch-size"])


@app.train()
def train_on_partition(message: Message, context: Context):
    net, data, _ = received(message, context)
    lr = message.content["config"]["lr"]
    loss = train(net, data, context.run_config["local-epochs"], lr)
    numbers = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": numbers})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate_on_partition(message: Message, context: Context):
    net, _, data = received(message, context)
    loss, accuracy = test(net, data)
    numbers = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)
