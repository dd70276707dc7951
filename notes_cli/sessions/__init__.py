"""Sessions: conversations kept on disk, with their ledgers, K/V files, archives, turns and edits."""
