#!/bin/sh
# The main job from end to end on a real model: what `make demo` runs, after setting up. It stops at the first command
# that fails.
set -e

show() {
    printf '\n$ notes'
    for word in "$@"; do
        case $word in
            --gain) ;;
            *[!A-Za-z0-9_./,=-]*) printf ' "%s"' "$word" ;;
            *) printf ' %s' "$word" ;;
        esac
    done
    printf '\n'
    notes "$@" </dev/null
}

carrier="Which carrier delivers the parcels?"

show compile skills/store-handbook
show ask "$carrier" --splice store-handbook --gain

printf '\n# One value changes. By default its KV entries are computed again, and a sentence after the text states it:\n'
show ask "$carrier" --splice store-handbook --erratum "Carrier=Kestrel Freight" --gain

printf '\n# The same with the value in place alone, and with a full prefill of the corrected text:\n'
show ask "$carrier" --splice store-handbook --field "Carrier=Kestrel Freight" --method field --gain
show ask "$carrier" --splice store-handbook --field "Carrier=Kestrel Freight" --method recompute

printf '\n# Behind another text the cached keys are rotated to their new position:\n'
show ask "$carrier" -s "You work for Lantern & Oak." --splice store-handbook --gain
show ask "$carrier" -s "You work for Lantern & Oak." --splice store-handbook --erratum "Carrier=Kestrel Freight" --explain
show ls
