"""Where things are: folders and settings of this user, what comes with the package, where others keep models.

It knows neither commands nor models. Which flag wins over which setting is decided by the command line.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import notes_cli
from notes_cli.errors import Help, NotesError

APP = "notes"
SHIPPED_MODEL = "notes-tiny-q8_0.gguf"
SHIPPED_TINY = "notes-tiny"  # its name
SHIPPED_EYE = "notes-eye"  # the name of the small model that sees
EYE_FILES = ("notes-eye-q8_0.gguf", "notes-eye-mmproj-f16.gguf")  # it, and its projector
MOST = 2**31 - 1  # of other numbers
MOST_THREADS = 512
MEND = "Mend or remove the file"
SETTING = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Paths:
    """The places of one user. Nothing is created until something is written there."""

    library: Path  # compiled segments: derivable, so in the cache folder
    sessions: Path  # saved conversations: not derivable
    config: Path  # config.yaml
    models: Path  # what was downloaded, and what is remembered of models: their digests
    profiles: Path  # what was measured of models: minutes of work
    servers: Path  # those that run, a small file each

    @classmethod
    def under(cls, home: Path) -> Paths:
        """Everything in one folder, as NOTES_HOME asks."""
        own = (home / name for name in ("library", "sessions", "config.yaml", "models", "profiles", "servers"))
        return cls(*own)


# Variables of numbers, by the keyword of `notes.open` that each is for: with the least and the most.
_NUMBERS = {
    "n_ctx": ("NOTES_CTX_SIZE", 0, MOST),
    "n_threads": ("NOTES_THREADS", 1, MOST_THREADS),
    "n_batch": ("NOTES_BATCH_SIZE", 1, MOST),
    "n_ubatch": ("NOTES_UBATCH_SIZE", 1, MOST),
    "n_gpu_layers": ("NOTES_GPU_LAYERS", -1, MOST),
}
_WORDS = {"flash_attention": "NOTES_FLASH_ATTN", "type_k": "NOTES_CACHE_TYPE_K", "type_v": "NOTES_CACHE_TYPE_V"}


def from_variables() -> dict[str, Any]:
    """The context options that NOTES_* variables set, by the fields of ContextOptions, and `n_gpu_layers`, `rpc` and
    `projector`; what is not set is left out. Raise NotesError for a number that is none."""
    found: dict[str, Any] = {}
    for name, (variable, least, most) in _NUMBERS.items():
        if word := os.environ.get(variable, "").strip():
            try:
                number = int(word)
            except ValueError:
                number = least - 1
            if not least <= number <= most:
                raise NotesError(f"{variable} is {word!r}: it must be a number from {least} to {most:,}")
            found[name] = number
    found |= {name: word for name, variable in _WORDS.items() if (word := os.environ.get(variable, "").strip())}
    if word := os.environ.get("NOTES_RPC", "").strip():
        found["rpc"] = [server.strip() for server in word.split(",") if server.strip()]
    if word := os.environ.get("NOTES_MMPROJ", "").strip():
        found["projector"] = word
    return found


def paths() -> Paths:
    """NOTES_HOME where it is set, else the cache, state and config folders of this system."""
    home = os.environ.get("NOTES_HOME")
    if home:
        return Paths.under(Path(home).expanduser().absolute())
    cache, state, settings = _folders()
    return Paths(
        library=cache / "library",
        sessions=state / "sessions",
        config=settings / "config.yaml",
        models=cache / "models",
        profiles=state / "profiles",
        servers=state / "servers",
    )


def _folders() -> tuple[Path, Path, Path]:
    """Where this system keeps a program's caches, state and settings."""
    home = os.environ.get("HOME", "")
    if sys.platform == "linux" and os.path.isabs(home) and "ANDROID_ROOT" not in os.environ:
        # The XDG base directory specification, as platformdirs follows it, which takes nearly as long to load as click.
        def folder(kind: str, usual: str) -> Path:
            said = os.environ.get(f"XDG_{kind}_HOME", "")
            return Path(said if os.path.isabs(said) else f"{home.rstrip('/')}/{usual}", APP)

        return folder("CACHE", ".cache"), folder("STATE", ".local/state"), folder("CONFIG", ".config")
    import platformdirs

    return (
        platformdirs.user_cache_path(APP, appauthor=False),
        platformdirs.user_state_path(APP, appauthor=False),
        platformdirs.user_config_path(APP, appauthor=False),
    )


def load_config(path: Path | None = None) -> dict[str, Any]:
    """The settings of config.yaml, {} without one: every value as it is written, as on the command line.

    Raise NotesError if it cannot be read as a mapping of names.
    """
    path = path or paths().config
    try:
        os.stat(path)
    except FileNotFoundError:
        return {}
    except OSError:
        pass  # read_yaml tells of it
    from notes_cli.documents import read_yaml  # PyYAML takes 14 ms, which few need

    try:
        settings = read_yaml(path)
    except NotesError as error:
        raise NotesError(error.what, MEND) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(SETTING.fullmatch(key) for key in settings):
        raise NotesError(f"{path} must hold `setting: value` lines", MEND)
    return settings


def aliases(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the user calls models, in these settings: a file or another name for each. Raise NotesError."""
    found = settings.get("models", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) and value for value in found.values()):
        raise NotesError("models in config.yaml must hold `name: file` lines", MEND)
    return found


def named_model(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The model to use where none is named: NOTES_MODEL, else `model` in these settings; and where that is from. Raise
    NotesError."""
    if word := os.environ.get("NOTES_MODEL"):
        return word, "NOTES_MODEL"
    found = settings.get("model")
    if found is not None and not (isinstance(found, str) and found):
        raise NotesError("model in config.yaml must be one value", "Name a file or a model there")
    return (found, "config.yaml") if found else None


def cache(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the user says of the library as a whole, in these settings: `max_size`, as written. Raise NotesError."""
    found = settings.get("cache", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) and value for value in found.values()):
        raise NotesError("cache in config.yaml must hold `max_size: SIZE`", "Write it like max_size: 20GB")
    found = {key.replace("-", "_"): value for key, value in found.items()}
    unknown = sorted(found.keys() - {"max_size"})
    if unknown:
        raise NotesError(f"there is no setting {unknown[0]!r} under cache in config.yaml", "There is max_size")
    return found


def skill_folders(start: Path | None = None) -> list[list[Path]]:
    """The folders of Agent Skills, not all of which need be there: those of the project, from the working folder up to
    the root of its repository, and the user's. Nearer ones first, in a list those that are equally near."""
    here = Path(os.path.abspath(start or Path.cwd()))
    above = [here, *here.parents]
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), 0)
    places = dict.fromkeys([*above[: root + 1], _home()])
    return [[place / client / "skills" for client in (".agents", ".claude")] for place in places]


def model_stores() -> list[tuple[str, Path]]:
    """The folders in which other programs keep models, each after the program's name. Not all need be there."""
    stores = [("Ollama", folder) for folder in _ollama()]
    cache = _variable("XDG_CACHE_HOME") or _home() / ".cache"
    named = _variable("LLAMA_CACHE")
    hub = _variable("HF_HUB_CACHE") or _variable("HUGGINGFACE_HUB_CACHE")
    if hub is None:
        hub = (_variable("HF_HOME") or cache / "huggingface") / "hub"
    stores += [("Hugging Face", folder) for folder in dict.fromkeys((named or hub, hub))]
    systems = {"darwin": _home() / "Library" / "Caches", "win32": _variable("LOCALAPPDATA")}
    stores.append(("llama.cpp", named or (systems.get(sys.platform) or cache) / "llama.cpp"))
    return [*stores, *(("LM Studio", folder) for folder in _lm_studio())]


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # which is not known to every system: then nothing is there


def _variable(name: str) -> Path | None:
    value = os.environ.get(name, "").strip()
    return Path(os.path.expanduser(value)) if value else None


def _ollama() -> list[Path]:
    named = _variable("OLLAMA_MODELS")
    if named:
        return [named]
    own = _home() / ".ollama" / "models"
    return [own, Path("/usr/share/ollama/.ollama/models")] if sys.platform == "linux" else [own]  # the service's


def _lm_studio() -> list[Path]:
    """Its home may have been moved, and the models out of it."""
    home, older = _home() / ".lmstudio", _home() / ".cache" / "lm-studio"
    pointer = _short_text(_home() / ".lmstudio-home-pointer").strip()
    if pointer:
        home = Path(pointer)
    elif older.is_dir():
        home = older
    folders = [home / "models"]
    try:
        moved = json.loads(_short_text(home / "settings.json"))["downloadsFolder"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return folders
    return [*folders, Path(moved)] if isinstance(moved, str) and Path(moved) not in folders else folders


def _short_text(path: Path) -> str:
    """What is in a small file of another program, "" if it cannot be read."""
    try:
        if path.is_file() and path.stat().st_size < 1 << 20:
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    return ""


def resource(name: str) -> Path:
    """The folder `name` (prompts, skills, models) that comes with the package.

    Installed, it is inside the package. In a source checkout prompts/ and skills/ are beside it.
    """
    inside = [Path(entry) for entry in notes_cli.__path__]
    for folder in [*inside, *(entry.parent for entry in inside)]:
        if (folder / name).is_dir():
            return folder / name
    raise NotesError(f"the folder {name}/ is missing from this installation of notes", "Install it again")


def sample_skills() -> list[Path]:
    """The skills that come with notes, each a folder or a text file, by name."""
    found = resource("skills").iterdir()
    return sorted(path for path in found if (path / "SKILL.md").is_file() or path.suffix == ".txt")


def sample_names() -> list[str]:
    """The names of these skills."""
    return [path.stem for path in sample_skills()]


def sample_skill(name: str) -> Path | None:
    """The skill of that name that comes with notes."""
    return next((path for path in sample_skills() if path.stem == name), None)


def home_folder() -> Path:
    """Where this user's own files are. Raise NotesError where HOME is set to what is none."""
    home = os.environ.get("HOME")
    if home is not None and os.name == "posix" and not os.path.isabs(home):
        raise NotesError(f"HOME is {home!r}, which is no folder to write to", "Set it to yours")
    return Path.home()


def shipped_eye() -> tuple[Path, Path]:
    """The small model that sees, and its projector. Raise NotesError if they are not there."""
    model, projector = (resource("models") / name for name in EYE_FILES)
    for path in (model, projector):
        if not path.is_file():
            raise NotesError(f"{path} is missing", Help.REINSTALL_OR_NAME_MODEL())
    return model, projector


def shipped_model() -> Path:
    """The small model that comes with notes. Raise NotesError if it is not there."""
    model = resource("models") / SHIPPED_MODEL
    if not model.is_file():
        raise NotesError(f"{model} is missing", Help.REINSTALL_OR_NAME_MODEL())
    return model
