import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from recorded import (
    CLUSTERING,
    CORRECT,
    DISTANCE,
    GROUPS,
    LABELS,
    LINKAGE,
    ROUNDS,
    SUMMARY,
    THRESHOLD,
    sweep_rows,
    write_run,
    write_sweep,
)
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from flray.columns import VALIDATION_ACCURACY_MEAN as VALIDATION
from flray.errors import ExperimentError
from flray.measures.scores import ClientScores
from flray.records.clusterings import ClusteringRecord, write_clustering
from flray.records.run_directory import RunDirectory
from flray.reports.embed import figure_source
from flray.reports.figures import efficiency_figure
from flray.reports.page import render_page
from flray.reports.page_run import seconds_by_phase
from flray.reports.runs import RunRecord, find_runs
from flray.reports.style import for_figure
from flray.reports.sweep_curves import curve_figure, curve_keys
from flray.reports.sweep_figures import (
    heatmap_figure,
    heatmap_pairs,
    importance_figure,
    overview_figure,
)
from flray.reports.sweep_tables import top_sheet
from flray.reports.sweeps import read_sweep

from scenarios import typed

pytestmark = pytest.mark.slow

VOID = {"meta", "link", "img", "input", "br"}


class Reader(HTMLParser):
    """What a page holds, and that it is well formed."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.tags, self.alts = [], [], [], [], []
        self.text, self.faults, self.unnamed = "", [], []
        self.feed(page)
        self.close()
        self.faults += self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        held = dict(attrs)
        self.tags.append(tag)
        self.ids += [held["id"]] if "id" in held else []
        self.links += [held[name] for name in ("href", "src", "xlink:href") if name in held]
        if tag in ("img", "svg"):
            self.alts.append(held.get("alt") or held.get("aria-label"))
        if tag == "th" and held.get("scope") not in ("row", "col"):
            self.unnamed.append(held)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data + " "


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_test(tmp_path, monkeypatch) -> None:
    """Commands on pages have paths relative to where a page is written."""
    monkeypatch.chdir(tmp_path)


def is_sound(page):
    read = Reader(page)
    assert read.faults == []
    assert len(read.ids) == len(set(read.ids))
    assert read.tags.count("h1") == 1
    assert read.links
    assert all(link.startswith(("#", "data:")) for link in read.links)
    assert {link[1:] for link in read.links if link[0] == "#"} <= set(read.ids)
    assert all(read.alts)
    assert read.unnamed == []
    return read


def unwritten(rounds, clients):
    """A run that is not on disk."""
    record = RunRecord(Path(), {}, None)
    vars(record).update(rounds=rounds, clients=clients)
    return record


def page_of(*folders):
    return render_page(*find_runs(folders))


def heat_of(axes):
    """The values of a heatmap, NaN where it has none, down by across."""
    (mesh,) = axes.collections
    return mesh.get_array().filled(np.nan).reshape(mesh.get_coordinates().shape[0] - 1, -1)


class TestEmbed:
    def draw(self, monkeypatch, figure):
        monkeypatch.setattr("flray.reports.figures.accuracy_figure", lambda: figure)
        return figure_source("accuracy")

    def test_a_figure_is_an_image_of_its_own(self, monkeypatch):
        figure = Figure((3, 2))
        figure.subplots().plot([0, 1], marker="o", label=for_figure("$x_$"))
        source, width = self.draw(monkeypatch, figure)
        kind, data = source.split(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(data)
        assert width == 3 * 96
        assert self.draw(monkeypatch, figure)[0] == source

    def test_a_large_figure_is_made_of_pixels(self, monkeypatch):
        figure = Figure((3, 2))
        figure.subplots().scatter(*np.random.default_rng(0).normal(size=(2, 3000)), c=range(3000))
        source, _ = self.draw(monkeypatch, figure)
        assert source.startswith("data:image/webp;base64,")
        assert len(source) < 200_000

    def test_nothing_to_draw_is_no_figure(self, monkeypatch):
        assert self.draw(monkeypatch, None) is None

    def test_global_state_is_left_alone(self, monkeypatch):
        before = dict(matplotlib.rcParams)
        assert self.draw(monkeypatch, Figure((1, 1)))
        assert dict(matplotlib.rcParams) == before


class TestRun:
    def test_overlapping_clusters_and_their_errors(self, tmp_path, empty_figures):
        """Client 2 is in both clusters; the page says so, and has the errors of both rounds."""
        R = np.array([[1, 1, 1, 0, 0]] * 2 + [[0, 0, 1, 1, 1]] * 3)
        arrays = CLUSTERING | {"R": R, "overlapping": np.array(True)}
        del arrays["linkage"]
        path = write_run(tmp_path / "dc", events=(), rounds=(), summary=None)
        for t in (1, 2):
            errors = {f"clustering_{k}": 0.25 for k in ("overlap_fp", "overlap_fn")}
            errors |= {f"clustering_{k}": 4.5 for k in ("equal_fp", "equal_fn")}
            RunDirectory(path).append_rounds([{"round": t, "accuracy_mean": 0.5, **errors}])
            write_clustering(path / "clusterings", t, arrays)
        scores = ClientScores(np.arange(5), CORRECT, np.full(5, 10), np.zeros(5))
        RunDirectory(path).append_clients(2, "test", scores, LABELS, GROUPS)
        read = is_sound(page_of(path))
        text = " ".join(read.text.split())
        assert "5 clients in 2 overlapping clusters" in text
        assert "clusters overlap, a client may be in several" in text
        assert "half the labels: false pos." in text
        assert text.count("4.50") >= 4
        assert "FLIS, Fig. 3" in text

    @pytest.mark.usefixtures("empty_figures")
    @pytest.mark.parametrize("runs", [1, 2])
    def test_a_run_whose_configuration_is_empty_is_refused(self, tmp_path, runs):
        for place in range(runs):
            path = write_run(tmp_path / "runs" / str(place), events=(), rounds=(), summary=None)
        (path / "config.yaml").write_text("")
        with pytest.raises(ExperimentError, match=r"config\.yaml is damaged"):
            page_of(tmp_path / "runs")

    @pytest.mark.usefixtures("empty_figures")
    def test_everything_is_on_the_page(self, tmp_path):
        read = is_sound(page_of(write_run(tmp_path / "flhc" / "seed_0")))
        for word in (
            *("flhc · digits · label_swap", "Clustering after round 2"),
            *("who is where", "Communication and time", "Settings", "c0ffee", "2.9.9"),
            *("flray run flhc/seed_0/config.yaml --out again", "threshold: 3.0"),
        ):
            assert word in read.text, word
        # Accuracy, clients, three of the clustering, one of costs.
        assert read.tags.count("figure") == 2 + 3 + 1

    @pytest.mark.usefixtures("empty_figures")
    def test_headline_numbers_are_those_of_the_summary(self, tmp_path):
        page = page_of(write_run(tmp_path / "a"))
        shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
        assert shown == {
            "test accuracy": "80.00 ± 6.32 %",
            "validation accuracy": "71.25 %",
            "worst client": "60.00 %",
            "variance over clients": "200.00 %²",
            "clusters": "2",
            "ARI": "0.25",
            "clients at target": "60.00 %",
            "rounds": "3",
            "client steps": "1,234",
            "sent up": "3.0 MB",
            "sent down": "6.0 MB",
            "time": "1 min 1 s",
            "params_sha256": "0123456789ab",
        }

    @pytest.mark.usefixtures("empty_figures")
    def test_ground_truth_is_marked_where_it_was_used(self, tmp_path):
        used, unused = ({**SUMMARY, "uses_ground_truth": value} for value in (True, False))
        page = page_of(write_run(tmp_path / "a", (), used, uses_ground_truth=True))
        assert "80.00 ± 6.32 % †" in is_sound(page).text
        assert "†" not in page_of(write_run(tmp_path / "b", (), unused, uses_ground_truth=True))
        both = is_sound(page_of(tmp_path / "a", tmp_path / "b")).text
        assert both.count("80.00† ± 6.32") == 1  # of a, not of b

    @pytest.mark.usefixtures("empty_figures")
    def test_an_unfinished_run_is_marked_by_what_it_has_read_so_far(self, tmp_path):
        path = write_run(tmp_path / "a", summary=None, rounds=ROUNDS[:1], events=())
        assert "†" not in page_of(path)
        row = {"round": 2, "seconds": 1.0, "ground_truth_reads": 1}
        RunDirectory(path).append_rounds([row])
        assert "† This run uses ground truth" in is_sound(page_of(path)).text

    @pytest.mark.usefixtures("empty_figures")
    def test_an_unfinished_run_shows_what_is_there_and_says_so(self, tmp_path):
        read = is_sound(
            page_of(write_run(tmp_path / "a", summary=None, rounds=ROUNDS[:2], events=()))
        )
        assert "not finished: 2 of 3 rounds" in read.text
        assert "60.00" in read.text  # the accuracy of round 2
        assert "--resume" in read.text
        assert "2.0 MB" in read.text  # up, of two rounds

    @pytest.mark.usefixtures("empty_figures")
    def test_a_run_that_has_only_begun_has_a_page(self, tmp_path):
        read = is_sound(page_of(write_run(tmp_path / "a", summary=None, rounds=(), events=())))
        assert "0 of 3 rounds" in read.text
        assert "figure" not in read.tags

    @pytest.mark.usefixtures("empty_figures")
    def test_without_a_clustering_models_tell_who_is_where(self, tmp_path):
        read = is_sound(page_of(write_run(tmp_path / "a", events=())))
        assert "Who is where" in read.text

    @pytest.mark.usefixtures("empty_figures")
    def test_of_many_clusterings_three_are_drawn_and_all_listed(self, tmp_path):
        read = is_sound(page_of(write_run(tmp_path / "a", events=(0, 1, 2, 3, 4))))
        assert "3 of 5 clusterings are drawn: after rounds 0, 2, 4." in read.text
        assert "before the first round" in read.text
        assert read.tags.count("figure") == 2 + 9 + 1

    @pytest.mark.usefixtures("empty_figures")
    def test_who_is_where_names_members_groups_and_accuracy(self, tmp_path):
        text = " ".join(is_sound(page_of(write_run(tmp_path / "a"))).text.split())
        # Clients 0, 1 of group 7, mean of 1.0 and 0.9.
        assert "0 2 0 1 group 7: 2 95.00 %" in text
        # Clients 2, 3 of group 3 and 4 of group 7, mean of 0.8, 0.7, 0.6.
        assert "1 3 2 3 4 group 3: 2 group 7: 1 70.00 %" in text

    def test_the_graph_of_a_hundred_clients_is_small(self):
        rng, labels = np.random.default_rng(0), np.arange(100) % 4
        points = rng.normal(size=(100, 8)) + 9 * np.eye(8)[labels]
        D = np.linalg.norm(points[:, None] - points[None], axis=2)
        tree = linkage(squareform(D, checks=False), "ward")
        found = ClusteringRecord(np.arange(100), labels, D, linkage=tree, groups=labels)
        assert len(figure_source("graph", found)[0]) < 500_000  # the largest


class TestCosts:
    ROUNDS = pd.DataFrame(
        {
            "round": [1, 2],
            "accuracy_mean": [0.5, 0.75],
            "bytes_up_model": [1.0, 2.0],
            "bytes_up_labels": [0.0, 0.0],
            "bytes_down_model": [3.0, np.nan],
            "seconds": [10.0, 1.0],
            "seconds_train": [4.0, 1.0],
            "seconds_signature": [5.0, np.nan],
            "seconds_probe": [3.0, np.nan],
        }
    )

    def test_a_phase_inside_another_is_not_counted_twice(self):
        phases = seconds_by_phase(self.ROUNDS)
        # 10 s: train 4, probe 3, the signature's other 2, and 1 that nobody claims.
        assert phases.loc[1].to_dict() == {
            "train": 4,
            "probe": 3,
            "signature": 2,
            "other": 1,
        }

    def test_accuracy_is_drawn_against_all_bytes_until_then(self):
        figure = efficiency_figure({"a": [unwritten(self.ROUNDS, pd.DataFrame())]})
        assert figure.axes[0].lines[0].get_xydata().tolist() == [[4, 50], [6, 75]]


@pytest.mark.usefixtures("empty_figures")
class TestSeveralRuns:
    def folder(self, tmp_path):
        for seed, better in ((0, 0.02), (1, 0.04)):
            write_run(tmp_path / "x" / "fedavg" / f"seed_{seed}", events=(), seed=seed)
            summary = SUMMARY | {"accuracy_mean": 0.8 + better, "round_after_clustering": 3}
            write_run(tmp_path / "x" / "flhc" / f"seed_{seed}", (), summary, seed=seed)
        return tmp_path / "x"

    def test_seeds_are_averaged_and_differences_paired(self, tmp_path):
        read = is_sound(page_of(self.folder(tmp_path)))
        assert "2 experiments, 4 runs" in read.text
        assert "± is the standard deviation over seeds" in read.text
        for fact in ("digits (size 28)", "label_swap (clients 5)", "seeds 0, 1", "started 2"):
            assert fact in " ".join(read.text.split())
        assert "83.00 ± 1.41" in read.text  # of 82 and 84
        assert "+3.00 ± 1.00" in read.text  # of +2 and +4: sd 1.41, over the root of 2
        for run in ("fedavg, seed 0", "fedavg, seed 1", "flhc, seed 0", "flhc, seed 1"):
            assert run in read.text

    def test_settings_that_differ_are_listed(self, tmp_path):
        write_run(tmp_path / "a", (), train={"lr": 0.1})
        write_run(tmp_path / "b", (), train={"lr": 0.5})
        words = " ".join(is_sound(page_of(tmp_path / "a", tmp_path / "b")).text.split())
        assert "setting a b train.lr 0.1 0.5" in words

    def test_unfinished_runs_stand_apart(self, tmp_path):
        write_run(tmp_path / "x" / "done", ())
        write_run(tmp_path / "x" / "going", (), None, rounds=ROUNDS[:1])
        read = is_sound(page_of(tmp_path / "x"))
        assert "not finished" in read.text
        assert "1 of 3" in read.text
        assert "40.00 %" in read.text

    def test_a_mean_without_the_seeds_that_did_not_finish_is_marked(self, tmp_path):
        for name in ("a", "b"):
            write_run(tmp_path / "x" / name / "seed_0", ())
            ended = None if name == "b" else SUMMARY
            write_run(tmp_path / "x" / name / "seed_1", (), ended, rounds=ROUNDS[:2], seed=1)
        words = " ".join(is_sound(page_of(tmp_path / "x")).text.split())
        assert re.search(r"\bb [\d.]+‡ n=1", words)
        assert words.count("a seed of this configuration failed or did not finish") == 1
        assert not re.search(r"\ba [\d.]+‡", words)

    def test_a_seed_that_did_not_cluster_and_a_summary_with_gaps_are_no_hindrance(self, tmp_path):
        for seed in (0, 1):
            write_run(tmp_path / "x" / "a" / f"seed_{seed}", events=(), seed=seed)
        clustered = SUMMARY | {"round_after_clustering": 3, "validation_accuracy_mean": None}
        write_run(tmp_path / "x" / "b" / "seed_0", (), clustered)
        write_run(tmp_path / "x" / "b" / "seed_1", events=(), seed=1)
        assert is_sound(page_of(tmp_path / "x"))

    def test_of_many_runs_the_first_are_shown_one_by_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr("flray.reports.page_run.MAX_DETAILED", 2)
        read = is_sound(page_of(self.folder(tmp_path)))
        assert "2 of 4 runs are shown" in read.text
        assert read.ids.count("runs-run1") == 1
        assert "runs-run2" not in read.ids


@pytest.mark.usefixtures("empty_figures")
class TestSweep:
    def test_the_best_is_chosen_by_validation_and_told_as_a_command(self, tmp_path):
        rows = sweep_rows()
        read = is_sound(page_of(write_sweep(tmp_path / "s", rows)))
        assert "Sweep over distance, linkage, threshold" in read.text
        assert "Best by validation accuracy" in read.text
        # ward, l2, 1.0 over seeds 0 and 1: test 0.70 and 0.72, validation 0.71 twice.
        assert "71.00 ± 1.41 %" in read.text
        (place,) = [
            k
            for k, row in enumerate(rows)
            if (row[DISTANCE], row[LINKAGE], row[THRESHOLD], row["seed"]) == ("l2", "ward", 1.0, 0)
        ]
        words = " ".join(read.text.split())
        assert f"{DISTANCE} l2 {LINKAGE} ward {THRESHOLD} 1 validation" in words
        assert f"flray run s/runs/{place}/config.yaml --out best" in read.text
        assert "75.0 %" in read.text  # of client steps saved: 250 of 1000

    def test_the_run_of_the_best_row_is_there_to_open(self, tmp_path):
        folder = write_sweep(tmp_path / "s", sweep_rows(seeds=(0,)))
        before = is_sound(page_of(folder))
        for k in range(12):
            write_run(folder / "runs" / str(k), ())
        after = is_sound(page_of(folder))
        assert after.tags.count("figure") == before.tags.count("figure") + 2 + 1

    @pytest.mark.parametrize("status", ["unfinished", "stopped"])  # it runs, or was stopped by ASHA
    def test_a_row_that_did_not_end_is_not_the_best_and_not_drawn(self, tmp_path, status):
        rows = sweep_rows()
        rows[0] |= {"status": status, "validation_accuracy_mean": 1.0, "accuracy_mean": 1.0}
        sweep = read_sweep(write_sweep(tmp_path / "s", rows))
        assert len(sweep.finished) == len(rows) - 1
        assert float(sweep.best["validation_accuracy_mean"].iloc[0]) < 1.0

    def test_rows_that_used_ground_truth_are_marked(self, tmp_path):
        """Row 1: ward, l1, 1.0. The best is ward, l2, 1.0."""
        rows = [row | {"uses_ground_truth": k == 1} for k, row in enumerate(sweep_rows((0,)))]
        rows.append({"status": "failed", "error": "no"})  # has not got that far
        words = " ".join(is_sound(page_of(write_sweep(tmp_path / "s", rows))).text.split())
        assert words.count("†") >= 3  # the row, and a note on the overview and below the rows
        assert "1 † l1 ward 1 0" in words
        rows[1]["validation_accuracy_mean"] = 1.0
        words = " ".join(is_sound(page_of(write_sweep(tmp_path / "t", rows))).text.split())
        assert "best row: test accuracy 71.00 % †" in words
        sweep = read_sweep(tmp_path / "t")
        cells = {text.get_text() for text in heatmap_figure(sweep, DISTANCE, LINKAGE).axes[0].texts}
        assert "71.0 †\n4 clusters" in cells
        marked = overview_figure(sweep).axes[1].get_xticklabels()
        assert [text.get_text() for text in marked] == ["ward †", "single"]

    def test_the_setting_that_allows_ground_truth_tells_no_configurations_apart(self, tmp_path):
        rows = [row | {"uses_ground_truth": row["seed"] == 1} for row in sweep_rows()]
        sweep = read_sweep(write_sweep(tmp_path / "s", rows, baseline={"uses_ground_truth": True}))
        assert "uses_ground_truth" not in sweep.keys
        assert len(sweep.configurations) == 12

    def with_failed(self, wanted):
        failed = {"status": "failed", "error": "no", "accuracy_mean": None}
        failed |= {"validation_accuracy_mean": None, "clusters": None}
        return [row | failed if wanted(row) else row for row in sweep_rows()]

    @staticmethod
    def is_first(row):
        return (row[LINKAGE], row[DISTANCE], row[THRESHOLD]) == ("ward", "l2", 1.0)

    def test_configurations_with_a_failed_seed_rank_after_complete_ones(self, tmp_path):
        """ward, l2, 1.0 would be first; then only two are complete: ward, 10.0, l2 before l1. Equal
        accuracies are ordered by the number of clusters."""
        one = self.with_failed(lambda row: self.is_first(row) and row["seed"] == 1)
        sheet = top_sheet(read_sweep(write_sweep(tmp_path / "one", one)))
        assert sheet.labels["rank"].tolist() == ["1", "2", "3", "4", "5"]

        def is_complete(row):
            return (row[LINKAGE], row[THRESHOLD]) == ("ward", 10.0)

        most = self.with_failed(lambda row: not is_complete(row) and row["seed"] == 1)
        sweep = read_sweep(write_sweep(tmp_path / "most", most))
        sheet = top_sheet(sweep)
        assert sheet.labels["rank"].tolist() == ["1", "2", "3", "4", "5"]
        settings = sheet.labels[["distance", "threshold"]].values.tolist()
        assert settings[:3] == [["l2", "10"], ["l1", "10"], ["l2", "1"]]
        lines = sheet.lines()
        shown = [lines[row, VALIDATION]["ours"] for row in sheet.labels.index]
        assert ["‡" in text for text in shown] == [False, False, True, True, True]
        assert (sweep.num_tied, sweep.num_left_out) == (1, 10)
        assert "Configurations with ‡ rank after complete ones." in sheet.notes

    def test_a_failed_seed_is_marked_at_the_metric_whatever_it_is(self, tmp_path):
        rows = self.with_failed(lambda row: row["seed"] == 1)
        sweep = read_sweep(write_sweep(tmp_path / "s", rows, metric="clusters", mode="min"))
        assert sweep.best["clusters"].tolist() == [0]
        sheet = top_sheet(sweep)
        lines = sheet.lines()
        assert all("‡" in lines[row, "clusters"]["ours"] for row in sheet.labels.index)

    def test_the_ring_around_the_best_is_marked_and_no_setting_is_by_a_failed_seed(self, tmp_path):
        """Ground truth is a matter of the setting, a failed seed is one of a configuration."""
        complete = overview_figure(read_sweep(write_sweep(tmp_path / "whole")))
        rows = self.with_failed(lambda row: row["seed"] == 1)
        failed = overview_figure(read_sweep(write_sweep(tmp_path / "s", rows)))
        for figure, name in ((complete, "best"), (failed, "best ‡")):
            (legend,) = figure.legends
            assert [text.get_text() for text in legend.get_texts()] == [name]
            assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["l1", "l2"]

    def test_a_configuration_with_a_failed_seed_wins_only_where_none_is_complete(self, tmp_path):
        """ward, l2, 1.0 would be best, but its seed 1 failed; next is ward, l1, 1.0 with 0.70."""
        rows = self.with_failed(lambda row: self.is_first(row) and row["seed"] == 1)
        folder = write_sweep(tmp_path / "s", rows)
        sweep = read_sweep(folder)
        assert sweep.best[[LINKAGE, DISTANCE, THRESHOLD]].values.tolist() == [["ward", "l1", 1.0]]
        assert sweep.best[VALIDATION].tolist() == [0.7]
        words = " ".join(is_sound(page_of(folder)).text.split())
        assert "1 configuration is left out of this choice" in words
        assert words.count("done ‡") == 1
        ring = overview_figure(sweep).axes[0].lines[0]
        assert ring.get_xdata()[0] < 0.5  # l1
        cells = {text.get_text() for text in heatmap_figure(sweep, DISTANCE, LINKAGE).axes[0].texts}
        # For ward and l2 the thresholds 0.1 and 10 are equally good; 10 has fewer clusters.
        assert "61.0\n0 clusters" in cells

    def test_a_best_with_a_failed_seed_is_marked(self, tmp_path):
        folder = write_sweep(tmp_path / "s", self.with_failed(lambda row: row["seed"] == 1))
        words = " ".join(is_sound(page_of(folder)).text.split())
        assert "best row: test accuracy 70.00 % ‡ mean over 1 of 2 seeds" in words
        assert "no configuration is complete" in words
        assert "‡ a seed of this configuration failed or did not finish" in words
        assert "‡" not in page_of(write_sweep(tmp_path / "whole"))

    def test_equal_bests_are_told_as_ties_beside_the_baseline(self, tmp_path):
        rows = [row | {VALIDATION: min(row[VALIDATION], 0.70)} for row in sweep_rows()]
        for seed in (0, 1):
            measured = {"accuracy_mean": 0.3, VALIDATION: 0.3, "clusters": 1, "status": "done"}
            rows.append({"algorithm": "fedavg", "seed": seed, **measured})
        folder = write_sweep(tmp_path / "s", rows, baseline=[{"algorithm": "fedavg"}])
        sweep = read_sweep(folder)
        # ward, 1.0 with l1 and with l2 both have 0.70.
        assert sweep.num_tied == 2
        sheet = top_sheet(sweep)
        ranks = ["1 (tie)", "1 (tie)", "3", "4", "5", "baseline"]
        assert sheet.labels["rank"].tolist() == ranks
        assert sheet.labels["threshold"].tolist()[:2] == ["1", "1"]
        baseline = sheet.lines()[sheet.labels.index[-1], "accuracy_mean"]["ours"]
        assert baseline == "30.00 ± 0.00"
        words = " ".join(is_sound(page_of(folder)).text.split())
        assert "2 configurations tie for the best" in words
        assert "fedavg: test accuracy 30.00 %" in words
        assert "rows 26 13 configurations, 2 seeds" in words

    def test_the_simplest_within_one_standard_error_is_named_beside_the_best(self, tmp_path):
        """ward, l2: 0.71 with 4 clusters; single, 1.0 is two tenths below it, FedAvg three. The
        metric is the same in both seeds, so one seed is taken, and its error over clients."""
        error = {"validation_accuracy_se_clients": 0.2}
        few = {10.0: 2}  # clusters by threshold
        rows = [
            row | error | {"clusters": few.get(row[THRESHOLD], row["clusters"])}
            for row in sweep_rows(seeds=[0])
        ]
        measured = {"accuracy_mean": 0.4, VALIDATION: 0.41, "clusters": 1, "status": "done"}
        rows.append({"algorithm": "fedavg", "seed": 0, **measured} | error)
        wide = [row | {"validation_accuracy_se_clients": 0.31} for row in rows]
        for number, (given, expected) in enumerate([(rows, ["ward", 10.0, 2]), (wide, None)]):
            folder = write_sweep(tmp_path / str(number), given, baseline=[{"algorithm": "fedavg"}])
            sweep = read_sweep(folder)
            sheet = top_sheet(sweep)
            assert "within one standard error over clients" in " ".join(sheet.notes)
            if expected is None:  # FedAvg itself
                assert sweep.simplest["algorithm"].tolist() == ["fedavg"]
                assert sheet.labels["rank"].tolist().count("baseline, simplest") == 1
            else:
                found = sweep.simplest[[LINKAGE, THRESHOLD, "clusters"]].values.tolist()
                assert found == [expected]
                assert "3, simplest" in sheet.labels["rank"].tolist()
            words = " ".join(is_sound(page_of(folder)).text.split())
            assert "simplest row: test accuracy" in words
        assert read_sweep(write_sweep(tmp_path / "none", sweep_rows([0]))).simplest.empty

    @pytest.mark.parametrize(
        ("space", "is_sampled"),
        [
            ({"search": {"name": "optuna", "samples": 12}}, True),
            ({"search": {"name": "random"}, "space": {THRESHOLD: {"uniform": [0, 9]}}}, True),
            ({"search": {"name": "random"}, "space": {THRESHOLD: [0.1, 1.0, 10.0]}}, False),
            ({"space": {THRESHOLD: {"between_merges": 3}}}, False),
        ],
    )
    def test_sampled_values_are_points_and_listed_ones_lines(self, tmp_path, space, is_sampled):
        sweep = read_sweep(write_sweep(tmp_path / "s", **space))
        assert (THRESHOLD in sweep.sampled) == is_sampled
        axes = curve_figure(sweep, THRESHOLD).axes[0]  # test accuracy, which differs by seed
        joined = {line.get_linestyle() for line in axes.lines if line.get_marker() == "o"}
        assert joined == ({"None"} if is_sampled else {"-"})
        bars = [c for c in axes.collections if isinstance(c, LineCollection)]
        assert bool(bars) == is_sampled
        assert len(axes.collections) == 4  # a band for each line, or bars for its points
        assert bool(len(sweep.importances)) == is_sampled
        words = " ".join(top_sheet(sweep).notes)
        assert ("Share of the variance of validation_accuracy_mean" in words) == is_sampled
        assert (importance_figure(sweep) is not None) == is_sampled

    def test_components_are_labelled_by_name_and_by_what_differs(self, tmp_path):
        linked = {"name": "flhc", "rounds_before": 5, "clustering": {"partition": {"number": 4}}}
        clustered = [linked | {"clustering": {"distance": d}} for d in ("l1", "l2")]
        given = [linked, *clustered, {"name": "fedprox", "mu": 0.01}, "fedavg"]
        rows = [
            {"algorithm": value if isinstance(value, str) else json.dumps(value), "seed": seed}
            | {
                "status": "done",
                "error": "{x} is no JSON",
                "accuracy_mean": 0.5 + 0.1 * k,
                VALIDATION: 0.5 + 0.1 * k,
            }
            for k, value in enumerate(given)
            for seed in (0, 1)
        ]
        baselines = [{"algorithm": value} for value in given[3:]]
        folder = write_sweep(tmp_path / "s", rows, baseline=baselines, space={"algorithm": given})
        sweep = read_sweep(folder)
        labels = ["flhc (number 4)", "flhc (distance l1)", "flhc (distance l2)"]
        assert sweep.values("algorithm") == [*labels, "fedprox", "fedavg"]
        assert sweep.baselines["algorithm"].tolist() == ["fedprox", "fedavg"]
        ticks = [t.get_text() for t in overview_figure(sweep).axes[0].get_xticklabels()]
        assert ticks == labels
        assert "{" not in " ".join(top_sheet(sweep).labels["algorithm"])

    def test_panels_that_share_an_axis_of_clusters_show_all_points(self, tmp_path):
        rows = [
            row | {"clusters": 9 if row[DISTANCE] == "l1" else 2, THRESHOLD: row[THRESHOLD] * scale}
            for row in sweep_rows()
            for scale in [100 if row[DISTANCE] == "l1" else 1]
        ]
        figure = curve_figure(read_sweep(write_sweep(tmp_path / "s", rows)), THRESHOLD)
        counted = [axes for axes in figure.axes if axes.get_ylim()[0] == 0]
        assert len(counted) == 2
        assert all(axes.get_ylim()[1] > 9 for axes in counted)

    def test_numbers_of_other_magnitudes_have_panels_of_their_own(self, tmp_path):
        far = {"l1": 200.0, "l2": 1.0}
        rows = [row | {THRESHOLD: row[THRESHOLD] * far[row[DISTANCE]]} for row in sweep_rows()]
        figure = curve_figure(read_sweep(write_sweep(tmp_path / "s", rows)), THRESHOLD)
        l1, l2 = figure.axes[:2]
        assert [axes.get_title() for axes in (l1, l2)] == ["distance: l1", "distance: l2"]
        assert l1.lines[0].get_xdata().tolist() == [20, 200, 2000]
        assert l2.lines[0].get_xdata().tolist() == [0.1, 1, 10]

    def test_failed_rows_are_told_with_their_message(self, tmp_path):
        rows = sweep_rows()
        failed = {"status": "failed", "error": "ClientFailure: <nan> & more", "clusters": None}
        rows[0] |= failed | {"accuracy_mean": None, "validation_accuracy_mean": 1.0, "run": None}
        folder = write_sweep(tmp_path / "s", rows)
        read = is_sound(page_of(folder))
        assert read_sweep(folder).best[VALIDATION].tolist() == [0.71]  # not what it left behind
        assert "Failed rows" in read.text
        assert "ClientFailure: <nan> & more" in read.text
        assert "distance=l1, linkage=ward, threshold=0.1, seed=0" in read.text

    def test_a_sweep_of_which_nothing_finished_has_a_page(self, tmp_path):
        rows = [row | {"status": "failed", "error": "no"} for row in sweep_rows(seeds=(0,))]
        bare = pd.DataFrame(rows).drop(columns=["accuracy_mean", "validation_accuracy_mean"])
        read = is_sound(page_of(write_sweep(tmp_path / "s", bare)))
        assert "figure" not in read.tags

    def test_curves_have_a_line_a_combination_and_a_spread_over_seeds(self, tmp_path):
        sweep = read_sweep(write_sweep(tmp_path / "s"))
        assert curve_keys(sweep) == [THRESHOLD]
        test, validation, clusters = curve_figure(sweep, THRESHOLD).axes
        assert len(test.lines) == 4  # l1, ward; l2, ward; l1, single; l2, single
        # l2, ward: 0.6, 0.7, 0.6 in seed 0 and 0.02 more in seed 1.
        np.testing.assert_allclose(test.lines[1].get_ydata(), [61, 71, 61])
        np.testing.assert_allclose(validation.lines[1].get_ydata(), [61, 71, 61])
        assert clusters.lines[0].get_ydata().tolist() == [40, 4, 0]
        assert test.get_xscale() == "log"  # from 0.1 to 10
        assert len(test.collections) == 4  # bands
        assert not validation.collections  # seeds agree

    def test_rows_without_the_number_are_dashed(self, tmp_path):
        rows = sweep_rows(seeds=(0,))
        rows.append({"algorithm": "fedavg", "accuracy_mean": 0.3, "validation_accuracy_mean": 0.3})
        folder = write_sweep(tmp_path / "s", rows, baseline=[{"algorithm": "fedavg"}])
        sweep = read_sweep(folder)
        dashed = [a for a in curve_figure(sweep, THRESHOLD).axes[0].lines if a.is_dashed()]
        assert [line.get_ydata()[0] for line in dashed] == [30]
        assert ("algorithm", DISTANCE) not in heatmap_pairs(sweep)
        is_sound(page_of(folder))

    def test_seeds_with_numbers_of_their_own_are_lines_of_one_colour(self, tmp_path):
        rows = [row | {THRESHOLD: row[THRESHOLD] * (1 + row["seed"])} for row in sweep_rows()]
        figure = curve_figure(read_sweep(write_sweep(tmp_path / "s", rows)), THRESHOLD)
        lines = figure.axes[0].lines
        assert len(lines) == 8
        assert len({line.get_color() for line in lines}) == 4

    def test_thresholds_at_the_same_place_of_each_seeds_tree_are_averaged(self, tmp_path):
        places = {0.1: 0, 1.0: 1, 10.0: 2}
        own = [row | {"merge_place": places[row[THRESHOLD]]} for row in sweep_rows()]
        rows = [row | {THRESHOLD: row[THRESHOLD] * (1 + 2 * row["seed"])} for row in own]
        folder = write_sweep(tmp_path / "s", rows)
        sweep = read_sweep(folder)
        line = curve_figure(sweep, THRESHOLD).axes[0].lines[1]  # l2, ward
        # Thresholds t and 3t of seeds 0 and 1, test accuracies as without places.
        np.testing.assert_allclose(line.get_xydata(), [[0.2, 61], [2, 71], [20, 61]])
        assert sweep.rows_of(sweep.best)[THRESHOLD].tolist() == [1.0, 3.0]
        assert f"{THRESHOLD} 2 merge_place 1" in " ".join(is_sound(page_of(folder)).text.split())

    def test_a_cell_of_a_heatmap_is_the_best_by_validation_over_the_others(self, tmp_path):
        sweep = read_sweep(write_sweep(tmp_path / "s"))
        assert heatmap_pairs(sweep)[0] == (DISTANCE, LINKAGE)
        axes = heatmap_figure(sweep, DISTANCE, LINKAGE).axes[0]
        # Across l1, l2; down ward, single; threshold 1.0 is best, test is the mean over seeds.
        shown = np.asarray(heat_of(axes))
        np.testing.assert_allclose(shown, [[72, 71], [52, 51]])
        assert {text.get_text() for text in axes.texts} >= {"72.0\n4 clusters"}

    def test_a_setting_that_was_never_combined_is_an_empty_cell(self, tmp_path):
        rows = [r for r in sweep_rows() if (r[LINKAGE], r[DISTANCE]) != ("ward", "l1")]
        axes = heatmap_figure(
            read_sweep(write_sweep(tmp_path / "s", rows)), DISTANCE, LINKAGE
        ).axes[0]
        assert np.isnan(np.asarray(heat_of(axes))).sum() == 1

    def test_every_configuration_is_a_dot_by_each_setting_beside_the_baselines(self, tmp_path):
        rows = sweep_rows()
        measured = {"accuracy_mean": 0.3, VALIDATION: 0.3, "clusters": 1, "status": "done"}
        rows += [{"algorithm": "fedavg", "seed": seed, **measured} for seed in (0, 1)]
        folder = write_sweep(tmp_path / "s", rows, baseline=[{"algorithm": "fedavg"}])
        distance, linked, threshold = overview_figure(read_sweep(folder)).axes
        assert threshold.get_xscale() == "log"
        for axes in (distance, linked, threshold):
            (dots,) = axes.collections
            assert len(dots.get_offsets()) == 12  # over two seeds, without FedAvg
            ring, fedavg = axes.lines
            assert ring.get_ydata().tolist() == pytest.approx([71])
            assert fedavg.get_ydata()[0] == pytest.approx(30)
        heights = dots.get_offsets()[:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((41, 72))

    def test_one_setting_with_names_has_an_overview(self, tmp_path):
        rows = [row for row in sweep_rows() if row[THRESHOLD] == 1.0 and row[DISTANCE] == "l2"]
        folder = write_sweep(tmp_path / "s", rows)
        (axes,) = overview_figure(read_sweep(folder)).axes
        assert [text.get_text() for text in axes.get_xticklabels()] == ["ward", "single"]
        assert is_sound(page_of(folder)).tags.count("figure") == 1

    def test_numbers_of_a_column_have_as_many_decimals(self, tmp_path):
        """Clusters 4 and 5 in the two seeds: 4.5 ± 0.7, in the tables and behind the best."""
        rows = [row | {"clusters": 4 + row["seed"]} for row in sweep_rows()]
        words = " ".join(is_sound(page_of(write_sweep(tmp_path / "s", rows))).text.split())
        assert words.count("4.5 ± 0.7") == 5 + 1
        assert "± 0.71" not in words

    def test_columns_may_be_missing(self, tmp_path):
        folder = tmp_path / "s"
        folder.mkdir()
        frame = pd.DataFrame({"train.lr": [0.1, 0.2, 0.4], "accuracy_mean": [0.1, 0.3, 0.2]})
        frame.to_parquet(folder / "rows.parquet")
        (folder / "sweep.json").write_text("{}")
        read = is_sound(page_of(folder))
        assert "Best by test accuracy" in read.text
        assert "30.00 %" in read.text

    def test_runs_and_sweeps_share_a_page(self, tmp_path):
        write_run(tmp_path / "x" / "a", ())
        write_sweep(tmp_path / "x" / "s1", sweep_rows(seeds=(0,)))
        write_sweep(tmp_path / "x" / "s2", sweep_rows(seeds=(0,)))
        read = is_sound(page_of(tmp_path / "x"))
        assert {"run", "sweep0", "sweep1"} <= set(read.ids)


@pytest.mark.usefixtures("empty_figures")
class TestFolders:
    def test_a_folder_without_anything_is_refused_with_what_was_expected(self, tmp_path):
        with pytest.raises(ExperimentError, match=r"nothing to report in .*config\.yaml"):
            find_runs([tmp_path])

    def test_a_folder_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(ExperimentError, match="no folder"):
            find_runs([write_run(tmp_path / "a"), tmp_path / "b"])

    def test_a_sweep_that_cannot_be_read_is_named(self, tmp_path):
        folder = write_sweep(tmp_path / "s")
        (folder / "sweep.json").write_text("{")
        with pytest.raises(ExperimentError, match=r"sweep\.json is damaged"):
            find_runs([folder])

    def test_what_is_given_twice_is_shown_once(self, tmp_path):
        path = write_run(tmp_path / "a")
        assert len(find_runs([path, tmp_path])[0]) == 1

    def test_the_page_goes_into_the_first_folder(self, tmp_path):
        path = write_run(tmp_path / "a", events=())
        shown = typed("report", path)
        assert (path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
        assert "report.html" in shown
        assert len(find_runs([tmp_path])[0]) == 1

    def test_the_page_goes_where_it_is_told(self, tmp_path):
        path = write_run(tmp_path / "a", events=())
        typed("report", path, "--out", tmp_path / "new" / "p.html")
        assert (tmp_path / "new" / "p.html").is_file()
        assert not (path / "report.html").exists()


@pytest.mark.long
def test_figures_of_runs_and_sweeps_are_drawn_on_one_page(drawn_page):
    page = drawn_page.read_text(encoding="utf-8")
    read = is_sound(page)
    assert read.tags.count("img") == read.tags.count("figure") > 10
    for name in ('<b>&"x $y_$', "$ward_$ <&>", "<script>alert(1)</script>"):
        assert name in read.text
    assert "<script>alert" not in page
    assert "b" not in read.tags


def browse(page, *options):
    """What Chromium says of a page: on its console, and to us."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], done.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
class TestBrowser:
    def test_a_fault_would_be_seen(self, tmp_path):
        page = tmp_path / "wrong.html"
        page.write_text("<script>throw new Error('wrong')</script>")
        (said,), _ = browse(page, "--screenshot=" + str(tmp_path / "wrong.png"))
        assert "wrong" in said

    @pytest.mark.parametrize(("width", "scheme"), [(1400, "dark"), (500, "light")])
    def test_the_page_fits_says_nothing_on_the_console_and_can_be_sorted(
        self, drawn_page, tmp_path, width, scheme
    ):
        page, image = tmp_path / "page.html", tmp_path / "page.png"
        script = "<script>document.title = document.documentElement.scrollWidth; "
        script += "document.querySelector('#sweep0-rows th:nth-child(6) button').click()</script>"
        text = drawn_page.read_text(encoding="utf-8").replace("</body>", f"{script}</body>")
        page.write_text(text, encoding="utf-8")
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        options = [f"--screenshot={image}", "--dump-dom", f"--window-size={width},2000"]
        said, dom = browse(page, *dark, *options)
        assert said == []
        assert image.stat().st_size > 30_000
        corner = imread(image)[1990, 2, :3].mean()
        assert corner < 0.5 if scheme == "dark" else corner > 0.5
        assert int(re.search(r"<title>(\d+)</title>", dom)[1]) <= width
        assert set(re.findall(r'<li><a href="#(.*?)"', dom)) == {"runs", "sweep0"}
        assert 'aria-sort="ascending"' in dom
        first = dom[dom.index("<tbody>", dom.index('id="sweep0-rows"')) :]
        rows = sweep_rows()
        worst = min(range(len(rows)), key=lambda k: rows[k]["validation_accuracy_mean"])
        assert first[: first.index("</th>")].endswith(f">{worst}")
