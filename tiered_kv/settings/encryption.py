"""The setting ``encryption`` of a storage tier, and where its keys come from. ``media/seal.py`` does the rest."""

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypedDict, Unpack, get_args

from pydantic import ImportString, SecretStr, field_validator, model_validator

from tiered_kv.media.record import KEY_BYTES, Cipher
from tiered_kv.settings.setting_errors import Checked
from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError
from tiered_kv.values.log import log

if TYPE_CHECKING:
    from tiered_kv.media.seal import Seal

KeySource = Callable[[], Sequence[bytes | str]]

_LONGEST_NAME: Final = 20
"""Characters of what may be a setting's name, mistyped: a key has twice as many."""
_NAME_IN_A_MODULE: Final = re.compile(r"[^\W\d]\w*(\.\w+)*[.:]\w+")


class _EncryptionArguments(TypedDict, total=False):
    keys: Sequence[str | SecretStr]
    keys_file: str | os.PathLike[str] | None
    keys_from: KeySource | str | None
    names_key: str | SecretStr | None
    names_key_file: str | os.PathLike[str] | None
    cipher: Cipher


class Encryption(Checked):
    """How a storage tier protects its records: ``Encryption(keys_file="/run/secrets/kv-keys")``, or that path alone.

    Keys have 32 random bytes, written as base64 or in hexadecimal digits. The first one writes, all of them read.
    They come from one of the three sources, when the tier opens. Names on the medium are hidden by the first one, or by
    a names key; that alone hides names, and seals nothing.
    """

    keys: tuple[SecretStr, ...] = ()
    """The keys themselves."""
    keys_file: Path | None = None
    """A file with a key in each line; empty lines and those that begin with ``#`` are passed over."""
    keys_from: ImportString[KeySource] | None = None
    """A function, or its ``"package.module:name"``, that returns the keys, as text or as 32 bytes each. It is called in
    a thread of the cache's."""
    names_key: SecretStr | None = None
    """What hides names on the medium, where it is not the first of the keys: keys can be changed then, and what lies
    there is found as before."""
    names_key_file: Path | None = None
    """A file whose first line is the names key, likewise."""
    cipher: Cipher = "aes-256-gcm"
    """``"aes-256-gcm"`` encrypts; ``"aes-256-gmac"`` leaves payloads as they are, and only tells whether they, and
    their headers, were written with a key. Both are read, whichever is written."""

    def __init__(self, **arguments: Unpack[_EncryptionArguments]) -> None:
        super().__init__(**arguments)

    @model_validator(mode="before")
    @classmethod
    def _take_path(cls, given: object) -> object:
        if isinstance(given, dict) and any(len(str(name)) > _LONGEST_NAME for name in given):
            raise ValueError("what may be a key stands where the name of a setting belongs: keys=[...] takes it")
        return {"keys_file": given} if isinstance(given, str | os.PathLike) else given

    @field_validator("cipher", mode="before")
    @classmethod
    def _check_cipher(cls, given: object) -> object:
        if given not in get_args(Cipher):
            raise ValueError(f"is one of {', '.join(get_args(Cipher))}, and what was given is none")
        return given

    @field_validator("keys_from", mode="before")
    @classmethod
    def _check_function(cls, given: object) -> object:
        if isinstance(given, str) and (
            not _NAME_IN_A_MODULE.fullmatch(given) or any(map(_is_key, re.split(r"[.:]", given)))
        ):
            raise ValueError('must be a function, or its "package.module:name"')
        return given

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self._num_sources > 1 or not self._num_sources + self._num_names_keys:
            raise ValueError("needs keys from one source: keys, keys_file or keys_from; or a names_key alone")
        if self._num_names_keys > 1:
            raise ValueError("takes one names key: names_key or names_key_file")
        for file in (self.keys_file, self.names_key_file):
            if file is not None and _is_key(str(file)) and not _is_plainly_a_path(file):
                raise ValueError("a file of keys is named by its path: this is a key itself, which keys=[...] takes")
        for key in (*self.keys, *filter(None, [self.names_key])):
            _key_of(key.get_secret_value())
        if find_spec("cryptography") is None:
            raise ValueError("needs the package cryptography: pip install 'tiered-kv[encryption]'")
        return self

    def make_seal(self) -> "Seal":
        """Get the keys. Blocks for as long as a file or a function takes.

        Raises:
            ConfigurationError: There is no such file, or something in it is no key.
            BackendUnavailableError: The function raised, what it is raised from: that error's own words are not
                repeated here, as they may hold a key.
        """
        try:
            keys = self._read()
            names_key = self._read_names_key() if self._num_names_keys else b""
        except ConfigurationError:  # a ValueError, too
            raise
        except ValueError as error:  # it tells nothing of the key
            raise ConfigurationError(f"encryption: {error}") from None
        if not keys and (self._num_sources or not names_key):
            raise ConfigurationError(f"encryption: there is no key in {self.keys_file or self.keys_from}")
        from tiered_kv.media.seal import Seal  # noqa: PLC0415 - it needs an extra

        return Seal(keys, self.cipher, names_key=names_key)

    @property
    def _num_sources(self) -> int:
        return sum([bool(self.keys), self.keys_file is not None, self.keys_from is not None])

    @property
    def _num_names_keys(self) -> int:
        return sum([self.names_key is not None, self.names_key_file is not None])

    def _read(self) -> list[bytes]:
        if self.keys_file is not None:
            return list(_keys_in(self.keys_file))
        if self.keys_from is not None:
            try:
                given = list(self.keys_from())
            except Exception as error:  # whatever a key server's client raises
                raise BackendUnavailableError(f"encryption: keys_from raised {type(error).__name__}") from error
            return [_key_of(key) for key in given]
        return [_key_of(key.get_secret_value()) for key in self.keys]

    def _read_names_key(self) -> bytes:
        if self.names_key_file is None:
            return _key_of(self.names_key.get_secret_value() if self.names_key is not None else "")
        if (key := next(_keys_in(self.names_key_file), None)) is None:
            raise ConfigurationError(f"encryption: there is no key in {self.names_key_file}")
        return key


def _keys_in(file: Path) -> Iterator[bytes]:
    """Yield the keys that a file has; warn of one that everybody may read.

    Raises:
        ConfigurationError: It cannot be read, or a line is no key: which one is said, and nothing of it.
    """
    try:
        if (mode := file.stat().st_mode) & stat.S_IROTH:
            log("warning", "encryption.keys_readable", file=str(file), mode=stat.filemode(mode))
        lines = [line.strip() for line in file.read_text("ascii", "replace").splitlines()]
    except OSError as error:
        why = error.strerror
    else:
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            try:
                key = _key_of(line)
            except ValueError as error:
                raise ConfigurationError(f"encryption: line {number} of {file}: {error}") from None
            yield key
        return
    # Outside of `except`: the system's error repeats the path.
    if _is_plainly_a_path(file):
        raise ConfigurationError(f"encryption: {file} cannot be read: {why}")
    raise ConfigurationError(
        f"encryption: the file of keys cannot be read: {why} (its path, a key perhaps, is not shown)"
    )


def _is_plainly_a_path(file: Path) -> bool:
    """Say whether this is in a folder that there is, or has a dot, as no key has."""
    return "." in str(file) or (file.parent not in {Path(), Path("/")} and file.parent.is_dir())


def _is_key(given: str) -> bool:
    """Say whether this is a key as people write them: with padding or without, by another alphabet, after a prefix."""
    digits = given.strip().rpartition(":")[2].removeprefix("0x").rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    try:
        _key_of(digits + "=" * (-len(digits) % 4))
    except ValueError:
        return False
    return True


def _key_of(given: bytes | str) -> bytes:
    """Read a key; `ValueError`, without a word of it, for what is none."""
    if isinstance(given, str):
        try:
            given = bytes.fromhex(given) if len(given) == 2 * KEY_BYTES else base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError):
            given = b""
    if not isinstance(given, bytes) or len(given) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} random bytes, as base64 or in hexadecimal: openssl rand -base64 32")
    return given
