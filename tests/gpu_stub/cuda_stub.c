// A CUDA driver without a device: it takes what Triton's launcher calls, checks what a Hopper GPU would refuse, counts
// launches by kernel, and computes nothing. Built against the header that Triton ships, so that a function that changed
// there does not compile here.

#include <cuda.h>
#include <stdint.h>
#include <string.h>

#define MAX_FUNCTIONS 4096
#define NAME_BYTES 128
#define MAX_SHARED 232448 // bytes that one block can have (sm_90)
#define NUM_MULTIPROCESSORS 132

static struct {
  char name[NAME_BYTES];
  long launches;
} functions[MAX_FUNCTIONS];
static long num_functions, num_descriptors;

// ---------------------------------------------------------------- for the test

long stub_num_functions(void) { return num_functions; }
const char *stub_name(long at) { return functions[at].name; }
long stub_launches(long at) { return functions[at].launches; }
long stub_descriptors(void) { return num_descriptors; }

// ---------------------------------------------------------------- device and context

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "refused by the stub";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = MAX_SHARED;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = MAX_SHARED + 1024;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    *value = 65536;
    break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = NUM_MULTIPROCESSORS;
    break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  default:
    *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- kernels

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  if (num_functions == MAX_FUNCTIONS)
    return CUDA_ERROR_OUT_OF_MEMORY;
  strncpy(functions[num_functions].name, name, NAME_BYTES - 1);
  *function = (CUfunction)(uintptr_t)++num_functions;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  uintptr_t at = (uintptr_t)function;
  if (at == 0 || at > (uintptr_t)num_functions || arguments == 0)
    return CUDA_ERROR_INVALID_HANDLE;
  if (config->gridDimX == 0 || config->gridDimX > INT32_MAX)
    return CUDA_ERROR_INVALID_VALUE;
  if (config->gridDimY == 0 || config->gridDimY > 65535 || config->gridDimZ == 0 || config->gridDimZ > 65535)
    return CUDA_ERROR_INVALID_VALUE;
  if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024 || config->sharedMemBytes > MAX_SHARED)
    return CUDA_ERROR_INVALID_VALUE;
  functions[at - 1].launches++;
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- descriptors of tensors, for bulk copies

// What the driver's documentation requires of a tiled descriptor.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  if (rank == 0 || rank > 5 || (uintptr_t)address % 16)
    return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t at = 0; at < rank; at++)
    if (dims[at] == 0 || dims[at] > ((cuuint64_t)1 << 32) || box[at] == 0 || box[at] > 256 ||
        element_strides[at] == 0 || element_strides[at] > 8)
      return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t at = 0; at + 1 < rank; at++)
    if (strides[at] % 16 || strides[at] >= ((cuuint64_t)1 << 40))
      return CUDA_ERROR_INVALID_VALUE;
  num_descriptors++;
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *dims, const cuuint64_t *strides, const int *lower, const int *upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *element_strides,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return CUDA_ERROR_INVALID_VALUE;
}
