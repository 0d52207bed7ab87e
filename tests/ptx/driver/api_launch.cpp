// The driver's functions for modules and launches.
#include "state.h"

using namespace attune::ptx;

namespace {

Result report(const json &answer) {
    std::fprintf(stderr, "ptx driver: %s\n", answer["error"].get<std::string>().c_str());
    return kIllegalAddress;
}

} // namespace

DRIVER_API cuModuleLoadDataEx(void **module, const void *image, unsigned, int *, void **) {
    ENTER;
    if (Contexts::current().empty()) return kInvalidContext;
    const json answer = driver.load(module, static_cast<const char *>(image));
    if (!answer.contains("error")) return kSuccess;
    report(answer);
    return kInvalidImage;
}
DRIVER_API cuModuleLoadData(void **module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}
DRIVER_API cuModuleUnload(void *module) {
    ENTER;
    return driver.unload(module);
}
DRIVER_API cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER;
    return driver.function(function, module, name);
}
DRIVER_API cuFuncSetAttribute(void *function, int attribute, int value) {
    ENTER;
    if (!driver.owns(function)) return kInvalidHandle;
    if (attribute == kFunctionMaxDynamicShared) {
        Function *f = static_cast<Function *>(function);
        if (value < 0 || value + f->shared > (163 << 10)) return kInvalidValue;
        f->allowed = value + f->shared;
    }
    return kSuccess;
}
DRIVER_API cuFuncGetAttribute(int *value, int attribute, void *function) {
    ENTER;
    const Function *f = static_cast<Function *>(function);
    *value = attribute == kFunctionMaxThreads ? f->threads : attribute == kFunctionSharedBytes ? f->shared : 0;
    return kSuccess;
}
DRIVER_API cuFuncSetCacheConfig(void *, int) {
    return kSuccess;
}
DRIVER_API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned dynamic, void *stream, void **parameters, void **extra) {
    ENTER;
    if (extra) return kInvalidValue;
    if (!driver.owns(function)) return kInvalidHandle;
    if (const Result result = driver.work_on(stream)) return result;
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
