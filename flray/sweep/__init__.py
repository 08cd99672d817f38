"""Sweeps: many configurations of experiments, of which nothing is trained twice."""

import sys
from types import ModuleType

import flray


class _Package(ModuleType):
    """Importing this package puts it in the place of the function `flray.sweep`: so it is one."""

    __call__ = staticmethod(flray.sweep)


sys.modules[__name__].__class__ = _Package
