"""Apple's pfl: simulated FederatedAveraging of a PyTorchModel, in pfl's own environment.

torchrun --standalone --nproc-per-node N benchmarks/peers/run_pfl.py FOLDER SYSTEM
"""

import os
import sys

from work import DEVICE, NETS, Report, Work

os.environ.setdefault("PFL_PYTORCH_DEVICE", DEVICE)
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F

NEVER = 10**9  # rounds between evaluations; pfl evaluates the first in any case
SPARE = 64  # draws that pfl makes ahead


def net_class(model: str) -> type[torch.nn.Module]:
    class Net(NETS[model]):
        def loss(self, x, y):
            self.train()
            return F.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x, y):
            self.eval()
            return {"loss": Weighted(float(F.cross_entropy(self(x), y, reduction="sum")), len(y))}

    return Net


class Clock(TrainingProcessCallback):
    def __init__(self, report: Report) -> None:
        self.report = report

    def on_train_begin(self, *, model):
        self.report.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.report.round_done()
        return False, Metrics()


def main() -> None:
    work, system = Work(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    work.load_data()
    users = [(t, int(i)) for t in range(work.num_rounds) for i in work.cohorts[t]]
    draws = iter(users + users[:1] * SPARE)

    def dataset(user):
        return PyTorchTensorDataset(work.examples(*user), user_id=str(user[1]))

    federated = FederatedDataset(dataset, lambda: next(draws))
    net = net_class(work.model)()
    net.load_state_dict(work.initial())
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    report = Report(system, work)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.num_rounds,
            evaluation_frequency=NEVER,
            train_cohort_size=work.num_heard,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=federated, val_data=federated, postprocessors=[WeightByDatapoints()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock(report)],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        report.finish(dict(model.pytorch_model.state_dict()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
