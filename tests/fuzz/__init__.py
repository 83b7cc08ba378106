"""Generated and mutated states: what the loader, the schema and the safety check make of them."""
