"""Seals on records: AES-256-GCM with keys of the operator's, which encrypts, or AES-256-GMAC, which only authenticates.

Every record has a key of its own, made by HKDF of one of the operator's keys, the tenant's salt and random bytes that
are in the record's header. So no nonce is ever used twice: 2**48 records of one tenant under one key are no danger. The
header is authenticated with the payload: what was changed, swapped, or made without a key fails. Needs the extra
``encryption``.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from tiered_kv.media.record import KEY_BYTES, Cipher
from tiered_kv.system import system

_ID_BYTES: Final = 16
_RANDOM_BYTES: Final = 16
_IV_BYTES: Final = 12
_LABEL: Final = b"tiered_kv seal v1 "
ENCRYPTED: Final[Cipher] = "aes-256-gcm"


class Seal:
    """Seals payloads and opens them again. Any thread may use it.

    Attributes:
        key_id: Says in a header which key sealed the record: 16 bytes, made of the key, so that a wrong key is never
            taken for the right one.
        cipher: Of what is sealed; what is opened may be of either.
    """

    def __init__(self, keys: Sequence[bytes], cipher: Cipher = ENCRYPTED) -> None:
        """Take keys of 32 bytes: the first seals, all of them open."""
        self.cipher: Cipher = cipher
        self._keys = {_derived(key, b"key id", _ID_BYTES): key for key in keys}
        self.key_id = next(iter(self._keys))
        self._tenant_key = lru_cache(maxsize=1024)(self._make_tenant_key)

    @property
    def encrypts(self) -> bool:
        """Whether a sealed payload is another one than before."""
        return self.cipher == ENCRYPTED

    def knows(self, key_id: bytes) -> bool:
        """Whether what this key sealed can be opened."""
        return key_id in self._keys

    @staticmethod
    def nonce() -> bytes:
        """Return 16 random bytes, for one record."""
        return system().token_bytes(_RANDOM_BYTES)

    def close(self, salt: bytes, nonce: bytes, header: bytes, payload: memoryview, into: memoryview) -> bytes:
        """Seal a payload.

        Args:
            salt: The tenant's.
            nonce: Of this record.
            header: What is authenticated with the payload; always of the same length.
            payload: As it is to be read again.
            into: As many bytes, for what is to be written; may be ``payload`` itself. Only touched if this encrypts.

        Returns:
            The tag, 16 bytes.
        """
        key, iv = self._record_key(self.key_id, self.cipher, salt, nonce)
        context = ciphers.Cipher(AES256(key), GCM(iv)).encryptor()
        context.authenticate_additional_data(header)
        if self.encrypts:
            context.update_into(payload, into)
        else:
            context.authenticate_additional_data(payload)
        context.finalize()
        return context.tag

    def open(
        self, key_id: bytes, cipher: Cipher, salt: bytes, nonce: bytes, header: bytes, tag: bytes, payload: memoryview
    ) -> bool:
        """Undo `close`, in place. False: these are not the bytes that were sealed, and the payload is garbage now."""
        key, iv = self._record_key(key_id, cipher, salt, nonce)
        context = ciphers.Cipher(AES256(key), GCM(iv, tag)).decryptor()
        context.authenticate_additional_data(header)
        if cipher == ENCRYPTED:
            context.update_into(payload, payload)
        else:
            context.authenticate_additional_data(payload)
        try:
            context.finalize()
        except InvalidTag:
            return False
        return True

    def _record_key(self, key_id: bytes, cipher: Cipher, salt: bytes, nonce: bytes) -> tuple[bytes, bytes]:
        tenant_key = self._tenant_key(key_id, cipher, salt)
        both = HKDFExpand(SHA256(), KEY_BYTES + _IV_BYTES, _LABEL + b"record " + nonce).derive(tenant_key)
        return both[:KEY_BYTES], both[KEY_BYTES:]

    def _make_tenant_key(self, key_id: bytes, cipher: Cipher, salt: bytes) -> bytes:
        return _derived(self._keys[key_id], b"tenant " + cipher.encode().ljust(16, b"\0") + salt, KEY_BYTES)


def _derived(key: bytes, label: bytes, num_bytes: int) -> bytes:
    return HKDF(SHA256(), num_bytes, salt=None, info=_LABEL + label).derive(key)
