"""The part `execution` of an experiment: where and how it is computed, never what."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from flray.client.host import EngineName
from flray.errors import ExperimentError
from flray.execution.resources import COPIES_OF_A_MODEL, Actors, ServerProcess
from flray.values import require_at_least

# Measured for MLP-200 on a CPU: fewer, larger blocks leave threads less to wait for, and past 20
# stacked models the working set leaves the cache.
LARGEST_BLOCK_ON_CPU, SLOTS_ON_CPU = 100, 20
BLOCK_BYTES_ON_GPU = 8 << 30  # memory that the models of a block may take on a GPU


@dataclass(frozen=True)
class Execution:
    """Settings of where and how a run is computed.

    With equal engine, block, precision and kind of device, results have the same bits whatever the
    executor, the number of actors and of threads.

    >>> Execution(device="cpu", precision="float64").dtype
    torch.float64
    >>> Execution(executor="ray", actors=Actors(num_gpus=0.1)).resolve_device()
    'cuda'
    """

    # Where clients train. inline: in this process; ray: on client actors
    executor: Literal["inline", "ray"] = "inline"
    # How a block of clients is trained. auto: vectorized if the model allows it, else loop
    engine: EngineName = "auto"
    device: str = "auto"  # Device: auto, cpu, cuda or cuda:N
    # Floating-point type of models and images. tf32: float32 whose products are rounded while
    # clients train, faster and less exact; on a GPU only
    precision: Literal["float32", "float64", "tf32"] = "float32"
    # Clients of a job, which a process trains together or a few at a time. None: by model, device,
    # cohort and number of actors; the run directory records it, and a resumed run keeps it
    block: int | None = None
    # Threads per process. None: all cores if the model trains in tiles (same result), otherwise 1
    threads: int | None = None
    # Lightning callbacks, as package.module:Name; engine lightning only
    callbacks: tuple[str, ...] = ()
    actors: Actors = field(default_factory=Actors)  # Pool of client actors; executor ray only
    # Server process; executor ray only
    server: ServerProcess = field(default_factory=ServerProcess)

    def __post_init__(self) -> None:
        require_at_least(self, block=1, threads=1)
        if self.callbacks and self.engine != "lightning":
            raise ValueError(
                f"callbacks run on engine lightning only, got {list(self.callbacks)} with "
                f"engine {self.engine}; set execution.engine=lightning"
            )
        kind = self.device.split(":")[0]
        if kind not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")

    @property
    def dtype(self) -> torch.dtype:
        """The type of floating-point leaves and images."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def resolve_device(self) -> str:
        """The device of this machine, or of an actor, that `device` stands for.

        Returns:
            "cpu", "cuda" or "cuda:N".

        Raises:
            ExperimentError: CUDA is asked for, and there is no GPU or actors ask for none; or TF32
                is asked for on a CPU.
        """
        device = self._device_of_an_actor() if self.executor == "ray" else self._device_here()
        if self.precision == "tf32" and device == "cpu":
            raise ExperimentError(
                "execution.precision is tf32 but clients train on a CPU; choose float32, or "
                "execution.device=cuda on a machine with a GPU"
            )
        return device

    def _device_here(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ExperimentError(
                f"execution.device is {self.device} but this machine has no CUDA device; "
                "choose cpu or auto"
            )
        return self.device

    def _device_of_an_actor(self) -> str:
        """The device of a client actor, which sees a GPU only if it asks Ray for a part of one."""
        has_gpu = self.actors.num_gpus > 0
        if self.device.startswith("cuda") and not has_gpu:
            raise ExperimentError(
                f"execution.device is {self.device} but the client actors ask for no GPU; set "
                "execution.actors.num_gpus, 0.1 for ten actors on one GPU"
            )
        return "cuda" if has_gpu and self.device != "cpu" else "cpu"


def default_block(num_params: int, cohort_size: int, device: str, num_actors: int = 1) -> int:
    """Clients per block, by model, device, cohort and number of actors; never by free memory.

    The blocks of a cohort are equally full, and every actor gets the same number of them. On a GPU
    they are small enough for its memory.

    >>> default_block(159_010, 20, "cpu"), default_block(159_010, 150, "cpu")
    (20, 75)
    >>> default_block(159_010, 20, "cpu", 8), default_block(159_010, 100, "cpu", 2)
    (3, 50)
    """
    largest = LARGEST_BLOCK_ON_CPU
    if device != "cpu":
        largest = max(1, BLOCK_BYTES_ON_GPU // (4 * COPIES_OF_A_MODEL * num_params))
    num_blocks = -(-cohort_size // largest)
    num_blocks = -(-num_blocks // num_actors) * num_actors
    return -(-cohort_size // num_blocks)


def slots_on_cpu(block: int) -> int:
    """Clients of a block that are stacked on a CPU: few enough for its cache, in equal parts.

    >>> slots_on_cpu(20), slots_on_cpu(50), slots_on_cpu(100)
    (20, 17, 20)
    """
    return -(-block // -(-block // SLOTS_ON_CPU))
