"""Persistent record of a search: record types, the file that holds them, access by key."""

from offline_search.ledger.ledger import Ledger, read_ledger

__all__ = ["Ledger", "read_ledger"]
