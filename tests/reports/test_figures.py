import re
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from recorded import write_run
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

import flray.reports
from flray.errors import ExperimentError
from flray.records.clusterings import ClusteringRecord, read_clusterings, write_clustering
from flray.reports.clustering_figures import (
    CLUSTERING_FIGURES,
    distance_figure,
    embedding_figure,
    graph_figure,
)
from flray.reports.figure_files import write_figures
from flray.reports.figures import accuracy_figure, clients_figure, last_trained_figure
from flray.reports.geometry import (
    circle_layout,
    classical_scaling,
    cluster_layout,
    cluster_order,
    dendrogram_brackets,
    leaf_order,
    merge_clusters,
    plane,
)
from flray.reports.runs import RunRecord, read_run
from flray.reports.style import GREY, matched_colours, palette
from flray.reports.style import GROUPS as GROUPS_PALETTE

# Clients 10, 12, 14 lie near 0 on a line, clients 11 and 13 near 9.
ON_A_LINE = np.array([0.0, 9.0, 1.0, 10.0, 0.5])
CLIENTS = np.arange(10, 15)
LABELS = np.array([0, 1, 0, 1, 0])
GROUPS = np.array([7, 3, 7, 3, 7])
D = np.abs(np.subtract.outer(ON_A_LINE, ON_A_LINE))


def clustering(**changes):
    tree = linkage(squareform(D), "average")
    fields = {"clients": CLIENTS, "labels": LABELS, "D": D, "linkage": tree, "groups": GROUPS}
    return ClusteringRecord(**(fields | changes))


def bare():
    return ClusteringRecord(CLIENTS, LABELS, D)


def rounds(accuracy, clusters=None, worst=None):
    accuracy = np.asarray(accuracy)
    return pd.DataFrame(
        {
            "round": np.arange(1, len(accuracy) + 1),
            "accuracy_mean": accuracy,
            "accuracy_worst_decile": accuracy / 2 if worst is None else worst,
            "clusters": np.ones(len(accuracy)) if clusters is None else clusters,
        }
    )


def clients(accuracy, t=1, part="test", **columns):
    fixed = {"round": t, "client": np.arange(len(accuracy)), "part": part, "accuracy": accuracy}
    return pd.DataFrame(fixed | {"model": 0} | columns)


def Run(rounds, clients, clusterings=None, target=None, seed=0):
    """The seeds of an experiment: one run that is not on disk."""
    record = RunRecord(Path(), {"evaluate": {"target": target}, "seed": seed}, None)
    vars(record).update(rounds=rounds, clients=clients, clusterings=clusterings or {})
    return [record]


def no_clients():
    return clients(np.empty(0))


def curves(axes):
    """The lines of experiments; seaborn adds an empty one for each in some versions."""
    return [x for x in axes.lines if len(x.get_xdata()) and x.get_linestyle() == "-"]


def dashed(axes):
    return [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def numbers_in(text):
    return [
        float(number)
        for number in re.findall(r"\d+(?:\.\d+)?", re.sub(r"(\d),(\d)", r"\1\2", text))
    ]


def drawn(figure):
    """Drawing finds what constructing does not."""
    figure.draw_without_rendering()
    return figure


class TestClusterings:
    def test_what_is_written_is_read_back_by_round(self, tmp_path):
        full = {
            "clients": CLIENTS,
            "labels": LABELS,
            "D": D,
            "R": (D < 2).astype(np.float32),
            "points": ON_A_LINE[:, None],
            "point_owner": np.arange(5),
            "linkage": linkage(squareform(D)),
            "groups": GROUPS,
        }
        least = {name: full[name] for name in ("clients", "labels", "D")}
        write_clustering(tmp_path / "clusterings", 10, full)
        write_clustering(tmp_path / "clusterings", 2, least)
        found = read_clusterings(tmp_path)
        assert list(found) == [2, 10]
        for name, array in full.items():
            np.testing.assert_array_equal(getattr(found[10], name), array)
            assert getattr(found[10], name).dtype == array.dtype
        assert (found[2].R, found[2].points, found[2].linkage, found[2].groups) == (None,) * 4
        names = sorted(path.name for path in (tmp_path / "clusterings").iterdir())
        assert names == ["round_000002.npz", "round_000010.npz"]

    def test_a_run_without_clusterings_has_none(self, tmp_path):
        assert read_clusterings(tmp_path) == {}

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        arrays = {"clients": CLIENTS, "labels": LABELS, "D": D}
        write_clustering(tmp_path / "clusterings", 1, arrays)

        def full_disk(member, *_, **_options):
            member.write(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(np.lib.format, "write_array", full_disk)
        with pytest.raises(OSError, match="disk full"):
            write_clustering(tmp_path / "clusterings", 1, arrays | {"D": 2 * D})
        np.testing.assert_array_equal(read_clusterings(tmp_path)[1].D, D)
        assert len(list((tmp_path / "clusterings").iterdir())) == 1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"labels": LABELS[:4]}, r"labels of 5 clients must be \(5,\), got \(4,\)"),
            ({"R": D[:4]}, "R of 5 clients"),
            ({"linkage": np.zeros((5, 4))}, r"must be \(4, 4\)"),
            ({"points": D}, "points and point_owner come together"),
            ({"points": D, "point_owner": np.arange(4)}, "point_owner"),
            ({"distance": D}, "unknown array 'distance'"),
        ],
    )
    def test_what_could_not_be_read_is_not_written(self, tmp_path, change, message):
        arrays = {"clients": CLIENTS, "labels": LABELS, "D": D}
        with pytest.raises(ValueError, match=message):
            write_clustering(tmp_path, 1, arrays | change)
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_array_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="got no labels"):
            write_clustering(tmp_path, 1, {"clients": CLIENTS, "D": D})


class TestOrders:
    def test_clusters_cut_from_a_tree_lie_together(self):
        points = np.random.default_rng(0).normal(size=(30, 3))
        tree = linkage(points, "complete")
        labels = fcluster(tree, 6, "maxclust").astype(np.int64)
        found = ClusteringRecord(np.arange(30), labels, squareform(pdist(points)), linkage=tree)
        order = cluster_order(found)
        assert sorted(order.tolist()) == list(range(30))
        assert np.count_nonzero(np.diff(labels[order])) == 5
        np.testing.assert_array_equal(order, leaf_order(found))

    def test_clusters_that_are_not_of_the_tree_are_gathered(self):
        crossed = clustering(labels=np.array([0, 0, 1, 1, 0]))  # the tree has {0, 2, 4}, {1, 3}
        leaves, order = leaf_order(crossed), cluster_order(crossed)
        assert np.count_nonzero(np.diff(crossed.labels[leaves])) > 1
        assert np.count_nonzero(np.diff(crossed.labels[order])) == 1
        assert sorted(order.tolist()) == [0, 1, 2, 3, 4]


class TestGeometry:
    def test_scaling_reproduces_distances_in_the_plane(self):
        points = np.random.default_rng(1).normal(size=(12, 2))
        exact = squareform(pdist(points))
        scaled, share = classical_scaling(exact)
        np.testing.assert_allclose(squareform(pdist(scaled)), exact, atol=1e-9)
        assert share == pytest.approx(1)

    def test_scaling_says_what_the_plane_leaves_out(self):
        corners = np.eye(4)  # a tetrahedron: three equal axes of variance
        _, share = classical_scaling(squareform(pdist(corners)))
        assert share == pytest.approx(2 / 3)

    def test_points_of_two_dimensions_are_drawn_as_they_are(self):
        points, owner = np.arange(12.0).reshape(6, 2), np.array([0, 0, 1, 2, 3, 4])
        flat, whose, how = plane(clustering(points=points, point_owner=owner))
        np.testing.assert_array_equal(flat, points)
        np.testing.assert_array_equal(whose, owner)
        assert how == "the points that were clustered"

    @pytest.mark.parametrize("dims", [3, 6])  # fewer and more than points
    def test_points_of_more_dimensions_are_projected_on_the_largest_two(self, dims):
        flat = np.random.default_rng(2).normal(size=(5, 2))
        turn = np.linalg.qr(np.random.default_rng(3).normal(size=(dims, dims)))[0][:2]
        found, _, how = plane(clustering(points=flat @ turn, point_owner=np.arange(5)))
        np.testing.assert_allclose(pdist(found), pdist(flat), atol=1e-9)
        assert how == f"first two principal components of {dims} (100 % of the variance)"

    @pytest.mark.parametrize("points", [None, ON_A_LINE[:, None]])
    def test_without_points_in_a_plane_distances_are_scaled(self, points):
        owner = None if points is None else np.arange(5)
        found, whose, how = plane(clustering(points=points, point_owner=owner))
        np.testing.assert_allclose(squareform(pdist(found)), D, atol=1e-7)
        assert whose.tolist() == [0, 1, 2, 3, 4]
        assert how.startswith("classical multidimensional scaling of D (100 %")

    def test_brackets_stand_over_their_leaves(self):
        tree = np.array([[0, 2, 1.0, 2], [1, 3, 4.0, 3]])
        brackets = dendrogram_brackets(tree, np.array([2, 0, 1]))
        assert brackets[0].tolist() == [[1, 0], [1, 1], [0, 1], [0, 0]]
        assert brackets[1].tolist() == [[2, 0], [2, 4], [0.5, 4], [0.5, 1]]
        assert merge_clusters(tree, np.array([5, 6, 5])) == [5, None]

    def test_a_chain_of_thousands_is_drawn(self):
        tree = linkage(np.arange(3000.0)[:, None] ** 1.5, "single")
        unused, labels = np.zeros((3000, 3000)), np.zeros(3000, np.int64)
        found = ClusteringRecord(np.arange(3000), labels, unused, linkage=tree)
        assert dendrogram_brackets(tree, leaf_order(found)).shape == (2999, 4, 2)

    @pytest.mark.parametrize("sizes", [[1], [50, 50], [90, 1, 1, 1], [1] * 40, [20, 5, 1, 30]])
    def test_clusters_do_not_touch(self, sizes):
        labels = np.random.default_rng(4).permutation(np.repeat(np.arange(len(sizes)), sizes))
        positions = cluster_layout(labels, np.argsort(labels, kind="stable"))
        apart = squareform(pdist(positions)) + np.where(np.eye(len(labels)), np.inf, 0)
        same = np.equal.outer(labels, labels)
        assert np.isfinite(positions).all()
        assert apart.min() > 0.7
        if len(sizes) > 1:
            assert apart[~same].min() > 0.9

    def test_neighbours_on_the_circle_are_about_one_apart(self):
        positions = circle_layout(40)
        assert np.linalg.norm(positions[0] - positions[1]) == pytest.approx(1, abs=0.01)
        assert len(np.unique(positions.round(6), axis=0)) == 40


class TestColours:
    def test_clusters_without_a_group_of_their_own_differ_from_all(self):
        clusters, planted = matched_colours(np.array([0, 1, 2, 3]), np.array([5, 5, 6, 6]))
        assert len(set(clusters.values())) == 4
        assert set(planted.values()) < set(clusters.values())


class TestLastTrained:
    def test_a_client_keeps_its_score_until_it_trains_again(self):
        parts = [([0.2, 0.4], 0, [0, 1]), ([0.8], 1, [0]), ([0.6], 3, [1])]
        frames = [clients(a, t, "last_trained", client=who) for a, t, who in parts]
        trained = pd.concat([*frames, clients([0.1], 3)])  # as given: not drawn
        runs = {"a": Run(rounds([0.5]), trained), "b": Run(rounds([0.5]), no_clients())}
        figure = drawn(last_trained_figure(runs))
        (line,) = curves(figure.axes[0])
        assert np.allclose(line.get_xydata(), [[0, 30], [1, 60], [3, 70]])
        assert legend_texts(figure) == ["a"]

    def test_runs_without_such_scores_are_told_what_to_set(self):
        with pytest.raises(ExperimentError, match=r"evaluate\.last_trained=true"):
            last_trained_figure({"a": Run(rounds([0.5]), no_clients())})

    def test_runs_of_another_score_are_left_out(self):
        last = clients([0.5, 0.7], part="last_trained")
        other = last.drop(columns="accuracy").assign(mae=[1.0, 2.0])
        runs = {"a": Run(rounds([0.5]), last), "b": Run(rounds([0.5]), other)}
        assert legend_texts(drawn(last_trained_figure(runs))) == ["a"]


class TestAccuracy:
    def test_a_line_is_the_mean_in_percent(self):
        figure = accuracy_figure({"a": Run(rounds([0.25, 0.5]), no_clients())})
        (axes,) = figure.axes
        (line,) = curves(axes)
        assert line.get_xydata().tolist() == [[1, 25], [2, 50]]
        band = axes.collections[0].get_paths()[0].vertices
        assert {12.5, 25, 50} <= set(band[:, 1].tolist())

    def test_rounds_without_an_evaluation_are_skipped(self):
        frame = rounds([np.nan, 0.5, np.nan, 0.75])
        (axes,) = accuracy_figure({"a": Run(frame, no_clients())}).axes
        assert curves(axes)[0].get_xydata().tolist() == [[2, 50], [4, 75]]

    def test_a_run_that_was_not_evaluated_yet_is_named(self):
        runs = {
            "a": Run(rounds([0.5]), no_clients()),
            "b": Run(pd.DataFrame({"round": np.empty(0, np.int64)}), no_clients()),
        }
        named = legend_texts(accuracy_figure(runs))
        assert [text[0] for text in named] == ["a", "b"]
        assert named[1] != "b"  # it says more than that of a run with a line

    def test_clusterings_and_target_are_marked(self):
        events = {0: Path(), 2: Path()}
        runs = {
            "a": Run(rounds([0.5] * 3, [1, 1, 2]), no_clients(), events, target=0.9),
            "b": Run(rounds([0.4] * 3), no_clients(), {2: Path()}, target=0.9),
        }
        figure = accuracy_figure(runs)
        top, counts = figure.axes
        assert dashed(top) == dashed(counts) == [0, 2]
        assert [x.get_ydata()[0] for x in top.lines if x.get_linestyle() == ":"] == [90]
        assert len(legend_texts(figure)) == 4  # two runs, the target and clusterings
        assert counts.lines[0].get_ydata().tolist() == [1, 1, 2]

    def test_ari_has_a_panel_where_clusters_were_compared_with_groups(self):
        """A line for each run, with the marks of its clusterings and events."""
        frame = rounds([0.5] * 3, [1, 1, 2]).assign(ari=[0.0, 0.0, 0.75])
        run = Run(frame, no_clients(), {3: Path()})
        run[0].config.update(rounds=3, events=[{"round": 2, "kind": "relabel"}])
        other = Run(rounds([0.4] * 3).assign(ari=[0.0, 0.0, 0.0]), no_clients())
        _, _, below = accuracy_figure({"a": run, "b": other}).axes
        lines = [line.get_ydata().tolist() for line in curves(below)]
        assert lines == [[0, 0, 0.75], [0, 0, 0]]
        assert dashed(below) == [3, 1.5]  # the clustering and the event
        assert below.get_ylabel() == "ARI"
        assert (
            len(accuracy_figure({"a": Run(rounds([0.5] * 3, [1, 1, 2]), no_clients())}).axes) == 2
        )

    def test_nothing_is_marked_where_nothing_was_clustered(self):
        figure = accuracy_figure({"a": Run(rounds([0.5]), no_clients())})
        assert len(figure.axes) == 1
        assert dashed(figure.axes[0]) == []
        assert len(legend_texts(figure)) == 1

    def test_many_clusterings_do_not_cover_the_curve(self):
        events = {t: Path() for t in range(1, 31)}
        run = Run(rounds([0.5] * 30, [2] * 30), no_clients(), events)
        figure = accuracy_figure({"a": run})
        assert dashed(figure.axes[0]) == []
        feet = [x for x in figure.axes[0].lines if max(x.get_ydata()) < 0.1]
        assert [x.get_xdata()[0] for x in feet] == list(range(1, 31))

    def test_many_clusters_are_counted_on_a_logarithmic_axis(self):
        runs = {
            "local": Run(rounds([0.5], [100]), no_clients()),
            "b": Run(rounds([0.5], [2]), no_clients()),
        }
        assert drawn(accuracy_figure(runs)).axes[1].get_yscale() == "log"

    def test_bands_of_many_runs_are_left_out(self):
        runs = {str(k): Run(rounds([0.5, 0.6]), no_clients()) for k in range(12)}
        (axes,) = accuracy_figure(runs).axes
        assert len(axes.collections) == 0
        assert len({line.get_color() for line in curves(axes)}) == 12


class TestClients:
    def test_accuracies_are_sorted_and_their_variance_told(self):
        run = Run(rounds([0.5]), clients([0.75, 0.25]))
        figure = clients_figure({"a": run})
        (axes,) = figure.axes
        assert axes.lines[0].get_xydata().tolist() == [[25, 25], [75, 75]]
        # Percent: mean 50, deviations of 25, variance 625.
        (told,) = legend_texts(figure)
        assert numbers_in(told) == [50, 625]

    def test_only_the_last_test_evaluation_counts(self):
        frames = [clients([0.1, 0.1], 1), clients([0.5, 0.5], 3)]
        frames.append(clients([0.9, 0.9], 3, part="validation"))
        frames.append(clients([0.9, 0.9], 4, part="validation"))
        figure = clients_figure({"a": Run(rounds([0.5]), pd.concat(frames))})
        assert figure.axes[0].lines[0].get_ydata().tolist() == [50, 50]

    def test_clusters_are_strips_in_the_colours_of_groups(self):
        frame = clients([0.5, 0.6, 0.7, 0.8], model=[0, 0, 1, 1], group=[4, 4, 4, 5])
        figure = clients_figure({"a": Run(rounds([0.5]), frame)})
        _, strips = figure.axes
        dots = strips.collections[0]
        assert dots.get_offsets()[:, 1].tolist() == pytest.approx([50, 60, 70, 80])
        assert np.abs(dots.get_offsets()[:, 0] - [0, 0, 1, 1]).max() < 0.5
        colours = [tuple(colour) for colour in dots.get_facecolor()]
        assert colours[0] == colours[1] == colours[2] != colours[3]
        assert strips.get_xlabel() == "cluster"
        assert len(figure.legends[1].get_texts()) == 2  # planted groups

    def test_of_very_many_clients_a_sample_is_drawn_and_means_are_of_all(self):
        accuracies, group = np.linspace(0, 1, 9000), np.arange(9000) % 3
        frame = clients(accuracies, group=group)
        _, strips = clients_figure({"a": Run(rounds([0.5]), frame)}).axes
        dots, means = strips.collections
        assert len(dots.get_offsets()) == 2000
        drawn = np.rint(dots.get_offsets()[:, 0])
        assert np.bincount(drawn.astype(int)).min() > 500  # of each group
        expected = [100 * accuracies[group == g].mean() for g in range(3)]
        assert [line[0, 1] for line in means.get_segments()] == pytest.approx(expected)
        assert strips.get_xlabel() == "planted group (2,000 of 9,000 clients)"

    def test_groups_have_the_names_of_the_split(self):
        frame = clients([0.5, 0.6, 0.7, 0.8], group=[0, 1, 1, 0])
        turned, again = (Run(rounds([0.5]), frame.copy(), seed=seed) for seed in (0, 1))
        for record in (*turned, *again):
            record.config["split"] = {"name": "rotation", "degrees": [0, 180]}
        figure = clients_figure({"a": turned})
        assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["0", "180"]
        assert [text.get_text() for text in figure.legends[1].get_texts()] == ["0", "180"]
        # By seed the strips are seeds; kinds of the data are recorded; other splits have others.
        vars(again[0])["environment"] = {"group_names": ["phone", "watch"]}
        assert legend_texts(clients_figure({"a": again}))[1:] == ["phone", "watch"]
        figure = clients_figure({"a": [*turned, *again]})
        assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["0", "1"]
        assert legend_texts(figure)[1:] == ["0", "1"]

    def test_one_model_is_told_apart_by_group(self):
        frame = clients([0.5, 0.6], group=[0, 1])
        figure = clients_figure({"a": Run(rounds([0.5]), frame)})
        assert figure.axes[1].get_xlabel() == "planted group"

    def test_as_many_models_as_clients_are_no_strips(self):
        frame = clients(np.linspace(0, 1, 50), model=np.arange(50))
        assert len(clients_figure({"a": Run(rounds([0.5]), frame)}).axes) == 1

    def test_a_score_that_is_defined_for_no_client_is_no_curve(self):
        frame = clients([np.nan, np.nan])
        (axes,) = drawn(clients_figure({"a": Run(rounds([np.nan]), frame)})).axes
        assert curves(axes) == []

    def test_a_run_with_groups_beside_one_without(self):
        mixed = {
            "a": Run(rounds([0.5]), clients([0.5, 0.6], model=[0, 1], group=[0, 1])),
            "b": Run(rounds([0.5]), clients([0.5, 0.6], model=[0, 1])),
            "not yet": Run(rounds([0.5]), no_clients()),
        }
        figure = drawn(clients_figure(mixed))
        own = {tuple(colour) for colour in figure.axes[2].collections[0].get_facecolor()}
        assert len(figure.axes) == 3
        assert len(own) == 1  # grey: colours mean groups in this figure


class TestSeeds:
    RUNS = (
        *Run(rounds([0.2, 0.4]), clients([0.5, 0.7], group=[0, 1]), seed=3),
        *Run(rounds([0.4, 0.8]), clients([0.6, 0.9], group=[0, 1]), seed=4),
    )

    def test_a_line_is_the_mean_over_seeds_with_a_band_and_seeds_are_named(self):
        figure = accuracy_figure({"a": self.RUNS})
        (axes,) = figure.axes
        np.testing.assert_allclose(curves(axes)[0].get_ydata(), [30, 60])
        band = axes.collections[0].get_paths()[0].vertices[:, 1]
        # Standard deviations of (20, 40) and (40, 80), ddof 1: 14.1 and 28.3.
        assert (band.min(), band.max()) == pytest.approx((30 - 200**0.5, 60 + 800**0.5))
        assert numbers_in(legend_texts(figure)[0]) == [3, 4]

    def test_clients_of_all_seeds_are_shown_by_seed(self):
        top, strips = clients_figure({"a": self.RUNS}).axes
        np.testing.assert_allclose(top.lines[0].get_ydata(), [50, 60, 70, 90])
        assert [text.get_text() for text in strips.get_xticklabels()] == ["3", "4"]
        assert strips.get_xlabel() == "seed"

    def test_planted_groups_have_no_colour_of_a_method(self):
        assert not set(palette(8)) & set(palette(9, GROUPS_PALETTE))


class TestDistance:
    def test_the_matrix_is_shown_raw_and_in_the_order_of_the_tree(self):
        found = clustering()
        raw, reordered, flat = distance_figure(found).axes[:3]
        leaves = leaf_order(found)
        np.testing.assert_array_equal(raw.images[0].get_array(), D)
        np.testing.assert_array_equal(reordered.images[0].get_array(), D[leaves][:, leaves])
        assert [t.get_text() for t in raw.get_xticklabels()] == ["10", "11", "12", "13", "14"]
        shown = [int(t.get_text()) for t in reordered.get_xticklabels()]
        assert shown == CLIENTS[leaves].tolist()
        blocks = np.asarray(flat.images[0].get_array())
        # Clusters of 3 and 2 clients, whichever comes first.
        expected = [np.kron(np.eye(2), np.ones((3, 3)))[k : k + 5, k : k + 5] for k in (0, 1)]
        assert any(np.array_equal(blocks, block) for block in expected)

    def test_the_tree_is_cut_where_the_config_says(self):
        figure = distance_figure(clustering(), threshold=3.0)
        (tree,) = [a for a in figure.axes[1].child_axes if a.collections]
        (brackets,) = [c for c in tree.collections if isinstance(c, LineCollection)]
        assert len(brackets.get_segments()) == 4
        assert tree.lines[0].get_ydata()[0] == 3.0
        assert numbers_in(tree.get_title(loc="right")) == [3]
        colours = {tuple(colour) for colour in brackets.get_colors()}
        assert len(colours) == 3  # two clusters, and grey above them

    def test_relations_take_the_place_of_blocks(self):
        R = np.where(D < 0.6, 0.5, 0.0)
        found = clustering(R=R)
        flat = distance_figure(found).axes[2]
        order = cluster_order(found)
        np.testing.assert_array_equal(flat.images[0].get_array(), R[order][:, order])
        assert len(flat.patches) == 2  # clusters outlined

    def test_strips_tell_groups_where_they_are_known(self):
        with_groups, without = distance_figure(clustering()), distance_figure(bare())
        raw = with_groups.axes[0]
        (strip,) = raw.child_axes
        assert strip.images[0].get_array()[:, 0].tolist() == [1, 0, 1, 0, 1]  # 3 before 7
        assert without.axes[0].child_axes == []
        assert without.axes[1].get_xlabel() == "(b) reordered by cluster"


class TestEmbedding:
    def test_clusters_and_groups_stand_side_by_side(self):
        points = np.random.default_rng(5).normal(size=(10, 2))
        found = clustering(points=points, point_owner=np.repeat(np.arange(5), 2))
        figure = embedding_figure(found, "flt")
        left, right = figure.axes
        np.testing.assert_array_equal(left.collections[0].get_offsets(), points)
        colours = left.collections[0].get_facecolor()
        assert (colours[0] == colours[1]).all()
        assert (colours[0] != colours[2]).any()
        np.testing.assert_array_equal(colours, right.collections[0].get_facecolor())
        assert numbers_in(right.get_title()) == [2, 1]  # groups, ARI

    def test_without_groups_there_is_one_panel(self):
        figure = embedding_figure(bare())
        assert len(figure.axes) == 1
        assert "classical multidimensional scaling" in figure.get_suptitle()


class TestGraph:
    def test_edges_join_related_clients(self):
        R = np.eye(5)
        R[0, 3] = 0.2  # in one direction only
        figure = graph_figure(clustering(R=R))
        circle = figure.axes[2]
        (edges,) = [c for c in circle.collections if isinstance(c, LineCollection)]
        positions = circle_layout(5)
        np.testing.assert_allclose(edges.get_segments(), [positions[[0, 3]]])
        assert {text.get_text() for text in circle.texts} == {"10", "11", "12", "13", "14"}

    def test_without_relations_clusters_are_complete(self):
        figure = graph_figure(bare())
        (edges,) = [c for c in figure.axes[3].collections if isinstance(c, LineCollection)]
        assert len(edges.get_segments()) == 3 + 1  # of 3 and of 2 clients
        np.testing.assert_array_equal(figure.axes[1].images[0].get_array()[:3, :3], np.ones((3, 3)))

    def test_clusters_that_overlap_are_joined_by_grey_edges(self):
        """Rows of R are the clusters: that of client 12 is the union of the other two."""
        R = np.eye(5)
        R[np.ix_([0, 4], [0, 2, 4])] = R[np.ix_([1, 3], [1, 2, 3])] = R[2] = 1
        found = clustering(labels=np.array([0, 1, 2, 1, 0]), R=R, linkage=None)
        figure = drawn(graph_figure(found))
        (edges,) = [c for c in figure.axes[3].collections if isinstance(c, LineCollection)]
        shades = [tuple(colour[:3]) for colour in edges.get_colors()]
        assert shades.count(GREY) == 4  # to client 12
        assert len(set(shades) - {GREY}) == len(shades) - 4 == 2  # within 10, 14 and 11, 13
        order = cluster_order(found)
        np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), R[np.ix_(order, order)])

    def test_many_edges_are_thinned_and_counted(self, monkeypatch):
        monkeypatch.setattr("flray.reports.clustering_figures.MAX_EDGES", 200)
        m = 40
        found = ClusteringRecord(np.arange(m), np.zeros(m, np.int64), np.zeros((m, m)))
        figure = graph_figure(found)
        (edges,) = [c for c in figure.axes[2].collections if isinstance(c, LineCollection)]
        assert len(edges.get_segments()) == 200
        assert numbers_in(figure.axes[2].get_title()) == [200, 40 * 39 / 2]


@pytest.mark.slow
@pytest.mark.parametrize("draw", [distance_figure, embedding_figure, graph_figure])
@pytest.mark.parametrize(
    "found",
    [
        ClusteringRecord(np.array([4]), np.array([0]), np.zeros((1, 1)), linkage=np.empty((0, 4))),
        pytest.param(
            ClusteringRecord(
                np.arange(2), np.arange(2), np.zeros((2, 2)), groups=np.zeros(2, np.int64)
            ),
            marks=pytest.mark.long,
        ),
        bare(),
        pytest.param(
            clustering(points=np.ones((5, 3)), point_owner=np.arange(5), R=np.zeros((5, 5))),
            marks=pytest.mark.long,
        ),
        clustering(labels=np.array([4, -1, 4, 2, 0])),
    ],
    ids=["one client", "all equal", "the least", "one place", "any labels"],
)
def test_anything_a_clustering_may_lack_is_drawn(draw, found):
    assert drawn(draw(found, "run")).axes


def read(**paths):
    """The experiments of runs on disk, one seed each."""
    return {name: [read_run(path, name)] for name, path in paths.items()}


def is_image(path):
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 2000


@pytest.fixture
def undrawn(monkeypatch):
    for kind in ("accuracy", "clients"):
        monkeypatch.setattr(f"flray.reports.figure_files.{kind}_figure", lambda *_: Figure((1, 1)))
    for kind in CLUSTERING_FIGURES:
        monkeypatch.setitem(CLUSTERING_FIGURES, kind, lambda *_: Figure((1, 1)))


class TestFiles:
    def test_a_run_without_clusterings_has_the_two_accuracy_figures(self, tmp_path, undrawn):
        written = write_figures(read(a=write_run(tmp_path / "a", ())), tmp_path / "out")
        assert [path.name for path in written] == ["accuracy.png", "clients.png"]
        assert sorted((tmp_path / "out").iterdir()) == sorted(written)

    @pytest.mark.slow
    def test_a_clustering_has_three_figures(self, tmp_path, monkeypatch):
        monkeypatch.setattr("flray.reports.figure_files.DPI", 30)
        runs = {
            "FL+HC / seed 1": write_run(tmp_path / "a", [1]),
            "plain": write_run(tmp_path / "b", (), algorithm="fedavg"),
        }
        written = write_figures(read(**runs), tmp_path / "out")
        assert [path.name for path in written[2:]] == [
            f"FL+HC_seed_1_round_1_{kind}.png" for kind in ("distance", "embedding", "graph")
        ]
        assert all(is_image(path) for path in written)

    @pytest.mark.parametrize(("events", "shown"), [([0, 1, 2], [0, 1, 2]), ([0, 1, 2, 3], [3])])
    def test_of_many_clusterings_the_last_is_drawn(self, tmp_path, undrawn, events, shown):
        path = write_run(tmp_path / "a", events)
        names = [p.name for p in write_figures(read(a=path), tmp_path / "out")]
        assert [n for n in names if "graph" in n] == [f"a_round_{t}_graph.png" for t in shown]

    def test_a_run_that_has_only_begun_has_no_figures(self, tmp_path):
        path = write_run(tmp_path / "a", (), None, rounds=())
        assert write_figures(read(a=path), tmp_path / "out") == []

    def test_runs_that_would_overwrite_each_other_are_refused(self, tmp_path):
        path = write_run(tmp_path / "a", [1])
        with pytest.raises(ValueError, match=r"'a/b', 'a b'.* would have one name"):
            write_figures(read(**{"a/b": path, "a b": path}), tmp_path / "out")

    def test_global_state_is_left_alone(self, tmp_path, monkeypatch):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
        before = dict(matplotlib.rcParams)
        write_figures(read(a=write_run(tmp_path / "a", [1])), tmp_path / "out")
        assert dict(matplotlib.rcParams) == before
        sources = [path.read_text() for path in Path(flray.reports.__file__).parent.glob("*.py")]
        assert any("matplotlib.figure" in source for source in sources)
        assert not any("pyplot" in source for source in sources)  # it would ask for a display


def test_events_are_marked_where_their_round_begins() -> None:
    (run,) = Run(rounds([0.5, 0.6, 0.7]), clients([0.5]))
    events = [{"round": 3, "kind": "leave"}, {"round": 9, "kind": "join"}]
    run.config.update(events=events, rounds=3)
    figure = accuracy_figure({"mine": [run]})
    upright = [line for line in figure.axes[0].lines if np.ptp(line.get_xdata()) == 0]
    assert 2.5 in [line.get_xdata()[0] for line in upright]
    assert 8.5 not in [line.get_xdata()[0] for line in upright]
    assert len(legend_texts(figure)) == 2
