// The driver's functions for modules and launches.
#include "state.h"

#include <cstring>
#include <set>

using namespace attune::ptx;

namespace {

std::set<void *> &modules = *new std::set<void *>;

Result report(const json &answer) {
    std::fprintf(stderr, "ptx driver: %s\n", answer["error"].get<std::string>().c_str());
    return kIllegalAddress;
}

} // namespace

DRIVER_API cuModuleLoadDataEx(void **module, const void *image, unsigned, int *, void **) {
    ENTER;
    const char *text = static_cast<const char *>(image);
    const int id = driver.modules++;
    const json answer = driver.ask({{"do", "module"}, {"id", id}}, text, std::strlen(text));
    if (answer.contains("error")) {
        report(answer);
        return kInvalidImage;
    }
    *module = new Module{id};
    modules.insert(*module);
    return kSuccess;
}
DRIVER_API cuModuleLoadData(void **module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}
DRIVER_API cuModuleUnload(void *module) {
    ENTER;
    if (!modules.erase(module)) return kInvalidHandle;
    driver.ask({{"do", "unload"}, {"id", static_cast<Module *>(module)->id}});
    delete static_cast<Module *>(module);
    return kSuccess;
}
DRIVER_API cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER;
    if (!modules.count(module)) return kInvalidHandle;
    const json answer =
        driver.ask({{"do", "function"}, {"module", static_cast<Module *>(module)->id}, {"name", name}})["ok"];
    if (answer.is_null()) return kNotFound;
    *function = new Function{answer["id"], answer["parameters"], answer["shared"], answer["threads"]};
    return kSuccess;
}
DRIVER_API cuFuncSetAttribute(void *function, int attribute, int value) {
    ENTER;
    if (attribute == 8) { // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        Function *f = static_cast<Function *>(function);
        if (value < 0 || value + f->shared > (163 << 10)) return kInvalidValue;
        f->allowed = value + f->shared;
    }
    return kSuccess;
}
DRIVER_API cuFuncGetAttribute(int *value, int attribute, void *function) {
    ENTER;
    const Function *f = static_cast<Function *>(function);
    *value = attribute == 0 ? f->threads : attribute == 1 ? f->shared : 0;
    return kSuccess;
}
DRIVER_API cuFuncSetCacheConfig(void *, int) {
    return kSuccess;
}
DRIVER_API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned dynamic, void *, void **parameters, void **extra) {
    ENTER;
    if (extra) return kInvalidValue;
    const Function *f = static_cast<Function *>(function);
    if (++driver.launches == environment("ATTUNE_PTX_FAIL_LAUNCH", 0)) return driver.sticky = kLaunchFailed;
    json values = json::array();
    for (size_t i = 0; i < f->parameters.size(); i++) {
        std::string hex;
        for (size_t k = 0; k < f->parameters[i]; k++) {
            char digits[3];
            std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char *>(parameters[i])[k]);
            hex += digits;
        }
        values.push_back(hex);
    }
    const json answer = driver.ask({{"do", "launch"},
                                    {"function", f->id},
                                    {"grid", {gx, gy, gz}},
                                    {"block", {bx, by, bz}},
                                    {"dynamic", dynamic},
                                    {"allowed", f->allowed},
                                    {"values", values}});
    if (answer.contains("error")) return driver.sticky = report(answer);
    return kSuccess;
}
