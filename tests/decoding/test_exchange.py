"""XLIFF and TMX: units without a translation get one, with their codes, and all else stays."""

import sys

import pytest

etree = pytest.importorskip("lxml.etree")
from fasttfm.decoding.exchange import Exchange  # noqa: E402
from fasttfm.errors import UserError  # noqa: E402

XLIFF = """<?xml version="1.0" encoding="UTF-8"?>
<xliff xmlns="urn:oasis:names:tc:xliff:document:1.2" version="1.2">
 <file original="a" source-language="en" datatype="html">
  <body>
   <trans-unit id="1"><source> a &lt;dog&gt; <g id="1" ctype="bold">runs <x id="2"/></g>&amp;amp;</source></trans-unit>
   <trans-unit id="2">
    <source>done</source>
    <target>fertig</target>
   </trans-unit>
   <trans-unit id="3"><source>empty</source><target state="new">empty</target></trans-unit>
   <trans-unit id="4" translate="no"><source>kept</source></trans-unit>
   <group translate="no"><trans-unit id="5"><source>kept</source></trans-unit></group>
   <trans-unit id="6"><source>a<bpt id="1">&lt;b&gt;</bpt>b<ept id="1">&lt;/b&gt;</ept><!-- c --></source><seg-source
   >a</seg-source></trans-unit>
   <trans-unit id="7"><source/></trans-unit>
  </body>
 </file>
</xliff>
"""
SECOND = """<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="en"><file id="f"><unit id="u">
<segment><source>see <pc id="1">this</pc><ph id="2"/></source></segment><ignorable><source> </source></ignorable>
<segment><source>the <mrk id="m" translate="no">Name</mrk></source></segment></unit></file></xliff>
"""
TMX = """<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en" datatype="plaintext" segtype="sentence" adminlang="en"/><body>
<tu><tuv xml:lang="en-GB"><seg>a <hi>dog</hi></seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>done</seg></tuv><tuv xml:lang="DE-AT"><seg>fertig</seg></tuv></tu>
<tu srclang="fr"><tuv xml:lang="en"><seg>x</seg></tuv><tuv xml:lang="fr"><seg>un</seg></tuv></tu>
<tu><tuv xml:lang="it"><seg>uno</seg></tuv></tu></body></tmx>
"""


def translated(text, form, language=None):
    """The lines of a document, and the document with a Hund for each dog."""
    document = Exchange.parse(text.encode(), form, language)
    lines = document.lines
    document.fill(line.replace("dog", "Hund") for line in lines)
    return lines, document.write().decode()


def targets(written):
    root = etree.fromstring(written.encode())
    return [etree.tostring(each, with_tail=False).decode() for each in root.iter("{*}target")]


def test_units_of_xliff_get_translations_with_their_codes():
    lines, written = translated(XLIFF, "xliff", "de")
    assert lines == ["a &lt;dog&gt; <c0>runs <c1/></c0>&amp;amp;", "empty", "a<c0/>b<c1/><c2/>", ""]
    names = 'xmlns="urn:oasis:names:tc:xliff:document:1.2"'
    assert targets(written) == [
        f'<target {names}> a &lt;Hund&gt; <g id="1" ctype="bold">runs <x id="2"/></g>&amp;amp;</target>',
        f"<target {names}>fertig</target>",
        f"<target {names}>empty</target>",
        f'<target {names}>a<bpt id="1">&lt;b&gt;</bpt>b<ept id="1">&lt;/b&gt;</ept><!-- c --></target>',
        f"<target {names}/>",
    ]
    assert "<seg-source>a</seg-source><target>" in written
    assert 'target-language="de"' in written
    again = Exchange.parse(written.encode(), "xliff", None)
    assert again.lines == [""], "what has a translation stays"
    assert len(translated(XLIFF, "xliff")[0]) == 4, "XLIFF 1.2 need not say a language"


def test_segments_of_xliff_2_get_translations():
    lines, written = translated(SECOND, "xliff", "de")
    assert lines == ["see <c0>this</c0><c1/>", "the <c0/>"]
    assert 'trgLang="de"' in written
    assert '<mrk id="m" translate="no">Name</mrk></target>' in written
    with pytest.raises(UserError, match="trgLang: give --target-language"):
        Exchange.parse(SECOND.encode(), "xliff", None)


def test_units_of_tmx_get_a_variant_of_the_language():
    lines, written = translated(TMX, "tmx", "de")
    assert lines == ["a <c0>dog</c0>", "un"]
    assert '<tuv xml:lang="de"><seg>a <hi>Hund</hi></seg></tuv>' in written
    assert written.count('xml:lang="de"') == 2
    assert '<!DOCTYPE tmx SYSTEM "tmx14.dtd">' in written
    with pytest.raises(UserError, match="needs --target-language"):
        Exchange.parse(TMX.encode(), "tmx", None)


def test_what_xml_cannot_hold_becomes_a_space():
    document = Exchange.parse(TMX.encode(), "tmx", "de")
    document.fill(["a\x00b\x0c\ufffe <c0>x</c0>", "y"])
    assert "<seg>a b   <hi>x</hi></seg>" in document.write().decode()


def test_no_file_is_read_and_no_entity_multiplied(tmp_path):
    (tmp_path / "secret").write_text("secret")
    entities = f'<!ENTITY s SYSTEM "file://{tmp_path}/secret"><!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">'
    units = "<file><body><trans-unit id='1'><source>x &s; &b; y</source></trans-unit></body></file>"
    evil = f'<!DOCTYPE xliff [{entities}]><xliff version="1.2">{units}</xliff>'
    document = Exchange.parse(evil.encode(), "xliff", None)
    assert document.lines == ["x <c0/> <c1/> y"]
    document.fill(document.lines)
    written = document.write().decode()
    assert "<target>x &s; &b; y</target>" in written
    assert "aaaaa" not in written.partition("]>")[2]


@pytest.mark.parametrize(
    ("content", "form", "message"),
    [
        (b"", "xliff", "is not XML"),
        (b"a dog", "xliff", "is not XML"),
        (b"<xliff>", "xliff", "is not XML"),
        (b"<html/>", "xliff", "its root is <html>, not <xliff>: give another --format"),
        (XLIFF.encode(), "tmx", "its root is <xliff>, not <tmx>"),
        (b"<a>" * 100_000, "xliff", "is not XML"),
    ],
)
def test_what_is_not_such_a_document_is_told_in_a_line(content, form, message):
    with pytest.raises(UserError, match=message) as told:
        Exchange.parse(content, form, "de")
    assert "\n" not in str(told.value)


def test_without_lxml_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lxml", None)
    with pytest.raises(UserError, match=r"pip install .fasttfm\[xliff\]"):
        Exchange.parse(b"<xliff/>", "xliff", None)
