"""The interface of a signature: what the server learns of each client before comparing them."""

from typing import Protocol

from flray.clustering.points import Points
from flray.execution.federation import Cohort, Federation
from flray.models.bank import ModelBank, Params


class Signature(Protocol):
    """A stage that describes clients: a frozen dataclass whose fields are its keys in YAML.

    It asks clients through `fed` (`fed.train`, `fed.map`, `fed.predict`) and counts what is sent in
    `fed.meter`.

    >>> from flray.clustering.update import Update
    >>> signature: Signature = Update(epochs=2)  # Δ after two epochs
    >>> signature.epochs
    2
    """

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        """Points of the cohort's clients, and the memory of the next call.

        Clients that failed under `on_client_failure: drop` are left out.

        Args:
            bank: the model of each client.
            memory: what the last call returned, {} at first. An encoder goes on from where its
                fine-tuning ended.
        """
        ...
