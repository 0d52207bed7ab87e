// attune info: the machine, the registry, and what is inside a kernel.
#include "commands.h"

#include "attune/device.h"
#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/roofline.h"

#include <algorithm>
#include <cstdio>
#include <sys/ioctl.h>
#include <unistd.h>

namespace attune::tools {
namespace {

struct InfoOptions {
    std::string kernel, diff, json;
    std::vector<std::string> strategies;
    bool schedule = false, stmt = false, assembly = false, device_code = false;
    bool mlir = false;
    std::string step = "payload"; // of the lowering: what --mlir prints
};

// Steps of the lowering of a kernel made by MLIR, in their order (kinds of generators/mlir/attune_mlir_gen.py).
const std::vector<std::string> kSteps{"payload", "transform", "schedule", "buffers", "stmt", "llvm"};

std::string flag_names(uint32_t flags) {
    constexpr struct {
        uint32_t bit;
        const char *name;
    } kNames[] = {{ATTUNE_SCALE, "scale"},     {ATTUNE_CAUSAL, "causal"},      {ATTUNE_MASK, "mask"},
                  {ATTUNE_BIAS, "bias"},       {ATTUNE_KV_LEN, "kvlen"},       {ATTUNE_OFFSETS, "offsets"},
                  {ATTUNE_SOFTCAP, "softcap"}, {ATTUNE_ALIBI, "alibi"},        {ATTUNE_SINK, "sink"},
                  {ATTUNE_SCORES, "scores"},   {ATTUNE_STRIDED_V, "strided v"}};
    std::string s;
    for (const auto &n : kNames)
        if (flags & n.bit) s += fmt::format("{}{}", s.empty() ? "" : ", ", n.name);
    return s;
}

std::string trait_names(uint32_t traits) {
    std::string s;
    const auto add = [&](uint32_t bit, const char *name) {
        if (traits & bit) s += fmt::format("{}{}", s.empty() ? "" : ", ", name);
    };
    add(ATTUNE_TRAIT_OWN_THREADS, "own threads");
    add(ATTUNE_TRAIT_QUADRATIC, "O(n·m) memory");
    add(ATTUNE_TRAIT_STRICT, "strict");
    add(ATTUNE_TRAIT_ON_REQUEST, "on request");
    return s;
}

// {"q":24,"k":192} -> "q=24 k=192"
std::string short_params(const attune_kernel &k) {
    std::string s;
    const nlohmann::json knobs = kernel_knobs(k);
    for (const auto &[name, value] : knobs.items())
        s += fmt::format("{}{}={}", s.empty() ? "" : " ", name,
                         value.is_string() ? value.get<std::string>() : value.dump());
    return s;
}

// The tile sizes alone, for the table: the rest is in `attune info KERNEL`.
std::string tile_params(const attune_kernel &k) {
    std::string text;
    const nlohmann::json knobs = kernel_knobs(k);
    for (const char *name : {"q", "k", "panel", "split_keys"})
        if (knobs.contains(name) && knobs[name] != 0)
            text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, knobs[name].dump());
    return text;
}

// Whether the CPU lacks the kernel's ISA or the build its device: asked with the smallest problem the kernel accepts.
std::string runs_here(const attune_kernel &k) {
    attune_problem p;
    attune_problem_init(&p);
    p.q_dtype = k.q_dtype;
    p.kv_dtype = k.kv_dtype;
    p.o_dtype = k.o_dtype;
    p.device = k.device;
    p.Hq = p.Hkv = p.N = p.M = 1;
    p.dk = std::max<int64_t>(1, k.dk_min);
    p.dv = std::max<int64_t>(1, k.dv_min);
    const char *reason = attune_kernel_refuses(&k, &p);
    return reason ? reason : "";
}

nlohmann::json code_json(const attune_kernel &k) {
    nlohmann::json code = nlohmann::json::array();
    for (int64_t i = 0; i < k.num_code; ++i) {
        const attune_device_code &c = k.code[i];
        nlohmann::json j{
            {"function", c.function}, {"arch", c.arch}, {"threads", c.threads}, {"shared_bytes", c.shared_bytes}};
        if (c.registers >= 0) j["registers"] = c.registers, j["spill_bytes"] = c.spill_bytes;
        code.push_back(j);
    }
    return code;
}

nlohmann::json kernel_json(const attune_kernel &k) {
    nlohmann::json phases = nlohmann::json::array();
    for (int64_t i = 0; i < k.num_phases; ++i) phases.push_back(k.phases[i].name);
    return {{"name", k.name},
            {"strategy", k.strategy},
            {"backend", k.backend},
            {"isa", k.isa},
            {"device", device_name(k.device)},
            {"dtypes", {{"q", dtype_name(k.q_dtype)}, {"kv", dtype_name(k.kv_dtype)}, {"o", dtype_name(k.o_dtype)}}},
            {"dk", {k.dk_min, k.dk_max}},
            {"dv", {k.dv_min, k.dv_max}},
            {"features", flag_names(k.flags)},
            {"window", k.window != 0},
            {"gqa", k.gqa != 0},
            {"traits", trait_names(k.traits)},
            {"params", kernel_knobs(k)},
            {"why", k.why ? k.why : ""},
            {"phases", phases},
            {"code", code_json(k)},
            {"why_not", runs_here(k)}};
}

// The devices of each kind, a line each, or why there are none; `json` gets the same.
std::string device_lines(nlohmann::json &json) {
    std::string text;
    for (attune_device device : {ATTUNE_OPENCL, ATTUNE_VULKAN, ATTUNE_CUDA}) {
        const std::string kind = device_name(device);
        int64_t count = 0;
        if (attune_device_count(device, &count) != ATTUNE_OK) {
            text += fmt::format("{:<11}none: {}\n", kind, attune_last_error());
            json.push_back({{"device", kind}, {"why_not", attune_last_error()}});
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            attune_device_info d;
            attune_device_info_init(&d);
            if (attune_device_describe(device, i, &d) != ATTUNE_OK) continue;
            std::string limits =
                fmt::format("memory {}, buffers up to {}, {} of shared memory and {} threads a workgroup",
                            format_bytes(double(d.memory_bytes)), format_bytes(double(d.max_buffer_bytes)),
                            format_bytes(double(d.shared_bytes)), d.max_threads);
            if (d.compute_units) limits += fmt::format(", {} compute units", d.compute_units);
            text += fmt::format("{:<11}{} ({}){}{}\n{:<11}{}\n", kind, d.name, d.driver, d.is_software ? ", a CPU" : "",
                                d.is_default && count > 1 ? ", used" : "", "", limits);
            json.push_back({{"device", kind},
                            {"name", d.name},
                            {"driver", d.driver},
                            {"software", d.is_software != 0},
                            {"used", d.is_default != 0},
                            {"memory_bytes", d.memory_bytes},
                            {"max_buffer_bytes", d.max_buffer_bytes},
                            {"shared_bytes", d.shared_bytes},
                            {"max_threads", d.max_threads},
                            {"compute_units", d.compute_units},
                            {"clock_khz", d.clock_khz},
                            {"capability", d.capability}});
        }
    }
    return text;
}

void show_machine_and_registry(const InfoOptions &options) {
    const Machine machine = detect_machine();
    Calibration calibration;
    const int cores = machine.cores;
    calibration.peak_f32 = measure_peak_gflops(machine, ATTUNE_F32, cores);
    const double one = cores > 1 ? measure_peak_gflops(machine, ATTUNE_F32, 1) : calibration.peak_f32;
    calibration.peak_bf16 = measure_peak_gflops(machine, ATTUNE_BF16, cores);
    calibration.read = measure_read_gbps(machine, cores);
    const double read_one = cores > 1 ? measure_read_gbps(machine, 1) : calibration.read;

    fmt::print("attune {}\n\n", attune_version());
    fmt::print("CPU        {}\n", machine.cpu);
    fmt::print("cores      {}, memory {}\n", cores, format_bytes(double(machine.memory)));
    const auto cache = [](int64_t bytes) { return bytes ? format_bytes(double(bytes)) : std::string("unknown"); };
    fmt::print("caches     L1d {}, L2 {}, L3 {}\n", cache(machine.l1d), cache(machine.l2), cache(machine.l3));
    fmt::print("ISA        dispatch uses {}; the CPU has {}\n", attune_isa(),
               machine.isas.empty() ? "none that attune knows" : fmt::format("{}", fmt::join(machine.isas, ", ")));
    if (calibration.peak_f32 > 0)
        fmt::print("f32 peak   {:.0f} GFLOP/s on one core, {:.0f} on all (measured: independent multiply-adds)\n", one,
                   calibration.peak_f32);
    if (calibration.peak_bf16 > calibration.peak_f32 * 1.2)
        fmt::print("bf16 peak  {:.0f} GFLOP/s on all cores\n", calibration.peak_bf16);
    fmt::print("reading    {:.1f} GB/s on one core, {:.1f} on all (measured: memory outside the caches)\n", read_one,
               calibration.read);

    nlohmann::json devices_json = nlohmann::json::array();
    fmt::print("{}", device_lines(devices_json));

    KernelFilter filter;
    filter.strategies = options.strategies;
    filter.check_names();
    nlohmann::json kernels = nlohmann::json::array();
    const auto left = Table::Align::left;
    Table table({{"kernel", left},
                 {"strategy", left},
                 {"by", left},
                 {"isa", left},
                 {"type", left},
                 {"d", left},
                 {"tile", left},
                 {"traits", left},
                 {"runs here", left}});
    for (const attune_kernel *k : all_kernels()) {
        filter.device = k->device;
        if (!filter.accepts(*k)) continue;
        const std::string reason = runs_here(*k);
        table.add({k->name, k->strategy, k->backend, k->isa, kernel_dtypes(*k), kernel_features(*k), tile_params(*k),
                   trait_names(k->traits), reason.empty() ? "yes" : "no: " + reason});
        kernels.push_back(kernel_json(*k));
    }
    fmt::print("\n{} kernels\n\n{}", table.size(), table.text());
    fmt::print("\nattune info KERNEL tells more about one of them.\n");
    if (!options.json.empty()) {
        auto json = to_json(machine, attune_isa(), calibration, {});
        json.erase("rows");
        json["kernels"] = std::move(kernels);
        json["devices"] = std::move(devices_json);
        write_json(options.json, json);
    }
}

const attune_kernel &find_kernel(const std::string &name) {
    if (const attune_kernel *k = attune_find_kernel(name.c_str())) return *k;
    // A strategy or a part of a name is likely meant: list what contains it, or else everything.
    std::vector<std::string> similar, all;
    for (const attune_kernel *k : all_kernels()) {
        all.push_back(k->name);
        if (std::string(k->name).find(name) != std::string::npos) similar.push_back(k->name);
    }
    fail("KERNEL={}: unknown; expected one of:\n  {}", name, fmt::join(similar.empty() ? all : similar, "\n  "));
}

std::string facts(const attune_kernel &k) {
    std::string s;
    const auto line = [&s](std::string_view name, const std::string &value) {
        if (!value.empty()) s += fmt::format("{:<12}{}\n", name, value);
    };
    line("kernel", k.name);
    line("strategy", k.strategy);
    line("made by", k.backend);
    line("device", device_name(k.device));
    line("ISA", k.isa);
    line("type", kernel_dtypes(k));
    line("d_k", k.dk ? fmt::format("{} to {}, specialised for {}", k.dk_min, k.dk_max, k.dk)
                     : fmt::format("{} to {}, at run time", k.dk_min, k.dk_max));
    line("d_v", k.dv ? fmt::format("{} to {}, specialised for {}", k.dv_min, k.dv_max, k.dv)
                     : fmt::format("{} to {}, at run time", k.dv_min, k.dv_max));
    line("features", flag_names(k.flags) + (k.window ? ", window" : "") + (k.gqa ? ", grouped heads" : ""));
    line("traits", trait_names(k.traits));
    line("knobs", short_params(k));
    std::string phases;
    for (int64_t i = 0; i < k.num_phases; ++i) phases += (i ? ", " : "") + std::string(k.phases[i].name);
    line("phases", phases);
    attune_problem p;
    attune_problem_init(&p);
    p.q_dtype = k.q_dtype;
    p.kv_dtype = k.kv_dtype;
    p.o_dtype = k.o_dtype;
    p.device = k.device;
    p.Hq = p.Hkv = 8;
    p.N = p.M = 1024;
    p.dk = std::clamp<int64_t>(64, k.dk_min, k.dk_max);
    p.dv = std::clamp<int64_t>(64, k.dv_min, k.dv_max);
    const auto bytes = [&p](size_t (*size)(const attune_problem *)) { return size ? double(size(&p)) : 0.0; };
    if (k.device != ATTUNE_CPU)
        line("memory", fmt::format("{} of workspace on the device (h8 n1024 d{}/{})",
                                   format_bytes(bytes(k.shared_bytes)), p.dk, p.dv));
    else
        line("memory",
             fmt::format(
                 "{} for each group in flight, and for each thread {} of workspace and {} of stack (h8 n1024 d{}/{})",
                 format_bytes(bytes(k.shared_bytes)), format_bytes(bytes(k.scratch_bytes)),
                 format_bytes(bytes(k.stack_bytes)), p.dk, p.dv));
    for (int64_t i = 0; i < k.num_code; ++i) {
        const attune_device_code &c = k.code[i];
        std::string text = fmt::format("{}{}{}: {} threads, {} of shared memory", c.function, *c.arch ? " " : "",
                                       c.arch, c.threads, format_bytes(double(c.shared_bytes)));
        if (c.registers >= 0) text += fmt::format(", {} registers, {} bytes spilled", c.registers, c.spill_bytes);
        line(i ? "" : "code", text);
    }
    // Of the function that does the work: the first launch, assembled for each architecture.
    if (k.device == ATTUNE_CUDA && k.num_code > 0) {
        const int64_t rows = knob(k, "ti", 1) * knob(k, "ty", 1);
        const bool block = std::string_view(k.strategy) == "gpu_block";
        for (int64_t i = 0; block && i < k.num_code && std::string_view(k.code[i].function) == k.code[0].function;
             ++i) {
            const Roofline r = estimate(k.code[i], p, rows);
            if (r.gpu.empty()) continue;
            line(i ? "" : "estimate",
                 fmt::format("{} ({}): at most {:.1f} TFLOP/s, {} (h8 n1024 d{}/{}; by {}); {} workgroups = {} warps a "
                             "multiprocessor, limited by {}",
                             r.gpu, k.code[i].arch, r.tflops, format_seconds(r.seconds), p.dk, p.dv,
                             r.by_memory ? "memory" : "multiply-adds", r.groups_per_unit, r.warps_per_unit, r.limit));
        }
    }
    const std::string reason = runs_here(k);
    line("runs here", reason.empty() ? "yes" : "no: " + reason);
    line("why", k.why ? k.why : "");
    return s;
}

std::string artefact(const attune_kernel &k, const std::string &kind) {
    const bool by_mlir = std::string_view(k.backend) == "mlir";
    if (kind == "device" && k.device == ATTUNE_CPU)
        fail("--device-code: {} is for the CPU; expected a kernel for a device", k.name);
    if (!by_mlir && kind != "schedule" && kind != "stmt" && kind != "asm" && kind != "device")
        fail("--mlir: {} is made by {}; expected a kernel made by mlir", k.name, k.backend);
    std::string text;
    for (const ManifestPhase &phase : manifest_phases(manifest_path(), k.name)) {
        text += fmt::format("── {} of {}: {} ──\n", phase.phase, k.name, kind);
        text += emit_artefact(phase, kind);
        if (!text.empty() && text.back() != '\n') text += '\n';
    }
    return text;
}

int terminal_columns() {
    winsize size{};
    if (isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 60) return size.ws_col;
    return 160;
}

// Two columns with marks between them: what `diff` is for.
void print_side_by_side(const std::string &a, const std::string &b) {
    const TemporaryFolder folder;
    write_file(folder.file("a"), a);
    write_file(folder.file("b"), b);
    std::string output;
    const int status = run_program({"diff", "--side-by-side", "--expand-tabs", "--width",
                                    std::to_string(terminal_columns()), folder.file("a"), folder.file("b")},
                                   output);
    if (status > 1) fail("diff ended with status {}; expected 0 or 1: {}", status, output);
    fmt::print("{}", output);
}

void run_info(const InfoOptions &options) {
    if (!options.json.empty()) check_writable(options.json);
    const bool wants_artefact =
        options.schedule || options.stmt || options.assembly || options.mlir || options.device_code;
    if (options.kernel.empty()) {
        if (wants_artefact || !options.diff.empty())
            fail("info: --{} without KERNEL; expected a kernel's name first", !options.diff.empty() ? "diff"
                                                                              : options.schedule    ? "schedule"
                                                                              : options.stmt        ? "stmt"
                                                                              : options.mlir        ? "mlir"
                                                                              : options.device_code ? "device-code"
                                                                                                    : "asm");
        show_machine_and_registry(options);
        return;
    }
    const attune_kernel &k = find_kernel(options.kernel);
    std::vector<std::string> kinds;
    if (options.mlir) kinds.push_back(options.step);
    if (options.schedule) kinds.push_back("schedule");
    if (options.stmt) kinds.push_back("stmt");
    if (options.assembly) kinds.push_back("asm");
    if (options.device_code) kinds.push_back("device");
    if (!options.json.empty()) write_json(options.json, kernel_json(k));
    if (options.diff.empty()) {
        fmt::print("{}", facts(k));
        for (const std::string &kind : kinds) fmt::print("\n{}", artefact(k, kind));
        return;
    }
    const attune_kernel &other = find_kernel(options.diff);
    print_side_by_side(facts(k), facts(other));
    if (kinds.empty()) kinds.push_back("schedule");
    for (const std::string &kind : kinds) {
        fmt::print("\n");
        print_side_by_side(artefact(k, kind), artefact(other, kind));
    }
}

} // namespace

void add_info(CLI::App &app, Status &) {
    auto options = std::make_shared<InfoOptions>();
    CLI::App *command = app.add_subcommand("info", "This machine, the registered kernels, and what is inside one");
    command->add_option("KERNEL", options->kernel, "A kernel's full name: print its facts")->type_name("");
    command->add_flag("--schedule", options->schedule, "Its loop nest, phase by phase");
    command->add_flag("--stmt", options->stmt, "Its lowered statement");
    command->add_flag("--asm", options->assembly, "Its assembly");
    command->add_flag("--device-code,--ptx", options->device_code,
                      "What it gives to the device's driver: PTX, OpenCL C or SPIR-V (binary)");
    command
        ->add_option(
            "--mlir", options->step,
            fmt::format("A step of its lowering, if MLIR made it: {} (default payload)", fmt::join(kSteps, ", ")))
        ->type_name("[STEP]")
        ->expected(0, 1)
        ->check(CLI::IsMember(kSteps));
    command
        ->add_option("--diff", options->diff,
                     "Beside another kernel, in two columns (with --schedule unless --stmt or --asm)")
        ->type_name("OTHER");
    command->add_option("--strategy", options->strategies, "List only kernels of these strategies")
        ->type_name("A,B")
        ->delimiter(',')
        ->allow_extra_args(false);
    command->add_option("--json", options->json, "Also write it to this file")->type_name("FILE");
    command->footer(
        "  attune info\n"
        "  attune info attn_flash_f32_d64_avx512 --schedule\n"
        "  attune info attn_flash_f32_d64_avx512 --diff attn_rowstrip_f32_d64_avx512 --asm\n"
        "  attune info attn_mlir_flash_f32_d64_avx512 --mlir llvm\n\n"
        "Loop nests, statements and assembly are made on demand by the generator program that built the kernel.");
    command->callback([options, mlir = command->get_option("--mlir")] {
        options->mlir = mlir->count() > 0;
        if (options->step.empty()) options->step = kSteps.front(); // --mlir alone
        run_info(*options);
    });
}

} // namespace attune::tools
