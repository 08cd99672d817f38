"""Flower's ClientApp, in a module of its own so that Ray imports it and its cache lasts."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from work import Work

app = ClientApp()


@cache
def loaded(folder: str):
    torch.set_num_threads(1)
    work = Work(folder)
    work.load_data()
    return work, work.new_net()


@app.train()
def train(message: Message, context: Context) -> Message:  # noqa: ARG001  # as Flower calls it
    config = message.content["config"]
    work, net = loaded(str(config["folder"]))
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(net, int(config["t"]), int(config["client"]))
    answer = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": work.num_examples}),
    }
    return Message(content=RecordDict(answer), reply_to=message)
