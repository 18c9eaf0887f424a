"""A generated English-German corpus: a small grammar with what makes German hard to reach from English.

Gender, case and number of articles, adjectives, pronouns and weak nouns; prepositions that govern a case; nicht and
kein; modals, the perfect and separable verbs, which embrace the clause; the finite verb, which stands second after
whatever comes first, first in a question and last in a subordinate or relative clause.

Every English sentence has one German translation. Its own hash puts it into train, validation or test, so that these
never share an English sentence, whatever the seed: a test sentence is a new combination of words seen in training.
"""

import random
import re
import zlib
from functools import cache
from typing import NamedTuple


SIZES = {"train": 20_000, "validation": 500, "test": 500}


def _rows(table, separator=";"):
    """ "big groß; red rot" -> [["big", "groß"], ["red", "rot"]]; "_" stands for a space within a cell."""
    return [[cell.replace("_", " ") for cell in row.split()] for row in table.strip().split(separator)]


# --- the lexicon -----------------------------------------------------------------------------------------------------
# Kinds: P people, A animals, T things, F food, O what opens and closes, L places.

# English singular and plural; gender, German singular and plural; for weak nouns the singular of the other cases.
NOUNS = {
    "P": _rows("""
        man men m Mann Männer; woman women f Frau Frauen; child children n Kind Kinder;
        girl girls n Mädchen Mädchen; boy boys m Junge Jungen Jungen; teacher teachers m Lehrer Lehrer;
        doctor doctors m Arzt Ärzte; neighbor neighbors m Nachbar Nachbarn Nachbarn;
        student students m Student Studenten Studenten; mother mothers f Mutter Mütter;
        father fathers m Vater Väter; sister sisters f Schwester Schwestern; brother brothers m Bruder Brüder;
        aunt aunts f Tante Tanten; king kings m König Könige; queen queens f Königin Königinnen;
        baker bakers m Bäcker Bäcker; farmer farmers m Bauer Bauern Bauern
    """),
    "A": _rows("""
        dog dogs m Hund Hunde; cat cats f Katze Katzen; horse horses n Pferd Pferde; bird birds m Vogel Vögel;
        cow cows f Kuh Kühe; mouse mice f Maus Mäuse; rabbit rabbits n Kaninchen Kaninchen;
        bear bears m Bär Bären Bären; lion lions m Löwe Löwen Löwen; pig pigs n Schwein Schweine
    """),
    "T": _rows("""
        book books n Buch Bücher; letter letters m Brief Briefe; picture pictures n Bild Bilder;
        hat hats m Hut Hüte; coat coats m Mantel Mäntel; key keys m Schlüssel Schlüssel; ball balls m Ball Bälle;
        flower flowers f Blume Blumen; shirt shirts n Hemd Hemden; cup cups f Tasse Tassen;
        knife knives n Messer Messer; clock clocks f Uhr Uhren; newspaper newspapers f Zeitung Zeitungen;
        umbrella umbrellas m Regenschirm Regenschirme; bicycle bicycles n Fahrrad Fahrräder;
        lamp lamps f Lampe Lampen
    """),
    "F": _rows("""
        apple apples m Apfel Äpfel; egg eggs n Ei Eier; cake cakes m Kuchen Kuchen; pear pears f Birne Birnen;
        tomato tomatoes f Tomate Tomaten; sausage sausages f Wurst Würste; roll rolls n Brötchen Brötchen;
        cookie cookies m Keks Kekse
    """),
    "O": _rows("""
        door doors f Tür Türen; window windows n Fenster Fenster; box boxes f Kiste Kisten;
        bag bags f Tasche Taschen; suitcase suitcases m Koffer Koffer; gate gates n Tor Tore
    """),
    "L": _rows("""
        garden gardens m Garten Gärten; house houses n Haus Häuser; kitchen kitchens f Küche Küchen;
        school schools f Schule Schulen; park parks m Park Parks; church churches f Kirche Kirchen;
        museum museums n Museum Museen; station stations m Bahnhof Bahnhöfe; office offices n Büro Büros;
        castle castles n Schloss Schlösser
    """),
}
# English, German, and the stem that takes endings where it is another.
ADJECTIVES = {
    "P": _rows("""
        old alt; polite höflich; tall groß; small klein; friendly freundlich; clever klug; tired müde müd;
        sad traurig; hungry hungrig; brave mutig; happy glücklich; strong stark; rich reich
    """),
    "A": _rows("""
        old alt; young jung; big groß; small klein; hungry hungrig; tired müde müd; strong stark; wild wild
    """),
    "T": _rows("""
        old alt; new neu; small klein; red rot; blue blau; beautiful schön; expensive teuer teur; cheap billig
    """),
    "F": _rows("fresh frisch; sweet süß; big groß; small klein; cold kalt; warm warm"),
    "O": _rows("old alt; new neu; big groß; heavy schwer; brown braun; white weiß"),
    "L": _rows("old alt; new neu; small klein; big groß; beautiful schön; dark dunkel dunkl; quiet ruhig"),
}
# Who does it ("!" for a state, which takes no time); what it governs; the kinds of its object; English infinitive,
# third person and past; German infinitive with "|" after a separable prefix, ich, du and er; the perfect.
VERB_TABLE = """
PA  acc PATFO      see sees saw                          sehen sehe siehst sieht                hat gesehen
PA  acc PA         hear hears heard                      hören höre hörst hört                  hat gehört
PA! acc PA         love loves loved                      lieben liebe liebst liebt              hat geliebt
P!  acc P          know knows knew                       kennen kenne kennst kennt              hat gekannt
P   acc P          visit visits visited                  besuchen besuche besuchst besucht      hat besucht
P   acc P          call calls called                     an|rufen rufe rufst ruft               hat angerufen
P   acc P          invite invites invited                ein|laden lade lädst lädt              hat eingeladen
PA  acc PATF       find finds found                      finden finde findest findet            hat gefunden
PA  acc PATF       look_for looks_for looked_for         suchen suche suchst sucht              hat gesucht
P   acc ATFO       buy buys bought                       kaufen kaufe kaufst kauft              hat gekauft
P   acc TO         carry carries carried                 tragen trage trägst trägt              hat getragen
P   acc O          open opens opened                     auf|machen mache machst macht          hat aufgemacht
P   acc O          close closes closed                   zu|machen mache machst macht           hat zugemacht
P   acc PATL       draw draws drew                       zeichnen zeichne zeichnest zeichnet    hat gezeichnet
P   acc PATOL      look_at looks_at looked_at            an|sehen sehe siehst sieht             hat angesehen
PA  acc F          eat eats ate                          essen esse isst isst                   hat gegessen
P   acc TF         throw_away throws_away threw_away     weg|werfen werfe wirfst wirft          hat weggeworfen
P   acc A          feed feeds fed                        füttern füttere fütterst füttert       hat gefüttert
A   acc A          chase chases chased                   jagen jage jagst jagt                  hat gejagt
P   dat P          help helps helped                     helfen helfe hilfst hilft              hat geholfen
P   dat P          thank thanks thanked                  danken danke dankst dankt              hat gedankt
P   dat P          answer answers answered               antworten antworte antwortest antwortet hat geantwortet
P   dat P          listen_to listens_to listened_to      zu|hören höre hörst hört               hat zugehört
PA  dat PA         follow follows followed               folgen folge folgst folgt              ist gefolgt
P   give ATF       give gives gave                       geben gebe gibst gibt                  hat gegeben
P   give AT        show shows showed                     zeigen zeige zeigst zeigt              hat gezeigt
P   give TF        bring brings brought                  bringen bringe bringst bringt          hat gebracht
P   give T         sell sells sold                       verkaufen verkaufe verkaufst verkauft  hat verkauft
PA  auf_acc P      wait_for waits_for waited_for         warten warte wartest wartet            hat gewartet
P   über_acc PAT   talk_about talks_about talked_about   reden rede redest redet                hat geredet
P   an_acc PA      think_of thinks_of thought_of         denken denke denkst denkt              hat gedacht
P   mit_dat P      dance_with dances_with danced_with    tanzen tanze tanzt tanzt               hat getanzt
PA  mit_dat PA     play_with plays_with played_with      spielen spiele spielst spielt          hat gespielt
P   von_dat PAT    dream_of dreams_of dreamed_of         träumen träume träumst träumt          hat geträumt
PA  place -        sleep sleeps slept                    schlafen schlafe schläfst schläft      hat geschlafen
P   place -        work works worked                     arbeiten arbeite arbeitest arbeitet    hat gearbeitet
P   place -        sing sings sang                       singen singe singst singt              hat gesungen
PA  place -        sit sits sat                          sitzen sitze sitzt sitzt               hat gesessen
P   place -        watch_TV watches_TV watched_TV        fern|sehen sehe siehst sieht           hat ferngesehen
PA  none -         wake_up wakes_up woke_up              auf|wachen wache wachst wacht          ist aufgewacht
P   none -         get_up gets_up got_up                 auf|stehen stehe stehst steht          ist aufgestanden
P   way -          go goes went                          gehen gehe gehst geht                  ist gegangen
PA  way -          walk walks walked                     laufen laufe läufst läuft              ist gelaufen
PA  way -          run runs ran                          rennen renne rennst rennt              ist gerannt
PATFOL be -        be is was                             sein bin bist ist                      ist gewesen
P!  dass -         know knows knew                       wissen weiß weißt weiß                 hat gewusst
P!  dass -         think thinks thought                  glauben glaube glaubst glaubt          hat geglaubt
P!  dass -         say says said                         sagen sage sagst sagt                  hat gesagt
P!  ob -           ask asks asked                        fragen frage fragst fragt              hat gefragt
"""
PASSING = ("tired", "hungry", "happy", "sad")  # what one can be for a time
# English as subject and object; German by case; person: 0 ich, 1 du, 2 er, 3 plural.
PRONOUNS = _rows("""I me ich mich mir 0; you you du dich dir 1; he him er ihn ihm 2; she her sie sie ihr 2;
    we us wir uns uns 3; they them sie sie ihnen 3""")
OWNERS = _rows("my mein; your dein; his sein; her ihr; our unser; their ihr")
MODALS = {
    "can": "kann kannst kann können".split(),
    "must": "muss musst muss müssen".split(),
    "should": "sollte solltest sollte sollten".split(),
    "will": "werde wirst wird werden".split(),
}
HABEN, SEIN, WAR = "habe hast hat haben".split(), "bin bist ist sind".split(), "war warst war waren".split()
BE = {"present": ("am", "are", "is", "are"), "past": ("was", "were", "was", "were")}
TIMES = {
    "present": _rows("today heute; in_the_evening am_Abend; on_Sundays sonntags; at_night nachts"),
    "past": _rows("yesterday gestern; last_week letzte_Woche; on_Monday am_Montag; an_hour_ago vor_einer_Stunde"),
    "will": _rows("tomorrow morgen; next_week nächste_Woche; next_year nächstes_Jahr; on_Friday am_Freitag"),
    **dict.fromkeys(("can", "must", "should"), _rows("today heute; tomorrow morgen")),
}
# English, German, case.
PLACES = _rows("in in dat; in_front_of vor dat; behind hinter dat; next_to neben dat")
WAYS = _rows("into in acc; to zu dat; through durch acc; out_of aus dat")
CONTRACTIONS = _rows("in_dem im; in_das ins; zu_dem zum; zu_der zur")
CONJUNCTIONS = _rows("because weil; although obwohl; while während")


# --- noun phrases ----------------------------------------------------------------------------------------------------

CASE = {"acc": 1, "dat": 2, "give": 1}


def _endings(*genders):
    """By gender (p is plural), then by case; "-" is no ending."""
    return {gender: row.replace("-", "").split(" ") for gender, row in zip("mfnp", genders, strict=True)}


DER = _endings("der den dem", "die die der", "das das dem", "die die den")
DIESER = _endings("er en em", "e e er", "es es em", "e e en")  # also of adjectives that follow no article
EIN = _endings("- en em", "e e er", "- - em", "e e en")
WEAK = _endings("e en en", "e e en", "e e en", "en en en")
MIXED = _endings("er en en", "e e en", "es es en", "en en en")
NONE = _endings("- - -", "- - -", "- - -", "- - -")

# English, German stem, its endings and those of an adjective after it; of the singular and of the plural.
THE = [("the", "", DER, WEAK)] * 6
OWN = [(english, stem, EIN, MIXED) for english, stem in OWNERS]
DETERMINERS = {
    "definite": ([*THE, *OWN, ("this", "dies", DIESER, WEAK)], [*THE, *OWN, ("these", "dies", DIESER, WEAK)]),
    "indefinite": ([("a", "ein", EIN, MIXED)], [("", "", NONE, DIESER), ("two", "zwei", NONE, DIESER)]),
    "kein": ([("a", "kein", EIN, MIXED)], [("", "kein", EIN, MIXED)]),
    "quantified": ([("every", "jed", DIESER, WEAK), ("no", "kein", EIN, MIXED)], [("many", "viel", DIESER, DIESER)]),
}


class Phrase(NamedTuple):
    """A noun phrase or pronoun: English as subject and as object, German by case, and what agrees with it."""

    subject: str
    object: str
    german: tuple[str, ...]
    person: int
    kind: str = "P"
    gender: str = ""
    definite: bool = True


PERSONS = [Phrase(subject, obj, tuple(german), int(person)) for subject, obj, *german, person in PRONOUNS]


def noun_phrase(rng, kinds, determiners, plural=0.3):
    """the big dog: der große Hund, den großen Hund, dem großen Hund"""
    kind = rng.choice(kinds)
    one, several, gender, german, german_plural, *weak = rng.choice(NOUNS[kind])
    plural = rng.random() < plural
    if plural:
        noun, gender = several, "p"
        nouns = [german_plural, german_plural, german_plural + ("" if german_plural[-1] in "ns" else "n")]
    else:
        noun, nouns = one, [german, *(weak or [german]) * 2]
    adjectives = [rng.choice(ADJECTIVES[kind])] if rng.random() < 0.4 else []
    article, stem, endings, adjective_endings = rng.choice(DETERMINERS[determiners][plural])

    words = [*(adjective[0] for adjective in adjectives), noun]
    english = _join("an" if article == "a" and words[0][0] in "aeiou" else article, *words)
    cases = []
    for case, noun in enumerate(nouns):
        inflected = [adjective[-1] + adjective_endings[gender][case] for adjective in adjectives]
        cases.append(_join(stem + endings[gender][case], *inflected, noun))
    return Phrase(english, english, tuple(cases), 3 if plural else 2, kind, gender, determiners == "definite")


def place_phrase(rng, prepositions):
    """in front of the castle: vor dem Schloss"""
    english, german, case = rng.choice(prepositions)
    place = noun_phrase(rng, "L", "definite", plural=0)
    german = f"{german} {place.german[CASE[case]]}"
    for long, short in CONTRACTIONS:
        german = german.replace(f"{long} ", f"{short} ")
    return f"{english} {place.object}", german


def _join(*words):
    return " ".join(filter(None, words))


# --- clauses ---------------------------------------------------------------------------------------------------------


class Verb(NamedTuple):
    who: str
    state: bool
    frame: str
    preposition: str
    objects: str
    english: tuple[str, str, str]  # give, gives, gave
    prefix: str
    infinitive: str
    present: list[str]
    perfect: list[str]
    participle: str


def _verb(who, frame, objects, base, third, past, infinitive, ich, du, er, auxiliary, participle):
    prefix, _, infinitive = infinitive.rpartition("|")
    preposition, _, frame = frame.rpartition(" ")
    present = SEIN if frame == "be" else [ich, du, er, infinitive]
    perfect = HABEN if auxiliary == "hat" else SEIN
    english = (base, third, past)
    who, state = who.rstrip("!"), who.endswith("!")
    return Verb(who, state, frame, preposition, objects, english, prefix, infinitive, present, perfect, participle)


VERBS = [_verb(*row) for row in _rows(VERB_TABLE, "\n")]
REPORTING = ("dass", "ob")
FIRST, MIDDLE, LAST = range(3)  # a German complement stands before the time, after it, or after nicht


class Clause(NamedTuple):
    """What the words and their order follow from in both languages."""

    subject: Phrase
    verb: Verb
    tense: str  # present, past or an English modal
    negated: bool
    complements: list[tuple[str, str, int]]  # English, German, where
    time: list[str] | None  # English, German


def english(clause, question=False):
    """the man does not buy an apple; does the man not buy an apple"""
    subject, (base, third, past) = clause.subject, clause.verb.english
    if clause.tense in MODALS:
        auxiliary, verb = clause.tense, base
    elif clause.verb.frame == "be":
        auxiliary, verb = BE[clause.tense][subject.person], ""
    elif question or clause.negated:
        auxiliary, verb = ("did" if clause.tense == "past" else "does" if subject.person == 2 else "do"), base
    else:
        auxiliary, verb = "", past if clause.tense == "past" else third if subject.person == 2 else base
    start = [auxiliary, subject.subject] if question else [subject.subject, auxiliary]
    end = [verb, *(words for words, _, _ in clause.complements), clause.time and clause.time[0]]
    return _join(*start, "not" if clause.negated else "", *end).replace("can not", "cannot")


def german(clause, order):
    """Finite verb "second": er kauft keinen Apfel; "first": kauft er keinen Apfel; "last": er keinen Apfel kauft"""
    verb, person = clause.verb, clause.subject.person
    if clause.tense in MODALS:
        finite, closing = MODALS[clause.tense][person], verb.prefix + verb.infinitive
    elif clause.tense == "present":
        finite, closing = verb.present[person], verb.prefix
    elif verb.frame == "be":
        finite, closing = WAR[person], ""
    else:
        finite, closing = verb.perfect[person], verb.participle
    field = [[words for _, words, where in clause.complements if where == at] for at in (FIRST, MIDDLE, LAST)]
    first, middle, last = (_join(*words) for words in field)
    negation = "nicht" if clause.negated and "kein" not in middle else ""
    field = _join(first, clause.time and clause.time[1], middle, negation, last)
    subject = clause.subject.german[0]
    if order == "last":
        return _join(subject, field, closing + finite if closing == verb.prefix else f"{closing} {finite}")
    return _join(*((subject, finite) if order == "second" else (finite, subject)), field, closing)


def random_clause(rng, subject=None, frames=None, gap="", negatable=True, plain=False):
    """A clause on `subject` (a definite one if `plain`) with a verb of `frames`, less its object of the kind `gap`."""

    def fits(verb):
        framed = verb.frame in frames if frames else verb.frame not in REPORTING
        return framed and (subject is None or subject.kind in verb.who) and gap in verb.objects

    verb = rng.choice([verb for verb in VERBS if fits(verb)])
    negated = negatable and rng.random() < 0.2
    subject = subject or random_subject(rng, verb.who, plain or negated)
    complements = random_complements(rng, verb, subject, negated)
    state = verb.state or verb.frame == "be" and complements[0][0] not in PASSING
    if gap:
        complements.pop()
    elif verb.frame == "acc" and not negated and not state and rng.random() < 0.15:
        complements.append((*place_phrase(rng, PLACES), LAST))
    tenses = ["present"] * 5 + ["past"] * 5
    if not state:
        tenses += ["will", "will", "should"] + ["can"] * (verb.frame != "be") + ["must"] * (not negated)
    tense = rng.choice(tenses)
    time = rng.choice(TIMES[tense]) if not state and rng.random() < 0.35 else None
    return Clause(subject, verb, tense, negated, complements, time)


def random_subject(rng, kinds, definite):
    if "P" in kinds and rng.random() < 0.3:
        return rng.choice(PERSONS)
    determiners = "definite" if definite else rng.choice(["definite"] * 4 + ["indefinite", "quantified"])
    return noun_phrase(rng, kinds, determiners)


def random_object(rng, kinds, determiners, subject):
    if kinds[0] == "P" and rng.random() < 0.25:
        ours = [{"I", "we"}, {"you"}]  # neither "I see me" nor "we see me"
        return rng.choice([each for each in PERSONS if not any({each.subject, subject.subject} <= us for us in ours)])
    return noun_phrase(rng, kinds, determiners)


def random_complements(rng, verb, subject, negated):
    """What the frame of the verb asks for; the object comes last."""
    complements = []
    if verb.frame == "give":
        person = random_object(rng, "P", "definite", subject)
        complements.append((person.object, person.german[CASE["dat"]], FIRST))
    if verb.frame in CASE:
        indefinite = "indefinite" if not negated else "definite" if verb.preposition else "kein"
        thing = random_object(rng, verb.objects, rng.choice(["definite", indefinite]), subject)
        early = thing.definite and (negated or not complements)
        where = LAST if verb.preposition else FIRST if early else MIDDLE
        complements.append((thing.object, _join(verb.preposition, thing.german[CASE[verb.frame]]), where))
    elif verb.frame == "be":
        complements.append((*rng.choice(ADJECTIVES[subject.kind])[:2], LAST))
    elif verb.frame == "way" or verb.frame == "place" and rng.random() < 0.7:
        complements.append((*place_phrase(rng, WAYS if verb.frame == "way" else PLACES), LAST))
    return complements


# --- sentences -------------------------------------------------------------------------------------------------------


def statement(rng):
    """tomorrow the man will buy an apple: morgen wird der Mann einen Apfel kaufen"""
    clause = random_clause(rng)
    if clause.time and rng.random() < 0.5:
        rest = clause._replace(time=None)
        return f"{clause.time[0]} {english(rest)}.", f"{clause.time[1]} {german(rest, 'first')}."
    return f"{english(clause)}.", f"{german(clause, 'second')}."


def yes_no_question(rng):
    """does the man see him: sieht der Mann ihn"""
    clause = random_clause(rng, plain=True)
    return f"{english(clause, question=True)}?", f"{german(clause, 'first')}?"


def who_question(rng):
    """who helps the girl: wer hilft dem Mädchen"""
    clause = random_clause(rng, subject=Phrase("who", "", ("wer",), 2))
    return f"{english(clause)}?", f"{german(clause, 'second')}?"


def object_question(rng):
    """whom does the girl wait for: auf wen wartet das Mädchen; what does she talk about: worüber redet sie"""
    kind = rng.choice("PPTF")
    clause = random_clause(rng, gap=kind, plain=True)
    preposition = clause.verb.preposition
    if kind == "P":
        ask, frage = "whom", _join(preposition, ("wer", "wen", "wem")[CASE[clause.verb.frame]])
    else:
        ask, frage = "what", {"": "was", "über": "worüber", "von": "wovon"}[preposition]
    return f"{ask} {english(clause, question=True)}?", f"{frage} {german(clause, 'first')}?"


def adverb_question(rng):
    """where does the king go: wohin geht der König"""
    clause = random_clause(rng, frames=rng.choice([None, ("place", "way")]), negatable=False, plain=True)
    if clause.verb.frame in ("place", "way"):
        ask, frage = "where", "wo" if clause.verb.frame == "place" else "wohin"
        clause = clause._replace(complements=[])
    elif clause.time:
        ask, frage = "when", "wann"
        clause = clause._replace(time=None)
    else:
        ask, frage = "why", "warum"
    return f"{ask} {english(clause, question=True)}?", f"{frage} {german(clause, 'first')}?"


def subordinate(rng):
    """the dog sleeps because it ...: der Hund schläft, weil ..."""
    main, clause = random_clause(rng), random_clause(rng)
    conjunction, bindewort = rng.choice(CONJUNCTIONS)
    return (
        f"{english(main)} {conjunction} {english(clause)}.",
        f"{german(main, 'second')}, {bindewort} {german(clause, 'last')}.",
    )


def conditional(rng):
    """if the cat is hungry, she eats: wenn die Katze hungrig ist, isst sie"""
    clause = random_clause(rng)._replace(tense="present", time=None)
    while (main := random_clause(rng)).tense == "past":  # "if he sings, she slept" is no sentence
        pass
    return f"if {english(clause)}, {english(main)}.", f"wenn {german(clause, 'last')}, {german(main, 'first')}."


def report(rng):
    """she asks whether the king is rich: sie fragt, ob der König reich ist"""
    frame = rng.choice(["dass", "dass", "dass", "ob"])
    main = random_clause(rng, frames=[frame], negatable=frame == "dass")
    clause = random_clause(rng)
    conjunction = "that" if frame == "dass" else "whether"
    return (
        f"{english(main)} {conjunction} {english(clause)}.",
        f"{german(main, 'second')}, {frame} {german(clause, 'last')}.",
    )


def relative(rng):
    """the man whom the girl helps is old: der Mann, dem das Mädchen hilft, ist alt"""
    head = noun_phrase(rng, "PPAT", "definite")
    pronouns = ("die", "die", "denen") if head.gender == "p" else DER[head.gender]
    if rng.random() < 0.5:
        who = head._replace(subject="who" if head.kind == "P" else "that", german=pronouns)
        clause = random_clause(rng, subject=who)
        words, worte = english(clause), german(clause, "last")
    else:
        clause = random_clause(rng, gap=head.kind, plain=True)
        words = f"{'whom' if head.kind == 'P' else 'that'} {english(clause)}"
        worte = _join(clause.verb.preposition, pronouns[CASE[clause.verb.frame]], german(clause, "last"))
    subject = head._replace(subject=f"{head.subject} {words}", german=(f"{head.german[0]}, {worte},",))
    main = random_clause(rng, subject=subject)
    return f"{english(main)}.", f"{german(main, 'second')}."


def coordinate(rng):
    """the man sings, but the woman sleeps: der Mann singt, aber die Frau schläft"""
    one, other = random_clause(rng), random_clause(rng)
    word, wort = rng.choice([(" and", " und"), (", but", ", aber")])
    return f"{english(one)}{word} {english(other)}.", f"{german(one, 'second')}{wort} {german(other, 'second')}."


PATTERNS = [statement] * 8 + [yes_no_question, subordinate, relative] * 3 + [who_question]
PATTERNS += [object_question, adverb_question, conditional, report, coordinate] * 2
# No sentence says one of these words twice: not "the small man sees the small man".
CONTENT = {cell for table in (NOUNS, ADJECTIVES) for rows in table.values() for row in rows for cell in row[:2]}


def generate(split, seed=2017) -> list[tuple[str, str]]:
    """`SIZES[split]` distinct (English, German) pairs, the same ones for the same seed."""
    if split not in SIZES:
        raise ValueError(f"split must be one of {', '.join(SIZES)}, got {split!r}")
    return list(_splits(seed)[split].items())


@cache
def _splits(seed):
    rng = random.Random(seed)
    splits = {split: {} for split in SIZES}
    while any(len(splits[split]) < size for split, size in SIZES.items()):
        source, target = (text[0].upper() + text[1:] for text in rng.choice(PATTERNS)(rng))
        content = [word for word in re.findall(r"\w+", source.lower()) if word in CONTENT]
        split = split_of(source)
        if len(content) == len(set(content)) and len(splits[split]) < SIZES[split]:
            splits[split][source] = target
    return splits


def split_of(source):
    """The split an English sentence belongs to: 40 of 42 to train."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(source.encode()) % 42, "train")
