"""A fixture of a published tokenizer's folder."""

from tests.disk.conftest import folder as folder
