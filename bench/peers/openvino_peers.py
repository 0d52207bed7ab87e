"""OpenVINO's ScaledDotProductAttention on its CPU plugin, as a model of one node with its tensors set once."""
import numpy as np
import openvino
from openvino import opset13 as ops

from peer import Cannot, Contestant, bf16_to_f32, huge, main

TYPES = {"f32": openvino.Type.f32, "bf16": openvino.Type.bf16}


class OpenVino(Contestant):
    version = openvino.__version__.partition("-")[0]

    def release(self):
        self.kept = []

    def prepare(self, p, copies, threads):
        if p.dtype not in ("f32", "bf16") or p.kv_dtype != p.dtype:
            raise Cannot("only the f32 and bf16 forms are set up")
        if p.softcap or p.sink:
            raise Cannot("ScaledDotProductAttention has no soft cap and no sink")
        q, k, v = p.load("q", p.B, p.Hq, p.N, p.dk), p.load("k", p.B, p.Hkv, p.M, p.dk), p.load("v", p.B, p.Hkv, p.M, p.dv)
        mask = None if p.plainly_causal else p.attention_mask()
        if mask is not None and mask.dtype == bool:
            mask = np.where(mask, np.float32(0), np.float32(-1e9))
        if mask is not None:
            mask = np.ascontiguousarray(np.broadcast_to(mask, (*mask.shape[:2], p.N, p.M)), dtype=np.float32)
            if p.dtype == "bf16":
                mask = ((mask.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        kind = TYPES[p.dtype]

        def constant(x):
            return ops.convert(ops.constant(np.float32(x)), p.dtype) if p.dtype != "f32" else ops.constant(np.float32(x))

        def calls(q, k, v, mask):
            inputs = [q, k, v] + ([] if mask is None else [mask])
            parameters = [ops.parameter(list(a.shape), kind) for a in inputs]
            # A scale has to be preceded by a mask; the default needs neither.
            extra = [] if p.default_scale else [constant(0)] * (mask is None) + [constant(p.scale)]
            node = ops.scaled_dot_product_attention(*parameters, *extra, causal=bool(p.plainly_causal))
            compiled = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", {
                "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": p.dtype, "PERFORMANCE_HINT": "LATENCY"})

            def one():
                request = compiled.create_infer_request()
                arrays = [huge(a) for a in inputs]
                for i, a in enumerate(arrays):
                    request.set_input_tensor(i, openvino.Tensor(a, list(a.shape), kind))  # the array's own memory
                self.kept.append((request, arrays, compiled))

                def run():
                    request.infer(share_outputs=True)
                    out = request.get_output_tensor(0).data
                    return out if kind == openvino.Type.f32 else out.view(np.uint16)

                return run

            return [one() for _ in range(copies)]

        repeated = (lambda x: np.repeat(x, p.group, 1)) if p.group > 1 else (lambda x: x)
        ways = {"K and V repeated" if p.group > 1 else "": calls(q, repeated(k), repeated(v), mask)}
        if p.group > 1 and p.N == 1 and (mask is None or mask.shape[1] == 1):
            ways["query heads as rows"] = calls(q.reshape(p.B, p.Hkv, p.group, p.dk), k, v, mask)
        return ways

    def output(self, result):
        return bf16_to_f32(result) if result.dtype == np.uint16 else result


if __name__ == "__main__":
    main({"openvino": OpenVino})
