"""Readers of data sets' records; each module registers its own.

To add a data set, write a reader in a module here and decorate it with
:func:`~registry.data_set`, which takes the columns that its publisher uses.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
