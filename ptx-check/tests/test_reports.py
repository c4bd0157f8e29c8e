"""Faults as text, JSON and SARIF."""

import json

import pytest

from ptx_check.faults import KINDS, NOTES, Fault, Location
from ptx_check.reports import Findings, as_json, as_sarif, as_text

STORE = Location("kernel", 138, "mine.py:21:32 @[ mine.py:30:4 ]", "/elsewhere/mine.py")
LOAD = Location("kernel", 123, "mine.py:19:25", "/elsewhere/mine.py")


@pytest.fixture
def findings():
    found = Findings(launches=3)
    for test in ("test_a", "test_b"):
        found.add_faults([Fault("programs", "written and read", STORE, LOAD)] * 2, "sm_80", test)
    found.add_faults([Fault("rounding", "last bits", Location("kernel", 0, ""))], "sm_90")
    return found


def test_text_counts_a_fault_of_many_tests_once_and_json_has_the_places(findings):
    lines = as_text(findings).splitlines()
    assert lines[0].startswith("fault on sm_80 in test_a: programs: written and read, at kernel, PTX line 138")
    assert lines[1].startswith("note on sm_90: rounding")
    assert lines[2] == "3 launches, 1 fault, 1 note"
    report = json.loads(as_json(findings))
    assert report["launches"] == 3
    assert report["faults"][0]["at"]["ptx_line"] == 138
    assert report["faults"][0]["other"]["python"] == "mine.py:19:25"
    assert report["notes"][0]["other"] is None


def test_sarif_has_rules_places_and_the_other_access(findings):
    run = json.loads(as_sarif(findings))["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [*KINDS, *NOTES]
    fault, note = run["results"]
    assert run["tool"]["driver"]["rules"][fault["ruleIndex"]]["id"] == fault["ruleId"] == "programs"
    place = fault["locations"][0]["physicalLocation"]
    assert place == {
        "artifactLocation": {"uri": "file:///elsewhere/mine.py"}, "region": {"startLine": 21, "startColumn": 33}
    }  # fmt: skip
    assert fault["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 19
    assert (fault["level"], note["level"]) == ("error", "note")
    assert "physicalLocation" not in note["locations"][0]
