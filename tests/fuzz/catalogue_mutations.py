"""Catalogues with mistakes in them: cmake/catalogue.py takes each, or says what is wrong; it never ends in another error.

    catalogue_mutations.py FOLDER_OF_CATALOGUE_PY CATALOGUE.json…
"""
import copy
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import catalogue  # noqa: E402

CATALOGUES = [Path(p) for a in sys.argv[2:] for p in a.split(";")]
ODD = [None, True, False, 0, -1, 1.5, 1 << 70, "", "f32", "any", "x y", "a;b", "$(rm)", "ü", [], [1], [1, 2], ["q"], {}, {"q": 1}, [[]], "attn_"]


def every_place(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from every_place(inner, path + (key,))


def mutate(entries, rng):
    entries = copy.deepcopy(entries)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        places = [p for p in every_place(entries) if p]
        if not places:
            break
        *outer, last = rng.choice(places)
        holder = entries
        for key in outer:
            holder = holder[key]
        how = rng.randrange(4)
        if how == 0:
            del holder[last]
        elif how == 1 and isinstance(holder, dict):
            holder[rng.choice(["n", "k", "panel", "blocks", "zz", ""])] = copy.deepcopy(rng.choice(ODD))
        elif how == 2 and isinstance(holder[last], str) and holder[last]:
            text = holder[last]
            at = rng.randrange(len(text))
            holder[last] = text[:at] + rng.choice(["", "_", "9", "\0", '"', "\n"]) + text[at + 1:]
        else:
            holder[last] = copy.deepcopy(rng.choice(ODD))
    return entries


def digest(path):
    """As main() does it, without writing files. True: taken."""
    try:
        kernels = catalogue.load([path])
        lines = catalogue.Lines()
        for entry in kernels:
            if catalogue.is_mma(entry):  # their descriptors look at files that the build makes
                continue
            catalogue.descriptor(entry, lines)
            catalogue.functions_of(entry)
        return True
    except catalogue.CatalogueError as error:
        if not str(error) or ":" not in str(error):
            raise AssertionError(f"a message that names nothing: {error!r}") from error
        return False


def main():
    rng = random.Random(1)
    taken = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.json"
        for source in CATALOGUES:
            text = source.read_text()
            entries = json.loads(text)
            assert digest(source), f"{source} itself is refused"
            for n in range(1500):
                some = rng.sample(entries, min(len(entries), 2))
                mutant = json.dumps(mutate(some, rng))
                if n % 10 == 0:  # and bytes that are no JSON at all
                    at = rng.randrange(len(mutant))
                    mutant = mutant[:at] + rng.choice(["", "{", "]", "\\", "\x7f", "[" * 3000]) + mutant[at + rng.randrange(3):]
                path.write_text(mutant)
                try:
                    good = digest(path)
                except Exception:
                    print(f"after {n} mutations of {source}, seed 1, this catalogue ends in an error:\n{mutant}", file=sys.stderr)
                    raise
                taken += good
                refused += not good
        path.write_bytes(b"\xff\xfe[]")
        assert not digest(path)
    print(f"{taken} taken, {refused} refused")
    assert taken > 50 and refused > 1000


main()
