"""Load tests of a served vision-language model: what it costs, at what rate, with which spread.

Knows nothing about plugins: any server that streams OpenAI chat completions can be asked.
"""
