"""What ptxas makes of a PTX text: figures of each function, and the instructions of the loop that holds the products."""
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path


def find_tool(name):
    """ptxas or nvdisasm: of the toolkit, else of the Python packages nvidia-cuda-nvcc and nvidia-cuda-nvdisasm."""
    places = [shutil.which(name)] + [Path(f) / "bin" / name for f in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if f]
    places += sorted((Path(sysconfig.get_paths()["purelib"]) / "nvidia").glob(f"*/bin/{name}"))
    for place in filter(None, places):
        if os.access(place, os.X_OK):
            return str(place)
    raise FileNotFoundError(f"{name}: expected the CUDA toolkit, or the Python packages of requirements.txt")


def assemble(ptx, architecture, cubin):
    """{function: {registers, spills, stack, shared}}"""
    done = subprocess.run([find_tool("ptxas"), "-v", f"-arch={architecture}", str(ptx), "-o", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas {ptx}: {done.stderr}")
    result, function = {}, None
    for line in (done.stdout + done.stderr).splitlines():
        if m := re.search(r"Compiling entry function '(\w+)'", line):
            function = result.setdefault(m[1], {"shared": 0})
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            function["stack"], function["spills"] = int(m[1]), int(m[2]) + int(m[3])
        elif m := re.search(r"Used (\d+) registers", line):
            function["registers"] = int(m[1])
            if m := re.search(r"(\d+) bytes smem", line):
                function["shared"] = int(m[1])
    return result


def instructions(cubin, function):
    """([(opcode, operands, predicate)], {label: index})"""
    text = subprocess.run([find_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    start = text.index(f".text.{function}:")
    end = text.find("\n.section", start)
    code, labels = [], {}
    for line in text[start:end if end > 0 else len(text)].splitlines():
        if m := re.match(r"\s*(\.L_x_\d+):", line):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*(\S+)\s*(.*?);", line):
            code.append((m[2], m[3], m[1] or ""))
    return code, labels


def kind(instruction):
    opcode, _, predicate = instruction
    if opcode == "LDS" and "PT" in predicate:
        return "dummy"  # @!PT LDS: padding that ptxas puts before LDGSTS
    return "spill" if opcode[:3] in ("LDL", "STL") else opcode.split(".")[0]


def loop_of_products(cubin, function="attend"):
    """Counts of the loop that holds the HMMA, and of two branches in it that most key blocks skip: the mask (FSEL) and the
    rescaling (FMUL)."""
    code, labels = instructions(cubin, function)

    def target(i):
        m = re.search(r"(\.L_x_\d+)", code[i][1]) if code[i][0].startswith(("BRA", "BRX")) else None
        return labels.get(m[1]) if m else None
    for last in range(len(code)):
        first = target(last)
        if first is None or first > last or not any(code[j][0].startswith("HMMA") for j in range(first, last)):
            continue
        skipped, branches = set(), {}
        for j in range(first, last):
            end = target(j)
            if end is None or not j < end <= last:
                continue
            inside = Counter(kind(code[i]) for i in range(j + 1, end))
            for name, opcode in (("mask", "FSEL"), ("rescale", "FMUL")):
                if inside[opcode] >= 16 and not inside["HMMA"] and not inside["FFMA"] and inside["MUFU"] <= 8:
                    skipped |= set(range(j + 1, end))
                    branches[name] = end - j - 1
        counts = Counter(kind(code[j]) for j in range(first, last + 1) if j not in skipped)
        return counts, branches
    raise RuntimeError(f"{cubin}: no loop with HMMA")
