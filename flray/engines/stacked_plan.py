"""Index plans of a block as tensors: clients wait in lanes, and each lane goes through one slot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flray.data.dataset import Ids
from flray.engines.engine import Block

Lane = Sequence[int]  # positions of clients in a block, one after the other in the same slot

# Fixed cost of a step, as a number of slots: kernels of a GPU take some time whatever they do.
COST_OF_A_STEP = 16
# Fewer slots than clients of a block must save this share of the work: they change last digits.
LEAST_GAIN = 0.2


def lanes_of(num_steps: Ids, num_lanes: int) -> list[list[int]]:
    """Clients in at most `num_lanes` lanes that end about together.

    The client with most steps comes first, and each goes to the lane with the fewest steps so far.
    Clients without steps are in no lane.

    >>> lanes_of(np.array([3, 9, 5, 0, 4]), 2)
    [[1, 0], [2, 4]]
    >>> lanes_of(np.array([7, 7, 7]), 4)
    [[0], [1], [2]]
    """
    clients = [k for k in np.argsort(-num_steps, kind="stable").tolist() if num_steps[k]]
    lanes: list[list[int]] = [[] for _ in range(min(num_lanes, len(clients)))]
    loads = [(0, n) for n in range(len(lanes))]
    heapify(loads)
    for k in clients:
        load, n = loads[0]
        lanes[n].append(k)
        heapreplace(loads, (load + int(num_steps[k]), n))
    return lanes


def slots_for(num_steps: Ids, block: int) -> int:
    """The number of slots of a GPU's step: `block`, or fewer where clients differ much in steps.

    It follows from the steps of all clients of a split and the size of a block alone, so that runs
    on the same data have the same bits.

    >>> slots_for(np.full(100, 60), 20), slots_for(np.array([10] * 15 + [100] * 5), 20)
    (20, 7)
    """
    shares = (np.arange(block) + 0.5) / block
    # Steps of the clients of a typical block.
    typical = np.quantile(num_steps, shares, method="nearest").astype(np.int64)
    tried = np.unique(np.linspace(1, block, 40).astype(np.int64)).tolist()
    costs = {slots: _cost(typical, slots) for slots in tried}
    best = min(costs, key=lambda slots: costs[slots])
    return best if costs[best] <= (1 - LEAST_GAIN) * costs[block] else block


def _cost(num_steps: Ids, slots: int) -> int:
    """Steps until all lanes are done, and one for each handover, times the cost of a step."""
    ends = [np.cumsum(num_steps[lane]) for lane in lanes_of(num_steps, slots)]
    changes = np.unique(np.concatenate([np.zeros(1, np.int64), *ends]))
    return int(changes[-1] + len(changes)) * (COST_OF_A_STEP + slots)


@dataclass(frozen=True)
class Rows:
    """Rows of a leaf, at least one: a slice where they follow each other, else an index.

    >>> rows = Rows.at([2, 0], torch.device("cpu"))
    >>> into = torch.zeros(3)
    >>> rows.put(into, torch.tensor([5.0, 7.0]))
    >>> into, rows.of(into)
    (tensor([7., 0., 5.]), tensor([5., 7.]))
    """

    index: slice | Tensor

    @classmethod
    def at(cls, rows: Sequence[int], device: torch.device) -> "Rows":
        """Rows of leaves that are on the device."""
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return cls(slice(rows[0], rows[0] + len(rows)))
        return cls(torch.tensor(rows, device=device))

    def of(self, leaf: Tensor) -> Tensor:
        """These rows; a view if they follow each other or share their memory."""
        if isinstance(self.index, slice):
            return leaf[self.index]
        if leaf.stride(0) == 0:
            return leaf[:1].expand(len(self.index), *leaf.shape[1:])
        return leaf.index_select(0, self.index)

    def put(self, into: Tensor, values: Tensor) -> None:
        """Copy values (rows, ...) to these rows."""
        if isinstance(self.index, slice):
            into[self.index].copy_(values)
        else:
            into.index_copy_(0, self.index, values)

    def clear(self, into: Tensor) -> None:
        """Set these rows to 0."""
        if isinstance(self.index, slice):
            into[self.index].zero_()
        else:
            into.index_fill_(0, self.index, 0)


@dataclass(frozen=True)
class Seats:
    """Clients of a block, by position, and the slots that they take."""

    clients: Rows
    slots: Rows

    @classmethod
    def of(cls, clients: Sequence[int], slots: Sequence[int], device: torch.device) -> "Seats":
        """These clients in these slots, on a device."""
        return cls(Rows.at(clients, device), Rows.at(slots, device))


@dataclass(frozen=True)
class Handover:
    """The clients that are done after a step, and those that take their slots."""

    step: int  # the last of the clients that are done, from 0
    done: Seats
    following: Seats | None


@dataclass(frozen=True)
class StackedPlan:
    """The plans of a block as tensors: S steps, b batches per step, B examples per batch.

    Slots without a client, and steps that a client does not take, have a mask that is False.
    """

    # (slots, S, b, B) example ids, (slots, S, b, B) their mask, (slots, S, b) keys for dropout and
    # augmentation and, unless all losses count alike, (slots, S, b, B) their weights
    tensors: tuple[Tensor, ...]
    first: Seats  # the clients that begin; slots left over have the first one's model
    handovers: tuple[Handover, ...]  # in the order of steps

    @classmethod
    def of(
        cls, block: Block, lanes: Sequence[Lane], num_slots: int, device: torch.device
    ) -> "StackedPlan":
        """The plans of clients in at most `num_slots` lanes, on the device.

        S is the steps of the longest lane; the shape of a single step does not depend on it. Ids
        of steps and slots that do not count are 0, a valid id.
        """
        batches = block.plans[0].ids.shape[1:]  # (b, B)
        ends = [np.cumsum([block.plans[k].num_steps for k in lane]) for lane in lanes]
        num_steps = max(int(end[-1]) for end in ends)
        ids = np.zeros((num_slots, num_steps, *batches), dtype=np.int64)
        mask = np.zeros((num_slots, num_steps, *batches), dtype=np.bool_)
        keys = np.zeros((num_slots, num_steps, batches[0]), dtype=np.int64)
        weights = [] if block.plans[0].weight is None else [np.zeros(ids.shape)]
        for slot, lane in enumerate(lanes):
            for k, end in zip(lane, ends[slot], strict=True):
                plan = block.plans[k]
                steps = slice(end - plan.num_steps, end)
                ids[slot, steps], mask[slot, steps] = plan.ids, plan.mask
                keys[slot, steps] = plan.keys
                for weight in weights:
                    weight[slot, steps] = plan.weight
        tensors = tuple(torch.from_numpy(a).to(device) for a in (ids, mask, keys, *weights))
        beginning = [lanes[slot if slot < len(lanes) else 0][0] for slot in range(num_slots)]
        first = Seats.of(beginning, range(num_slots), device)
        return cls(tensors, first, _handovers(lanes, ends, device))

    def with_room(self, num_steps: int) -> "StackedPlan":
        """The same plan in other memory, with room for more steps."""
        more = num_steps - self.num_steps
        tensors = (F.pad(t, (*[0, 0] * (t.dim() - 2), 0, more)) for t in self.tensors)
        return replace(self, tensors=tuple(tensors))

    @property
    def num_steps(self) -> int:
        """S, the steps of the longest lane."""
        return self.tensors[0].shape[1]


def _handovers(
    lanes: Sequence[Lane], ends: Sequence[Ids], device: torch.device
) -> tuple[Handover, ...]:
    """The handovers of lanes whose clients end after `ends` steps."""
    done: dict[int, list[tuple[int, int]]] = {}  # end -> slot, turn of the client in its lane
    for slot, of_lane in enumerate(ends):
        for turn, end in enumerate(of_lane.tolist()):
            done.setdefault(end, []).append((slot, turn))
    handovers = []

    def seats(turns: Sequence[tuple[int, int]]) -> Seats:
        return Seats.of([lanes[s][n] for s, n in turns], [s for s, _ in turns], device)

    for end, turns in sorted(done.items()):
        next_turns = [(slot, turn + 1) for slot, turn in turns if turn + 1 < len(lanes[slot])]
        following = seats(next_turns) if next_turns else None
        handovers.append(Handover(end - 1, seats(turns), following))
    return tuple(handovers)
