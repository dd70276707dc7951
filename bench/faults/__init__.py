"""The fault campaign: hostile files, kills, full disks and other faults, by the thousands. `make faults` runs it."""
