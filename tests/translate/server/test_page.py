"""Pages of the server; the script of the translation page is run by node."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest
import requests
from model_dirs import LINES
from served import Slow, serving
from waiting import PATIENCE

from fasttfm.translate.server.limits import Limits
from fasttfm.translate.translator import Translation

BROWSER = """
const elements = {}
const made = () => ({ value: "", textContent: "", options: [], add(each) { this.options.push(each) } })
const element = id => elements[id] ??= made()
globalThis.document = { getElementById: element }
globalThis.requestAnimationFrame = draw => setTimeout(draw, 0)
globalThis.Option = function (text, value) { return { text, value } }
const [address, lines, beam, fault, split] = JSON.parse(process.argv[2])
const fetched = globalThis.fetch
const sent = []
globalThis.fetch = async (path, options) => {
  if (options) sent.push(JSON.parse(options.body).text.length)
  const answer = await fetched(`${address}/${path}`, options)
  if (path == "health" || !fault) return answer
  if (fault == "lost") throw new TypeError("fetch failed")
  return fault == "proxy" ? new Response("<html>", { status: 502 }) : new Response((await answer.text()).slice(0, -30))
}
const page = require("fs").readFileSync(0, "utf8")
const form = page.match(/id="form"/) && element("form")
eval(page.match(/<script>([^]*)<\\/script>/)[1])
setTimeout(async () => {
  while (!element("model").options.length) await new Promise(done => setTimeout(done, 20))
  element("model").value = element("model").options[0].value
  if (split != null) element("split").value = split
  element("text").value = lines.join("\\n")
  element("beam").value = beam
  await form.onsubmit({ preventDefault() {} })
  await new Promise(done => setTimeout(done, 50))
  console.log(JSON.stringify([element("translation").textContent, element("state").textContent, sent]))
}, 0)
"""
"""Runs the page's script with a minimal browser: elements by id, and fetch() below an address, whose responses may be
truncated or replaced by a proxy's."""


def shown(url, lines, beam="2", fault=None, split=""):
    """The translation and state that the page shows, and the number of texts of each of its requests. split: language;
    None: the page's default."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    page = requests.get(url, timeout=PATIENCE).text
    words = json.dumps([url, lines, beam, fault, split])
    done = subprocess.run(
        ["node", "-e", BROWSER, "--", "page", words], input=page, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_page_translates_its_text(url, translator):
    lines = [*LINES[:3], ""]
    translated = "\n".join(best[0].text for best in translator.translate_nbest(lines))
    assert shown(url, lines) == [translated, "4 lines translated", [4]]
    assert shown(url, lines[:1])[1] == "1 line translated"


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"beam": "1000"}, "0 of 4 lines received: .*beam"),
        ({"fault": "cut"}, "4 of 4 lines received: the response was cut off: try again$"),
        ({"fault": "proxy"}, "0 of 4 lines received: the server answers with status 502$"),
        ({"fault": "lost"}, "0 of 4 lines received: the connection was lost"),
    ],
)
def test_the_page_tells_what_went_wrong(url, given, state):
    assert re.match(state, shown(url, [*LINES[:3], ""], **given)[1])


def test_the_page_splits_its_text_into_requests_within_the_limits(translator):
    lines = [*LINES, "é" * 200]
    with serving({"small": translator}, Limits(sentences=4, body_bytes=1200)) as url:
        translation, state, sent = shown(url, lines)
        assert translation.split("\n") == translator.translate(lines)
        assert (state, sent) == ("11 lines translated", [4, 4, 2, 1])
        assert "received: from line 5: the body has more than" in shown(url, [*lines[:4], "dog " * 600])[1]


def test_the_page_splits_sentences_by_default_and_halves_refused_requests(translator):
    pytest.importorskip("sentencex")
    lines = ["A dog. A boat.", "A dog.", "A boat. Two men. A dog.", "Grass."]
    expected = [" ".join(translator.translate([f"{each}." for each in line[:-1].split(". ")])) for line in lines]
    with serving({"opus-mt-de-en": translator}, Limits(sentences=4)) as url:
        translation, state, sent = shown(url, lines, split=None)
        assert translation.split("\n") == expected
        assert (state, sent) == ("4 lines translated", [4, 2, 2])
        assert "from line 2: 5 sentences were given" in shown(url, ["A dog.", "A dog. " * 5], split=None)[1]


class Mute(Slow):
    """Has no translation of a dog."""

    def translate_nbest(self, lines, *_):
        return [[Translation("" if "dog" in line else line, 0.0, 0.0)] for line in lines]


def test_empty_translations_are_marked_and_the_page_lists_their_lines(translator):
    with serving({"small": Mute(translator)}) as url:
        request = {"text": ["a boat", "a dog", " ", "a boat\na dog"]}
        answer = requests.post(f"{url}/translate", json=request, timeout=PATIENCE).json()["translations"]
        assert [best[0].get("empty", False) for best in answer] == [False, True, False, True]
        translation, state, _ = shown(url, ["a boat", "a dog", "", "two dogs"])
    assert translation == "a boat\n\n\n"
    assert state.startswith("4 lines translated. Part of line 2, 4 has an empty translation: ")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_allows_only_its_own_scripts_and_no_framing(url, path):
    page = requests.get(f"{url}{path}", timeout=PATIENCE)
    assert page.headers["content-type"].startswith("text/html")
    rules = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(rules)
    for kind in ("script", "style"):
        blocks = re.findall(f"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in blocks]
        assert [rule for rule in rules if rule.startswith(kind)] == [f"{kind}-src 'sha256-{each}'" for each in hashes]
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|\son\w+=|\sstyle=", page.text)
    assert set(re.findall(r'\$\("(\w+)"\)', page.text)) <= set(re.findall(r'id="(\w+)"', page.text))
