"""What people read: tables, figures and pages of runs and sweeps."""

import sys
from types import ModuleType

import flray


class _Package(ModuleType):
    """Importing this package puts it in the place of the function `flray.report`: so it is one."""

    __call__ = staticmethod(flray.report)


sys.modules[__name__].__class__ = _Package
