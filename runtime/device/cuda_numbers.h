// Numbers of the CUDA driver's interface that are used here, by their names in cuda.h without the prefix: attune needs
// no toolkit to be built. Also those that the test driver (tests/ptx/driver) answers with.
#pragma once

namespace attune::cuda {

// CUresult
enum Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kNoDevice = 100,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotFound = 500,
    kIllegalAddress = 700,
    kLaunchFailed = 719,
};

// CUdevice_attribute
enum Attribute {
    kMaxThreadsPerBlock = 1,
    kMaxBlockX = 2,
    kMaxBlockY = 3,
    kMaxBlockZ = 4,
    kMaxGridX = 5,
    kMaxGridY = 6,
    kMaxGridZ = 7,
    kMaxSharedPerBlock = 8,
    kWarpSize = 10,
    kMaxRegistersPerBlock = 12,
    kClockKhz = 13,
    kMultiprocessors = 16,
    kIntegrated = 18,
    kConcurrentKernels = 31,
    kMemoryClockKhz = 36,
    kMemoryBusBits = 37,
    kL2Bytes = 38,
    kMaxThreadsPerMultiprocessor = 39,
    kUnifiedAddressing = 41,
    kMajor = 75,
    kMinor = 76,
    kMaxSharedPerMultiprocessor = 81,
    kMaxRegistersPerMultiprocessor = 82,
    kMaxSharedPerBlockOptin = 97,
    kMaxBlocksPerMultiprocessor = 106,
};

// CUfunction_attribute
enum FunctionAttribute {
    kFunctionMaxThreads = 0,
    kFunctionSharedBytes = 1,
    kFunctionMaxDynamicShared = 8,
};

} // namespace attune::cuda
