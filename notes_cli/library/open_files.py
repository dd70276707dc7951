"""How many files this process may have open."""

from __future__ import annotations

from contextlib import suppress


def raise_file_limit() -> None:
    """Let it have as many as the system allows: connections, skills that are in use, locks."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS takes less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
