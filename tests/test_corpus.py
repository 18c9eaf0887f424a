"""Every format in, the same two columns out; what a user can mend is one line that names file, line and remedy."""

import bz2
import gettext
import gzip
import hashlib
import json
import lzma
import os
import socket
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from modeling_vanilla import corpus
from modeling_vanilla.errors import InputError


SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the corpora in ../shared/data")

PAIRS = [("A dog.", "Ein Hund."), ("Two cats.", "Zwei Katzen."), ('"Yes", he said.', "„Ja“, sagte er.")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_prefix(folder, english, german, name="train"):
    write(folder / f"{name}.en", english)
    write(folder / f"{name}.de", german)
    return folder / name


def pairs(data):
    return [(row["source"], row["target"]) for row in data]


def complaint(*args, **kwargs):
    """The message of the InputError that loading raises; always one line."""
    with pytest.raises(InputError) as caught:
        list(corpus.load(*args, **kwargs))
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- formats ---------------------------------------------------------------------------------------------------------


def as_prefix(folder, end):
    for lang, side in (("en", 0), ("de", 1)):
        write(folder / f"data.{lang}{end}", "".join(pair[side] + "\n" for pair in PAIRS))
    return folder / "data"


def as_tsv(folder, end):
    return write(folder / f"data.tsv{end}", "".join("\t".join(pair) + "\n" for pair in PAIRS))


def as_csv(folder, end):
    rows = ['"' + '","'.join(text.replace('"', '""') for text in pair) + '"\n' for pair in PAIRS]
    return write(folder / f"data.csv{end}", "".join(["en,de\n", *rows]))


def as_nested_jsonl(folder, end):
    rows = [json.dumps({"id": 7, "translation": {"de": target, "en": source}}) for source, target in PAIRS]
    return write(folder / f"data.jsonl{end}", "\n".join(rows))


def as_flat_json_array(folder, end):
    return write(folder / f"data.json{end}", json.dumps([{"en": en, "de": de} for en, de in PAIRS], indent=1))


def as_tmx(folder, end):
    units = "".join(
        f'<tu><tuv xml:lang="{lang_1}"><seg>{en}</seg></tuv><tuv xml:lang="de-DE"><seg>{de}</seg></tuv></tu>'
        for (en, de), lang_1 in zip(PAIRS, ("en", "EN-us", "en"), strict=True)
    )
    return write(folder / f"data.tmx{end}", f'<tmx version="1.4"><header/><body>{units}</body></tmx>')


def as_po(folder, end):
    header = 'msgid ""\nmsgstr "Language: de\\n"\n\n'
    entries = [f"msgid {json.dumps(en)}\nmsgstr {json.dumps(de, ensure_ascii=False)}\n" for en, de in PAIRS]
    return write(folder / f"data.po{end}", header + "\n".join(entries))


FORMATS = [as_prefix, as_tsv, as_csv, as_nested_jsonl, as_flat_json_array, as_tmx, as_po]


@pytest.mark.parametrize("make", FORMATS)
def test_every_format_gives_the_same_pairs_and_exactly_two_string_columns(make, tmp_path):
    data = corpus.load(make(tmp_path, ""), "en", "de")
    assert pairs(data) == PAIRS
    assert data.features == {"source": datasets.Value("string"), "target": datasets.Value("string")}


@pytest.mark.parametrize("make", [make for make in FORMATS if make is not as_tsv])
def test_the_languages_choose_the_direction(make, tmp_path):
    assert pairs(corpus.load(make(tmp_path, ""), "de", "en")) == [pair[::-1] for pair in PAIRS]


@pytest.mark.parametrize("make", FORMATS)
def test_compressed_files_are_read_under_either_name(make, tmp_path):
    name = make(tmp_path, "")
    for path in list(tmp_path.glob("data.*")):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert pairs(corpus.load(name, "en", "de")) == PAIRS
    if make is not as_prefix:
        assert pairs(corpus.load(f"{name}.gz", "en", "de")) == PAIRS


def test_the_two_sides_of_a_prefix_may_be_compressed_differently(tmp_path):
    write(tmp_path / "train.en.bz2", bz2.compress(b"a\n"))
    write(tmp_path / "train.de.xz", lzma.compress(b"b\n"))
    assert pairs(corpus.load(tmp_path / "train", "en", "de")) == [("a", "b")]


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_nested_and_flat_with_other_columns(nested, tmp_path):
    rows = [{"en": source, "de": target} for source, target in PAIRS]
    rows = [{"id": n, "translation": row} if nested else {"id": n, **row} for n, row in enumerate(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert pairs(corpus.load(tmp_path / "train.parquet", "en", "de")) == PAIRS
    assert "no 'fr' among 'en'" in complaint(tmp_path / "train.parquet", "en", "fr")


# --- plain text ------------------------------------------------------------------------------------------------------


def test_only_newline_and_carriage_return_newline_end_a_line(tmp_path):
    odd = "a\u2028b\x0bc\x0cd\x85e\x1cf\rg"
    name = write_prefix(tmp_path, f"{odd}\r\n second \r\nlast", "eins\nzwei\ndrei\r")
    assert pairs(corpus.load(name, "en", "de")) == [(odd, "eins"), (" second ", "zwei"), ("last", "drei\r")]


def test_a_byte_order_mark_is_dropped_at_the_start_and_kept_elsewhere(tmp_path):
    name = write_prefix(tmp_path, "\ufeffone\n\ufefftwo\n", "eins\nzwei\n")
    assert pairs(corpus.load(name, "en", "de")) == [("one", "eins"), ("\ufefftwo", "zwei")]


def test_blank_lines_stay_in_their_place(tmp_path):
    expected = [("a", "b"), ("", "c"), ("", ""), ("d", " ")]
    assert pairs(corpus.load(write_prefix(tmp_path, "a\n\n\nd\n", "b\nc\n\n \n"), "en", "de")) == expected
    assert pairs(corpus.load(write(tmp_path / "x.tsv", "a\tb\n\tc\n\nd\t \n"))) == expected
    assert pairs(corpus.load(write(tmp_path / "x.csv", "source,target\na,b\n,c\n\nd, \n"))) == expected


@pytest.mark.parametrize(("lines", "counts"), [((5, 3), (5, 3)), ((2, 4), (2, 4)), ((0, 2), (0, 2))])
@pytest.mark.parametrize("streaming", [False, True])
def test_unequal_line_counts_name_both_files_both_counts_and_the_line(lines, counts, streaming, tmp_path):
    name = write_prefix(tmp_path, "x\n" * lines[0], "y\n" * lines[1])
    message = complaint(name, "en", "de", streaming=streaming)
    assert f"{name}.en has {counts[0]} lines, {name}.de has {counts[1]}, line {min(counts) + 1} stands" in message


def test_bytes_that_are_not_utf8_name_file_line_and_byte(tmp_path):
    name = write_prefix(tmp_path, "a\nb\n", b"gr\xfcn\n")
    assert f"{name}.de, line 1: byte 0xfc is not UTF-8; convert" in complaint(name, "en", "de")


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    assert "train.en: empty" in complaint(write_prefix(tmp_path, "", ""), "en", "de")
    for name in ("x.tsv", "x.csv", "x.jsonl", "x.po"):
        assert f"{name}: empty" in complaint(write(tmp_path / name, ""), "en", "de")
    assert "x.tmx: cannot be read" in complaint(write(tmp_path / "x.tmx", ""), "en", "de")
    assert "x.csv: empty" in complaint(write(tmp_path / "x.csv", "en,de\n"), "en", "de")


def test_a_truncated_archive_is_named(tmp_path):
    whole = gzip.compress(os.urandom(1000).hex().encode())
    path = write(tmp_path / "x.tsv.gz", whole[:-20])
    assert f"{path}: cannot be read" in complaint(path)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_quote_mark_in_tsv_is_text_and_the_same_content_as_csv_is_equal(tmp_path):
    expected = [("a", "1"), ('" b', "2"), ("c", "3"), ('d "e" "', "4"), ("f", "5"), ("g", "6")]
    tsv = write(tmp_path / "x.tsv", "".join(f"{source}\t{target}\n" for source, target in expected))
    quoted = [(source.replace('"', '""'), target) for source, target in expected]
    csv = write(tmp_path / "x.csv", "source,target\r\n" + "".join(f'"{s}",{t}\r\n' for s, t in quoted))
    assert pairs(corpus.load(tsv)) == pairs(corpus.load(csv)) == expected


def test_without_a_header_tsv_columns_0_and_1_count(tmp_path):
    path = write(tmp_path / "x.tsv", "Hi.\tHallo.\tCC-BY (someone)\nBye.\tTschüss.\n")
    assert pairs(corpus.load(path, "en", "de")) == [("Hi.", "Hallo."), ("Bye.", "Tschüss.")]


def test_a_header_finds_the_columns_wherever_they_are(tmp_path):
    path = write(tmp_path / "x.tsv", "\ufeffid\tde\ten\n1\teins\tone\n")
    assert pairs(corpus.load(path, "en", "de")) == [("one", "eins")]
    assert "line 2: no 'fr' among 'id', 'de', 'en'" in complaint(path, "en", "fr")


def test_a_csv_cell_may_hold_commas_quotes_and_line_ends(tmp_path):
    path = write(tmp_path / "x.csv", 'id,en,de\n1,"a, ""b""\nc",d\u2028e\n')
    assert pairs(corpus.load(path, "en", "de")) == [('a, "b"\nc', "d\u2028e")]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('"a" b,c\n', ("line 2", "mend the quotes")),
        ('"a,c\nd,e\n', ("line 3", "mend the quotes")),
        ("a,b\nc\n", ("line 3: 1 columns, line 1 has 2",)),
    ],
)
def test_malformed_csv_rows_name_the_line(rows, words, tmp_path):
    message = complaint(write(tmp_path / "x.csv", "en,de\n" + rows), "en", "de")
    assert all(word in message for word in words)


def test_a_csv_without_the_column_names_those_it_has(tmp_path):
    assert "no 'en' among 'fr', 'de'" in complaint(write(tmp_path / "x.csv", "fr,de\na,b\n"), "en", "de")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"translation": {"en": "a", "fr": "b"}}', "line 2: no 'de' among 'en', 'fr'"),
        ('{"en": "a", "de": null}', "line 2: the target is None"),
        ('{"en": "a", "de": "\\ud800"}', "line 2: the target is '\\ud800'"),
        ('{"en": "a", "de": "b"', "line 2: Expecting ',' delimiter"),
        ('["a", "b"]', "line 2: not an object"),
    ],
)
def test_a_bad_json_record_names_its_line(line, words, tmp_path):
    path = write(tmp_path / "x.jsonl", '{"en": "a", "de": "b"}\n' + line + "\n")
    assert words in complaint(path, "en", "de")


def test_json_may_name_its_texts_source_and_target(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"source": "a", "target": "b"}\n\n{"target": "d", "source": "c"}\n')
    assert pairs(corpus.load(path, "en", "de")) == [("a", "b"), ("c", "d")]


# --- translation memories and catalogues -----------------------------------------------------------------------------

TMX = """<?xml version="1.0" encoding="{encoding}"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx xmlns="http://www.lisa.org/tmx14" version="1.4"><header><note xml:lang="en">a note</note></header><body>
<tu><tuv xml:lang="EN-US">
<seg>Press <bpt i="1">&lt;b&gt;</bpt>the <hi>big</hi> key<ept i="1">&lt;/b&gt;</ept>.</seg></tuv>
<tuv lang="fr"><seg>Pressez <ph>{{0}}</ph>là.</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Only English</seg></tuv></tu>
</body></tmx>"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "iso-8859-1"])
def test_tmx_in_any_encoding_gives_text_without_codes_and_counts_lone_units(encoding, tmp_path, caplog):
    text = TMX.format(encoding=encoding.removesuffix("-sig").removesuffix("-be"))
    path = write(tmp_path / "x.tmx", (("\ufeff" if encoding == "utf-16-be" else "") + text).encode(encoding))
    assert pairs(corpus.load(path, "en", "fr")) == [("Press the big key.", "Pressez là.")]
    assert "left out 1 units" in caplog.text
    assert "its languages: EN-US, fr, en" in complaint(path, "en", "de")


def test_a_broken_tmx_is_named(tmp_path):
    path = write(tmp_path / "x.tmx", TMX.format(encoding="utf-8")[:-20])
    assert f"{path}: cannot be read" in complaint(path, "en", "fr")


PO = r"""# a comment
msgid ""
msgstr ""
"Language: sl\n"
"Plural-Forms: nplurals=4; plural=(n%100==2 ? 0 : n%100==1 ? 1 : n%100==3 ? 2 : 3);\n"

#: here.py:1
#, python-format
msgid "%d egg"
msgid_plural "%d eggs"
msgstr[0] "two"
msgstr[1] "one"
msgstr[2] "three"
msgstr[3] "many"

msgctxt "month"
msgid "May \"x\""
msgstr ""
"first\n"
"second\t\\"
#, fuzzy
#| msgid "Old"
msgid "New"
msgstr "guess"

msgid "Untranslated"
msgstr ""

#, fuzzy
#~ msgid "Gone"
#~ msgstr "gone"

msgid "Last"
msgstr "last"
"""


def test_a_catalogue_gives_its_finished_translations_and_counts_the_others(tmp_path, caplog):
    expected = [("%d egg", "one"), ("%d eggs", "many"), ('May "x"', "first\nsecond\t\\"), ("Last", "last")]
    assert pairs(corpus.load(write(tmp_path / "x.po", PO), "en", "sl")) == expected
    assert "left out 2 texts" in caplog.text


def test_a_catalogue_reads_backwards_and_refuses_another_language(tmp_path):
    path = write(tmp_path / "x.po", PO)
    assert pairs(corpus.load(path, "sl", "en"))[-1] == ("last", "Last")
    assert "its translations are in 'sl'" in complaint(path, "en", "hr")


def test_a_malformed_catalogue_names_the_line(tmp_path):
    assert "line 2" in complaint(write(tmp_path / "x.po", 'msgid "a"\nmsgstr b\n'), "en", "de")
    assert "ends within an entry" in complaint(write(tmp_path / "x.po", 'msgid "a"\n'), "en", "de")


@needs_shared
def test_catalogues_equal_their_compiled_twins():
    paths = sorted((SHARED / "robustness" / "django_po").rglob("*.po"))
    assert len(paths) == 45
    for path in paths:
        compiled = gettext.GNUTranslations(path.with_suffix(".mo").open("rb"))
        singular = compiled.plural(1)
        known = set()
        for key, text in compiled._catalog.items():
            key, form = key if isinstance(key, tuple) else (key, None)
            if key and form in (None, singular):
                known.add((key.split("\x04")[-1], text))
        read = [(record["source"], record["target"]) for _, record in corpus._read_po(path, ("en", None))]
        plurals = {forms for forms in read if forms not in known}
        assert known <= set(read), path
        assert all(text in compiled._catalog.values() for _, text in plurals), path


# --- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "nothing.tsv", "./nothing", "no/such/folder/train", "/no/where/train"])
def test_a_path_that_is_not_there_is_refused_without_a_look_at_the_network(name, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    assert "no such file" in complaint(name, "en", "de")


def test_a_missing_side_names_what_is_there(tmp_path):
    name = write_prefix(tmp_path, "a\n", "b\n")
    message = complaint(name, "en", "fr")
    assert f"{name}.fr: no such file" in message and "train.de, train.en" in message
    assert "--source_lang and --target_lang; there are train.de, train.en" in complaint(name)


def test_a_file_of_unknown_kind_is_refused_with_the_known_ones(tmp_path):
    message = complaint(write_prefix(tmp_path, "a\n", "b\n").with_name("train.en"), "en", "de")
    assert "unknown kind" in message and ".tsv" in message


def test_without_references_a_missing_target_side_is_no_error(tmp_path):
    write(tmp_path / "test.en", "a\n\nb\n")
    write(tmp_path / "test.tsv", "a\n\nb\n")
    write(tmp_path / "test.jsonl", '{"en": "a"}\n{"en": ""}\n{"en": "b"}\n')
    for name in ("test", "test.tsv", "test.jsonl"):
        data = corpus.load(tmp_path / name, "en", "de", references=False)
        assert data.column_names == ["source"] and data["source"][:] == ["a", "", "b"]
        complaint(tmp_path / name, "en", "de")
    both = write_prefix(tmp_path, "a\n", "b\n")
    assert pairs(corpus.load(both, "en", "de", references=False)) == [("a", "b")]


# --- data sets -------------------------------------------------------------------------------------------------------


def hub_folder(folder, rows):
    """A folder laid out as a data set on the Hub is."""
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("nested", [True, False])
def test_hub_data_sets_nested_and_flat_in_either_direction(nested, streaming, tmp_path):
    rows = [{"en": "a", "de": "b"}, {"en": "c", "de": None}]
    rows = [{"id": n, "translation": row} if nested else {"id": n, **row} for n, row in enumerate(rows)]
    name = hub_folder(tmp_path / "set", rows)
    assert pairs(corpus.load(name, "en", "de", streaming=streaming)) == [("a", "b"), ("c", "")]
    assert pairs(corpus.load(name, "de", "en", streaming=streaming)) == [("b", "a"), ("", "c")]
    assert "no 'fr' among" in complaint(name, "en", "fr", streaming=streaming)


def test_hub_errors_become_one_line(tmp_path):
    assert "Unknown split" in complaint(hub_folder(tmp_path / "set", [{"en": "a"}]), "en", "de", split="dev")
    assert "nobody/nothing, split 'train'" in complaint("nobody/nothing", "en", "de")  # HF_HUB_OFFLINE is set


def test_demo_in_both_directions_and_nothing_else():
    forth, back = corpus.load("demo", split="test"), corpus.load("demo", "de", "en", split="test")
    assert len(forth) == 500 and pairs(back) == [pair[::-1] for pair in pairs(forth)]
    assert pairs(corpus.load("demo", split="test", streaming=True)) == pairs(forth)
    assert "en-fr" in complaint("demo", "en", "fr")
    assert "'dev'" in complaint("demo", split="dev")


# --- cache and streams -----------------------------------------------------------------------------------------------


def test_an_identical_second_load_reuses_the_cache(tmp_path, monkeypatch):
    name = write_prefix(tmp_path, "a\n", "b\n")
    first = corpus.load(name, "en", "de")
    monkeypatch.setattr(corpus, "_lines", lambda path: pytest.fail("the file was read again"))
    second = corpus.load(name, "en", "de")
    assert second.cache_files == first.cache_files and second._fingerprint == first._fingerprint


def test_a_changed_file_is_never_taken_from_the_cache(tmp_path):
    name = write_prefix(tmp_path, "a\n", "b\n")
    stat = (tmp_path / "train.de").stat()
    assert pairs(corpus.load(name, "en", "de")) == [("a", "b")]
    os.utime(write(tmp_path / "train.de", "c\n"), ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same date
    assert pairs(corpus.load(name, "en", "de")) == [("a", "c")]


def test_a_stream_is_one_shard_and_equals_the_loaded_data(tmp_path):
    name = write_prefix(tmp_path, "a\nb\n", "c\nd\n")
    stream = corpus.load(name, "en", "de", streaming=True)
    assert isinstance(stream, datasets.IterableDataset) and stream.num_shards == 1
    assert list(stream) == list(corpus.load(name, "en", "de"))


def test_the_data_lies_on_disk_and_not_in_memory(tmp_path):
    data = corpus.load(write_prefix(tmp_path, "a\n", "b\n"), "en", "de")
    assert [Path(entry["filename"]).suffix for entry in data.cache_files] == [".arrow"]


def test_describe_states_name_hash_and_lines(tmp_path):
    name = write_prefix(tmp_path, "a\nb\n", "c\nd")
    assert corpus.describe(name, "en", "de") == [
        {"file": "train.en", "sha256": hashlib.sha256(b"a\nb\n").hexdigest(), "lines": 2},
        {"file": "train.de", "sha256": hashlib.sha256(b"c\nd").hexdigest(), "lines": 2},
    ]
    assert corpus.files(name, "en", "de") == [tmp_path / "train.en", tmp_path / "train.de"]
    assert corpus.describe("demo") == corpus.describe("owner/name") == []


# --- cleaning --------------------------------------------------------------------------------------------------------


def dataset(rows):
    return datasets.Dataset.from_dict(dict(zip(("source", "target"), map(list, zip(*rows, strict=True)), strict=True)))


def test_blanks_on_either_side_drop_the_pair_and_are_counted():
    rows = [("a", "1"), (" ", "2"), ("c", "3"), ("d", ""), ("e", "5"), ("f", "6")]
    kept, dropped = corpus.clean(dataset(rows))
    assert pairs(kept) == [("a", "1"), ("c", "3"), ("e", "5"), ("f", "6")]
    assert dropped == {"empty": 2, "ratio": 0, "duplicate": 0}


def test_duplicates_keep_the_first_and_ratios_are_of_characters():
    rows = [("aa", "b"), ("a", "bbb"), ("x", "y"), ("aa", "b"), ("x", "z"), ("aa ", " b")]
    kept, dropped = corpus.clean(dataset(rows), deduplicate=True, max_length_ratio=2)
    assert pairs(kept) == [("aa", "b"), ("x", "y"), ("x", "z")]
    assert dropped == {"empty": 0, "ratio": 1, "duplicate": 2}


def test_clean_data_is_handed_back_as_it_is():
    data = dataset([("a", "b"), ("a", "b")])
    assert corpus.clean(data)[0] is data


def test_overlap_finds_sources_that_are_held_out():
    train = dataset([("a", "1"), ("b", "2"), ("c", "3"), ("b ", "4")])
    assert corpus.overlap(train, dataset([("b", "9"), ("z", "1")])).tolist() == [1, 3]


# --- the corpora of ../shared/data -----------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ("name", "languages", "count", "first"),
    [
        ("multi30k/val", ("en", "de"), 1014, "A group of men are loading cotton onto a truck"),
        ("multi30k/test_2016_flickr", ("en", "cs"), 1000, "A man in an orange hat starring at something."),
        ("cogs/dev.tsv", (None, None), 3000, "Liam hoped that a box was burned by a girl ."),
        ("tatoeba_zh_en/cmn.txt", ("en", "zh"), 28447, "Hi."),
        ("robustness/crlf_cmn/cmn.head3000.crlf.txt.gz", ("en", "zh"), 3000, "Hi."),
        ("robustness/tmx_python_tmx/standard.tmx", ("en", "fr"), 2, "Hello world"),
        ("kftt30k_ja_en/tune", ("en", "ja"), 1235, None),
    ],
)
def test_real_corpora_load_whole(name, languages, count, first):
    data = corpus.load(SHARED / name, *languages)
    assert len(data) == count
    assert first is None or data[0]["source"] == first
    assert not any("\r" in text or "CC-BY" in text for text in data["target"])


@needs_shared
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("robustness/csv_rakhine/train.csv.gz", "line 4631: ',' expected after '\"'"),
        ("robustness/tmx_python_tmx/minimal.tmx", "empty"),
        ("robustness/mo_json_jupyterlab_zh/jupyterlab.json", "line 1"),
        ("multi30k/train", "there are train.cs.gz, train.de.gz, train.en.gz, train.fr.gz"),
    ],
)
def test_real_corpora_that_are_malformed_say_where(name, words):
    assert words in complaint(SHARED / name, "rakhine", "myanmar")


@needs_shared
def test_text_in_another_encoding_names_its_first_bad_line(tmp_path):
    (tmp_path / "edict.txt.gz").symlink_to(SHARED / "robustness" / "eucjp_edict" / "edict.head5000.eucjp.gz")
    assert "edict.txt.gz, line 1: byte 0xa1 is not UTF-8" in complaint(tmp_path / "edict.txt.gz")


@needs_shared
def test_the_known_leak_of_3am_is_found():
    train, test = (corpus.load(SHARED / "3am_en_zh" / split, "en", "zh") for split in ("train", "test"))
    leaked = set(train.select(corpus.overlap(train, test))["source"])
    assert leaked == set(train["source"]) & set(test["source"]) and len(leaked) > 90
