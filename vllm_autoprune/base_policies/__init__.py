"""Base policies: published token selectors behind one interface, in a module per kind of method.

Importing this package registers all of them.
"""

from vllm_autoprune.base_policies import (  # noqa: F401
    coverage,
    determinants,
    diversity,
    groups,
    importance,
    language,
    merging,
    video,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

# The JSON schema and every list of base policies have them in this order.
for _name in sorted(BASE_POLICIES):
    BASE_POLICIES[_name] = BASE_POLICIES.pop(_name)
