#!/usr/bin/env python3
"""Writes the onnx package's node tests of attention where a C++ program can read them.

  export.py FOLDER

FOLDER/index.json lists the cases: {"onnx": VERSION, "nodes": [NODE, …], "without_equivalent": [{name, reason}, …]}.
A NODE is what `attune onnx-attention` takes, and says besides its "name", which "suite" it is from, the "file" beside
the index with its inputs and expected outputs, and the tolerances "rtol" and "atol" of the onnx package. Types are
kept: f16 and bf16 are stored as such. Where the package has a model with that very node, "model" is its .onnx file.

Suites: `attention` are the node tests of the operator Attention. `flexattention` are those of FlexAttention (a preview
operator whose score_mod is a graph), each as the node of Attention that computes the same; "as" says how. The tests
whose names end in _expanded are the same cases with the operator replaced by primitive ones, so there is no attention
node in them. `expansion` are random nodes of this script, see random_cases(), with the outputs that the operator's own
definition (its expansion into primitive operators) gives; the suite of the package covers little of how the inputs
combine.
"""
import json
import struct
import sys
import warnings
from pathlib import Path

try:
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper
    from onnx.backend.test.case.node import function_testcase_helper
    from onnx.backend.test.loader import load_node_model_tests
    from onnx.reference import ReferenceEvaluator
except ImportError as error:
    sys.exit(f"export.py: {error} in {sys.executable}; expected the packages of requirements.txt")

# The tests are of this version; another one has others, or other expectations under the same names.
VERSION = "1.23.2"
ATTENTION_CASES = 93
FLEX_CASES = 22

DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "int64": "I64"}

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def named(names, arrays):
    """The arrays by name: where a name is empty, there is no array."""
    names = [name for name in names if name]
    if len(names) != len(arrays):
        sys.exit(f"export.py: {len(arrays)} arrays for the names {names}; expected one for each")
    return dict(zip(names, arrays))


class Writer:
    def __init__(self, folder):
        self.folder = folder
        self.nodes = []

    def add(self, suite, name, opset, inputs, outputs, attributes, tensors, rtol=1e-3, atol=1e-7, **more):
        file = name + ".safetensors"
        write_safetensors(self.folder / file, tensors)
        self.nodes.append({"name": name, "suite": suite, "op_type": "Attention", "opset": opset,
                           "inputs": list(inputs), "outputs": list(outputs), "attributes": attributes, "file": file,
                           "rtol": rtol, "atol": atol, **more})


# --- the package's tests of Attention -------------------------------------------------------------------------------


def plain_attributes(node):
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if a.type != onnx.AttributeProto.GRAPH}


def opset_of(model, domain=""):
    return next(o.version for o in model.opset_import if o.domain == domain)


def add_attention(writer, test):
    node = test.model.graph.node[0]
    (writer.folder / (test.name + ".onnx")).write_bytes(test.model.SerializeToString())
    for number, (inputs, outputs) in enumerate(test.data_sets):
        tensors = named(node.input, inputs) | named(node.output, outputs)
        writer.add("attention", test.name + (f"_{number}" if number else ""), opset_of(test.model), node.input,
                   node.output, plain_attributes(node), tensors, test.rtol, test.atol, model=test.name + ".onnx")


# --- the package's tests of FlexAttention ---------------------------------------------------------------------------


def evaluate(graph, scores):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)])
    return ReferenceEvaluator(model).run(None, {graph.input[0].name: scores})[0]


def soft_cap_of(graph):
    """The cap, if the graph is tanh(scores / cap) * cap."""
    if [n.op_type for n in graph.node] != ["Div", "Tanh", "Mul"] or len(graph.initializer) != 1:
        return None
    div, tanh, mul = graph.node
    cap = graph.initializer[0]
    chain = list(div.input) == [graph.input[0].name, cap.name] and list(tanh.input) == list(div.output)
    if not chain or set(mul.input) != {tanh.output[0], cap.name} or mul.output[0] != graph.output[0].name:
        return None
    return float(numpy_helper.to_array(cap))


def bias_of(graph, shape, dtype):
    """What the graph adds to the scores, if that is the same for all scores: -inf where it masks."""
    bias = evaluate(graph, np.zeros(shape, dtype))
    rng = np.random.default_rng(1)
    for _ in range(3):
        scores = rng.normal(size=shape).astype(dtype)
        if not np.allclose(evaluate(graph, scores), scores + bias, rtol=1e-5, atol=1e-6):
            return None
    return bias


def add_flex_attention(writer, test):
    """Writes the equivalent node of Attention; or says why there is none."""
    graphs = {a.name: a.g for a in test.model.graph.node[0].attribute if a.type == onnx.AttributeProto.GRAPH}
    node = test.model.graph.node[0]
    (inputs, outputs), = test.data_sets
    tensors = named(node.input, inputs) | named(node.output, outputs)
    attributes = plain_attributes(node)
    names, how = list(node.input), "the same without score_mod"
    if "prob_mod" in graphs:
        return "prob_mod changes the attention weights between softmax and product: attune has no such stage"
    if "score_mod" in graphs:
        cap = soft_cap_of(graphs["score_mod"])
        shape = tensors["Q"].shape[:3] + tensors["K"].shape[2:3]
        if cap is not None:
            attributes["softcap"] = cap
            how = f"softcap={cap:g}"
        else:
            bias = bias_of(graphs["score_mod"], shape, tensors["Q"].dtype)
            if bias is None:
                return "score_mod is neither a soft cap nor an addition"
            tensors["attn_mask"] = bias
            names.append("attn_mask")
            how = "attn_mask, which is what score_mod adds"
    writer.add("flexattention", test.name, 25, names, node.output, attributes, tensors, test.rtol, test.atol,
               **{"as": how})
    return None


# --- random nodes ---------------------------------------------------------------------------------------------------


def value_info(name, array):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def expansion(opset, tensors, inputs, outputs, attributes):
    """Runs the operator's definition in primitive operators, in the onnx package's evaluator."""
    node = helper.make_node("Attention", inputs, outputs, **attributes)
    # The definition depends on the types of the inputs.
    types = [value_info(name, tensors[name]).type if name else onnx.TypeProto() for name in inputs]
    ((nodes, imports),), _ = function_testcase_helper(node, types, "case", [helper.make_opsetid("", opset)])
    kind = helper.np_dtype_to_tensor_dtype(tensors["Q"].dtype)
    results = [name for name in outputs if name]
    graph = helper.make_graph(nodes, "case", [value_info(n, t) for n, t in tensors.items()],
                              [helper.make_tensor_value_info(name, kind, None) for name in results])
    return dict(zip(results, ReferenceEvaluator(helper.make_model(graph, opset_imports=imports)).run(None, tensors)))


def random_case(rng):
    """One node and its inputs, everything that the operator has combined. Sizes pass those of a kernel's tile now and
    then."""
    def pick(*values):
        return values[rng.integers(len(values))]

    opset = pick(23, 24, 25)
    kind = pick(np.float32, np.float32, np.float32, np.float64)
    B, hkv, group = pick(1, 2, 3), pick(1, 2, 3), pick(1, 1, 2, 4)
    n, m = pick(1, 2, 5, 17, 33), pick(1, 3, 8, 31, 65, 200)
    d = pick(1, 7, 8, 16, 32, 40, 64, 128)
    dv = pick(d, d, 5, 24)
    # Some kernels take many rows, keys and heads only, and neither masks nor a soft cap.
    large = rng.random() < 0.03
    if large:
        B, hkv, group, n, m, d = 1, 6, 2, 130, 200, pick(32, 64)
        dv = d
    hq = hkv * group
    rank3 = rng.random() < 0.4
    tensors, attributes = {}, {}

    def draw(*shape):
        return rng.normal(size=shape).astype(kind)

    if rank3:
        tensors |= {"Q": draw(B, n, hq * d), "K": draw(B, m, hkv * d), "V": draw(B, m, hkv * dv)}
        attributes |= {"q_num_heads": hq, "kv_num_heads": hkv}
    else:
        tensors |= {"Q": draw(B, hq, n, d), "K": draw(B, hkv, m, d), "V": draw(B, hkv, m, dv)}
    outputs = ["Y", "", "", ""]
    cache = pick("none", "past", "nonpad") if opset > 23 else pick("none", "past")
    total = m
    if cache == "past":
        past = pick(1, 6, 40)
        total += past
        tensors |= {"past_key": draw(B, hkv, past, d), "past_value": draw(B, hkv, past, dv)}
        outputs[1:3] = OUTPUTS[1:3]
    elif cache == "nonpad":
        tensors["nonpad_kv_seqlen"] = rng.integers(0, m + 1, size=B).astype(np.int64)
    if not large and rng.random() < 0.6:
        last = total
        if opset > 23 and rng.random() < 0.3:  # shorter than the keys: not below nonpad_kv_seqlen
            least = int(tensors["nonpad_kv_seqlen"].max()) if cache == "nonpad" else 1
            last = int(rng.integers(max(1, least), total + 1))
        full = [pick(1, B), pick(1, hq), pick(1, n), last]
        shape = full[rng.integers(0, 4):]
        if rng.random() < 0.5:
            tensors["attn_mask"] = rng.random(shape) < 0.7
        else:
            bias = rng.normal(size=shape).astype(kind)
            bias[rng.random(shape) < 0.2] = -np.inf
            tensors["attn_mask"] = bias
    if rng.random() < 0.5:
        attributes["is_causal"] = 1
    if not large and rng.random() < 0.3:
        attributes["softcap"] = float(pick(0.5, 2.0, 30.0))
    if rng.random() < 0.3:
        attributes["scale"] = float(pick(0.01, 0.3, 1.0))
    if opset == 25 and rng.random() < 0.5:
        attributes["left_window_size"] = int(pick(-1, 0, 2, 20))
        attributes["right_window_size"] = int(pick(-1, 0, 3, 30))
    if rng.random() < 0.4:
        outputs[3] = OUTPUTS[3]
        attributes["qk_matmul_output_mode"] = int(rng.integers(0, 4))
    inputs = [name if name in tensors else "" for name in INPUTS]
    while not inputs[-1]:
        inputs.pop()
    while not outputs[-1]:
        outputs.pop()
    return opset, tensors, inputs, outputs, attributes


def add_random_cases(writer, count):
    for seed in range(count):
        opset, tensors, inputs, outputs, attributes = random_case(np.random.default_rng(seed))
        tensors = {name: tensors[name] for name in inputs if name}
        expected = expansion(opset, tensors, inputs, outputs, attributes)
        # The package's evaluator and attune both compute f32 in f32: where logits are large, so are their differences.
        writer.add("expansion", f"random_{seed}", opset, inputs, outputs, attributes, tensors | expected, 1e-3, 2e-5)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: export.py FOLDER")
    if onnx.__version__ != VERSION:
        sys.exit(f"export.py: the package onnx is version {onnx.__version__}; expected {VERSION}, as in requirements.txt")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").unlink(missing_ok=True)
    warnings.simplefilter("ignore")  # the package's other tests overflow on purpose
    writer = Writer(folder)
    without, counts = [], {"attention": 0, "flexattention": 0}
    for test in load_node_model_tests():
        operators = [n.op_type for n in test.model.graph.node]
        if operators == ["Attention"]:
            counts["attention"] += 1
            add_attention(writer, test)
        elif test.name.startswith("test_flexattention"):
            counts["flexattention"] += 1
            reason = "it is another of these cases, as a graph of primitive operators: there is no attention node in it"
            if operators == ["FlexAttention"]:
                reason = add_flex_attention(writer, test)
            if reason:
                without.append({"name": test.name, "reason": reason})
    if counts != {"attention": ATTENTION_CASES, "flexattention": FLEX_CASES}:
        sys.exit(f"export.py: the package has {counts} cases; expected {ATTENTION_CASES} and {FLEX_CASES}")
    add_random_cases(writer, 300)
    # The index comes last: with it, the folder is complete.
    index = {"onnx": onnx.__version__, "nodes": writer.nodes, "without_equivalent": without}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(writer.nodes)} cases in {folder}")


if __name__ == "__main__":
    main()
