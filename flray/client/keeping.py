"""Questions about trained models that stay with the host that trained them (`Train.num_kept`).

Models are large and what algorithms want of them is often small, such as a weighted sum. A question
is a picklable function that is sent to the models instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flray.client.host import Host
from flray.data.dataset import Ids
from flray.models.bank import Params, rows_of

Question = Callable[[Params], Params]  # a function of the models of a block, leaves (K, ...)


@dataclass(frozen=True)
class AskJob:
    """A question about the models of one block, for the host that trained it.

    Unlike other jobs it cannot be run by any host: one that is lost takes the models with it, and
    the federation trains the block again.
    """

    call: str  # id of the training, `Train.call`
    block: int  # first client of the block
    question: Question
    host: int  # number of the host, to which executors send the job


class Ask:
    """Answer a question about models that were kept.

    Raises:
        LookupError: The host never had these models, or has dropped them for later ones.
    """

    def __call__(self, host: Host, bank: Params, job: AskJob) -> Params:
        blocks = host.kept.get(job.call, {})
        if job.block not in blocks:
            raise LookupError("this host does not have the models of the block (any more)")
        return job.question(blocks[job.block])


@dataclass(frozen=True)
class ModelRows:
    """Some leaves of some models of a block, as they lie in a module.

    >>> import torch
    >>> ModelRows(np.array([1]), ["w"])({"w": torch.tensor([[1.0], [5.0]])})
    {'w': tensor([[5.]])}
    """

    slots: Ids  # (n,) positions in the block
    names: Sequence[str]  # names of the leaves

    def __call__(self, models: Params) -> Params:
        is_whole = np.array_equal(self.slots, np.arange(len(next(iter(models.values())))))
        return {
            name: models[name].contiguous() if is_whole else rows_of(models[name], self.slots)
            for name in self.names
        }
