// The generator program: runs one generator and writes what it makes.
//
//   attune-halide-gen GENERATOR FUNCTION TARGET [param=value …] [--object FILE] [--scratch FILE] [--launches FILE]
//   [--emit schedule|stmt|asm|device --output FILE]
//   [--score-mod PLUGIN] … [--mask-mod PLUGIN] …
//   attune-halide-gen --runtime FILE TARGET
//   attune-halide-gen --describe FILE [--score-mod PLUGIN] … [--mask-mod PLUGIN] …
//   attune-halide-gen --space dk=64 dv=64 rows=1024 keys=1024 lanes=16 registers=32 l1=32768 l2=1048576
//
// --launches writes a line for each kernel that the function launches on a device: name, threads of a workgroup, bytes
// of shared memory. `device` is the code for the device: PTX, OpenCL C or SPIR-V.
//
// The plug-ins are user functions (include/attune/mods.h), in the order in which they are applied; --describe lists
// their parameters as attune_mod_param, with an empty one at the end.
//
// Halide's own driver knows neither how much memory a kernel takes for itself nor how to print a loop nest; both are
// wanted in the registry. --space prints what `attune tune` may try (space.h).
#include "mods.h"
#include "space.h"

#include "Halide.h"

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

using namespace Halide;

namespace {

[[noreturn]] void fail(const std::string &message) {
    std::cerr << "attune-halide-gen: " << message << "\n";
    std::exit(1);
}

// Errors of a schedule come with the generator's name and end the program: the wheel's exceptions do not unwind into
// programs built with another standard library.
class Reporter : public CompileTimeErrorReporter {
  public:
    explicit Reporter(std::string generator) : generator(std::move(generator)) {}
    void warning(const char *message) override { std::cerr << "attune-halide-gen: " << generator << ": " << message; }
    void error(const char *message) override {
        const std::string files = attune_gen::user_mods().files();
        if (attune_gen::user_place.empty())
            fail(generator + (files.empty() ? "" : ", with the user functions of " + files) + ": " + message);
        std::cerr << attune_gen::user_place << message;
        std::exit(1);
    }

  private:
    std::string generator;
};

// Adds up what a lowered function allocates: on the stack (constant sizes), and through halide_malloc, where sizes may
// grow with the number of keys and with the features of V.
class Scratch : public Internal::IRMutator {
  public:
    using IRMutator::mutate;
    using IRMutator::visit;
    int64_t stack = 0;
    std::vector<Expr> heap;

    Internal::Stmt visit(const Internal::LetStmt *op) override {
        lets.emplace_back(op->name, op->value);
        Internal::Stmt s = IRMutator::visit(op);
        lets.pop_back();
        return s;
    }

    Internal::Stmt visit(const Internal::Allocate *op) override {
        const int64_t size = op->constant_allocation_size() * op->type.bytes();
        // Halide puts no more than 16 KiB of one buffer on the stack, whatever the schedule says.
        const bool on_stack = op->memory_type != MemoryType::Heap && size <= 16 * 1024;
        if (!op->new_expr.defined() && size > 0 && on_stack) {
            stack += size + 64;
        } else if (!op->new_expr.defined()) {
            Expr bytes = cast<int64_t>(op->type.bytes());
            for (const Expr &e : op->extents) bytes = bytes * cast<int64_t>(e);
            for (auto let = lets.rbegin(); let != lets.rend(); ++let)
                bytes = Internal::substitute(let->first, let->second, bytes);
            heap.push_back(bytes);
        }
        return IRMutator::visit(op);
    }

  private:
    std::vector<std::pair<std::string, Expr>> lets;
};

// The largest value of a size expression for `keys` keys and `features` features of V: every key is visible.
int64_t bytes_at(const Expr &e, int64_t keys, int64_t features) {
    class Known : public Internal::IRMutator {
      public:
        using IRMutator::mutate;
        using IRMutator::visit;
        int64_t keys, features;
        Expr visit(const Internal::Variable *op) override {
            if (op->name == "end" || op->name == "full_end" || op->name == "num_keys")
                return Internal::make_const(op->type, keys);
            if (op->name == "begin" || op->name == "full_begin") return Internal::make_const(op->type, 0);
            return op;
        }
        Expr visit(const Internal::Call *op) override { // the extent of the output's first dimension: the features
            const bool extent = op->name == Internal::Call::buffer_get_extent && Internal::is_const_zero(op->args[1]);
            const auto *buffer = extent ? op->args[0].as<Internal::Variable>() : nullptr;
            if (buffer && buffer->name == "out.buffer") return Internal::make_const(op->type, features);
            return IRMutator::visit(op);
        }
    } known;
    known.keys = keys;
    known.features = features;
    const Expr x = Internal::simplify(known.mutate(e));
    if (const auto value = Internal::as_const_int(x)) return (*value + 63) / 64 * 64 + 64;
    std::ostringstream text;
    text << x;
    fail("the size of an allocation depends on more than the keys and the features of V: " + text.str());
}

// The launches in a lowered function: halide_cuda_run(context, state, name, 3 x workgroups, 3 x threads, shared …).
class Launches : public Internal::IRVisitor {
  public:
    using IRVisitor::visit;
    std::ostringstream text;

    void visit(const Internal::Call *op) override {
        IRVisitor::visit(op);
        const bool launch = op->name.rfind("halide_", 0) == 0 && op->args.size() > 9 && op->name.size() > 4 &&
                            op->name.compare(op->name.size() - 4, 4, "_run") == 0;
        const auto *name = launch ? op->args[2 - shift(op)].as<Internal::StringImm>() : nullptr;
        if (!name) return;
        int64_t threads = 1;
        const size_t first = 6 - shift(op);
        for (size_t i = first; i < first + 3; i++) threads *= constant(op->args[i]);
        text << name->value << " " << threads << " " << constant(op->args[first + 3]) << "\n";
    }

  private:
    // Without user_context in the signature the state comes first.
    static size_t shift(const Internal::Call *op) { return op->args[2].as<Internal::StringImm>() ? 0 : 1; }
    static int64_t constant(const Expr &e) {
        const auto value = Internal::as_const_int(Internal::simplify(e));
        if (!value) fail("a workgroup's size or shared memory is not a constant");
        return *value;
    }
};

// The spaces of all strategies, pruned for a problem on a machine.
int print_spaces(int argc, char **argv) {
    attune_gen::Setting setting{};
    std::map<std::string, int64_t *> wanted{{"dk", &setting.dk},       {"dv", &setting.dv},
                                            {"rows", &setting.rows},   {"keys", &setting.keys},
                                            {"lanes", &setting.lanes}, {"registers", &setting.registers},
                                            {"l1", &setting.l1},       {"l2", &setting.l2}};
    for (int i = 2; i < argc; i++) {
        const std::string arg = argv[i];
        const size_t eq = std::min(arg.find('='), arg.size());
        const auto it = wanted.find(arg.substr(0, eq));
        const int64_t value = eq < arg.size() ? std::atoll(arg.c_str() + eq + 1) : 0;
        if (it == wanted.end() || value < 1)
            fail("--space: '" + arg +
                 "': expected one more of dk, dv, rows, keys, lanes, registers, l1, l2, as NAME=NUMBER");
        *it->second = value;
        wanted.erase(it);
    }
    if (!wanted.empty()) fail("--space: " + wanted.begin()->first + "=NUMBER is missing");
    std::string text;
    for (const attune_gen::Space &space : attune_gen::all_spaces())
        text += (text.empty() ? "[" : ",\n") + space.json(setting);
    std::cout << text << "]\n";
    return 0;
}

// The parameters of the user functions, for the registry.
void describe_user_functions(const std::string &file) {
    std::ofstream out(file);
    out << "// name, type, rank, what each dimension is indexed by\n";
    for (const attune_gen::UserParameter &p : attune_gen::user_mods().parameters())
        out << "{\"" << p.name << "\", "
            << (p.type == Float(32) ? "ATTUNE_F32"
                : p.type == Int(32) ? "ATTUNE_I32"
                : p.type == Int(64) ? "ATTUNE_I64"
                : p.type == UInt(8) ? "ATTUNE_U8"
                                    : "")
            << ", " << p.rank << ", {" << p.by[0] << ", " << p.by[1] << ", " << p.by[2] << ", " << p.by[3] << "}},\n";
    out << "{nullptr, ATTUNE_F32, 0, {}},\n";
}

int run(int argc, char **argv) {
    if (argc > 1 && std::string(argv[1]) == "--space") return print_spaces(argc, argv);
    if (argc == 4 &&
        std::string(argv[1]) == "--runtime") { // what all generated functions call: threads, memory, errors, drivers
        compile_standalone_runtime(argv[2], Target(argv[3]));
        return 0;
    }
    const bool describe = argc > 2 && std::string(argv[1]) == "--describe";
    if (argc < 4)
        fail("usage: attune-halide-gen GENERATOR FUNCTION TARGET [param=value …] [--object FILE] [--scratch FILE] "
             "[--launches FILE] [--emit schedule|stmt|asm|device --output FILE]");
    const std::string generator = argv[1], function = argv[2];
    const Target target(describe ? "host" : argv[3]);
    std::string object, scratch_file, launches_file, emit, output;
    std::string autoscheduler, plugin;
    std::vector<std::pair<std::string, std::string>> params;
    std::map<std::string, std::string> autoscheduler_params;
    for (int i = describe ? 3 : 4; i < argc; i++) {
        const std::string arg = argv[i];
        auto value = [&]() -> std::string {
            return i + 1 < argc ? argv[++i] : (fail(arg + ": a value is missing"), "");
        };
        if (arg == "--object")
            object = value();
        else if (arg == "--scratch")
            scratch_file = value();
        else if (arg == "--launches")
            launches_file = value();
        else if (arg == "--emit")
            emit = value();
        else if (arg == "--output")
            output = value();
        else if (arg == "--plugin")
            plugin = value();
        else if (arg == "--score-mod" || arg == "--mask-mod")
            attune_gen::user_mods().load(value(), arg == "--score-mod");
        else if (const size_t eq = arg.find('='); eq != std::string::npos) {
            const std::string name = arg.substr(0, eq), text = arg.substr(eq + 1);
            if (name == "autoscheduler")
                autoscheduler = text;
            else if (name.rfind("autoscheduler.", 0) == 0)
                autoscheduler_params[name.substr(14)] = text;
            else
                params.emplace_back(name, text);
        } else
            fail("unexpected argument '" + arg + "'");
    }
    if (describe) {
        describe_user_functions(function);
        return 0;
    }
    if (!plugin.empty()) load_plugin(plugin);

    AutoschedulerParams schedule_params;
    schedule_params.name = autoscheduler;
    schedule_params.extra = autoscheduler_params;
    auto gen = Internal::GeneratorRegistry::create(generator, GeneratorContext(target, schedule_params));
    if (!gen) {
        std::string known;
        for (const std::string &n : Internal::GeneratorRegistry::enumerate()) known += " " + n;
        fail("no generator '" + generator + "'; known:" + known);
    }
    for (const auto &[name, value] : params) gen->set_generatorparam_value(name, value);
    Pipeline pipeline = gen->build_pipeline();
    if (!autoscheduler.empty()) pipeline.apply_autoscheduler(target, schedule_params);

    std::vector<Argument> args;
    for (const auto &info : gen->arginfos()) {
        if (info.dir != Internal::ArgInfoDirection::Input) continue;
        for (const Parameter &p : gen->input_parameter(info.name))
            args.emplace_back(p.name(), p.is_buffer() ? Argument::InputBuffer : Argument::InputScalar, p.type(),
                              p.dimensions(), p.get_argument_estimates());
    }

    if (emit == "schedule") { // Halide prints loop nests to stderr only
        std::ostringstream text;
        std::streambuf *err = std::cerr.rdbuf(text.rdbuf());
        pipeline.print_loop_nest();
        std::cerr.rdbuf(err);
        std::ofstream(output) << text.str();
        return 0;
    }
    if (emit == "stmt") {
        pipeline.compile_to_lowered_stmt(output, args, Text, target);
        return 0;
    }
    if (emit == "asm") {
        pipeline.compile_to_assembly(output, args, function, target);
        return 0;
    }
    if (emit == "device") {
        if (!target.has_gpu_feature()) fail("--emit device: the target " + target.to_string() + " has no device");
        Module module = pipeline.compile_to_module(args, function, target, LinkageType::External);
        module.compile({{OutputFileType::device_code, output}});
        return 0;
    }
    if (!emit.empty()) fail("--emit " + emit + ": expected schedule, stmt, asm or device");

    auto *scratch = new Scratch;
    pipeline.add_custom_lowering_pass(scratch, [] {});
    // With user functions the arguments are not the same for all kernels: these are called by FUNCTION_argv.
    const auto linkage = attune_gen::user_mods().any() ? LinkageType::ExternalPlusArgv : LinkageType::External;
    Module module = pipeline.compile_to_module(args, function, target, linkage);
    if (!object.empty()) module.compile({{OutputFileType::object, object}});
    if (!launches_file.empty()) {
        Launches launches;
        for (const Internal::LoweredFunc &f : module.functions()) f.body.accept(&launches);
        std::ofstream(launches_file) << launches.text.str();
    }
    if (!scratch_file.empty()) {
        // Kernels with threads of their own take memory from the heap, as much as they like.
        if (!target.has_feature(Target::UserContext)) scratch->heap.clear();
        // heap + per_key * keys + per_feature * features; sizes are at most linear in each.
        auto total = [&](int64_t keys, int64_t features) {
            int64_t bytes = 0;
            for (const Expr &e : scratch->heap) bytes += bytes_at(e, keys, features);
            return bytes;
        };
        constexpr int64_t kKeys = 1 << 16, kFeatures = 1 << 12;
        const int64_t base = total(0, 0), per_key = (total(kKeys, 0) - base + kKeys - 1) / kKeys;
        const int64_t per_feature = (total(0, kFeatures) - base + kFeatures - 1) / kFeatures;
        const int64_t slack = per_key ? 64 * per_key : 0; // sizes go in steps of a panel of keys
        std::ofstream(scratch_file)
            << "// bytes on the stack, bytes from the scratch memory, those for each key and for "
               "each feature of V\n// generated in "
            << double(std::clock()) / CLOCKS_PER_SEC << " s of CPU time\n{" << scratch->stack << ", " << base + slack
            << ", " << per_key << ", " << per_feature << "}\n";
    }
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    static Reporter reporter(argc > 1 ? argv[1] : "");
    set_custom_compile_time_error_reporter(&reporter);
    return run(argc, argv);
}
