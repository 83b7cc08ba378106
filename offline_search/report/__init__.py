"""Reports on a ledger: Markdown for a terminal, an HTML page for a browser, progress as it runs."""

from offline_search.report.html import as_html
from offline_search.report.markdown import as_markdown
from offline_search.report.search_report import SearchReport, read_report

__all__ = ["SearchReport", "as_html", "as_markdown", "read_report"]
