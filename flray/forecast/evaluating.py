"""What evaluations will take, from some that ask a part of the clients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from flray.forecast.sampling import Sampling
from flray.server.loop import Server, packages_of

FEWEST = 10  # Sample of the first evaluation that is measured
GROWTH = 4  # A sample as a multiple of the one before


class Evaluated(NamedTuple):
    """An evaluation that was measured."""

    num_clients: int
    seconds: float


@dataclass(frozen=True)
class EvaluationTime:
    """The time of an evaluation: linear in the number of its clients.

    >>> time = EvaluationTime(small=Evaluated(10, seconds=2.0), large=Evaluated(40, seconds=5.0))
    >>> time.of(40), time.of(100)
    (5.0, 11.0)
    """

    small: Evaluated
    large: Evaluated

    def of(self, num_clients: int) -> float:
        """Seconds of an evaluation of so many clients."""
        (few, short), (many, long) = self.small, self.large
        slope = max(long - short, 0.0) / (many - few) if many > few else long / many
        return max(long + slope * (num_clients - many), 0.0)


def evaluation_time(
    evaluate: Callable[[int], Evaluated], num_clients: int, budget_s: float
) -> EvaluationTime:
    """Measure evaluations of larger and larger samples, up to all clients if there is time.

    Args:
        evaluate: Evaluates a sample of this size.
        num_clients: The size of a sample that is everybody.
        budget_s: Seconds that the last and longest of them should not exceed.

    >>> line = evaluation_time(lambda num: Evaluated(num, 1.0 + 0.1 * num), 1000, budget_s=20.0)
    >>> line.large.num_clients, line.of(1000)
    (160, 101.0)
    """
    size = min(FEWEST, num_clients)
    small = evaluate(size)
    if small.seconds <= budget_s:
        small = evaluate(size)  # libraries are loaded by now
    large = small
    while size < num_clients and GROWTH * large.seconds <= budget_s:
        size = min(GROWTH * size, num_clients)
        large = evaluate(size)
    return EvaluationTime(small, large)


def rehearsed_evaluation(server: Server, engine: Sampling, budget_s: float) -> EvaluationTime:
    """The time of a server's evaluations after the last round that it has run.

    Fine-tuning, whose steps a rehearsal leaves out, counts with what it would take.

    Args:
        engine: That of the server's clients.
        budget_s: As for `evaluation_time`.
    """
    checkpoint = server.directory.store(packages_of(server.algorithm)).load_latest(server.device)
    assert checkpoint is not None  # a rehearsal has rounds
    state, t = checkpoint.state, checkpoint.round
    fed = server.fed.during(t)

    def evaluate(size: int) -> Evaluated:
        sampled = replace(server.evaluation, clients=size, clients_at_end=size)
        engine.blocks.clear()
        begin = perf_counter()
        replace(server, evaluation=sampled).evaluate(server.deployed(state, t), state, t)
        left_out = sum(block.predicted - block.rehearsed for block in engine.blocks)
        return Evaluated(len(fed.scored(size)), perf_counter() - begin + left_out)

    return evaluation_time(evaluate, max(len(fed.clients), len(fed.holdout)), budget_s)
