"""attn_implementation="attune" inside Hugging Face's transformers: all-MiniLM-L6-v2, whose weights a package has, against "sdpa"
and "eager" in one run, with their times; and small decoders of random weights with a key-value cache."""
import os
import statistics
import time
import unittest

import torch
import transformers

import attune.transformers

LINES = [
    "Attention is a weighted mean of values.",
    "The weights come from how well a query fits each key, and they sum to one.",
    "A short line.",
    "Lines of different lengths are padded, and what is padding must not be seen: that is what the mask is for, in every layer "
    "and every head, for every row, however long the longest line of the batch happens to be.",
] * 2
MODES = ("attune", "sdpa", "eager")


def setUpModule():
    attune.transformers.register()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)


class MiniLM(unittest.TestCase):
    def test_embeddings_and_speed(self):
        path = os.environ["ATTUNE_MINILM"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        batch = tokenizer(LINES, padding=True, return_tensors="pt")
        models = {mode: transformers.AutoModel.from_pretrained(path, attn_implementation=mode).eval() for mode in MODES}

        def embed(mode):
            hidden = models[mode](**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

        results = {mode: embed(mode) for mode in MODES}
        for mode in MODES[1:]:
            torch.testing.assert_close(results["attune"], results[mode], atol=1e-5, rtol=0)
        times = {mode: [] for mode in MODES}
        for _ in range(7):
            for mode in MODES:
                begin = time.perf_counter()
                embed(mode)
                times[mode].append(time.perf_counter() - begin)
        print("MiniLM, batch of", tuple(batch["input_ids"].shape), *(f"{mode} {1e3 * statistics.median(t):.1f} ms" for mode, t in times.items()))


class Decoders(unittest.TestCase):
    SIZES = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=128)

    def check(self, config):
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        ids = torch.randint(0, 99, (2, 23))
        mask = torch.ones_like(ids)
        mask[1, :9] = 0  # padded on the left, as for generation
        logits, tokens = {}, {}
        for mode in MODES:
            try:
                model.set_attn_implementation(mode)
            except ValueError:  # not every model takes every one
                continue
            logits[mode] = model(ids).logits
            tokens[mode] = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        torch.testing.assert_close(logits["attune"], logits["eager"], atol=2e-4, rtol=0)
        torch.testing.assert_close(tokens["attune"], tokens["eager"], atol=0, rtol=0)

    def test_grouped_heads(self):
        self.check(transformers.LlamaConfig(**self.SIZES))

    def test_sliding_window(self):
        self.check(transformers.MistralConfig(**self.SIZES, sliding_window=5))

    def test_softcap(self):
        self.check(transformers.Gemma2Config(**self.SIZES, head_dim=16, sliding_window=7, attn_logit_softcapping=5.0))

    def test_training_is_refused(self):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**self.SIZES), attn_implementation="attune")
        with torch.enable_grad(), self.assertRaisesRegex(NotImplementedError, "no backward pass"):
            model.train()(torch.zeros(1, 4, dtype=torch.int64))


if __name__ == "__main__":
    unittest.main()
