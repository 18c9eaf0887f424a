"""The generated corpus: right German, the same every time, and no test sentence in training."""

import os
import re
import subprocess
import sys

import pytest

from modeling_vanilla import demo_corpus
from modeling_vanilla.demo_corpus import ADJECTIVES, FIRST, LAST, MIDDLE, NOUNS, PERSONS, SIZES, VERBS, Clause, Phrase


def words(pairs, side):
    return {word for pair in pairs for word in re.findall(r"\w+", pair[side].lower())}


# --- the splits ------------------------------------------------------------------------------------------------------


def test_splits_have_their_sizes_and_share_no_english_sentence():
    splits = {split: {english for english, _ in demo_corpus.generate(split)} for split in SIZES}
    assert {split: len(english) for split, english in splits.items()} == SIZES
    assert not splits["train"] & splits["test"] | splits["train"] & splits["validation"]
    assert not splits["validation"] & splits["test"]


def test_no_seed_moves_a_sentence_to_another_split_or_translates_it_otherwise():
    train = dict(demo_corpus.generate("train"))
    other = {split: dict(demo_corpus.generate(split, seed=1)) for split in SIZES}
    assert not train.keys() & {*other["validation"], *other["test"]}
    shared = train.keys() & other["train"].keys()
    assert len(shared) > 100 and all(train[english] == other["train"][english] for english in shared)


def test_test_sentences_combine_words_that_training_has_seen():
    assert words(demo_corpus.generate("test"), 0) <= words(demo_corpus.generate("train"), 0)


def test_training_uses_the_whole_lexicon():
    english = words(demo_corpus.generate("train"), 0)
    nouns = {form for rows in NOUNS.values() for row in rows for form in row[:2]}
    assert nouns | {row[0] for rows in ADJECTIVES.values() for row in rows} <= english
    assert {form.split()[0].lower() for verb in VERBS for form in verb.english} <= english


def test_another_process_generates_the_same_text():
    program = f"import runpy; print(ascii(runpy.run_path({demo_corpus.__file__!r})['generate']('test')))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == ascii(demo_corpus.generate("test"))


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="got 'dev'"):
        demo_corpus.generate("dev")


def test_sentences_are_written_as_sentences():
    for english, german in demo_corpus.generate("validation"):
        for text in (english, german):
            assert re.fullmatch(r"[A-ZÄÖÜ][\w,]*( [\w,]+)+[.?]", text), text
        assert english[-1] == german[-1] and "  " not in english + german
        assert not re.search(r"\b(in das|in dem|zu der|zu dem) ", german), german
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", english.lower().replace("an hour", "")), english


# --- worked examples: noun phrases -----------------------------------------------------------------------------------


class Script:
    """In place of a random generator: makes the choices that it is told."""

    def __init__(self, *choices):
        self.choices = list(choices)

    def random(self):
        return 0.0 if self.choices.pop(0) else 0.99

    def choice(self, options):
        wanted = self.choices.pop(0)
        return next(option for option in options if wanted in (option, option[0]))


@pytest.mark.parametrize(
    ("kind", "noun", "plural", "adjective", "determiners", "article", "english", "german"),
    [
        ("A", "dog", False, "big", "definite", "the", "the big dog", "der große Hund|den großen Hund|dem großen Hund"),
        ("P", "woman", False, "old", "definite", "my", "my old woman",
         "meine alte Frau|meine alte Frau|meiner alten Frau"),
        ("F", "apple", False, None, "indefinite", "a", "an apple", "ein Apfel|einen Apfel|einem Apfel"),
        ("F", "egg", False, "big", "indefinite", "a", "a big egg", "ein großes Ei|ein großes Ei|einem großen Ei"),
        ("T", "clock", False, "expensive", "indefinite", "a", "an expensive clock",
         "eine teure Uhr|eine teure Uhr|einer teuren Uhr"),
        ("P", "boy", False, None, "definite", "this", "this boy", "dieser Junge|diesen Jungen|diesem Jungen"),
        ("P", "boy", True, None, "definite", "these", "these boys", "diese Jungen|diese Jungen|diesen Jungen"),
        ("P", "child", True, "happy", "indefinite", "", "happy children",
         "glückliche Kinder|glückliche Kinder|glücklichen Kindern"),
        ("P", "mother", True, "sad", "indefinite", "two", "two sad mothers",
         "zwei traurige Mütter|zwei traurige Mütter|zwei traurigen Müttern"),
        ("P", "queen", True, "rich", "quantified", "many", "many rich queens",
         "viele reiche Königinnen|viele reiche Königinnen|vielen reichen Königinnen"),
        ("P", "man", False, "tired", "quantified", "every", "every tired man",
         "jeder müde Mann|jeden müden Mann|jedem müden Mann"),
        ("T", "book", True, "new", "kein", "", "new books",
         "keine neuen Bücher|keine neuen Bücher|keinen neuen Büchern"),
        ("L", "house", False, "dark", "definite", "our", "our dark house",
         "unser dunkles Haus|unser dunkles Haus|unserem dunklen Haus"),
    ],
)  # fmt: skip
def test_noun_phrases_are_declined(kind, noun, plural, adjective, determiners, article, english, german):
    script = Script(kind, noun, plural, adjective is not None, *([adjective] if adjective else []), article)
    phrase = demo_corpus.noun_phrase(script, kind, determiners)
    assert (phrase.subject, "|".join(phrase.german)) == (english, german)


@pytest.mark.parametrize(
    ("preposition", "place", "english", "german"),
    [
        ("in", "garden", "in the garden", "im Garten"),
        ("next to", "church", "next to the church", "neben der Kirche"),
        ("into", "office", "into the office", "ins Büro"),
        ("to", "school", "to the school", "zur Schule"),
        ("to", "station", "to the station", "zum Bahnhof"),
        ("through", "park", "through the park", "durch den Park"),
    ],
)
def test_prepositions_govern_a_case_and_contract(preposition, place, english, german):
    script = Script(preposition, "L", place, False, False, "the")
    prepositions = demo_corpus.PLACES + demo_corpus.WAYS
    assert demo_corpus.place_phrase(script, prepositions) == (english, german)


# --- worked examples: clauses ----------------------------------------------------------------------------------------

ME, YOU, HE, SHE, WE, THEY = PERSONS
MAN = Phrase("the man", "the man", ("der Mann", "den Mann", "dem Mann"), 2)
HIM = ("him", "ihn", FIRST)
APPLE = ("an apple", "einen Apfel", MIDDLE)
NO_APPLE = ("an apple", "keinen Apfel", MIDDLE)


def clause(subject, base, tense, *complements, negated=False, time=None):
    verb = next(verb for verb in VERBS if verb.english[0] == base)
    return Clause(subject, verb, tense, negated, list(complements), time)


@pytest.mark.parametrize(
    ("made", "english", "second", "last"),
    [
        (clause(MAN, "buy", "present", APPLE), "the man buys an apple", "der Mann kauft einen Apfel",
         "der Mann einen Apfel kauft"),
        (clause(MAN, "buy", "past", APPLE, time=["yesterday", "gestern"]), "the man bought an apple yesterday",
         "der Mann hat gestern einen Apfel gekauft", "der Mann gestern einen Apfel gekauft hat"),
        (clause(MAN, "buy", "present", NO_APPLE, negated=True), "the man does not buy an apple",
         "der Mann kauft keinen Apfel", "der Mann keinen Apfel kauft"),
        (clause(THEY, "call", "present", HIM, negated=True, time=["today", "heute"]), "they do not call him today",
         "sie rufen ihn heute nicht an", "sie ihn heute nicht anrufen"),
        (clause(YOU, "call", "can", HIM, negated=True), "you cannot call him", "du kannst ihn nicht anrufen",
         "du ihn nicht anrufen kannst"),
        (clause(SHE, "wait for", "past", ("him", "auf ihn", LAST), negated=True), "she did not wait for him",
         "sie hat nicht auf ihn gewartet", "sie nicht auf ihn gewartet hat"),
        (clause(WE, "go", "past", ("into the house", "ins Haus", LAST)), "we went into the house",
         "wir sind ins Haus gegangen", "wir ins Haus gegangen sind"),
        (clause(ME, "be", "past", ("tired", "müde", LAST), negated=True), "I was not tired", "ich war nicht müde",
         "ich nicht müde war"),
        (clause(HE, "give", "will", ("us", "uns", FIRST), APPLE, time=["tomorrow", "morgen"]),
         "he will give us an apple tomorrow", "er wird uns morgen einen Apfel geben",
         "er uns morgen einen Apfel geben wird"),
    ],
)  # fmt: skip
def test_the_verb_stands_second_or_last(made, english, second, last):
    assert demo_corpus.english(made) == english
    assert demo_corpus.german(made, "second") == second
    assert demo_corpus.german(made, "last") == last


@pytest.mark.parametrize(
    ("made", "english", "german"),
    [
        (clause(MAN, "open", "present", ("the door", "die Tür", FIRST)), "does the man open the door",
         "macht der Mann die Tür auf"),
        (clause(YOU, "see", "past", HIM, negated=True), "did you not see him", "hast du ihn nicht gesehen"),
        (clause(THEY, "be", "present", ("sad", "traurig", LAST)), "are they sad", "sind sie traurig"),
        (clause(ME, "help", "should", ("him", "ihm", FIRST)), "should I help him", "sollte ich ihm helfen"),
    ],
)  # fmt: skip
def test_the_verb_stands_first_in_a_question(made, english, german):
    assert demo_corpus.english(made, question=True) == english
    assert demo_corpus.german(made, "first") == german
