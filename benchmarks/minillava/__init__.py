"""A small, really trained LLaVA-1.5 with its CLIP, its synthetic scenes and its held-out split.

Knows nothing about the plugin: everything here runs with torch and transformers alone.
"""
