"""Flower: ServerApp, ClientApp and FedAvg on its Ray backend, in Flower's own environment.

python benchmarks/peers/run_flower.py FOLDER SYSTEM [CPUS GPUS of a client]
"""

import os
import sys
from time import sleep

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ADDRESS", "local")
import torch
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Report, Work

FOLDER, SYSTEM = sys.argv[1:3]
CPUS, GPUS = (float(n) for n in (sys.argv[3:5] or (1, 0)))
WORK = Work(FOLDER)
REPORT = Report(SYSTEM, WORK)
server_app = ServerApp()


class FixedCohorts(FedAvg):
    """FedAvg with the cohorts of the work, and a clock."""

    def configure_train(self, server_round, arrays, config, grid):
        while len(nodes := sorted(grid.get_node_ids())) < WORK.num_clients:
            sleep(0.05)
        return [
            Message(
                content=RecordDict({"arrays": arrays, "config": _config(server_round - 1, client)}),
                message_type=MessageType.TRAIN,
                dst_node_id=nodes[client],
            )
            for client in WORK.cohorts[server_round - 1].tolist()
        ]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if len(replies) != WORK.num_heard or any(reply.has_error() for reply in replies):
            raise RuntimeError(f"a client failed in round {server_round}")
        found = super().aggregate_train(server_round, replies)
        REPORT.round_done()
        return found


def _config(t: int, client: int) -> ConfigRecord:
    return ConfigRecord({"folder": str(WORK.folder), "t": t, "client": client})


@server_app.main()
def main(grid: Grid, context: Context) -> None:  # noqa: ARG001  # as Flower calls it
    strategy = FixedCohorts(fraction_evaluate=0.0, min_available_nodes=WORK.num_clients)
    REPORT.start()
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(WORK.initial()), num_rounds=WORK.num_rounds
    )
    REPORT.finish(dict(result.arrays.to_torch_state_dict()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=WORK.num_clients,
        backend_config={"client_resources": {"num_cpus": CPUS, "num_gpus": GPUS}},
    )
