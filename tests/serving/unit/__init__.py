"""Unit tests of the plugin, without an engine."""
