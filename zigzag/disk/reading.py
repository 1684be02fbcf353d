"""Reads files as documents.

    text files               a document each
    lines of JSON            a document per line: the text in its field (--field)
    .parquet                 a document per row: the text in that column    package pyarrow
    .gz .bz2 .xz .zst        any of these, compressed, except .parquet      .zst: package zstandard

    find(paths) -> files     the files to read, and counts of skipped files
    pieces(file) -> pieces   a file, in order: about a megabyte of lines, or rows
    read(piece) -> documents in any process

data.py doesn't stop at unreadable data: it skips the data, and counts and names the problem in its
summary. With --strict it stops. It omits a text file that can't be read to the end. It keeps the
lines and rows before a problem. This file needs numpy, not jax.
"""

import bz2
import codecs
import collections
import contextlib
import dataclasses
import glob
import gzip
import lzma
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

from zigzag.core.errors import ConfigError, one_line, optional_package
from zigzag.core.parts import part
from zigzag.disk.lines import Record, existing, lacks, parsed, texts_in
from zigzag.disk.weights import weight_in

PIECE = 2**20           # approximate characters in a piece, which ends at a line's end
MOST = 2**26            # characters in a line; a longer line is cut, so it isn't valid JSON

LINES_NAMES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
PACKED_NAMES = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd")
MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst",
         b"\x50\x2a\x4d\x18": "zst"}     # the last is pzstd's, which begins with a frame to skip


@dataclasses.dataclass(frozen=True)
class Options:
    """How to read files."""
    field: str = "text"         # in lines of JSON and in .parquet
    strict: bool = False        # stop at the first problem
    form: str = "text"          # the form of JSON lines, as form_of names it
    weight_field: str = ""      # in lines of JSON and in .parquet


class File(NamedTuple):
    name: str           # relative to the path on the command line, so it's the same on any machine
    path: str
    kind: str           # text, lines or parquet
    packing: str        # the compression, or ''
    size: int


class Trouble(NamedTuple):
    """Why something can't be read."""
    kind: str           # the summary counts troubles by kind
    message: str        # names the location


class Piece(NamedTuple):
    """A part of a file: text, lines of JSON, or rows."""
    file: File
    start: int          # how many of the file's characters, lines or rows come before it
    content: Any        # a text, or a list of rows
    trouble: Trouble | None = None      # why the rest of the file can't be read


class Document(NamedTuple):
    """A document, or the next part of a document that has already begun."""
    begins: bool
    content: Any        # a text, or a line's or row's object
    name: str           # decides whether the document is held out
    where: str          # its location, in words
    weight: Any = None  # from the weight field of its line or row


# -------------------------------------------------------------------------------------------
# Which files

def library_sources() -> list[File]:
    """List the source files of Python's standard library, which every machine already has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if skip.isdisjoint(p.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"this Python has no library sources in {root} to train on: give --data "
                          f"a text file, a folder of text files, or one made by data.py")
    return [File(p.relative_to(root).as_posix(), str(p), "text", "", p.stat().st_size)
            for p in files]


def find(paths: Sequence[str], flag: str = "--data", out: Path | None = None
         ) -> tuple[list[File], dict[str, int]]:
    """Return the files to read under the paths, and {kind of file: how many are skipped}. A path is
    a file, a folder, a pattern such as 'texts/*.txt', or - for standard input, which is saved in
    `out`. The order is fixed, each file appears once, and files in `out` are skipped."""
    files, skipped, seen, own = [], collections.Counter(), set(), out and out.resolve()
    for path in paths:
        for root, p in _under(path, f"{flag} {path}".strip(), out):
            real = p.resolve()
            if real in seen or path != "-" and own in real.parents:
                continue
            seen.add(real)
            try:
                file = _look_at(p, p.relative_to(root).as_posix())
            except OSError as e:
                raise ConfigError(f"{p}: cannot be read ({e.strerror})") from None
            if isinstance(file, File):
                files.append(file)
            else:
                skipped[file] += 1
    if not any(file.size for file in files):
        others = f" (skipped {counted(skipped)})" if skipped else ""
        raise ConfigError(f"{named(flag, paths)}: no text in it{others}; expected text files or "
                          f"folders of them")
    return files, skipped


def named(flag: str, paths: Sequence[str]) -> str:
    """Return the flag and its paths as given on the command line."""
    return " ".join([flag, *map(str, paths)]).strip()


def counted(counts: dict[str, int]) -> str:
    """Format the counts, largest first, as in 1,663 .gz, 30 .png."""
    return ", ".join(f"{n:,} {what}" for what, n in collections.Counter(counts).most_common())


def _under(path, name, spool):
    """For each file at or under a path, yield (the folder its name is relative to, the file)."""
    if not path:
        raise ConfigError(f"{name} '': an empty path; expected a text file or a folder")
    if path == "-":
        if spool is None:
            raise ConfigError(f"{name}: only data.py reads standard input: python data.py - --out "
                              f"DIR")
        spool.mkdir(parents=True, exist_ok=True)
        with open(spool / "stdin", "wb") as f:
            shutil.copyfileobj(sys.stdin.buffer, f, PIECE)
        yield spool, spool / "stdin"
    elif glob.has_magic(str(path)) and not os.path.exists(path):
        # os.path.exists is False for links that form a cycle.
        matches = list(filter(os.path.exists, sorted(glob.glob(str(path), recursive=True))))
        if not matches:
            raise ConfigError(f"{name}: no file matches it")
        for match in matches:
            yield from _under(match, name, None)
    elif is_prepared(path := existing(path, name)):
        raise ConfigError(f"{name} was made by data.py, so its text is already encoded; give it to "
                          f"train.py as --data")
    elif path.is_dir():
        for file in _walk(path):
            yield path, file
    else:
        yield path.parent, path


def _walk(folder):
    """List the files under a folder in a fixed order, skipping hidden files. Follow links, but
    visit each folder only once."""
    found, seen = [], set()
    for root, folders, names in os.walk(folder, followlinks=True):
        is_new = (real := os.path.realpath(root)) not in seen
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        found += (Path(root, name) for name in names if is_new and not name.startswith("."))
    return sorted(filter(Path.is_file, found))


def is_prepared(folder: Path) -> bool:
    """Return whether data.py made a folder. A folder of texts may have an unrelated data.json."""
    path = folder / "data.json"
    return path.is_file() and b'"tokenizer"' in path.read_bytes()


def _look_at(path, name):
    """Return the File at a path or, if we skip it, the kind to count it under in the summary."""
    with open(path, "rb") as f:
        begin, size = f.read(8), os.fstat(f.fileno()).st_size
    if begin.startswith(b"PAR1"):
        return File(name, str(path), "parquet", "", size)
    packing = next((kind for magic, kind in MAGIC.items() if begin.startswith(magic)), "")
    inner = Path(name)
    if packing and inner.suffix in PACKED_NAMES:
        inner = inner.with_suffix("")
    suffix, file = inner.suffix.lower(), File(name, str(path), "lines", packing, size)
    may_be_lines = suffix == ".json" or name == "stdin"
    sample = _beginning(file, PIECE if may_be_lines else 8192)
    if "\0" in sample[:8192]:
        return path.suffix.lower() or "without a suffix"
    if suffix == ".json" and sample.lstrip().startswith("["):
        return ".json with an array (make each entry a line: jq -c '.[]')"
    if suffix in LINES_NAMES or may_be_lines and _has_objects(sample, 2 - (name == "stdin")):
        return file
    return file._replace(kind="text")


def _beginning(file, size):
    """Return a file's first characters, or what we can unpack (`pieces` reports any error)."""
    text = ""
    with contextlib.suppress(Exception):
        for part in _decoded(file, size):
            text += part
            if len(text) >= size:
                break
    return text


def _has_objects(text, count):
    """Return whether each of the first `count` lines is a JSON object."""
    with contextlib.suppress(ConfigError):
        return len([parsed(line) for line in text.split("\n")[:count]]) == count
    return False


# -------------------------------------------------------------------------------------------
# Pieces of files

def pieces(file: File, options: Options) -> Iterator[Piece]:
    """Yield a file's pieces in order. They depend only on the file and the options."""
    start = 0
    try:
        for content in (_rows if file.kind == "parquet" else _texts)(file, options):
            yield Piece(file, start, content)
            start += content.count("\n") if file.kind == "lines" else len(content)
    except ConfigError:
        raise
    except Exception as e:      # each library raises different errors
        kind, why = "cut short or damaged", one_line(e)
        if isinstance(e, UnicodeDecodeError):
            near = bytes(e.object[max(e.start - 16, 0):e.end])
            kind, why = "not UTF-8", f"{near!r}; iconv converts it"
        elif isinstance(e, LookupError):
            kind = f"without the column {options.field!r}"
        kept = f"; the text before {place(file, start)} is kept" if start else ""
        yield Piece(file, start, "", Trouble(kind, f"{file.path}: {kind} ({why}){kept}"))


def _texts(file, _):
    """Yield a file's text in pieces of whole lines."""
    if file.kind == "text" and (file.packing or file.size > PIECE):
        for _ in _decoded(file, PIECE):     # fail now if the text can't be read to its end
            pass
    rest = ""
    try:
        for text in _decoded(file, PIECE):
            rest += text
            while len(rest) > PIECE:
                end = rest.find("\n", PIECE) + 1
                if not end and len(rest) <= MOST:
                    break
                end = end or len(rest)
                yield rest[:end]
                rest = rest[end:]
    except Exception:
        if file.kind == "lines":
            yield rest[:rest.rfind("\n") + 1]
        raise
    yield rest


def _decoded(file, size):
    """Yield a file's text as it is read, without a byte order mark. In lines of JSON, invalid bytes
    become lone surrogates, so that only their line is rejected."""
    errors = "surrogateescape" if file.kind == "lines" else "strict"
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    with open(file.path, "rb") as raw:
        if file.packing == "zst":
            parts = _zstd(raw)
        else:
            stream = UNPACKED[file.packing](raw) if file.packing else raw
            parts = iter(lambda: stream.read1(size), b"")
        for part in parts:
            yield decoder.decode(part)
    yield decoder.decode(b"", True)


UNPACKED = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}


def _zstd(raw):
    """Yield the decompressed content of a file of zstd frames."""
    package = optional_package("zstandard", f"{raw.name} (zstd)")
    frames = package.ZstdDecompressor(max_window_size=2**31)        # for zstd --long=31
    decoder, chunk = frames.decompressobj(), b""
    while chunk := chunk or raw.read(2**16):
        if decoder.eof:
            decoder = frames.decompressobj()
        yield decoder.decompress(chunk)
        chunk = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise EOFError("it ends in the middle")


def _rows(file, options):
    """Yield a .parquet file's rows, in lists of about a megabyte of text."""
    table = optional_package("pyarrow.parquet", file.path).ParquetFile(file.path)
    names = table.schema_arrow.names
    if options.field not in names:
        raise LookupError(lacks(options.field, names))
    rows, size = [], 0
    columns = [name for name in names if name in (options.field, options.weight_field)]
    for batch in table.iter_batches(64, columns=columns):
        for row in batch.to_pylist():
            rows.append(row)
            size += len(str(row[options.field]))
            if size >= PIECE:
                yield rows
                rows, size = [], 0
    yield rows


# -------------------------------------------------------------------------------------------
# Documents

def read(piece: Piece, options: Options) -> Iterator[Document | Trouble]:
    """Yield a piece's documents, or parts of them, and a Trouble for each that can't be read."""
    file = piece.file
    if piece.trouble:
        yield piece.trouble
    elif file.kind == "text":
        yield Document(piece.start == 0, piece.content, file.name, file.path)
    else:
        for number, row in _numbered(piece):
            yield _document(file, number, row, options)


def _numbered(piece):
    """Return (number, row) for each of a piece's rows, or for each non-empty line."""
    rows = piece.content if piece.file.kind == "parquet" else piece.content.split("\n")
    return ((number, row) for number, row in enumerate(rows, piece.start)
            if isinstance(row, dict) or row.strip())


def place(file: File, number: int) -> str:
    """Describe the location of a row or line; `number` is how many come before it."""
    return f"row {number:,}" if file.kind == "parquet" else f"line {number + 1:,}"


def _document(file, number, row, options):
    """Return the Document in a line or row if its form is `options.form`; otherwise a Trouble."""
    where, is_row = f"{file.path} {place(file, number)}", isinstance(row, dict)
    try:
        content = record = row if is_row else parsed(row)
        if options.form == "text":
            content, = texts_in(record, (options.field,))
        else:
            part("tools.chats", options.form).check_record(record, options.form)
    except ConfigError as e:
        return Trouble(f"{'rows' if is_row else 'lines'} without {options.form}", f"{where}: {e}")
    name = content if options.form == "text" else row.strip()
    return Document(True, content, f"{file.name}:{number}" if is_row else name, where,
                    weight_in(record, options.weight_field))


def form_of(record: Record, field: str) -> str:
    """Return a JSON line's form: text, messages, completion or preference, or '' if none."""
    forms = {"text": {field}, "messages": {"messages"}, "completion": {"prompt", "completion"},
             "preference": {"chosen", "rejected"}}
    return next((form for form, fields in forms.items() if fields <= record.keys()), "")


def examined(files: Sequence[File], options: Options, flag: str) -> Options:
    """Fill in the options from the first megabyte of each file. A file's first example shows its
    form, which all files must share. If no file has weights, weight_field becomes ''."""
    forms, lacking, first, has_examples, has_weights = {}, "", {}, False, False
    for file in files:
        if file.kind == "text":
            forms.setdefault("text", file.path)
            continue
        records = []
        for _, row in _numbered(next(pieces(file, options))):
            with contextlib.suppress(ConfigError):
                records.append(row if isinstance(row, dict) else parsed(row))
        has_weights |= any(weight_in(r, options.weight_field) is not None for r in records)
        if form := next(filter(None, (form_of(r, options.field) for r in records)), ""):
            forms.setdefault(form, file.path)
            has_examples = True
        elif records:
            lacking = lacking or f"{file.path}: {lacks(options.field, records[0])}"
        first = first or (records or [{}])[0]
    if lacking and not has_examples:
        raise ConfigError(f"{lacking} (--field names another)")
    if len(forms) > 1:
        raise ConfigError("a corpus of " + " and ".join(
            f"{form} ({path})" for form, path in forms.items()) + ": give them as several --data "
            "folders made by data.py, with --mix")
    if options.weight_field and not has_weights and not flag:   # any of several --data may have it
        raise ConfigError(f"--weight_field {options.weight_field}: "
                          f"{lacks(options.weight_field, first)}; it works on lines of JSON and "
                          f".parquet")
    return dataclasses.replace(options, form=next(iter(forms), "text"),
                               weight_field=options.weight_field if has_weights else "")
