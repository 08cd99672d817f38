"""Algorithms: one paper, one file."""

from flray.algorithms.apfl import Apfl
from flray.algorithms.cfl import Cfl
from flray.algorithms.cfl_gp import CflGp
from flray.algorithms.clove import Clove
from flray.algorithms.ditto import Ditto
from flray.algorithms.fedala import FedAla
from flray.algorithms.fedamp import FedAmp
from flray.algorithms.fedavg import FedAvg
from flray.algorithms.fedbabu import FedBabu
from flray.algorithms.fedbn import FedBn
from flray.algorithms.fedclust import FedClust
from flray.algorithms.feddrift import FedDrift
from flray.algorithms.fedem import FedEm
from flray.algorithms.fednova import FedNova
from flray.algorithms.fedper import FedPer
from flray.algorithms.fedprox import FedProx
from flray.algorithms.fedrc import FedRc
from flray.algorithms.fedrep import FedRep
from flray.algorithms.fedsem import FedSem
from flray.algorithms.fedsoft import FedSoft
from flray.algorithms.flexcfl import FlexCfl
from flray.algorithms.flhc import Flhc
from flray.algorithms.flis_dc import FlisDc
from flray.algorithms.flis_hc import FlisHc
from flray.algorithms.flt import Flt
from flray.algorithms.ifca import Ifca
from flray.algorithms.lg_fedavg import LgFedAvg
from flray.algorithms.local import Local
from flray.algorithms.pacfl import Pacfl
from flray.algorithms.pca_km_hc import PcaKmHc
from flray.algorithms.per_fedavg import PerFedAvg
from flray.algorithms.pfedme import PFedMe
from flray.algorithms.repa import Repa
from flray.algorithms.scaffold import Scaffold
from flray.algorithms.wd import Wd

ALGORITHMS: dict[str, type] = {
    "apfl": Apfl,
    "cfl": Cfl,
    "cfl_gp": CflGp,
    "clove": Clove,
    "ditto": Ditto,
    "fedala": FedAla,
    "fedamp": FedAmp,
    "fedavg": FedAvg,
    "fedbabu": FedBabu,
    "fedbn": FedBn,
    "fedclust": FedClust,
    "fedem": FedEm,
    "feddrift": FedDrift,
    "fednova": FedNova,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrc": FedRc,
    "fedrep": FedRep,
    "fedsem": FedSem,
    "flexcfl": FlexCfl,
    "fedsoft": FedSoft,
    "flhc": Flhc,
    "flis_dc": FlisDc,
    "flis_hc": FlisHc,
    "flt": Flt,
    "ifca": Ifca,
    "lg_fedavg": LgFedAvg,
    "local": Local,
    "pacfl": Pacfl,
    "pca_km_hc": PcaKmHc,
    "per_fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "repa": Repa,
    "scaffold": Scaffold,
    "wd": Wd,
}
