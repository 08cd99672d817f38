"""What a user of Lightning brings: a LightningDataModule, and a module with a validation_step."""

import numpy as np
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import flray
from flray.config.experiment import parse_experiment
from flray.errors import ExperimentError
from flray.models.mlp200 import Mlp200
from flray.runs.remarks import remarks

X, Y = torch.rand(60, 4, 4), torch.arange(60) % 3
KEYS = {"split": {"name": "iid", "clients": 3}, "algorithm": "fedavg", "rounds": 1}


class Pairs(Dataset):
    """Items as most datasets give them: a tensor and a plain number."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return X[self.first + k], int(Y[self.first + k])


def data_module(**methods):
    """A data module that knows its data after setup."""

    def setup(self, stage: str) -> None:
        parts = {"fit": Pairs(0, 45), "test": Pairs(45, 60)}
        setattr(self, stage, parts[stage])

    own = {
        "setup": setup,
        "train_dataloader": lambda self: DataLoader(self.fit, batch_size=7, shuffle=True),
        "test_dataloader": lambda self: DataLoader(self.test),
    }
    return type("Mine", (pytorch_lightning.LightningDataModule,), own | methods)()


def test_a_data_module_is_the_dataset_of_its_tensors(tmp_path) -> None:
    tensors = (X[:45], Y[:45], X[45:], Y[45:])
    runs = [
        flray.run(out=tmp_path / str(n), dataset=dataset, model="mlp200", **KEYS)
        for n, dataset in enumerate((data_module(), tensors))
    ]
    found, expected = (run.summary["params_sha256"] for run in runs)
    assert found == expected
    assert runs[0].summary["dataset"].endswith(":Mine")


def test_a_data_module_without_a_test_loader_has_no_test_part() -> None:
    methods = {"train_dataloader": lambda self: DataLoader(self.fit)}
    module = data_module(**methods)
    del type(module).test_dataloader
    keys = KEYS | {"dataset": module, "model": "mlp200"}
    dataset = parse_experiment(keys).dataset.build().load()
    assert (dataset.num_train, len(dataset.test_ids)) == (45, 0)
    assert np.array_equal(dataset.labels, Y[:45])


def test_a_remark_says_that_a_loader_for_validation_is_not_used() -> None:
    keys = KEYS | {"model": "mlp200"}
    module = data_module(val_dataloader=lambda self: DataLoader(self.fit))
    (remark,) = remarks(parse_experiment(keys | {"dataset": module}))
    assert remark.startswith("Mine.val_dataloader is not used: validation parts are cut from")
    assert list(remarks(parse_experiment(keys | {"dataset": data_module()}))) == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def test_loaders_that_have_no_dataset_are_refused() -> None:
    for loader in ([1, 2], DataLoader(Stream())):
        module = data_module(train_dataloader=lambda _, given=loader: given)
        keys = KEYS | {"dataset": module, "model": "mlp200"}
        with pytest.raises(ExperimentError, match="train_dataloader must return one DataLoader"):
            parse_experiment(keys)


class Validating(Mlp200):
    def validation_step(self, batch, batch_idx) -> None:
        self.log("val_loss", 0.0)


@pytest.mark.parametrize("model", [Validating, Validating((1, 8, 8), 10)], ids=["class", "object"])
def test_a_remark_says_that_validation_step_is_not_called(model) -> None:
    keys = KEYS | {"dataset": {"name": "digits", "size": 8}}
    (remark,) = remarks(parse_experiment(keys | {"model": model}))
    assert remark.startswith("Validating.validation_step is not called")
    assert list(remarks(parse_experiment(keys | {"model": "mlp200"}))) == []


def test_a_remark_names_hooks_that_only_a_trainer_calls() -> None:
    class Clipping(Mlp200):
        def configure_gradient_clipping(self, *_: object) -> None:
            raise AssertionError

    keys = KEYS | {"dataset": {"name": "digits", "size": 8}, "model": Clipping}
    (remark,) = remarks(parse_experiment(keys))
    assert remark.startswith("Clipping.configure_gradient_clipping: called by")
    assert list(remarks(parse_experiment(keys | {"execution": {"engine": "lightning"}}))) == []
