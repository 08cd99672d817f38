"""Resources of client actors: what a run asks for, and whether the cluster has it.

If resources are short, the run is refused before it starts and the message shows the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Self

from flray.errors import ExperimentError
from flray.values import require_at_least
from flray.wording import counted

ROUNDING = 1e-6  # ten times 0.1 GPU is one GPU
# Bytes of a client actor without data, and of a server. With torch and Lightning imported 0.51e9
# and 0.47e9 were measured; the rest is for what is imported later and for Ray's own buffers.
PROCESS_BYTES = 600_000_000
SERVER_BYTES = 700_000_000
# Copies of a model in training: params, gradients, momentum, Adam's second moment, w0, a temporary.
COPIES_OF_A_MODEL = 6
COPIES_IN_A_BLOCK = 2  # copies of every model of a block: before training and after it
STEP = 50_000_000  # bytes to which an estimate is rounded up
TRAININGS_KEPT = 2  # trainings whose models stay with the actor that trained them
COPIES_ON_THE_SERVER = 3  # copies of each model of a cohort: received, mixed, written

Kind = Literal["CPU", "GPU", "memory"]
KINDS: tuple[Kind, ...] = ("CPU", "GPU", "memory")


@dataclass(frozen=True)
class Actors:
    """The pool of client actors, and what each of them asks Ray for.

    Any actor trains any client: all client state travels with the job.

    >>> Actors(count=4).number(num_clients=100), Actors(count="per_client").number(100)
    (4, 100)
    >>> Actors(num_gpus=1.5)
    Traceback (most recent call last):
    ValueError: num_gpus above 1 must be whole, got 1.5
    """

    # Number of client actors. per_client: one for each client
    count: int | Literal["per_client"] = 2
    num_cpus: float = 1.0  # CPUs per client actor
    num_gpus: float = 0.0  # GPUs per client actor; 0.1 puts ten actors on one GPU
    # Memory per client actor in GB. None: estimated from model, block, data and engine
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.count, int) and self.count < 1:
            raise ValueError(f"count must be >= 1 or per_client, got {self.count}")
        require_at_least(self, num_cpus=0, num_gpus=0)
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus above 1 must be whole, got {self.num_gpus}")
        _check_memory(self.memory_gb)

    def number(self, num_clients: int) -> int:
        """How many actors are started for so many clients."""
        return num_clients if self.count == "per_client" else self.count


@dataclass(frozen=True)
class ServerProcess:
    """What the server's own process asks Ray for.

    >>> ServerProcess(memory_gb=0)
    Traceback (most recent call last):
    ValueError: memory_gb must be > 0 and below 1e6, got 0
    """

    num_cpus: float = 0.0  # CPUs of the server process; client actors do most of the work
    # Memory of the server process in GB. None: estimated from model, cohort and data
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        require_at_least(self, num_cpus=0)
        _check_memory(self.memory_gb)


def _check_memory(gigabytes: float | None) -> None:
    if gigabytes is not None and not 0 < gigabytes < 1e6:
        raise ValueError(f"memory_gb must be > 0 and below 1e6, got {gigabytes}")


@dataclass(frozen=True)
class Needs:
    """What one process asks Ray for.

    >>> Needs(num_cpus=1.0, memory=500).bundle
    {'CPU': 1.0, 'memory': 500}
    """

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    memory: int = PROCESS_BYTES  # bytes

    def of(self, kind: Kind) -> float:
        """The amount of one kind, 0 if none is asked for."""
        return self.bundle.get(kind, 0.0)

    @property
    def options(self) -> dict[str, float]:
        """The amounts as arguments of Ray's `options`."""
        return asdict(self)

    @property
    def bundle(self) -> dict[str, float]:
        """The amounts as a bundle of a placement group, which may have no zeros."""
        amounts = zip(KINDS, self.options.values(), strict=True)
        return {kind: amount for kind, amount in amounts if amount}


@dataclass(frozen=True)
class Load:
    """What a run puts into the memory of its processes.

    >>> load = Load(data=0, model=10, block=2, at_once=1, activations=5, cohort=4, actor_blocks=1)
    >>> load.of_actor() - PROCESS_BYTES  # 6 + 2 * 2 copies in training, 2 * 2 kept, 5 of steps
    145
    """

    data: int  # bytes of images, and of who holds which
    model: int  # bytes of one model
    block: int  # models that an actor is handed together
    at_once: int  # models of a block that the engine trains at a time
    activations: int  # bytes of the steps that an actor computes at a time, or of an evaluation
    cohort: int  # clients of a round
    actor_blocks: int  # blocks of a round in one actor
    on_gpu: bool = False

    def of_actor(self) -> int:
        """Bytes of a client actor; on a GPU, of what passes through the machine's own memory."""
        if self.on_gpu:
            return PROCESS_BYTES + self.data + COPIES_IN_A_BLOCK * self.block * self.model
        trained = COPIES_OF_A_MODEL * self.at_once + COPIES_IN_A_BLOCK * self.block
        kept = TRAININGS_KEPT * self.actor_blocks * self.block
        return PROCESS_BYTES + self.data + (trained + kept) * self.model + self.activations

    def of_server(self) -> int:
        """Bytes of the server's process."""
        return SERVER_BYTES + self.data + COPIES_ON_THE_SERVER * self.cohort * self.model


@dataclass(frozen=True)
class ActorPlan:
    """What the client actors and the server of a run ask for, printed before anything starts.

    >>> needs = Needs(num_cpus=0.5, memory=10**9)
    >>> str(ActorPlan(2, Actors(), block=5, blocks_per_round=4, per_actor=needs))
    '2 client actors of 0.5 CPU, 1 GB each = 1 CPU, 2 GB, and a server of 0.7 GB; 4 blocks of \
5 clients a round'
    """

    num_actors: int
    actors: Actors  # as the experiment names them
    block: int  # clients per job
    blocks_per_round: int
    per_actor: Needs = field(default_factory=Needs)
    server: Needs = field(default_factory=lambda: Needs(memory=SERVER_BYTES))

    @classmethod
    def of(cls, actors: Actors, server: ServerProcess, num_actors: int, load: Load) -> Self:
        """The plan of a run, with the memory that the experiment names or the load needs.

        Args:
            actors: The part `execution.actors` of the experiment.
            server: The part `execution.server` of the experiment.
            load: What the run puts into memory.
        """
        per_job = 1 if actors.count == "per_client" else load.block
        memory = _bytes(actors.memory_gb, load.of_actor())
        return cls(
            num_actors=num_actors,
            actors=actors,
            block=load.block,
            blocks_per_round=-(-load.cohort // per_job),
            per_actor=Needs(actors.num_cpus, actors.num_gpus, memory),
            server=Needs(server.num_cpus, 0.0, _bytes(server.memory_gb, load.of_server())),
        )

    def __str__(self) -> str:
        text = (
            f"{counted(self.num_actors, 'client actor')} of {_described(self.per_actor)} each = "
            f"{_described(self.per_actor, self.num_actors)}, and a server of "
            f"{self.server.memory / 1e9:.3g} GB; "
            f"{counted(self.blocks_per_round, 'block')} of {counted(self.block, 'client')} a round"
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


def _bytes(gigabytes: float | None, estimate: int) -> int:
    """The bytes named, or the estimate rounded up, so that rows of a sweep ask for the same.

    >>> _bytes(None, 731_000_000), _bytes(0.5, 731_000_000)
    (750000000, 500000000)
    """
    return -(-estimate // STEP) * STEP if gigabytes is None else int(gigabytes * 1e9)


def _described(needs: Needs, times: int = 1) -> str:
    parts = [f"{times * needs.num_cpus:g} CPU"]
    parts += [f"{times * needs.num_gpus:g} GPU"] if needs.num_gpus else []
    return ", ".join([*parts, f"{times * needs.memory / 1e9:.3g} GB"])


def check_resources(plan: ActorPlan, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse what the cluster cannot give, in all or on single nodes.

    Args:
        nodes: What each node has, in all or free, as Ray counts it.

    Raises:
        ExperimentError: The message has the sum, what there is, and what to lower.

    >>> check_resources(ActorPlan(3, Actors(), 1, 1, Needs(1.0), Needs(0.0)), [{"CPU": 2.0}])
    Traceback (most recent call last):
    flray.errors.ExperimentError: execution.actors asks for 3 x 1 = 3 CPU, the cluster has 2 free: \
2 such actors fit; lower execution.actors.count or actors.num_cpus
    """
    for kind in KINDS:
        available = sum(node.get(kind, 0.0) for node in nodes) + ROUNDING
        actor, server = plan.per_actor.of(kind), plan.server.of(kind)
        if plan.num_actors * actor + server > available:
            fit = max(0, int((available - server) / actor)) if actor else 0
            _refuse(plan, kind, f"{_amount(available, kind)} free: {fit} such actors fit")
    fit = sum(_fitting(plan.per_actor, node) for node in nodes)
    if fit < plan.num_actors:
        kind = _scarcest(plan.per_actor, nodes)
        most = _amount(max((node.get(kind, 0.0) for node in nodes), default=0.0), kind)
        _refuse(plan, kind, f"at most {most} on one node: {fit} such actors fit")


def _refuse(plan: ActorPlan, kind: Kind, available: str) -> None:
    """Raise the error for one kind of resource, with the sum and what to lower."""
    actor, server = plan.per_actor.of(kind), plan.server.of(kind)
    unit = "GB of memory" if kind == "memory" else kind
    beside = f" + {_amount(server, kind)} for the server" if server else ""
    total = _amount(plan.num_actors * actor + server, kind)
    remedy = {
        "CPU": "actors.count or actors.num_cpus",
        "GPU": "actors.count or actors.num_gpus",
        "memory": "actors.count or block, or name what an actor needs as actors.memory_gb",
    }[kind]
    raise ExperimentError(
        f"execution.actors asks for {plan.num_actors} x {_amount(actor, kind)}{beside} = {total} "
        f"{unit}, the cluster has {available}; lower execution.{remedy}"
    )


def _amount(value: float, kind: Kind) -> str:
    return f"{value / 1e9:.3g}" if kind == "memory" else f"{value:.6g}"


def _fitting(needs: Needs, node: Mapping[str, float]) -> int:
    """How many such processes one node takes."""
    return min(
        int((node.get(kind, 0.0) + ROUNDING) / amount) for kind, amount in needs.bundle.items()
    )


def _scarcest(needs: Needs, nodes: Sequence[Mapping[str, float]]) -> Kind:
    """The kind of which fewest processes find their share on a node of their own."""
    asked = [kind for kind in KINDS if needs.of(kind)]
    return min(asked, key=lambda kind: sum(int(n.get(kind, 0.0) / needs.of(kind)) for n in nodes))
