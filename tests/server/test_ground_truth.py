"""A run in which ground truth was read says so; one that was only allowed to does not."""

import pytest

LABEL_COUNTS = "algorithm.clustering.partition=label_counts"
ALLOWED = ["uses_ground_truth=true", "algorithm=flhc", "rounds=3"]


@pytest.mark.parametrize("rounds_before", [0, 1, 3])
def test_a_run_that_read_ground_truth_is_marked(tiny_run, rounds_before) -> None:
    result = tiny_run(*ALLOWED, f"algorithm.rounds_before={rounds_before}", LABEL_COUNTS)
    assert result.summary["uses_ground_truth"] is True
    reads = result.rounds.set_index("round")["ground_truth_reads"].fillna(0)
    assert reads.to_dict() == {t: float(t == max(rounds_before, 1)) for t in (1, 2, 3)}
    assert "ground_truth_reads" not in result.summary  # which is of a round


def test_a_run_that_was_only_allowed_to_is_not_marked(tiny_run) -> None:
    """Nor is one that would read it after a round that never comes."""
    for more in ("algorithm=fedavg", "algorithm.rounds_before=1", "algorithm.rounds_before=9"):
        reads = [LABEL_COUNTS] if more.endswith("9") else []
        result = tiny_run(*ALLOWED, *reads, more)
        assert result.summary["uses_ground_truth"] is False
        assert "ground_truth_reads" not in result.rounds


def test_a_read_before_a_stop_is_remembered(tiny_run, tmp_path) -> None:
    keys = [*ALLOWED, "algorithm.rounds_before=1", LABEL_COUNTS]
    assert tiny_run(*keys, out=tmp_path / "x", should_stop=lambda: True).summary is None
    done = tiny_run(*keys, out=tmp_path / "x", resume=True)
    assert done.summary["uses_ground_truth"] is True


def test_a_read_before_the_first_round_is_remembered(tiny_run, tmp_path) -> None:
    """Killed in round 1, after a clustering before it: only the checkpoint of round 0 knows."""
    keys = [*ALLOWED, "algorithm.rounds_before=0", LABEL_COUNTS]
    out = tmp_path / "x"
    tiny_run(*keys, out=out, should_stop=lambda: True)
    (out / "checkpoints" / "round_000001.json").unlink()
    done = tiny_run(*keys, out=out, resume=True)
    assert done.rounds["round"].tolist() == [1, 2, 3]
    assert done.summary["uses_ground_truth"] is True
