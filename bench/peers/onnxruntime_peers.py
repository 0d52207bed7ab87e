"""ONNX Runtime: its operators Attention (of ONNX), MultiHeadAttention and GroupQueryAttention (its own), each as a model of one
node, with inputs and outputs bound once so that a call copies nothing."""
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from peer import Cannot, Contestant, huge, main

TYPES = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int32": TensorProto.INT32}


class OnnxRuntime(Contestant):
    version = onnxruntime.__version__

    def release(self):
        self.kept = []
        self.sessions = {}

    def node(self, operator, inputs, outputs, threads, **attributes):
        """inputs: {name: array}, "" names left out; outputs: {name: array to write}. Returns a function that runs it."""
        domain = "" if operator == "Attention" else "com.microsoft"
        names = [n for n, _ in inputs]
        while names and inputs[len(names) - 1][1] is None:
            names.pop()
        feeds = {n: a for n, a in inputs if a is not None}
        node = helper.make_node(operator, [n if n in feeds else "" for n in names], [n for n, _ in outputs], domain=domain,
                                **attributes)
        value = lambda n, a: helper.make_tensor_value_info(n, TYPES[str(a.dtype)], a.shape)
        graph = helper.make_graph([node], "attention", [value(n, a) for n, a in feeds.items()], [value(n, a) for n, a in outputs])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
                                  ir_version=10)
        # One session for all copies of the arrays: each has threads of its own, which go on spinning for a while after a call.
        text = model.SerializeToString()
        session = self.sessions.get(text)
        if not session:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            options.inter_op_num_threads = 1
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])
            self.sessions[text] = session
        binding = session.io_binding()
        for n, a in feeds.items():
            binding.bind_input(n, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        for n, a in outputs:
            binding.bind_output(n, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        self.kept.append((binding, feeds, outputs))

        def run():
            session.run_with_iobinding(binding)
            return outputs[0][1]

        return run

    def prepare(self, p, copies, threads):
        if p.dtype != "f32" or p.kv_dtype != "f32":
            raise Cannot("its CPU operators have no bf16 (Attention, MultiHeadAttention, GroupQueryAttention: f32, some f16)")
        if p.sink:
            raise Cannot("the operator has no sink")
        self.problem = p
        self.copies = copies
        q, k, v = p.load("q", p.B, p.Hq, p.N, p.dk), p.load("k", p.B, p.Hkv, p.M, p.dk), p.load("v", p.B, p.Hkv, p.M, p.dv)
        return self.ways(p, q, k, v, threads)


def rows_first(x):
    """[B, H, S, D] as [B, S, H D]."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)


class Attention(OnnxRuntime):
    def ways(self, p, q, k, v, threads):
        mask = None if p.plainly_causal else p.attention_mask()
        if mask is not None:
            mask = np.ascontiguousarray(np.broadcast_to(mask, (p.B, mask.shape[1], p.N, p.M)))
        attributes = {"scale": p.scale, "is_causal": int(p.plainly_causal)}
        if p.softcap:
            attributes["softcap"] = p.softcap

        def call(q, k, v):
            o = huge(np.zeros((*q.shape[:3], p.dv), np.float32))
            return self.node("Attention", [("q", huge(q)), ("k", huge(k)), ("v", huge(v)), ("m", None if mask is None else huge(mask))],
                             [("o", o)], threads, **attributes)

        ways = {"": lambda: [call(q, k, v) for _ in range(self.copies)]}
        if p.group > 1 and p.N == 1 and (mask is None or mask.shape[1] == 1):
            folded = q.reshape(p.B, p.Hkv, p.group, p.dk)
            if mask is not None:
                mask = np.ascontiguousarray(np.broadcast_to(mask, (p.B, 1, p.group, p.M)))
            ways["query heads as rows"] = lambda: [call(folded, k, v) for _ in range(self.copies)]
        return {label: make() for label, make in ways.items()}


class MultiHeadAttention(OnnxRuntime):
    def ways(self, p, q, k, v, threads):
        if p.group > 1:
            raise Cannot("MultiHeadAttention has no grouped heads")
        if p.softcap:
            raise Cannot("MultiHeadAttention has no soft cap")
        mask = None if p.plainly_causal else p.attention_mask()
        if mask is not None and mask.dtype == bool:
            mask = np.where(mask, np.float32(0), np.float32(-1e9))
        if mask is not None:
            mask = np.ascontiguousarray(np.broadcast_to(mask, (*mask.shape[:2], p.N, p.M)), dtype=np.float32)
        self.shape = (p.B, p.N, p.Hq, p.dv)

        def call(_):
            o = huge(np.zeros((p.B, p.N, p.Hq * p.dv), np.float32))
            names = [("q", huge(rows_first(q))), ("k", huge(rows_first(k))), ("v", huge(rows_first(v))), ("bias", None),
                     ("padding", None), ("m", None if mask is None else huge(mask))]
            return self.node("MultiHeadAttention", names, [("o", o)], threads, num_heads=p.Hq, scale=p.scale,
                             unidirectional=int(p.plainly_causal))

        return {"": [call(i) for i in range(self.copies)]}

    def output(self, result):
        return result.reshape(self.shape).transpose(0, 2, 1, 3)


class GroupQueryAttention(OnnxRuntime):
    """With the past's buffer shared with the present's, as a decoding loop binds it: the new keys are its last N."""

    def ways(self, p, q, k, v, threads):
        if p.dk != p.dv:
            raise Cannot("GroupQueryAttention wants d_v = d_k")
        if p.has_bias or p.has_mask or p.has_alibi or p.kv_len:
            raise Cannot("GroupQueryAttention masks by causality and a window only")
        past = p.M - p.N
        if past < 0 or not (p.causal and set(p.offset) == {past} or p.N == 1 and not p.causal and not p.windowed):
            raise Cannot("GroupQueryAttention is always causal, with the last query at the last key")
        if p.windowed and p.window[1] not in (-1, 0):
            raise Cannot("GroupQueryAttention's window looks back only")
        attributes = {"num_heads": p.Hq, "kv_num_heads": p.Hkv, "scale": p.scale}
        if p.softcap:
            attributes["softcap"] = p.softcap
        if p.window[0] >= 0:
            attributes["local_window_size"] = p.window[0] + 1  # it counts the query's own key
        self.shape = (p.B, p.N, p.Hq, p.dv)
        new = slice(past, p.M)

        def call(shared):
            pk, pv = huge(k), huge(v)
            o = huge(np.zeros((p.B, p.N, p.Hq * p.dv), np.float32))
            xk, xv = (pk, pv) if shared else (huge(k), huge(v))
            if not shared:
                pk, pv = huge(k[:, :, :past]), huge(v[:, :, :past])
            names = [("q", huge(rows_first(q))), ("k", huge(rows_first(k[:, :, new]))), ("v", huge(rows_first(v[:, :, new]))),
                     ("pk", pk), ("pv", pv), ("lengths", np.full(p.B, p.M - 1, np.int32)), ("total", np.array(p.M, np.int32))]
            return self.node("GroupQueryAttention", names, [("o", o), ("xk", xk), ("xv", xv)], threads, **attributes)

        ways = {"past in place": [call(True) for _ in range(self.copies)]}
        if past == 0:
            ways["no past"] = [call(False) for _ in range(self.copies)]
        return ways

    def output(self, result):
        return result.reshape(self.shape).transpose(0, 2, 1, 3)


if __name__ == "__main__":
    main({"ort_attention": Attention, "ort_mha": MultiHeadAttention, "ort_gqa": GroupQueryAttention})
