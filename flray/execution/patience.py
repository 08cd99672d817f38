"""Patience: after how long a process that does not answer counts as hanging."""

from dataclasses import dataclass, field


@dataclass
class Patience:
    """How long a job may take, judged by how long others of its kind took.

    The first job of a kind may compile and has nothing to be compared with.

    >>> patience = Patience(first_s=50.0, least_s=2.0, factor=10.0)
    >>> patience.of("Train")
    50.0
    >>> patience.learn("Train", 3.0)
    >>> patience.of("Train")
    30.0
    """

    first_s: float = 3600.0  # patience for a kind of which no job has ended yet
    least_s: float = 120.0
    factor: float = 10.0  # times the longest job of the kind
    longest_s: dict[str, float] = field(default_factory=dict)  # by kind

    def of(self, kind: str) -> float:
        """Seconds that a job of this kind may take."""
        if kind not in self.longest_s:
            return self.first_s
        return max(self.least_s, self.factor * self.longest_s[kind])

    def learn(self, kind: str, seconds: float) -> None:
        """Note how long a job of this kind took."""
        self.longest_s[kind] = max(seconds, self.longest_s.get(kind, 0.0))
