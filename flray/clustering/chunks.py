"""How much of a large array is worked on at a time, so that no second copy of it is held."""

CHUNK_BYTES = 2**24  # of float64 at a time: near a cache, and enough for matrix products


def chunk_length(bytes_each: int) -> int:
    """How many things of this size are worked on at a time, at least one.

    >>> chunk_length(bytes_each=CHUNK_BYTES // 2)
    2
    """
    return max(1, CHUNK_BYTES // bytes_each)
