"""What a signature is: what the server learns of each client before it compares them."""

from typing import Protocol

from flray.clustering.points import Points
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params


class Signature(Protocol):
    """A frozen dataclass whose fields are its configuration; counts what it sends in fed.meter."""

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        """Points of the cohort's clients, each from its row of the bank.

        `memory` is what the last call returned, {} at first: an encoder goes on from where its
        fine-tuning ended. Clients that failed under `on_client_failure: drop` are left out.
        """
        ...
