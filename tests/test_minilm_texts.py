"""Text that MiniLM is fitted to has nothing of what it is scored on."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("gensim")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


@pytest.mark.slow
def test_no_text_is_scored_and_none_has_a_sentence_that_is(tmp_path):
    from minilm_texts import lee50, probe, texts, wordsim

    folder = tmp_path / "wordnet"
    folder.mkdir()
    line = '00001740 {:02} n 01 x 0 000 | the meaning number {}; "an example"  \n'
    (folder / "data.noun").write_text("".join(line.format(i % 26, i) for i in range(7000)))
    glosses = dict(probe(tmp_path))
    assert len(glosses) == 6000
    found = texts(tmp_path)
    assert found == texts(tmp_path)
    assert len([text for text in found if text.startswith("the meaning number")]) == 1000
    assert glosses.keys().isdisjoint(found)
    assert {word.lower() for word in wordsim()[0]}.isdisjoint(text.lower() for text in found)
    whole = "\n".join(found)
    for document in lee50()[0]:
        assert document[:80] not in whole
        assert document[-80:] not in whole
