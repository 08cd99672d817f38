"""Draw FLIS's Figs. 2 to 5 and REPA's 1, 2 and 4 from the archives, rows and curves here: means of
three seeds, bands from the lowest to the highest.

    python docs/results/figures.py

Runs are read where they are packed; FLIS's curves are those of the models that clients trained
last.
"""

import io
import tarfile
from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flray.reports import style
from flray.reports.figure_files import save_figure

FOLDER = Path(__file__).parent
DATASETS = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
PERCENT, MEMBERS = "accuracy (%)", "wrong and missing members"
JUDGED = {  # columns of rows.parquet, with titles
    "last_trained_accuracy_mean": "model that a client trained last",
    "accuracy_mean": "model that a client is given",
    "error": "clustering error",
}
METHODS = {
    "flis_dc": "FLIS (DC)",
    "flis_hc": "FLIS (HC)",
    "fedavg": "FedAvg",
    "ifca": "IFCA",
    "cfl": "CFL",
    "lg_fedavg": "LG-FedAvg",
    "local": "Local",
    "per_fedavg": "Per-FedAvg",
}

SETTINGS = {
    "cifar10_labels": "label skew",
    "cifar10_drift": "drift",
    "cifar10": "label skew and drift",
}
SIGNATURES = {"sae": "REPA, SAE", "clf": "REPA, CLF", "ae": "REPA, AE", "wd": "weight differences"}
NUMBER, PROXIMAL = "algorithm.clustering.partition.number", "algorithm.mu"
UNIFORMITY = {"uniformity": "", "uniformity_labels": "labels given", "uniformity_random": "random"}


def rows_of(archive: Path) -> pd.DataFrame:
    """The rows of a packed sweep that have ended."""
    with tarfile.open(archive) as packed:
        content = packed.extractfile("rows.parquet")
        assert content is not None, f"{archive} has no rows"
        rows = pd.read_parquet(io.BytesIO(content.read()))
    return rows[rows["status"] == "done"]


def thresholds() -> pd.DataFrame:
    """FLIS (DC) by β, local epochs, dataset and seed: two accuracies and the clustering error."""
    rows = pd.concat(map(rows_of, sorted((FOLDER / "flis_beta").glob("*.tar.xz"))))
    rows["experiment"] = rows["experiment"].fillna("cifar10_dc")  # a sweep of one experiment
    rows["train.epochs"] = rows["train.epochs"].fillna(20).astype(int)  # and of one number
    rows = rows[rows["algorithm.beta"].notna()]
    accuracies = {
        name: 100 * rows[name] for name in ("last_trained_accuracy_mean", "accuracy_mean")
    }
    error = rows["overlap_fp"] + rows["overlap_fn"]
    return rows.assign(**accuracies, error=error, local_epochs=rows["train.epochs"].astype(str))


def draw_lines(axes: Axes, data: pd.DataFrame, x: str, y: str, hue: str, legend: bool) -> None:
    """Means over seeds, with bands from the lowest to the highest."""
    colours = style.colours_of(data[hue])
    sns.lineplot(
        data, x=x, y=y, hue=hue, palette=colours, errorbar=("pi", 100), legend=legend, ax=axes
    )


def beta_figure() -> Figure:
    """Figs. 2 and 3: a row for each dataset, a column for what is judged."""
    figure, rows = Figure((11, 6), layout="constrained"), thresholds()
    for line, (key, name) in zip(figure.subplots(2, len(JUDGED)), DATASETS.items(), strict=True):
        shown = rows[rows["experiment"].str.startswith(key)].sort_values("train.epochs")
        for axes, (column, title) in zip(line, JUDGED.items(), strict=True):
            is_first = key == "fashion_mnist" and column == "accuracy_mean"
            draw_lines(axes, shown, "algorithm.beta", column, "local_epochs", is_first)
            unit = MEMBERS if column == "error" else PERCENT
            axes.set(title=f"{name}: {title}", xlabel="β", ylabel=unit)
            axes.title.set_size(9)
            if is_first:
                axes.legend(title="local epochs", fontsize=8, title_fontsize=8)
    return figure


def curves_figure(dataset: str) -> Figure:
    """Fig. 4 (CIFAR-10) or 5 (Fashion-MNIST): accuracy by round."""
    files = sorted((FOLDER / "flis_curves").glob("curves*.csv"))
    curves = pd.concat([pd.read_csv(file).assign(seed=k) for k, file in enumerate(files)])
    names = {f"{dataset} {method}": name for method, name in METHODS.items()}
    data = curves.melt(["round", "seed"], list(names), "method", PERCENT).replace({"method": names})
    figure = Figure((7, 4.4), layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, data, "round", PERCENT, "method", legend=True)
    axes.set(title=f"{DATASETS[dataset]}: models that clients trained last, three seeds")
    axes.legend(fontsize=8)
    return figure


def repa_correlations() -> Figure:
    """REPA's Fig. 1: how signatures follow labels, drift or both, as the encoder is trained."""
    folder = FOLDER / "repa_correlation"
    parts = [pd.read_parquet(folder / "rows.parquet"), *map(rows_of, sorted(folder.glob("*.xz")))]
    rows = pd.concat(parts)
    rows["experiment"] = rows["experiment"].fillna("cifar10_drift")  # a sweep of one experiment
    encoder = rows["model.encoder"].fillna("ae")  # and of one encoder
    rows["signature"] = encoder.where(rows["algorithm"] == "repa", "wd").map(SIGNATURES)
    figure = Figure((10, 3.4), layout="constrained")
    for axes, (key, name) in zip(figure.subplots(1, 3, sharey=True), SETTINGS.items(), strict=True):
        shown = rows[rows["experiment"] == key]
        draw_lines(axes, shown, "rounds", "data_correlation", "signature", key == "cifar10_labels")
        axes.set(title=f"clients have {name}", ylabel="correlation with the data")
        axes.set(xlabel="rounds before", xscale="log")
        axes.set_xticks([1, 5, 10, 20, 50], ["1", "5", "10", "20", "50"])
    figure.axes[0].legend(fontsize=8)
    return figure


def repa_uniformity() -> Figure:
    """REPA's Fig. 2: how alike the labels within clusters are, by the number of clusters."""
    rows = pd.concat(map(pd.read_parquet, sorted((FOLDER / "repa_figure2").glob("*.parquet"))))
    rows = rows.rename(columns={NUMBER: "clusters K"})
    rows["uniformity of"] = ["REPA, CLF" if "repa" in name else "WD" for name in rows["algorithm"]]
    lines = rows.melt(["clusters K", "uniformity of"], list(UNIFORMITY), "which")
    of_method = lines["which"] == "uniformity"
    reference = lines["which"].map(UNIFORMITY)
    lines["uniformity of"] = lines["uniformity of"].where(of_method, reference)
    figure = Figure((6, 3.8), layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, lines, "clusters K", "value", "uniformity of", legend=True)
    axes.set(ylabel="uniformity")
    return figure


def repa_writers() -> Figure:
    """REPA's Fig. 4 on MNIST by writer: accuracy by the number of clusters."""
    rows = pd.concat(map(rows_of, sorted((FOLDER / "repa_writers").glob("*.xz"))))
    rows = rows[rows[NUMBER].notna()].drop_duplicates(["params_sha256", "seed"])
    term = rows[PROXIMAL].fillna(0).map({0.0: "", 0.01: ", μ = 0.01"})
    rows["method"] = rows["algorithm"].map({"repa": "REPA", "wd": "WD"}) + term
    rows = rows.sort_values("method").rename(columns={NUMBER: "clusters K"})
    figure = Figure((9, 3.6), layout="constrained")
    titles = {"accuracy_mean": "training clients", "holdout_accuracy_mean": "holdout clients"}
    for axes, (column, title) in zip(
        figure.subplots(1, 2, sharey=True), titles.items(), strict=True
    ):
        shown = rows.assign(**{PERCENT: 100 * rows[column]})
        draw_lines(axes, shown, "clusters K", PERCENT, "method", legend=column == "accuracy_mean")
        axes.set(title=title)
    figure.axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    save_figure(beta_figure(), FOLDER / "flis_beta/figures_2_and_3.svg")
    save_figure(curves_figure("cifar10"), FOLDER / "flis_curves/figure4.svg")
    save_figure(curves_figure("fashion_mnist"), FOLDER / "flis_curves/figure5.svg")
    save_figure(repa_correlations(), FOLDER / "repa_correlation/figure1.svg")
    save_figure(repa_uniformity(), FOLDER / "repa_figure2/figure2.svg")
    save_figure(repa_writers(), FOLDER / "repa_writers/figure4.svg")
