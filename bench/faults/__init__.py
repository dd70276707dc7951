"""The fault campaign: hostile files, kills, full disks and other faults, by the thousands.

    make faults           # all of it, an hour; writes the table in docs/reliability.md
    make faults-slice     # two minutes, which CI runs

One module a kind of fault (frame.py says what such a module holds); this is the list of them, in the order in which
they run.
"""

KINDS = (
    *("containers", "splices", "forgeries", "ledgers", "folders", "archives", "profiles", "models", "documents"),
    *("templates", "kills", "interrupts", "disk", "permissions", "concurrency"),
)
