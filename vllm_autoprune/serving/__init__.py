"""The vLLM plugin, the only folder that imports vLLM, sorted by the process that runs each module.

``startup`` checks settings and registers the pruned classes; ``api`` plans requests in the API
server; ``worker`` selects tokens; ``shared`` is what both need; ``models`` has one file per
backbone. ``compat`` holds every patch of vLLM; operators name ``encoder_budget`` by its path.
"""
