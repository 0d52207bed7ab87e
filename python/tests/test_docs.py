"""The snippets of docs/python.md, those that need NumPy only. torch_test.py runs the others."""
import re
import unittest
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "python.md"
OTHERS = ("torch", "transformers")


def snippets(wants_others):
    found = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    return [s for s in found if any(re.search(rf"import.*\b{name}|from attune\.{name}", s) for name in OTHERS) == wants_others]


class Docs(unittest.TestCase):
    def test_snippets(self):
        self.assertGreaterEqual(len(snippets(False)), 2)
        for text in snippets(False):
            with self.subTest(text):
                exec(compile(text, str(DOCS), "exec"), {})


if __name__ == "__main__":
    unittest.main()
