"""Build an experiment: from checked configuration to a server ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from flray.client.host import HostSettings, start_host
from flray.config.experiment import Experiment
from flray.data.dataset import Dataset
from flray.data.split import Split
from flray.errors import ExperimentError
from flray.execution.executor import Inline
from flray.execution.federation import Federation
from flray.execution.settings import default_block
from flray.models.bank import build_seeded, params_of, stack
from flray.randomness import torch_seed
from flray.records.environment import environment
from flray.records.run_directory import RunDirectory
from flray.server.loop import Row, Server, ignore, never


@dataclass(frozen=True)
class Result:
    """A run directory read back."""

    path: Path
    summary: dict[str, Any] | None  # Any: JSON; None when the run was stopped before its last round
    rounds: pd.DataFrame
    clients: pd.DataFrame


def run_experiment(
    experiment: Experiment,
    out: Path,
    resume: bool = False,
    on_round: Callable[[Row], None] = ignore,
    should_stop: Callable[[], bool] = never,
) -> Result:
    """Run an experiment into the folder `out`; with resume, go on where it stopped."""
    directory = RunDirectory(out)
    (directory.check_resume if resume else directory.check_start)(experiment.plain)
    if directory.summary() is None:
        server = build_server(experiment, directory, on_round, should_stop)
        try:
            server.run()
        finally:
            server.fed.executor.close()
    return Result(out, directory.summary(), directory.rounds(), directory.clients())


def build_server(
    experiment: Experiment,
    directory: RunDirectory,
    on_round: Callable[[Row], None],
    should_stop: Callable[[], bool],
) -> Server:
    settings = experiment.settings
    dataset: Dataset = experiment.dataset.build().load()
    split = deal(experiment, dataset)
    fed = build_federation(experiment, dataset, split)
    directory.resume(experiment.plain, environment(), split.digest())
    return Server(
        algorithm=experiment.algorithm.build(),
        fed=fed,
        split=split,
        evaluation=settings.evaluate,
        num_rounds=settings.rounds,
        directory=directory,
        facts=_facts(experiment, fed),
        device=settings.execution.resolve_device(),
        on_round=on_round,
        should_stop=should_stop,
    )


def deal(experiment: Experiment, dataset: Dataset) -> Split:
    """The split of the experiment, from its seed."""
    split: Split = experiment.split.build().split(dataset, experiment.settings.seed)
    if not any(len(split.test[i]) for i in split.clients):
        raise ExperimentError(
            f"no client has test examples (split.test={experiment.split.plain.get('test')!r}): "
            "give clients more samples or choose split.test=proportional"
        )
    return split


def build_federation(experiment: Experiment, dataset: Dataset, split: Split) -> Federation:
    settings, execution = experiment.settings, experiment.settings.execution
    module = build_seeded(
        lambda: experiment.model.build(
            image_shape=dataset.image_shape, num_classes=dataset.num_classes
        ),
        torch_seed(settings.seed, "initial model"),
    )
    device = execution.resolve_device()
    num_params = sum(p.numel() for p in module.parameters())
    cohort_size = max(int(settings.participation * len(split.clients)), 1)
    block = execution.block or default_block(num_params, cohort_size, device)
    host = start_host(
        module,
        dataset,
        split,
        HostSettings(
            engine=execution.engine,
            device=device,
            dtype=execution.dtype,
            num_slots=block,
            threads=execution.threads,
            seed=settings.seed,
        ),
    )
    return Federation(
        clients=split.clients,
        num_clients=split.num_clients,
        num_examples=split.num_train_examples,
        initial=stack([params_of(host.module)]),
        executor=Inline(host),
        training=settings.train,
        aggregation=settings.aggregate,
        participation=settings.participation,
        block=block,
        seed=settings.seed,
        on_client_failure=settings.on_client_failure,
    )


def describe(experiment: Experiment) -> str:
    """Build everything but train nothing: what the experiment would be, in a sentence."""
    dataset: Dataset = experiment.dataset.build().load()
    split = deal(experiment, dataset)
    fed = build_federation(experiment, dataset, split)
    sizes = split.num_train_examples[split.clients]
    num_params = sum(leaf.numel() for leaf in fed.initial.values())
    fed.executor.close()
    return (
        f"{experiment.settings.rounds} rounds of {experiment.algorithm.name} with "
        f"{len(split.clients)} clients of {sizes.min()} to {sizes.max()} training examples, "
        f"{num_params:,} parameters, blocks of {fed.block}"
    )


def _facts(experiment: Experiment, fed: Federation) -> dict[str, str | int]:
    """What a summary says of the run beside its numbers: names, and what decides its bits."""
    names = {
        kind: experiment.plain[kind]["name"] for kind in ("algorithm", "dataset", "split", "model")
    }
    return {**names, "seed": experiment.settings.seed, "block": fed.block}
