"""Load tests of a served vision-language model: what it costs, at what rate, with which spread."""
