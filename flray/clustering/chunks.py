"""Sizes of the chunks in which large arrays are processed, to avoid a second copy of them."""

CHUNK_BYTES = 2**24  # bytes of float64 at a time: near a cache, and enough for products


def chunk_length(bytes_each: int) -> int:
    """Number of items of this size that are processed at a time, at least one.

    >>> chunk_length(bytes_each=CHUNK_BYTES // 2)
    2
    """
    return max(1, CHUNK_BYTES // bytes_each)
