"""The store's settings, the client made from them, and what the client's errors mean."""

import atexit
import functools
import os
import random
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self, cast
from urllib.parse import urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore, from_url
from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.settings.tier_settings import Size, StorageTierSettings, default_size, split_url
from tiered_kv.values.errors import (
    BackendError,
    BackendUnavailableError,
    BlockCorruptError,
    ConfigurationError,
    TieredKVError,
)
from tiered_kv_backends.paths import scrub

# Shares of `timeout_s`. A request is begun in the first half of a call; it may take its time once more after the last
# retry has begun; so a call has ended by 0.95 of the time that the cache waits for it.
BEGIN_WITHIN: Final = 0.5
REQUEST_WITHIN: Final = 0.3
_RETRY_WITHIN: Final = 0.15

_S3_SCHEMES: Final = ("s3", "s3a")
_SCHEMES: Final = (*_S3_SCHEMES, "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file", "memory")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_TRANSPORT = re.compile(
    r"failed to lookup address|dns error|Connection refused|Connection reset|No route to host|IncompleteMessage"
    r"|BrokenPipe|kind: (Timeout)|TimedOut"
)
_WHAT_IT_DID = re.compile(r"Error performing \w+ \S+ in .*? - ")
"""Each time other words, and most of a message where the object's name is long; the reason comes after it."""
_TLS = re.compile(r"(InvalidContentType)|InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+?)(?:Context)?\b")
_TLS_FAILURES: Final = {
    "InvalidContentType": ("the server speaks no TLS", "use http://"),
    "Expired": ("its certificate has expired", "renew it, or look at the clock of this machine"),
    "NotValidYet": ("its certificate is not valid yet", "look at the clocks of both machines"),
    "NotValidForName": ("its certificate is for other hosts", "name one of those in endpoint"),
    "CaUsedAsEndEntity": ("its certificate is an authority's own", "have that sign one for the server"),
    "UnknownIssuer": ("its certificate is of an unknown authority", "give that authority's as ca_file"),
}
"""What the client says of a handshake: in words, and what helps."""
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "MissingSecretAccessKey")
_ABSENT = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_REFUSALS: Final = {
    "RequestTimeTooSkewed": "look at the clock of this machine",
    "ExpiredToken": "give a new session_token",
    "InvalidToken": "check session_token",
    "AuthorizationHeaderMalformed": "give the bucket's own region",
    "Received redirect without LOCATION": "give the bucket's own region",
}
"""How it is said that keys, though they may be right, are not taken, and what helps."""
_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY")
_AZURE: Final = ("az", "azure", "adl", "abfs", "abfss")
_LOGINS: Final = dict.fromkeys(_S3_SCHEMES, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") | {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account"
}
"""What obstore reads in the environment; of all others Azure's."""
_OF_S3: Final = ("endpoint", "region", "virtual_hosted", "access_key_id", "secret_access_key", "session_token")
_ENDPOINT = re.compile(r"(aws_|azure_(storage_)?|google_)?(endpoint(_url(_s3)?)?|base_url)", re.IGNORECASE)
"""What obstore calls a store's address among ``options``."""
_READ: Final = dict.fromkeys(_S3_SCHEMES, "AWS_") | {"gs": "GOOGLE_"}
"""How what obstore reads in the environment begins, such an address too; ``AZURE_`` for all others."""
_TO_LIST: Final = dict.fromkeys(_S3_SCHEMES, "s3:ListBucket") | {"gs": "storage.objects.list"}
"""The right without which a store says of what is absent that it is forbidden; Azure has no need of it."""
_PANIC = "PanicException"
"""What the client raises, no `Exception`, of an option that it knows and its stores do not."""
_LAST_CALLS_S = 0.3
"""How long the client's threads may take to let go of Python's objects after the last call."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_REFUSED = re.compile(r"status code: 429|<Code>SlowDown</Code>")
_BEYOND_END = re.compile(r"status code: 416|StartTooLarge")


class S3Settings(StorageTierSettings):
    """``{"medium": "s3", "url": "s3://bucket/prefix", "endpoint": "https://store.example"}``."""

    medium: str = "s3"
    url: str = Field(examples=["s3://bucket/prefix"])
    """``s3://bucket/prefix``; also ``gs://``, ``az://``, ``file:///path`` and ``memory:///``, as obstore has them."""
    endpoint: str | None = None
    """Where the store is, unless it is AWS. ``http://`` sends all but the secret in the clear."""
    region: str | None = None
    virtual_hosted: bool = False
    """Whether the bucket is in the host's name (it then must be in ``endpoint`` too) and not in the path."""
    ca_file: Path | None = None
    """PEM certificates to trust beside the system's."""
    access_key_id: SecretStr | None = None
    """Left out: ``AWS_*`` of the environment, web identity, then the container's or the instance's role. Other stores
    take ``options`` instead."""
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    options: dict[str, SecretStr] = Field(default_factory=dict)
    """Further options of obstore's store by their names, e.g. ``{"sse_kms_key_id": ...}``."""
    connections: int = Field(default=32, ge=1, le=1024)
    """Requests under way at once, in each direction: loads never queue behind stores."""
    connect_timeout_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """How long a connection, and the whole of opening, may take."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """Of one request, with jitter, within 15 % of ``timeout_s``. A store is repeated only if it was refused for the
    rate of requests (``SlowDown``, 429): any other that fails may be carried out yet, and has failed at once."""
    create_only: bool = False
    """Never replace an object (``If-None-Match: *``). A damaged one is deleted by its second read, then stored anew."""
    pack_bytes: Size = Field(default=default_size(4 << 20), ge=0)
    """Blocks of a prompt are stored together in objects of up to this size, 16 at most. 0: one object per block.

    The same for all that share a prefix: packs of another size are neither found nor evicted.
    """
    answer_ttl_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How long what a probe said is believed. 0: every lookup asks."""
    sign_payload: bool = False
    """Whether each body is signed by its SHA-256, for servers that insist. Records carry checksums of their own."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = split_url(url)
        if not parts.scheme or "://" not in url:
            raise ValueError("write s3://bucket/prefix")
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"no store has URLs of {parts.scheme}://: write s3://bucket/prefix, gs:// or az://")
        if parts.password or (parts.username and parts.scheme not in _AZURE):  # abfss://container@account...
            raise ValueError("secrets have no place in a URL: give access_key_id and secret_access_key")
        if parts.query or parts.fragment:  # where a key may be, which messages would show
            raise ValueError("nothing comes behind the path of a store: give its settings beside url")
        if parts.scheme in _S3_SCHEMES and not parts.netloc:
            raise ValueError("no bucket is named: write s3://bucket/prefix")
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, endpoint: str | None) -> str | None:
        return None if endpoint is None else _checked(endpoint)

    @field_validator("options")
    @classmethod
    def _have_an_endpoint(cls, options: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in options.items():
            if _ENDPOINT.fullmatch(name):
                _checked(value.get_secret_value())
        return options

    @model_validator(mode="after")
    def _is_of_its_store(self) -> Self:
        scheme = urlsplit(self.url).scheme
        unread = [name for name in _OF_S3 if name in self.model_fields_set]
        if unread and scheme in {"gs", *_AZURE}:
            raise ValueError(f"{', '.join(unread)}: for s3:// alone, {scheme}:// has options, by obstore's names")
        return self

    @property
    def place(self) -> str:
        """The store for messages: URL and endpoint, no secrets."""
        return f"{self.url} at {self.address}" if self.address else self.url

    @property
    def address(self) -> str:
        """Where the store is: as one of the options says, ``endpoint``, or the environment; empty if none does."""
        given = [value.get_secret_value() for name, value in self.options.items() if _ENDPOINT.fullmatch(name)]
        prefix = _READ.get(urlsplit(self.url).scheme, "AZURE_")
        read = [value for name, value in os.environ.items() if name.startswith(prefix) and _ENDPOINT.fullmatch(name)]
        may_be_shown = [value for value in read if value and "@" not in value]
        return next(iter([*given, *filter(None, [self.endpoint]), *may_be_shown]), "")

    @property
    def is_private(self) -> bool:
        """Whether the store is in this process's own memory, where nobody else finds it."""
        return urlsplit(self.url).scheme == "memory"

    @property
    def secrets(self) -> list[str]:
        """What no message may hold, whatever a server repeats: of the settings and of the environment."""
        options = [value for name, value in self.options.items() if not _ENDPOINT.fullmatch(name)]
        own = (self.access_key_id, self.secret_access_key, self.session_token, *options)
        found = [value.get_secret_value() for value in own if value is not None]
        return found + [value for name in _ENVIRONMENT if (value := os.environ.get(name))]


def _checked(endpoint: str) -> str:
    parts = split_url(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.netloc:  # the client's panic is no error of Python's
        raise ValueError("must be http://host[:port] or https://host[:port]")
    if parts.query or parts.fragment:
        raise ValueError("nothing comes behind the path of an endpoint: give settings beside it")
    if parts.username or parts.password:
        raise ValueError("secrets have no place in a URL: give access_key_id and secret_access_key")
    return endpoint


def make_store(settings: S3Settings, *, is_probe: bool = False, tries_once: bool = False) -> ObjectStore:
    """Make the client; nothing is asked yet. One ``is_probe`` tries once too, within ``connect_timeout_s``.

    Raises:
        ConfigurationError: obstore does not take the URL or an option.
    """
    _wait_at_exit()
    make = cast("Any", from_url)  # overloaded per scheme, which is known at run time only
    try:
        scheme = urlsplit(settings.url).scheme
        if scheme == "file":
            return cast("ObjectStore", make(settings.url, mkdir=True))
        if scheme == "memory":
            return cast("ObjectStore", make(settings.url))
        request_s = settings.connect_timeout_s if is_probe else REQUEST_WITHIN * settings.timeout_s
        client: dict[str, object] = {
            "allow_http": settings.address.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(settings.connect_timeout_s, request_s)),
            "pool_max_idle_per_host": str(2 * settings.connections),
            "timeout": timedelta(seconds=request_s),
        }
        if settings.ca_file is not None:
            client["root_certificate"] = settings.ca_file.read_text()
        retry = {
            "backoff": {
                "base": 2,
                "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
            },
            "max_retries": 0 if is_probe or tries_once else settings.max_retries,
            "retry_timeout": timedelta(seconds=_RETRY_WITHIN * settings.timeout_s),
        }
        config = _s3_config(settings) if scheme in _S3_SCHEMES else {}
        config |= {name: value.get_secret_value() for name, value in settings.options.items()}
        return cast("ObjectStore", make(settings.url, config=config, client_options=client, retry_config=retry))
    except (BaseError, OSError, ValueError, TypeError) as error:
        advice = f": set {_login(settings)}" if "Account must be specified" in str(error) else ""
        what = f"no client for {settings.place}: {_reason(error)}{advice}"
        raise ConfigurationError(what) from None  # it may hold a secret
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        names = ", ".join(settings.options)
        what = f"no client for {settings.place}: options are those of its store, not of its HTTP client: {names}"
        raise ConfigurationError(what) from None


@functools.cache
def _wait_at_exit() -> None:
    """Have the process that made a client end a little later: the client's threads abort it if they find Python gone.

    See https://github.com/PyO3/pyo3-async-runtimes/issues/40.
    """
    atexit.register(time.sleep, _LAST_CALLS_S)


def pauses(max_retries: int) -> Iterator[float]:
    """Yield how many seconds to wait before each repetition of a request that was refused for the rate of requests.

    Drawn below a limit that doubles, so that clients which were refused together do not come back together.
    """
    limit_s = _FIRST_PAUSE_S
    for _ in range(max_retries):
        limit_s = min(2 * limit_s, _LONGEST_PAUSE_S)
        yield random.uniform(limit_s / 2, limit_s)  # noqa: S311 - no secret


def is_refused_for_rate(error: BaseError) -> bool:
    """Say whether a store answered that requests come too fast: that one will not be carried out later."""
    return _REFUSED.search(str(error)) is not None


def translate(error: BaseError | OSError | ValueError, doing: str, settings: S3Settings) -> BackendError:
    """Say in the cache's own errors what a request failed of, and take secrets out of the error itself."""
    scrub(error, settings.secrets)
    what, reason = f"{doing} of {settings.place}", _reason(error)
    if _BEYOND_END.search(str(error)):
        return BlockCorruptError(f"{what}: the object is too short ({reason})")
    return BackendUnavailableError(f"{what}: {reason}")


def translate_opening(error: BaseError | OSError | ValueError, settings: S3Settings) -> TieredKVError | None:
    """Say why the first request failed; None if it only found nothing, as it should."""
    scrub(error, settings.secrets)
    text, reason = str(error), _reason(error)
    if any(word in text for word in _ABSENT):
        return ConfigurationError(f"there is no bucket of this name: {settings.place}")
    if isinstance(error, FileNotFoundError):
        return None
    if any(word in text for word in _NO_CREDENTIALS):  # the last of the chain, after settings and environment
        return ConfigurationError(
            f"no credentials for {settings.place}: none are set, no role gives any ({reason}): set "
            f"{_login(settings)}, or give this machine a role that may use it"
        )
    advice = next((advice for said, advice in _REFUSALS.items() if said in text), "")
    if advice or isinstance(error, PermissionDeniedError | UnauthenticatedError):
        right = _TO_LIST.get(urlsplit(settings.url).scheme)
        keys = f"check the keys; to list is needed too ({right}), or what is absent looks as what is forbidden"
        if right is None:
            keys = "check the keys, or give the role Storage Blob Data Contributor"
        return ConfigurationError(f"{settings.place} refuses the credentials ({reason}): {advice or keys}")
    if tls := _TLS.search(text):
        advice = _tls_failure(tls)[1]
        return ConfigurationError(f"{settings.place} fails the TLS handshake ({reason}): {advice}")
    return BackendUnavailableError(f"{settings.place} does not answer: {reason}")


def _login(settings: S3Settings) -> str:
    return _LOGINS.get(urlsplit(settings.url).scheme, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY")


def _reason(error: Exception) -> str:
    """The server's code, its status or the transport's failure: short, and free of what was sent."""
    text = " ".join(str(error).split())
    if tls := _TLS.search(text):
        return _tls_failure(tls)[0]
    found = [pattern.search(text) for pattern in (_STATUS, _CODE, _TRANSPORT)]
    parts = dict.fromkeys(match.group(match.lastindex or 0).strip() for match in found if match)
    return ", ".join(parts) or _WHAT_IT_DID.sub("", text.partition(" Debug source")[0])[:300]


def _tls_failure(found: re.Match[str]) -> tuple[str, str]:
    """Why a handshake failed, and what helps."""
    word = found[found.lastindex or 0]
    return _TLS_FAILURES.get(word, (f"its certificate is not accepted: {word}", "give the server another one"))


def _s3_config(settings: S3Settings) -> dict[str, str | bool]:
    secrets = {
        "access_key_id": settings.access_key_id,
        "secret_access_key": settings.secret_access_key,
        "session_token": settings.session_token,
    }
    config: dict[str, str | bool] = {name: value.get_secret_value() for name, value in secrets.items() if value}
    config |= {name: value for name in ("endpoint", "region") if (value := getattr(settings, name)) is not None}
    config |= {"unsigned_payload": not settings.sign_payload}
    return config | {"virtual_hosted_style_request": settings.virtual_hosted}
