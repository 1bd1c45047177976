"""Texts for compressing MiniLM: what it is scored on, and what it may be fitted to.

Scored on: Lee-50 (`lee.cor`, 50 news documents with the similarity that people gave to every pair),
WordSim-353 (pairs of words) and a linear probe on 6,000 glosses of WordNet nouns (26 classes).

Fitted to, and never scored on: `lee_background.cor` (other news), Wikipedia articles, words that are not of
WordSim-353, and, where Debian's packages `wordnet-base` and `dict-gcide` are at hand, WordNet glosses
outside the probe and definitions of the GNU Collaborative International Dictionary. All but the last two
come with gensim's tests. Texts that are scored, or that share a sentence with a document of Lee-50, are
left out, and entries of the dictionary that were taken from WordNet.
"""

import bz2
import gzip
import random
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

GENSIM = Path(find_spec("gensim").origin).parent / "test" / "test_data"
PROBED = 6000
DEFINITIONS = 60_000  # of the dictionary; more would crowd out what is not a definition


def lee50():
    """50 news documents, the pairs of them, and the mean human similarity of every pair."""
    documents = (GENSIM / "lee.cor").read_text("latin-1").splitlines()
    human = np.loadtxt(GENSIM / "similarities0-1.txt")
    pairs = np.triu_indices(len(documents), 1)
    return documents, pairs, human[pairs]


def wordsim():
    """The words of WordSim-353, and the mean human relatedness of its pairs."""
    rows = [line.split("\t") for line in (GENSIM / "wordsim353.tsv").read_text("latin-1").splitlines()]
    rows = [row for row in rows if not row[0].startswith("#")]
    words = sorted({word for row in rows for word in row[:2]})
    pairs = [[words.index(row[side]) for row in rows] for side in (0, 1)]
    return words, pairs, np.array([float(row[2]) for row in rows])


def probe(data):
    """Glosses of WordNet nouns and their classes, the same 6,000 every time; nothing without WordNet."""
    return _nouns(data)[0]


@cache
def _nouns(data):
    """The probe's glosses with their classes, and those of the other nouns."""
    found = {}
    for kind, gloss in _glosses(data, "noun"):
        found.setdefault(gloss, kind)
    rows = sorted(found.items())
    random.Random(0).shuffle(rows)
    return rows[:PROBED], [gloss for gloss, _ in rows[PROBED:]]


def _glosses(data, part):
    """Class and gloss, without its examples, of every synset of one part of speech."""
    file = Path(data) / "wordnet" / f"data.{part}"
    if not file.exists():
        return
    for line in file.read_text("latin-1").splitlines():
        if not line.startswith("  "):
            kind, gloss = line.split(" ", 2)[1], line.split(" | ", 1)[1]
            yield kind, gloss.split('; "')[0].strip()


def texts(data, seed=0):
    """All texts to fit to, shuffled: none is scored, and none has a sentence of a document that is."""
    found = {text for source in (_news, _wikipedia, _words, _definitions) for text in source(data)}
    scored = {word.lower() for word in wordsim()[0]} | {gloss.lower() for gloss, _ in probe(data)}
    sentences = {part for document in lee50()[0] for part in _sentences(document)}
    kept = sorted(
        text for text in found if text.lower() not in scored and sentences.isdisjoint(_sentences(text))
    )
    random.Random(seed).shuffle(kept)
    return kept


def _sentences(text):
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+", text) if len(part) > 20]


def _news(data):
    for document in (GENSIM / "lee_background.cor").read_text("latin-1").splitlines():
        yield document
        yield from _sentences(document)


def _wikipedia(data):
    from gensim.corpora.wikicorpus import filter_wiki

    name = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    with bz2.open(GENSIM / name, "rb") as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag.endswith("}text") and element.text and not element.text.startswith("#"):
                for line in filter_wiki(element.text).splitlines():
                    if len(line) > 100 and line[0] not in "=*:|{!#":
                        yield line
                        yield from _sentences(line)


def _words(data):
    lines = (GENSIM / "questions-words.txt").read_text().splitlines()
    for line in lines:
        if not line.startswith(":"):
            yield from line.split()
    for file in sorted((Path(data) / "wordnet").glob("index.*")):
        for line in file.read_text("latin-1").splitlines():
            word = line.split(" ", 1)[0].replace("_", " ")
            if file.suffix in (".noun", ".verb", ".adj", ".adv") and re.fullmatch("[a-z -]{3,}", word):
                yield word


def _definitions(data):
    for part in ("verb", "adj", "adv"):
        yield from (gloss for _, gloss in _glosses(data, part))
    yield from _nouns(data)[1]
    file = Path(data) / "dictd" / "gcide.dict.dz"
    if not file.exists():
        return
    kept = []
    for entry in gzip.decompress(file.read_bytes()).decode("utf-8", "replace").split("\n\n"):
        if "[1913 Webster]" in entry and "WordNet" not in entry:  # which would be WordNet's glosses again
            text = " ".join(entry.split())
            text = re.sub(r"\[[^]]*\]|\([A-Z][a-z. &]*\)|--[A-Z][\w. ]*|[{}]", "", text)
            text = re.sub(r"^.*?\\,[^.]*\.\s*|^\d+\.\s*", "", text)
            text = " ".join(text.split())
            if 30 < len(text) < 400:
                kept.append(text)
    random.Random(0).shuffle(kept)
    yield from kept[:DEFINITIONS]
