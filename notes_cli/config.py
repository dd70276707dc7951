"""Paths and settings: the user's folders, config.yaml, NOTES_* variables, files of the package, other model stores."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import notes_cli
from notes_cli.errors import NotesError

APP = "notes"
SHIPPED_MODEL = "notes-tiny-q8_0.gguf"
SHIPPED_TINY = "notes-tiny"  # its name
SHIPPED_EYE = "notes-eye"  # the small vision model
EYE_FILES = ("notes-eye-q8_0.gguf", "notes-eye-mmproj-f16.gguf")  # the model and its projector
MOST = 2**31 - 1  # greatest value of numbers
MOST_THREADS = 512
MEND = "Mend or remove the file"
SETTING = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Settings of a model under `defaults`, and patterns of their values.
DEFAULTS = {"method": ".+", "wording": ".+", "seam": "[0-9]{1,4}", "place": "early|late", "carry": "true|false"}


class Paths(NamedTuple):
    """Folders and files of one user, created on first write."""

    library: Path  # compiled segments: derivable, so in the cache folder
    sessions: Path  # conversations
    config: Path  # config.yaml
    models: Path  # downloaded models, and cached facts of others, such as digests
    servers: Path  # running servers, a small file each

    @classmethod
    def under(cls, home: Path) -> Paths:
        """Return paths in one folder, as for NOTES_HOME."""
        names = ("library", "sessions", "config.yaml", "models", "servers")
        return cls(*(home / name for name in names))


# keyword of `notes.open` -> variable, least and greatest value
_NUMBERS = {
    "n_ctx": ("NOTES_CTX_SIZE", 0, MOST),
    "n_threads": ("NOTES_THREADS", 1, MOST_THREADS),
    "n_ubatch": ("NOTES_UBATCH_SIZE", 1, MOST),
    "n_gpu_layers": ("NOTES_GPU_LAYERS", -1, MOST),
}
_WORDS = {"flash_attention": "NOTES_FLASH_ATTN", "type_k": "NOTES_CACHE_TYPE_K", "type_v": "NOTES_CACHE_TYPE_V"}


def from_variables() -> dict[str, Any]:
    """Return the options that NOTES_* variables set: fields of ContextOptions, `n_gpu_layers`, `rpc` and `projector`.
    Raises NotesError for an invalid number."""
    options: dict[str, Any] = {}
    for name, (variable, least, most) in _NUMBERS.items():
        if word := os.environ.get(variable, "").strip():
            try:
                number = int(word)
            except ValueError:
                number = least - 1
            if not least <= number <= most:
                raise NotesError(f"{variable} is {word!r}: it must be a number from {least} to {most:,}")
            options[name] = number
    options |= {name: word for name, variable in _WORDS.items() if (word := os.environ.get(variable, "").strip())}
    if word := os.environ.get("NOTES_RPC", "").strip():
        options["rpc"] = [server.strip() for server in word.split(",") if server.strip()]
    if word := os.environ.get("NOTES_MMPROJ", "").strip():
        options["projector"] = word
    return options


def paths() -> Paths:
    """Return the folders under NOTES_HOME if it is set, else the system's cache, state and config folders."""
    home = os.environ.get("NOTES_HOME")
    if home:
        return Paths.under(Path(home).expanduser().absolute())
    cache, state, settings = _folders()
    return Paths(
        library=cache / "library",
        sessions=state / "sessions",
        config=settings / "config.yaml",
        models=cache / "models",
        servers=state / "servers",
    )


def _folders() -> tuple[Path, Path, Path]:
    """Return the system's folders for this program's caches, state and settings."""
    home = os.environ.get("HOME", "")
    if sys.platform == "linux" and os.path.isabs(home) and "ANDROID_ROOT" not in os.environ:
        # XDG base directories as in platformdirs, which takes nearly as long to import as click
        def folder(kind: str, default: str) -> Path:
            variable = os.environ.get(f"XDG_{kind}_HOME", "")
            return Path(variable if os.path.isabs(variable) else f"{home.rstrip('/')}/{default}", APP)

        return folder("CACHE", ".cache"), folder("STATE", ".local/state"), folder("CONFIG", ".config")
    import platformdirs

    return (
        platformdirs.user_cache_path(APP, appauthor=False),
        platformdirs.user_state_path(APP, appauthor=False),
        platformdirs.user_config_path(APP, appauthor=False),
    )


def load_config(path: Path | None = None) -> dict[str, Any]:
    """Return the settings of config.yaml, {} without one; scalars are strings, as on the command line. Raises
    NotesError for any other content than a mapping of names."""
    path = path or paths().config
    try:
        os.stat(path)
    except FileNotFoundError:
        return {}
    except OSError:
        pass  # read_yaml reports it
    from notes_cli.documents import read_yaml  # importing PyYAML takes 14 ms

    try:
        settings = read_yaml(path)
    except NotesError as error:
        raise NotesError(error.what, MEND) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not all(SETTING.fullmatch(key) for key in settings):
        raise NotesError(f"{path} must hold `setting: value` lines", MEND)
    return settings


def by_flag(settings: Mapping[Any, Any], path: Path | str) -> dict[str, Any]:
    """Return settings named like flags: ctx_size becomes ctx-size. Raises NotesError for a file that has both."""
    keys: dict[str, Any] = {}
    for key in settings:
        other = keys.setdefault(str(key).replace("_", "-"), key)
        if other != key:
            raise NotesError(f"{path} has both {other} and {key}, which are one setting", "Leave one out")
    return {flag: settings[key] for flag, key in keys.items()}


def _section(settings: Mapping[str, Any], name: str, form: str) -> dict[str, str]:
    """Return a section of config.yaml, {} without it. Raises NotesError unless it has texts as values: the `form`."""
    section = settings.get(name, {})
    if not isinstance(section, dict) or not all(isinstance(value, str) and value for value in section.values()):
        raise NotesError(f"{name} in config.yaml must hold `{form}` lines", MEND)
    return section


def aliases(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's names for models: alias -> file or other name. Raises NotesError for other values."""
    return _section(settings, "models", "name: file")


def named_model(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the configured default model and its source: NOTES_MODEL, else `model` in these settings. Raises
    NotesError for another value than a string."""
    if word := os.environ.get("NOTES_MODEL"):
        return word, "NOTES_MODEL"
    model = settings.get("model")
    if model is not None and not (isinstance(model, str) and model):
        raise NotesError("model in config.yaml must be one value", "Name a file or a model there")
    return (model, "config.yaml") if model else None


def model_defaults(settings: Mapping[str, Any], model: str) -> dict[str, str]:
    """Return what `defaults` of config.yaml has for a model: of `method`, `wording`, `seam`, `place` and `carry` what
    is there, as text. Raises NotesError for other settings, and for values that these cannot have."""
    models = settings.get("defaults", {})
    chosen = models.get(model, {}) if isinstance(models, dict) else None
    if not isinstance(chosen, dict) or not all(isinstance(value, str) for value in chosen.values()):
        raise NotesError("defaults in config.yaml must hold a model's name, and `setting: value` lines below it", MEND)
    for name, value in chosen.items():
        if name not in DEFAULTS:
            raise NotesError(f"{model} in config.yaml has {name!r}, there is {', '.join(DEFAULTS)}", MEND)
        if not re.fullmatch(DEFAULTS[name], value):
            raise NotesError(f"{name} of {model} in config.yaml is {value!r}, which it cannot be", MEND)
    return chosen


def with_model_defaults(text: str, model: str, chosen: Mapping[str, str]) -> str:
    """Return the text of config.yaml with these defaults of a model in place of those that it had. All other lines stay
    as they are."""
    key = f"  {json.dumps(model, ensure_ascii=False)}:"
    shown = {
        name: value if re.fullmatch(r"[\w+]+", value) else json.dumps(value, ensure_ascii=False)
        for name, value in chosen.items()
    }
    entry = "".join(f"{line}\n" for line in (key, *(f"    {name}: {value}" for name, value in shown.items())))
    text += "\n" if text and not text.endswith("\n") else ""
    for place in (rf"(?m)^{re.escape(key)} *\n(    .*\n)*", r"(?m)^defaults: *(#.*)?\n"):
        if match := re.search(place, text):
            kept = "" if match[0].startswith(key) else match[0]
            return text[: match.start()] + kept + entry + text[match.end() :]
    return f"{text}defaults:\n{entry}"


def cache(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the library's settings: `max_size`, as written. Raises NotesError for other keys or values."""
    options = {key.replace("-", "_"): value for key, value in _section(settings, "cache", "max_size: 20GB").items()}
    if unknown := sorted(options.keys() - {"max_size"}):
        raise NotesError(f"there is no setting {unknown[0]!r} under cache in config.yaml", "There is max_size")
    return options


def skill_folders(start: Path | None = None) -> list[list[Path]]:
    """Return the folders of Agent Skills, nearest first: from the working folder up to the root of its repository,
    then the user's. Folders at the same level share a list; they may not exist."""
    here = Path(os.path.abspath(start or Path.cwd()))
    above = [here, *here.parents]
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), 0)
    places = dict.fromkeys([*above[: root + 1], _home()])
    return [[place / client / "skills" for client in (".agents", ".claude")] for place in places]


def model_stores() -> list[tuple[str, Path]]:
    """Return (program, folder) pairs of other programs' model folders, which may not exist."""
    stores = [("Ollama", folder) for folder in _ollama_folders()]
    cache = _variable("XDG_CACHE_HOME") or _home() / ".cache"
    llama_cache = _variable("LLAMA_CACHE")
    hub = _variable("HF_HUB_CACHE") or _variable("HUGGINGFACE_HUB_CACHE")
    if hub is None:
        hub = (_variable("HF_HOME") or cache / "huggingface") / "hub"
    return [*stores, *(("Hugging Face", folder) for folder in dict.fromkeys((llama_cache or hub, hub)))]


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # a missing folder if the system knows no home


def _variable(name: str) -> Path | None:
    value = os.environ.get(name, "").strip()
    return Path(os.path.expanduser(value)) if value else None


def _ollama_folders() -> list[Path]:
    if folder := _variable("OLLAMA_MODELS"):
        return [folder]
    folder = _home() / ".ollama" / "models"
    service = Path("/usr/share/ollama/.ollama/models")
    return [folder, service] if sys.platform == "linux" else [folder]


def resource(name: str) -> Path:
    """Return the package's folder `name` (prompts, skills, models); a source checkout has prompts/ and skills/ next to
    the package. Raises NotesError if it is missing."""
    inside = [Path(entry) for entry in notes_cli.__path__]
    for folder in [*inside, *(entry.parent for entry in inside)]:
        if (folder / name).is_dir():
            return folder / name
    raise NotesError(f"the folder {name}/ is missing from this installation of notes", "Install it again")


def sample_skills() -> list[Path]:
    """Return the sample skills, folders or text files, sorted by name."""
    paths = resource("skills").iterdir()
    return sorted(path for path in paths if (path / "SKILL.md").is_file() or path.suffix == ".txt")


def sample_names() -> list[str]:
    """Return the names of the sample skills."""
    return [path.stem for path in sample_skills()]


def sample_skill(name: str) -> Path | None:
    """Return the sample skill of that name, None if there is none."""
    return next((path for path in sample_skills() if path.stem == name), None)


def home_folder() -> Path:
    """Return the user's home folder. Raises NotesError if HOME is not an absolute path."""
    home = os.environ.get("HOME")
    if home is not None and os.name == "posix" and not os.path.isabs(home):
        raise NotesError(f"HOME is {home!r}, which is no folder to write to", "Set it to yours")
    return Path.home()


def shipped_eye() -> tuple[Path, Path]:
    """Return the files of the shipped vision model and its projector. Raises NotesError if one is missing."""
    model, projector = map(_shipped, EYE_FILES)
    return model, projector


def shipped_model() -> Path:
    """Return the file of the shipped model. Raises NotesError if it is missing."""
    return _shipped(SHIPPED_MODEL)


def _shipped(name: str) -> Path:
    path = resource("models") / name
    if not path.is_file():
        raise NotesError(f"{path} is missing", "Install notes again, or name another model")
    return path
