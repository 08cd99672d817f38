"""Draw FLIS's Figs. 2 to 5 from the archives and curves here: means of three seeds, bands from the
lowest to the highest.

    python docs/results/flis_figures.py

Runs are read where they are packed; curves are those of the models that clients trained last.
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


if __name__ == "__main__":
    save_figure(beta_figure(), FOLDER / "flis_beta/figures_2_and_3.svg")
    save_figure(curves_figure("cifar10"), FOLDER / "flis_curves/figure4.svg")
    save_figure(curves_figure("fashion_mnist"), FOLDER / "flis_curves/figure5.svg")
