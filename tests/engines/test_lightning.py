"""Engine `lightning` is `loop`, bit by bit on a CPU, with everything Lightning brings."""

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from torch import nn
from torchmetrics import MaxMetric

import flray
from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.engines.engine import Block
from flray.engines.lightning import Lightning
from flray.engines.loop import Loop
from flray.engines.training import Training
from flray.errors import ClientFailure, ExperimentError
from flray.models import MODELS
from flray.models.bank import Params, build_seeded

from scenarios import RAGGED, TINY, largest_gap, pairwise, ragged_case, same_bits

pytestmark = pytest.mark.slow

TRAININGS = {
    "momentum": Training(lr=0.05, momentum=0.9, weight_decay=0.01, epochs=2, batch_size=4),
    "adam": Training(optimizer="adam", lr=0.001, epochs=2, batch_size=4),
    "module": Training(optimizer="module", epochs=2, batch_size=4),
}
GRADIENTS = {"fedavg": FedAvg().gradient, "fedprox": FedProx(mu=0.5).gradient}


def setup(training: Training, augment: str = "none"):
    build = lambda: MODELS["mlp200"]((1, 28, 28), 10, hidden=20, dropout=0.5)  # noqa: E731
    module = build_seeded(build, 0)
    return module, *ragged_case(module, training, shape=(1, 28, 28), augment=augment)


@pytest.mark.parametrize(
    ("augment", "gradient", "optimizer"), pairwise(["none", "crop_flip"], GRADIENTS, TRAININGS)
)
def test_lightning_is_loop_bit_by_bit(optimizer, gradient, augment) -> None:
    training, hook = TRAININGS[optimizer], GRADIENTS[gradient]
    module, examples, block = setup(training, augment)
    a = Loop(module, examples).train(block, training, hook)
    b = Lightning(module, examples).train(block, training, hook)
    assert same_bits(a.params, b.params)
    assert not any(torch.equal(leaf, block.w0[name]) for name, leaf in a.params.items())
    assert (a.loss == b.loss).all()


class TwoPoints:
    """Asks for the gradient at another point too, as Per-FedAvg does."""

    def __call__(self, grad, w, batch, w0, memo):
        g = grad(w, batch)
        return grad({name: w[name] - 0.01 * g[name] for name in g}, batch)


def test_a_gradient_elsewhere_is_that_of_loop() -> None:
    training = TRAININGS["momentum"]
    module, examples, block = setup(training)
    a = Loop(module, examples).train(block, training, TwoPoints())
    b = Lightning(module, examples).train(block, training, TwoPoints())
    assert largest_gap(a.params, b.params) < 1e-6


def test_memos_reach_their_clients() -> None:
    training = TRAININGS["momentum"]
    module, examples, block = setup(training)
    memo = {name: torch.full_like(leaf, 0.01) for name, leaf in block.w0.items()}

    def shifted(grad, w, batch, w0, memo):  # noqa: ARG001
        return {name: g + memo[name] for name, g in grad(w, batch).items()}

    full = Block(block.plans, block.w0, memo)
    a = Loop(module, examples).train(full, training, shifted)
    b = Lightning(module, examples).train(full, training, shifted)
    assert same_bits(a.params, b.params)


class WithBatchNorm(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.layers = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch, batch_idx) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self(batch[0]), batch[1])}


def test_batch_norm_and_its_statistics_are_those_of_loop() -> None:
    training = Training(lr=0.1, momentum=0.5, epochs=2, batch_size=4)
    module = build_seeded(WithBatchNorm, 0)
    examples, block = ragged_case(module, training, shape=(1, 28, 28), sizes=(8, 12))
    a = Loop(module, examples).train(block, training, GRADIENTS["fedprox"])
    b = Lightning(module, examples).train(block, training, GRADIENTS["fedprox"])
    assert not torch.equal(a.params["layers.2.running_mean"], block.w0["layers.2.running_mean"])
    assert same_bits(a.params, b.params)


SEEN: list[tuple[str, int]] = []


class Witness(Callback):
    """Sees epochs and batches as in any Trainer; new for each client, so it starts from zero."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.batches += 1

    def on_train_end(self, trainer, pl_module) -> None:
        SEEN.append((type(pl_module).__name__, self.batches, trainer.current_epoch))


def test_the_users_callbacks_see_every_client() -> None:
    training = TRAININGS["momentum"]
    module, examples, block = setup(training)
    SEEN.clear()
    Lightning(module, examples, (Witness,)).train(block, training, GRADIENTS["fedavg"])
    assert [("Mlp200", 2 * -(-n // 4), 2) for n in RAGGED] == SEEN


CALLBACK = """
from pathlib import Path
from pytorch_lightning import Callback

class Diary(Callback):
    def on_train_end(self, trainer, pl_module):
        with Path("diary.txt").open("a") as diary:
            diary.write(f"{trainer.global_step}\\n")
"""


def test_a_run_on_lightning_is_the_run_on_loop(tmp_path, monkeypatch) -> None:
    (tmp_path / "diary_of_tests.py").write_text(CALLBACK)
    monkeypatch.chdir(tmp_path)
    callbacks = "execution.callbacks=['diary_of_tests:Diary']"
    with pytest.raises(ExperimentError, match="callbacks run on engine lightning only"):
        flray.run(TINY, tmp_path / "no", [callbacks])
    dropout = "model.dropout=0.5"  # off in evaluation, on again in the next round
    a = flray.run(TINY, tmp_path / "a", ["execution.engine=loop", dropout])
    b = flray.run(TINY, tmp_path / "b", ["execution.engine=lightning", dropout, callbacks])
    assert a.summary["params_sha256"] == b.summary["params_sha256"]
    steps = [int(line) for line in (tmp_path / "diary.txt").read_text().split()]
    assert sum(steps) == b.summary["client_steps"]
    assert len(steps) == 4 * 3  # rounds, clients a round


class Scheduled(LightningModule):
    """Logs, and lowers its learning rate."""

    form = "dict"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch, batch_idx) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("my_loss", loss)
        self.log_dict({"ones": 1.0})
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        halve = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if self.form == "plain":
            return optimizer
        if self.form == "lists":
            return [optimizer], [halve]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": halve, "interval": self.form, "frequency": 1},
        }


@pytest.mark.parametrize("form", ["epoch", "step", "lists"])
def test_a_modules_scheduler_is_followed_alike_by_both_engines(form, monkeypatch) -> None:
    training = Training(optimizer="module", epochs=3, batch_size=4)

    def trained(engine, form: str) -> Params:
        monkeypatch.setattr(Scheduled, "form", form)
        module = build_seeded(Scheduled, 0)
        examples, block = ragged_case(module, training, shape=(1, 28, 28))
        return engine(module, examples).train(block, training, GRADIENTS["fedavg"]).params

    a, b, plain = trained(Loop, form), trained(Lightning, form), trained(Loop, "plain")
    assert same_bits(a, b)
    assert not any(torch.equal(leaf, plain[name]) for name, leaf in a.items())


class Manual(Scheduled):
    """Steps two optimisers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx) -> None:
        optimizers = self.optimizers()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_two_optimizers_that_a_module_steps_are_one_over_all_its_parameters(gradient) -> None:
    training, hook = Training(optimizer="module", epochs=2, batch_size=4), GRADIENTS[gradient]
    module, plain = build_seeded(Manual, 0), build_seeded(Scheduled, 0)
    examples, block = ragged_case(module, training, shape=(1, 28, 28))
    plain.form = "plain"
    a = Lightning(module, examples).train(block, training, hook)
    b = Loop(plain, examples).train(block, training, hook)
    assert same_bits(a.params, b.params)
    assert not any(torch.equal(leaf, block.w0[name]) for name, leaf in a.params.items())


class Several(Scheduled):
    configure_optimizers = Manual.configure_optimizers


class Lbfgs(Scheduled):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize("model", [Manual, Several, Lbfgs])
def test_optimizers_that_loop_cannot_step_are_refused_with_what_to_do(model, tmp_path) -> None:
    keys = {"dataset": "digits", "split": {"name": "iid", "clients": 3}, "algorithm": "fedavg"}
    with pytest.raises(ExperimentError, match=r"execution\.engine=lightning"):
        flray.run(keys, tmp_path, model=model, train={"optimizer": "module"}, rounds=1)


class Lossless(Scheduled):
    def training_step(self, batch, batch_idx):
        Scheduled.training_step(self, batch, batch_idx)  # returns nothing


@pytest.mark.parametrize("engine", ["loop", "lightning"])
def test_a_training_step_without_a_loss_is_named(engine, tmp_path) -> None:
    keys = {"dataset": "digits", "split": {"name": "iid", "clients": 3}, "algorithm": "fedavg"}
    with pytest.raises(ClientFailure, match=r"Lossless.training_step must return a loss, or a di"):
        flray.run(keys, tmp_path, model=Lossless, execution={"engine": engine}, rounds=1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("engine", ["loop", "lightning"])
def test_what_a_module_logs_is_recorded_without_a_warning(engine, tmp_path) -> None:
    keys = {"dataset": "digits", "split": {"name": "iid", "clients": 3}, "model": Scheduled}
    settings = {"rounds": 2, "train": {"batch_size": 50}, "execution": {"engine": engine}}
    result = flray.run(keys | settings, tmp_path / "run", algorithm="fedavg")
    assert (result.rounds["logged_ones"] == 1).all()
    # a mean over clients of means over steps, as the training loss is
    assert result.rounds["logged_my_loss"].tolist() == pytest.approx(result.rounds["train_loss"])
    assert "logged_ones" not in result.summary


TAKEN = ("accuracy_mean", "loss_mean", "round", "seconds", "train_loss")


@pytest.mark.parametrize("engine", ["loop", "lightning"])
def test_a_metric_that_a_module_logs_is_recorded_for_each_batch(engine, tmp_path) -> None:
    class WithMetric(Scheduled):
        def __init__(self) -> None:
            super().__init__()
            self.largest = MaxMetric()

        def training_step(self, batch, batch_idx):
            self.largest(batch[1])
            self.log("largest", self.largest)
            self.log("largest_of_batch", batch[1].max().float())
            self.log("largest_so_far", self.largest.compute())
            for name in TAKEN:
                self.log(name, 77.0)
            return super().training_step(batch, batch_idx)

    keys = {"dataset": "digits", "split": {"name": "iid", "clients": 60}, "algorithm": "fedavg"}
    settings = {"participation": 0.05, "train": {"batch_size": 2}, "execution": {"engine": engine}}
    rounds = flray.run(keys | settings, tmp_path / "run", model=WithMetric, rounds=1).rounds
    for name in TAKEN:  # a prefix keeps them apart from the run's own
        assert rounds[f"logged_{name}"].tolist() == [77.0]
        assert rounds[name].tolist() != [77.0]
    assert rounds["logged_largest"].tolist() == rounds["logged_largest_of_batch"].tolist()
    assert (rounds["logged_largest"] < rounds["logged_largest_so_far"]).all()


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # evaluated without a Trainer
@pytest.mark.parametrize("engine", ["loop", "lightning"])
def test_a_step_without_an_index_and_a_forward_that_logs_run(engine, tmp_path) -> None:
    class Logging(Scheduled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.log("largest", x.max())
            return super().forward(x)

        def training_step(self, batch):
            return super().training_step(batch, 0)

    keys = {"dataset": "digits", "split": {"name": "iid", "clients": 3}, "algorithm": "fedavg"}
    settings = {"train": {"batch_size": 50}, "execution": {"engine": engine}, "rounds": 2}
    rounds = flray.run(keys | settings, tmp_path / "run", model=Logging).rounds
    assert (rounds["logged_largest"] > 0).all()


def test_modules_of_the_package_lightning_train_too(tmp_path) -> None:
    lightning = pytest.importorskip("lightning")

    class Other(lightning.LightningModule):
        __init__ = Scheduled.__init__

    for name in ("forward", "training_step", "configure_optimizers", "form"):
        setattr(Other, name, getattr(Scheduled, name))
    Other.form = "plain"

    def build() -> Other:
        module = lightning.LightningModule.__new__(Other)
        lightning.LightningModule.__init__(module)
        module.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        return module

    keys = {"dataset": "digits", "split": {"name": "iid", "clients": 3}, "algorithm": "fedavg"}
    settings = {"rounds": 1, "train": {"batch_size": 50, "optimizer": "module"}, "model": build}
    runs = [
        flray.run(keys | settings, tmp_path / engine, execution={"engine": engine}).summary
        for engine in ("loop", "lightning")
    ]
    assert runs[0]["params_sha256"] == runs[1]["params_sha256"]
