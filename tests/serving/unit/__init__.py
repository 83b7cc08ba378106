"""The pieces of the plugin one at a time, without an engine; engines are tested one room up."""
