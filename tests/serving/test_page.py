"""The pages that the server shows, and the script of the one to type into, run by node."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest
import requests
from model_dirs import LINES

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from served import serving
from waiting import PATIENCE

from fasttfm.serving.limits import Limits

BROWSER = """
const elements = {}, options = []
const add = option => options.push(option)
const element = id => elements[id] ??= { value: "", textContent: "", add }
globalThis.document = { getElementById: element }
globalThis.requestAnimationFrame = draw => setTimeout(draw, 0)
globalThis.Option = function (name) { return new String(name) }
const [address, lines, beam, fault] = JSON.parse(process.argv[2])
const fetched = globalThis.fetch
const sent = []
globalThis.fetch = async (path, options) => {
  if (options) sent.push(JSON.parse(options.body).text.length)
  const answer = await fetched(`${address}/${path}`, options)
  if (path == "health" || !fault) return answer
  return fault == "proxy" ? new Response("<html>", { status: 502 }) : new Response((await answer.text()).slice(0, -30))
}
const page = require("fs").readFileSync(0, "utf8")
const form = page.match(/id="form"/) && element("form")
eval(page.match(/<script>([^]*)<\\/script>/)[1])
setTimeout(async () => {
  while (!options.length) await new Promise(done => setTimeout(done, 20))
  element("model").value = String(options[0])
  element("text").value = lines.join("\\n")
  element("beam").value = beam
  await form.onsubmit({ preventDefault() {} })
  await new Promise(done => setTimeout(done, 50))
  console.log(JSON.stringify([element("translation").textContent, element("state").textContent, sent]))
}, 0)
"""
"""The page's own script with as much of a browser as it asks for: elements by their id, and fetch below an address,
whose answers may be cut off or a proxy's."""


def shown(url, lines, beam="2", fault=None):
    """The translation that the page shows, its state, and how many texts each of its requests had."""
    page = requests.get(url, timeout=PATIENCE).text
    words = json.dumps([url, lines, beam, fault])
    done = subprocess.run(
        ["node", "-e", BROWSER, "--", "page", words], input=page, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_translates_what_is_typed(url, translator):
    page = requests.get(url, timeout=PATIENCE).text
    named = set(re.findall(r'\$\("(\w+)"\)', page))
    assert named <= set(re.findall(r'id="(\w+)"', page)), "an element that the script asks for is not there"
    lines = [*LINES[:3], ""]
    assert shown(url, lines) == ["\n".join(best[0].text for best in translator.translate_nbest(lines)), "", [4]]
    assert "beam" in shown(url, lines, "1000")[1]
    assert shown(url, lines, fault="cut")[1] == "the answer was cut off: ask again"
    assert shown(url, lines, fault="proxy")[1] == "the server answers with status 502"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_sends_no_more_at_once_than_the_server_takes(translator):
    lines = [*LINES, "é" * 200]
    with serving({"small": translator}, Limits(sentences=4, body_bytes=1200)) as url:
        translation, state, sent = shown(url, lines)
        assert translation.split("\n") == translator.translate(lines)
        assert (state, sent) == ("", [4, 4, 2, 1])
        assert shown(url, [*lines[:4], "dog " * 600])[1].startswith("from line 5: the body has more than")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_runs_its_own_scripts_alone_and_is_shown_in_no_other(url, path):
    page = requests.get(f"{url}{path}", timeout=PATIENCE)
    assert page.headers["content-type"].startswith("text/html")
    rules = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(rules)
    for kind in ("script", "style"):
        blocks = re.findall(f"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in blocks]
        assert [rule for rule in rules if rule.startswith(kind)] == [f"{kind}-src 'sha256-{each}'" for each in hashes]
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|\son\w+=|\sstyle=", page.text)
