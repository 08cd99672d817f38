"""What client actors need and what there is: refused with the arithmetic, never left to hang."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flray.errors import ExperimentError

ROUNDING = 1e-6  # ten times 0.1 GPU is one GPU
ACTOR_MEMORY = 0.5e9  # bytes of a process with torch and Lightning, before its data


@dataclass(frozen=True)
class Actors:
    """The pool of client actors."""

    count: int | Literal["per_client"] = 2
    num_cpus: float = 1.0  # of each
    num_gpus: float = 0.0  # of each; 0.1 puts ten actors on one GPU

    def __post_init__(self) -> None:
        if isinstance(self.count, int) and self.count < 1:
            raise ValueError(f"count must be >= 1 or per_client, got {self.count}")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise ValueError(
                f"num_cpus and num_gpus must be >= 0, got {self.num_cpus} and {self.num_gpus}"
            )
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus above 1 must be whole, got {self.num_gpus}")

    def number(self, num_clients: int) -> int:
        return num_clients if self.count == "per_client" else self.count


@dataclass(frozen=True)
class ActorPlan:
    """What a pool asks for, printed before anything starts."""

    num_actors: int
    actors: Actors
    block: int
    blocks_per_round: int

    def __str__(self) -> str:
        each = f"{self.actors.num_cpus:g} CPU"
        each += f", {self.actors.num_gpus:g} GPU" if self.actors.num_gpus else ""
        total = f"{self.num_actors * self.actors.num_cpus:g} CPU"
        if self.actors.num_gpus:
            total += f", {self.num_actors * self.actors.num_gpus:g} GPU"
        memory = self.num_actors * ACTOR_MEMORY / 1e9
        text = (
            f"{self.num_actors} client actors of {each} each = {total}, about {memory:.1f} GB; "
            f"{self.blocks_per_round} blocks of {self.block} clients a round"
        )
        if self.num_idle:
            text += (
                f"; {self.num_idle} of the actors are idle: lower execution.block or "
                "execution.actors.count"
            )
        return text

    @property
    def num_idle(self) -> int:
        """Actors for which a round has no block."""
        return max(0, self.num_actors - self.blocks_per_round)


def check_resources(plan: ActorPlan, there: Mapping[str, float]) -> None:
    """Refuse what the cluster cannot give; `there` is what is free, as Ray counts it."""
    needs = (
        ("CPU", plan.actors.num_cpus, 1.0, "actors.count or actors.num_cpus"),
        ("GPU", plan.actors.num_gpus, 1.0, "actors.count or actors.num_gpus"),
        ("memory", ACTOR_MEMORY, 1e9, "actors.count"),
    )
    for kind, each, scale, remedy in needs:
        free = there.get(kind, 0.0) + ROUNDING
        if plan.num_actors * each > free:
            unit = "GB of memory" if kind == "memory" else kind
            raise ExperimentError(
                f"execution.actors asks for {plan.num_actors} x {each / scale:g} = "
                f"{plan.num_actors * each / scale:g} {unit}, the cluster has "
                f"{free / scale:.3g} free: {int(free / each)} such actors fit; lower {remedy}"
            )
