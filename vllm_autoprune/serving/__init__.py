"""The vLLM plugin, the only folder that imports vLLM, sorted by the process that runs each module.

``settings`` and ``startup`` check what an operator sets. ``api`` plans requests in the API server,
and ``worker`` selects tokens; ``plan`` and ``served_state`` are used by both. ``models`` has one
file for each kind of backbone. ``compat`` holds every patch of vLLM.
"""
