#!/usr/bin/env python3
"""The contract's lines and their tests, against docs/contract.md: each numbered line has tests that name it, whatever the
document names is there, and each Reported test has its row.

  names_test.py CONTRACT.md CONTRACT_TEST FAULTS_TEST
"""
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path


def tests_of(program):
    suite, names = "", []
    for line in subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout.splitlines():
        line = line.partition("#")[0].rstrip()
        if line.startswith("  "):
            names.append(suite + line.strip())
        elif line.endswith("."):
            suite = line.removesuffix(".").split("/")[0] + "."
    return names


def of_row(test, row):
    """Whether a test has the row in its name: Reported.E8_and_I5_… has E8 and I5."""
    return re.match(rf"Reported\.([A-J][0-9]*_and_)*{row}_", test) is not None


def matches(test, pattern):
    row = re.fullmatch(r"Reported\.([A-J][0-9]+)(_\*)?", pattern)
    return of_row(test, row[1]) if row else fnmatchcase(test, pattern)


def named_in(cell):
    """Patterns of the tests in a cell: `Suite`, `Suite.test_*`, or `C3_*` after a `Reported.C2_*`."""
    for pattern in re.findall(r"`([A-Za-z][A-Za-z0-9_.*]*)`", cell):
        if "." in pattern:
            yield pattern
        elif re.fullmatch(r"[A-J][0-9]+(_\*)?", pattern):
            yield f"Reported.{pattern}"
        elif re.fullmatch(r"Contract_[a-z0-9_]+|Faults|Reported", pattern):
            yield f"{pattern}.*"


text, tests, wrong = Path(sys.argv[1]).read_text(), [t for p in sys.argv[2:] for t in tests_of(p)], []
lines = re.search(r"## Line by line\n(.*?)\n## ", text, re.S)[1]
rows = {int(n): cells for n, cells in re.findall(r"^\| (\d+) \|(.*)\|$", lines, re.M)}
if sorted(rows) != list(range(1, 18)):
    wrong.append(f"the lines are {sorted(rows)}: expected 1 to 17")
for number in range(1, 18):
    own = f"Contract_3_{number}"
    if not any(t.startswith(own + ".") for t in tests):
        wrong.append(f"line {number} has no test: expected some {own}.*")
    if f"`{own}`" not in rows.get(number, ""):
        wrong.append(f"line {number} does not name `{own}`")
reports = re.search(r"## Public bug reports\n(.*)", text, re.S)[1]
listed = re.findall(r"^\| ([A-J].*?) \|.*\| (.*) \|$", reports, re.M)
for cell in [c.rsplit("|", 1)[-1] for c in rows.values()] + [c for _, c in listed]:
    for pattern in named_in(cell):
        if not any(matches(t, pattern) for t in tests):
            wrong.append(f"`{pattern}` is named, and no test is called so")
ids = {i for row, _ in listed for i in re.findall(r"[A-J][0-9]*", row)}
for i in sorted(ids):
    if not any(of_row(t, i) for t in tests):
        wrong.append(f"row {i} has no test")
for t in tests:
    if t.startswith("Reported."):
        for i in re.findall(r"[A-J][0-9]*(?=_)", re.match(r"([A-J][0-9]*_and_)*[A-J][0-9]*_", t.removeprefix("Reported."))[0]):
            if i not in ids:
                wrong.append(f"{t}: the document has no row {i}")
print(f"{len(rows)} lines, {len(ids)} rows of reports, {len(tests)} tests")
sys.exit("\n".join(wrong) or 0)
