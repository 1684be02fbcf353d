"""The machinery behind the seven top-level files. One concern a file; nothing here imports them."""
