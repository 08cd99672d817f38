"""Which run belongs in which cell of which table: conditions on its config, a key of its summary.

A condition is what the paper states of the cell. What it leaves open (FLT's momentum, a swept
threshold) is no condition: runs that differ in it compete for the cell.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flray.published.tables import Column, Row, Table
from flray.report.runs import RunRecord, look_up


@dataclass(frozen=True)
class OneOf:
    values: tuple[Any, ...]  # Any: configuration values; None is also a key that is not there


@dataclass(frozen=True)
class AtLeast:
    value: float


@dataclass(frozen=True)
class Mentions:
    """The value, written out, contains the pattern; case does not count."""

    pattern: str


@dataclass(frozen=True)
class PerEntry:
    """A condition for each dataset or model of the table's columns."""

    of: Mapping[str, Any]  # Any: conditions


Conditions = Mapping[str, Any]  # dotted key of the config, or summary.KEY -> value or one of these


@dataclass(frozen=True)
class Setting:
    """A setting of a published row as a key of the config."""

    key: str
    names: Mapping[Any, Any] = field(default_factory=dict)  # the paper's word -> ours


@dataclass(frozen=True)
class Metric:
    key: str  # of summary.json
    scale: float = 100.0  # from fractions to what the paper prints
    error: str | None = None  # the standard error beside it
    select: str | None = None  # what the papers' way of selecting looks at; None: the metric itself
    baseline: str | None = None  # FL+HC: the key of FedAvg's round the ratio is taken to
    baseline_round: Literal["after_clustering", "last"] = "last"


@dataclass(frozen=True)
class Matcher:
    """The runs of one table; a row's conditions go before a column's, those before the fixed."""

    fixed: Conditions = field(default_factory=dict)
    entries: Mapping[str, Conditions] = field(default_factory=dict)  # by column entry
    methods: Mapping[str, Conditions] = field(default_factory=dict)  # by method of a row
    settings: Mapping[str, Setting] = field(default_factory=dict)  # by setting of a row
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # by statistic; {}: nothing fills
    round_setting: str | None = None  # the row's setting that is the round to read
    # By method, where a row's numbers are measured in another way than those of the others.
    own_metrics: Mapping[str, Mapping[str, Metric]] = field(default_factory=dict)

    def conditions(self, row: Row, column: Column) -> dict[str, Any]:
        """Everything a run must be to count for this cell."""
        merged = {**self.fixed, **self.entries.get(column.entry, {})}
        for name, setting in self.settings.items():
            value = row.settings[name]
            merged[setting.key] = setting.names.get(value, value)
        if self.round_setting is not None:
            merged["rounds"] = AtLeast(row.settings[self.round_setting])
        merged |= self.methods.get(row.method or "", {})
        return {
            key: wanted.of[column.entry] if isinstance(wanted, PerEntry) else wanted
            for key, wanted in merged.items()
            if wanted is not ANYTHING
        }

    def metric(self, row: Row, column: Column) -> Metric | None:
        metrics = self.own_metrics.get(row.method or "", self.metrics)
        return metrics.get(column.statistic)

    def round(self, row: Row) -> int | None:
        return None if self.round_setting is None else row.settings[self.round_setting]


def fits(run: RunRecord, conditions: Conditions) -> bool:
    return all(_holds(_value(run, key), wanted) for key, wanted in conditions.items())


def required_algorithms(table: Table) -> tuple[str, ...]:
    """The registered names without which the table cannot be filled."""
    matcher = MATCHERS[table.key]
    names = {
        matcher.conditions(row, column)["algorithm.name"]
        for row in table.rows
        for column in table.columns
        if not table.is_formulas
    }
    if table.has_ratios:
        names.add("fedavg")
    return tuple(sorted(names))


def _value(run: RunRecord, key: str) -> Any:  # Any: configuration
    first, _, rest = key.partition(".")
    return run.summary.get(rest) if first == "summary" else look_up(run.config, key)


def _holds(value: Any, wanted: Any) -> bool:  # Any: configuration
    if isinstance(wanted, OneOf):
        return any(_holds(value, each) for each in wanted.values)
    if isinstance(wanted, Mentions):
        return re.search(wanted.pattern, str(value), re.IGNORECASE) is not None
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, AtLeast):
        return value >= wanted.value
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return math.isclose(value, wanted)
    return bool(value == wanted)


ANYTHING = object()  # takes back a condition for one method

CLUSTERING = "algorithm.clustering"
_NOBODY_APART = {"events": OneOf((None, [])), "split.holdout": OneOf((None, 0))}
_LINKAGES = {
    "ave.": "average",
    "comp.": "complete",
    "com.": "complete",
    "sing.": "single",
    "ward": "ward",
}
_DISTANCES = {"L1": "l1", "L2": "l2", "cos.": "cosine"}

# FL+HC (Briggs et al. 2020): mnist_writers is another dataset, it never fills a FEMNIST cell.
_FLHC_METRICS = {
    "acc_post_cluster": Metric(
        "accuracy_mean_after_clustering",
        baseline="accuracy_mean",
        baseline_round="after_clustering",
    ),
    "acc_round50": Metric("accuracy_mean", baseline="accuracy_mean"),
    "pct_clients_target_post_cluster": Metric(
        "clients_reaching_target_after_clustering",
        baseline="clients_reaching_target",
        baseline_round="after_clustering",
    ),
    "pct_clients_target_round50": Metric(
        "clients_reaching_target", baseline="clients_reaching_target"
    ),
}
_FLHC_DATA: dict[str, Conditions] = {
    "pathological": {
        "dataset.name": "mnist",
        "split.name": "pathological",
        "split.clients": 100,
        "evaluate.target": 0.99,
    },
    "label_swap": {
        "dataset.name": "mnist",
        "split.name": "label_swap",
        "split.clients": 100,
        "split.groups": 4,
        "evaluate.target": 0.99,
    },
    "femnist": {
        "dataset.name": "femnist",
        "split.name": "by_writer",
        "summary.clients": 367,
        "evaluate.target": 0.8,
    },
}


def _flhc(data: str, fixed: Conditions, settings: Mapping[str, Setting]) -> Matcher:
    common = {
        **_NOBODY_APART,
        "algorithm.name": "flhc",
        f"{CLUSTERING}.signature.name": OneOf(("update", "weights")),  # the paper says both
        f"{CLUSTERING}.embed.name": "none",
        f"{CLUSTERING}.relate.name": "none",
        f"{CLUSTERING}.partition.name": "hierarchical",
        f"{CLUSTERING}.partition.on": "distance",
        f"{CLUSTERING}.partition.number": None,
        "model.name": "flhc_cnn",
        "train.optimizer": "sgd",
        "train.epochs": 3,
        "train.batch_size": 10,
        "train.lr": 0.1,
        "rounds": 50,
    }
    fixed = {**common, **_FLHC_DATA[data], **fixed}
    return Matcher(fixed=fixed, settings=settings, metrics=_FLHC_METRICS)


def _flhc_when(data: str, threshold: float) -> Matcher:
    """Tables I-III: how many clients, after how many rounds."""
    fixed = {
        f"{CLUSTERING}.distance.name": "l2",
        f"{CLUSTERING}.partition.linkage": "ward",
        f"{CLUSTERING}.partition.threshold": threshold,
    }
    settings = {
        "client_fraction": Setting("participation"),
        "rounds_before_clustering": Setting("algorithm.rounds_before"),
    }
    return _flhc(data, fixed, settings)


def _flhc_how(data: str) -> Matcher:
    """Tables IV-VI: distance and linkage, each with its best threshold of a sweep."""
    settings = {
        "distance": Setting(f"{CLUSTERING}.distance.name", _DISTANCES),
        "linkage": Setting(f"{CLUSTERING}.partition.linkage", _LINKAGES),
    }
    return _flhc(data, {"participation": 0.2, "algorithm.rounds_before": 10}, settings)


# FLT (Jamali-Rad et al. 2022). An encoder is known by the dataset it was pre-trained on, which the
# value of this key mentions, be it a file's name or the encoder's whole configuration.
SIGNATURE = f"{CLUSTERING}.signature"
ENCODER = f"{SIGNATURE}.encoder"
_ON_EMNIST = Mentions(r"(?<![a-z])emnist")  # not femnist
_ON_FASHION = Mentions(r"fashion[_ -]?mnist")
_ON_CIFAR20 = Mentions(r"cifar[_ -]?20(?!\d)")
_ON_CIFAR100 = Mentions(r"cifar[_ -]?100(?!\d)")
_FLT: Conditions = {
    "algorithm.name": "flt",
    "algorithm.case": "rows",  # Alg. 3, Case I
    "algorithm.stages": 1,
    f"{SIGNATURE}.name": "encoder_centres",
    f"{CLUSTERING}.embed.name": "umap",
    f"{CLUSTERING}.distance.name": OneOf(("matching", "min_pair")),  # its code's, its text's
    f"{CLUSTERING}.relate.name": "threshold",
    f"{CLUSTERING}.relate.gamma": 1.0,
}
_FINE_TUNED: Conditions = {
    f"{SIGNATURE}.fine_tune": OneOf(("sequential", "independent", "central")),
    f"{SIGNATURE}.epochs": 5,  # J
}
_ENC1 = {
    **_FLT,
    f"{SIGNATURE}.fine_tune": "none",
    ENCODER: PerEntry({"MNIST": _ON_EMNIST, "CIFAR10": _ON_CIFAR20}),
}
_ENC2 = {
    **_FLT,
    **_FINE_TUNED,
    ENCODER: PerEntry({"MNIST": _ON_FASHION, "CIFAR10": _ON_CIFAR100}),
}
_PCA: Conditions = {
    "algorithm.name": "pca_km_hc",
    f"{CLUSTERING}.embed.name": "none",
    f"{CLUSTERING}.relate.name": "threshold",
}
_ACCURACY = Metric("accuracy_mean", error="accuracy_se_binomial")
_FLT_METRICS = {
    "acc": _ACCURACY,
    # Of the run whose accuracy is printed beside it.
    "var": Metric("accuracy_variance", scale=1e4, select="accuracy_mean"),
}
_FLT_METHODS: dict[str, Conditions] = {
    "FedAvg": {"algorithm.name": "fedavg"},
    "Local": {"algorithm.name": "local"},
    "PCA+kM+HC": _PCA,
    "FedSEM": {"algorithm.name": "fedsem"},
    "CFL": {"algorithm.name": "cfl"},
    "FLT": {**_FLT, **_FINE_TUNED, ENCODER: _ON_FASHION},
    "FLT (Enc1)": _ENC1,
    "FLT (Enc2)": _ENC2,
}
_FLT_TRAINING = {
    **_NOBODY_APART,
    "train.optimizer": "sgd",
    "train.batch_size": 10,
    "train.lr": 0.01,
}
_MNIST = {"dataset.name": "mnist", "model.name": "mlp200", "train.epochs": 1}
_CIFAR10 = {"dataset.name": "cifar10", "model.name": "lenet5", "train.epochs": 5}
_MLP, _CNN = {"model.name": "mlp200"}, {"model.name": "leaf_cnn"}


def _clustered(method: Conditions, num_clusters: int) -> Conditions:
    """Alg. 3, Case II: hierarchical clustering into C clusters."""
    partition = {f"{CLUSTERING}.partition.name": "hierarchical"}
    number = {f"{CLUSTERING}.partition.number": num_clusters}
    return {**method, "algorithm.case": "clusters", **partition, **number}


def _flt_groups(scenario: str) -> Matcher:
    """Tables I and II."""
    fixed = {
        **_FLT_TRAINING,
        "split.name": "label_groups",
        "split.scenario": scenario,
        "split.groups": 5,
        "split.clients": 100,
        "participation": 0.2,
        "rounds": 100,
    }
    entries = {"MNIST": _MNIST, "CIFAR10": _CIFAR10}
    return Matcher(fixed=fixed, entries=entries, methods=_FLT_METHODS, metrics=_FLT_METRICS)


def _flt_writers() -> Matcher:
    """Table III."""
    fixed = {
        **_FLT_TRAINING,
        "dataset.name": "femnist",
        "split.name": "by_writer",
        "summary.clients": 200,
        "participation": 0.2,
        "train.epochs": 5,
    }
    methods = {
        **_FLT_METHODS,
        "PCA+kM+HC(C=3)": _clustered(_PCA, 3),
        **{f"FLT(C={C})": _clustered(_FLT_METHODS["FLT"], C) for C in (2, 3, 5)},
        "IFCA": {
            "algorithm.name": "ifca",
            "rounds": 1500,
            "participation": 0.03,
            "train.epochs": ANYTHING,
            "train.lr": ANYTHING,
        },
    }
    entries = {"MLP": {**_MLP, "rounds": 1000}, "CNN": {**_CNN, "rounds": 100}}
    return Matcher(fixed=fixed, entries=entries, methods=methods, metrics=_FLT_METRICS)


def _flt_power_law() -> Matcher:
    """Table IV."""
    fixed = {
        **_FLT_TRAINING,
        "dataset.name": "emnist",
        "dataset.variant": "balanced",
        "split.name": "power_law_groups",
        "split.groups": 10,
        "participation": 0.2,
        "rounds": 100,
        "train.epochs": 5,
    }
    entries = {"MLP": {**_MLP, "split.clients": 2400}, "CNN": {**_CNN, "split.clients": 600}}
    return Matcher(fixed=fixed, entries=entries, methods=_FLT_METHODS, metrics=_FLT_METRICS)


def _flt_ablation() -> Matcher:
    """Table V; a run of more rounds is read at the row's round."""
    fixed = {
        **_FLT_TRAINING,
        "dataset.name": "cifar10",
        "model.name": "lenet5",
        "split.name": "label_groups",
        "split.scenario": "ring",
        "split.groups": 5,
    }
    settings = {
        "n_clients": Setting("split.clients"),
        "participation": Setting("participation"),
        "local_epochs": Setting("train.epochs"),
    }
    entries: dict[str, Conditions] = {
        "FedSEM": {"algorithm.name": "fedsem"},
        "FLT_enc1": {**_ENC1, ENCODER: _ON_CIFAR20},
        "FLT_enc2": {**_ENC2, ENCODER: _ON_CIFAR100},
    }
    return Matcher(fixed, entries, {}, settings, {"acc": _ACCURACY}, round_setting="rounds")


# FLIS (Morafah et al. 2022). Models are judged after ten epochs of the client's own training on its
# own test set, but those of the global methods as they are on the whole test set. The paper does
# not say how many rounds; 200 follow from its Table III.
_FLIS_METHODS: dict[str, Conditions] = {
    "SOLO": {"algorithm.name": "local"},
    "FedAvg": {"algorithm.name": "fedavg"},
    "FedProx": {"algorithm.name": "fedprox"},
    "FedNova": {"algorithm.name": "fednova"},
    "SCAFFOLD": {"algorithm.name": "scaffold"},
    "LG": {"algorithm.name": "lg_fedavg"},
    "PerFedAvg": {"algorithm.name": "per_fedavg"},
    "IFCA": {"algorithm.name": "ifca"},
    "CFL": {"algorithm.name": "cfl"},
    "FLIS (DC)": {"algorithm.name": "flis_dc"},
    "FLIS (HC)": {"algorithm.name": "flis_hc"},
}
_GLOBAL_METHODS = ("FedAvg", "FedProx", "FedNova", "SCAFFOLD")
_FLIS_DATA: dict[str, Conditions] = {
    "FMNIST": {"dataset.name": "fashion_mnist", "model.name": "lenet5"},
    "CIFAR-10": {"dataset.name": "cifar10", "model.name": "lenet5"},
    "CIFAR-100": {"dataset.name": "cifar100", "model.name": "resnet9"},
    "SVHN": {"dataset.name": "svhn", "model.name": "lenet5"},
}


def _flis(fixed: Conditions, partition: Setting, metric: str) -> Matcher:
    common = {
        "events": OneOf((None, [])),
        "split.clients": 100,
        "train.optimizer": "sgd",
        "train.epochs": 10,
        "train.batch_size": 10,
        "train.lr": 0.01,
        "participation": 0.1,
        "rounds": 200,
    }
    return Matcher(
        fixed={**common, **fixed},
        entries=_FLIS_DATA,
        # The outer step of Per-FedAvg is 0.001 in its authors' script, the inner one 0.01.
        methods={
            **_FLIS_METHODS,
            "PerFedAvg": {"algorithm.name": "per_fedavg", "train.lr": ANYTHING},
        },
        settings={"partition": partition},
        metrics={"acc": Metric(metric)},
        own_metrics={name: {"acc": Metric("global_accuracy_mean")} for name in _GLOBAL_METHODS},
    )


_SKEW = Setting("split.share", {"label_skew_20": 0.2, "label_skew_30": 0.3})
_ALPHA = Setting("split.alpha", {"dirichlet_0.1": 0.1})
_TUNED = {"split.holdout": OneOf((None, 0)), "evaluate.fine_tune.epochs": 10}
_UNSEEN = {"split.holdout": 20, "evaluate.fine_tune.epochs": 5}

# REPA (Radovič, Pejović 2023): pipelines, label skew and rounds are in an appendix: they are free.
_REPA_METHODS: dict[str, Conditions] = {
    **{
        f"REPA {encoder.upper()}": {"algorithm.name": "repa", "model.encoder": encoder}
        for encoder in ("sae", "clf", "ae")
    },
    **{
        f"WD f={epochs}": {"algorithm.name": "wd", f"{SIGNATURE}.epochs": epochs}
        for epochs in (1, 2)
    },
}
_SKEWED: Conditions = {"split.labels": OneOf(("skew", "dirichlet"))}
_SHIFTED: Conditions = {"split.pipelines": Mentions("blur")}


def _repa_robustness() -> Matcher:
    """Table 1."""
    fixed = {
        "events": OneOf((None, [])),
        "dataset.name": "cifar10",
        "split.name": "image_shift",
        "split.clients": 100,
        "split.holdout": 20,
        "model.name": "repa_net",
        f"{CLUSTERING}.partition.name": "kmeans",
        f"{CLUSTERING}.partition.number": 10,
    }
    entries = {
        "concept_drift_and_label_skew": {**_SKEWED, **_SHIFTED},
        "label_skew": {**_SKEWED, "split.pipelines": ["identity"]},
        "concept_drift": {"split.labels": "iid", **_SHIFTED},
    }
    metrics = {"acc": Metric("robustness", scale=1.0, error="robustness_se")}
    return Matcher(fixed, entries, _REPA_METHODS, metrics=metrics)


MATCHERS: Mapping[str, Matcher] = {
    "flhc.1": _flhc_when("pathological", threshold=3.0),
    "flhc.2": _flhc_when("label_swap", threshold=3.0),
    "flhc.3": _flhc_when("femnist", threshold=10.0),
    "flhc.4": _flhc_how("pathological"),
    "flhc.5": _flhc_how("label_swap"),
    "flhc.6": _flhc_how("femnist"),
    "flis.1": _flis({"split.name": "label_skew", **_TUNED}, _SKEW, "tuned_accuracy_mean"),
    "flis.2": _flis({"split.name": "dirichlet", **_TUNED}, _ALPHA, "tuned_accuracy_mean"),
    "flis.3": Matcher(methods=_FLIS_METHODS),
    "flis.4": _flis({"split.name": "label_skew", **_UNSEEN}, _SKEW, "tuned_holdout_accuracy_mean"),
    "flt.1": _flt_groups("disjoint"),
    "flt.2": _flt_groups("ring"),
    "flt.3": _flt_writers(),
    "flt.4": _flt_power_law(),
    "flt.5": _flt_ablation(),
    "flt.6": Matcher(),
    "flt_workshop.1": _flt_writers(),
    "flt_workshop.2": _flt_power_law(),
    "flt_workshop.3": Matcher(),
    "repa.1": _repa_robustness(),
}
