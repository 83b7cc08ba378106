"""Load tests of a served vision-language model: latency, throughput and goodput by load."""
