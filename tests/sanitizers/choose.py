"""A small catalogue for builds under a sanitizer: from the catalogues given, the kernels of one ISA for d 64 and for any d
that are not only run when asked for; and of each strategy for CUDA the first such one, for the host's side of devices.

    choose.py OUT.json CATALOGUE.json…
"""
import json
import sys
from pathlib import Path

some = [e for path in sys.argv[2:] for e in json.loads(Path(path).read_text())
        if e["dk"] in (64, "any") and "on_request" not in e["constraints"].get("traits", [])]
chosen = [e for e in some if e["device"] == "cpu" and e["isa"] == "avx2"]
# The tests of faults make kernels of their own after this one, which every CPU has.
chosen += [e for e in some if e["isa"] == "sse41" and e["dk"] == "any"][:1]
for e in some:
    # mlir_mma is mlir_mma_split without the merge.
    if e["device"] == "cuda" and e["strategy"] != "mlir_mma" and e["strategy"] not in {c["strategy"] for c in chosen}:
        chosen.append(e)
assert len({e["strategy"] for e in chosen}) >= 10, [e["name"] for e in chosen]
text = json.dumps(chosen, indent=1)
out = Path(sys.argv[1])
if not out.exists() or out.read_text() != text:
    out.write_text(text)
