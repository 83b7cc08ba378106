"""Readers of the kinds of records that people have; each file registers its own.

To add a data set, write a function under :func:`~registry.data_set` with the columns that its
publisher gives it, in a file here.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
