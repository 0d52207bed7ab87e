#!/usr/bin/env python3
"""Turns catalogues (JSON, one entry a kernel) into what the build needs.

  catalogue.py --out DIR --generator PROGRAM [--mlir-generator SCRIPT] [--ranking RANKING.json --projections PROJECTIONS.json]
               [--set NAME] [--isa ISA ...] [--device DEVICE ...] [--score-mod FILE.cpp ...] [--mask-mod FILE.cpp ...] CATALOGUE.json ...

writes into DIR:
  kernels.inc     ATTUNE_KERNEL(name) for each kernel
  kernels.cpp     the descriptors, with adapters around the generated functions, and the table of them
  projections.inc ATTUNE_PROJECTION(name, isa, rows, panel): the matmul kernels of multi-head attention
  ranking.inc     the planner's ranking of strategies
  kernels.cmake   attune_halide_object(FUNCTION args...), attune_device_object or attune_mlir_object for each generated function,
                  attune_mma_ptx(NAME TILE args...) for each tile of a tensor core kernel
  manifest.json   per kernel, its phases and the commands that make them (attune info --schedule|--stmt|--asm)

Kernels whose backend is mlir are left out where there is no --mlir-generator, and those of other ISAs and devices where
--isa and --device name some.

The kernels are the library's own (the table builtin_kernels), or with --set NAME a set beside them: NAME_kernels.h declares
attune_register_NAME(), and NAME is part of every symbol, so that two sets may have a kernel in common. kernel_set.py makes libraries of
other catalogues with the same code.

User functions (--score-mod, --mask-mod; generators/halide/include/attune/mods.h) go into all kernels, whose names they are added to,
or, where an entry names some in its `mods`, into that one as it says. A file's name is the function's.

An entry's `phases` maps the phase's name to the generator that makes it; the end of the generator's name says which
adapter it gets (see runtime/halide/phases.h and runtime/mlir/phases.h).
"""
import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "generators/mlir/mma"))
import shape  # noqa: E402

# The whole feature chain of each ISA: Halide implies none of it. Its own dispatch, which does not know Zen 4, is never asked; that
# feature stands for avx512_bf16 and what comes with it on both Zen 4 and Sapphire Rapids (runtime/cpu_features.cpp asks for each).
X86 = "x86-64-linux-sse41"
ISA_TARGETS = {
    "sse41": X86,
    "avx2": X86 + "-avx-f16c-fma-avx2",
    "avx512": X86 + "-avx-f16c-fma-avx2-avx512-avx512_skylake",
    "avx512_bf16": X86 + "-avx-f16c-fma-avx2-avx512-avx512_skylake-avx512_cannonlake-avx512_zen4",
}
COMMON_FEATURES = "-no_asserts-no_bounds_query-no_runtime"
# Kernels that an autoscheduler made keep Halide's checks: nobody knows which sizes its tiles need.
CHECKED_FEATURES = "-no_runtime"
# Devices: the token that stands for the ISA, and Halide's target. Launches keep Halide's checks, which are what sees a driver's error.
DEVICE_FEATURES = "-no_bounds_query-no_runtime"
DEVICE_TARGETS = {
    ("opencl", "opencl"): "x86-64-linux-opencl",
    ("vulkan", "vulkan"): "x86-64-linux-vulkan-vk_int8-vk_int16-vk_float16",
    ("cuda", "sm_80"): "x86-64-linux-cuda-cuda_capability_80",
}
DEVICES = {"cpu": "ATTUNE_CPU", "opencl": "ATTUNE_OPENCL", "vulkan": "ATTUNE_VULKAN", "cuda": "ATTUNE_CUDA"}
extra_features = ""  # of every Halide target: --features
prefix = ""  # of every function that is made: --set
DTYPES = {"f32": ("ATTUNE_F32", "float32"), "bf16": ("ATTUNE_BF16", "bfloat16"), "f16": ("ATTUNE_F16", "float16")}
FLAGS = {
    "scale": "ATTUNE_SCALE", "causal": "ATTUNE_CAUSAL", "mask": "ATTUNE_MASK", "bias": "ATTUNE_BIAS", "kv_len": "ATTUNE_KV_LEN",
    "offsets": "ATTUNE_OFFSETS", "softcap": "ATTUNE_SOFTCAP", "alibi": "ATTUNE_ALIBI", "sink": "ATTUNE_SINK",
    "scores": "ATTUNE_SCORES", "strided_v": "ATTUNE_STRIDED_V", "deterministic": "ATTUNE_DETERMINISTIC",
}
TRAITS = {"own_threads": "ATTUNE_TRAIT_OWN_THREADS", "quadratic": "ATTUNE_TRAIT_QUADRATIC", "strict": "ATTUNE_TRAIT_STRICT",
          "on_request": "ATTUNE_TRAIT_ON_REQUEST", "any_q": "ATTUNE_TRAIT_ANY_Q", "any_kv": "ATTUNE_TRAIT_ANY_KV", "any_o": "ATTUNE_TRAIT_ANY_O"}
# Adapters: end of the generator's name -> (template, function type).
ADAPTERS = {"pack_keys": "pack", "attend": "attend", "partial": "attend", "merge": "merge", "score": "score", "mask": "mask",
            "softmax": "softmax", "matmul": "matmul", "whole": "whole"}
# The strategies whose kernels can have user functions.
USER_STRATEGIES = ["flash", "rowstrip", "split_kv", "stagewise", "gpu_block", "gpu_split_kv", "gpu_stagewise"]
user_functions = []  # UserFunction of each file, in the order in which they are applied: --score-mod, --mask-mod
# Adapters of devices (runtime/device/phases.h), by the generator's whole name.
DEVICE_ADAPTERS = {"gpu_block": "block", "gpu_strict": "strict", "gpu_score": "score", "gpu_mask": "mask", "gpu_softmax": "softmax",
                   "gpu_matmul": "matmul", "gpu_partial": "partial", "gpu_merge": "merge"}
# The same for MLIR. Its ISAs are those whose features generators/mlir/attune_mlir_gen.py knows.
MLIR_ADAPTERS = {"mlir_pack": "pack", "mlir_flash": "attend", "mlir_rowblock": "attend"}
MLIR_ISAS = ["avx2", "avx512"]
# Parameters of the generators that several strategies share; the others get all of the entry's.
SHARED_GENERATORS = {"pack_keys": ["panel"], "merge": [], "mlir_pack": ["dk", "panel"], "gpu_strict": []}
REQUIRED = ["schema", "name", "strategy", "backend", "device", "isa", "dtypes", "dk", "dv", "variant", "mods", "phases", "params",
            "constraints", "why"]


class CatalogueError(Exception):
    pass


def check(condition, message):
    if not condition:
        raise CatalogueError(message)


class UserFunction:
    """A file of user functions: of scores or of masks."""
    def __init__(self, kind, source, folder):
        self.kind, self.source, self.name = kind, Path(source).resolve(), Path(source).stem
        self.plugin = Path(folder).resolve() / f"{self.name}.mod.so"
        option = "--score-mod" if kind == "score" else "--mask-mod"
        check(self.source.is_file(), f"{option} is '{source}': there is no such file")
        check(re.fullmatch(r"[a-z][a-z0-9]*", self.name), f"{option} is '{source}': expected a file's name of small letters and digits, since "
              "it is part of the kernels' names")
        self.arguments = [option, str(self.plugin)]


def take_user_functions(scores, masks, folder):
    user_functions[:] = [UserFunction("score", f, folder) for f in scores or []] + [UserFunction("mask", f, folder) for f in masks or []]
    for i, f in enumerate(user_functions):
        for other in user_functions[:i]:
            check(f.name != other.name or f.source == other.source and f.kind != other.kind,
                  f"{f.source} and {other.source}: two files of user functions have one name: expected different ones")


def user_functions_of(entry):
    return [f for f in user_functions if f.name in entry["mods"]]


def add_user_functions(entry, where):
    """Puts the names of those files into an entry that names none, and checks those that an entry names."""
    names = list(dict.fromkeys(f.name for f in user_functions))
    for name in entry["mods"]:
        check(name in names, f"{where}: mods has '{name}': expected {'one of ' + ', '.join(names) if names else 'a file ' + name + '.cpp as SCORE_MOD or MASK_MOD'}")
    if names and not entry["mods"]:
        entry["mods"] = names
        entry["name"] += "".join(f"_{name}" for name in names)
    if entry["mods"]:
        entry["mods"] = [name for name in names if name in entry["mods"]]  # in the order in which they are applied
        check(entry["backend"] == "halide" and entry["strategy"] in USER_STRATEGIES,
              f"{where}: strategy is '{entry['strategy']}' ({entry['backend']}): expected one of {', '.join(USER_STRATEGIES)}, "
              "made by Halide, since there are user functions")


def user_set(entry):
    """The name of what an entry's user functions have in common with other kernels."""
    return f"{prefix}attn_user_" + "_".join(entry["mods"])


def is_device(entry):
    return entry["device"] != "cpu"


def adapter_of(entry, generator):
    if entry["backend"] == "halide" and is_device(entry):
        check(generator in DEVICE_ADAPTERS, f"{entry['_where']}: generator '{generator}': expected one of {', '.join(DEVICE_ADAPTERS)}")
        return DEVICE_ADAPTERS[generator]
    if entry["backend"] == "mlir":
        check(generator in MLIR_ADAPTERS, f"{entry['_where']}: generator '{generator}': expected one of {', '.join(MLIR_ADAPTERS)}")
        return MLIR_ADAPTERS[generator]
    for ending, adapter in ADAPTERS.items():
        if generator == ending or generator.endswith("_" + ending):
            return adapter
    raise CatalogueError(f"generator '{generator}': expected a name that ends in one of {', '.join(ADAPTERS)}")


def is_mma(entry):
    """Tensor core kernels: CUDA, made by generators/mlir/attune_mma_gen.py as PTX."""
    return entry["backend"] == "mlir" and entry["device"] == "cuda"


def size(value, where):
    if value == "any":
        return 0
    check(isinstance(value, int) and value > 0, f"{where} is {value!r}: expected a positive integer or \"any\"")
    return value


def check_types(entry, where):
    """Everything that the rest of this program takes for granted, so that a wrong entry is a message and nothing else."""
    def text(value, what):
        check(isinstance(value, str) and value, f"{where}: {what} is {value!r}: expected a text")

    def whole(value, what):
        check(isinstance(value, int) and not isinstance(value, bool) and value >= 0, f"{where}: {what} is {value!r}: expected a whole number")

    for key in ("name", "strategy", "backend", "device", "isa", "variant", "why"):
        text(entry[key], f"'{key}'")
    check(re.fullmatch(r"[a-z][a-z0-9_]*", entry["name"]), f"{where}: 'name' is {entry['name']!r}: expected small letters, digits and _")
    check(entry["variant"] in ("plain", "strict"), f"{where}: 'variant' is {entry['variant']!r}: expected plain or strict")
    for key in ("dtypes", "phases", "params", "constraints"):
        check(isinstance(entry[key], dict), f"{where}: '{key}' is {entry[key]!r}: expected an object")
    for key in ("q", "kv", "o"):
        text(entry["dtypes"].get(key), f"'dtypes.{key}'")
    check(entry["phases"], f"{where}: 'phases' is empty: expected at least one")
    for phase, generator in entry["phases"].items():
        check(re.fullmatch(r"[a-z_]+", phase), f"{where}: phase {phase!r}: expected small letters and _")
        text(generator, f"'phases.{phase}'")
    for key, value in entry["params"].items():
        check(isinstance(value, (int, float, str)), f"{where}: 'params.{key}' is {value!r}: expected a number or a text")
        check(re.fullmatch(r"[A-Za-z0-9_.]+", key) and re.fullmatch(r"[A-Za-z0-9_.+= -]*", str(value)),
              f"{where}: 'params.{key}' is {value!r}: expected letters, digits, spaces and _ . + - =")
    constraints = entry["constraints"]
    for key in ("dk", "dv"):
        size(entry[key], f"{where}: '{key}'")
        if key in constraints:
            check(isinstance(constraints[key], list) and len(constraints[key]) == 2, f"{where}: 'constraints.{key}' is {constraints[key]!r}: expected [from, to]")
            for value in constraints[key]:
                whole(value, f"'constraints.{key}'")
    for key, value in constraints.get("least", {}).items() if isinstance(constraints.get("least", {}), dict) else [("least", None)]:
        whole(value, f"'constraints.least.{key}'")
    for name, items in (("'mods'", entry["mods"]), ("'constraints.flags'", constraints.get("flags", [])), ("'constraints.kv'", constraints.get("kv", [])),
                        ("'constraints.traits'", constraints.get("traits", []))):
        check(isinstance(items, list), f"{where}: {name} is {items!r}: expected a list")
        for item in items:
            text(item, f"an element of {name}")
    for key in ("window", "gqa"):
        value = constraints.get(key, True)
        check(isinstance(value, bool), f"{where}: 'constraints.{key}' is {value!r}: expected true or false")


def check_name(entry, where):
    """attn_<strategy>_<dtype>_d<dk>[x<dv>]_<isa>[_<tiles>][_strict][_<mods>]; d is the bucket, the largest that it takes."""
    def bucket(key):
        return "big" if entry[key] == "any" else entry["constraints"].get(key, [0, entry[key]])[1]

    dk, dv, types = bucket("dk"), bucket("dv"), entry["dtypes"]
    strategy = entry["strategy"]
    if strategy.endswith("_split") and entry["name"].endswith("_split"):
        strategy = strategy[:-len("_split")]  # which may stand at the end
    dtype = types["q"] if types["kv"] == types["q"] else f"{types['q']}kv{types['kv']}"
    bucket_parts = [f"d{dk}" + (f"x{dv}" if dv != dk else "")] + (["big"] if dk == "big" else [])
    begins = [f"attn_{strategy}_{dtype}_{d}_{isa}" for d in bucket_parts for isa in (entry["isa"], entry["isa"].replace("sm_", "sm"))]
    begin = next((x for x in begins if entry["name"].startswith(x)), begins[0])
    rest = entry["name"][len(begin):]
    check(entry["name"].startswith(begin) and re.fullmatch(r"(_[a-z0-9]+)*", rest),
          f"{where}: the name is '{entry['name']}': expected {begin}, then perhaps _tiles, _strict and _mods")
    parts = rest.split("_")
    check(("strict" in parts) == (entry["variant"] == "strict"), f"{where}: the name is '{entry['name']}': expected _strict in it if and only if 'variant' is strict")
    for mod in entry["mods"]:
        check(mod in parts, f"{where}: the name is '{entry['name']}': expected _{mod} in it, as 'mods' has it")


def read(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CatalogueError(f"{path}: {error}") from error


def check_conversions(entry, where):
    """What the adapters of the CPU convert, and what a kernel has to take as it comes."""
    params, types = entry["params"], entry["dtypes"]
    pairs = params.get("pairs", "false")
    check(pairs in ("true", "false"), f"{where}: params.pairs is {pairs!r}: expected \"true\" or \"false\"")
    if not is_device(entry):
        wanted = "bf16" if pairs == "true" else "f32"
        for key in ("q", "kv"):
            check(types[key] == wanted, f"{where}: dtypes.{key} is {types[key]!r}: expected {wanted}, as params.pairs is {pairs}")
    if "kv" in entry["constraints"]:
        in_place = entry["backend"] == "halide" and not is_device(entry) and pairs == "false" and not params.get("panel") and "main" in entry["phases"]
        check(in_place, f"{where}: constraints.kv is given: expected that for kernels of the CPU by Halide only, which read K and V in place")
        check(sorted(kv_types(entry)) == sorted(DTYPES), f"{where}: constraints.kv is {entry['constraints']['kv']!r}: expected those of "
              f"{', '.join(DTYPES)} that dtypes.kv is not")


def load(paths):
    return checked((path, read(path)) for path in paths)


def checked(catalogues):
    """The kernels of (where they are from, list of entries) each."""
    kernels, names = [], set()
    for path, entries in catalogues:
        check(isinstance(entries, list), f"{path}: expected a list of kernels")
        for entry in entries:
            check(isinstance(entry, dict), f"{path}: a kernel is {entry!r}: expected an object")
            where = f"{path}: kernel {entry.get('name', '?')}"
            for key in REQUIRED:
                check(key in entry, f"{where}: '{key}' is missing")
            check(entry["schema"] == 1, f"{where}: schema is {entry['schema']}: expected 1")
            check_types(entry, where)
            check(entry["device"] in DEVICES, f"{where}: device is '{entry['device']}': expected one of {', '.join(DEVICES)}")
            check(entry["backend"] in ("halide", "mlir"), f"{where}: backend is '{entry['backend']}': expected halide or mlir")
            add_user_functions(entry, where)
            check(entry["name"] not in names, f"{where}: the name is taken")
            names.add(entry["name"])
            isas = [isa for device, isa in DEVICE_TARGETS if device == entry["device"]] if is_device(entry) else list(ISA_TARGETS)
            check(entry["isa"] in isas, f"{where}: isa is '{entry['isa']}': expected one of {', '.join(isas)}")
            if entry["backend"] == "mlir" and not is_device(entry):
                check(entry["isa"] in MLIR_ISAS, f"{where}: isa is '{entry['isa']}': expected one of {', '.join(MLIR_ISAS)} with MLIR")
            for key in ("q", "kv", "o"):
                check(entry["dtypes"].get(key) in DTYPES, f"{where}: dtypes.{key} is {entry['dtypes'].get(key)!r}: expected one of {', '.join(DTYPES)}")
            for flag in entry["constraints"].get("flags", []):
                check(flag in FLAGS, f"{where}: constraints.flags has '{flag}': expected some of {', '.join(FLAGS)}")
            check_conversions(entry, where)
            for trait in entry["constraints"].get("traits", []):
                check(trait in TRAITS, f"{where}: constraints.traits has '{trait}': expected some of {', '.join(TRAITS)}")
            if "blocks" in entry["params"]:  # MLIR: the last block is the tile
                last = str(entry["params"]["blocks"]).split("+")[-1]
                entry["params"].setdefault("q", int(last) if last.isdigit() else last)
            check_name(entry, where)
            entry["_where"] = where
            kernels.append(entry)
    return kernels


def traits_of(entry):
    """Those of the entry, and which types its adapters convert: Q for each tile unless it is multiplied in pairs of bf16, O on its
    way out, K and V where f32 is packed of them or there is a function for each type."""
    traits = list(entry["constraints"].get("traits", []))
    if is_device(entry) or "own_threads" in traits:
        return traits
    pairs = entry["params"].get("pairs") == "true"
    packs = "pack" in entry["phases"]
    return traits + ["any_q"] * (not pairs) + ["any_kv"] * (not pairs and (packs or len(kv_types(entry)) > 1)) + ["any_o"]


def kv_types(entry):
    """Types of K and V that the main phase has a function for."""
    return [entry["dtypes"]["kv"]] + entry["constraints"].get("kv", [])


def target_of(entry, generator):
    if is_device(entry):
        # The strict phase is what NaN and infinities are left to.
        return DEVICE_TARGETS[entry["device"], entry["isa"]] + DEVICE_FEATURES + "-strict_float" * (generator == "gpu_strict")
    own_threads = "own_threads" in entry["constraints"].get("traits", [])
    return ISA_TARGETS[entry["isa"]] + (CHECKED_FEATURES if own_threads else COMMON_FEATURES + "-user_context") + extra_features


def takes_user_functions(entry, generator):
    return bool(entry["mods"]) and adapter_of(entry, generator) in ("attend", "mask", "block", "partial", "strict")


def user_arguments(entry):
    return [argument for f in user_functions_of(entry) for argument in f.arguments]


def user_objects(entry):
    """{part: (function, [argument, ...])} of what the runtime asks the user functions: which blocks are seen, scores of a row."""
    if not entry["mods"] or is_device(entry):
        return {}
    name, target = f"{user_set(entry)}_{entry['isa']}", target_of(entry, "")
    parts = {"blocks": target} if any(f.kind == "mask" for f in user_functions_of(entry)) else {}
    parts["row"] = target + "-strict_float"
    return {part: (f"{name}_{part}", [f"user_{part}", f"{name}_{part}", t] + user_arguments(entry)) for part, t in parts.items()}


def user_params(kernels):
    """{name of a file: arguments of the generator program that list the parameters of user functions there}."""
    return {f"{user_set(k)}.params.inc": user_arguments(k) for k in kernels if k["mods"]}


def user_descriptor(entry, out):
    """Declares what entries with these user functions share; returns its name."""
    ns = "gpu" if is_device(entry) else "halide"
    name = f"user_{'_'.join(entry['mods'])}_" + ("device" if is_device(entry) else entry["isa"])
    if name in out.declared:
        return name
    out.declared.add(name)
    objects = user_objects(entry)
    for function, _ in objects.values():
        out.insert(0, f'extern "C" std::remove_pointer_t<halide::UserFn> {function}_argv;')
    params = f"params_{'_'.join(entry['mods'])}"
    if params not in out.declared:
        out.declared.add(params)
        out.append(f'constexpr attune_mod_param {params}[] = {{\n#include "{user_set(entry)}.params.inc"\n}};')
    values = [params, f"sizeof {params} / sizeof {params}[0] - 1", str(any(f.kind == "score" for f in user_functions_of(entry))).lower()]
    if not is_device(entry):
        values += [f"{objects[part][0]}_argv" if part in objects else "nullptr" for part in ("blocks", "row")]
    out.append(f"constexpr {ns}::UserMeta {name}{{{', '.join(values)}}};")
    return name


def functions_of(entry):
    """[(phase, generator, function, [argument, ...])] of a kernel."""
    if entry["backend"] == "mlir":
        return mlir_functions_of(entry)
    result = []
    type_name = "type" if is_device(entry) else "kv_type"
    variants = [(phase, generator, kv) for phase, generator in entry["phases"].items()
                for kv in (kv_types(entry) if phase == "main" else kv_types(entry)[:1])]
    for phase, generator, kv in variants:
        args = [f"{type_name}={DTYPES[kv][1]}"] if generator != "merge" else []  # all but merge read K or V
        if generator in SHARED_GENERATORS:
            chosen = SHARED_GENERATORS[generator]
            for k in chosen:
                check(k in entry["params"], f"{entry['_where']}: params.{k} is missing: {generator} takes it")
            args += [f"{k}={entry['params'][k]}" for k in chosen]
            parts = [generator, entry["dtypes"]["kv"], entry["isa"]] + [f"{k}{entry['params'][k]}" for k in chosen]
            if takes_user_functions(entry, generator):
                parts += entry["mods"]
                args += user_arguments(entry)
            function = prefix + "attn_" + "_".join(parts)
        else:
            for key in ("dk", "dv"):
                args.append(f"{key}={size(entry[key], entry['_where'] + ': ' + key)}")
            for key, value in entry["params"].items():
                if "." in key and not key.startswith("autoscheduler."):  # a knob of one phase only: "score.rows"
                    only, key = key.split(".", 1)
                    if only != phase:
                        continue
                # These are not the generator's; on a device it unrolls a part.
                if key != "autoscheduler_plugin" and (key != "split_keys" or is_device(entry)):
                    args.append(f"{key}={value}")
            if "autoscheduler_plugin" in entry["params"]:
                args += ["--plugin", f"@AUTOSCHEDULERS@/{entry['params']['autoscheduler_plugin']}"]
            if kv != entry["dtypes"]["kv"]:
                phase = f"{phase}.{kv}"
            if takes_user_functions(entry, generator):
                args += user_arguments(entry)
            function = f"{prefix}{entry['name']}__{phase.replace('.', '_')}"
        result.append((phase, generator, function, [generator, function, target_of(entry, generator)] + args))
    return result


def mlir_functions_of(entry):
    result = []
    for phase, generator in entry["phases"].items():
        params = {"dk": size(entry["dk"], entry["_where"] + ": dk"), "dv": size(entry["dv"], entry["_where"] + ": dv"), **entry["params"]}
        check(params["dk"] and params["dv"], f"{entry['_where']}: dk and dv: expected numbers with MLIR")
        function = f"{prefix}{entry['name']}__{phase}"
        if generator in SHARED_GENERATORS:
            for k in SHARED_GENERATORS[generator]:
                check(k in params, f"{entry['_where']}: params.{k} is missing: {generator} takes it")
            params = {k: params[k] for k in SHARED_GENERATORS[generator]}
            function = prefix + "attn_" + "_".join([generator, entry["dtypes"]["kv"], entry["isa"]] + [f"{k}{v}" for k, v in params.items()])
        params.pop("q", None)  # the runtime's
        result.append((phase, generator, function, [generator, function, entry["isa"]] + [f"{k}={v}" for k, v in params.items()]))
    return result


def load_projections(path):
    """The matmul kernels of multi-head attention: {"rows": .., "panel": .., "isa": .., "why": ..} each."""
    result = []
    for entry in json.loads(Path(path).read_text()):
        check(entry.get("isa") in ISA_TARGETS, f"{path}: isa is {entry.get('isa')!r}: expected one of {', '.join(ISA_TARGETS)}")
        for rows in (entry["rows"], 1):
            name = f"matmul_f32_{entry['isa']}_r{rows}c{entry['panel']}"
            command = ["projection", name, ISA_TARGETS[entry["isa"]] + COMMON_FEATURES + extra_features, f"rows={rows}", f"panel={entry['panel']}"]
            result.append((name, entry["isa"], rows, entry["panel"], command))
    return result


def descriptor(entry, out):
    name, where, p, c = entry["name"], entry["_where"], entry["params"], entry["constraints"]
    dk, dv = size(entry["dk"], where + ": dk"), size(entry["dv"], where + ": dv")
    meta = f"meta_{name}"
    for key in ("q", "k") if not is_device(entry) else ():
        check(isinstance(p.get(key), int) and p[key] > 0, f"{where}: params.{key} is {p.get(key)!r}: expected a positive integer")
    ns = "gpu" if entry["backend"] == "halide" and is_device(entry) else entry["backend"]  # of attune::rt
    adapters = [adapter_of(entry, g) for g in entry["phases"].values()]
    user = f"&{user_descriptor(entry, out)}" if entry["mods"] else "nullptr"
    if ns == "gpu":
        half_as_bits = entry["device"] == "opencl"
        numbers = f"{dk}, {dv}, {p.get('split_keys', 0)}, {str('score' in adapters).lower()}, {str(half_as_bits).lower()}, {user}"
    elif ns == "halide":
        keeps, whole = (str("score" in adapters).lower(), str("whole" in adapters).lower())
        pairs = p.get("pairs", "false")
        numbers = f"{dk}, {dv}, {p['q']}, {p['k']}, {p.get('panel', 0)}, {p.get('split_keys', 0)}, {keeps}, {whole}, {pairs}, {user}"
    else:
        check(isinstance(p.get("panel"), int) and p["panel"] > 0, f"{where}: params.panel is {p.get('panel')!r}: expected a positive integer")
        check("blocks" in p, f"{where}: params.blocks is missing")
        check(str(p["blocks"]).split("+")[-1] == str(p["q"]), f"{where}: params.blocks is {p['blocks']}: expected q={p['q']} at its end")
        numbers = f"{dk}, {dv}, {p['q']}, {p['panel']}, {str('mlir_rowblock' in entry['phases'].values()).lower()}"
    out.append(f"constexpr {ns}::KernelMeta {meta}{{{numbers}}};")
    runs, memory = {}, []
    for phase, generator, function, _ in functions_of(entry):
        adapter = adapter_of(entry, generator)
        camel = "".join(w.capitalize() for w in adapter.split("_"))
        symbol = "_mlir_ciface_" * (ns == "mlir") + function
        if takes_user_functions(entry, generator):
            adapter, camel, symbol = f"{adapter}_user", "User", f"{function}_argv"
        template = f"{meta}, mem_{function}, {symbol}" if ns == "halide" else f"{meta}, {symbol}"
        tasks = "gpu::one_task" if ns == "gpu" else f"{ns}::{adapter}_phase_tasks<{meta}>"
        run = f"{ns}::{adapter}_phase<{template}>"
        phase, _, kv = phase.partition(".")
        runs.setdefault(phase, (tasks, []))[1].append((DTYPES[kv or entry["dtypes"]["kv"]][0], run))
        if ns == "gpu":
            if function not in out.declared:
                out.declared.add(function)
                out.insert(0, f'extern "C" gpu::{camel}Fn {symbol};')
            continue
        memory.append(f"mem_{function}")
        if function not in out.declared:
            out.declared.add(function)
            out.insert(0, f'extern "C" std::remove_pointer_t<{ns}::{camel}Fn> {symbol};\nconstexpr {ns}::Memory mem_{function}\n#include "{function}.scratch.inc"\n;')
    phases = []
    for phase, (tasks, by_type) in runs.items():
        run = by_type[0][1] if len(by_type) == 1 else f"{ns}::by_kv<{', '.join(f'{kv}, {run}' for kv, run in by_type)}>"
        phases.append(f'    {{"{phase}", {run}, {tasks}}},')
    scratch = f"{meta}, mem_{name}" if ns == "halide" else meta
    code, functions = "nullptr, 0", {f: None for _, _, f, _ in functions_of(entry)}
    if ns == "gpu":
        includes = "\n".join(f'#include "{f}.code.inc"' for f in functions)
        out.append(f"constexpr attune_device_code code_{name}[] = {{\n{includes}\n}};")
        code = f"code_{name}, sizeof code_{name} / sizeof code_{name}[0]"
        sizes = f"gpu::kernel_shared_bytes<{meta}>, nullptr, nullptr"
    else:
        sizes = f"{ns}::kernel_shared_bytes<{meta}>, {ns}::kernel_scratch_bytes<{scratch}>, {ns}::kernel_stack_bytes<mem_{name}>"
        out.append(f"constexpr {ns}::Memory mem_{name} = {ns}::largest({{{', '.join(memory)}}});")
    out.append(f"constexpr attune_phase phases_{name}[] = {{\n" + "\n".join(phases) + "\n};")
    sizes += f", {code}, nullptr"
    out.append(initialiser(entry, len(phases), sizes))


def initialiser(entry, num_phases, rest):
    """The kernel's attune_kernel; rest: from shared_bytes on."""
    name, where, p, c = entry["name"], entry["_where"], entry["params"], entry["constraints"]
    dk, dv = size(entry["dk"], where + ": dk"), size(entry["dv"], where + ": dv")
    flags = " | ".join(FLAGS[f] for f in ["scale", "deterministic", "strided_v"] + c.get("flags", []))
    traits = " | ".join(TRAITS[t] for t in traits_of(entry)) or "0"
    dk_range = c.get("dk", [dk or 1, dk or 1 << 20])
    dv_range = c.get("dv", [dv or 1, dv or 1 << 20])
    least = ", ".join(str(c.get("least", {}).get(key, 0)) for key in ("n", "m", "h"))
    types = ", ".join(DTYPES[entry["dtypes"][k]][0] for k in ("q", "kv", "o"))
    quoted = json.dumps(json.dumps(p))
    mods, params = ",".join(entry["mods"]), f"params_{'_'.join(entry['mods'])}"
    mods = f'"{mods}", {params}, sizeof {params} / sizeof {params}[0] - 1' if mods else "nullptr, nullptr, 0"
    return (
        f"const attune_kernel {name}{{sizeof(attune_kernel), ATTUNE_KERNEL_ABI, \"{name}\", \"{entry['strategy']}\", \"{entry['backend']}\", "
        f"\"{entry['isa']}\", {DEVICES[entry['device']]}, {types}, {dk}, {dv}, {dk_range[0]}, {dk_range[1]}, {dv_range[0]}, {dv_range[1]}, {least}, {flags}, "
        f"{int(c.get('window', True))}, {int(c.get('gqa', True))}, {traits}, {quoted}, {json.dumps(entry['why'], ensure_ascii=False)}, "
        f"phases_{name}, {num_phases}, {rest}, {mods}}};")



def mma_descriptor(entry, out, folder):
    """A tensor core kernel: a table of tiles, whose PTX is in the library as text."""
    name, where, p = entry["name"], entry["_where"], entry["params"]
    rows, codes = [], []
    for tile, parameters in shape.tiles(entry):
        try:
            s = shape.parse(parameters)
        except shape.ShapeError as error:
            raise CatalogueError(f"{where}: params.{tile}: {error}") from error
        check(bool(p.get("split_keys")) == bool(s.split), f"{where}: params.split_keys is {p.get('split_keys')!r}: expected a number where split is 1, and nowhere else")
        wanted = ["main", "strict"] + ["merge"] * s.split
        check(list(entry["phases"]) == wanted, f"{where}: phases are {', '.join(entry['phases'])}: expected {', '.join(wanted)}")
        symbol = f"{prefix}ptx_{name}_{tile}"
        out.append(f'asm(".pushsection .rodata\\n.globl {symbol}\\n.hidden {symbol}\\n{symbol}: .incbin \\"{folder.resolve()}/{name}_{tile}.ptx\\"\\n.byte 0\\n'
                   f'.popsection");\nextern "C" const char {symbol}[];')
        rows.append(f"    {{{s.dk}, {s.dv}, {s.q}, {s.k}, {s.warps}, {s.dynamic_bytes}, {str(not s.qreg).lower()}, {symbol}}},\n")
        codes.append(f'#include "{name}_{tile}.code.inc"\n')
    check(rows, f"{where}: params has no tile: expected d64, d192x128 or the like")
    out.append(f"constexpr mlir::MmaTile tiles_{name}[] = {{\n{''.join(rows)}}};")
    out.append(f'constexpr mlir::MmaMeta meta_{name}{{"{name}", {p.get("split_keys", 0)}, tiles_{name}, {len(rows)}}};')
    out.append(f"constexpr attune_device_code code_{name}[] = {{\n{''.join(codes)}}};")
    phases = "\n".join(f'    {{"{phase}", mlir::mma_{phase}_phase<meta_{name}>, mlir::mma_tasks}},' for phase in wanted)
    out.append(f"constexpr attune_phase phases_{name}[] = {{\n{phases}\n}};")
    out.append(initialiser(entry, len(wanted), f"mlir::mma_kernel_shared_bytes<meta_{name}>, nullptr, nullptr, code_{name}, "
                           f"sizeof code_{name} / sizeof code_{name}[0], mlir::mma_refuses"))


# What makes a set known: the library's own kernels are in its registry's table from the start.
REGISTER = """
extern "C" attune_status attune_register_SET(void) {
    for (const attune_kernel *const *k = attune::rt::SET_kernels; *k; ++k)
        if (attune_find_kernel((*k)->name) != *k)
            if (const attune_status status = attune_register_kernel(*k)) return status;
    return ATTUNE_OK;
}

// Where this object is linked, its kernels are there from the start.
__attribute__((constructor)) static void register_at_start() {
    if (attune_register_SET() != ATTUNE_OK) std::fprintf(stderr, "attune: kernels of SET: %s\\n", attune_last_error());
}
"""


def header(set_name):
    guard = f"ATTUNE_{set_name.upper()}_KERNELS_H"
    return f"""/* Made by cmake/catalogue.py: the kernels that attune_add_kernels({set_name} ...) made. */
#ifndef {guard}
#define {guard}
#include <attune/attune.h>
#ifdef __cplusplus
extern "C" {{
#endif
/* Adds the kernels to the registry. Doing so again changes nothing. An executable and a shared library do it when they are
 * loaded; whoever links a static library that has the kernels calls it once. */
attune_status attune_register_{set_name}(void);
#ifdef __cplusplus
}}
#endif
#endif
"""


class Lines(list):
    def __init__(self):
        super().__init__()
        self.declared = set()


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


HEAD = "// Made by cmake/catalogue.py from the catalogues.\n"
# What a plug-in exports (attune_load_kernels). The hooks are those of the runtime's code that is linked into it.
PLUGIN = """
extern "C" ATTUNE_API const attune_kernel_set *attune_plugin(void) {
    attune::rt::install_halide_hooks();
    static const attune_kernel_set set{sizeof(attune_kernel_set), ATTUNE_KERNEL_ABI, ATTUNE_VERSION, attune::rt::builtin_kernels, %d};
    return &set;
}
"""


def describe(kernels, programs, autoschedulers, folder, set_name=""):
    """(text of kernels.cpp, {function: (made by, command)}, manifest) of the kernels."""
    lines, functions, manifest = Lines(), {}, {}
    for entry in kernels:
        if is_mma(entry):
            mma_descriptor(entry, lines, folder)
            program = [programs["mlir"][0], str(Path(programs["mlir"][1]).with_name("attune_mma_gen.py")), "mlir_mma"]
            manifest[entry["name"]] = [{"phase": tile, "generator": "mlir_mma", "function": f"{entry['name']}_{tile}",
                                        "command": program + [f"{entry['name']}_{tile}", entry["isa"]] + parameters} for tile, parameters in shape.tiles(entry)]
            continue
        descriptor(entry, lines)
        phases = []
        for phase, generator, function, command in functions_of(entry):
            command = [a.replace("@AUTOSCHEDULERS@", autoschedulers) for a in command]
            made_by = "device" if entry["backend"] == "halide" and is_device(entry) else entry["backend"]
            functions.setdefault(function, (made_by, command))
            check(functions[function] == (made_by, command), f"{entry['_where']}: function {function} is made in two ways")
            phases.append({"phase": phase, "generator": generator, "function": function, "command": programs[entry["backend"]] + command})
        for function, command in user_objects(entry).values():
            functions.setdefault(function, ("halide", command))
        manifest[entry["name"]] = phases
    headers = {f"{set_name}_kernels.h"} if set_name else {"arena.h", "registry.h"}
    for k in kernels:
        headers.add("mlir/mma.h" if is_mma(k) else "device/phases.h" if is_device(k) else f"{k['backend']}/phases.h")
    space, linkage = (f"set_{set_name}", "static ") if set_name else ("builtin", "")
    table = "".join(f"&{space}::{k['name']}, " for k in kernels)
    text = (HEAD + "".join(f'#include "{h}"\n' for h in sorted(headers)) + f"\n#include <cstdio>\n#include <type_traits>\n\nnamespace attune::rt {{\nnamespace {space} {{\n"
            + "".join(f"extern const attune_kernel {k['name']};\n" for k in kernels) + "\n".join(lines)
            + f"\n}}\n{linkage}const attune_kernel *const {set_name or 'builtin'}_kernels[] = {{{table}nullptr}};\n}}\n" + (REGISTER.replace("SET", set_name) if set_name else ""))
    return text, functions, manifest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--generator", required=True)
    parser.add_argument("--autoschedulers", default="")
    parser.add_argument("--mlir-generator", default="", help="empty: kernels made by MLIR are left out")
    parser.add_argument("--ranking", type=Path)
    parser.add_argument("--projections", type=Path)
    parser.add_argument("--set", default="", dest="set_name", help="a set beside the library's own kernels")
    parser.add_argument("--isa", action="append", default=[], help="only kernels of this ISA")
    parser.add_argument("--device", action="append", default=[], help="only kernels of this device")
    parser.add_argument("catalogues", nargs="+")
    parser.add_argument("--score-mod", action="append", help="user functions of scores")
    parser.add_argument("--mask-mod", action="append", help="user functions of masks")
    parser.add_argument("--features", default="", help="more features of every Halide target, e.g. -asan")
    args = parser.parse_args()
    global extra_features, prefix
    extra_features = args.features
    if args.set_name:
        check(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", args.set_name), f"--set is '{args.set_name}': expected the name of a C function's end")
        prefix = args.set_name + "_"
    for isa in args.isa:
        known = list(ISA_TARGETS) + [i for _, i in DEVICE_TARGETS]
        check(isa in known, f"--isa is '{isa}': expected one of {', '.join(known)}")
    for device in args.device:
        check(device in DEVICES, f"--device is '{device}': expected one of {', '.join(DEVICES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    take_user_functions(args.score_mod, args.mask_mod, args.out)
    kernels = [k for k in load(args.catalogues) if (k["backend"] != "mlir" or args.mlir_generator) and (not args.device or k["device"] in args.device)
               and (not args.isa or k["isa"] in args.isa or is_device(k) and not {i for d, i in DEVICE_TARGETS if d == k["device"]} & set(args.isa))]
    check(kernels or not args.set_name, f"{', '.join(args.catalogues)}: no kernel is left of ISAs {', '.join(args.isa) or 'any'} and devices "
          f"{', '.join(args.device) or 'any'}")
    mma = [k for k in kernels if is_mma(k)]
    programs = {"halide": [args.generator], "mlir": [sys.executable, args.mlir_generator]}
    text, functions, manifest = describe(kernels, programs, args.autoschedulers, args.out, args.set_name)
    projections = load_projections(args.projections) if args.projections else []
    for name, _, _, _, command in projections:
        functions[name] = ("halide", command)
    write(args.out / "kernels.inc", HEAD + "".join(f"ATTUNE_KERNEL({k['name']})\n" for k in kernels))
    write(args.out / "kernels.cpp", text)
    if args.set_name:
        write(args.out / f"{args.set_name}_kernels.h", header(args.set_name))
    write(args.out / "projections.inc", HEAD + "".join(f"ATTUNE_PROJECTION({n}, \"{isa}\", {rows}, {panel})\n" for n, isa, rows, panel, _ in projections))
    ranking = json.loads(args.ranking.read_text()) if args.ranking else {"rules": []}
    rules = "".join(f"    {{{r.get('rows_min', 0)}, {r.get('rows_max', 'INT64_MAX')}, {{{', '.join(json.dumps(s) for s in r['strategies'])}}}}},\n"
                    for r in ranking["rules"])
    write(args.out / "ranking.inc", HEAD + rules)
    write(args.out / "kernels.cmake", "# Made by cmake/catalogue.py from the catalogues.\n"
          + "".join(f'attune_user_function("{source}" "{plugin}")\n' for source, plugin in dict.fromkeys((f.source, f.plugin) for f in user_functions))
          + "".join(f"attune_user_params({name} " + " ".join(f'"{a}"' for a in arguments) + ")\n" for name, arguments in user_params(kernels).items())
          + "".join(f"attune_{backend}_object(" + " ".join(f'"{a}"' for a in [f] + c) + ")\n" for f, (backend, c) in functions.items())
          + "".join(f"attune_mma_ptx({k['name']} {tile} {' '.join(parameters)})\n" for k in mma for tile, parameters in shape.tiles(k)))
    write(args.out / "manifest.json", json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except CatalogueError as error:
        sys.exit(f"catalogue: {error}")
