"""A federation of which a part of the clients trains here."""

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from flray.client.keeping import ExpectedSums
from flray.data.dataset import Ids
from flray.engines.training import Gradient, Training
from flray.execution.federation import Cohort, Federation, nobody
from flray.execution.trained import Trained
from flray.models.bank import ModelBank, Params
from flray.models.mixing import Relation


@dataclass(frozen=True)
class PartialFederation(Federation):
    """A federation in which some clients train and are scored, and others elsewhere.

    Algorithms sample, mix and count as if all of the cohort had answered.
    """

    own: Ids = field(default_factory=nobody)  # those that train here
    begin: int = 0  # the round after which others are elsewhere
    heard: list[Trained] = field(default_factory=list)  # since the recorder took them

    @classmethod
    def of(cls, fed: Federation, own: Ids, begin: int) -> "PartialFederation":
        values = {each.name: getattr(fed, each.name) for each in fields(fed)}
        return cls(**values, own=own, begin=begin)

    def train(
        self,
        bank: ModelBank,
        cohort: Cohort,
        gradient: Gradient,
        memo: Params | None = None,
        *,
        shared: Params | None = None,
        training: Training | None = None,
    ) -> Trained:
        is_own = np.isin(cohort.clients, self.own)
        mine = replace(cohort, clients=cohort.clients[is_own])
        rows = {name: leaf[torch.from_numpy(is_own)] for name, leaf in (memo or {}).items()}
        trained = super().train(bank, mine, gradient, rows, shared=shared, training=training)
        self.heard.append(trained)
        return trained

    def expected_sums(
        self, relation: Relation, bank: ModelBank, cohort: Cohort
    ) -> ExpectedSums | None:
        own = replace(cohort, clients=np.intersect1d(cohort.clients, self.own))
        return super().expected_sums(relation, bank, own)

    def count_models(self, bank: ModelBank, cohort: Cohort, trained: Trained) -> None:
        both = len(cohort.clients) * bank.bytes_per_model  # nobody can have been dropped
        self.meter.count_transfer("model", down=both, up=both)

    def scored(self) -> Ids:
        everybody = super().scored()
        return everybody if self.t <= self.begin else np.intersect1d(everybody, self.own)
