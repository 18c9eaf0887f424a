"""Parallel text in, a `datasets.Dataset` with the string columns `source` and `target` out.

    load("data/train", "en", "de")          data/train.en and data/train.de, each plain, .gz, .bz2 or .xz
    load("train.tsv")  load("train.jsonl.gz", "en", "de")  load("memory.tmx", "en", "fr")  load("ui.po", "en", "de")
    load("owner/name", "en", "de")          a data set on the Hugging Face Hub, or a folder that holds one
    load("demo")                            the built-in generated corpus

Text is never changed, reordered or dropped here; only `clean` drops pairs, both sides together, and counts them.
"""

import bz2
import csv
import gettext
import gzip
import hashlib
import json
import logging
import lzma
import re
import zlib
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from xml.etree import ElementTree

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError, DatasetsError

from . import demo_corpus
from .errors import InputError


logger = logging.getLogger(__name__)

SIDES = ("source", "target")
DECOMPRESSORS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load(
    name,
    source_lang=None,
    target_lang=None,
    *,
    split="train",
    references=True,
    streaming=False,
    dataset_config_name=None,
) -> datasets.Dataset | datasets.IterableDataset:
    """Read a corpus: Arrow on disk, memory-mapped and cached under the hash of the files, or lazily when `streaming`.

    `split` and `dataset_config_name` matter to the Hub and the demo. With `references=False` a missing target side is
    no error and the result then has the column `source` only. Raises InputError for whatever the user can mend.
    """
    languages = (source_lang, target_lang)
    if name == "demo":
        return _from_demo(languages, split, streaming)
    if _is_dataset(name, source_lang):
        return _from_hub(str(name), dataset_config_name, split, languages, references, streaming)
    paths = files(name, source_lang, target_lang, references=references)
    if not references:
        references = "target" in next(_pairs(paths, languages, False))
    # Tuples, because `datasets` takes a list among these arguments for shards and would part source from target.
    arguments = {"paths": tuple(paths), "languages": languages, "references": references}
    if streaming:
        return datasets.IterableDataset.from_generator(_pairs, _features(references), gen_kwargs=arguments)
    # The arguments are the key of the cache: the bytes that are read and the code that reads them, rather than dates.
    arguments["hashes"] = tuple(_sha256(path) for path in (*paths, Path(__file__)))
    try:
        return datasets.Dataset.from_generator(_pairs, _features(references), gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise


def files(name, source_lang=None, target_lang=None, *, references=True) -> list[Path]:
    """The files `load` reads for `name`: one, or the two of a prefix; none for the demo and the Hub."""
    if name == "demo" or _is_dataset(name, source_lang):
        return []
    if path := _existing(name):
        if _suffix(path) in READERS:
            return [path]
        raise InputError(f"{path}: unknown kind of file; give a prefix (train for train.en, train.de) or {KINDS}")
    sides = [lang and _existing(f"{name}.{lang}") for lang in (source_lang, target_lang)]
    if not sides[0] or not sides[1] and references:
        raise InputError(_not_found(Path(name).expanduser(), source_lang, target_lang, sides))
    return [path for path in sides if path]


def describe(name, source_lang=None, target_lang=None, *, references=True) -> list[dict]:
    """Name, SHA-256 and line count (None for .parquet) of each file, as the model card states them."""
    facts = []
    for path in files(name, source_lang, target_lang, references=references):
        with _reading(path) as stream:
            lines = None if _suffix(path) == ".parquet" else sum(1 for _ in stream)
        facts.append({"file": path.name, "sha256": _sha256(path), "lines": lines})
    return facts


def splits(name, dataset_config_name=None) -> list[str]:
    """The splits of a data set on the Hub, or of a folder that holds one."""
    try:
        return datasets.get_dataset_split_names(name, dataset_config_name)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(f"{name}: {_one_line(error)}") from error


def clean(pairs, *, deduplicate=False, max_length_ratio=None) -> tuple[datasets.Dataset, dict[str, int]]:
    """Drop the pairs that training cannot use and count them by reason: "empty", "ratio", "duplicate", in this order.

    Empty: a side is blank. Ratio: the characters of the longer side over those of the shorter. Duplicate: the same
    pair came before. Never for evaluation data.
    """
    lengths = (
        np.array([[len(text.strip()) for text in batch[side]] for side in SIDES], np.int32)
        for batch in pairs.iter(batch_size=10_000)
    )
    lengths = np.concatenate([np.zeros((2, 0), np.int32), *lengths], axis=1)
    shorter, longer = lengths.min(axis=0), lengths.max(axis=0)
    empty = shorter == 0
    ratio = ~empty & (longer > shorter * max_length_ratio) if max_length_ratio else np.zeros_like(empty)
    kept = np.flatnonzero(~(empty | ratio))
    counts = {"empty": int(empty.sum()), "ratio": int(ratio.sum()), "duplicate": 0}
    if deduplicate:
        _, first = np.unique(_hashes(pairs, SIDES)[kept], return_index=True)
        counts["duplicate"] = len(kept) - len(first)
        kept = kept[np.sort(first)]
    return pairs if len(kept) == len(pairs) else pairs.select(kept), counts


def overlap(train, held_out) -> np.ndarray:
    """Indices of the `train` pairs whose source sentence occurs in `held_out`, whatever its translation there.

    (A source that training has seen is a leak under any translation.) Compares 64-bit hashes: 8 bytes a pair.
    """
    return np.flatnonzero(np.isin(_hashes(train, ["source"]), _hashes(held_out, ["source"])))


def _hashes(pairs, columns):
    """A 64-bit hash of each pair's texts without the white space around them, shape (N,)."""
    hashes = (
        int.from_bytes(hashlib.blake2b("\n".join(map(str.strip, texts)).encode(), digest_size=8).digest(), "big")
        for batch in pairs.select_columns(list(columns)).iter(batch_size=10_000)
        for texts in zip(*batch.values(), strict=True)
    )
    return np.fromiter(hashes, np.uint64, count=len(pairs))


# --- where a corpus is -----------------------------------------------------------------------------------------------


def _is_dataset(name, source_lang):
    """Whether `name` is a folder, or reads owner/name while there is no folder `owner` here; asks no network."""
    path = Path(name).expanduser()
    if path.is_dir():
        return not (source_lang and _existing(f"{name}.{source_lang}"))
    return bool(HUB_ID.fullmatch(str(name))) and not path.parent.is_dir() and _suffix(path) not in READERS


def _existing(name):
    """The file `name`, or else `name.gz` and so on, or else None."""
    return next((path for end in ("", *DECOMPRESSORS) if (path := Path(f"{name}{end}").expanduser()).is_file()), None)


def _suffix(path):
    """The suffix that names the format: ".tsv" for train.tsv and for train.tsv.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix not in DECOMPRESSORS]
    return suffixes[-1] if suffixes else ""


def _not_found(path, source_lang, target_lang, sides):
    """Why `path` is no prefix of two files, and what there is instead."""
    if not path.parent.is_dir():
        return f"{path}: no such file, and no folder {path.parent}; mend the path"
    beside = sorted(each.name for each in path.parent.iterdir() if each.name.startswith(f"{path.name}."))
    if not beside:
        return f"{path}: no such file, nor any {path.name}.*; mend the path (a Hub data set is named owner/name)"
    there = f"there are {', '.join(beside[:8])}"
    if not (source_lang and target_lang):
        return f"{path}: say which two files with --source_lang and --target_lang; {there}"
    missing = target_lang if sides[0] else source_lang
    return f"{path}.{missing}: no such file, nor compressed; {there}; mend the path, --source_lang or --target_lang"


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- corpora that are no files ---------------------------------------------------------------------------------------


def _from_demo(languages, split, streaming):
    source, target = languages[0] or "en", languages[1] or "de"
    if {source, target} != {"en", "de"}:
        raise InputError(f"demo: English and German, not {source}-{target}; give --source_lang en --target_lang de")
    if split not in demo_corpus.SIZES:
        raise InputError(f"demo: no split {split!r}; it has {', '.join(demo_corpus.SIZES)}")
    english, german = zip(*demo_corpus.generate(split), strict=True)
    texts = {"en": english, "de": german}
    pairs = datasets.Dataset.from_dict({"source": texts[source], "target": texts[target]}, _features(True))
    return pairs.to_iterable_dataset() if streaming else pairs


def _from_hub(name, config, split, languages, references, streaming):
    """Columns or a nested `translation`, as in files; a missing value becomes a blank text, which `clean` counts."""
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
        first = next(iter(rows), {})
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(f"{name}, split {split!r}: {_one_line(error)}") from error
    nested = isinstance(first.get("translation"), dict)
    keys = _keys(name, first["translation"] if nested else first, languages, references)

    def texts(batch):
        columns = {key: [row[key] for row in batch["translation"]] for key in keys.values()} if nested else batch
        return {side: [text or "" for text in columns[key]] for side, key in keys.items()}

    columns = ["translation"] if nested else list(keys.values())
    features = _features("target" in keys)
    return rows.select_columns(columns).map(texts, batched=True, remove_columns=columns, features=features)


def _features(references):
    return datasets.Features({side: datasets.Value("string") for side in SIDES[: 1 + references]})


# --- corpora that are files ------------------------------------------------------------------------------------------
# Each reader yields (place, record): where in the file, and its texts by language, column or key.


def _pairs(paths, languages, references, hashes=()):
    """Yield {"source": ..., "target": ...} in file order; `hashes` only keeps cached versions of a file apart."""
    read = READERS.get(_suffix(paths[0])) if len(paths) == 1 else None
    place = None
    for place, record in read(paths[0], languages) if read else _read_parallel(*paths):
        yield _pair(f"{paths[0]}, {place}", record, languages, references)
    if place is None:
        raise InputError(f"{paths[0]}: empty, it holds no pair; give a file with text")


def _pair(where, record, languages, references):
    """The pair in {"translation": {"en": ..., "de": ...}}, {"en": ..., "de": ...} or {"source": ..., "target": ...}"""
    if not isinstance(record, dict):
        raise InputError(f'{where}: not an object such as {{"source": "...", "target": "..."}}; mend this record')
    record = record["translation"] if isinstance(record.get("translation"), dict) else record
    pair = {side: record[key] for side, key in _keys(where, record, languages, references).items()}
    for side, text in pair.items():
        # Half a surrogate pair, legal in JSON as "\ud800", is no text and has no form in UTF-8.
        if not isinstance(text, str) or not text.isascii() and re.search("[\ud800-\udfff]", text):
            raise InputError(f"{where}: the {side} is {ascii(text):.40}, not text; mend or remove it")
    return pair


def _keys(where, names, languages, references):
    """Which of `names` (columns, keys) hold source and target: the languages, or else "source" and "target"."""
    for source, target in (languages, SIDES):
        if source in names and target in names:
            return {"source": source, "target": target}
        if source in names and not references:
            return {"source": source}
    wanted = SIDES if "source" in names or not all(languages) else languages
    missing = next(name for name in wanted if name not in names)
    remedy = "the columns of both sides must be named as --source_lang and --target_lang say, or source and target"
    raise InputError(f"{where}: no {missing!r} among {', '.join(map(repr, names)) or 'nothing'}; {remedy}")


@contextmanager
def _reading(path):
    """Open a file, compressed or not, as bytes; any failure to read it becomes one line that names it."""
    try:
        with DECOMPRESSORS.get(path.suffix, open)(path, "rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ElementTree.ParseError, pyarrow.ArrowInvalid) as error:
        raise InputError(f"{path}: cannot be read ({_one_line(error)}); is it whole, what its name says?") from error


def _one_line(error):
    return " ".join(str(error).split())


def _lines(path):
    r"""The lines of a text file without their ends, which are "\n" and "\r\n" only.

    Python's text mode also cuts at a lone "\r", and str.splitlines at U+2028, U+0085, "\x0b" and others.
    """
    with _reading(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                found = f"byte 0x{line[error.start]:02x} is not UTF-8"
                remedy = "convert the file, for example with iconv -f ISO-8859-1 -t UTF-8"
                raise InputError(f"{path}, line {number}: {found}; {remedy}") from None
            yield text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _read_parallel(source_path, target_path=None):
    sources, targets = _lines(source_path), _lines(target_path) if target_path else None
    if targets is None:
        yield from ((f"line {number}", {"source": source}) for number, source in enumerate(sources, 1))
        return
    for number, (source, target) in enumerate(zip_longest(sources, targets), 1):
        if source is None or target is None:
            longer = number + sum(1 for _ in chain(sources, targets))
            counts = (longer, number - 1) if target is None else (number - 1, longer)
            found = f"{source_path} has {counts[0]} lines, {target_path} has {counts[1]}, line {number} stands alone"
            raise InputError(f"{found}; give each text and its translation the same line number")
        yield f"line {number}", {"source": source, "target": target}


def _read_tsv(path, languages):
    """Unquoted cells between tabs; a first row that names the columns is a header, else columns 0 and 1 count."""
    rows = ((number, line.split("\t")) for number, line in enumerate(_lines(path), 1))
    number, first = next(rows, (0, []))
    if {*languages, *SIDES}.intersection(first):
        yield from _table(path, first, rows)
    elif number:
        yield from _table(path, SIDES[: len(first)], chain([(number, first)], rows))


def _read_csv(path, languages):
    """RFC 4180: a quoted cell may hold commas, doubled quotes and line ends; the first row names the columns."""
    reader = csv.reader((line + "\n" for line in _lines(path)), strict=True)
    try:
        header = next(reader, [])
        yield from _table(path, header, ((reader.line_num, cells) for cells in reader))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}; mend the quotes, or save it as .tsv") from None


def _table(path, header, rows):
    """A blank row is a blank pair, so that the rows after it keep their place."""
    for number, cells in rows:
        cells = cells if any(cells) else [""] * len(header)
        if len(cells) < len(header):
            raise InputError(f"{path}, line {number}: {len(cells)} columns, line 1 has {len(header)}; mend this line")
        yield f"line {number}", dict(zip(header, cells, strict=False))


def _read_json(path, languages):
    """One object a line, or one array of objects (which is held in memory)."""
    lines = enumerate(_lines(path), 1)
    start, first = next(lines, (1, ""))
    number = start
    try:
        if first.lstrip().startswith("["):
            array = json.loads("\n".join([first, *(line for _, line in lines)]))
            yield from ((f"record {number}", record) for number, record in enumerate(array, 1))
            return
        for number, line in chain([(start, first)], lines):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise InputError(f"{path}, line {line}: {error.msg}; write one JSON object a line, or one array") from None


def _read_parquet(path, languages):
    with _reading(path) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        columns = [name for name in table.schema_arrow.names if name in {"translation", *languages, *SIDES}]
        batches = table.iter_batches(columns=columns or None)
        records = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from ((f"row {number}", record) for number, record in enumerate(records, 1))


def _read_tmx(path, languages):
    """Translation memory: the units that are in both languages."""
    found, pairs, others = {}, 0, 0
    with _reading(path) as stream:
        for event, element in ElementTree.iterparse(stream, ("start", "end")):
            if event == "start" and _tag(element) in ("tmx", "body"):
                parent = element
            if event == "start" or _tag(element) != "tu":
                continue
            unit = dict(_variants(element))
            parent.clear()  # otherwise the parser keeps the whole file
            found |= unit
            pair = {side: _in_language(unit, lang) for side, lang in zip(SIDES, languages, strict=True)}
            if None in pair.values():
                others += 1
            else:
                pairs += 1
                yield f"unit {pairs + others}", pair
    if others and not pairs:
        there = ", ".join(found)
        raise InputError(
            f"{path}: no unit in both --source_lang and --target_lang; give two of its languages: {there}"
        )
    if others:
        logger.warning("%s: left out %d units that lack %s or %s", path, others, *languages)


def _variants(unit):
    """(language, text) of each <tuv>; its attribute was plain `lang` before TMX 1.4."""
    for variant in unit:
        if _tag(variant) == "tuv":
            language = variant.get("{http://www.w3.org/XML/1998/namespace}lang") or variant.get("lang", "")
            yield language, "".join(_segment(seg) for seg in variant if _tag(seg) == "seg")


def _segment(element):
    """The text in a <seg>: <hi> only marks text; <bpt>, <ept>, <it>, <ph> and <ut> hold codes, not text."""
    inner = ((_segment(child) if _tag(child) == "hi" else "") + (child.tail or "") for child in element)
    return (element.text or "") + "".join(inner)


def _tag(element):
    return element.tag.rpartition("}")[2]


def _in_language(unit, wanted):
    return next((text for lang, text in unit.items() if wanted and _agree(lang, wanted)), None)


def _agree(lang, wanted):
    """Equal, or one is the other without region or script: "en" agrees with "EN-us", "zh_CN" not with "zh-Hant"."""
    lang, wanted = (re.split("[-_]", each.lower()) for each in (lang, wanted))
    return lang == wanted or lang[0] == wanted[0] and 1 in (len(lang), len(wanted))


PO_LINE = re.compile(r'(?:(msgctxt|msgid|msgid_plural|msgstr(?:\[\d+\])?)\s*)?"(.*)"')
PO_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def _read_po(path, languages):
    """Gettext catalogue: the finished translations, either way round; of plurals the forms for one and for many."""
    sides, one, unfinished = SIDES, 0, 0
    for place, entry in _po_entries(path):
        forms = [text for field, text in entry.items() if field.startswith("msgstr")]
        if not entry["msgid"]:
            header = dict(line.split(": ", 1) for line in forms[0].split("\n") if ": " in line)
            sides = _po_sides(path, header.get("Language"), *languages)
            # (Files made from a template may still say "plural=EXPRESSION".)
            plural = re.search(r"plural\s*=\s*([^;A-Z]+)", header.get("Plural-Forms", ""))
            one = gettext.c2py(plural[1])(1) if plural else 0
            continue
        pairs = [(entry["msgid"], forms[min(one, len(forms) - 1)])]
        if "msgid_plural" in entry:
            pairs.append((entry["msgid_plural"], forms[-1]))
        for pair in pairs:
            if entry.get("fuzzy") or not pair[1]:
                unfinished += 1
            else:
                yield place, dict(zip(sides, pair, strict=True))
    if unfinished:
        logger.warning("%s: left out %d texts whose translation is missing or marked fuzzy", path, unfinished)


def _po_sides(path, language, source_lang, target_lang):
    """Which side the originals are on and which the translations, which the header says are in `language`."""
    if not (language and target_lang) or _agree(language, target_lang):
        return SIDES
    if source_lang and _agree(language, source_lang):
        return SIDES[::-1]
    raise InputError(f"{path}: its translations are in {language!r}; give this as --target_lang or --source_lang")


def _po_entries(path):
    """Each entry as {"msgid": ..., "msgstr" or "msgstr[0]": ..., ...}; obsolete ones ("#~") count as comments."""
    entry, field = {}, ""
    for number, line in enumerate(chain(map(str.strip, _lines(path)), ["#"]), 1):
        match = PO_LINE.fullmatch(line)
        if field.startswith("msgstr") and (line.startswith("#") or match and match[1] in ("msgctxt", "msgid")):
            yield f"entry before line {number}", entry
            entry, field = {}, ""
        if line.startswith("#~"):
            entry = {}
        elif line.startswith("#,"):
            entry["fuzzy"] = "fuzzy" in line
        elif match and (match[1] or field) and match[1] not in entry and ("msgid" in entry or line[:6] != "msgstr"):
            field = match[1] or field
            text = re.sub(r"\\(.)", lambda code: PO_ESCAPES.get(code[1], code[1]), match[2])
            entry[field] = entry.get(field, "") + text
        elif line and not line.startswith("#"):
            raise InputError(f"{path}, line {number}: {line!r:.40} does not belong here; check it with msgfmt -c")
    if "msgid" in entry:
        raise InputError(f"{path}, line {number}: the file ends within an entry; is it whole?")


READERS = {
    ".tsv": _read_tsv,
    ".txt": _read_tsv,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".tmx": _read_tmx,
    ".po": _read_po,
}
KINDS = ", ".join(READERS)
