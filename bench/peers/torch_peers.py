"""PyTorch: its fused attention, the same unfused, and FlexAttention compiled for the problem."""
import numpy as np
import torch
import torch.nn.functional as F

from peer import Cannot, Contestant, huge, main


def tensor(array):
    t = torch.from_numpy(huge(array))
    return t.view(torch.bfloat16) if array.dtype == np.uint16 else t


class Torch(Contestant):
    version = torch.__version__

    def arrays(self, p, copies):
        if p.kv_dtype != p.dtype:
            raise Cannot("PyTorch's attention takes one type for Q, K and V")
        q, k, v = p.load("q", p.B, p.Hq, p.N, p.dk), p.load("k", p.B, p.Hkv, p.M, p.dk), p.load("v", p.B, p.Hkv, p.M, p.dv)
        return [tuple(map(tensor, (q, k, v))) for _ in range(copies)]

    def prepare(self, p, copies, threads):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        return self.ways(p, self.arrays(p, copies))

    def output(self, result):
        return result.float().numpy()


def fold(t, p):
    """[B, Hq, N, d] as [B, Hkv, group N, d]: the query heads of a group as rows of one head."""
    return t.reshape(p.B, p.Hkv, p.group * p.N, t.shape[-1])


class Sdpa(Torch):
    def ways(self, p, sets):
        if p.softcap or p.sink:
            raise Cannot("scaled_dot_product_attention has no soft cap and no sink")
        mask = None if p.plainly_causal else p.attention_mask()
        mask = None if mask is None else torch.from_numpy(huge(np.broadcast_to(mask, (mask.shape[0], mask.shape[1], p.N, p.M))))
        if mask is not None and mask.dtype == torch.float32 and p.dtype == "bf16":
            mask = mask.bfloat16()

        def native(q, k, v):
            return lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=p.plainly_causal, scale=p.scale, enable_gqa=p.group > 1)

        def folded(q, k, v):
            q = fold(q, p)
            return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=p.scale)

        ways = {"enable_gqa" if p.group > 1 else "": [native(*s) for s in sets]}
        if p.group > 1 and p.N == 1 and (mask is None or mask.shape[1] == 1):
            ways["query heads as rows"] = [folded(*s) for s in sets]
        return ways


class Unfused(Torch):
    """Matmul, softmax, matmul. The query heads of a group are rows of one product, so that K and V are never repeated."""

    def ways(self, p, sets):
        if p.sink:
            raise Cannot("a sink is not in PyTorch's softmax")
        seen, added = p.bool_mask(), p.added()
        hidden = None if seen is None else torch.from_numpy(huge(~seen))
        added = None if added is None else torch.from_numpy(huge(added))

        def call(q, k, v):
            q, kt = fold(q, p), k.transpose(-1, -2)

            def run():
                s = torch.matmul(q * p.scale, kt)  # in the arrays' type, as are all stages
                scores = s.view(p.B, p.Hq, p.N, p.M)
                if p.softcap:
                    scores.div_(p.softcap).tanh_().mul_(p.softcap)
                if added is not None:
                    scores.add_(added)
                if hidden is not None:
                    scores.masked_fill_(hidden, float("-inf"))
                return torch.matmul(torch.softmax(s, -1), v)

            return run

        return {"": [call(*s) for s in sets]}


class Flex(Torch):
    def ways(self, p, sets):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if p.sink:
            raise Cannot("FlexAttention has no sink")
        if not (p.windowed or p.group > 1 or p.softcap or p.has_bias or p.has_alibi or p.has_mask or p.causal or p.kv_len):
            raise Cannot("nothing to compile in: no window, bias, mask or grouped heads; PyTorch's own kernel is its plain case")
        import torch._inductor.config as config

        torch._dynamo.reset()
        config.cpp.threads = torch.get_num_threads()
        offset = torch.tensor(p.offset)
        left, right = p.window
        lengths = torch.tensor(p.kv_len) if p.kv_len else None
        mask = torch.from_numpy(p.mask()) if p.has_mask else None
        added = p.added()
        added = None if added is None else torch.from_numpy(huge(np.ascontiguousarray(added)))
        uniform = len(set(p.offset)) == 1 and not p.has_mask and lengths is None
        first = p.offset[0]

        def visible(b, h, i, j):
            position = i + first if uniform else i + offset[b]
            seen = j >= 0
            if p.causal:
                seen = seen & (j <= position)
            if left >= 0:
                seen = seen & (j >= position - left)
            if right >= 0:
                seen = seen & (j <= position + right)
            if lengths is not None:
                seen = seen & (j < lengths[b])
            if mask is not None:
                seen = seen & mask[b, 0, 0, j]
            return seen

        def score(s, b, h, i, j):
            if p.softcap:
                s = p.softcap * torch.tanh(s / p.softcap)
            if added is not None:
                s = s + added[0 if added.shape[0] == 1 else b, h, i, j]
            return s

        hides = p.causal or p.windowed or lengths is not None or mask is not None
        blocks = create_block_mask(visible, None if uniform else p.B, None, p.N, p.M, device="cpu") if hides else None
        compiled = torch.compile(flex_attention)

        def call(q, k, v):
            return lambda: compiled(q, k, v, score_mod=score if p.softcap or added is not None else None, block_mask=blocks,
                                    scale=p.scale, enable_gqa=p.group > 1)

        return {"": [call(*s) for s in sets]}


if __name__ == "__main__":
    main({"torch_sdpa": Sdpa, "torch_unfused": Unfused, "torch_flex": Flex})
