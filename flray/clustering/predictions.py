"""Signature `predictions`: a client is its model's predictions on public examples (FLIS)."""

from dataclasses import dataclass

from flray.client.tasks import PredictionKind
from flray.clustering.points import Points
from flray.clustering.update import probe
from flray.execution.federation import Cohort, Federation, Predictions
from flray.models.bank import ModelBank, Params


@dataclass(frozen=True)
class PublicPredictions:
    """B: predictions on the server's public examples, after the client's own training (FLIS).

    One vector per client, (m, R * classes) for R public examples; needs `split.server` > 0.
    """

    # Predictions that clients send. hard: one-hot rows; soft: class probabilities
    kind: PredictionKind = "hard"

    def require(self, fed: Federation) -> None:
        """Refuse an experiment whose server has no public examples."""
        fed.require_public()

    def __call__(
        self, fed: Federation, bank: ModelBank, cohort: Cohort, memory: Params
    ) -> tuple[Points, Params]:
        trained = probe(fed, bank, cohort)  # Alg. 3 l. 4; its models are all that is sent
        heard = Cohort(cohort.t, trained.clients, is_probe=True)
        return predicted_points(fed.predict(trained.params, heard, self.kind)), memory


def predicted_points(predictions: Predictions) -> Points:
    """The predictions (m, R, classes) of m clients as one vector per client."""
    return Points.vectors(predictions.clients, predictions.values.flatten(1))
