"""The atoms of TPDSL by group, each declared in the registry when its module is imported."""
