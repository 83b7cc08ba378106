"""The offline search on mini-LLaVA: its data, a fast evaluator, strategies compared, its speed.

Knows nothing about searching: that is `offline_search`.
"""
