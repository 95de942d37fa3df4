"""Computes the difference between two byte strings of equal length, in a compact form with a
checksum.

    delta = encode(base, new)
    apply(base, delta) == new          # or DeltaError

The difference contains only blocks that differ, each as the exclusive-or of old and new bytes. The
low bytes of all 2-byte numbers in these blocks come first, and then their high bytes. An optimizer
step mostly changes the last bits of a bfloat16 number, so nearly all of the high bytes are zero,
and zstd compresses them well.

    magic (8) | length (8) | block size (4) | changed blocks (4) | SHA-256 of the new bytes (32)
    | zstd( bit of each block | exclusive-or of the tail | low bytes | high bytes )

Invariants
- `apply` returns exactly the bytes that `encode` was given, or raises DeltaError. The SHA-256 of
  the new bytes detects a damaged difference, a damaged base, and a base to which the difference
  does not belong.
- At most as many bytes are decompressed as follow from the sizes in the header.
"""

import hashlib
import mmap
import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

BLOCK_BYTES = 4096
_MAGIC = b"MADELTA1"
_HEADER = struct.Struct("<8sQII32s")
_LEVEL = 1
_Bytes = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | mmap.mmap | _Bytes


class DeltaError(ValueError):
    """Error for a difference that cannot be applied to the given base."""


def encode(base: Buffer, new: Buffer, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the difference that turns `base` into `new`, which has the same number of bytes."""
    old_N, new_N = _as_array(base), _as_array(new)
    whole = len(new_N) // block_bytes * block_bytes
    old_BK = old_N[:whole].reshape(-1, block_bytes)
    new_BK = new_N[:whole].reshape(-1, block_bytes)
    changed_B = (old_BK != new_BK).any(axis=1)
    xor_CK = old_BK[changed_B] ^ new_BK[changed_B]
    planes_2X = np.ascontiguousarray(xor_CK.reshape(-1, 2).T)
    body = b"".join(
        (
            np.packbits(changed_B).tobytes(),
            (old_N[whole:] ^ new_N[whole:]).tobytes(),
            planes_2X.tobytes(),
        )
    )
    header = _HEADER.pack(
        _MAGIC, len(new_N), block_bytes, len(xor_CK), hashlib.sha256(new_N.data).digest()
    )
    return header + zstandard.ZstdCompressor(level=_LEVEL).compress(body)


def apply(base: Buffer, delta: bytes) -> bytes:
    """Apply the difference `delta` to `base`; return the new bytes.

    Raises:
        DeltaError: If the result is not what `encode` was given.
    """
    old_N = _as_array(base)
    if len(delta) < _HEADER.size:
        raise DeltaError("the difference is incomplete")
    magic, length, block_bytes, changed, digest = _HEADER.unpack_from(delta)
    if magic != _MAGIC:
        raise DeltaError("the data is not a difference of weights")
    if length != len(old_N):
        raise DeltaError(f"the difference is for {length} bytes, the base has {len(old_N)}")
    if block_bytes < 2 or block_bytes % 2:
        raise DeltaError(f"the difference has blocks of {block_bytes} bytes")
    blocks, tail = divmod(length, block_bytes)
    if changed > blocks:
        raise DeltaError(
            f"the difference has {changed} changed blocks, but the base has {blocks} blocks"
        )
    marks = -(-blocks // 8)
    body = _decompress(delta[_HEADER.size :], marks + tail + changed * block_bytes)
    changed_B = np.unpackbits(body[:marks], count=blocks).astype(bool)
    if int(changed_B.sum()) != changed:
        raise DeltaError("the difference does not match its list of changed blocks")
    result_N = old_N.copy()
    result_N[blocks * block_bytes :] ^= body[marks : marks + tail]
    xor_2X = body[marks + tail :].reshape(2, -1)
    xor_CK = np.ascontiguousarray(xor_2X.T).reshape(-1, block_bytes)
    result_BK = result_N[: blocks * block_bytes].reshape(-1, block_bytes)
    result_BK[changed_B] ^= xor_CK
    if hashlib.sha256(result_N.data).digest() != digest:
        raise DeltaError("the difference is damaged, or relative to another base")
    return result_N.tobytes()


def _decompress(data: bytes, size: int) -> _Bytes:
    try:
        # Check the size that the compressed data states before decompressing them, because
        # decompression allocates that much memory.
        found = zstandard.frame_content_size(data)
        if found != size:
            raise DeltaError(f"the difference contains {found} bytes instead of {size}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the difference cannot be decompressed: {error}") from error


def _as_array(data: Buffer) -> _Bytes:
    return np.frombuffer(data, np.uint8)
