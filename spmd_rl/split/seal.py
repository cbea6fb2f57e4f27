"""`Seal`: signatures by which the training ranks of a job know again what one of them has handed out."""

import hmac
import secrets
from hashlib import blake2b

import msgspec

from spmd_rl.weights.messages import FromMember, MemberId

KEY_BYTES = 32


class Seal:
    """The same on all training ranks; nobody else has its key, but ranks of the same job."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @staticmethod
    def new_key() -> bytes:
        """Return a key that nobody can guess."""
        return secrets.token_bytes(KEY_BYTES)

    def sign(self, *parts: object) -> bytes:
        """Return the 16 bytes that only who has the key can make for these plain values."""
        return blake2b(msgspec.msgpack.encode(parts), key=self._key, digest_size=16).digest()

    def is_signed(self, signature: bytes, *parts: object) -> bool:
        """Return whether `sign` made this of these."""
        return hmac.compare_digest(signature, self.sign(*parts))

    def membership(self, member: int) -> MemberId:
        """Return what a member is known by."""
        return MemberId(member, self.sign("member", member))

    def admits(self, message: FromMember) -> bool:
        """Return whether a message is of the member that it names."""
        return self.is_signed(message.secret, "member", message.member)
