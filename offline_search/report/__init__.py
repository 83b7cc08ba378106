"""What a ledger tells: as Markdown for a terminal or a commit, as one HTML page for a browser.

Knows nothing about running a search.
"""

from offline_search.report.html import as_html
from offline_search.report.markdown import as_markdown
from offline_search.report.reading import Reading, reading

__all__ = ["Reading", "as_html", "as_markdown", "reading"]
