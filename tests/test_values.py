"""Values of keys as names of files."""

import hashlib

import pytest

from flray.values import LONGEST_NAME, file_name


@pytest.mark.parametrize(
    "text", ["x" * 1000, "é" * 1000, "x" + "é" * 1000, "日本" * 500, "é" * 61], ids=len
)
def test_a_long_name_has_at_most_120_bytes_and_tells_texts_apart(text) -> None:
    names = {file_name(text), file_name(text + "!"), file_name(text + "é")}
    assert len(names) == 3
    assert LONGEST_NAME == 120
    assert all(len(name.encode()) <= 120 for name in names)


def test_a_long_name_is_the_begin_of_the_text_and_of_its_hash() -> None:
    """60 bytes are 60 letters x, or 30 letters é; a hyphen and 59 digits fill 120."""
    for letter, number in (("x", 60), ("é", 30)):
        digits = hashlib.sha256((letter * 1000).encode()).hexdigest()[:59]
        assert file_name(letter * 1000) == f"{letter * number}-{digits}"


@pytest.mark.parametrize("text", ["", "///", "_", "\udcff", "\udcff" * 200])
def test_a_text_without_letters_has_a_name_too(text) -> None:
    assert file_name(text) == hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def test_a_short_name_ends_at_120_bytes() -> None:
    assert file_name("é" * 60) == "é" * 60
    assert len(file_name("é" * 60 + "x").encode()) == 120
