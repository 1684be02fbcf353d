"""Files to documents.

    text files               one document each
    lines of JSON            one document a line: the text in its field (--field)
    .parquet                 one document a row: the text in that column    package pyarrow
    .gz .bz2 .xz .zst        of any of these but .parquet                   .zst: package zstandard

    find(paths) -> files     what there is to read, and what was skipped
    tasks(file) -> tasks     a file in pieces of about a megabyte, which depend on nothing else
    read(task) -> documents  in any process

What cannot be read does not stop a corpus: it is skipped, counted, and named in the summary
(--strict stops there). This file needs numpy, not jax.
"""

import bz2
import codecs
import contextlib
import dataclasses
import functools
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shutil
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Iterator, NamedTuple, Sequence

from zigzag.core.errors import ConfigError, did_you_mean, human_bytes, one_line, optional_package
from zigzag.disk.chats import check_record, form_of
from zigzag.disk.examples import existing, lacks, texts_of
from zigzag.disk.weights import weight_in

PIECE = 2**20           # bytes of a task, about: a task ends at the end of a line
MOST = 2**26            # bytes of a line: a longer line of JSON is skipped, one of text is cut
# Text that is compressed more than this is no text. (Prose 3 to 5 times, logs up to 50 times.)
BOMB_RATIO, BOMB_BYTES = 200, 2**27

PACKED_NAMES = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd")
MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst",
         b"\x50\x2a\x4d\x18": "zst"}     # (the last: a frame to skip, with which pzstd begins)
LINES_NAMES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
# How a text in UTF-16 or UTF-32 begins. (UTF-32's mark begins with UTF-16's.)
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
BROKEN = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to read."""
    field: str = "text"         # of lines of JSON and of .parquet
    encoding: str = "utf-8"     # of text files
    strict: bool = False        # stop at the first thing that cannot be read
    form: str = "text"          # what lines of JSON are, by chats.form_of
    weight_field: str = ""      # of lines of JSON and of .parquet


class File(NamedTuple):
    name: str           # relative to the path that was given: it does not depend on the machine
    path: str
    kind: str           # text, lines or parquet
    packing: str        # '', or how it is compressed
    size: int


class Trouble(NamedTuple):
    """Why something cannot be read."""
    kind: str               # what the summary counts
    message: str            # with the place
    drops: bool = False     # whether the whole document is left out, with what came before


class Task(NamedTuple):
    """A piece of a file: bytes start to stop of it, or `content`."""
    file: File
    start: int          # (in a compressed file, of the text in it)
    stop: int
    content: Any = None         # bytes, or a list of texts; None: read them from the file
    position: int = 0           # how much of the file has been read after this task
    problem: Trouble | None = None      # why there is no content


class Document(NamedTuple):
    """A document, or the next part of the one that has begun."""
    begins: bool
    text: Any           # str, or a line's dict
    where: str          # its name, by which it is held out or not
    problem: Trouble | None = None      # why it cannot be read
    weight: Any = None  # what its line or row has in the field of weights
    at: int = 0         # the first byte of its line, or its row


class Found(NamedTuple):
    files: list[File]
    skipped: dict[str, int]     # {kind of file: how many}


# -------------------------------------------------------------------------------------------
# Which files

def library_sources() -> Found:
    """The source of Python's standard library: a corpus that every machine already has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if skip.isdisjoint(p.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"this Python has no library sources in {root} to learn from: give "
                          f"--data a text file, a folder of text files, or one made by data.py")
    return Found([File(p.relative_to(root).as_posix(), str(p), "text", "", p.stat().st_size)
                  for p in files], {})


def find(paths: Sequence[str], flag: str = "--data", out: Path | None = None,
         options: Options = Options()) -> Found:
    """The files to read under the paths: files, folders, patterns such as 'texts/*.txt', and - for
    the standard input, which is kept in `out`. In a fixed order, each once, without what is in
    `out`."""
    files, skipped, seen, own = [], {}, set(), out and out.resolve()
    for path in paths:
        root, found = _under(path, flag, out)
        for p in found:
            real = p.resolve()
            if real in seen or path != "-" and own in real.parents:
                continue
            seen.add(real)
            try:
                file = _look_at(p, p.relative_to(root).as_posix(), options)
            except OSError as e:
                raise ConfigError(f"{p}: cannot be read ({e.strerror})") from None
            if isinstance(file, File):
                files.append(file)
            else:
                skipped[file] = skipped.get(file, 0) + 1
    if not any(file.size for file in files):
        made = ", or one folder made by data.py" if flag == "--data" else ""
        name = " ".join([flag, *map(str, paths)]).strip()
        others = f" (skipped {counted(skipped)})" if skipped else ""
        raise ConfigError(f"{name}: no text in it{others}; expected text files or folders of "
                          f"them{made}")
    return Found(files, skipped)


def counted(counts: dict[str, int]) -> str:
    """The counts as text, largest first: 1,663 .gz, 30 .png."""
    return ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items(), key=lambda x: -x[1]))


def _under(path, flag, spool):
    """(the folder that names are relative to, the files at or under a path)."""
    if not path:
        raise ConfigError(f"{flag} '': an empty path; expected a text file or a folder".strip())
    name = f"{flag} {path}".strip()
    if path == "-":
        if spool is None:
            raise ConfigError(f"{name}: the standard input is read by data.py: python data.py - "
                              f"--out DIR")
        try:
            spool.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"--out {spool}: {e.strerror}") from None
        with open(spool / "stdin", "wb") as f:
            shutil.copyfileobj(sys.stdin.buffer, f, PIECE)
        return spool, [spool / "stdin"]
    path, text = Path(path), str(path)
    if _is_prepared(path):
        how = ("give it alone, or --weights to mix several" if flag == "--data" else
               f"its text is encoded already; train on it by python train.py --data {path}")
        raise ConfigError(f"{name} was made by data.py: {how}")
    if glob.has_magic(text) and not os.path.exists(text):
        found = sorted(map(Path, glob.glob(text, recursive=True)))
        if "**" not in text:        # (which matches what is in folders, too)
            found = [p for match in found for p in (_walk(match) if match.is_dir() else [match])]
        root = Path(text[:min(i for i, c in enumerate(text) if c in "*?[")])
        root = root if text[len(str(root)):len(str(root)) + 1] == os.sep else root.parent
        if not found:
            raise ConfigError(f"{name}: no file matches it")
    else:
        existing(path, name)
        root, found = (path.parent, [path]) if path.is_file() else (path, _walk(path))
    is_hidden = [any(part.startswith(".") for part in p.relative_to(root).parts) for p in found]
    return root, [p for p, hidden in zip(found, is_hidden) if p.is_file() and not (
        hidden and p != path)]


def _walk(folder):
    """The files under a folder, in a fixed order. Links are followed, to each folder once."""
    found, seen = [], set()
    for root, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += (Path(root, name) for name in names)
    return sorted(found)


def _is_prepared(folder):
    """Whether a folder was made by data.py. (A folder of texts may have a data.json, too.)"""
    try:
        return "tokenizer" in json.loads((folder / "data.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _look_at(path, name, options):
    """The File at a path, or the kind that it is skipped as."""
    encoding = options.encoding if _is_recoded(options) else ""
    with open(path, "rb") as f:
        begin, size = f.read(8192), os.fstat(f.fileno()).st_size
    packing = next((kind for magic, kind in MAGIC.items() if begin.startswith(magic)), "")
    if begin.startswith(b"PAR1"):
        return File(name, str(path), "parquet", "", size)
    inner = Path(name)
    if packing:
        inner = inner.with_suffix("") if inner.suffix in PACKED_NAMES else inner
        begin = _beginning(path, packing, 2**20)
    suffix = inner.suffix.lower()
    if not packing and (suffix == ".json" or name == "stdin"):
        begin = _beginning(path, "", 2**20)
    sample = begin[:8192]
    if encoding:        # (UTF-16 has zeros)
        sample = sample.decode(encoding, errors="ignore").encode(errors="ignore")
    if b"\0" in sample:
        kind = path.suffix.lower() or "without a suffix"
        named = next((name for mark, name in MARKS.items() if begin.startswith(mark)), "")
        if named and not encoding:
            kind += f" in {named} (data.py --encoding {named})"
        return kind
    if suffix == ".json" and _is_array(begin, options):
        return ".json with an array (make each entry a line: jq -c '.[]')"
    is_lines = suffix in LINES_NAMES or (
        suffix == ".json" or name == "stdin") and _has_objects(begin, 2 - (name == "stdin"))
    return File(name, str(path), "lines" if is_lines else "text", packing, size)


def _has_objects(begin, count):
    """Whether each of the first `count` lines is an object of JSON."""
    lines = begin.split(b"\n")[:count]
    try:
        return len(lines) == count and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _is_array(begin, options):
    """Whether it is an array of what could be lines of JSON: conversations, or texts."""
    text = begin.decode(errors="ignore").removeprefix("\ufeff").lstrip()
    try:
        first, _ = json.JSONDecoder().raw_decode(text[1:].lstrip())
    except (ValueError, RecursionError):
        return False
    return text.startswith("[") and isinstance(first, dict) and _is_example(first, options)


def _is_example(record, options):
    return options.field in record or form_of(record, options.field) != "text"


def _beginning(path, packing, size):
    """The first bytes of the content of a file; nothing if they cannot be unpacked."""
    with open(path, "rb") as raw:
        try:
            return next(_unpacked(raw, packing, size), b"")[:size]
        except BROKEN:          # (`tasks` says so)
            return b""


def _unpacked(raw: BinaryIO, packing: str, size: int) -> Iterator[bytes]:
    """The content of an open file, in blocks of at least `size` bytes but the last. If it breaks
    off, what came before is a block."""
    if packing == "zst":
        read = _zstd(raw, size).__next__
    else:
        stream = raw if not packing else {
            "gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}[packing](raw, "rb")
        read = functools.partial(stream.read1, size)
    while True:
        parts, count = [], 0
        try:
            while count < size and (part := read()):
                parts.append(part)
                count += len(part)
        except StopIteration:
            pass
        except BROKEN:
            yield b"".join(parts)
            raise
        if not parts:
            return
        yield b"".join(parts)


def _zstd(raw, size):
    """The content of a file of zstd frames."""
    package = optional_package("zstandard", f"{raw.name} (zstd)")
    frames = package.ZstdDecompressor(max_window_size=2**31)        # (zstd --long=31)
    decoder = frames.decompressobj()
    try:
        while chunk := raw.read(2**16):
            while chunk:
                if decoder.eof:
                    decoder = frames.decompressobj()
                if content := decoder.decompress(chunk):
                    yield from (content[i:i + size] for i in range(0, len(content), size))
                chunk = decoder.unused_data if decoder.eof else b""
    except package.ZstdError as e:
        raise ValueError(str(e)) from None
    if not decoder.eof:
        raise EOFError("it ends in the middle")


# -------------------------------------------------------------------------------------------
# Pieces of files

def tasks(file: File, options: Options) -> Iterator[Task]:
    """A file as tasks, in order. They follow from the file and the options alone."""
    if file.kind == "parquet":
        yield from _rows(file, options)
    elif file.packing or _is_recoded(options):
        yield from _streamed(file, options)
    else:
        with open(file.path, "rb") as f:
            start = 0
            while start < file.size or start == 0:
                f.seek(min(start + PIECE, file.size))
                stop = _line_end(f, start, file)
                yield Task(file, start, stop, position=stop)
                start = max(stop, start + 1)


def _is_recoded(options):
    try:
        b"".decode(options.encoding)
        codecs.getincrementaldecoder(options.encoding)()
        return codecs.lookup(options.encoding).name != "utf-8"
    except (LookupError, ValueError, TypeError):
        raise ConfigError(f"--encoding {options.encoding}: not an encoding that Python knows, such "
                          f"as latin-1, utf-16, cp1252 or shift_jis") from None


def _line_end(f, start, file):
    """The end of the line at which f stands; of a text file without one, where it may be cut."""
    while piece := f.readline(PIECE):
        if piece.endswith(b"\n"):
            break
        if file.kind == "text" and f.tell() - start >= MOST:
            end = f.tell()
            return end - _broken_end(piece)
    return f.tell()


def _broken_end(raw):
    """The number of bytes at the end of `raw` that begin a character and do not end it."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < need else 0
        if byte < 0x80:
            return 0
    return 0


def _streamed(file, options):
    """The tasks of a file that has to be read from its beginning to its end."""
    rest, start, is_long, skipped = b"", 0, False, 0     # (is_long: in a line that is too long)
    with open(file.path, "rb") as raw:
        try:
            for block in _blocks(file, options, raw):
                lines, newline, after = (rest + block).rpartition(b"\n")
                if len(after) > MOST:
                    cut = len(after) - _broken_end(after) if file.kind == "text" else 0
                    lines, newline, after = lines + newline + after[:cut], b"", after[cut:]
                    if not cut:         # (a line of JSON, which is not kept)
                        skipped, after, is_long = skipped + len(after), b"", True
                if is_long and newline:
                    first, _, lines = lines.partition(b"\n")
                    yield Task(file, start, start, problem=_too_long(file, start))
                    start, skipped, is_long = start + skipped + len(first) + 1, 0, False
                    newline = newline if lines else b""
                content = lines + newline
                if content:
                    yield Task(file, start, start + len(content), content, raw.tell())
                start, rest = start + len(content), after
            if is_long:
                yield Task(file, start, start, problem=_too_long(file, start))
            elif rest or start == 0:
                yield Task(file, start, start + len(rest), rest, raw.tell())
        except UnicodeDecodeError as e:
            kind = f"not {options.encoding}"
            yield _broken(file, start, f"{kind} after {start:,} bytes of text ({e.reason})", kind,
                          drops=file.kind == "text")
        except BROKEN as e:
            if isinstance(e, ConfigError):
                raise
            rest = rest[:len(rest) - _broken_end(rest)]
            if file.kind == "text" and rest:        # (half a line of JSON is nothing)
                yield Task(file, start, start + len(rest), rest, file.size)
                start += len(rest)
            yield _broken(file, start, f"cut short or damaged after {start:,} bytes of text, which "
                          f"are kept ({one_line(e)})")


def _broken(file, at, why, kind="cut short or damaged", drops=False):
    """The last task of a file that cannot be read from `at` on."""
    return Task(file, at, at, position=file.size, problem=Trouble(
        kind, f"{file.path}: {why}", drops))


def _blocks(file, options, raw):
    """The text of a file in blocks of UTF-8, read through the open file `raw`."""
    decoder = codecs.getincrementaldecoder(options.encoding)() if _is_recoded(options) else None
    total = 0
    for block in _unpacked(raw, file.packing, PIECE):
        total += len(block)
        if total > BOMB_BYTES and total > BOMB_RATIO * max(raw.tell(), 1):
            raise ValueError(f"{human_bytes(total)} of text from {human_bytes(raw.tell())}: not "
                             f"believed")
        yield decoder.decode(block).encode() if decoder else block
    if decoder:
        yield decoder.decode(b"", True).encode()


def _too_long(file, start):
    most = human_bytes(MOST)
    return Trouble(f"lines of more than {most}",
                   f"{file.path} at byte {start:,}: a line of more than {most}")


def _rows(file, options):
    """The tasks of a .parquet file: lists of texts."""
    package = optional_package("pyarrow.parquet", f"{file.path}")
    try:
        table = package.ParquetFile(file.path)
    except Exception as e:      # (pyarrow raises errors of its own)
        yield _broken(file, 0, f"damaged, or no parquet ({one_line(e)})")
        return
    names = table.schema_arrow.names
    if options.field not in names:
        yield _broken(file, 0, f"no column {options.field!r}, it has {', '.join(names)[:80]}; "
                      f"--field names it{did_you_mean(options.field, names)}",
                      f"without the column {options.field!r}")
        return
    row, count = 0, max(table.metadata.num_rows, 1)
    columns = [name for name in names if name in (options.field, options.weight_field)]
    try:
        texts, size = [], 0         # (texts: each with its weight)
        for batch in table.iter_batches(64, columns=columns):
            weights = (batch.column(options.weight_field).to_pylist()
                       if options.weight_field in columns else itertools.repeat(None))
            for value, weight in zip(batch.column(options.field), weights):
                texts.append((_text_of(value), weight))
                size += len(texts[-1][0] or "")
                if size >= PIECE:
                    end = row + len(texts)
                    yield Task(file, row, end, texts, file.size * end // count)
                    texts, size, row = [], 0, end
        yield Task(file, row, row + len(texts), texts, file.size)
    except Exception as e:
        yield _broken(file, row, f"damaged after row {row:,} ({one_line(e)})")


def _text_of(value):
    """The text of a cell of a .parquet; None if it is none, or not UTF-8."""
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return None
    return text if text is None or isinstance(text, str) else repr(text)[:40].encode()


# -------------------------------------------------------------------------------------------
# Documents

def read(task: Task, options: Options) -> Iterator[Document]:
    """The documents of a task, or parts of them. A document that cannot be read has a problem in
    place of text; then the rest of its file, if it is a text file, is no document either."""
    file = task.file
    if task.problem:
        yield Document(task.problem.drops and task.start == 0, "", file.name, task.problem)
    elif file.kind == "parquet":
        for row, (text, weight) in enumerate(task.content, task.start):
            if isinstance(text, str):
                yield Document(True, text, f"{file.name}:{row}", weight=weight, at=row)
            else:
                what = "no text in" if text is None else f"{text.decode()}, which is not text, in"
                yield _unread(task, "rows without a text",
                              f"{file.path} row {row:,}: {what} {options.field!r}")
    elif file.kind == "lines":
        yield from _lines(task, options)
    else:
        raw, problem = task.content, None
        if raw is None:
            with open(file.path, "rb") as f:
                f.seek(task.start)
                raw = f.read(task.stop - task.start)
            if len(raw) != task.stop - task.start:
                raise ConfigError(f"{file.path} has changed while it was read; start again")
        try:
            text = raw.decode()
        except UnicodeDecodeError as e:
            text, problem = "", _not_utf8(task, raw, e.start)
        begins = task.start == 0
        yield Document(begins, text.removeprefix("\ufeff") if begins else text, file.name, problem)


def _unread(task, kind, message):
    """A line or a row that cannot be read."""
    return Document(True, "", task.file.name, Trouble(kind, message))


def _not_utf8(task, raw, at):
    """Why a piece of a text file, with a first wrong byte `at`, leaves out the whole file. One byte
    is enough: the same files are learned with every tokenizer."""
    beyond_ascii = re.findall("[^\0-\x7f]", raw.decode(errors="replace"))
    is_damaged = beyond_ascii.count("\ufffd") < len(beyond_ascii) / 2
    hint = ("most of it is: iconv -c -f utf-8 -t utf-8 drops the rest" if is_damaged else
            "if it is Latin-1: data.py --encoding latin-1")
    return Trouble("not UTF-8", f"{task.file.path}: not UTF-8 at byte {task.start + at:,} ({hint})",
                   drops=True)


def _lines(task, options):
    """The documents of a piece of lines of JSON."""
    start = task.start
    for raw in _raw_lines(task):
        where, at = f"{task.file.path} at byte {start:,}", start
        start += len(raw) if isinstance(raw, bytes) else raw
        if isinstance(raw, int):
            yield _unread(task, *_too_long(task.file, at)[:2])
        elif raw.strip():
            yield _line(task, raw, where, options)._replace(at=at)


def _line(task, raw, where, options):
    """The document of a line: a text, a conversation, or a prompt and its completion."""
    if options.form == "text":
        try:
            text, = texts_of(raw, where, (options.field,))
        except ConfigError as e:
            return _unread(task, "lines without a text", str(e))
        record, name = json.loads(raw) if options.weight_field else {}, text
    else:
        try:
            text = record = json.loads(raw)
            wrong = check_record(record, options.form) if isinstance(record, dict) else "no object"
        except (ValueError, RecursionError):
            wrong = "not JSON"
        if wrong:
            return _unread(task, f"lines without {options.form}", f"{where}: {wrong}")
        name = raw.decode(errors="replace").strip()
    return Document(True, text, name, weight=weight_in(record, options.weight_field))


def form_of_files(files: Sequence[File], options: Options) -> str:
    """What the lines of JSON are, by the first example in each file: they must all be the same."""
    forms, has_example, other = {}, False, None
    for file in files:
        if file.kind != "lines":
            forms.setdefault("text", file.path)
            continue
        for record in _first_objects(file, options):
            if _is_example(record, options):
                forms.setdefault(form_of(record, options.field), file.path)
                has_example = True
                break
            other = other or (file.path, record)
    if other and not has_example:
        path, record = other
        raise ConfigError(f"{path}: {lacks(options.field, record)} (data.py --field names another)")
    if len(forms) > 1:
        raise ConfigError("a corpus of " + " and ".join(
            f"{form} ({path})" for form, path in forms.items()) + ": give them as several --data "
            "folders made by data.py, with --weights")
    return next(iter(forms), "text")


def has_weights(files: Sequence[File], options: Options, flag: str) -> bool:
    """Whether one of the files has the field of weights, in the examples with which it begins. For
    `flag`, where it must have one, it is refused otherwise."""
    field, other = options.weight_field, None
    for file in files:
        records = _first_objects(file, options) if file.kind == "lines" else []
        if file.kind == "parquet":
            package = optional_package("pyarrow.parquet", f"{file.path}")
            with contextlib.suppress(Exception):        # (`_rows` says what is wrong)
                records = [dict.fromkeys(package.read_schema(file.path).names, 1)]
        for record in records:
            if weight_in(record, field) is not None:
                return True
            other = other or (file.path, record)
    if other and flag != "--held_out":
        raise ConfigError(f"{other[0]}: {lacks(field, other[1])} (--weight_field {field})")
    if not flag:
        raise ConfigError(f"--weight_field {field}: is for lines of JSON and .parquet; there are "
                          f"none")
    return False


def place_of(file: File, options: Options, at: int) -> str:
    """A document's place in words: its row, or its line, which begins at byte `at`."""
    if file.kind == "parquet":
        return f"{file.path} row {at:,}"
    line = 1
    with open(file.path, "rb") as raw:
        for block in _blocks(file, options, raw):
            line += block[:at].count(b"\n")
            at -= min(at, len(block))
            if not at:
                break
    return f"{file.path} line {line:,}"


def _first_objects(file, options):
    """The objects of JSON in the first lines of a file. (Other lines are skipped.)"""
    begin = _beginning(file.path, file.packing, PIECE)
    if b"\n" not in begin and len(begin) == PIECE:
        begin = _beginning(file.path, file.packing, MOST)
    text = codecs.getincrementaldecoder(options.encoding)("ignore").decode(begin)
    for line in text.removeprefix("\ufeff").split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _raw_lines(task):
    """The lines of a piece; the length of a line in place of one that is too long."""
    if task.content is not None:
        yield from io.BytesIO(task.content)     # (only \n ends a line)
        return
    with open(task.file.path, "rb") as f:
        f.seek(task.start)
        while (left := task.stop - f.tell()) > 0:
            line = f.readline(min(left, MOST))
            length = len(line)
            while not line.endswith(b"\n") and (left := task.stop - f.tell()) > 0:
                if not line:
                    raise ConfigError(f"{task.file.path} has changed while it was read; start "
                                      f"again")
                line = f.readline(min(left, MOST))
                length += len(line)
            yield line if length == len(line) else length
