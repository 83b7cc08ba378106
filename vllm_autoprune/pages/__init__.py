"""Pages of reports, shared by all of them: tables, charts, and the HTML document."""
