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
from served import serving
from waiting import PATIENCE

from fasttfm.translate.server.limits import Limits

BROWSER = """
const elements = {}
const made = () => ({ value: "", textContent: "", options: [], add(each) { this.options.push(each) } })
const element = id => elements[id] ??= made()
globalThis.document = { getElementById: element }
globalThis.requestAnimationFrame = draw => setTimeout(draw, 0)
globalThis.Option = function (text, value) { return { text, value } }
const [address, lines, split] = JSON.parse(process.argv[2])
const fetched = globalThis.fetch
const sent = []
globalThis.fetch = async (path, options) => {
  if (options) sent.push(JSON.parse(options.body).text.length)
  return fetched(`${address}/${path}`, options)
}
const page = require("fs").readFileSync(0, "utf8")
const form = page.match(/id="form"/) && element("form")
eval(page.match(/<script>([^]*)<\\/script>/)[1])
setTimeout(async () => {
  while (!element("model").options.length) await new Promise(done => setTimeout(done, 20))
  element("model").value = element("model").options[0].value
  if (split != null) element("split").value = split
  element("text").value = lines.join("\\n")
  element("beam").value = "2"
  await form.onsubmit({ preventDefault() {} })
  await new Promise(done => setTimeout(done, 50))
  console.log(JSON.stringify([element("translation").textContent, element("state").textContent, sent]))
}, 0)
"""
"""Runs the page's script with a minimal browser: elements by id, and fetch() below an address."""


def shown(url, lines, split=""):
    """The translation and state that the page shows, and the number of texts of each of its requests. split: language;
    None: the page's default."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    page = requests.get(url, timeout=PATIENCE).text
    words = json.dumps([url, lines, split])
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


def test_the_page_splits_sentences_by_default_and_halves_refused_requests(translator):
    pytest.importorskip("sentencex")
    lines = ["A dog. A boat.", "A dog.", "A boat. Two men. A dog.", "Grass."]
    expected = [" ".join(translator.translate([f"{each}." for each in line[:-1].split(". ")])) for line in lines]
    with serving({"opus-mt-de-en": translator}, Limits(sentences=4)) as url:
        translation, state, sent = shown(url, lines, split=None)
        assert translation.split("\n") == expected
        assert (state, sent) == ("4 lines translated", [4, 2, 2])
        assert "from line 2: 5 sentences were given" in shown(url, ["A dog.", "A dog. " * 5], split=None)[1]


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
