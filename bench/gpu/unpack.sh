#!/bin/sh
# Put the parts of bench/gpu/pack.py together, and run the check with what they hold.
#
#     sh bench/gpu/unpack.sh PARTS OUT [options of python -m bench.gpu]
#
# The machine needs xz, python3 with numpy and PyYAML, and CUDA's libcudart and libcublas: those of a CUDA toolkit, or of
# the packages that PyTorch brings.
set -eu
parts=$1 out=$2
shift 2
folder=${TMPDIR:-/tmp}/notes-gpu
rm -rf "$folder"
mkdir -p "$folder/site"
cat "$parts"/part-* | xz -dc -T0 | tar -x -C "$folder"
for wheel in "$folder"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$folder/site"
done
cuda=$(python3 - <<'PYTHON'
import sys
from pathlib import Path
found = {str(one.parent) for folder in sys.path for one in Path(folder or ".").glob("nvidia/**/lib*.so.1[0-9]")}
print(":".join(sorted(found)))
PYTHON
)
export LD_LIBRARY_PATH="$folder/lib:$cuda:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
mkdir -p "$out" && out=$(cd "$out" && pwd)
cd "$folder/source"
ln -sfn "$folder/lib" notes_cli/lib # the binding
export NOTES_LIBRARY="$folder/lib" PYTHONPATH="$folder/source:$folder/site"
chmod +x "$folder/lib/llama-server"
exec python3 -m bench.gpu --out "$out" --smollm2 "$folder"/*.gguf --llama-server "$folder/lib/llama-server" "$@"
