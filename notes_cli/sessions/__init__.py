"""Conversations that stay on disk: their ledgers, rows and archives, and what turns and edits do to them."""
