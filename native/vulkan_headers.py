"""Finds Vulkan headers that are new enough for llama.cpp's Vulkan backend; on Debian, downloads them if there are none.

    Vulkan_INCLUDE_DIR=$(python native/vulkan_headers.py FOLDER)

prints the folder of the headers: $VULKAN_SDK/include, /usr/include or /usr/local/include if they are new enough, else
those of Debian 13's libvulkan-dev, unpacked into FOLDER. Exit status 1, with the reason, where apt cannot download it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

NEEDED = "LayerSettingEXT"  # of VK_EXT_layer_settings, the newest part that llama.cpp uses without asking
SINCE = "1.3.272"
SUITE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def new_enough(include: Path) -> bool:
    structs = include / "vulkan" / "vulkan_structs.hpp"
    return structs.exists() and f"struct {NEEDED}" in structs.read_text(encoding="utf-8")


def version(include: Path) -> str:
    """Return the version of the headers in a folder, such as 1.3.239; "none" without any."""
    core = include / "vulkan" / "vulkan_core.h"
    text = core.read_text(encoding="utf-8") if core.exists() else ""
    patch = re.search(r"^#define VK_HEADER_VERSION (\d+)$", text, re.MULTILINE)
    rest = re.search(r"^#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(0, (\d+), (\d+),", text, re.MULTILINE)
    return f"{rest[1]}.{rest[2]}.{patch[1]}" if patch and rest else "none"


def download(folder: Path) -> Path:
    """Unpack Debian 13's libvulkan-dev, of which apt checks the signature, into `folder`; nothing is installed. Raises
    OSError without apt, CalledProcessError where it fails."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {SUITE} main\n", encoding="utf-8")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",  # else apt, as root, reads as a user that may not read this folder
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    for command in (["update"], ["download", "libvulkan-dev"]):
        subprocess.run([*apt, *command], cwd=folder, check=True, stdout=sys.stderr)
    package = max(folder.glob("libvulkan-dev_*.deb"), key=lambda path: path.stat().st_mtime)
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder / "usr" / "include"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    sdk = os.environ.get("VULKAN_SDK")
    installed = [Path(sdk) / "include"] if sdk else []
    installed += [Path("/usr/include"), Path("/usr/local/include")]
    for include in (*installed, folder / "usr" / "include"):
        if new_enough(include):
            print(include)
            return
    try:
        include = download(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        found = ", ".join(f"{version(include)} in {include}" for include in installed)
        raise SystemExit(
            f"llama.cpp's Vulkan backend needs the C++ Vulkan headers {SINCE} or newer; there are {found}. Debian 13's "
            f"libvulkan-dev has them, and LunarG's SDK (set VULKAN_SDK); apt did not download the former: {error}"
        ) from error
    print(include)


if __name__ == "__main__":
    main()
