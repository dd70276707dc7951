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

days="How many days does a customer have to return an item?"

show compile skills/store-handbook
show ask "$days" --splice store-handbook --gain

printf '\n# One value changes. By default its own KV entries are computed again and a correction precedes the question;\n'
printf '# then the value in place alone, and a full prefill of the corrected text:\n'
show ask "$days" --splice store-handbook --erratum "Return window=14 days" --gain
show ask "$days" --splice store-handbook --field "Return window=14 days" --method field --gain
show ask "$days" --splice store-handbook --field "Return window=14 days" --method recompute

printf '\n# Anywhere in a prompt: behind another text the cached keys are rotated to their new position.\n'
show ask "Which carrier delivers the parcels?" -s "You work for Lantern & Oak. Be brief." --splice store-handbook --gain
show ask "$days" -s "Be brief." --splice store-handbook --erratum "Return window=14 days" --explain
show ls
