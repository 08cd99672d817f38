"""A clustering on a page, cut elsewhere: what the page holds, and what Chromium makes of it."""

import json
import re
import shutil
import subprocess
from importlib.resources import files

import numpy as np
import pytest
import yaml
from recorded import CLUSTERING, THRESHOLD, write_run, write_sweep
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import adjusted_rand_score

from flray.clustering.hierarchical import Hierarchical
from flray.records.clusterings import ClusteringRecord, write_clustering
from flray.reports.explorer import (
    NUMBER,
    distance_picture,
    explorer,
    nearest_neighbours,
    trained_cuts,
)
from flray.reports.lines import _merges
from flray.reports.page import write_page
from flray.reports.runs import read_run

pytestmark = pytest.mark.slow
LINKAGE = "algorithm.clustering.partition.linkage"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
PROBE = """<script>
const probed = [];
for (const [control, value] of CUTS) {
  const input = document.querySelectorAll(".explore input")[control];
  input.value = value;
  input.dispatchEvent(new Event(control ? "change" : "input"));
  const pen = document.querySelector("canvas.plane").getContext("2d");
  const pixels = pen.getImageData(0, 0, 960, 960);
  const colours = new Set(new Uint32Array(pixels.data.buffer).filter((v) => v >>> 24 === 255));
  const drawn = ["tree", "distances", "plane", "graph"].map((name) => {
    const {width, height} = document.querySelector(`canvas.${name}`);
    const context = document.querySelector(`canvas.${name}`).getContext("2d");
    const values = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
    return values.reduce((digest, value) => (31 * digest + value) >>> 0, 7);
  });
  probed.push([document.querySelector(".explore output").textContent,
    document.querySelector(".explore code").textContent, colours.size, drawn]);
}
document.querySelector(".explore button").click();
probed.push(getSelection().toString());
document.title = JSON.stringify(probed);
</script>"""


def clients_in_the_plane(num_clients, num_groups=3, seed=0):
    """A record of clients around so many centres, average linkage, with the centres as groups."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(num_groups, size=num_clients)
    points = 10 * rng.normal(size=(num_groups, 2))[groups] + rng.normal(size=(num_clients, 2))
    D = squareform(pdist(points))
    return {
        "clients": np.arange(num_clients),
        "labels": np.zeros(num_clients, np.int64),
        "D": D,
        "linkage": linkage(pdist(points), "average"),
        "groups": groups,
        "points": points,
        "point_owner": np.arange(num_clients),
    }


def written(path, arrays=CLUSTERING, partition=None):
    """A run with one clustering."""
    partition = {"name": "hierarchical", "linkage": "average", "threshold": 3.0} | (partition or {})
    algorithm = {"name": "flhc", "rounds_before": 2, "clustering": {"partition": partition}}
    write_run(path, events=(), algorithm=algorithm)
    write_clustering(path / "clusterings", 2, arrays)
    return path


def rows_over(key, values):
    """Rows of a sweep with these values; row k has a test accuracy of k tenths."""
    return [
        {key: value, "seed": 0, "status": "done", "run": f"runs/{k:04d}", "error": None}
        | {"accuracy_mean": k / 10, "validation_accuracy_mean": k / 20}
        for k, value in enumerate(values)
    ]


class TestData:
    def test_a_partition_without_a_tree_cannot_be_cut(self, tmp_path):
        run = read_run(written(tmp_path / "a"))
        flat = {name: array for name, array in CLUSTERING.items() if name != "linkage"}
        assert explorer(ClusteringRecord(**CLUSTERING), run) is not None
        assert explorer(ClusteringRecord(**flat), run) is None
        assert (
            explorer(
                ClusteringRecord(**CLUSTERING),
                read_run(write_run(tmp_path / "b", algorithm="ifca")),
            )
            is None
        )

    def test_a_threshold_without_end_is_above_all_merges(self, tmp_path):
        run = read_run(written(tmp_path / "a", partition={"threshold": float("inf")}))
        data = explorer(ClusteringRecord(**CLUSTERING), run)
        assert max(data["heights"]) < data["start"] < np.inf
        json.dumps(data, allow_nan=False)

    def test_neighbours_are_those_of_brute_force(self):
        D = clients_in_the_plane(30)["D"]
        nearest = {tuple(sorted((i, j))) for i in range(30) for j in np.argsort(D[i])[1:4].tolist()}
        assert set(map(tuple, nearest_neighbours(D, 3).tolist())) == nearest

    def test_cuts_of_the_sweep_have_the_scores_of_their_rows(self, tmp_path):
        """Heights 1, 1, 1.5, 8.5 (average linkage): 0.5 leaves 5 clusters, 1.2 leaves 3."""
        write_sweep(tmp_path / "s", rows_over(THRESHOLD, [0.5, 1.2, 1.3, 100.0]))
        run = read_run(written(tmp_path / "s" / "runs" / "0001"))
        cuts = trained_cuts(run, CLUSTERING["linkage"])
        assert [(cut["clusters"], cut["score"]) for cut in cuts] == [(1, 0.3), (3, 0.1), (5, 0.0)]
        assert cuts[1]["text"] == "test accuracy 10.00 %, validation accuracy 5.00 %"
        assert trained_cuts(read_run(written(tmp_path / "alone")), CLUSTERING["linkage"]) == []

    def test_rows_of_other_seeds_and_settings_cut_other_trees(self, tmp_path):
        rows = rows_over(THRESHOLD, [0.5, 1.2, 100.0, 100.0])
        rows[2]["seed"] = 1
        write_sweep(tmp_path / "s", [row | {"train.lr": k // 3} for k, row in enumerate(rows)])
        run = read_run(written(tmp_path / "s" / "runs" / "0000"))
        assert [cut["clusters"] for cut in trained_cuts(run, CLUSTERING["linkage"])] == [3, 5]

    def test_a_baseline_has_no_value_of_a_text(self, tmp_path):
        rows = [row | {LINKAGE: "average"} for row in rows_over(THRESHOLD, [0.5, 1.2])]
        baseline = rows_over(THRESHOLD, [None])[0] | {LINKAGE: None, "run": "runs/0002"}
        write_sweep(tmp_path / "s", [*rows, baseline])
        run = read_run(written(tmp_path / "s" / "runs" / "0000"))
        assert [cut["clusters"] for cut in trained_cuts(run, CLUSTERING["linkage"])] == [3, 5]

    def test_a_threshold_merges_at_its_own_height_whatever_the_last_digits(self, tmp_path):
        """1 - 0.7 is 0.30000000000000004: the run merges there with the threshold 0.3."""
        write_sweep(tmp_path / "s", rows_over(THRESHOLD, [0.3, 0.29]))
        run = read_run(written(tmp_path / "s" / "runs" / "0000", partition={"threshold": 0.3}))
        tree = np.array([[0.0, 1.0, 1 - 0.7, 2.0]])
        assert Hierarchical("average", threshold=0.3).cut(tree, None).tolist() == [0, 0]
        cuts = trained_cuts(run, tree)
        assert [(cut["clusters"], cut["score"]) for cut in cuts] == [(1, 0.0), (2, 0.1)]
        assert "is above every merge, so there is one cluster" in _merges(1 - 0.7, 1 - 0.7, 0.3)
        assert "is below every merge" in _merges(1 - 0.7, 1 - 0.7, 0.29)

    @needs_node
    def test_the_page_merges_where_the_run_does(self, tmp_path):
        run = read_run(written(tmp_path / "a"))
        rounding = explorer(ClusteringRecord(**CLUSTERING), run)["rounding"]
        tree = json.dumps({"heights": [0.1, 1 - 0.7], "rounding": rounding})
        script = files("flray.reports").joinpath("templates/explorer.js").read_text("utf-8")
        calls = [f"mergesBelow({tree}, {threshold})" for threshold in (0.29, 0.3, 0.31)]
        calls.append(f"Number(shortest({tree}, {1 - 0.7}))")
        page = "globalThis.document = {querySelectorAll: () => []};"
        code = f"{page} {script}; console.log(JSON.stringify([{', '.join(calls)}]));"
        done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [1, 2, 2, 0.3]

    @pytest.mark.parametrize("num_clients", [100, 2000])
    def test_it_stays_small(self, tmp_path, num_clients):
        run = read_run(written(tmp_path / "a"))
        record = ClusteringRecord(**clients_in_the_plane(num_clients))
        size = len(json.dumps(explorer(record, run))) + len(distance_picture(record))
        assert 10_000 < size < 500_000


@needs_chromium
@pytest.mark.usefixtures("empty_figures")
class TestBrowser:
    def probed(self, path, cuts):
        """What the page shows after each of the cuts: (control, value)."""
        page = write_page([path], path / "page.html")
        probe = PROBE.replace("CUTS", json.dumps(cuts))
        page.write_text(page.read_text("utf-8").replace("</body>", probe + "</body>"), "utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={path / 'profile'}", "--enable-logging=stderr", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert all("readback" in line for line in said)  # of the probe itself
        title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1]
        return json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))

    def test_cuts_are_those_of_scipy_and_the_yaml_is_the_cut(self, tmp_path):
        arrays = clients_in_the_plane(40)
        tree, groups = arrays["linkage"], arrays["groups"]
        thresholds = [0.0, 0.7, 2.0, 5.0, float(1.04 * tree[-1, 2])]
        path = written(tmp_path / "a", arrays)
        *shown, copied = self.probed(path, [(1, t) for t in thresholds] + [(2, 3)])
        thresholds.append((tree[-3, 2] + tree[-2, 2]) / 2)
        for (words, text, num_colours, _), threshold in zip(shown, thresholds, strict=True):
            labels = fcluster(tree, threshold, "distance")
            sizes = np.sort(np.bincount(labels)[1:])[::-1]
            assert words.startswith(f"{len(sizes)} cluster")
            if len(set(sizes.tolist())) <= 12:
                listed = [p.split(" × ") for p in re.search("sizes (.*?);", words)[1].split(", ")]
                counted = [int(p[-1]) for p in listed for _ in range(int(p[0]) if p[1:] else 1)]
                assert counted == sizes.tolist()
            assert f"ARI {adjusted_rand_score(groups, labels):.3f} (ground truth)" in words
            partition = yaml.safe_load(text)["algorithm"]["clustering"]["partition"]
            assert partition["linkage"] == "average"
            again = fcluster(tree, partition["threshold"], "distance")
            assert adjusted_rand_score(again, labels) == 1
            assert num_colours >= min(len(sizes), 9)
        assert shown[0][2] > shown[-1][2] > shown[-2][2]  # recoloured
        # The last cut has the three clusters of the fourth, at another height of the tree.
        pictures = zip(*(drawn for *_, drawn in shown), strict=True)
        assert [len(set(canvas)) for canvas in pictures] == [6, 5, 5, 5]
        assert yaml.safe_load(copied) == yaml.safe_load(shown[-1][1])

    def test_equal_merges_are_told_apart_by_a_number_and_trained_cuts_are_named(self, tmp_path):
        """Two merges at height 1: four clusters exist by number alone."""
        write_sweep(tmp_path / "s", rows_over(NUMBER, [4, 2]))
        partition = {"threshold": None, "number": 4}
        path = written(tmp_path / "s" / "runs" / "0000", partition=partition)
        four, two, three, _ = self.probed(path, [(2, 4), (2, 2), (0, 1.2)])
        assert four[0].startswith("4 clusters; sizes 2, 3 × 1; ARI")
        assert four[0].endswith(
            "trained at this cut: test accuracy 0.00 %, validation accuracy 0.00 %"
        )
        assert "trained at this cut: test accuracy 10.00 %" in two[0]
        assert three[0].startswith("3 clusters")
        assert three[0].endswith("no row of the sweep trained this cut")
        chosen = [
            yaml.safe_load(text)["algorithm"]["clustering"]["partition"]
            for _, text, *_ in (four, two)
        ]
        assert [partition["number"] for partition in chosen] == [4, 2]
        assert all(partition.get("threshold") is None for partition in chosen)
