"""attune.attention over NumPy arrays, against float64; and every way to call it wrongly."""
import array
import threading
import unittest

import numpy as np
import reference

import attune

RNG = np.random.default_rng(7)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def problem(B=2, Hq=4, Hkv=2, N=9, M=13, dk=16, dv=16):
    return normal(B, Hq, N, dk), normal(B, Hkv, M, dk), normal(B, Hkv, M, dv)


class Right(unittest.TestCase):
    def check(self, q, k, v, **options):
        out, lse = attune.attention(q, k, v, return_lse=True, **options)
        wanted, wanted_lse = reference.attention(q, k, v, **options)
        np.testing.assert_allclose(out, wanted, atol=2e-5)
        np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)
        self.assertEqual((out.dtype, out.shape, lse.dtype), (np.float32, wanted.shape, np.float32))
        return out

    def test_every_keyword(self):
        q, k, v = problem()
        grid = [
            {},
            {"causal": True},
            {"causal": True, "offset": 4},
            {"causal": True, "offset": [0, 5]},
            {"window": (3, 1)},
            {"window": (2, None), "causal": True, "offset": 4},
            {"mask": RNG.random((2, 1, 1, 13)) < 0.7},
            {"mask": (RNG.random((9, 13)) < 0.7).astype(np.uint8)},
            {"mask": np.zeros((2, 1, 1, 13), bool)},
            {"bias": normal(1, 4, 9, 13)},
            {"bias": normal(13)},
            {"scale": 0.3},
            {"scale": 0},
            {"softcap": 1.5},
            {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
            {"sinks": [0.1, -1, 2, 0]},
            {"kv_len": [13, 5]},
            {"kv_len": [0, 13], "causal": True, "bias": normal(4, 1, 13), "softcap": 2, "sinks": [0, 0, 0, 1]},
        ]
        for options in grid:
            with self.subTest(**{key: str(value)[:40] for key, value in options.items()}):
                self.check(q, k, v, **options)

    def test_sizes(self):
        for sizes in ({"N": 1, "M": 1}, {"dk": 7, "dv": 5}, {"Hq": 8, "Hkv": 1}, {"N": 70, "M": 300, "dk": 64, "dv": 64}, {"dv": 96}):
            with self.subTest(**sizes):
                self.check(*problem(**sizes))
        q, k, v = problem(M=0)
        self.assertTrue((attune.attention(q, k, v) == 0).all())
        self.assertEqual(attune.attention(*problem(N=0)).shape, (2, 4, 0, 16))

    def test_fewer_dimensions(self):
        q, k, v = problem(B=1, Hq=1, Hkv=1)
        whole = attune.attention(q, k, v)
        for rank, at in ((3, (0,)), (2, (0, 0))):
            out, lse = attune.attention(q[at], k[at], v[at], return_lse=True)
            self.assertEqual((out.ndim, lse.ndim), (rank, rank - 1))
            np.testing.assert_array_equal(out, whole[at])

    def test_strides_are_followed(self):
        """Transposed, reversed, sliced and broadcast views: the bits of a copy."""
        q, k, v = problem()
        wanted = attune.attention(q, k, v)
        views = {
            "heads inside": tuple(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)),
            "columns": tuple(np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (q, k, v)),
            "reversed": tuple(np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in (q, k, v)),
            "every second": tuple(np.repeat(x, 2, 3)[..., ::2] for x in (q, k, v)),
        }
        for name, (a, b, c) in views.items():
            with self.subTest(name):
                np.testing.assert_allclose(attune.attention(a, b, c), wanted, atol=1e-6)
        one = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)
        self.check(q, *one)

    def test_nothing_is_copied(self):
        """Memory that is changed between two calls is seen by the second; and out is the caller's."""
        q, k, v = problem()
        out = np.full((2, 9, 4, 16), np.nan, np.float32).swapaxes(1, 2)
        self.assertIs(attune.attention(q, k, v, out=out), out)
        np.testing.assert_allclose(out, reference.attention(q, k, v)[0], atol=2e-5)
        v[:] = 3
        attune.attention(q, k, v, out=out)
        np.testing.assert_allclose(out, 3, atol=1e-5)

    def test_read_only_inputs_and_the_buffer_protocol(self):
        q, k, v = problem()
        wanted = attune.attention(q, k, v)
        for x in (q, k, v):
            x.flags.writeable = False
        np.testing.assert_array_equal(attune.attention(q, k, v), wanted)
        np.testing.assert_array_equal(attune.attention(*(memoryview(x) for x in (q, k, v))), wanted)

    def test_kernels_and_reasons(self):
        q, k, v = problem()
        chosen = attune.explain(q, k, v)
        self.assertIn(chosen.kernel, attune.kernels())
        self.assertIn(chosen.kernel + ": chosen", str(chosen))
        self.assertIn("stagewise", attune.explain(q, k, v, strategy="stagewise").kernel)
        np.testing.assert_allclose(attune.attention(q, k, v, strategy="stagewise", threads=1), attune.attention(q, k, v), atol=2e-5)

    def test_threads(self):
        """Several threads at once, the lock released: each gets its own result."""
        inputs = [problem(N=64, M=128, dk=32, dv=32) for _ in range(4)]
        wanted = [attune.attention(*x) for x in inputs]
        results = [None] * 4

        def work(i):
            for _ in range(5):
                results[i] = attune.attention(*inputs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for got, want in zip(results, wanted):
            np.testing.assert_array_equal(got, want)
        before = attune.get_num_threads()
        attune.set_num_threads(1)
        self.assertEqual(attune.get_num_threads(), 1)
        np.testing.assert_array_equal(attune.attention(*inputs[0]), wanted[0])
        attune.set_num_threads(before)


class Wrong(unittest.TestCase):
    """The message names the argument, its value and what was expected."""

    def refuses(self, kind, message, *arguments, **options):
        with self.assertRaisesRegex(kind, message):
            attune.attention(*arguments, **options)

    def test_types(self):
        q, k, v = problem()
        self.refuses(TypeError, r"q\.dtype is float64: expected float32, float16 or bfloat16", q.astype(np.float64), k, v)
        self.refuses(TypeError, r"k\.dtype is int32: expected float32", q, k.astype(np.int32), v)
        self.refuses(TypeError, r"q is of type list: expected an array that offers DLPack or the buffer protocol", [1.0], k, v)
        self.refuses(TypeError, r"q is of type array", array.array("f", [1.0]), k, v)
        self.refuses(TypeError, r"mask\.dtype is float32: expected bool or uint8", q, k, v, mask=normal(9, 13))
        self.refuses(TypeError, r"bias\.dtype is float64: expected float32", q, k, v, bias=np.zeros((9, 13)))
        self.refuses(TypeError, r"causal is 'yes': expected True or False", q, k, v, causal="yes")
        self.refuses(TypeError, r"window is 5: expected \(left, right\)", q, k, v, window=5)
        self.refuses(TypeError, r"unexpected keyword", q, k, v, casual=True)
        self.refuses(TypeError, r"out and q are of different types", q, k, v, out=np.empty(q.shape, np.float16))

    def test_shapes(self):
        q, k, v = problem()
        self.refuses(ValueError, r"k\.shape is \(2, 2, 13, 15\): expected \(B, Hkv, M, dk\) with dk = 16", q, k[..., :15], v)
        self.refuses(ValueError, r"k\.shape is \(1, 2, 13, 16\): expected .* with B = 2", q, k[:1], v[:1])
        self.refuses(ValueError, r"v\.shape is \(2, 2, 12, 16\): expected .* with M = 13", q, k, v[:, :, :12])
        self.refuses(ValueError, r"with Hkv a divisor of Hq = 3", q[:, :3], k, v)
        self.refuses(ValueError, r"q\.shape is \(16,\): expected 2 to 4 dimensions", q[0, 0, 0], k, v)
        self.refuses(ValueError, r"expected 4 dimensions, as in q\.shape", q, k[0], v)
        self.refuses(ValueError, r"mask\.shape is \(9, 12\): expected a shape that broadcasts", q, k, v, mask=np.ones((9, 12), bool))
        self.refuses(ValueError, r"out\.shape is \(2, 4, 9, 15\): expected \(2, 4, 9, 16\)", q, k, v, out=normal(2, 4, 9, 15))
        self.refuses(ValueError, r"kv_len has 3 entries: expected B = 2", q, k, v, kv_len=[1, 2, 3])
        self.refuses(ValueError, r"sinks has 2 entries: expected Hq = 4", q, k, v, sinks=[1, 2])
        self.refuses(ValueError, r"window has the edge -2: expected 0 or more", q, k, v, window=(-2, 0))

    def test_values(self):
        q, k, v = problem()
        self.refuses(ValueError, "softcap", q, k, v, softcap=-1)
        self.refuses(ValueError, "scale", q, k, v, scale=float("nan"))
        self.refuses(ValueError, "kv_len", q, k, v, kv_len=[-1, 2])
        self.refuses(ValueError, "no_such_kernel", q, k, v, kernel="no_such_kernel")

    def test_outputs(self):
        q, k, v = problem()
        out = np.empty_like(q)
        out.flags.writeable = False
        self.refuses(ValueError, "out is read-only: expected an array that may be written", q, k, v, out=out)

    def test_a_type_that_is_not_built_in(self):
        """Whichever it is in this build: a message that names the types, and an error that is both kinds."""
        if "f16" in attune.dtypes():
            self.skipTest("this build has kernels for f16")
        half = [x.astype(np.float16) for x in problem()]
        self.refuses(attune.Unsupported, "q, k and v are f16: expected one of the types that this build has kernels for: .*f32", *half)
        self.refuses(NotImplementedError, "f16", *half)

    def test_errors_are_of_their_kinds(self):
        self.assertTrue(issubclass(attune.InvalidArgument, attune.Error) and issubclass(attune.InvalidArgument, ValueError))
        self.assertTrue(issubclass(attune.OutOfMemory, MemoryError))


if __name__ == "__main__":
    unittest.main()
