"""Algorithms: one paper, one file."""

from flray.algorithms.cfl import Cfl
from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedprox import FedProx
from flray.algorithms.fedsem import FedSem
from flray.algorithms.flhc import Flhc
from flray.algorithms.flt import Flt
from flray.algorithms.ifca import Ifca
from flray.algorithms.local import Local
from flray.algorithms.pca_km_hc import PcaKmHc

ALGORITHMS: dict[str, type] = {
    "cfl": Cfl,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedsem": FedSem,
    "flhc": Flhc,
    "flt": Flt,
    "ifca": Ifca,
    "local": Local,
    "pca_km_hc": PcaKmHc,
}
