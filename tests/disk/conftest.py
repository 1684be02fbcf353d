"""Fixtures of tokenizers, and of encodings that are interrupted."""

import contextlib

import pytest

from tests.common import published_files
from zigzag.disk import output


@pytest.fixture
def folder(tmp_path, text):
    """A published tokenizer of 300 byte-level pieces, without weights."""
    return published_files(tmp_path / "published", text)


@pytest.fixture
def stopping(monkeypatch):
    """`with stopping(5) as begun`: encodings whose next pieces after five end with an error (here,
    if it is Ctrl-C); `begun` has an element for each piece. Progress is saved after each."""
    monkeypatch.setattr(output, "SAVE_SECONDS", 0.0)

    @contextlib.contextmanager
    def stopping(after, error=KeyboardInterrupt):
        add, begun = output.Output.add, []

        def counting(self, found):
            begun.append(1)
            if len(begun) > after:
                for file in self.files.values():
                    file.write(b"half")
                raise error
            add(self, found)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(output.Output, "add", counting)
            yield begun

    return stopping
