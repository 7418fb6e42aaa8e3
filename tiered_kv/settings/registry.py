"""Finds what a setting names: the backend of a medium, the medium of a URL, the class of a policy.

A medium is an entry point of the group ``tiered_kv.backends``, or a class by its path, ``"package.module:Class"``. The
tiers ``gpu`` and ``cpu`` are the cache's own and have no backend. Nothing is imported before it is asked for.
"""

import inspect
from abc import ABCMeta
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from tiered_kv.catalog.policies.base import Policy
from tiered_kv.catalog.policies.make_policy import make_policy
from tiered_kv.media.backend import Backend, SlotBackend
from tiered_kv.settings.setting_errors import hint
from tiered_kv.settings.tier_settings import TierSettings
from tiered_kv.values.errors import ConfigurationError, in_words

AnyBackend = Backend | SlotBackend

ENTRY_POINTS: Final = "tiered_kv.backends"
OWN_MEDIA: Final = ("gpu", "cpu")
"""Tiers of memory that the cache makes itself, in the order in which they may stand."""
_SCHEMES: Final = {"file": "nvme", "rediss": "redis"} | dict.fromkeys(("s3a", "gs", "az", "abfs", "abfss"), "s3")
"""Further schemes of the media that come with this library: none of them is imported to know. ``file`` is a plain path;
other media that keep files are asked for by their own names."""
_OURS: Final = "tiered_kv_backends."
_MEANT: Final = (
    dict.fromkeys(("ram", "dram", "host", "memory-mapped", "cpu-memory"), "cpu")
    | dict.fromkeys(("hbm", "cuda", "vram"), "gpu")
    | dict.fromkeys(("disk", "ssd", "file", "local", "dir", "directory", "path"), "nvme")
    | dict.fromkeys(("fs", "nfs", "lustre", "cephfs", "gpfs", "posix", "sharedfs"), "shared_fs")
    | dict.fromkeys(("http", "https", "minio", "gcs", "azure", "object", "aws"), "s3")
    | {"valkey": "redis"}
)
"""What people call some media, for the hint in an error."""


def known_media() -> tuple[str, ...]:
    """Name every medium that can be written without a path: the cache's own, then those installed."""
    return *OWN_MEDIA, *sorted({entry.name for entry in entry_points(group=ENTRY_POINTS)} - set(OWN_MEDIA))


def check_named(medium: str) -> None:
    """Raise `ConfigurationError` for what is neither a medium's name, installed extra or not, nor a class's path."""
    if ":" in medium:
        resolve(medium)
    elif medium not in known_media():
        raise ConfigurationError(
            f"no medium is called {medium!r}{hint(medium, known_media(), _MEANT)}, or 'package.module:Class'"
        )


def resolve(medium: str) -> type[Backend] | type[SlotBackend]:
    """Find the class that drives ``medium``, importing its module.

    Args:
        medium: An entry point's name or ``"package.module:Class"``.

    Raises:
        ConfigurationError: No such medium, its module cannot be imported (the message names what to install), or it is
            no complete backend.
    """
    if ":" in medium:
        found = _import_path(medium, (Backend, SlotBackend))
    else:
        entry = _entry_point(medium)
        try:
            found = entry.load()
        except Exception as error:
            raise _import_failed(f"medium {medium!r}", error, entry) from error
    return _check_backend(medium, found)


def medium_for_scheme(scheme: str) -> str:
    """Say which medium takes URLs of this scheme: the one of that name, or whose class lists it in ``schemes``.

    A scheme has no underscores: ``shared-fs`` is ``shared_fs``. ``file`` is NVMe, which need not be imported to know.

    Raises:
        ConfigurationError: None does; the message names the media that could not be asked.
    """
    media = known_media()
    if (medium := scheme.replace("-", "_")) in media:
        return medium
    if scheme in _SCHEMES:
        return _SCHEMES[scheme]
    schemes, unasked = {*media, *_SCHEMES}, []
    for medium in media[len(OWN_MEDIA) :]:
        try:
            if _entry_point(medium).value.startswith(_OURS):
                continue
            declared = getattr(resolve(medium), "schemes", ())
        except ConfigurationError as error:  # a medium whose extra is missing must not hide the others
            unasked.append(str(error))
            continue
        if scheme in declared:
            return medium
        schemes.update(declared)
    reasons = "".join(f"; {reason}" for reason in unasked)
    raise ConfigurationError(f"no medium takes URLs of {scheme}://{hint(scheme, schemes, _MEANT)}{reasons}")


def make_backend(settings: TierSettings) -> AnyBackend:
    """Make the backend of a storage tier from its settings. It is not open yet.

    Raises:
        ConfigurationError: As `resolve`, or the settings are of another medium's model.
    """
    backend: Any = resolve(settings.medium)  # it takes its Settings by convention, and not by a base's __init__
    if not isinstance(settings, backend.Settings):
        raise ConfigurationError(
            f"medium {settings.medium!r} takes {_path(backend.Settings)}, got {_path(type(settings))}"
        )
    made: AnyBackend = backend(settings)
    return made


def resolve_policy(policy: str | type[Policy]) -> str | type[Policy]:
    """Return what `make_policy` takes: the name of a policy of ours, or a class, also at ``"package.module:Class"``.

    Raises:
        ConfigurationError: There is none, or it is no complete `Policy`.
    """
    if not isinstance(policy, str) or ":" not in policy:
        make_policy(policy, 1)  # which names there are is the catalog's to say
        return policy
    found = _import_path(policy, (Policy,))
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigurationError(f"{policy!r} is no subclass of tiered_kv.Policy")
    _check_complete(policy, found)
    return found


def _entry_point(medium: str) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == medium}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ConfigurationError(
            f"medium {medium!r} is offered by several packages: write the class you want, one of {', '.join(found)}"
        )
    check_named(medium)
    raise ConfigurationError(f"the tier {medium!r} is made by the cache itself and has no backend")


def _import_path(path: str, wanted: tuple[type, ...]) -> object:
    """Find the class at a path; where none is, the error names those there that derive from ``wanted``."""
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigurationError(f"{path!r} is no path of a class: write 'package.module:Class'")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise _import_failed(repr(path), error) from error
    try:
        return getattr(module, class_name)
    except AttributeError:
        every = [(name, value) for name, value in vars(module).items() if isinstance(value, type) and name[:1] != "_"]
        known = [name for name, value in every if issubclass(value, wanted) and value not in wanted]
        others = hint(class_name, known) if known else ", nor any other that would do"
        raise ConfigurationError(f"module {module_name} has no class {class_name!r}{others}") from None


def _import_failed(what: str, error: Exception, entry: EntryPoint | None = None) -> ConfigurationError:
    advice = ""
    if entry is not None and entry.dist is not None and isinstance(error, ImportError):
        extras = entry.dist.metadata.get_all("Provides-Extra") or []
        package = entry.dist.name + (f"[{entry.name}]" if entry.name in extras else "")
        advice = "" if package in str(error) else f": pip install '{package}'"
    elif isinstance(error, ModuleNotFoundError) and error.name is not None:
        advice = f": install what provides {error.name!r}, or correct the path"
    return ConfigurationError(f"{what} cannot be imported ({in_words(error)}){advice}")


def _check_backend(medium: str, found: object) -> type[Backend] | type[SlotBackend]:
    if not (isinstance(found, type) and issubclass(found, Backend | SlotBackend)):
        raise ConfigurationError(f"medium {medium!r} is {found!r}, no subclass of Backend or SlotBackend")
    _check_complete(medium, found)
    model = getattr(found, "Settings", None)
    if not (isinstance(model, type) and issubclass(model, TierSettings)):
        raise ConfigurationError(
            f"{_path(found)} needs a class attribute Settings, a subclass of {_path(TierSettings)}"
        )
    return found


def _check_complete(what: str, found: ABCMeta) -> None:
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigurationError(f"{what!r} does not implement {missing}")


def _path(of: type) -> str:
    return f"{of.__module__}:{of.__qualname__}"
