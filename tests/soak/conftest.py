"""As for `tests/tiny`: a method that a file registers is not the next file's."""

from tests.tiny.conftest import methods_of_one_file

__all__ = ["methods_of_one_file"]
