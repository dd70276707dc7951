#!/bin/sh
# The main job from end to end, on the model that ships: what `make demo` runs, after setting up. It stops at the
# first command that fails.
set -e

show() {
    printf '\n$ notes'
    for word in "$@"; do
        case $word in
            *[!A-Za-z0-9_./,=-]*) printf ' "%s"' "$word" ;;
            *) printf ' %s' "$word" ;;
        esac
    done
    printf '\n'
    notes "$@" </dev/null
}

show compile skills/returns
show ask "May I return this?" --splice returns

printf '\n# The date corrected in place is ignored, an erratum is heard, and a recompute of the corrected text agrees with it:\n'
show ask "May I return this?" --splice returns --field "date=2026-07-01" --method field
show ask "May I return this?" --splice returns --erratum "date=2026-07-01"
show ask "May I return this?" --splice returns --field "date=2026-07-01" --method recompute

show ask "May I return this? Think first." --splice returns --erratum "date=2026-07-01"
show ask "May I return this?" -s "Be brief." --splice returns --erratum "date=2026-07-01" --explain
show verify returns --question "May I return this?" --choices accepted,refused --erratum "date=2026-07-01"
