"""What every tier can be told, by fields or by a URL: each medium's settings are a class that derives from one here.

`HostSettings` say how a server of one cache for a host listens, and what a client of it may have. A cache of one's own
reads none of them.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import ByteSize, Field, field_validator, model_validator

from tiered_kv.settings.encryption import Encryption
from tiered_kv.settings.setting_errors import Checked, check_size
from tiered_kv.values.errors import ConfigurationError

AtLeastOne = Annotated[int, Field(ge=1)]

if TYPE_CHECKING:  # what a field is given is more than what it has: a descriptor tells type checkers both

    class Size:
        """Bytes: given as an int, or as text such as ``"32GiB"`` or ``"1.5TB"``."""

        def __get__(self, of: object, owner: type | None = None) -> ByteSize: ...

        def __set__(self, of: object, value: int | str) -> None: ...

    class SizeOrNone:
        """Bytes, given as for `Size`, or None."""

        def __get__(self, of: object, owner: type | None = None) -> ByteSize | None: ...

        def __set__(self, of: object, value: int | str | None) -> None: ...
else:
    Size, SizeOrNone = ByteSize, ByteSize | None
DEFAULT_POLICY: Final = "lhd"
"""Of eviction, in tiers that the cache owns."""
WritePolicy = Literal["through", "back"]
_WITH_HOSTS: Final = re.compile(r"([^/?#]*://)([^/?#]*)(.*)", re.DOTALL)


def default_size(num_bytes: int | None) -> Any:  # noqa: ANN401 - the field's type is the descriptor's
    """Return the default of a field that is a `Size`: so many bytes, or None where it may have that."""
    return None if num_bytes is None else ByteSize(num_bytes)


class HostSettings(Checked):
    """``[host]`` in a TOML file, or ``TIERED_KV_HOST__*`` in the environment: for ``tiered-kv serve``."""

    socket: Path = Path("/run/tiered-kv/kv.sock")
    """Where clients attach. Its directory must be there; whoever may write the socket may attach."""
    mode: str = "660"
    """Permissions of the socket, in octal digits."""
    group: str = ""
    """The group of the socket, by name or number; that of the server's process if left out."""
    clients: AtLeastOne = 256
    """Clients at once; one more is refused."""
    loads_per_client: AtLeastOne = 1024
    """Loads that one client has under way; one more answers 0 blocks."""
    stores_per_client: AtLeastOne = 1024
    """Stores that one client has under way; one more is dropped, as ``"too many stores"``."""
    bytes_per_client: SizeOrNone = default_size(None)
    """Bytes of slots for what one client has under way: loads, stores, and what leases, pins and jobs hold. A load or
    store that goes beyond is answered in the same way, unless it is the only one; a lease or pin holds the prefix that
    fits, and a job ends with nothing. Left out, their number alone is bounded."""
    leases_per_client: AtLeastOne = 256
    """Leases that one client holds; one more holds nothing."""
    questions_per_client: AtLeastOne = 1024
    """Lookups and other calls that one client waits for; one more is answered as if nothing were there."""
    jobs_per_client: AtLeastOne = 4096
    """Loads and stores that a client's planner has under way; one more ends with nothing."""
    read_only_uids: tuple[int, ...] = ()
    """Users whose clients load, and change nothing."""
    weights: dict[str, float] = Field(default_factory=dict)
    """By a model's name, how much of every owned tier it gets, beside the others; 1 for those not named."""
    fixed: dict[str, dict[str, ByteSize]] = Field(default_factory=dict)
    """By a model's name and a tier's, how many bytes of that are its own, whatever others there are. Weights divide the
    rest among the other models."""
    models: AtLeastOne = 64
    """Models at once, with those that an earlier server has left on a disk; one more is refused."""
    lend_after_s: Annotated[float, Field(gt=0)] = 60.0
    """What a model does not use that has stored nothing for so long is lent to those whose share is full. Once it
    stores again it has it back, and they evict."""
    reclaim_after_s: Annotated[float, Field(gt=0)] = 24 * 3600.0
    """A model that no client has used for so long loses its blocks, and its share goes to the others."""

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, mode: str) -> str:
        try:
            number = int(mode, 8)
        except ValueError:
            number = -1
        if not 0 <= number <= 0o777:
            raise ValueError(f"{mode!r} are no permissions: write three octal digits, e.g. '660'")
        return mode

    @field_validator("fixed", mode="before")
    @classmethod
    def _check_fixed(cls, fixed: object) -> object:
        of_models = fixed.values() if isinstance(fixed, Mapping) else ()
        for given in [size for of in of_models if isinstance(of, Mapping) for size in of.values()]:
            check_size(given)
        return fixed

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, weight in weights.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"weights are positive numbers; not those of {', '.join(wrong)}")
        return weights


class TierSettings(Checked):
    """Base of the settings of every tier. ``medium`` chooses the class; the rest is the medium's."""

    medium: str
    name: str = ""
    """What results, logs and metrics call the tier; the medium's name if left out."""
    write: WritePolicy = "through"
    """When this tier gets what is stored: at once, or later (``"back"``), as `CacheLimits.low_water` and
    `CacheLimits.clean_after_s` say."""

    @classmethod
    def of(cls, given: object) -> Self:
        """Return settings of this medium as they are, or made of a dict of fields or a URL.

        Raises:
            ConfigurationError: It is none of these, of another medium, or a field is unknown or wrong.
        """
        if isinstance(given, cls):
            return given
        fields = cls.from_url(given) if isinstance(given, str) else given
        if not isinstance(fields, Mapping):
            raise ConfigurationError(
                f"settings are {cls.__qualname__}, a dict of its fields or a URL, not a {type(given).__name__}"
            )
        mine = cls.model_fields["medium"].default
        if fields.get("medium", mine) != mine and ":" not in f"{fields['medium']}{mine}":
            raise ConfigurationError(f"these are settings of medium {fields['medium']!r:.80}, not of {mine!r}")
        return cls.model_validate(dict(fields))

    @classmethod
    def from_url(cls, url: str) -> dict[str, Any]:
        """Return the fields that a URL has: those of its query, and for the rest ``url`` or ``path``, which it has.

        A model that reads its URLs in a way of its own overrides this.

        Raises:
            ConfigurationError: It is no URL, or has what is no field.
        """
        parts, pairs = split_tier_url(url)
        values: dict[str, Any] = dict(pairs)
        if len(values) != len(pairs) or "medium" in values:
            twice = next((name for name in values if [each for each, _ in pairs].count(name) > 1), "")
            said = repr(twice) if twice in cls.model_fields else "a field"  # else it may be a part of a password
            what = f"{said} twice" if twice else "its medium, which the scheme says"
            raise ConfigurationError(f"a {parts.scheme} URL names {what}")
        if "@" in parts.query and not values.keys() <= cls.model_fields.keys():
            raise ConfigurationError("an '@' comes after a '?' in a tier's URL: write '?' as %3F in a password")
        address = next((name for name in ("url", "path") if name in cls.model_fields), "")
        if address in values:
            raise ConfigurationError(f"a {parts.scheme} URL names {address!r}, which its address says")
        if address == "url":
            values["url"] = f"{parts.scheme}://{parts.netloc}{parts.path}"  # `geturl` drops slashes where no host is
        elif address == "path":
            values["path"] = _path_in(parts)
        elif parts.netloc or parts.path.strip("/"):
            raise ConfigurationError(
                f"fields come after a '?' in a {parts.scheme} URL: write {parts.scheme}://?capacity=32GiB"
            )
        return values


def paths_of(tier: TierSettings) -> tuple[Path, ...]:
    """Return the directories that a tier keeps its blocks in; none if its medium has no ``path``."""
    given = getattr(tier, "path", ())
    paths = given if isinstance(given, tuple) else (given,)
    return paths if all(isinstance(each, Path) for each in paths) else ()


def real_path(path: Path) -> Path:
    """Return where a path leads, through links; a link that leads back to itself is left as it is."""
    return Path(os.path.realpath(path))  # `Path.resolve` raises there before Python 3.13


class BookedTierSettings(TierSettings):
    """Base of the settings of a tier of which the cache keeps the books: it says what goes, and when."""

    policy: str = DEFAULT_POLICY
    """Which blocks go first when there is no room: ``"lhd"``, ``"lru"``, ``"mq"``, ``"arc"``, or a class,
    ``"package.module:Class"``."""
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """For how long a block is served after it came to this tier; see the guide on write policies for how exactly."""


class StorageTierSettings(TierSettings):
    """Base of the settings of a storage tier: what is below memory, and may be slow, full, hung or gone."""

    timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """How long a load or store waits for one call of this tier before it goes on without it."""
    shed_stores_after_s: float = Field(default=5.0, gt=0)
    """Stores go on without this tier while its writes take longer than this on average. Loads are not affected."""
    required: bool = True
    """Whether the cache cannot be opened without it. If not, it is bypassed, and tried again in the background."""
    admit_after: int = Field(default=1, ge=1, le=255)
    """A block is written to this tier at its n-th use, stores and loads counted, as well as can be told in little
    memory."""
    encryption: Encryption | None = None
    """How records are encrypted, or signed, and names hidden, with keys; or the path of a file of keys."""
    read_only: bool = False
    """Whether this cache only reads what others have stored there. It writes and deletes nothing, and needs no right
    to: what is evicted here stays there, and is not found here any more. For shared media."""

    read_bandwidth: SizeOrNone = Field(default=default_size(None), gt=0)
    """Bytes a second that loads and prefetches may read here; no limit if left out."""
    write_bandwidth: SizeOrNone = Field(default=default_size(None), gt=0)
    """Bytes a second that may be written here; no limit if left out."""
    max_write_bytes_per_day: SizeOrNone = Field(default=default_size(None), gt=0)
    """Bytes that may be written here in a day, for a disk that wears out or a store that bills them; no limit if left
    out. What would be more is dropped, and not waited for. An hour's share, or one call of a window at
    most, may be written at once, and after a restart."""

    @model_validator(mode="before")
    @classmethod
    def _check_salt_quota(cls, given: Any) -> Any:  # noqa: ANN401 - as pydantic has it
        if isinstance(given, Mapping) and "salt_quota" in given and "salt_quota" not in cls.model_fields:
            raise ValueError(
                "salt_quota is for shared_fs, whose sweeps count: what a salt has in any other medium takes a listing "
                "of it all, see tiered_kv_backends.paths.keep_quota"
            )
        return given

    @model_validator(mode="after")
    def _check_read_only(self) -> Self:
        if self.read_only and isinstance(self, OwnedTierSettings):
            raise ValueError("read_only is for media that others write to: no other process has this one's blocks")
        if self.read_only and (self.write == "back" or self.admit_after > 1):
            raise ValueError("a read_only tier is never written: leave out write and admit_after")
        return self

    def on_medium(self, digest: bytes) -> bytes:
        """Return what stands in names on the medium for a digest of a model, weights or salt, for jobs that look there.

        It is the digest itself where nothing hides it. Reading a key blocks, see `Encryption.make_seal`.
        """
        return digest if self.encryption is None else self.encryption.make_seal().names.hide_digest(digest)


class OwnedTierSettings(BookedTierSettings, StorageTierSettings):
    """Base of the settings of a storage tier whose slots this cache gives and takes."""

    scrub_bandwidth: SizeOrNone = Field(default=default_size(None), gt=0)
    """Bytes a second that are read in the background to verify what lies there; nothing is if left out."""
    scrub_interval_s: float = Field(default=7 * 24 * 3600.0, gt=0, allow_inf_nan=False)
    """From the beginning of one such pass to that of the next."""


def split_url(url: str) -> SplitResult:
    """Take a URL apart. It may hold a password: no error here shows any of what may be one.

    Several hosts, by commas, may be addresses in brackets, which Python's newer releases take only of a single host.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        if (found := _WITH_HOSTS.fullmatch(url.strip())) is None:
            return urlsplit(url)
        before, netloc, after = found.groups()
        login, at, hosts = netloc.rpartition("@")
        for host in hosts.split(","):
            urlsplit(f"//{login}{at}{host}")
        return urlsplit(before + after)._replace(netloc=netloc)
    except ValueError:
        pass  # nothing is raised in here: its context would be an error that shows the URL
    raise ConfigurationError("this URL cannot be read: percent-encode what is special in a user's name or password")


def split_tier_url(url: str) -> tuple[SplitResult, list[tuple[str, str]]]:
    """Take a tier's URL apart, with the names and values of its query.

    Raises:
        ConfigurationError: It is none.
    """
    parts = split_url(url)
    scheme, is_url, _ = url.partition("://")
    if is_url and "_" in scheme and scheme.isidentifier():
        raise ConfigurationError(f"a URL's scheme has no underscores: write {scheme.replace('_', '-')}://")
    if not parts.scheme or "://" not in url:
        what = "a tier's URL looks like 'cpu://?capacity=32GiB' or 'file:///mnt/kv?capacity=1TiB'"
        if re.fullmatch(r"[~.]{0,2}/[\w./ -]*", url):  # of all else a part may be a secret
            what = f"{what}, not like {url!r:.80}"
        elif re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", url):
            what = f"{what}: for a class of yours write {{'medium': 'package.module:Class'}}"
        raise ConfigurationError(what)
    if parts.fragment:  # where a part of a password may be, which messages would show
        raise ConfigurationError("what is behind the '#' of a tier's URL would be lost: write %23")
    return parts, parse_qsl(parts.query, keep_blank_values=True)


def _path_in(parts: SplitResult) -> str:
    """Return the path that a URL names, of the home directory too: ``file://~/kv``.

    Raises:
        ConfigurationError: It names a host, or has lost a slash.
    """
    path = unquote(parts.path)
    if parts.netloc == "~":
        return "~" + path
    if parts.netloc:
        place = "mnt/kv" if "@" in parts.netloc else f"{parts.netloc}{parts.path}"
        raise ConfigurationError(
            f"three slashes begin a path: write {parts.scheme}:///{place}, or, of a relative one, a dict with "
            f"'path': '{place}'"
        )
    return path[1:] if path.startswith("/~/") else path
