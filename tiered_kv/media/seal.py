"""What the operator's keys do to a tier: names on its medium tell nothing, and records are sealed.

Names are hidden: a medium knows a block, and the model, weights and tenant it is of, by enciphered digests. Who has no
key can't tell the name of a known prompt from random bytes.

Seals are AES-256-GCM, which encrypts, or AES-256-GMAC, which only authenticates. Every record has a key of its own,
made by HKDF of one of the operator's keys, the tenant's salt and random bytes that are in the record's header. So no
nonce is ever used twice: 2**48 records of one tenant under one key are no danger. The header is authenticated with the
payload: what was changed, swapped, or made without a key fails. Needs the extra ``encryption``.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import ciphers
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB, GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from tiered_kv.media.record import KEY_BYTES, Cipher
from tiered_kv.system import system
from tiered_kv.values.keys import BlockKey, Names, Namespace

_ID_BYTES: Final = 16
_RANDOM_BYTES: Final = 16
_IV_BYTES: Final = 12
_LABEL: Final = b"tiered_kv seal v1 "
ENCRYPTED: Final[Cipher] = "aes-256-gcm"
_ROUNDS: Final = 4
_AT_ONCE: Final = 4096
"""Names enciphered at a time, so that they stay in a processor's own cache."""


class NameCipher:
    """Makes the names that a medium has of those that the cache has, and the other way round. Any thread may use it.

    A permutation of 32 bytes, chosen by a key: a Feistel network of four rounds, whose function is AES-256. All who
    have the key agree on a name without asking, and can read back what lies there: a restart has to know.

    Source: Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions" (1988).
    """

    def __init__(self, key: bytes) -> None:
        """Take a key of 32 bytes, which may be one that seals too."""
        keys = _derived(key, b"names", _ROUNDS * KEY_BYTES)
        self._rounds = [
            ciphers.Cipher(AES256(keys[at : at + KEY_BYTES]), ECB())  # noqa: S305 - a round's function, of 16 bytes
            for at in range(0, len(keys), KEY_BYTES)
        ]
        self.hide_space = lru_cache(maxsize=1024)(self._hide_space)

    def hide(self, names: Names) -> Names:
        """Return what a medium calls blocks, ``(n, 4)``. Some 0.1 us each, 15 us in all at least."""
        return _through(self._rounds, names, slice(0, 2), slice(2, 4))

    def show(self, hidden: Names) -> Names:
        """Undo `hide`: the rounds from the last to the first, and each half in the place of the other."""
        return _through(self._rounds[::-1], hidden, slice(2, 4), slice(0, 2))

    def hide_digest(self, digest: bytes) -> bytes:
        """Return what stands on a medium for the digest of a model, of weights or of a tenant's salt."""
        return self.hide(_words(digest).reshape(1, 4)).tobytes()

    def hide_key(self, key: BlockKey) -> BlockKey:
        """Return a block's key as a medium has it, in headers and paths."""
        names = key.namespace.names_of([key.hash])
        return self.hide_space(key.namespace).keys_of(self.hide(names), np.array([key.position]))[0]

    def show_key(self, hidden: BlockKey) -> BlockKey:
        """Undo `hide_key`."""
        space = hidden.namespace
        digests = self.show(_words(space.fingerprint + space.epoch + space.salt).reshape(3, 4))
        shown = Namespace(digests[0].tobytes(), digests[1].tobytes(), digests[2].tobytes(), space.shard)
        return shown.keys_of(self.show(space.names_of([hidden.hash])), np.array([hidden.position]))[0]

    def _hide_space(self, space: Namespace) -> Namespace:
        digests = self.hide(_words(space.fingerprint + space.epoch + space.salt).reshape(3, 4))
        return Namespace(digests[0].tobytes(), digests[1].tobytes(), digests[2].tobytes(), space.shard)


def _through(rounds: Sequence[ciphers.Cipher[ECB]], names: Names, first: slice, second: slice) -> Names:
    """Take names through the rounds of a Feistel network, some at a time; its halves are these columns."""
    out, encryptors = np.empty((len(names), 4), np.uint64), [each.encryptor() for each in rounds]
    for start in range(0, len(names), _AT_ONCE):
        part, into = names[start : start + _AT_ONCE], out[start : start + _AT_ONCE]
        left, right = part[:, first], part[:, second]
        for each in encryptors:
            left, right = right, left ^ _words(each.update(right.tobytes()))
        into[:, first], into[:, second] = left, right
    return out


class Seal:
    """Hides names, and if it has keys to, seals payloads and opens them again. Any thread may use it.

    Attributes:
        names: Makes the names on the medium.
        key_id: Says in a header which key sealed the record: 16 bytes, made of the key, so that a wrong key is never
            taken for the right one. Empty where only names are hidden.
        cipher: Of what is sealed; what is opened may be of either.
    """

    def __init__(self, keys: Sequence[bytes], cipher: Cipher = ENCRYPTED, *, names_key: bytes = b"") -> None:
        """Take keys of 32 bytes: the first seals, all of them open; it makes the names too, unless another one does."""
        self.cipher: Cipher = cipher
        self.names = NameCipher(names_key or keys[0])
        self._keys = {_derived(key, b"key id", _ID_BYTES): key for key in keys}
        self.key_id = next(iter(self._keys), b"")
        self._tenant_key = lru_cache(maxsize=1024)(self._make_tenant_key)

    @property
    def seals(self) -> bool:
        """Whether records are sealed, and not their names hidden alone."""
        return bool(self._keys)

    @property
    def encrypts(self) -> bool:
        """Whether a sealed payload is another one than before."""
        return self.seals and self.cipher == ENCRYPTED

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


def _words(data: bytes) -> Names:
    return np.frombuffer(data, np.uint64).reshape(-1, 2)
