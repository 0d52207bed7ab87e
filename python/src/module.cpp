// The module attune._core: attention and multi-head attention over arrays of Python. The package's Python part gives
// them names, defaults, docstrings and outputs; here are the checks and the calls, without the interpreter's lock.
#include "arrays.h"
#include "options.h"
#include "plans.h"

#include <attune/kernel.h>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

namespace attune::python {

namespace {

// "k.shape is (1, 2, 3, 4): expected (B, Hkv, M, dk) with dk = 8".
void match(const Operand &operand, const char *name, std::size_t dimension, std::int64_t expected, const char *layout,
           const char *what) {
    if (operand.view.shape[dimension] == expected) return;
    wrong(std::string(name) + ".shape is " + operand.shape() + ": expected " + layout + " with " + what + " = " +
          std::to_string(expected));
}

// The types for which there is a kernel of the CPU.
std::vector<std::string> dtypes() {
    std::vector<std::string> names;
    for (std::int64_t i = 0; i < attune_num_kernels(); i++) {
        const attune_kernel &k = *attune_kernel_at(i);
        const std::string name = attune_dtype_string(k.q_dtype);
        if (k.device == ATTUNE_CPU && k.q_dtype == k.kv_dtype &&
            std::find(names.begin(), names.end(), name) == names.end())
            names.push_back(name);
    }
    return names;
}

// A type that is not built in: said at once, where the planner would say it for each kernel.
void want_kernels_of(Dtype dtype) {
    const std::vector<std::string> built = dtypes();
    const std::string wanted = attune_dtype_string(static_cast<attune_dtype>(dtype));
    if (std::find(built.begin(), built.end(), wanted) != built.end()) return;
    std::string known;
    for (const std::string &name : built) known += (known.empty() ? "" : ", ") + name;
    throw Error(ATTUNE_UNSUPPORTED,
                "q, k and v are " + wanted + ": expected one of the types that this build has kernels for: " + known);
}

struct Call {
    Operand q, k, v;
    Problem problem;
    Options options;

    Call(nb::handle q_, nb::handle k_, nb::handle v_, const nb::kwargs &keywords)
        : q(tensor(q_, "q", 2)), k(tensor(k_, "k", 2)), v(tensor(v_, "v", 2)), options(keywords) {
        const auto &qs = q.view.shape, &ks = k.view.shape;
        constexpr const char *kKeys = "(B, Hkv, M, dk)", *kValues = "(B, Hkv, M, dv)";
        match(k, "k", 0, qs[0], kKeys, "B");
        match(k, "k", 3, qs[3], kKeys, "dk");
        match(v, "v", 0, qs[0], kValues, "B");
        match(v, "v", 1, ks[1], kValues, "Hkv");
        match(v, "v", 2, ks[2], kValues, "M");
        if (ks[1] < 1 || qs[1] % ks[1])
            wrong("k.shape is " + k.shape() +
                  ": expected (B, Hkv, M, dk) with Hkv a divisor of Hq = " + std::to_string(qs[1]));
        if (q.view.dtype == k.view.dtype && q.view.dtype != Dtype::f32) want_kernels_of(q.view.dtype);
        if (k.view.dtype != v.view.dtype) wrong_type("k and v are of different types: expected one");
        problem = options.problem;
        problem.B = qs[0], problem.Hq = qs[1], problem.N = qs[2], problem.dk = qs[3];
        problem.Hkv = ks[1], problem.M = ks[2], problem.dv = v.view.shape[3];
        problem.q_dtype = problem.o_dtype = q.view.dtype;
        problem.kv_dtype = k.view.dtype;
        problem.strided_v = v.view.shape[3] > 1 && v.view.stride[3] != 1;
    }
};

// Runs into `out`.
void attention(nb::handle q, nb::handle k, nb::handle v, nb::handle out, const nb::kwargs &keywords) {
    const Call call(q, k, v, keywords);
    const Problem &p = call.problem;
    const Operand o = tensor(out, "out", 2, true);
    constexpr const char *kOut = "(B, Hq, N, dv)";
    match(o, "out", 0, p.B, kOut, "B");
    match(o, "out", 1, p.Hq, kOut, "Hq");
    match(o, "out", 2, p.N, kOut, "N");
    match(o, "out", 3, *p.dv, kOut, "dv");
    if (o.view.dtype != p.q_dtype) wrong_type("out and q are of different types: expected one");
    const BoundExtras bound(call.options, p.B, p.Hq, p.N, *p.M);
    const Tensors tensors{.q = call.q.view, .k = call.k.view, .v = call.v.view, .o = o.view, .extras = bound.extras};
    const nb::gil_scoped_release unlocked;
    const auto plan = cached_plan(p, call.options.plan);
    run(*plan, tensors, thread_workspace());
}

// The plan that attention() would run: the kernel's name, the reasons, the size of its workspace.
std::tuple<std::string, std::string, std::size_t> explain(nb::handle q, nb::handle k, nb::handle v,
                                                          const nb::kwargs &keywords) {
    const Call call(q, k, v, keywords);
    const nb::gil_scoped_release unlocked;
    const auto plan = cached_plan(call.problem, call.options.plan);
    return {plan->kernel(), plan->explain(), plan->workspace_size()};
}

// The module's weights are matrices [in, out], or [out, in] with out_in.
class Mha {
  public:
    Mha(const std::vector<std::pair<std::string, nb::object>> &parameters, std::int64_t Hq, std::int64_t Hkv,
        std::int64_t dk, std::int64_t dv, bool out_in) {
        MhaWeights w;
        std::vector<Operand> kept;
        MhaConfig config{.Hq = Hq, .Hkv = Hkv, .dk = dk, .dv = dv};
        config.layout = out_in ? WeightLayout::out_in : WeightLayout::in_out;
        const std::size_t in = out_in ? 3 : 2, out = out_in ? 2 : 3; // of a view's four dimensions
        for (const auto &[name, object] : parameters) {
            if (object.is_none()) continue;
            const bool matrix = name[0] == 'w';
            kept.push_back(dense_f32(object, name.c_str(), matrix ? 2 : 1));
            const auto &view = kept.back().view;
            const std::span<const float> values(static_cast<const float *>(view.data),
                                                std::size_t(view.shape[2] * view.shape[3]));
            if (name == "wq") w.wq = values, config.d_model = view.shape[in];
            if (name == "wk") w.wk = values, config.d_model_kv = view.shape[in];
            if (name == "wv") w.wv = values;
            if (name == "wo") w.wo = values, config.d_out = view.shape[out];
            if (name == "bq") w.bq = values;
            if (name == "bk") w.bk = values;
            if (name == "bv") w.bv = values;
            if (name == "bo") w.bo = values;
        }
        const nb::gil_scoped_release unlocked;
        set(config, std::make_shared<const MultiHeadAttention>(config, w));
    }

    Mha(const std::string &path, const std::vector<std::string> &names, std::int64_t d_model, std::int64_t d_model_kv,
        std::int64_t d_out, std::int64_t Hq, std::int64_t Hkv, std::int64_t dk, std::int64_t dv, bool out_in) {
        MhaConfig config{
            .d_model = d_model, .d_model_kv = d_model_kv, .d_out = d_out, .Hq = Hq, .Hkv = Hkv, .dk = dk, .dv = dv};
        config.layout = out_in ? WeightLayout::out_in : WeightLayout::in_out;
        MhaNames n{names.at(0), names.at(1), names.at(2), names.at(3),
                   names.at(4), names.at(5), names.at(6), names.at(7)};
        const nb::gil_scoped_release unlocked;
        set(config, std::make_shared<const MultiHeadAttention>(MultiHeadAttention::load(config, path, n)));
    }

    std::int64_t d_out() const { return d_out_; }

    void run(nb::handle x_q, nb::handle x_kv, nb::handle out, const nb::kwargs &keywords) const {
        const Options options(keywords);
        if (!options.plan.kernel.empty() || !options.plan.strategy.empty() || options.plan.threads)
            wrong_type("kernel, strategy and threads: expected none of them with MultiHeadAttention");
        const Operand q = input(x_q, "x_q"), y = input(out, "out", true);
        const std::optional<Operand> kv = x_kv.is_none() ? std::nullopt : std::optional(input(x_kv, "x_kv"));
        const std::int64_t B = q.view.shape[0], N = q.view.shape[2];
        if (kv) match(*kv, "x_kv", 0, B, "(B, M, d_model_kv)", "B");
        match(y, "out", 0, B, "(B, N, d_out)", "B");
        match(y, "out", 2, N, "(B, N, d_out)", "N");
        match(y, "out", 3, d_out_, "(B, N, d_out)", "d_out");
        const BoundExtras bound(options, B, Hq_, N, kv ? kv->view.shape[2] : N);
        MhaCall call{.x_q = q.view, .y = y.view, .attention = options.problem, .extras = bound.extras};
        if (kv) call.x_kv = kv->view;
        const nb::gil_scoped_release unlocked;
        mha_->run(call, thread_workspace());
    }

  private:
    void set(const MhaConfig &config, std::shared_ptr<const MultiHeadAttention> mha) {
        d_out_ = config.d_out ? config.d_out : config.d_model;
        Hq_ = config.Hq;
        mha_ = std::move(mha);
    }

    // [B, rows, features] or [rows, features] as attune wants it: [B, 1, rows, features].
    static Operand input(nb::handle object, const char *name, bool written = false) {
        Operand x = tensor(object, name, 2, written);
        if (x.rank == 4) wrong(std::string(name) + ".shape is " + x.shape() + ": expected 2 or 3 dimensions");
        if (x.view.dtype != Dtype::f32) wrong_type(std::string(name) + " is of 16 bits: expected float32");
        std::swap(x.view.shape[0], x.view.shape[1]);
        std::swap(x.view.stride[0], x.view.stride[1]);
        return x;
    }

    std::shared_ptr<const MultiHeadAttention> mha_;
    std::int64_t d_out_ = 0, Hq_ = 0;
};

// attune.Error and its kinds, each of which is the builtin error that it resembles as well.
struct Errors {
    nb::object base, by_status[ATTUNE_DEVICE_ERROR + 1];

    explicit Errors(nb::module_ &m) {
        base = add(m, "Error", "What attune reports: the message names the argument, its value and what was expected.",
                   nb::handle(PyExc_RuntimeError), {});
        const struct {
            attune_status status;
            const char *name, *doc;
            PyObject *builtin;
        } kinds[] = {
            {ATTUNE_INVALID_ARGUMENT, "InvalidArgument", "An argument is wrong.", PyExc_ValueError},
            {ATTUNE_UNSUPPORTED, "Unsupported", "Legal, but no kernel of this build does it; says why for each.",
             PyExc_NotImplementedError},
            {ATTUNE_OUT_OF_MEMORY, "OutOfMemory", "Memory for a plan, a module or a workspace is lacking.",
             PyExc_MemoryError},
            {ATTUNE_KERNEL_FAILED, "KernelFailed", "A kernel reported an error; outputs are undefined.",
             PyExc_RuntimeError},
            {ATTUNE_IO_ERROR, "FileError", "A file cannot be read, or is not what it should be.", PyExc_OSError},
            {ATTUNE_DEVICE_ERROR, "DeviceError", "No driver, no such device, or the driver's error.",
             PyExc_RuntimeError},
        };
        for (const auto &kind : kinds)
            by_status[kind.status] = add(m, kind.name, kind.doc, base, nb::handle(kind.builtin));
    }

    void raise(const Error &error) const {
        const nb::object &kind = by_status[error.status()];
        PyErr_SetString((kind.is_valid() ? kind : base).ptr(), error.what());
    }

  private:
    static nb::object add(nb::module_ &m, const char *name, const char *doc, nb::handle first, nb::handle second) {
        const bool both = second.is_valid() && second.ptr() != PyExc_RuntimeError;
        const nb::object bases = both ? nb::object(nb::make_tuple(first, second)) : nb::object(nb::make_tuple(first));
        nb::object made =
            nb::steal(PyErr_NewExceptionWithDoc(("attune." + std::string(name)).c_str(), doc, bases.ptr(), nullptr));
        if (!made.is_valid()) nb::raise_python_error();
        m.attr(name) = made;
        return made;
    }
};

std::vector<std::string> kernels() {
    std::vector<std::string> names;
    for (std::int64_t i = 0; i < attune_num_kernels(); i++) names.push_back(attune_kernel_at(i)->name);
    return names;
}

} // namespace

} // namespace attune::python

NB_MODULE(_core, m) {
    using namespace attune::python;
    namespace nb = nanobind;
    using nb::arg;

    static const Errors *errors = new Errors(m); // never freed: exceptions may come while the interpreter ends
    nb::register_exception_translator([](const std::exception_ptr &p, void *) {
        try {
            std::rethrow_exception(p);
        } catch (const attune::Error &error) {
            errors->raise(error);
        }
    });

    m.def("attention", &attention, arg("q"), arg("k"), arg("v"), arg("out"), arg("keywords"),
          "Runs into `out`. The keywords are those of attune.attention; None: not given.");
    m.def("explain", &explain, arg("q"), arg("k"), arg("v"), arg("keywords"),
          "The kernel, the reasons for it and the bytes of its workspace.");
    nb::class_<Mha>(m, "Mha", "See attune.MultiHeadAttention.")
        .def(nb::init<const std::vector<std::pair<std::string, nb::object>> &, std::int64_t, std::int64_t, std::int64_t,
                      std::int64_t, bool>(),
             arg("parameters"), arg("num_heads"), arg("num_kv_heads"), arg("dk"), arg("dv"), arg("out_in"))
        .def(nb::init<const std::string &, const std::vector<std::string> &, std::int64_t, std::int64_t, std::int64_t,
                      std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool>(),
             arg("path"), arg("names"), arg("d_model"), arg("d_model_kv"), arg("d_out"), arg("num_heads"),
             arg("num_kv_heads"), arg("dk"), arg("dv"), arg("out_in"))
        .def_prop_ro("d_out", &Mha::d_out)
        .def("run", &Mha::run, arg("x_q"), arg("x_kv").none(), arg("out"), arg("keywords"));

    m.def("version", [] { return std::string(attune_version()); });
    m.def("isa", [] { return std::string(attune_isa()); });
    m.def("kernels", &kernels);
    m.def("dtypes", &dtypes);
    m.def("get_num_threads", &attune_get_num_threads);
    m.def(
        "set_num_threads", [](int threads) { attune::check(attune_set_num_threads(threads)); }, arg("threads"));
}
