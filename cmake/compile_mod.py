#!/usr/bin/env python3
"""Compiles a file of user functions (generators/halide/include/attune/mods.h) into a plug-in of the generator program.

  compile_mod.py --cxx PROGRAM... --halide DIR FILE.cpp -o PLUGIN

What the compiler complains of is shown as one line for each place in FILE: of templates it says where they were asked for.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

INCLUDE = Path(__file__).resolve().parent.parent / "generators/halide/include"
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-fdiagnostics-color=never"]
LOCATION = re.compile(r"^(?P<file>[^\s:][^:]*):(?P<line>\d+):(?:\d+:)?\s+(?P<what>.*)$")


class UserFunctionError(Exception):
    pass


def summary(source, text):
    """The errors of `text`, as lines 'FILE:LINE: error: ...', the first one of each place."""
    def mine(file):
        return Path(file).resolve() == Path(source).resolve()

    errors, place, waiting = {}, None, None
    for line in text.splitlines():
        found = LOCATION.match(line)
        if not found:
            if re.match(r"^\S+: In (member )?function", line):
                place = None
            continue
        number, what = int(found["line"]), found["what"]
        kind = re.match(r"(?:fatal )?error: (.*)", what)
        if mine(found["file"]) and kind:
            errors.setdefault(number, kind[1])
            place = waiting = None
        elif mine(found["file"]):
            # GCC says it ahead of the error, Clang behind it.
            if "required from here" in what:
                place = number
            elif waiting and ("requested here" in what or "expanded from" in what or "in expansion of" in what):
                errors.setdefault(number, waiting)
                waiting = None
        elif kind:
            message = re.sub(r"static assertion failed(?:: )?|static_assert failed(?: due to requirement '[^']*')? ?|^static_assert.*?: ", "", kind[1]).strip('"')
            if place:
                errors.setdefault(place, message)
            else:
                waiting = message
    return [f"{source}:{number}: error: {message}" for number, message in sorted(errors.items())]


def compile_mod(cxx, halide, source, plugin):
    command = [*cxx, *FLAGS, f"-I{INCLUDE}", "-isystem", f"{halide}/include", str(source), "-o", str(plugin)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return
    text = done.stderr + done.stdout
    lines = summary(source, text) or text.strip().splitlines()[:12]
    raise UserFunctionError("\n".join(lines or [f"{source}: {command[0]} ended with status {done.returncode}"]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cxx", required=True, nargs="+")
    parser.add_argument("--halide", required=True)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("source")
    args = parser.parse_args()
    try:
        compile_mod(args.cxx, args.halide, args.source, args.output)
    except UserFunctionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
