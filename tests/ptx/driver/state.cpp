// Device memory, and the connection to the interpreter.
#include "state.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace attune::ptx {

Contexts &Contexts::current() {
    thread_local Contexts contexts; // begins as zeros
    return contexts;
}

int64_t environment(const char *name, int64_t missing) {
    const char *text = std::getenv(name);
    return text && *text ? std::atoll(text) : missing;
}

Driver &Driver::get() {
    static Driver &driver = *new Driver; // never destroyed: Halide's runtime frees its memory at exit
    return driver;
}

size_t Driver::free_bytes() const {
    size_t used = 0;
    for (const auto &[address, a] : allocations_) used += a.bytes;
    return size_ - used;
}

Result Driver::allocate(uint64_t *address, size_t bytes) {
    if (bytes == 0) return kInvalidValue;
    if (Contexts::current().empty()) return kInvalidContext;
    map_memory();
    // First fit, with at least one unit between two allocations.
    uint64_t at = kBase;
    for (const auto &[begin, a] : allocations_) {
        if (begin - at >= bytes + kAlign && begin > at) break;
        at = (begin + a.bytes + 2 * kAlign - 1) / kAlign * kAlign;
    }
    if (at - kBase + bytes + kAlign > size_ || bytes > free_bytes()) return kOutOfMemory;
    allocations_[at] = {bytes, Contexts::current().back()};
    // What nobody wrote may not be read anyway: NaN shows it where memory is copied, and larger arrays stay sparse.
    std::memset(host(at), 0xff, std::min(bytes, kFilled));
    ask({{"do", "allocate"}, {"address", at}, {"bytes", bytes}});
    *address = at;
    return kSuccess;
}

Result Driver::release(uint64_t address) {
    if (!allocations_.erase(address)) return kInvalidValue;
    ask({{"do", "free"}, {"address", address}});
    return kSuccess;
}

bool Driver::inside(uint64_t address, size_t bytes) const {
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) return false;
    const auto &[begin, a] = *std::prev(next);
    return address + bytes <= begin + a.bytes;
}
bool Driver::find(uint64_t address, uint64_t *begin, size_t *bytes) const {
    if (!inside(address, 1)) return false;
    const auto it = std::prev(allocations_.upper_bound(address));
    *begin = it->first, *bytes = it->second.bytes;
    return true;
}

void *Driver::create_context() {
    return *contexts_.insert(new char).first;
}
Result Driver::destroy_context(void *context) {
    if (!contexts_.count(context)) return kInvalidContext;
    std::erase_if(streams_, [context](const auto &s) {
        if (s.second == context) delete static_cast<char *>(s.first);
        return s.second == context;
    });
    std::vector<void *> modules;
    for (const auto &[handle, module] : modules_)
        if (module->context == context) modules.push_back(handle);
    for (void *module : modules) unload(module);
    std::vector<uint64_t> left;
    for (const auto &[address, a] : allocations_)
        if (a.context == context) left.push_back(address);
    for (uint64_t address : left) release(address);
    std::erase_if(work_, [context](const auto &w) { return w.first.first == context; });
    Contexts::current().remove(context);
    contexts_.erase(context);
    delete static_cast<char *>(context);
    return kSuccess;
}
void *Driver::create_stream() {
    char *stream = new char;
    streams_[stream] = Contexts::current().back();
    return stream;
}
Result Driver::destroy_stream(void *stream) {
    if (!streams_.erase(stream)) return kInvalidHandle;
    delete static_cast<char *>(stream);
    return kSuccess;
}
void *Driver::context_of(void *stream) const {
    const auto found = streams_.find(stream);
    return found == streams_.end() ? nullptr : found->second;
}
Result Driver::check_stream(void *stream) const {
    if (Contexts::current().empty() || !is_context(Contexts::current().back())) return kInvalidContext;
    return !stream || context_of(stream) == Contexts::current().back() ? kSuccess : kInvalidHandle;
}
Result Driver::work_on(void *stream) {
    const Result result = check_stream(stream);
    if (result == kSuccess) work_[{Contexts::current().back(), stream}]++;
    return result;
}
int Driver::work(void *context, void *stream) const {
    const auto found = work_.find({context, stream});
    return found == work_.end() ? 0 : found->second;
}

json Driver::load(void **module, const char *text) {
    auto made = std::make_unique<Module>();
    made->id = next_module_++;
    made->context = Contexts::current().back();
    const json answer = ask({{"do", "module"}, {"id", made->id}}, text, std::strlen(text));
    if (answer.contains("error")) return answer;
    *module = made.get();
    modules_[*module] = std::move(made);
    return answer;
}
Result Driver::unload(void *module) {
    const auto found = modules_.find(module);
    if (found == modules_.end()) return kInvalidHandle;
    ask({{"do", "unload"}, {"id", found->second->id}});
    modules_.erase(found);
    return kSuccess;
}
Result Driver::function(void **function, void *module, const char *name) {
    const auto found = modules_.find(module);
    if (found == modules_.end()) return kInvalidHandle;
    const json answer = ask({{"do", "function"}, {"module", found->second->id}, {"name", name}})["ok"];
    if (answer.is_null()) return kNotFound;
    auto f = std::make_unique<Function>();
    f->id = answer["id"], f->shared = answer["shared"], f->threads = answer["threads"];
    f->parameters = answer["parameters"].get<std::vector<size_t>>();
    *function = f.get();
    found->second->functions.push_back(std::move(f));
    return kSuccess;
}
bool Driver::owns(void *function) const {
    for (const auto &[handle, module] : modules_)
        for (const auto &f : module->functions)
            if (f.get() == function)
                return !Contexts::current().empty() && module->context == Contexts::current().back();
    return false;
}

Result Driver::write(uint64_t to, const void *from, size_t bytes) {
    if (bytes == 0) return kSuccess;
    if (!inside(to, bytes)) return outside("write to", to, bytes);
    std::memcpy(host(to), from, bytes);
    written_.push_back({to, bytes});
    return kSuccess;
}
Result Driver::read(void *to, uint64_t from, size_t bytes) {
    if (bytes == 0) return kSuccess;
    if (!inside(from, bytes)) return outside("read from", from, bytes);
    std::memcpy(to, host(from), bytes);
    return kSuccess;
}
Result Driver::outside(const char *what, uint64_t address, size_t bytes) const {
    std::fprintf(stderr, "ptx driver: %s %zu bytes of device memory at %#llx, outside all allocations\n", what, bytes,
                 static_cast<unsigned long long>(address));
    return kInvalidValue;
}

json Driver::ask(json request, const char *text, size_t bytes) {
    start();
    if (!written_.empty() && (request["do"] == "launch" || request["do"] == "allocate")) {
        json ranges = json::array();
        for (const auto &[address, length] : written_) ranges.push_back({address, length});
        written_.clear();
        ask({{"do", "written"}, {"ranges", ranges}});
    }
    if (text) request["bytes_follow"] = bytes;
    std::fprintf(to_child_, "%s\n", request.dump().c_str());
    if (text) std::fwrite(text, 1, bytes, to_child_);
    std::fflush(to_child_);
    std::string line;
    for (int c; (c = std::fgetc(from_child_)) != EOF && c != '\n';) line += char(c);
    if (line.empty()) {
        std::fprintf(stderr, "ptx driver: the interpreter ended (see above)\n");
        std::_Exit(1);
    }
    return json::parse(line);
}

Driver::Driver() : size_(size_t(environment("ATTUNE_PTX_MEMORY", int64_t(1) << 30))) {}

void Driver::map_memory() {
    if (memory_) return;
    file_ = memfd_create("device memory", 0);
    void *p = MAP_FAILED;
    if (file_ >= 0 && ftruncate(file_, off_t(size_)) == 0)
        p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (p == MAP_FAILED) {
        std::perror("ptx driver: device memory");
        std::_Exit(1);
    }
    memory_ = static_cast<uint8_t *>(p);
}

void Driver::start() {
    if (to_child_) return;
    map_memory();
    int requests[2], answers[2];
    if (pipe(requests) || pipe(answers)) std::_Exit(1);
    const pid_t child = fork();
    if (child == 0) {
        dup2(requests[0], 0);
        dup2(answers[1], 1);
        for (int fd : {requests[0], requests[1], answers[0], answers[1]}) close(fd);
        // The interpreter is slow enough; its libraries' threads would only disturb each other.
        for (const char *name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}) setenv(name, "1", 1);
        unsetenv("LD_PRELOAD");
        const std::string fd = std::to_string(file_), base = std::to_string(kBase);
        execl(ATTUNE_PTX_PYTHON, ATTUNE_PTX_PYTHON, ATTUNE_PTX_INTERPRETER, fd.c_str(), base.c_str(), nullptr);
        std::perror("ptx driver: " ATTUNE_PTX_PYTHON);
        std::_Exit(127);
    }
    close(requests[0]);
    close(answers[1]);
    to_child_ = fdopen(requests[1], "w");
    from_child_ = fdopen(answers[0], "r");
}

} // namespace attune::ptx
