#!/usr/bin/env python3
"""The messages that docs/troubleshooting.md and docs/kernels.md explain are those of the sources.   docs_test.py SOURCE"""
import re
import sys
from pathlib import Path

FOLDERS = ("runtime", "cmake", "generators", "python/src")


def main():
    root = Path(sys.argv[1])
    # As a reader sees them: text that a line's end cuts in two is joined, and what is filled in is one sign.
    sources = "\n".join(p.read_text() for f in FOLDERS for p in sorted((root / f).rglob("*")) if p.suffix in (".cpp", ".h", ".py", ".cmake", ".in", ".txt"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    messages, missing = 0, []
    for name in ("troubleshooting.md", "kernels.md"):
        for line in (root / "docs" / name).read_text().splitlines():
            row = re.match(r"\| `([^`]*)` \|", line)
            if not row or name == "kernels.md" and " " not in row[1] or row[1].startswith(("CATALOGUE", "ISAS", "DEVICES device")):
                continue
            messages += 1
            pieces = [p for p in re.split(r"…|(?<=is )\w+(?=: expected (?:1|cpu))", row[1]) if len(p) > 4]
            missing += [f"docs/{name}: {row[1]!r}: no source has {p!r}" for p in pieces if p not in sources]
    print("\n".join(missing) or f"{messages} messages are those of the sources")
    return 1 if missing or messages < 20 else 0


if __name__ == "__main__":
    sys.exit(main())
