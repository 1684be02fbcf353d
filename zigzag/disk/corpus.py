"""A corpus: a folder of tokens that data.py makes from text and --data opens.

    prepare     encodes text into a folder
    Corpus      such a folder
    opened      opens the corpus at a path: a folder, or text that it encodes into the run's folder
    Sources     a run's corpora: a single one, or several to mix, and a validation set

    data.json   the tokenizer's kind and digest, counts, and what was skipped
    train.bin   tokens, uint16 (uint32 above 65,536 ids)      train.docs    where documents begin
    held_out.bin, held_out.docs                               *.learned     1: a target (answers)
    unfinished/ an encoding in progress                       *.weights     float32, per token

`prepare` writes data.json last, so a folder that has it is complete. This file doesn't use jax.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, naming, printable
from zigzag.core.files import (
    anyway,
    appears,
    check_can_make,
    check_format,
    check_others,
    digest,
    lock,
    sha256,
    taken_back,
    write_json,
)
from zigzag.core.parts import here, part
from zigzag.disk.encoding import (
    about_learned,
    encode_files,
    sampled_lines,
    what_was_skipped,
)
from zigzag.disk.output import FORMAT, MARKS, SPLITS, Output, mapped, saved_state
from zigzag.disk.packing import Documents
from zigzag.disk.reading import Options, examined, find, library_sources, named
from zigzag.disk.token_files import TokenFiles, token_files
from zigzag.disk.tokenizers import (
    FILES,
    Bytes,
    Pieces,
    Tokenizer,
    copy_files,
    tokenizer_at,
    tokenizer_files,
    tokenizer_of,
    tokenizer_record,
    train_pieces,
)

# {regex for files that an interrupted encoding may leave in a folder: condition on the path}
OF_ENCODING = {"unfinished|stdin": anyway,
               rf"((train|held_out)\..*|data\.json|{'|'.join(map(re.escape, FILES))})(\.part)?":
               lambda path: (path.parent / "unfinished").exists()}


def prepare(paths: Sequence[str], out: str | Path, vocab_size: int = 0,
            tokenizer: Tokenizer | None = None, flag: str = "--data",
            options: Options = Options(), cores: int = 0) -> "Corpus":
    """Encode the text at the paths (default: the source of Python's library) into `out`. Use the
    given tokenizer, train a new one with vocab_size subwords, or use bytes. If the same encoding
    was interrupted there, resume it; if a different one was, start over. Return the Corpus."""
    if "://" in str(out):
        raise ConfigError(f"--out {out}: expected a folder on this machine")
    out, paths = Path(out), here(paths)
    if (out / "data.json").exists():
        raise ConfigError(f"{out} already holds prepared data; give another --out or remove it")
    check_can_make(str(out))
    check_others(out, "--out", "data.py", OF_ENCODING)
    files, skipped = find(paths, flag, out) if paths else (library_sources(), {})
    options = examined(files, options, flag)
    if options.form != "text":
        with naming(files[0].path):
            chats = part("tools.chats", options.form)
            if options.form == "messages":
                chats.template_of(tokenizer.folder if tokenizer else None)
    settings = _settings(files, options, vocab_size, tokenizer)
    with _unfinished(out) as unfinished:
        if saved_state(unfinished).get("settings") != settings:
            (unfinished / "progress.json").unlink(missing_ok=True)
        if vocab_size:
            path = unfinished / Pieces.file
            tokenizer = Pieces(path) if saved_state(unfinished) else train_pieces(
                sampled_lines(files, options), path, vocab_size)
        elif tokenizer and tokenizer.path:
            copy_files(tokenizer, unfinished)
            tokenizer = tokenizer_at(unfinished / tokenizer.file)
        tokenizer = tokenizer or Bytes()
        # The marks file holds weights, or says which tokens are answers. Unweighted text has none.
        marks = "weights" if options.weight_field else "" if options.form == "text" else "learned"
        with Output(unfinished, tokenizer, settings, marks) as output:
            encode_files(files, tokenizer, options, output, cores)
            if not output.count("docs"):
                why = "; ".join(message for _, message in output.state["troubles"].values())
                raise ConfigError(f"{named(flag, paths)}: no readable text in it; {why}")
            record = {"format": FORMAT, **tokenizer_record(tokenizer),
                      "vocab_size": tokenizer.vocab_size, "dtype": output.dtype.name,
                      **output.finish(out, options.form), "files": len(files), "skipped": skipped}
        if options.weight_field:
            record["weights"] = {"field": options.weight_field}
        for split in SPLITS:
            record[split]["digest"] = sha256(out / f"{split}.bin")
            if options.weight_field:
                record[split]["weights"] = sha256(out / f"{split}.weights")
        copy_files(tokenizer, out)
        write_json(out / "data.json", record)
    shutil.rmtree(unfinished)
    (out / "stdin").unlink(missing_ok=True)
    return Corpus(out)


def _settings(files, options, vocab_size, tokenizer):
    """Return a digest of everything that must match for an interrupted encoding to resume."""
    # Standard input is saved to a new file each time, so compare its content, not its date.
    names = [[file.name, file.size, sha256(Path(file.path)) if file.name == "stdin" else
              os.stat(file.path).st_mtime_ns] for file in files]
    everything = [FORMAT, names, vocab_size, vars(dataclasses.replace(options, strict=False))]
    return digest(json.dumps(everything).encode() + b"".join(
        name.encode() + content
        for name, content in tokenizer_files(tokenizer or Bytes()).items()))


@contextlib.contextmanager
def _unfinished(out):
    """Make and lock the folder for an unfinished encoding. Delete it on a ConfigError."""
    part = out / "unfinished"
    part.mkdir(parents=True, exist_ok=True)
    with open(part / "lock", "a") as held:
        try:
            lock(held)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another process encodes into this folder") from None
        except OSError:             # a disk without locks
            pass
        try:
            yield part
        except ConfigError:
            shutil.rmtree(part)
            (out / "stdin").unlink(missing_ok=True)
            raise


class Corpus:
    """A folder made by `prepare`, with .train, .held_out, .tokenizer, .record and .weights.
    .weights is {split: the weight of each token, or None if all are 1}."""

    def __init__(self, folder: str | Path):
        self.folder, self.weights, self.starts = Path(folder), {}, {}
        try:
            self.record = json.loads((self.folder / "data.json").read_text())
            check_format(self.record, FORMAT, f"{self.folder}", "make it again (data.py)")
            for split in SPLITS:
                setattr(self, split, self._numbers(split, "bin", np.dtype(self.record["dtype"])))
                self.starts[split] = self._numbers(split, "docs", np.dtype("uint64"))
                kind = next((kind for kind in MARKS if kind in self.record[split]), None)
                self.weights[split] = kind and self._numbers(split, kind, MARKS[kind])
            train = self.record["train"]
            self.fingerprint = _digest([train[of] for of in ("digest", "weights") if of in train])
            self.tokenizer = tokenizer_of(self.folder, self.record)
        except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"{self.folder} is not a folder made by data.py ({e})") from None

    def _numbers(self, split, kind, dtype):
        """Memory-map a split's file of this kind. Reject a file that doesn't match data.json."""
        file, wanted = self.folder / f"{split}.{kind}", self.record[split]
        found, count = mapped(file, dtype), wanted["documents" if kind == "docs" else "tokens"]
        known = wanted.get("digest" if kind == "bin" else kind)
        if len(found) != count or isinstance(known, str) and sha256(file) != known:
            sizes = f"{count:,} numbers expected, {len(found):,} found"
            raise ConfigError(f"{file} does not match data.json ("
                              f"{sizes if len(found) != count else 'another checksum'}): it was "
                              f"edited or damaged; make the folder again")
        return found

    def documents(self, split: str) -> Documents:
        """Return a split's documents, for --pack documents."""
        return Documents(getattr(self, split), self.starts[split], self.tokenizer.ends[0],
                         self.weights[split], self.tokenizer.vocab_size,
                         not self.is_learned_in_part)

    @property
    def is_learned_in_part(self) -> bool:
        """Whether only some tokens are targets, as in conversations, or prompts and completions."""
        return "learned" in self.record["train"] and self.record.get("form") != "text"

    def __repr__(self) -> str:
        r = self.record
        kind = "bytes" if r["tokenizer"] == "bytes" else f"subwords of {r['tokenizer']}"
        return (f"{self.folder}: {r['train']['tokens']:,} tokens to train on, "
                f"{r['held_out']['tokens']:,} held out; tokens are {kind}, of {r['vocab_size']:,}")


def _digest(digests):
    """Combine several digests; return a single digest unchanged."""
    return digests[0] if len(digests) == 1 else digest(" ".join(digests).encode())


@contextlib.contextmanager
def opened(path: Sequence[str], run: Path, ready: float = 0, tokenizer: Tokenizer | None = None,
           fingerprint: str = "", changes: bool = False, vocab_size: int = 0, name: str = "data",
           flag: str = "--data", options: Options = Options()) -> Iterator["Corpus | TokenFiles"]:
    """Open the corpus that --data (or `flag`) names. Use a folder made by data.py, or token files
    (with `vocab_size` ids), in place. When the run begins or `changes` its data, encode text into
    the run's folder `name`, with the tokenizer (default: bytes). Keep the result only if the run
    begins in the body of the `with`. A resumed run uses its existing corpus, identified by its
    fingerprint. With ready > 0, process 0 has already made the corpus, and it must appear within
    `ready` seconds."""
    changed = run / f"{name}-{fingerprint[:12]}"
    is_changed = changes and ready or (changed / "data.json").exists()
    made = changed if is_changed else run / name
    is_made = not changes and all(
        path.exists() for path in (run / "config.json", made / "data.json"))
    path = path if is_made else here(path)
    given = Path(path[0]) if len(path) == 1 and path[0] else None
    if token_files(path):
        yield TokenFiles(path, vocab_size, tokenizer, flag)
    elif given and (given / "data.json").exists():
        yield Corpus(given)
    elif given and (given / "unfinished").exists():
        raise ConfigError(f"{flag} {given}: an interrupted encoding; run the same data.py command "
                          f"again")
    elif ready or is_made:
        if ready and not appears((made / "data.json").exists, run, ready):
            raise ConfigError(f"--out {run}: this process does not see what process 0 wrote there; "
                              f"give a folder that every process sees")
        yield Corpus(made)
    else:
        with taken_back(run) as put:
            part = run / f"{name}.part"
            fingerprint = _encoded(path, part, tokenizer, flag, options).fingerprint
            # Until config.json says otherwise, the run keeps using the old data.
            yield Corpus(put(part, f"{name}-{fingerprint[:12]}" if changes else name))


def _encoded(paths, part, tokenizer, flag, options):
    """Encode text into the folder `part` and return its corpus. If this is interrupted, running the
    same command again resumes it."""
    if "-" in paths:
        find(["-"], flag)       # raises ConfigError
    if mixed := [one for one in paths if token_files([one])]:
        find([one for one in paths if one not in mixed], flag)      # rejects missing paths first
        raise ConfigError(f"{named(flag, paths)}: has both text and token files "
                          f"({', '.join(mixed)}); give only one kind")
    if tokenizer and tokenizer.kind == "ids":
        raise ConfigError(f"{named(flag, paths)}: text needs a tokenizer, but the token files have "
                          f"none; give only token files")
    if (part / "data.json").exists():       # a killed run left it here, perhaps from other text
        shutil.rmtree(part)
    try:
        return prepare(paths, part, tokenizer=tokenizer, flag=flag, options=options)
    except ConfigError:
        shutil.rmtree(part, ignore_errors=True)
        raise


class Sources:
    """A run's training corpora, plus a separate evaluation corpus if given."""

    def __init__(self, corpora: Sequence["Corpus | TokenFiles"], names: Sequence[str],
                 held_out: "Corpus | TokenFiles | None" = None):
        self.corpora, self.names, self.held_out = corpora, names, held_out
        first = corpora[0]
        everything = [*corpora, held_out] if held_out else corpora
        self.tokenizer, self.record = first.tokenizer, first.record
        for corpus in everything[1:]:
            if _vocabulary(corpus) != _vocabulary(first):
                kinds = [f"{c.tokenizer.kind} of {c.tokenizer.vocab_size}"
                         for c in (corpus, first)]
                raise ConfigError(f"{corpus.folder} has different tokens from {first.folder} "
                                  f"({', '.join(kinds)}): encode both with one tokenizer (data.py "
                                  f"--tokenizer)")
        # What to evaluate on: {the metric's name: [(corpus, split), ...]}.
        self.evaluated = {"": [(held_out, split) for split in SPLITS if len(
            getattr(held_out, split)) > 1]} if held_out else {
            name if len(corpora) > 1 else "": [(corpus, "held_out")]
            for name, corpus in zip(names, corpora)}
        if held_out and not self.evaluated[""]:
            raise ConfigError(f"--held_out {held_out.folder}: fewer than two tokens")
        self.fingerprint = _digest([corpus.fingerprint for corpus in everything])

    @property
    def bytes_per_spelled(self) -> float:
        """Bytes of text divided by the bytes its ids spell. It is 1 unless the tokenizer drops or
        changes some of the text."""
        records = [corpus.record[split] for parts in self.evaluated.values()
                   for corpus, split in parts if "spelled" in corpus.record.get(split, {})]
        spelled = sum(record["spelled"] for record in records)
        return sum(record["bytes"] for record in records) / spelled if spelled else 1.0

    @property
    def is_learned_in_part(self) -> bool:
        return any(corpus.is_learned_in_part for corpus in self.corpora)

    @property
    def prompt_flags(self) -> str:
        """The sample.py flags for a prompt in the same form as this data."""
        if any(corpus.record.get("form") == "messages" for corpus in self.corpora):
            return '--chat --prompt "..."'
        return '--prompt "5 7"' if self.tokenizer.kind == "ids" else '--prompt "..."'

    def described(self, length: int) -> str:
        """Return the lines to print when a run begins, for rows of `length` tokens."""
        lines = []
        for corpus in self.corpora:
            lines.append(str(corpus))
            lines += [f"skipped {line}" for line in what_was_skipped(corpus.record) if line]
            lines += about_learned(corpus.record)
            if corpus.is_learned_in_part:
                lines += _answers(corpus, length)
        if self.held_out:
            lines.append(f"evaluated on {self.held_out}")
        return "\n         ".join(lines)


def _answers(corpus, length):
    """Return lines that say how many conversations are truncated, and that show the first, with its
    answers in [[ ]]."""
    documents = corpus.documents("train")
    lengths = documents.lengths(np.arange(len(documents)))
    cut, end, text = int((lengths > length).sum()), min(int(lengths[0]), length), ""
    learned = documents.weights[:end] > 0
    edges = np.flatnonzero(np.diff(learned)) + 1
    for ids, is_answer in zip(np.split(documents.tokens[:end], edges), learned[[0, *edges]]):
        part = corpus.tokenizer.spelled(ids.tolist())
        text += f"[[{part}]]" if is_answer else part
    of = f"{len(documents):,} conversations, {cut:,} of them longer than {length:,} tokens "
    return [*([f"{of}(--seq_len) and cut there"] if cut else []),
            *("| " + part for part in printable(text).strip().split("\n"))]


def _vocabulary(corpus):
    return corpus.tokenizer.vocab_size, corpus.record.get("tokenizer_sha256", corpus.tokenizer.kind)


@contextlib.contextmanager
def opened_sources(paths: Sequence[str], mixed: bool, held_out: Sequence[str], run: Path,
                   ready: float = 0, tokenizer: Tokenizer | None = None, fingerprint: str = "",
                   changes: bool = False, vocab_size: int = 0, weight_field: str = "",
                   field: str = "text") -> Iterator[Sources]:
    """Open the --data and --held_out corpora with `opened`. --data is a single corpus of all its
    paths or, if `mixed`, a corpus per path."""
    groups = [[path] for path in paths] if mixed else [list(paths)]
    options = Options(field, weight_field=weight_field)
    if changes and len(groups) + bool(held_out) > 1:
        raise ConfigError("--change data needs a run with one source and no --held_out; start a "
                          "new run (--init_from keeps its weights)")
    with contextlib.ExitStack() as stack:
        def open_one(paths, tokenizer, name, flag="--data"):
            return stack.enter_context(opened(paths, run, ready, tokenizer, fingerprint, changes,
                                              vocab_size, name, flag, options))

        corpora = [open_one(group, tokenizer, f"data{i or ''}") for i, group in enumerate(groups)]
        other = open_one(held_out, tokenizer or corpora[0].tokenizer, "held_out",
                         "--held_out") if held_out else None
        fields = [corpus.record.get("weights", {}).get("field", "") for corpus in corpora]
        if weight_field and weight_field not in fields:
            raise ConfigError(f"--weight_field {weight_field}: has no effect on "
                              f"{' '.join(paths) or 'these data'}, which has no lines of JSON with "
                              f"that field; leave it out, or give it to data.py")
        if field != Options.field and all(Path(c.folder).parent != run for c in corpora):
            raise ConfigError(f"--field {field}: has no effect on {' '.join(paths)}, which holds "
                              f"tokens; leave it out")
        first = [Path(group[0] if group else "") for group in groups]
        names = [path.name if path.is_dir() else path.stem for path in first]
        yield Sources(corpora, [f"{name}_{i}" if names.count(name) > 1 else name
                                for i, name in enumerate(names)], other)
